"""A checkpoint seen with other dtypes: experts as MXFP4 or as floats, the other weights cast."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np

from k3jax.checkpoint.names import VISION, WEIGHT, Entry, entries
from k3jax.checkpoint.safetensors_dir import CheckpointError
from k3jax.checkpoint.source import Source
from k3jax.config import ModelConfig
from pallas_kernels.mx import NAN_SCALE, MXFP4Array, Rule, dequantize, quantize

RULE: Rule = "floor"  # the scale of OCP MX 1.0: that of a block with largest magnitude m 2^e is 2^(e-2)
FLOATS = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
_PACKED, _SCALE, _FLOAT = ".weight_packed", ".weight_scale", ".weight"


@dataclass(frozen=True)
class Converted:
    """`source` with routed experts as `experts` ("mxfp4", "bfloat16", "float32") and other weights as `weights`.

    None keeps what the source has. Families that the release keeps in float32 are never cast down.
    """

    source: Source
    experts: str | None = None
    weights: str | None = None

    @cached_property
    def config(self) -> ModelConfig:
        """The source's, with what the experts became."""
        quantized = self.experts == "mxfp4" if self.experts else self.source.config.quantized_experts
        return dataclasses.replace(self.source.config, quantized_experts=quantized).validate()

    @cached_property
    def entries(self) -> list[Entry]:
        """The source's, with those of the experts replaced."""
        known = entries(self.config)
        names = {entry.name for entry in known}
        carried = [e for e in self.source.entries if e.family.where == VISION and e.name not in names]
        return known + carried

    @cached_property
    def _original(self) -> dict[str, Entry]:
        return {entry.name: entry for entry in self.source.entries}

    @property
    def _changes(self) -> bool:
        return self.config.quantized_experts != self.source.config.quantized_experts

    def dtype(self, entry: Entry) -> np.dtype:
        """Of an entry's tensors."""
        if entry.experts is not None and (self._changes or not self.config.quantized_experts):
            if entry.name.endswith((_PACKED, _SCALE)):
                return np.dtype(np.uint8)
            if self.experts:
                return FLOATS[self.experts]
        stored = self.source.dtype(self._original[entry.name])
        if self.weights and entry.experts is None and entry.family.dtype == WEIGHT:
            return FLOATS[self.weights]
        return stored

    def read(self, entry: Entry, start: int, stop: int, buffer: np.ndarray | None = None) -> np.ndarray:
        """Rows `start` to `stop` of an entry's block, converted."""
        if entry.experts is None or not self._changes:
            original = self._original[entry.name]
            as_stored = self.dtype(entry) == self.source.dtype(original)  # then the buffer is long enough
            block = self.source.read(original, start, stop, buffer if as_stored else None)
            return block.astype(self.dtype(entry), copy=False)
        if self.config.quantized_experts:
            return self._quantized(entry, start, stop)
        stem = entry.name.removesuffix(_FLOAT)
        codes, scales = (self.source.read(self._original[stem + s], start, stop) for s in (_PACKED, _SCALE))
        return dequantize(MXFP4Array(codes, scales), self.dtype(entry))  # type: ignore[return-value]

    def _quantized(self, entry: Entry, start: int, stop: int) -> np.ndarray:
        suffix = _PACKED if entry.name.endswith(_PACKED) else _SCALE
        original = self._original[entry.name.removesuffix(suffix) + _FLOAT]
        floats: Any = self.source.read(original, start, stop)
        found: Any = quantize(floats, rule=RULE)
        if (found.scales == NAN_SCALE).any() or not np.isfinite(floats.astype(np.float32)).all():
            raise CheckpointError(f"{original.name}: experts {start} to {stop - 1} hold NaN or infinity")
        return found.codes if suffix == _PACKED else found.scales

    def fill(self, out: np.ndarray, entry: Entry, part: int, index: tuple[slice, ...]) -> None:
        """Not needed: nothing is loaded through a conversion."""
        raise NotImplementedError("a converted checkpoint is read block by block")
