"""Import: a released checkpoint becomes an Orbax one, piece by piece, in parallel, and after a kill from where it was.

The work is cut into units: a large entry by itself, or the small ones of a layer. A unit fills a database of its own,
and a file in `import/` says that it is complete, with its checksums; an unfinished unit is removed and done again.
Hosts take ranges of units. Whoever finds all units complete makes the tree of them; its `_METADATA` comes last.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts
from rich.console import Console

from k3jax.checkpoint import arrays, orbax_io
from k3jax.checkpoint.folder import Folder, is_remote
from k3jax.checkpoint.hf_import import HFCheckpoint
from k3jax.checkpoint.names import PAD, Entry
from k3jax.checkpoint.safetensors_dir import CheckpointError
from k3jax.checkpoint.side_files import PLAN, side_files
from k3jax.checkpoint.source import Piece, entry_bytes, pieces
from k3jax.checkpoint.work import Buffers, Meter, check_space, checksum, metered, run

JOURNAL = "import"  # folder with a file for each complete unit
_LARGE = 8 << 20  # bytes of an entry that is a unit by itself


@dataclass(frozen=True)
class Host:
    """This host's part of an import: number `index` of `count`."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Host:
        """From "INDEX/COUNT"; raises `CheckpointError`."""
        index, _, count = text.partition("/")
        if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
            raise CheckpointError(f"--host {text}: expected INDEX/COUNT with INDEX from 0 to COUNT - 1, such as 0/4")
        return cls(int(index), int(count))


@dataclass(eq=False)
class Unit:
    """Entries that are complete together, and what is left of them."""

    number: int
    entries: list[Entry]
    nbytes: int
    checksums: dict[str, int] = field(default_factory=dict)
    left: int = 0  # pieces
    lock: threading.Lock = field(default_factory=threading.Lock)


def import_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    workers: int,
    host: Host | None = None,
    console: Console | None = None,
) -> bool:
    """Import the released checkpoint at `source` to `target`, or continue it; whether all of it is there now.

    False where other hosts' units are missing. Raises `CheckpointError` or `ConfigError` with one line.
    """
    job = Importer(HFCheckpoint.open(source), Folder.at(target))
    return job.run(workers=workers, host=host or Host(), console=console or Console(stderr=True))


@dataclass(frozen=True)
class Importer:
    """One import: its source, its target, and its units."""

    source: HFCheckpoint
    target: Folder

    @cached_property
    def units(self) -> list[Unit]:
        """All of it, in the order of the model."""
        found: list[Unit] = []
        for _, group in itertools.groupby(self.source.entries, _layer):
            sized = [(entry, entry_bytes(self.source, entry)) for entry in group]
            small = [one for one in sized if one[1] < _LARGE]
            for part in (small, *([one] for one in sized if one[1] >= _LARGE)):
                if part:
                    found.append(Unit(len(found), [entry for entry, _ in part], sum(nbytes for _, nbytes in part)))
        return found

    def share(self, host: Host) -> list[Unit]:
        """The units of one host: a range with its part of the bytes."""
        total, before, mine = sum(unit.nbytes for unit in self.units), 0, []
        for unit in self.units:
            middle = before + unit.nbytes / 2
            if host.index <= middle * host.count / total < host.index + 1:
                mine.append(unit)
            before += unit.nbytes
        return mine

    def complete_units(self) -> set[int]:
        """Numbers of the units that are complete."""
        return {int(name) for name in self.target.names(f"{JOURNAL}/")}

    def run(self, *, workers: int, host: Host, console: Console) -> bool:
        """Do what is left of this host's units, and finish where all are complete."""
        self._claim()
        if self._finished():
            console.print(f"{self.target}: the import is complete", highlight=False, soft_wrap=True)
            return True
        complete = self.complete_units()
        todo = [unit for unit in self.share(host) if unit.number not in complete]
        nbytes = sum(unit.nbytes for unit in todo)
        check_space(self.target, nbytes)
        with metered(f"import to {self.target}", nbytes, console) as meter:
            _Writer(self, meter).run(todo, workers)
        missing = len(self.units) - len(self.complete_units())
        if missing:
            console.print(f"{missing} units of other hosts are still to come", highlight=False, soft_wrap=True)
            return False
        self._finish()
        return True

    def _finished(self) -> bool:
        return (self.target / orbax_io.WEIGHTS).exists(arrays.METADATA)

    def _claim(self) -> None:
        """Begin, or see that what is there is this import."""
        if not is_remote(self.target.path):
            try:
                Path(self.target.path).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise CheckpointError(f"{self.target}: cannot be a directory ({error.strerror})") from error
        plan = {"source": self._fingerprint(), "units": len(self.units), "bytes": sum(u.nbytes for u in self.units)}
        if self.target.exists(PLAN):
            if json.loads(self.target.read(PLAN)) != plan:
                raise CheckpointError(f"{self.target}: holds an import of another checkpoint; choose another folder")
        elif not is_remote(self.target.path) and Path(self.target.path).is_dir() and os.listdir(self.target.path):
            raise CheckpointError(f"{self.target}: is not empty; choose another folder")
        else:
            self.target.write(PLAN, json.dumps(plan).encode())

    def _fingerprint(self) -> str:
        digest = hashlib.sha256(json.dumps(orbax_io.model_record(self.source.config)).encode())
        for name, tensor in sorted(self.source.files.tensors.items()):
            digest.update(f"{name} {tensor.dtype} {tensor.shape} {tensor.file.name} {tensor.offset}\n".encode())
        return digest.hexdigest()

    def _finish(self) -> None:
        """Records, side files and the tree; the journal goes when the tree is complete."""
        checksums: dict[str, int] = {}
        for unit in self.units:
            checksums |= json.loads(self.target.read(f"{JOURNAL}/{unit.number:06d}"))
        records: dict[str, Any] = {orbax_io.MODEL: orbax_io.model_record(self.source.config)}
        for name, record in (records | {orbax_io.CHECKSUMS: checksums}).items():
            (self.target / name).write(orbax_io.RECORD, json.dumps(record).encode())
        for name, content in side_files(self.source.files.folder).items():
            self.target.write(name, content)
        weights = self.target / orbax_io.WEIGHTS
        arrays.merge(weights, [unit.number for unit in self.units])
        names = [name for unit in self.units for entry in unit.entries for name in entry.arrays if name != PAD]
        arrays.write_metadata(weights, names)
        self.target.delete(f"{JOURNAL}/")


