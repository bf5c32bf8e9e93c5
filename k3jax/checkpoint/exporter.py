"""Export: a checkpoint is written in the released layout, piece by piece, in parallel, and continued after a kill.

Files are filled under a temporary name and appear when they are whole; the index comes last. A rerun leaves the files
that are there alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from k3jax.checkpoint.folder import Folder, is_remote
from k3jax.checkpoint.names import Entry
from k3jax.checkpoint.orbax_io import CHECKSUMS, RECORD
from k3jax.checkpoint.safetensors_dir import DTYPES, INDEX, CheckpointError
from k3jax.checkpoint.side_files import CONFIG, exported_side_files
from k3jax.checkpoint.source import Piece, Source, entry_bytes, pieces
from k3jax.checkpoint.work import Buffers, check_space, metered, run

_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
_PLAN = "export.json"  # there while an export is not complete


@dataclass(frozen=True)
class Slot:
    """Where a tensor goes."""

    shard: int
    offset: int  # from the start of the file


@dataclass
class Shard:
    """One file to write, and how many bytes of it are still missing."""

    file: str
    header: bytes
    size: int
    left: int


class FilePlan:
    """Which tensor goes where: in the release's own sharding, or in files of about `shard_bytes`."""

    def __init__(self, source: Source, shard_bytes: int | None = None) -> None:
        self.slots: dict[str, Slot] = {}  # by name with prefix
        self.shards: list[Shard] = []
        files = list(_released(source) if shard_bytes is None else _consolidated(source, shard_bytes))
        for number, (file, tensors) in enumerate(files):
            self._place(number, file, tensors)

    def _place(self, number: int, file: str, tensors: _Tensors) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end, offsets = 0, {}
        for entry, name, dtype in tensors:
            size = dtype.itemsize * int(np.prod(entry.tensor_shape, dtype=np.int64))
            header[name] = {"dtype": _NAMES[dtype], "shape": entry.tensor_shape, "data_offsets": [end, end + size]}
            offsets[name], end = end, end + size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        head = struct.pack("<Q", len(text)) + text
        self.slots |= {name: Slot(number, len(head) + offset) for name, offset in offsets.items()}
        self.shards.append(Shard(file, head, len(head) + end, end))

    def index(self) -> dict[str, Any]:
        """What `model.safetensors.index.json` holds."""
        total = sum(shard.size - len(shard.header) for shard in self.shards)
        files = [shard.file for shard in self.shards]
        return {
            "metadata": {"total_size": total},
            "weight_map": {name: files[slot.shard] for name, slot in self.slots.items()},
        }


_Tensors = list[tuple[Entry, str, np.dtype]]


def _released(source: Source) -> Iterator[tuple[str, _Tensors]]:
    """(file, its tensors): layer l in shard l + 1, then what belongs to no layer, the projector and the tower."""
    layers = source.config.num_layers
    parts: dict[int, list[Entry]] = {number: [] for number in range(1, layers + 2)}
    for entry in source.entries:
        head = entry.name.split(".")
        special = {"mm_projector": layers + 2, "vision_tower": layers + 3}.get(head[0], layers + 1)
        number = int(head[2]) + 1 if head[:2] == ["model", "layers"] else special
        parts.setdefault(number, []).append(entry)
    last = layers + 3 if len(parts) > layers + 1 else layers + 1
    for number in sorted(parts):
        yield f"model-{number:05d}-of-{last:06d}.safetensors", _in_order(source, parts[number])


def _in_order(source: Source, part: list[Entry]) -> _Tensors:
    """Tensors of a file as in the release: the experts come last, all tensors of one side by side."""
    single = [(e, e.family.prefix + e.name, source.dtype(e)) for e in part if e.experts is None]
    routed = [(e, source.dtype(e)) for e in part if e.experts is not None]
    experts = max((e.experts or 0 for e, _ in routed), default=0)
    return single + [(e, e.family.prefix + e.tensor(i), dtype) for i in range(experts) for e, dtype in routed]


def _consolidated(source: Source, shard_bytes: int) -> Iterator[tuple[str, _Tensors]]:
    """(file, its tensors): filled one after the other until the next tensor would not fit."""
    groups: list[_Tensors] = [[]]
    size = 0
    for _, tensors in _released(source):
        for entry, name, dtype in tensors:
            nbytes = dtype.itemsize * int(np.prod(entry.tensor_shape, dtype=np.int64))
            if groups[-1] and size + nbytes > shard_bytes:
                groups.append([])
                size = 0
            groups[-1].append((entry, name, dtype))
            size += nbytes
    for i, group in enumerate(groups):
        yield f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors", group


def export_checkpoint(
    source: Source,
    directory: str | os.PathLike[str],
    *,
    workers: int,
    shard_bytes: int | None = None,
    side: Folder | None = None,
    console: Console | None = None,
) -> None:
    """Write `source` as a directory in the released layout, or continue where an export was stopped.

    Files appear whole, the index last. `side` is where config.json and the tokenizer's files are copied from. Raises
    `CheckpointError` with one line.
    """
    if is_remote(directory):
        raise CheckpointError(f"{os.fspath(directory)}: an export needs a local directory; copy it from there")
    job = Exporter(source, Path(directory), FilePlan(source, shard_bytes))
    job.run(workers=workers, side=side, console=console or Console(stderr=True))


