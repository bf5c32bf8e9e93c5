"""A directory of safetensors files, read lazily: headers first, then single tensors by offset; no file stays open."""

from __future__ import annotations

import gc
import json
import math
import os
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

import ml_dtypes
import numpy as np

from k3jax.checkpoint.folder import File, Folder

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
MAX_HEADER = 100_000_000  # bytes; the release's largest takes under a million
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # what JSON of another shape raises


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message is one complete line naming the file or tensor."""

    def __init__(self, message: str) -> None:  # names come from files, so they may hold anything
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in message))


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor's bytes lie."""

    file: File
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    offset: int  # from the start of the file

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(DTYPES[self.dtype]).itemsize

    def read(self) -> np.ndarray:
        """The tensor; reads exactly its bytes."""
        raw = np.empty(self.nbytes, np.uint8)
        self.read_into(raw)
        return raw.view(DTYPES[self.dtype]).reshape(self.shape)

    def read_into(self, buffer: np.ndarray, start: int = 0) -> None:
        """Fill `buffer`, uint8 [n], with the tensor's bytes from `start` on."""
        try:
            self.file.read_into(buffer, self.offset + start)
        except OSError as error:
            raise CheckpointError(f"{self.file}: cannot be read any more ({error})") from error

    def view(self) -> np.ndarray:
        """The tensor, of which only what is used gets read where the file is local."""
        if self.file.local and self.nbytes:
            return np.memmap(str(self.file), DTYPES[self.dtype], "r", offset=self.offset, shape=self.shape)
        return self.read()


@dataclass(frozen=True)
class SafetensorsDir:
    """The tensors of `model.safetensors.index.json` and its shards, or of a lone `model.safetensors`."""

    folder: Folder
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def present(cls, path: str | os.PathLike[str]) -> bool:
        """Whether `path` is such a directory."""
        folder = Folder.at(path)
        return File(folder, INDEX).exists() or File(folder, SINGLE).exists()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> SafetensorsDir:
        """Read every header; raises `CheckpointError` where files are missing, damaged or disagree with the index."""
        folder = Folder.at(path)
        if not cls.present(path):
            raise CheckpointError(f"{os.fspath(path)}: holds neither {INDEX} nor {SINGLE}")
        if not File(folder, INDEX).exists():
            return cls(folder, read_header(File(folder, SINGLE)))
        with _collector_paused():
            return cls(folder, _read_shards(folder))

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def _read_shards(folder: Folder) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for shard, names in _read_index(File(folder, INDEX)).items():
        file = File(folder, shard)
        if not file.exists():
            raise CheckpointError(f"{folder}: shard {shard} is missing; the index puts {len(names)} tensors there")
        stored = read_header(file)
        _compare(file, names, stored)
        tensors |= stored
    return tensors


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Python's cycle collector looks again and again through half a million new objects, none of them in a cycle."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def read_header(file: File) -> dict[str, StoredTensor]:
    """The tensors that a safetensors file's header lists; raises `CheckpointError` unless the file is whole."""
    start = file.read(0, 8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if length > MAX_HEADER:
        raise CheckpointError(f"{file}: the header takes {length} bytes; at most {MAX_HEADER} are read")
    raw = file.read(8, 8 + length)
    if len(start) < 8 or len(raw) < length:
        have = len(start) + len(raw)
        raise CheckpointError(f"{file}: truncated: the header takes {8 + length} bytes, the file has {have}")
    tensors = {}
    name = "its header"
    try:
        for name, entry in json.loads(raw, object_pairs_hook=_unique).items():
            if name != "__metadata__":
                tensors[name] = _entry(file, 8 + length, entry)
    except _MALFORMED as error:
        what = f"{name}: not a safetensors header ({type(error).__name__}: {error})"
        raise CheckpointError(f"{file}: {what}") from error
    end = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if tensor.offset != end:
            raise CheckpointError(f"{file}: {name} starts at byte {tensor.offset}, the tensor before it ends at {end}")
        end = tensor.offset + tensor.nbytes
    if (size := file.size(end)) != end:
        what = "truncated" if end > size else "too long"
        raise CheckpointError(f"{file}: {what}: the header says {end} bytes, the file has {size}")
    return tensors


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys differ; the standard parser would silently keep the last of two equal ones."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"{twice} is there twice")
    return found


def _entry(file: File, data: int, entry: Any) -> StoredTensor:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(n) is int and 0 <= n < 2**63 for n in (*shape, begin, end)):
        raise ValueError(f"shape {shape}, data_offsets {[begin, end]}")
    tensor = StoredTensor(file, entry["dtype"], shape, data + begin)
    if end - begin != tensor.nbytes:
        raise ValueError(f"{entry['dtype']} {shape} takes {tensor.nbytes} bytes, data_offsets give {end - begin}")
    return tensor


def _read_index(file: File) -> dict[str, set[str]]:
    """{shard: names of its tensors}."""
    try:
        weight_map = json.loads(file.folder.read(file.name), object_pairs_hook=_unique)["weight_map"]
        shards: dict[str, set[str]] = {}
        for name, shard in weight_map.items():
            shards.setdefault(shard, set()).add(name)
        outside = next((s for s in shards if PurePosixPath(s).name != s or s == ".." or "\0" in s), None)
    except _MALFORMED as error:
        raise CheckpointError(f"{file}: not a safetensors index ({type(error).__name__}: {error})") from error
    if outside is not None:
        raise CheckpointError(f"{file}: names shard {outside!r}, which is not a plain file name")
    return shards


def _compare(shard: File, indexed: set[str], stored: Mapping[str, StoredTensor]) -> None:
    if lacking := sorted(indexed - stored.keys()):
        raise CheckpointError(f"{shard}: lacks {lacking[0]}{_more(lacking)}, which the index puts there")
    if extra := sorted(stored.keys() - indexed):
        raise CheckpointError(f"{shard}: holds {extra[0]}{_more(extra)}, which the index does not put there")


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
