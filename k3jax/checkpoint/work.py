"""What import, export and comparison share: workers over pieces, progress, checksums, room on the disk."""

from __future__ import annotations

import itertools
import os
import resource
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from k3jax.checkpoint.folder import Folder, is_remote
from k3jax.checkpoint.safetensors_dir import CheckpointError

T = TypeVar("T")
_SPARE = 256 << 20  # bytes that stay free on a disk
_ROW = 1 << 16  # words that a checksum sums at a time


def run(tasks: Iterable[T], work: Callable[[T], None], *, workers: int) -> None:
    """Do `work` for every task on `workers` threads, in order; the first error stops the rest and is raised."""
    left = iter(tasks)
    with ThreadPoolExecutor(workers) as pool:
        pending: set[Future[None]] = {pool.submit(work, task) for task in itertools.islice(left, workers)}
        while pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for finished in done:
                finished.result()
            pending |= {pool.submit(work, task) for task in itertools.islice(left, len(done))}


class Buffers(threading.local):
    """A buffer for each thread, used again for each piece: fresh memory costs more than reading into it."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.uint8)

    def get(self, nbytes: int) -> np.ndarray:
        """Uint8 [n], n at least `nbytes`."""
        if self._buffer.size < nbytes:
            self._buffer = np.empty(nbytes, np.uint8)
        return self._buffer


class Meter:
    """Bytes done: a bar with the rate and the time left where the output is a terminal, and a summary at the end."""

    def __init__(self, label: str, total: int, progress: Progress) -> None:
        self.label, self.done = label, 0
        self._began, self._progress = time.monotonic(), progress
        self._task = progress.add_task(label, total=total)
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """`nbytes` more are done."""
        with self._lock:
            self.done += nbytes
        self._progress.advance(self._task, nbytes)

    def summary(self) -> str:
        """One line: bytes, seconds, GB/s, and the most memory that the process ever held."""
        seconds = max(time.monotonic() - self._began, 1e-9)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        rate = f"{self.done / 1e9 / seconds:.2f} GB/s"
        return f"{self.label}: {self.done:,} bytes in {seconds:.1f} s, {rate}, peak memory {peak / 2**30:.2f} GiB"


@contextmanager
def metered(label: str, total: int, console: Console | None = None) -> Iterator[Meter]:
    """A meter whose summary is printed when the work is done."""
    console = console or Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    shown = console.is_terminal
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not shown) as progress:
        meter = Meter(label, total, progress)
        yield meter
    console.print(meter.summary(), highlight=False, soft_wrap=True)


def check_space(folder: Folder, needed: int) -> None:
    """Raise `CheckpointError` where the disk of a local folder has no room for `needed` bytes."""
    if is_remote(folder.path):
        return
    place = next(p for p in (Path(folder.path), *Path(folder.path).parents) if p.exists())
    free = shutil.disk_usage(place).free
    if free < needed + _SPARE:
        raise CheckpointError(
            f"{folder}: {needed:,} bytes are still to be written and {_SPARE:,} stay free, but the disk has {free:,}"
        )


def checksum(raw: np.ndarray, start: int = 0) -> int:
    """Checksum of `raw`, uint8 [n], the bytes from `start` (a multiple of 4) on of something larger.

    The sum of the 4-byte words w_k times 2k + 1, modulo 2^32: what is changed or moved changes it, and those of
    consecutive parts add up to that of the whole.
    """
    tail = raw.size % 4
    words = raw[: raw.size - tail].view("<u4")
    whole = words.size - words.size % _ROW
    total = _weighted(words[:whole].reshape(-1, _ROW), start // 4)
    total += _weighted(words[whole:].reshape(1, -1), start // 4 + whole)
    if tail:
        last = np.zeros(4, np.uint8)
        last[:tail] = raw[raw.size - tail :]
        total += _weighted(last.view("<u4").reshape(1, 1), start // 4 + words.size)
    return total % 2**32


def _weighted(rows: np.ndarray, first: int) -> int:
    """Sum of the words of `rows` [m, n], the first being word `first` of the whole, with their weights."""
    inner = np.einsum("ij,j->i", rows, 2 * np.arange(rows.shape[1], dtype=np.uint32) + 1)
    offsets = ((2 * (first + rows.shape[1] * np.arange(len(rows), dtype=np.uint64))) % 2**32).astype(np.uint32)
    return int(np.sum(inner + offsets * rows.sum(axis=1, dtype=np.uint32), dtype=np.uint64))


def default_workers() -> int:
    """Twice the cores, at least 4 and at most 16: half of them wait for the disk."""
    return min(max(2 * (os.cpu_count() or 1), 4), 16)
