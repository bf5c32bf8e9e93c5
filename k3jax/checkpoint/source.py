"""What loading, conversion and comparison ask of a checkpoint, in whichever of the two layouts it lies."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from k3jax.checkpoint.hf_import import HFCheckpoint
from k3jax.checkpoint.names import Entry
from k3jax.checkpoint.orbax_tree import OrbaxCheckpoint
from k3jax.checkpoint.safetensors_dir import SafetensorsDir
from k3jax.config import ModelConfig

PIECE_BYTES = 64 << 20  # that a worker holds at a time
_READERS = 4  # tensors read at a time into one leaf


class Source(Protocol):
    """A checkpoint whose entries can be read in pieces."""

    @property
    def config(self) -> ModelConfig:
        """The model's."""

    @property
    def entries(self) -> list[Entry]:
        """All that it holds."""

    def dtype(self, entry: Entry) -> np.dtype:
        """Of an entry's tensors."""

    def read(self, entry: Entry, start: int, stop: int, buffer: np.ndarray | None = None) -> np.ndarray:
        """Rows `start` to `stop` of an entry's block, perhaps in `buffer`."""

    def fill(self, out: np.ndarray, entry: Entry, part: int, index: tuple[slice, ...]) -> None:
        """Copy into `out` a slice of the entry's array number `part`, in the model's order of axes."""


def open_source(path: str | os.PathLike[str]) -> Source:
    """The checkpoint at `path`, safetensors or Orbax; raises `CheckpointError` or `ConfigError` with one line."""
    return HFCheckpoint.open(path) if SafetensorsDir.present(path) else OrbaxCheckpoint.open(path)


def entry_bytes(source: Source, entry: Entry) -> int:
    """Bytes of an entry's tensors."""
    return math.prod(entry.shape) * source.dtype(entry).itemsize


@dataclass(frozen=True)
class Piece:
    """Rows of an entry's block: what a worker handles at a time."""

    entry: Entry
    start: int
    stop: int


def pieces(source: Source, entry: Entry, *, multiple: int = 1) -> Iterator[Piece]:
    """An entry in pieces of about `PIECE_BYTES`, whose bounds are multiples of `multiple` rows."""
    rows = entry.shape[0]
    step = max(PIECE_BYTES // max(entry.row_elements * source.dtype(entry).itemsize, 1) // multiple, 1) * multiple
    if entry.split_axis == 0:
        step = rows
    for start in range(0, rows, step):
        yield Piece(entry, start, min(start + step, rows))


class LeafReader:
    """Reads parts of the model's stacked leaves out of a checkpoint's layers."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._layers: dict[str, list[tuple[Entry, int]]] = {}  # of each leaf, in the stack's order
        for entry in source.entries:
            for part, leaf in enumerate(entry.stacked):
                self._layers.setdefault(leaf, []).append((entry, part))

    def dtype(self, leaf: str) -> np.dtype:
        """Of a leaf in the file."""
        return self.source.dtype(self._layers[leaf][0][0])

    def read(self, leaf: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> np.ndarray:
        """`leaf[index]` of a leaf of this shape; reads no other layer or expert, and of them what the files allow."""
        layers = self._layers[leaf]
        index = tuple(_plain(one, size) for one, size in zip(index, shape, strict=True))
        size = [len(range(*one.indices(n))) for one, n in zip(index, shape, strict=True)]
        out = np.empty(size, self.dtype(leaf))
        if not layers[0][0].row:
            entry, part = layers[0]
            self.source.fill(out, entry, part, index)
            return out
        chosen = layers[index[0]]

        def fill(i: int) -> None:
            entry, part = chosen[i]
            self.source.fill(out[i], entry, part, index[1:])

        with ThreadPoolExecutor(_READERS) as pool:
            list(pool.map(fill, range(len(chosen))))
        return out


def _plain(index: slice, size: int) -> slice:
    """A slice with its bounds, or `slice(None)` where it takes everything."""
    start, stop, _ = index.indices(size)
    return slice(None) if (start, stop) == (0, size) else slice(start, stop)
