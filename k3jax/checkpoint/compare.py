"""Comparison of two checkpoints, byte for byte or in numbers, and of one with its own checksums."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from rich.console import Console
from rich.table import Table

from k3jax.checkpoint import arrays, orbax_io
from k3jax.checkpoint.arrays import ArrayTree, DamagedError
from k3jax.checkpoint.convert import Converted
from k3jax.checkpoint.folder import Folder
from k3jax.checkpoint.names import Entry
from k3jax.checkpoint.orbax_tree import OrbaxCheckpoint
from k3jax.checkpoint.safetensors_dir import CheckpointError
from k3jax.checkpoint.source import Piece, Source, entry_bytes, pieces
from k3jax.checkpoint.work import Buffers, checksum, metered, run


def differences(a: Source, b: Source, *, workers: int, console: Console | None = None) -> list[str]:
    """A line for each tensor that is not the same in both: missing, of another shape or dtype, or other bytes."""
    ours, theirs = ({entry.name: entry for entry in source.entries} for source in (a, b))
    found = [f"{_named(ours[name])}: only in the first" for name in ours if name not in theirs]
    found += [f"{_named(theirs[name])}: only in the second" for name in theirs if name not in ours]
    same = []
    for name in ours.keys() & theirs.keys():
        what = _unlike(a, ours[name], b, theirs[name])
        if what:
            found.append(f"{_named(ours[name])}: {what}")
        else:
            same.append(ours[name])
    comparison = _Comparison(a, b, theirs)
    order = {name: i for i, name in enumerate(ours)}
    same.sort(key=lambda entry: order[entry.name])
    with metered("compared", sum(entry_bytes(a, entry) for entry in same), console) as meter:

        def compare(piece: Piece) -> None:
            comparison.compare(piece)
            meter.add(entry_bytes(a, piece.entry) // piece.entry.shape[0] * (piece.stop - piece.start))

        run((piece for entry in same for piece in pieces(a, entry)), compare, workers=workers)
    return sorted(found) + sorted(f"{name}: other bytes" for name in comparison.unlike)


def _named(entry: Entry) -> str:
    return entry.family.prefix + entry.name + (f" ({entry.experts} tensors)" if entry.experts else "")


def _unlike(a: Source, ours: Entry, b: Source, theirs: Entry) -> str:
    """What differs before any byte is read; empty where nothing does."""
    if ours.tensor_shape != theirs.tensor_shape or ours.experts != theirs.experts:
        return f"shape {ours.tensor_shape} in the first, {theirs.tensor_shape} in the second"
    if a.dtype(ours) != b.dtype(theirs):
        return f"dtype {a.dtype(ours)} in the first, {b.dtype(theirs)} in the second"
    return ""


@dataclass
class _Comparison:
    a: Source
    b: Source
    theirs: dict[str, Entry]
    unlike: set[str] = field(default_factory=set)
    _first: Buffers = field(default_factory=Buffers)
    _second: Buffers = field(default_factory=Buffers)

    def compare(self, piece: Piece) -> None:
        entry, other = piece.entry, self.theirs[piece.entry.name]
        nbytes = entry_bytes(self.a, entry) // entry.shape[0] * (piece.stop - piece.start)
        one = self.a.read(entry, piece.start, piece.stop, self._first.get(nbytes))
        two = self.b.read(other, piece.start, piece.stop, self._second.get(nbytes))
        if entry.experts is None:
            if not _equal(one, two):
                self.unlike.add(entry.family.prefix + entry.name)
            return
        for i, expert in enumerate(range(piece.start, piece.stop)):
            if not _equal(one[i], two[i]):
                self.unlike.add(entry.family.prefix + entry.tensor(expert))


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether the bytes are; NaN is equal to itself, and 0 is not -0."""
    return np.array_equal(_bytes(a), _bytes(b))


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def damaged(path: str | os.PathLike[str], *, workers: int, console: Console | None = None) -> list[str]:
    """A line for each array of an Orbax checkpoint whose bytes have not the checksum that was noted for it."""
    checkpoint = OrbaxCheckpoint.open(path)
    try:
        noted = orbax_io.read_record(checkpoint.folder, orbax_io.CHECKSUMS)
    except orbax_io.DamagedError as error:
        raise CheckpointError(f"{checkpoint.folder}: has no checksums; name a second checkpoint") from error
    if orbax_io.WEIGHTS in noted:
        return [line for tree, sums in noted.items() for line in _damaged_arrays(checkpoint.folder / tree, sums)]
    return _damaged_entries(checkpoint, noted, workers=workers, console=console)


