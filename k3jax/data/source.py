"""Where documents come from, and which of them are held out.

A document has a name that does not depend on the machine (a path relative to the source's root, with `#index` where one
file holds several), and its bytes. The held-out set is decided by a hash of that name alone, so adding files to a
folder never moves an old file from one side to the other.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3jax.config import ConfigError, DataConfig

PYTHON_STDLIB = "python_stdlib"
NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}
CHAT_KEYS = ("messages", "tools", "tool_choice", "response_format", "thinking", "effort")
PIECE_BYTES = 8192  # documents that a lone text file is cut into


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text: its name within the source, and its UTF-8 bytes as they are in the file; or one chat."""

    name: str
    data: bytes
    chat: Mapping[str, Any] | None = None  # arguments of `render_chat`, of a .jsonl line with `messages`

    def is_held_out(self, fraction: float) -> bool:
        """Whether the hash of the name falls into the lowest `fraction` of its range."""
        digest = hashlib.sha256(self.name.encode("utf-8", "surrogateescape")).digest()
        return int.from_bytes(digest[:8], "big") < fraction * 2.0**64


def read_documents(config: DataConfig) -> Iterator[Document]:
    """Yield the documents of `config.source` in the order of their names; `ConfigError` where there are none."""
    root, paths = _find_files(config.source)
    found = False
    for path in paths:
        name = path.relative_to(root).as_posix()
        for document in _documents_of_file(path, name, text_key=config.text_key, alone=len(paths) == 1):
            found = True
            yield document
    if not found:
        raise ConfigError(f"data.source = {config.source}: the {len(paths)} files found hold no text")


def _find_files(source: str) -> tuple[Path, list[Path]]:
    """The root that names are relative to, and the files in the order of their names."""
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


def _documents_of_file(path: Path, name: str, *, text_key: str, alone: bool) -> Iterator[Document]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"data.source: {path} cannot be read ({os.strerror(error.errno or 0)})") from error
    if path.suffix == ".jsonl":
        for index, line in enumerate(data.split(b"\n")):
            if line.strip():
                yield _document_of_line(line, f"{name}#{index}", text_key, f"{path} line {index + 1}")
    elif b"\0" in data[:1024]:
        if alone:
            raise ConfigError(f"data.source: {path} is not a text file (it holds a zero byte)")
    elif alone:
        for index, piece in enumerate(_cut_at_lines(data)):
            yield Document(name=f"{name}#{index}", data=piece)
    elif data:
        yield Document(name=name, data=data)


def _document_of_line(line: bytes, name: str, text_key: str, place: str) -> Document:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"data.source: {place} is not JSON") from error
    if isinstance(record, dict) and "messages" in record:
        unknown = record.keys() - CHAT_KEYS
        if unknown:
            raise ConfigError(f"data.source: {place}: {min(unknown)!r} is not a chat's; use {', '.join(CHAT_KEYS)}")
        return Document(name=name, data=b"", chat=record)
    text = record.get(text_key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ConfigError(f"data.source: {place} has neither text under {text_key!r} (data.text_key) nor messages")
    return Document(name=name, data=text.encode("utf-8", "replace"))


def _cut_at_lines(data: bytes) -> Iterator[bytes]:
    """Cut a lone file into documents of whole lines, so that some of them can be held out."""
    start = 0
    while start < len(data):
        end = data.find(b"\n", start + PIECE_BYTES)
        end = len(data) if end < 0 else end + 1
        yield data[start:end]
        start = end