class _Writer:
    """The workers of one run."""

    def __init__(self, job: Importer, meter: Meter) -> None:
        self._job, self._meter = job, meter
        self._weights = job.target / orbax_io.WEIGHTS
        self._context = ts.Context()
        self._buffers = Buffers()

    def run(self, units: list[Unit], workers: int) -> None:
        run((task for unit in units for task in self._tasks(unit)), self._write, workers=workers)

    def _tasks(self, unit: Unit) -> Iterator[_Task]:
        """A unit's work, once its turn comes: the pieces of a large entry, or all small entries in one transaction."""
        arrays.clear_unit(self._weights, unit.number)
        if len(unit.entries) > 1:
            transaction, unit.left = ts.Transaction(), 1
            parts = [(self._whole(entry), self._create(unit, entry, transaction)) for entry in unit.entries]
            yield _Task(unit, parts, transaction)
            return
        opened = self._create(unit, unit.entries[0], None)
        rows = math.lcm(4, *(arrays.chunk_rows(array) for array in opened if array is not None))
        cut = list(pieces(self._job.source, unit.entries[0], multiple=rows))
        unit.left = len(cut)
        yield from (_Task(unit, [(piece, opened)]) for piece in cut)

    def _create(self, unit: Unit, entry: Entry, transaction: ts.Transaction | None) -> arrays.Opened:
        dtype = self._job.source.dtype(entry)
        return arrays.create(self._weights, unit.number, entry, dtype, self._context, transaction)

    def _whole(self, entry: Entry) -> Piece:
        return Piece(entry, 0, entry.shape[0])

    def _write(self, task: _Task) -> None:
        unit, writes, sums = task.unit, [], {}
        for piece, opened in task.parts:
            entry, source = piece.entry, self._job.source
            row = entry.row_elements * source.dtype(entry).itemsize
            nbytes = row * (piece.stop - piece.start)
            buffer = None if task.transaction else self._buffers.get(nbytes)
            block = source.read(entry, piece.start, piece.stop, buffer)
            sums[entry.name] = checksum(block.reshape(-1).view(np.uint8), piece.start * row)
            writes += [
                array[entry.rows(piece.start, piece.stop)].write(part, can_reference_source_data_indefinitely=True)
                for array, part in zip(opened, _parts(entry, block), strict=True)
                if array is not None
            ]
        for written in writes:  # all is on disk, and the buffer free again
            written.result()
        if task.transaction:
            task.transaction.commit_async().result()
        self._complete(unit, sums, task.nbytes(self._job.source))

    def _complete(self, unit: Unit, sums: dict[str, int], nbytes: int) -> None:
        """One task of a unit is done."""
        self._meter.add(nbytes)
        with unit.lock:
            for name, total in sums.items():
                unit.checksums[name] = (unit.checksums.get(name, 0) + total) % 2**32
            unit.left -= 1
            if unit.left == 0:
                self._job.target.write(f"{JOURNAL}/{unit.number:06d}", json.dumps(unit.checksums).encode())


@dataclass(frozen=True)
class _Task:
    """What a worker does at a time: pieces of a unit, and the arrays that they go to."""

    unit: Unit
    parts: list[tuple[Piece, arrays.Opened]]
    transaction: ts.Transaction | None = None  # that makes the arrays and all they hold at once

    def nbytes(self, source: HFCheckpoint) -> int:
        sizes = (p.entry.row_elements * (p.stop - p.start) * source.dtype(p.entry).itemsize for p, _ in self.parts)
        return sum(sizes)


def _parts(entry: Entry, block: np.ndarray) -> list[np.ndarray]:
    """What each of the entry's arrays gets of a block."""
    if entry.split_axis is None:
        return [block]
    return np.split(block, np.cumsum(entry.part_sizes())[:-1], axis=entry.split_axis)


def _layer(entry: Entry) -> str:
    """What the small entries of a unit share."""
    head = entry.name.split(".")[:3]
    return ".".join(head) if head[:2] == ["model", "layers"] else entry.family.where
