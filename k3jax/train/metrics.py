"""What a run reports: `metrics.jsonl`, TensorBoard events, the loss curve, and the progress bar."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

METRICS_FILE, CURVE_FILE, LOG_FILE, BOARD = "metrics.jsonl", "loss.png", "train.log", "tensorboard"
# Of a record: what depends on the machine's speed, and so differs between two runs of one config.
TIMED = ("tokens_per_s", "mfu", "goodput")


class MetricsLog:
    """`RUN/metrics.jsonl`: one JSON object a logged step, each written through at once; TensorBoard gets the same."""

    def __init__(self, run_dir: Path, *, last_step: int) -> None:
        """Continue the file after `last_step`: records of later steps are dropped, they will be computed again."""
        from tensorboardX import SummaryWriter

        self.path = run_dir / METRICS_FILE
        kept = [record for record in read_metrics(run_dir) if record["step"] <= last_step]
        scratch = self.path.with_suffix(".tmp")
        scratch.write_text("".join(json.dumps(record) + "\n" for record in kept))
        os.replace(scratch, self.path)
        self._file = self.path.open("a", buffering=1)
        self._board = SummaryWriter(str(run_dir / BOARD), purge_step=last_step + 1, write_to_disk=True)

    def write(self, record: dict[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """Append one record; the finite numbers of `arrays` become histograms of its step."""
        self._file.write(json.dumps(record) + "\n")
        for name, value in record.items():
            if name != "step":
                self._board.add_scalar(name, value, record["step"])
        for name, array in (arrays or {}).items():
            finite = array[np.isfinite(array)]
            if finite.size:  # a step that is not finite may have none, and an empty histogram is an error
                self._board.add_histogram(name, finite, record["step"])

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        self._board.close()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The records of a run so far; a last line cut short by a kill is left out."""
    path = run_dir / METRICS_FILE
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def draw_curve(run_dir: Path) -> None:
    """Draw `RUN/loss.png` from the metrics: training and held-out loss over steps."""
    from matplotlib.figure import Figure  # slow to import, and needed once in a while

    records = read_metrics(run_dir)
    held_out = [record for record in records if "eval_loss" in record]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([r["step"] for r in records], [r["loss"] for r in records], lw=0.8, alpha=0.7, label="training")
    axes.plot([r["step"] for r in held_out], [r["eval_loss"] for r in held_out], "o-", ms=4, label="held out")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=run_dir.name)
    axes.grid(alpha=0.3)
    axes.legend()
    scratch = run_dir / f"{CURVE_FILE}.tmp"
    figure.savefig(scratch, format="png", dpi=120)
    os.replace(scratch, run_dir / CURVE_FILE)


class Display:
    """Messages and a progress bar on stderr; where that is no terminal, a line at every twentieth of the run."""

    def __init__(self, steps: int, *, quiet: bool = False) -> None:
        self.console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=quiet)
        self._live = sys.stderr.isatty() and not quiet
        self._every = max(1, steps // 20)
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self._bar = Progress(*columns, console=self.console, disable=not self._live)
        self._task = self._bar.add_task("", total=steps)
        self._steps, self._printed = steps, 0
        self._log: Path | None = None
        self._quiet = quiet

    def keep(self, run_dir: Path) -> None:
        """Append every message from now on to `RUN/train.log` too."""
        self._log = None if self._quiet else run_dir / LOG_FILE

    def message(self, text: str) -> None:
        """One line above the bar."""
        self.console.print(text, markup=False)
        if self._log is not None:
            with self._log.open("a") as file:
                file.write(f"{text}\n")

    def start(self, step: int) -> None:
        """Show the bar at `step`; the time left counts from here."""
        self._printed = step // self._every
        self._bar.update(self._task, completed=step)
        self._bar.start()

    def update(self, step: int, *, loss: float, tokens_per_s: float, seconds_left: float) -> None:
        """Move the bar to `step`."""
        text = f"loss {loss:.3f}  {tokens_per_s:,.0f} tokens/s"
        self._bar.update(self._task, completed=step, description=text)
        if not self._live and (step // self._every > self._printed or step == self._steps):
            self._printed = step // self._every
            self.message(f"step {step}/{self._steps}  {text}  {seconds_left / 60:.1f} min left")

    def stop(self) -> None:
        """Take the bar down."""
        self._bar.stop()