def _damaged_arrays(place: Folder, noted: dict[str, int]) -> list[str]:
    """Of a training run's tree."""
    tree, found = ArrayTree(place), []
    for name, total in noted.items():
        try:
            array = tree.open(name)
            leaf = np.empty(array.shape, array.dtype.numpy_dtype)
            arrays.read_into(leaf, array, name)
        except DamagedError as error:
            found.append(f"{place}: {error}")
            continue
        words = leaf.reshape(-1).view(f"u{leaf.itemsize}").astype("<u4", copy=False)
        if checksum(words.view(np.uint8)) != total:
            found.append(f"{place}: {name}: other bytes than were saved")
    return found


def _damaged_entries(
    checkpoint: OrbaxCheckpoint, noted: dict[str, int], *, workers: int, console: Console | None
) -> list[str]:
    """Of an import."""
    sums: dict[str, int] = {}
    lost: dict[str, str] = {}
    lock, buffers = threading.Lock(), Buffers()
    total = sum(entry_bytes(checkpoint, entry) for entry in checkpoint.entries)
    with metered("checked", total, console) as meter:

        def check(piece: Piece) -> None:
            entry = piece.entry
            row = entry_bytes(checkpoint, entry) // entry.shape[0]
            try:
                nbytes = row * (piece.stop - piece.start)
                block = checkpoint.read(entry, piece.start, piece.stop, buffers.get(nbytes))
                found = checksum(_bytes(block), piece.start * row)
            except CheckpointError as error:
                with lock:
                    lost[entry.name] = str(error)
                return
            with lock:
                sums[entry.name] = (sums.get(entry.name, 0) + found) % 2**32
            meter.add(row * (piece.stop - piece.start))

        cut = (piece for entry in checkpoint.entries for piece in pieces(checkpoint, entry, multiple=4))
        run(cut, check, workers=workers)
    bad = [e for e in checkpoint.entries if e.name in lost or sums.get(e.name) != noted.get(e.name)]
    return [f"{_named(entry)}: {lost.get(entry.name, 'other bytes than were imported')}" for entry in bad]


@dataclass
class FamilyDifference:
    """Two checkpoints' values in one family: how many differ, the largest difference, and squares for the RMS."""

    elements: int = 0
    unlike: int = 0
    largest: float = 0.0
    square: float = 0.0
    reference: float = 0.0

    def add(self, a: np.ndarray, b: np.ndarray) -> None:
        """Count two blocks of values."""
        one, two = a.astype(np.float32), b.astype(np.float32)
        gap = np.abs(one - two)
        self.elements += one.size
        self.unlike += int(np.count_nonzero(gap != 0))  # a NaN counts
        self.largest = max(self.largest, float(gap.max(initial=0)))
        self.square += float(np.sum(np.square(gap, dtype=np.float64)))
        self.reference += float(np.sum(np.square(one, dtype=np.float64)))

    @property
    def relative(self) -> float:
        """RMS of the difference over the RMS of the first."""
        return math.sqrt(self.square / self.reference) if self.reference else float(self.square > 0)


def difference_in_numbers(a: Source, b: Source) -> dict[str, FamilyDifference]:
    """{family: difference}; MXFP4 experts are compared by their values. Raises `CheckpointError` on other shapes."""
    first, second = (Converted(source, experts="float32") for source in (a, b))
    theirs = {entry.name: entry for entry in second.entries}
    found: dict[str, FamilyDifference] = {}
    for entry in first.entries:
        other = theirs.get(entry.name)
        if other is None or other.shape != entry.shape:
            shape = "nothing" if other is None else str(other.shape)
            raise CheckpointError(f"{_named(entry)}: {entry.shape} in the first checkpoint, {shape} in the second")
        for piece in pieces(first, entry):
            family = found.setdefault(entry.family.name, FamilyDifference())
            blocks = (s.read(e, piece.start, piece.stop) for s, e in ((first, entry), (second, other)))
            family.add(*blocks)
    return found


def show_differences(found: dict[str, FamilyDifference], console: Console) -> None:
    """Print a table of the families, and below it their number."""
    table = Table("family", "values", "differing", "largest", "relative RMS")
    for name, family in found.items():
        numbers = (f"{family.elements:,}", f"{family.unlike:,}", f"{family.largest:.3g}", f"{family.relative:.3g}")
        table.add_row(name, *numbers)
    for column in table.columns[1:]:
        column.justify = "right"
    console.print(table)
    unlike = sum(family.unlike > 0 for family in found.values())
    console.print(f"{unlike} of {len(found)} families differ", highlight=False)


def show_lines(lines: Iterable[str], *, limit: int = 200) -> None:
    """Print lines, no more than `limit` of them."""
    lines = list(lines)
    for line in lines[:limit]:
        print(line)
    if len(lines) > limit:
        print(f"and {len(lines) - limit} more")
