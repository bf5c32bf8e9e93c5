"""A run on one page: `python -m k3jax.train.report RUN [--out FILE.html]`.

The page holds everything it shows: plots as SVG inside it, no script, nothing from a network. It can be made while the
run goes on. Where the newest checkpoint is small enough to be read here, it also shows how the reads of Attention
Residuals mix depth, and TensorBoard gets that picture.
"""

from __future__ import annotations

import argparse
import html
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from k3jax.checkpoint.orbax_io import CHECKPOINTS, WEIGHTS, list_steps
from k3jax.train.goodput import GOODPUT_FILE, PHASES, STEP
from k3jax.train.metrics import BOARD, LOG_FILE, read_metrics
from k3jax.train.run_dir import CONFIG_FILE, flat, read_config

PAGE = "report.html"
READ_BYTES = 4 * 2**30  # of weights that a report reads
LOG_LINES = 40

# Plots: a title, what the axis measures, and which of a record's numbers (by name, or by the beginning of the name).
PLOTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Loss", "nats a token", ("loss", "eval_loss", "mtp_loss")),
    ("Learning rate", "", ("lr",)),
    ("Gradient norm", "before clipping", ("grad_norm", "grad_norm/")),
    ("Update norm", "before the learning rate", ("update_norm/",)),
    ("Update of a head", "root mean square", ("head_update_rms/",)),
    ("Largest attention score", "of any head", ("max_logit",)),
    ("Expert load", "largest over mean", ("max_load",)),
    ("Experts without a token", "count", ("dead_experts", "dropped")),
    ("Router bias", "range", ("bias_range",)),
    ("Speed", "tokens a second", ("tokens_per_s",)),
    ("MFU", "share of the peak", ("mfu",)),
    ("Padding and skipped updates", "share", ("padding", "skipped")),
)
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:75em;padding:0 1em;color:#222;background:#fff}
h1{font-size:1.5em}h2{font-size:1.1em;margin-top:2em}table{border-collapse:collapse}
td,th{padding:.15em 1em .15em 0;text-align:left;vertical-align:top}td.n{text-align:right}
.plots{display:flex;flex-wrap:wrap;gap:1em}pre{background:#f5f5f5;padding:.7em;overflow-x:auto;font-size:13px}
"""


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the page of a run and return its path; raises `ValueError` where the folder holds no run."""
    if not (run_dir / CONFIG_FILE).exists():
        raise ValueError(f"{run_dir} holds no run: {CONFIG_FILE} is missing")
    config, records = read_config(run_dir / CONFIG_FILE), read_metrics(run_dir)
    figures = [figure for plot in PLOTS if (figure := _plot(records, *plot))]
    parts = [
        f"<h1>{html.escape(run_dir.resolve().name)}</h1>",
        _table(_summary(config, records)),
        f'<div class="plots">{"".join(map(_svg, figures))}</div>',
        _time(run_dir),
        _depth(run_dir),
        _log(run_dir),
        f"<h2>Config</h2>{_table(list(flat(config).items()))}",
    ]
    title = html.escape(f"{run_dir.resolve().name}: training run")
    page = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    out = out or run_dir / PAGE
    out.write_text(f"{page}<body>{''.join(parts)}</body></html>\n", encoding="utf-8")
    return out


def _summary(config: dict[str, Any], records: Sequence[dict[str, Any]]) -> list[tuple[str, Any]]:
    model, data = config["model"], config["data"]
    rows = [
        ("model", f"{model['name']}: {model['num_layers']} layers of width {model['width']}"),
        ("data", ", ".join(data.get("mixture") or [data["source"]])),
    ]
    if not records:
        return [*rows, ("steps", "none logged yet")]
    last, held_out = records[-1], [record for record in records if "eval_loss" in record]
    rows += [("steps", f"{last['step']:,} of {config['steps']:,}"), ("training loss", f"{last['loss']:.4f}")]
    if held_out:
        best = min(held_out, key=lambda record: record["eval_loss"])
        rows.append(
            ("held-out loss", f"{held_out[-1]['eval_loss']:.4f}; best {best['eval_loss']:.4f} at {best['step']:,}")
        )
    rows.append(
        ("speed", f"{last['tokens_per_s']:,.0f} tokens/s" + (f", MFU {last['mfu']:.1%}" if "mfu" in last else ""))
    )
    return rows


def _plot(records: Sequence[dict[str, Any]], title: str, unit: str, names: Sequence[str]) -> Figure | None:
    """Lines over steps of all numbers with these names; None where no record has any."""
    known = dict.fromkeys(key for record in records for key in record)
    found = [key for key in known if any(key == name or (name[-1] == "/" and key.startswith(name)) for name in names)]
    if not found:
        return None
    figure, axes = _axes(title)
    for key in found:
        points = [(record["step"], record[key]) for record in records if key in record]
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, "o-" if len(points) < 30 else "-", ms=3, lw=1, label=key)
    axes.set(xlabel="step", ylabel=unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if len(found) > 1:
        axes.legend(fontsize=8)
    return figure


def _time(run_dir: Path) -> str:
    """Where the time went."""
    path = run_dir / GOODPUT_FILE
    if not path.exists():
        return ""
    saved = json.loads(path.read_text())
    seconds = [(phase, saved["seconds"][phase]) for phase in PHASES if saved["seconds"][phase] > 0]
    total = sum(value for _, value in seconds)
    figure, axes = _axes("", height=1.3)
    left = 0.0
    for phase, value in seconds:
        axes.barh(0, value / total, left=left, label=f"{phase} {value / total:.1%}")
        left += value / total
    axes.set(xlim=(0, 1), yticks=[], xticks=[])
    axes.legend(fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 0))
    share = saved["seconds"][STEP] / total
    what = f"{share:.1%} of {total / 3600:.2f} hours in {saved['processes']} processes went into steps that counted"
    return f"<h2>Time</h2><p>Goodput: {what}.</p>{_svg(figure)}"


