"""What a run reports: `metrics.jsonl`, the loss curve, and the progress bar."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

METRICS_FILE, CURVE_FILE = "metrics.jsonl", "loss.png"


class MetricsLog:
    """`RUN/metrics.jsonl`: one JSON object a logged step, each written through at once."""

    def __init__(self, run_dir: Path, *, last_step: int) -> None:
        """Continue the file after `last_step`: records of later steps are dropped, they will be computed again."""
        self.path = run_dir / METRICS_FILE
        kept = [record for record in read_metrics(run_dir) if record["step"] <= last_step]
        scratch = self.path.with_suffix(".tmp")
        scratch.write_text("".join(json.dumps(record) + "\n" for record in kept))
        os.replace(scratch, self.path)
        self._file = self.path.open("a", buffering=1)

    def write(self, record: dict[str, Any]) -> None:
        """Append one record."""
        self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


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

    def __init__(self, steps: int) -> None:
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._live = sys.stderr.isatty()
        self._every = max(1, steps // 20)
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self._bar = Progress(*columns, console=self.console, disable=not self._live)
        self._task = self._bar.add_task("", total=steps)
        self._steps, self._printed = steps, 0

    def message(self, text: str) -> None:
        """One line above the bar."""
        self.console.print(text, markup=False)

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
