"""Where documents come from, which of them are held out, and how any one of them is read from its number alone.

Text files, .jsonl, .parquet and .array_record, in any mixture. Loading makes an index; a document is read when it is
wanted. Only what cannot be read piece by piece stays in memory: the text column of a .parquet file. A text file is cut
into spans of whole lines, so that a large file is not read by one row of the batch for hours.

A document's name does not depend on the machine: its file's path relative to the source's root, and its number where
the file holds several. Whether it is held out follows from the name alone, so adding files to a folder never moves an
old document from one side to the other.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, SupportsIndex

import numpy as np
from jaxtyping import Bool, Int

from k3jax.config import ConfigError
from k3jax.text import strict_json

PYTHON_STDLIB = "python_stdlib"
NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}
CHAT_KEYS = ("messages", "tools", "tool_choice", "response_format", "thinking", "effort")
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: multiples of it fill the range evenly


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text, or one chat: its name within the source, and its UTF-8 bytes as they are in the file."""

    name: str
    data: bytes = b""
    ends: bool = True  # False: more of the same text follows in the next span
    chat: Mapping[str, Any] | None = None  # arguments of `render_chat`, of a .jsonl line with `messages`
    folder: Path = Path()  # that the paths of a chat's images are relative to


class File(Protocol):
    """The documents of one file; `digest` changes when any of them does, `several` says that each has its own name."""

    name: str
    size: int  # bytes
    digest: int
    several: bool

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Document: ...


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Some documents of some files in a fixed order, as a grain data source."""

    files: Sequence[File]
    chosen: Sequence[Int[np.ndarray, " n"]]  # numbers within each file

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: SupportsIndex) -> Document:
        place = int(np.searchsorted(self._ends, int(index), side="right"))
        return self.files[place][int(self.chosen[place][int(index) - int(self._ends[place])])]  # from its end

    @cached_property
    def _ends(self) -> Int[np.ndarray, " files"]:
        return np.cumsum([len(numbers) for numbers in self.chosen])

    def chats(self) -> Iterator[int]:
        """The numbers of the documents that are chats."""
        for file, numbers, end in zip(self.files, self.chosen, self._ends, strict=True):
            if isinstance(file, JsonLines) and file.chats:
                yield from (end - len(numbers) + np.flatnonzero(np.isin(numbers, file.chats))).tolist()

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(file.size for file in self.files)

    @property
    def fingerprint(self) -> str:
        """Changes when any document, their order or their choice does."""
        digest = 0
        for file, numbers in zip(self.files, self.chosen, strict=True):
            digest = zlib.crc32(f"{file.name} {file.digest} ".encode() + numbers.tobytes(), digest)
        return f"{digest:08x}"


def find_documents(source: str, *, text_key: str, span: int, eval_fraction: float) -> tuple[Documents, Documents]:
    """Documents of a folder, a file or a glob: those to train on, and those held out.

    `span` is the length in bytes that text files are cut to. Raises `ConfigError` where there are none.
    """
    root, paths = _find_files(source)
    files = [_open(path, path.relative_to(root).as_posix(), text_key, span, alone=len(paths) == 1) for path in paths]
    found = [file for file in files if len(file)]
    if not found:
        raise ConfigError(f"data.source = {source}: the {len(paths)} files found hold no text")
    held_out = [held_out_of(file, eval_fraction) for file in found]
    sides = ([np.flatnonzero(~mask) for mask in held_out], [np.flatnonzero(mask) for mask in held_out])
    train, rest = (Documents(files=found, chosen=numbers) for numbers in sides)
    return train, rest


def held_out_of(file: File, fraction: float) -> Bool[np.ndarray, " n"]:
    """Which documents of a file are held out: those whose hash lies in the lowest `fraction` of its range."""
    digest = hashlib.sha256(file.name.encode("utf-8", "surrogateescape")).digest()
    start = np.uint64(int.from_bytes(digest[:8], "big"))
    numbers = np.arange(len(file), dtype=np.uint64) if file.several else np.zeros(len(file), np.uint64)
    return start + numbers * np.uint64(GOLDEN) < fraction * 2.0**64


# ---- files ---------------------------------------------------------------------------------------------------------


class TextFile:
    """A text file, cut at line ends into spans; alone in its source, each span can be held out by itself."""

    def __init__(self, path: Path, name: str, *, span: int, alone: bool) -> None:
        data = _read(path)
        if b"\0" in data[:1024]:
            if alone:
                raise ConfigError(f"data.source: {path} is not a text file (it holds a zero byte)")
            data = b""
        self.path, self.name, self.size, self.digest, self.several = path, name, len(data), zlib.crc32(data), alone
        self._ends = list(_cuts(data, span))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> Document:
        start, end = (0, *self._ends)[index : index + 2]
        with self.path.open("rb") as file:
            file.seek(start)
            data = file.read(end - start)
        return Document(name=self.name, data=data, ends=end == self.size)


class JsonLines:
    """A .jsonl file: a document or a chat a line. Every line is looked at when the file is opened."""

    several = True

    def __init__(self, path: Path, name: str, *, text_key: str) -> None:
        data = _read(path)
        self.path, self.name, self.text_key, self.size, self.digest = path, name, text_key, len(data), zlib.crc32(data)
        self._lines: list[tuple[int, int, int]] = []  # number, start, end
        self.chats: list[int] = []
        start = 0
        for number, line in enumerate(data.split(b"\n")):
            if line.strip():
                if self._parse(line, number).chat is not None:
                    self.chats.append(len(self._lines))
                self._lines.append((number, start, start + len(line)))
            start += len(line) + 1

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Document:
        number, start, end = self._lines[index]
        with self.path.open("rb") as file:
            file.seek(start)
            return self._parse(file.read(end - start), number)

    def _parse(self, line: bytes, number: int) -> Document:
        place = f"{self.path} line {number + 1}"
        record = _record(line, place)
        if "messages" not in record:
            return Document(name=f"{self.name}#{number}", data=_text(record, self.text_key, f"{place} has neither"))
        if unknown := record.keys() - CHAT_KEYS:
            raise ConfigError(f"data.source: {place}: {min(unknown)!r} is not a chat's; use {', '.join(CHAT_KEYS)}")
        return Document(name=f"{self.name}#{number}", chat=record, folder=self.path.parent)


class Parquet:
    """The text column of a .parquet file, in memory."""

    several = True

    def __init__(self, path: Path, name: str, *, text_key: str) -> None:
        try:
            from pyarrow import ArrowException, parquet, types
        except ImportError as error:
            raise ConfigError(f"data.source: {path} needs pyarrow (pip install 'k3jax[parquet]')") from error
        try:
            columns = parquet.read_schema(path)
            if text_key not in columns.names:
                raise ConfigError(
                    f"data.source: {path} has no column {text_key!r} (data.text_key), but {', '.join(columns.names)}"
                )
            self._column = parquet.read_table(path, columns=[text_key]).column(0)
        except (ArrowException, OSError) as error:
            raise ConfigError(f"data.source: {path} is not a Parquet file ({str(error).splitlines()[0]})") from error
        kind = self._column.type
        if not (types.is_string(kind) or types.is_large_string(kind)):
            raise ConfigError(f"data.source: {path}: column {text_key!r} holds {kind}, not strings")
        self.name, self.size = name, path.stat().st_size
        self.digest = zlib.crc32(f"{len(self._column)} {self._column.nbytes}".encode())

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, index: int) -> Document:
        text = self._column[index].as_py()
        return Document(name=f"{self.name}#{index}", data=(text or "").encode("utf-8", "replace"))


class ArrayRecord:
    """An .array_record file, the form for large corpora: a JSON object a record, like a line of .jsonl."""

    several = True

    def __init__(self, path: Path, name: str, *, text_key: str) -> None:
        from array_record.python.array_record_data_source import ArrayRecordDataSource

        _read(path, 1)
        self.path, self.name, self.text_key = path, name, text_key
        try:
            self._records = ArrayRecordDataSource([str(path)])
        except Exception as error:  # its reader raises bare RuntimeErrors
            raise ConfigError(f"data.source: {path} is not an ArrayRecord file") from error
        self.size = path.stat().st_size
        self.digest = zlib.crc32(f"{len(self._records)} {self.size}".encode())
        if len(self):
            self[0]  # a wrong kind of record is told now

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Document:
        place = f"{self.path} record {index}"
        record = _record(self._records[index], place)
        return Document(name=f"{self.name}#{index}", data=_text(record, self.text_key, f"{place} has no"))


def _open(path: Path, name: str, text_key: str, span: int, *, alone: bool) -> File:
    formats: dict[str, Any] = {".jsonl": JsonLines, ".parquet": Parquet}
    formats |= dict.fromkeys((".array_record", ".arrayrecord"), ArrayRecord)
    if path.suffix in formats:
        return formats[path.suffix](path, name, text_key=text_key)
    return TextFile(path, name, span=span, alone=alone)


def _read(path: Path, count: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError as error:
        raise ConfigError(f"data.source: {path} cannot be read ({os.strerror(error.errno or 0)})") from error


def _record(line: bytes, place: str) -> dict[str, Any]:
    try:
        text = line.decode("utf-8-sig")
        strict_json.check_depth(text)
        record = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"data.source: {place} is not JSON ({error})") from error
    return record if isinstance(record, dict) else {}


def _text(record: dict[str, Any], key: str, what: str) -> bytes:
    text = record.get(key)
    if not isinstance(text, str):
        rest = " nor messages" if what.endswith("neither") else ""
        raise ConfigError(f"data.source: {what} text under {key!r} (data.text_key){rest}")
    return text.encode("utf-8", "replace")


def _cuts(data: bytes, span: int) -> Iterator[int]:
    """Ends of spans of about `span` bytes: after a line; inside one that is longer than a span, before a character."""
    start = 0
    while start < len(data):
        end = data.find(b"\n", start + span - 1, start + 2 * span) + 1 or min(start + 2 * span, len(data))
        while end < len(data) and data[end] & 0xC0 == 0x80:
            end += 1
        yield end
        start = end


# ---- finding them --------------------------------------------------------------------------------------------------


def _find_files(source: str) -> tuple[Path, list[Path]]:
    """The root that names are relative to, and the files in the order of their names."""
    paths: Iterable[Path]
    if source == PYTHON_STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        paths = [path for path in root.rglob("*.py") if not NOT_STDLIB & set(path.relative_to(root).parts)]
    elif Path(source).is_dir():
        root = Path(source)
        paths = [path for path in root.rglob("*") if path.is_file() and not _is_hidden(path.relative_to(root))]
    elif Path(source).is_file():
        root, paths = Path(source).parent, [Path(source)]
    else:
        root = _fixed_part(source)
        paths = [path for path in map(Path, glob.glob(source, recursive=True)) if path.is_file()]
    if not paths:
        raise ConfigError(f"data.source = {source}: no such file or folder, and no file matches")
    return root, sorted(paths, key=lambda path: path.relative_to(root).as_posix())


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def _fixed_part(pattern: str) -> Path:
    """The folders of a glob pattern that precede its first wildcard."""
    parts = Path(pattern).parts
    fixed = next((n for n, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    return Path(*parts[:fixed])
