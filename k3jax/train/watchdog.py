"""A thread that names a hang: which phase of the run, for how long, and where every thread stands."""

from __future__ import annotations

import faulthandler
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from k3jax.train.goodput import Goodput

STACKS_FILE = "hang.txt"


class Watchdog:
    """Watches a run's clock inside a `with` block; a phase longer than `limit` seconds (0: none) is reported.

    The report is one line, and the stacks of all threads in `RUN/hang.txt`. A phase that goes on is reported again
    after twice the time. Nothing is ended: whether to start again is for whoever reads the line.
    """

    def __init__(self, goodput: Goodput, *, limit: float, run_dir: Path, report: Callable[[str], None]) -> None:
        self._goodput, self._limit, self._report = goodput, limit, report
        self._stacks = run_dir / STACKS_FILE
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        began, patience = self._goodput.since, self._limit
        while self._limit and not self._done.wait(self._limit / 20):
            phase, detail, since = self._goodput.phase, self._goodput.detail, self._goodput.since
            if since != began:
                began, patience = since, self._limit
            if self._goodput.clock() - since > patience:
                with self._stacks.open("a") as file:
                    faulthandler.dump_traceback(file, all_threads=True)
                seconds = self._goodput.clock() - since
                self._report(f"hang? in {phase} ({detail}) for {seconds:.0f} s; all threads' stacks: {self._stacks}")
                patience *= 2
