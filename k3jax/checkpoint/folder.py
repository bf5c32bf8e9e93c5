"""A folder of files, local or `gs://`: whole small files, ranges of large ones, names, removal."""

from __future__ import annotations

import mmap
import os
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tensorstore as ts

_DIRECT = 1 << 20  # bytes from which a read is worth passing the page cache
_STEP, _PAGE = 4 << 20, 4096  # of direct reads: bytes at a time, alignment


@dataclass(frozen=True)
class Folder:
    """A folder by its path; every write of a file is atomic and durable."""

    path: str

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> Folder:
        """The folder at a local path or a `gs://` URL."""
        text = os.fspath(path)
        return cls(text if is_remote(text) else os.path.abspath(text))

    def __str__(self) -> str:
        return self.path

    def __truediv__(self, name: str) -> Folder:
        return Folder(f"{self.path.rstrip('/')}/{name}")

    @property
    def url(self) -> str:
        """For TensorStore."""
        return (self.path if is_remote(self.path) else f"file://{self.path}").rstrip("/") + "/"

    @property
    def _files(self) -> ts.KvStore:
        return ts.KvStore.open(self.url).result()

    def read(self, name: str) -> bytes:
        """A whole file; raises `FileNotFoundError`."""
        found = self._files.read(name).result()
        if found.state != "value":
            raise FileNotFoundError(f"{self / name}: no such file")
        return found.value

    def write(self, name: str, content: bytes) -> None:
        """Write a whole file."""
        self._files.write(name, content).result()

    def names(self, below: str = "") -> list[str]:
        """Paths of all files below `below`, relative to it, sorted."""
        listed = self._files.list(_prefix(below)).result()
        return sorted(key.decode()[len(below) :] for key in listed)

    def top_names(self) -> list[str]:
        """Names of the files in the folder itself."""
        if is_remote(self.path):
            return [name for name in self.names() if "/" not in name]
        return sorted(entry.name for entry in os.scandir(self.path) if entry.is_file())

    def exists(self, name: str) -> bool:
        """Whether there is a file of this name."""
        return File(self, name).exists()

    def delete(self, below: str) -> None:
        """Remove everything below `below`, which ends with a slash."""
        if is_remote(self.path):
            self._files.delete_range(_prefix(below)).result()
        else:
            shutil.rmtree(Path(self.path) / below, ignore_errors=True)


@dataclass(frozen=True)
class File:
    """One file of a folder."""

    folder: Folder
    name: str

    def __str__(self) -> str:
        return str(self.folder / self.name)

    @property
    def local(self) -> bool:
        """Whether it lies in a local folder."""
        return not is_remote(self.folder.path)

    def exists(self) -> bool:
        """Whether it is there."""
        return os.path.isfile(str(self)) if self.local else "" in self.folder.names(self.name)

    def size(self, expected: int) -> int:
        """Its bytes. Of a remote file only whether it has `expected`, one more or one less is found out."""
        if self.local:
            return os.stat(str(self)).st_size
        found = [self._holds_byte(expected - 1), self._holds_byte(expected)]
        return expected - 1 + found.count(True)

    def _holds_byte(self, at: int) -> bool:
        try:
            return at < 0 or len(self.read(at, at + 1)) == 1
        except OSError:
            return False

    def read(self, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop`, fewer where a local file ends before; raises `OSError`."""
        if self.local:
            with open(str(self), "rb") as stream:
                stream.seek(start)
                return stream.read(stop - start)
        try:
            found = self.folder._files.read(self.name, byte_range=slice(start, stop)).result()
        except ValueError as error:  # out of range
            raise OSError(f"{self}: {error}") from error
        if found.state != "value":
            raise FileNotFoundError(f"{self}: no such file")
        return found.value

    def read_into(self, buffer: np.ndarray, offset: int) -> None:
        """Fill `buffer`, uint8 [n], with the bytes from `offset` on; raises `OSError` where the file ends before."""
        if not self.local:
            buffer[:] = np.frombuffer(self.read(offset, offset + buffer.size), np.uint8)
            return
        filled = _read_direct(str(self), buffer, offset) if buffer.size >= _DIRECT else 0
        with open(str(self), "rb", buffering=0) as stream:
            stream.seek(offset + filled)
            while filled < buffer.size:
                count = stream.readinto(buffer.data[filled:])
                if not count:
                    raise OSError(f"{self}: ends after {offset + filled} bytes")
                filled += count


class _Aligned(threading.local):
    """Memory of a thread that a disk can write to by itself."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, _STEP)
        self.bytes = np.frombuffer(self.memory, np.uint8)


_aligned = _Aligned()


def _read_direct(path: str, buffer: np.ndarray, offset: int) -> int:
    """Fill `buffer` past the page cache, in a quarter of the CPU time; how much it filled, 0 where none can be."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except (AttributeError, OSError):  # not Linux, or a file system that always caches
        return 0
    filled = 0
    try:
        while filled < buffer.size:
            start = (offset + filled) // _PAGE * _PAGE
            skip = offset + filled - start
            count = min(os.preadv(descriptor, [_aligned.memory], start) - skip, buffer.size - filled)
            if count <= 0:
                break
            buffer[filled : filled + count] = _aligned.bytes[skip : skip + count]
            filled += count
    except OSError:
        pass
    finally:
        os.close(descriptor)
    return filled


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a URL of an object store."""
    return os.fspath(path).startswith("gs://")


def _prefix(below: str) -> ts.KvStore.KeyRange:
    """The keys that begin with `below`."""
    return ts.KvStore.KeyRange(below.encode(), below.encode() + b"\xff" if below else b"")
