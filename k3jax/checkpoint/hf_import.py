"""Reading a checkpoint in the released layout: checks against the name table, then one stacked leaf at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from k3jax.checkpoint.names import PAD, PREFIX, VISION_PREFIXES, WEIGHT, Placement, axis_sizes, placements
from k3jax.checkpoint.safetensors_dir import CheckpointError, SafetensorsDir, StoredTensor
from k3jax.config import ModelConfig
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
    def open(cls, path: Path) -> HFCheckpoint:
        """Read config.json and all headers; raises `ConfigError` or `CheckpointError` where they do not fit."""
        config, files = ModelConfig.from_hf(path), SafetensorsDir.open(path)
        prefix = PREFIX if any(name.startswith(PREFIX) for name in files.tensors) else ""
        checkpoint = cls(_seen_in(config, files), files, prefix)
        checkpoint._check_names()
        checkpoint._check_tensors()
        return checkpoint

    @cached_property
    def placements(self) -> list[Placement]:
        """The families that the checkpoint holds."""
        return placements(self.config)

    def stored(self, name: str) -> StoredTensor:
        """Where the tensor of this name (without prefix) lies."""
        return self.files.tensors[self.prefix + name]

    def leaves(self) -> Iterator[tuple[str, np.ndarray]]:
        """(path of a leaf in the model, its value), read one family at a time."""
        for placement in self.placements:
            yield from self._split(placement, self._stack(placement))

    def _split(self, placement: Placement, stacked: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        if len(placement.leaves) == 1:
            yield placement.leaves[0], stacked
            return
        parts = placement.family.layout.split(stacked, axis_sizes(self.config))
        yield from ((path, part) for path, part in zip(placement.leaves, parts, strict=True) if path != PAD)

    def _stack(self, placement: Placement) -> np.ndarray:
        sizes, layout = axis_sizes(self.config), placement.family.layout
        tensors = ((layout.to_model(self._read(name, placement), sizes), at) for name, at in placement.tensors())
        tensor, at = next(tensors)
        if not placement.lead:
            return tensor
        stacked = np.empty((*placement.lead, *tensor.shape), tensor.dtype)
        stacked[at] = tensor
        for tensor, at in tensors:
            stacked[at] = tensor
        return stacked

    def _read(self, name: str, placement: Placement) -> np.ndarray:
        tensor = self.stored(name).read()
        if name.endswith(".weight_scale") and (tensor == NAN_SCALE).any():
            count = int((tensor == NAN_SCALE).sum())
            raise CheckpointError(f"{self._place(name)}: {count} scale bytes are {NAN_SCALE}, which is NaN in E8M0")
        if PAD in placement.leaves:
            heads = self.config.kda.num_heads
            tail = tensor[heads:]
            if (bad := tail[tail.view(f"u{tail.itemsize}") != 0]).size:  # bits, so that NaN and -0 count
                raise CheckpointError(f"{self._place(name)}: entries past the {heads} heads must be 0, got {bad[0]}")
        return tensor

    def _place(self, name: str) -> str:
        return f"{self.stored(name).file}: {self.prefix}{name}"

    def _check_names(self) -> None:
        expected = {self.prefix + name for placement in self.placements for name, _ in placement.tensors()}
        found = {name for name in self.files.tensors if not name.startswith(VISION_PREFIXES)}
        missing, unexpected = sorted(expected - found), sorted(found - expected)
        if missing or unexpected:
            kinds = (("missing", missing), ("unexpected", unexpected))
            counts = " and ".join(f"{len(n)} tensors are {what} (first: {n[0]})" for what, n in kinds if n)
            raise CheckpointError(f"{self.files.path}: against its config.json {counts}")

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


def _seen_in(config: ModelConfig, files: SafetensorsDir) -> ModelConfig:
    """`config` with what only the tensors say: whether the experts are MXFP4, and the stored length of A_log."""
    quantized = any(".experts." in name and name.endswith(".weight_packed") for name in files.tensors)
    length = next((t.shape[0] for name, t in files.tensors.items() if name.endswith("self_attn.A_log") and t.shape), 0)
    kda = dataclasses.replace(config.kda, a_log_length=max(length, config.kda.num_heads))
    return dataclasses.replace(config, quantized_experts=quantized, kda=kda)