def _depth(run_dir: Path) -> str:
    """How the newest checkpoint's reads mix depth; nothing where it is too large to be read here."""
    steps = list_steps(run_dir / CHECKPOINTS)
    if not steps or _size(run_dir / CHECKPOINTS / str(steps[-1]) / WEIGHTS) > READ_BYTES:
        return ""
    shares = _shares_of_run(run_dir)
    figure, axes = _axes("", height=2.0 + 0.1 * len(shares))
    picture = axes.imshow(shares, cmap="viridis", aspect="auto", vmin=0, interpolation="nearest")
    axes.set(xlabel="source: snapshots in order, then the live sum", ylabel="layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(picture)
    _to_board(run_dir, shares, steps[-1])
    what = "share of each source in a layer's first read; the last row is the read before the head"
    return f"<h2>Attention Residuals after step {steps[-1]:,}</h2><p>The {what}.</p>{_svg(figure)}"


def _shares_of_run(run_dir: Path) -> Float[np.ndarray, "reads sources"]:
    """On text that every machine has: this module's own."""
    import k3jax
    from k3jax.train.depth import depth_shares

    model = k3jax.load(run_dir)
    text = np.frombuffer(Path(__file__).read_bytes()[:256], np.uint8).astype(np.int32)
    return np.asarray(depth_shares(model, text[None] % model.config.vocab_size), np.float32)


def _to_board(run_dir: Path, shares: Float[np.ndarray, "reads sources"], step: int) -> None:
    from tensorboardX import SummaryWriter

    squares = np.kron(shares / max(float(shares.max()), 1e-9), np.ones((8, 8)))
    with SummaryWriter(str(run_dir / BOARD)) as board:
        board.add_image("attn_res", (255 * squares).astype(np.uint8), step, dataformats="HW")


def _log(run_dir: Path) -> str:
    path = run_dir / LOG_FILE
    if not path.exists():
        return ""
    lines = path.read_text().splitlines()[-LOG_LINES:]
    return f"<h2>Last messages</h2><pre>{html.escape(chr(10).join(lines))}</pre>"


def _table(rows: Sequence[tuple[str, Any]]) -> str:
    cells = (f"<tr><th>{html.escape(str(key))}</th><td>{html.escape(str(value))}</td></tr>" for key, value in rows)
    return f"<table>{''.join(cells)}</table>"


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _axes(title: str, *, height: float = 2.8) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5.2, height), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontsize=10)
    return figure, axes


def _svg(figure: Figure) -> str:
    """The figure as an element of the page; text stays text."""
    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "k3jax"}):
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return buffer.getvalue().partition("?>")[2].partition(">")[2]  # past the XML and document type lines


def main() -> int:
    """Run; returns the exit code."""
    parser = argparse.ArgumentParser(prog="k3jax.train.report", description="Write a training run's page.")
    parser.add_argument("run", type=Path, help="the run_dir of a run, finished or not")
    parser.add_argument("--out", type=Path, help=f"where to write it (RUN/{PAGE})")
    options = parser.parse_args()
    try:
        print(write_report(options.run, options.out))
    except (OSError, ValueError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
