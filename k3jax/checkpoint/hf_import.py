"""Reading a checkpoint in the released layout: checks against the name table, then any part of any entry."""

from __future__ import annotations

import dataclasses
import json
import os
from functools import cached_property

import numpy as np

from k3jax.checkpoint.folder import Folder, is_remote
from k3jax.checkpoint.names import (
    PAD,
    PREFIX,
    VISION_PREFIXES,
    WEIGHT,
    Entry,
    Placement,
    axis_sizes,
    carried_entry,
    entries,
    placements,
)
from k3jax.checkpoint.safetensors_dir import DTYPES, CheckpointError, SafetensorsDir, StoredTensor
from k3jax.config import ConfigError, ModelConfig
from pallas_kernels.mx import NAN_SCALE

_FLOATS = ("BF16", "F32", "F16")
# The release keeps some families in float32. A copy cast as a whole has lost digits there, but not its meaning.
_DTYPES = {WEIGHT: _FLOATS, "float32": _FLOATS, "uint8": ("U8",)}


@dataclasses.dataclass(frozen=True)
class HFCheckpoint:
    """A directory in the released layout whose tensors are exactly what its config.json implies."""

    config: ModelConfig
    files: SafetensorsDir
    prefix: str  # "language_model." or nothing

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> HFCheckpoint:
        """Read config.json and all headers; raises `ConfigError` or `CheckpointError` where they do not fit."""
        files = SafetensorsDir.open(path)
        config = _read_config(files.folder)
        prefix = PREFIX if any(name.startswith(PREFIX) for name in files.tensors) else ""
        checkpoint = cls(_seen_in(config, files), files, prefix)
        checkpoint._check_names()
        checkpoint._check_tensors()
        return checkpoint

    @cached_property
    def placements(self) -> list[Placement]:
        """The families of the model that the checkpoint holds."""
        return placements(self.config)

    @cached_property
    def entries(self) -> list[Entry]:
        """All that it holds: the model layer by layer, tower and projector, and what is only carried of those."""
        return entries(self.config) + [carried_entry(name, self.files.tensors[name].shape) for name in self._carried]

    @cached_property
    def _carried(self) -> list[str]:
        """Tensors of a tower that the config does not describe: they stay as they are."""
        if self.config.vision is not None:
            return []
        return sorted(name for name in self.files.tensors if name.startswith(VISION_PREFIXES))

    def stored(self, name: str) -> StoredTensor:
        """Where the tensor of this name (without prefix) lies."""
        return self.files.tensors[self._full(name)]

    def dtype(self, entry: Entry) -> np.dtype:
        """Of an entry's tensors."""
        return np.dtype(DTYPES[self.stored(entry.tensor()).dtype])

    def read(self, entry: Entry, start: int, stop: int, buffer: np.ndarray | None = None) -> np.ndarray:
        """Rows `start` to `stop` of an entry's block; `buffer`, uint8 and long enough, is used for it where given."""
        row = entry.row_elements * self.dtype(entry).itemsize
        raw = np.empty(row * (stop - start), np.uint8) if buffer is None else buffer[: row * (stop - start)]
        if entry.experts is None:
            self.stored(entry.name).read_into(raw, start * row)
        else:
            for i, expert in enumerate(range(start, stop)):
                self.stored(entry.tensor(expert)).read_into(raw[i * row : (i + 1) * row])
        block = raw.view(self.dtype(entry)).reshape(stop - start, *entry.shape[1:])
        self._check(entry, start, block)
        return block

    def fill(self, out: np.ndarray, entry: Entry, part: int, index: tuple[slice, ...]) -> None:
        """Copy into `out` a slice of the entry's array number `part`, in the model's order of axes."""
        if entry.experts is None:
            out[...] = self._part(entry, entry.name, part, index)
            return
        for i, expert in enumerate(range(*index[0].indices(entry.experts))):
            out[i] = self._part(entry, entry.tensor(expert), part, index[1:])
            self._check(entry, expert, out[i : i + 1])

    def _part(self, entry: Entry, name: str, part: int, index: tuple[slice, ...]) -> np.ndarray:
        layout, stored = entry.family.layout, self.stored(name)
        whole = all(one == slice(None) for one in index) or PAD in entry.arrays
        tensor = stored.read() if whole else stored.view()
        if PAD in entry.arrays:
            self._check(entry, 0, tensor)
        array = layout.to_model(tensor, entry.sizes)
        return (array if entry.split_axis is None else layout.split(array, entry.sizes)[part])[index]

    def _check(self, entry: Entry, first: int, block: np.ndarray) -> None:
        """Refuse what no K3 checkpoint may hold in rows from `first` on."""
        if entry.name.endswith(".weight_scale") and (block == NAN_SCALE).any():
            bad = (block == NAN_SCALE).reshape(len(block), -1).sum(axis=1)
            at = int(np.flatnonzero(bad)[0])
            place = self._place(entry.tensor(first + at))
            raise CheckpointError(f"{place}: {bad[at]} scale bytes are {NAN_SCALE}, which is NaN in E8M0")
        if PAD in entry.arrays:
            heads = self.config.kda.num_heads
            tail = block[heads:]
            if (bad := tail[tail.view(f"u{tail.itemsize}") != 0]).size:  # bits, so that NaN and -0 count
                raise CheckpointError(
                    f"{self._place(entry.name)}: entries past the {heads} heads must be 0, got {bad[0]}"
                )

    def _full(self, name: str) -> str:
        return name if name.startswith(VISION_PREFIXES) else self.prefix + name

    def _place(self, name: str) -> str:
        return f"{self.stored(name).file}: {self._full(name)}"

    def _check_names(self) -> None:
        expected = {self._full(name) for placement in self.placements for name, _ in placement.tensors()}
        found = self.files.tensors.keys() - set(self._carried)
        missing, unexpected = sorted(expected - found), sorted(found - expected)
        if missing or unexpected:
            kinds = (("missing", missing), ("unexpected", unexpected))
            counts = " and ".join(f"{len(n)} tensors are {what} (first: {n[0]})" for what, n in kinds if n)
            raise CheckpointError(f"{self.files.folder}: against its config.json {counts}")

    def _check_tensors(self) -> None:
        sizes = axis_sizes(self.config)
        for placement in self.placements:
            shape, dtypes = placement.family.layout.disk_shape(sizes), _DTYPES[placement.family.dtype]
            first: StoredTensor | None = None
            for name, _ in placement.tensors():
                tensor = self.stored(name)
                first = first or tensor
                if tensor.shape != shape:
                    raise CheckpointError(f"{self._place(name)}: shape {tensor.shape}; config.json implies {shape}")
                if tensor.dtype not in dtypes:
                    raise CheckpointError(f"{self._place(name)}: dtype {tensor.dtype}; expected {' or '.join(dtypes)}")
                if tensor.dtype != first.dtype:
                    raise CheckpointError(f"{self._place(name)}: dtype {tensor.dtype}; in other layers {first.dtype}")


def _read_config(folder: Folder) -> ModelConfig:
    try:
        return ModelConfig.from_hf(json.loads(folder.read("config.json")) if is_remote(folder.path) else folder.path)
    except FileNotFoundError as error:
        raise ConfigError(str(error)) from error


def _seen_in(config: ModelConfig, files: SafetensorsDir) -> ModelConfig:
    """`config` with what only the tensors say: whether the experts are MXFP4, and the stored length of A_log."""
    quantized = any(".experts." in name and name.endswith(".weight_packed") for name in files.tensors)
    length = next((t.shape[0] for name, t in files.tensors.items() if name.endswith("self_attn.A_log") and t.shape), 0)
    kda = dataclasses.replace(config.kda, a_log_length=max(length, config.kda.num_heads))
    return dataclasses.replace(config, quantized_experts=quantized, kda=kda)
