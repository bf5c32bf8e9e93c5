"""Reading the weights of an Orbax checkpoint: of an import, an array per layer and matrix, or of a training run."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import tensorstore as ts

from k3jax.checkpoint import arrays, orbax_io
from k3jax.checkpoint.arrays import ArrayTree, DamagedError
from k3jax.checkpoint.folder import Folder, is_remote
from k3jax.checkpoint.names import PAD, VISION_PREFIXES, Entry, carried_entry, entries
from k3jax.checkpoint.safetensors_dir import CheckpointError
from k3jax.checkpoint.side_files import PLAN
from k3jax.config import ModelConfig


@dataclass(frozen=True)
class OrbaxCheckpoint:
    """A step's weights. A training run holds the model's leaves, layers stacked; an import one array per layer."""

    folder: Folder
    config: ModelConfig
    tree: ArrayTree

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> OrbaxCheckpoint:
        """The newest step of a run, its `checkpoints`, or a step; raises `CheckpointError` or `ConfigError`."""
        folder = orbax_io.find_step(path)
        if folder is None:
            raise CheckpointError(f"{os.fspath(path)}: {_why_none(path)}")
        try:
            tree = ArrayTree(folder / orbax_io.WEIGHTS)
            checkpoint = cls(folder, orbax_io.read_model_config(folder), tree)
            checkpoint._check()
        except DamagedError as error:
            raise CheckpointError(str(error)) from error
        return checkpoint

    @cached_property
    def entries(self) -> list[Entry]:
        """All that it holds: the model layer by layer, tower and projector, and what is only carried of those."""
        vision = sorted(name for name in self.tree.names if name.startswith(VISION_PREFIXES))
        return entries(self.config) + [carried_entry(name, self.tree.open(name).shape) for name in vision]

    def dtype(self, entry: Entry) -> np.dtype:
        """Of an entry's tensors."""
        if entry.arrays not in self._dtypes:
            self._dtypes[entry.arrays] = self._array(entry, 0).dtype.numpy_dtype
        return self._dtypes[entry.arrays]

    @cached_property
    def _dtypes(self) -> dict[tuple[str, ...], np.dtype]:
        return {}

    def read(self, entry: Entry, start: int, stop: int, buffer: np.ndarray | None = None) -> np.ndarray:
        """Rows `start` to `stop` of an entry's block; `buffer`, uint8 and long enough, is used for it where given."""
        dtype, rows = self.dtype(entry), entry.rows(start, stop)
        blocks: list[np.ndarray | None] = []
        for part, name in enumerate(entry.arrays):
            array = None if name == PAD else self._array(entry, part).transpose(entry.order)[rows]
            whole = buffer if entry.split_axis is None else None
            blocks.append(None if array is None else self._copy(array, name, _room(array.shape, dtype, whole)))
        return join_parts(blocks, entry)

    def fill(self, out: np.ndarray, entry: Entry, part: int, index: tuple[slice, ...]) -> None:
        """Copy into `out` a slice of the entry's array number `part`, in the model's order of axes."""
        self._copy(self._array(entry, part)[index], entry.arrays[part], out)

    def _copy(self, array: ts.TensorStore, name: str, out: np.ndarray) -> np.ndarray:
        try:
            arrays.read_into(out, array, f"{self.tree.folder}: {name}")
        except DamagedError as error:
            raise CheckpointError(str(error)) from error
        return out

    def _array(self, entry: Entry, part: int) -> ts.TensorStore:
        """One layer's array, in the model's order of axes."""
        try:
            if entry.arrays[part] in self.tree.names:
                return self.tree.open(entry.arrays[part])
            return self.tree.open(entry.stacked[part])[entry.row]
        except DamagedError as error:
            raise CheckpointError(str(error)) from error

    def _check(self) -> None:
        for entry in entries(self.config):
            for name, stacked in zip(entry.arrays, entry.stacked, strict=True):
                if name != PAD and not {name, stacked} & self.tree.names:
                    raise DamagedError(f"{self.tree.folder}: holds no {name}, which its config implies")


def join_parts(blocks: list[np.ndarray | None], entry: Entry) -> np.ndarray:
    """One block of what an entry's arrays hold of it; zeros for PAD."""
    axis = entry.split_axis
    if axis is None:
        assert blocks[0] is not None
        return blocks[0]
    like = next(block for block in blocks if block is not None)
    filled = []
    for block, size in zip(blocks, entry.part_sizes(), strict=True):
        shape = list(like.shape)
        shape[axis] = size
        filled.append(np.zeros(shape, like.dtype) if block is None else block)
    return np.concatenate(filled, axis=axis)


def _why_none(path: str | os.PathLike[str]) -> str:
    if os.path.isfile(os.path.join(path, PLAN)):
        return "an import that is not finished; the same command continues it"
    if os.path.isdir(path) or is_remote(path):
        return "holds neither model.safetensors (with or without an index) nor Orbax checkpoints"
    return "no such directory"


def _room(shape: tuple[int, ...], dtype: np.dtype, buffer: np.ndarray | None) -> np.ndarray:
    """An array to read into, in `buffer` where given."""
    if buffer is None:
        return np.empty(shape, dtype)
    return buffer[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