class Exporter:
    """One export: what, where to, and in which files."""

    def __init__(self, source: Source, directory: Path, plan: FilePlan) -> None:
        self.source, self.directory, self.plan = source, directory, plan
        self._open: dict[int, int] = {}  # file descriptors of shards under way
        self._buffers = Buffers()
        self._origin = ""
        self._lock = threading.Lock()

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256(f"{self.source.config} {self._origin}".encode())
        for shard in self.plan.shards:
            digest.update(shard.file.encode() + shard.header)
        return digest.hexdigest()

    def run(self, *, workers: int, side: Folder | None, console: Console) -> None:
        """Write what is missing."""
        self._origin = _identity(side) if side else ""
        self._claim()
        for shard in self.plan.shards:
            file = self.directory / shard.file
            if file.exists():  # it is complete: files appear whole
                shard.left = 0
        nbytes = sum(shard.left for shard in self.plan.shards)
        check_space(Folder.at(self.directory), nbytes)
        with metered(f"export to {self.directory}", nbytes, console) as meter:
            self._meter = meter
            try:
                run(self._tasks(), self._write, workers=workers)
            finally:
                for descriptor in self._open.values():
                    os.close(descriptor)
        self._finish(side)

    def _claim(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{self.directory}: cannot be a directory ({error.strerror})") from error
        plan = self.directory / _PLAN
        if plan.exists():
            if plan.read_text() != self._fingerprint:
                raise CheckpointError(f"{self.directory}: holds part of another export; choose another directory")
        elif any(self.directory.iterdir()):
            raise CheckpointError(f"{self.directory}: is not empty; choose another directory")
        else:
            _write_whole(plan, self._fingerprint.encode())

    def _tasks(self) -> Iterator[Piece]:
        for entry in self.source.entries:
            names = [entry.family.prefix + entry.tensor(i) for i in range(entry.experts or 1)]
            if any(self.plan.shards[self.plan.slots[name].shard].left for name in names):
                yield from pieces(self.source, entry)

    def _write(self, piece: Piece) -> None:
        entry = piece.entry
        row = entry_bytes(self.source, entry) // entry.shape[0]
        buffer = self._buffers.get(row * (piece.stop - piece.start))
        block = self.source.read(entry, piece.start, piece.stop, buffer)
        raw = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
        if entry.experts is None:
            self._put(entry.family.prefix + entry.name, raw, piece.start * row)
            return
        for i, expert in enumerate(range(piece.start, piece.stop)):
            self._put(entry.family.prefix + entry.tensor(expert), raw[i * row : (i + 1) * row], 0)

    def _put(self, name: str, raw: np.ndarray, start: int) -> None:
        """Write part of a tensor; the file appears with its last byte."""
        slot = self.plan.slots[name]
        shard = self.plan.shards[slot.shard]
        with self._lock:
            if not shard.left:
                return  # complete since an earlier run
            if slot.shard not in self._open:
                self._open[slot.shard] = self._begin(shard)
            descriptor = self._open[slot.shard]
        view, at = raw.data, slot.offset + start
        while view:
            count = os.pwrite(descriptor, view, at)
            view, at = view[count:], at + count
        self._meter.add(raw.size)
        with self._lock:
            shard.left -= raw.size
            if shard.left:
                return
            del self._open[slot.shard]
        os.fsync(descriptor)
        os.close(descriptor)
        _temporary(self.directory / shard.file).replace(self.directory / shard.file)

    def _begin(self, shard: Shard) -> int:
        descriptor = os.open(_temporary(self.directory / shard.file), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        os.ftruncate(descriptor, shard.size)
        os.pwrite(descriptor, shard.header, 0)
        return descriptor

    def _finish(self, side: Folder | None) -> None:
        """Side files, config.json and the index; then the plan goes."""
        written: dict[str, bytes] = {CONFIG: json.dumps(self.source.config.to_hf(), indent=2).encode()}
        if side is not None:
            written |= exported_side_files(side, self.source.config)
        for file, content in written.items():
            _write_whole(self.directory / file, content)
        _write_whole(self.directory / INDEX, json.dumps(self.plan.index(), indent=2).encode())
        (self.directory / _PLAN).unlink()


def _identity(checkpoint: Folder) -> str:
    """What tells one checkpoint from another of the same shapes: its place and its checksums."""
    record = f"{CHECKSUMS}/{RECORD}"
    return f"{checkpoint} {checkpoint.read(record).hex() if checkpoint.exists(record) else ''}"


def _temporary(file: Path) -> Path:
    return file.with_name(f".{file.name}.tmp")


def _write_whole(file: Path, content: bytes) -> None:
    """Write a file that appears whole and is on disk then."""
    with _temporary(file).open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    _temporary(file).replace(file)
