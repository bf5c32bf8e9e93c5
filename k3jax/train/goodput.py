"""Where the time of a run goes, over all the processes that worked on it.

A process is always in one phase. Seconds of a phase add up in `RUN/goodput.json`; time spent on steps that a kill undid
moves from `step` to `lost`. Goodput is the share of `step`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GOODPUT_FILE = "goodput.json"
START, COMPILE, READ, STEP, EVALUATE, SAVE, LOST = "start", "compile", "read", "step", "evaluate", "save", "lost"
PHASES = (START, COMPILE, READ, STEP, EVALUATE, SAVE, LOST)
MARKS = 10  # saved steps that are remembered


@dataclass(kw_only=True)
class Goodput:
    """The clock of a run's phases; it starts in `start`."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    at_step: dict[int, float] = field(default_factory=dict)  # seconds of `step` when a step was saved
    processes: int = 0
    clock: Callable[[], float] = time.monotonic
    phase: str = START  # that the process is in, since `since`
    detail: str = ""
    since: float = 0.0

    @classmethod
    def of_run(
        cls, run_dir: Path, *, step: int, since: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> Goodput:
        """The clock of a run that continues after `step`, in a process that began at `since` (now by default)."""
        goodput = cls(clock=clock, since=clock() if since is None else since)
        path = run_dir / GOODPUT_FILE
        if path.exists():
            goodput._take_up(json.loads(path.read_text()), step)
        goodput.processes += 1
        return goodput

    def _take_up(self, saved: dict[str, Any], step: int) -> None:
        self.seconds |= saved["seconds"]
        self.processes = saved["processes"]
        self.at_step = {int(at): seconds for at, seconds in saved["at_step"].items() if int(at) <= step}
        kept = self.at_step.get(step, 0.0)
        self.seconds[LOST] += self.seconds[STEP] - kept
        self.seconds[STEP] = kept

    @contextmanager
    def during(self, phase: str, detail: str = "") -> Iterator[None]:
        """Be in `phase` inside the `with` block; the phase around it goes on afterwards."""
        before = self.phase, self.detail
        self._enter(phase, detail)
        try:
            yield
        finally:
            self._enter(*before)

    def _enter(self, phase: str, detail: str) -> None:
        now = self.clock()
        self.seconds[self.phase] += now - self.since
        self.phase, self.detail, self.since = phase, detail, now

    def saved(self, step: int) -> None:
        """A checkpoint of `step` was begun: what leads up to it is not lost if it is found again."""
        self._enter(self.phase, self.detail)
        self.at_step = dict(sorted({**self.at_step, step: self.seconds[STEP]}.items())[-MARKS:])

    @property
    def busy(self) -> float:
        """Seconds of steps and of waiting for their data, up to now."""
        now = self.clock() - self.since if self.phase in (READ, STEP) else 0.0
        return self.seconds[READ] + self.seconds[STEP] + now

    @property
    def share(self) -> float:
        """Seconds of steps that counted, of all seconds so far."""
        return self.seconds[STEP] / max(sum(self.seconds.values()), 1e-9)

    def write(self, run_dir: Path) -> None:
        """Bring the file up to date."""
        self._enter(self.phase, self.detail)
        record = {"seconds": self.seconds, "at_step": self.at_step, "processes": self.processes}
        scratch = run_dir / f"{GOODPUT_FILE}.tmp"
        scratch.write_text(json.dumps(record))
        os.replace(scratch, run_dir / GOODPUT_FILE)

    def __str__(self) -> str:
        total = max(sum(self.seconds.values()), 1e-9)
        parts = (f"{phase} {self.seconds[phase] / total:.0%}" for phase in PHASES if self.seconds[phase] >= total / 200)
        return ", ".join(parts)
