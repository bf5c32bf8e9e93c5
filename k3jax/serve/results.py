"""The output file of a batch: one JSON line per request, appended whole, readable again after any interruption.

A record is OpenAI's: `id`, `custom_id`, `response` and `error`, where `error` is null exactly for a completed request.
A refused request has both: `response` with status 400 and OpenAI's error body, and the same code and message in
`error`. A line that names no request (not JSON, no custom_id) has `response` null and its line number in `error`.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, Self

from k3jax.config import ConfigError
from k3jax.serve.fields import RequestError
from k3jax.serve.hosts import from_first
from k3jax.serve.jobs import Running
from k3jax.serve.manifest import Manifest, manifest_path
from k3jax.serve.request import Job

PREFIX = b'{"id": "batch_req_'  # how every line of an output file begins


def completed(one: Running, *, model: str) -> dict[str, Any]:
    """The record of a job whose answers are complete."""
    return _record(one.job.custom_id, response=_response(200, completion_body(one, model=model)), error=None)


def completion_body(one: Running, *, model: str) -> dict[str, Any]:
    """OpenAI's body of a job whose answers are complete."""
    choices = [answer.choice() for answer in one.answers]
    return envelope(one.job, model=model) | {"choices": choices, "usage": usage(one)}


def envelope(job: Job, *, model: str, chunk: bool = False) -> dict[str, Any]:
    """What an answer, or each chunk of one, says beside its choices."""
    request, chat = job.requests[0], job.thinking is not None
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
        "object": ("chat.completion.chunk" if chunk else "chat.completion") if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "seed": request.sampling.seed,  # also where the request named none, so that any answer can be repeated
    }


def usage(one: Running) -> dict[str, Any]:
    """How many tokens a job has read and written."""
    num_prompt, num_tokens = len(one.job.requests[0].prompt), sum(answer.num_tokens for answer in one.answers)
    counts: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt + num_tokens,
        "prompt_tokens_details": {"cached_tokens": one.cached_tokens},
    }
    if one.job.thinking is not None:
        num_reasoning = sum(answer.num_reasoning for answer in one.answers)
        counts["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
    return counts


def error_body(error: RequestError, *, status: int) -> dict[str, Any]:
    """OpenAI's body of an answer with an error."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def refused(custom_id: str, error: RequestError, *, status: int = 400) -> dict[str, Any]:
    """The record of a request that cannot be served as it is written."""
    response = _response(status, error_body(error, status=status))
    return _record(custom_id, response=response, error={"code": error.code, "message": str(error)})


def unusable(number: int, error: RequestError) -> dict[str, Any]:
    """The record of input line `number`, which names no request."""
    message = f"line {number}: {error}"
    return _record(None, response=None, error={"code": error.code, "message": message, "line": number})


def _record(custom_id: str | None, *, response: Any, error: Any) -> dict[str, Any]:
    return {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}


def _response(status: int, body: dict[str, Any]) -> dict[str, Any]:
    return {"status_code": status, "request_id": f"req_{uuid.uuid4().hex}", "body": body}


class Output(Protocol):
    """Where the records of a batch go; `done_ids` and `done_lines` have one of an earlier run."""

    done_ids: set[str]
    done_lines: set[int]

    def keep(self, manifest: Manifest) -> None:
        """Put the manifest beside the records. Raises `ConfigError` where they were made otherwise."""

    def write(self, record: dict[str, Any]) -> None:
        """Append one record."""


class OtherProcess:
    """The output of a process that leaves writing to process 0."""

    def __init__(self, done_ids: Iterable[str], done_lines: Iterable[int]) -> None:
        self.done_ids, self.done_lines = set(done_ids), set(done_lines)

    def keep(self, manifest: Manifest) -> None:
        pass

    def write(self, record: dict[str, Any]) -> None:
        pass


class OutputFile:
    """Appends records. `done_ids` and `done_lines` are what an earlier run left in it; a torn last line is dropped.

    Use as a context manager. Raises `ConfigError` for a path that cannot be written, that another process writes, or
    that holds anything but a batch's results, which is then left untouched.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._created = path, not path.exists()
        if not self._created and not path.is_file():
            raise ConfigError(f"--output {path}: must be a regular file")
        self.done_ids: set[str] = set()
        self.done_lines: set[int] = set()
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise ConfigError(f"--output {path}: cannot be written ({error.strerror})") from error
        try:
            self._lock()
            self._resume()
        except BaseException:
            self.close()
            raise

    def keep(self, manifest: Manifest) -> None:
        """Put the manifest beside the output. Raises `ConfigError` where the output's results were made otherwise."""
        manifest.join(self.path, self.done_ids)

    def write(self, record: dict[str, Any]) -> None:
        """Append one record and hand it to the operating system."""
        data = json.dumps(record).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            raise ConfigError(f"--output {self.path}: cannot be written ({error.strerror}); a rerun resumes") from error

    def close(self) -> None:
        """Put everything on disk; a file that this object created and that got no record is removed again."""
        empty = os.fstat(self._file).st_size == 0
        os.fsync(self._file)
        os.close(self._file)
        if self._created and empty:
            self.path.unlink()
            manifest_path(self.path).unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._created = False  # whoever holds the lock was first
            raise ConfigError(f"--output {self.path}: another process is writing it") from error

    def _resume(self) -> None:
        whole = 0
        with open(self.path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    self._check(line[: len(PREFIX)] == PREFIX[: len(line)], number)
                    break
                self._read(line, number)
                whole += len(line)
        os.ftruncate(self._file, whole)

    def _read(self, line: bytes, number: int) -> None:
        try:
            record = json.loads(line) if line.startswith(PREFIX) else {}
        except ValueError:
            record = {}
        self._check(record.keys() >= {"custom_id", "error"}, number)
        error = record["error"] or {}
        if "line" in error:
            self.done_lines.add(error["line"])
        else:
            self.done_ids.add(record["custom_id"])

    def _check(self, ours: bool, number: int) -> None:
        if not ours:
            raise ConfigError(f"--output {self.path} line {number}: not the result of a batch; name another file")


@contextmanager
def open_output(path: Path, *, input_path: Path) -> Iterator[Output]:
    """The output of a batch, which process 0 writes. Raises `ConfigError` in all where it cannot or must not."""
    opened: list[OutputFile] = []

    def look() -> list[list[Any]]:
        if path.exists() and os.path.samefile(input_path, path):
            raise ConfigError(f"--output {path}: is the input file")
        opened.append(OutputFile(path))
        return [sorted(opened[0].done_ids), sorted(opened[0].done_lines)]

    done = from_first(look)
    if not opened:
        yield OtherProcess(*done)
        return
    with opened[0] as output:
        yield output
