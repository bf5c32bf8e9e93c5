"""A directory of safetensors files, read lazily: headers first, then single tensors by offset; no file stays open."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES: Mapping[str, Any] = {
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "BOOL": np.bool_,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # what JSON of another shape raises


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message is one complete line naming the file or tensor."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor's bytes lie."""

    file: Path
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    offset: int  # from the start of the file

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(DTYPES[self.dtype]).itemsize

    def read(self) -> np.ndarray:
        """The tensor; reads exactly its bytes."""
        raw = np.fromfile(self.file, np.uint8, count=self.nbytes, offset=self.offset)
        return raw.view(DTYPES[self.dtype]).reshape(self.shape)


@dataclass(frozen=True)
class SafetensorsDir:
    """The tensors of `model.safetensors.index.json` and its shards, or of a lone `model.safetensors`."""

    path: Path
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def present(cls, path: Path) -> bool:
        """Whether `path` is such a directory."""
        return (path / INDEX).is_file() or (path / SINGLE).is_file()

    @classmethod
    def open(cls, path: Path) -> SafetensorsDir:
        """Read every header; raises `CheckpointError` where files are missing, damaged or disagree with the index."""
        if not (path / INDEX).is_file():
            return cls(path, read_header(path / SINGLE))
        tensors: dict[str, StoredTensor] = {}
        for shard, names in _read_index(path / INDEX).items():
            if not (path / shard).is_file():
                raise CheckpointError(f"{path}: shard {shard} is missing; the index puts {len(names)} tensors there")
            stored = read_header(path / shard)
            _compare(path / shard, names, stored)
            tensors |= stored
        return cls(path, tensors)

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors that a safetensors file's header lists; raises `CheckpointError` unless the file is whole."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if len(start) < 8 or 8 + length > size:
            raise CheckpointError(f"{file}: truncated: the header takes {8 + length} bytes, the file has {size}")
        raw = stream.read(length)
    try:
        entries = json.loads(raw)
        tensors = {name: _entry(file, 8 + length, entry) for name, entry in entries.items() if name != "__metadata__"}
    except _MALFORMED as error:
        raise CheckpointError(f"{file}: not a safetensors header ({type(error).__name__}: {error})") from error
    end = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if tensor.offset != end:
            raise CheckpointError(f"{file}: {name} starts at byte {tensor.offset}, the tensor before it ends at {end}")
        end = tensor.offset + tensor.nbytes
    if end != size:
        what = "truncated" if end > size else "too long"
        raise CheckpointError(f"{file}: {what}: the header says {end} bytes, the file has {size}")
    return tensors


def _entry(file: Path, data: int, entry: Any) -> StoredTensor:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end)):
        raise ValueError(f"shape {shape}, data_offsets {[begin, end]}")
    tensor = StoredTensor(file, entry["dtype"], shape, data + begin)
    if end - begin != tensor.nbytes:
        raise ValueError(f"{entry['dtype']} {shape} takes {tensor.nbytes} bytes, data_offsets give {end - begin}")
    return tensor


def _read_index(file: Path) -> dict[str, set[str]]:
    """{shard: names of its tensors}."""
    try:
        weight_map = json.loads(file.read_bytes())["weight_map"]
        shards: dict[str, set[str]] = {}
        for name, shard in weight_map.items():
            shards.setdefault(shard, set()).add(name)
        outside = next((shard for shard in shards if Path(shard).name != shard), None)
    except _MALFORMED as error:
        raise CheckpointError(f"{file}: not a safetensors index ({type(error).__name__}: {error})") from error
    if outside is not None:
        raise CheckpointError(f"{file}: names shard {outside!r}, which is not a plain file name")
    return shards


def _compare(shard: Path, indexed: set[str], stored: Mapping[str, StoredTensor]) -> None:
    if lacking := sorted(indexed - stored.keys()):
        raise CheckpointError(f"{shard}: lacks {lacking[0]}{_more(lacking)}, which the index puts there")
    if extra := sorted(stored.keys() - indexed):
        raise CheckpointError(f"{shard}: holds {extra[0]}{_more(extra)}, which the index does not put there")


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
