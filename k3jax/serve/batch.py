"""A batch file from end to end: read lines, keep the slots filled, append a result a line, resume, stop on SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from k3jax.config import ConfigError
from k3jax.serve.fields import RequestError
from k3jax.serve.hosts import from_first
from k3jax.serve.jobs import Jobs
from k3jax.serve.request import COMPLETIONS, Job, Line, parse_line, prompt_ids
from k3jax.serve.results import Output, completed, refused, unusable
from k3jax.text import Tokenizer
from k3jax.vision import ahead

EXIT_PREEMPTED = 75  # what is written stays; a rerun resumes
WORKERS = 4  # threads that prepare images of requests ahead of their turn
DRAIN_S = 20.0  # after a signal, for the requests that have begun; whoever sends one waits for 30 s or so


@dataclass(kw_only=True)
class Summary:
    """What one run did. `skipped` lines have a result of an earlier run."""

    completed: int = 0
    failed: int = 0
    skipped: int = 0
    tokens: int = 0
    prompt_tokens: int = 0  # of the requests that have started
    cached_tokens: int = 0  # of these, those that were not read again
    interrupted: bool = False

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that were not read again."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def __str__(self) -> str:
        parts = [f"{self.completed} completed", f"{self.failed} failed"]
        parts += [f"{self.skipped} already done"] if self.skipped else []
        parts += [f"{self.hit_rate:.0%} of the prompts' tokens from the cache"] if self.hit_rate else []
        return ", ".join(parts) + ("; interrupted, a rerun resumes" if self.interrupted else "")


@dataclass(kw_only=True)
class Batch:
    """One batch over what serves its jobs."""

    jobs: Jobs
    stopping: Callable[[], bool] = lambda: False  # asked before every step
    summary: Summary = field(default_factory=Summary)

    def run(self, input_path: Path, output: Output, progress: Progress) -> Summary:
        """Serve every line of `input_path` that has no result in `output` yet; `check_input` has passed the file."""
        todo = self._todo(input_path, output)
        bar = progress.add_task("requests", total=count_lines(input_path), speed="")
        more = True
        while not self.stopping():
            more = self._submit(todo)
            if not self.jobs:
                break
            self._step(output, progress, bar)
        unstarted = self.jobs.unstarted()  # after a signal; the others have `DRAIN_S` to finish
        for one in unstarted:
            self.jobs.drop(one)
        deadline = time.monotonic() + DRAIN_S
        while self.jobs and from_first(lambda: time.monotonic() < deadline):
            self._step(output, progress, bar)
        progress.update(bar, completed=self._num_done())
        self.summary.interrupted |= more or bool(unstarted) or bool(self.jobs)
        return self.summary

    def _submit(self, todo: Iterator[Job]) -> bool:
        """Keep as many requests waiting as there are slots; False when no line is left."""
        while self.jobs.scheduler.num_waiting < self.jobs.scheduler.num_slots:
            job = next(todo, None)
            if job is None:
                return False
            self.jobs.start(job)
        return True

    def _step(self, output: Output, progress: Progress, bar: TaskID) -> None:
        for one in self.jobs.step():
            if one.error is not None:
                self._write_failure(output, refused(one.job.custom_id, one.error, status=500))
            elif one.is_done:
                output.write(completed(one, model=self.jobs.model_name))
                self.summary.completed += 1
        scheduler, summary = self.jobs.scheduler, self.summary
        summary.prompt_tokens, summary.cached_tokens = scheduler.prompt_tokens, scheduler.cached_tokens
        summary.tokens = self.jobs.generated_tokens
        progress.update(bar, completed=self._num_done(), speed=self._speed(progress, bar))

    def _todo(self, input_path: Path, output: Output) -> Iterator[Job]:
        """The jobs still to serve; every other line gets its error record on the way."""
        lines = self._lines_to_serve(input_path, output)
        for line, parsed in ahead(self.jobs.parse, lines, workers=WORKERS if self.jobs.reader else 0):
            try:
                yield parsed.result()
            except RequestError as error:
                self._write_failure(output, refused(line.custom_id, error))

    def _lines_to_serve(self, input_path: Path, output: Output) -> Iterator[Line]:
        """The lines that name requests without a result."""
        for number, raw in _lines(input_path):
            if self.stopping():
                self.summary.interrupted = True
                return
            try:
                line = parse_line(raw)
            except RequestError as error:
                self._unusable(output, number, error)
                continue
            if line.custom_id in output.done_ids:
                self.summary.skipped += 1
            else:
                yield line

    def _unusable(self, output: Output, number: int, error: RequestError) -> None:
        if number in output.done_lines:
            self.summary.skipped += 1
        else:
            self._write_failure(output, unusable(number, error))

    def _write_failure(self, output: Output, record: dict) -> None:
        output.write(record)
        self.summary.failed += 1

    def _num_done(self) -> int:
        return self.summary.completed + self.summary.failed + self.summary.skipped

    def _speed(self, progress: Progress, bar: TaskID) -> str:
        elapsed = progress.tasks[bar].elapsed or 0.0
        speed = f"{self.summary.tokens / elapsed:,.0f} tokens/s" if elapsed else ""
        cached = f"{self.summary.hit_rate:.0%} cached" if self.summary.hit_rate else ""
        return "  ".join(part for part in (speed, cached) if part)


def check_input(path: Path) -> dict[str, bytes]:
    """The lines of an input by custom_id, without those that name no request.

    Raises `ConfigError` unless it is a file that can be read, more than once, and no custom_id comes twice.
    """
    try:
        with open(path, "rb") as file:
            regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except OSError as error:
        raise ConfigError(f"--input {path}: cannot be read ({error.strerror})") from error
    if not regular:
        raise ConfigError(f"--input {path}: must be a regular file")
    seen: dict[str, int] = {}
    lines: dict[str, bytes] = {}
    for number, raw in _lines(path):
        try:
            custom_id = parse_line(raw).custom_id
        except RequestError:
            continue  # its error record comes with the results
        first = seen.setdefault(custom_id, number)
        if first != number:
            raise ConfigError(
                f"--input {path} line {number}: custom_id {custom_id!r} is already line {first}'s; give each its own"
            )
        lines[custom_id] = raw.strip()
    return lines


def count_lines(path: Path) -> int:
    """Lines that are not blank."""
    return sum(1 for _ in _lines(path))


def make_progress(console: Console) -> Progress:
    """The progress bar: requests done, tokens/s, cache hits, time."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def show(input_path: Path, output_path: Path, console: Console, *, tokenizer: Tokenizer) -> None:
    """Print each prompt with its completion, or its error, in the order of the input."""
    plain: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}
    records = [json.loads(raw) for _, raw in _lines(output_path)]
    results = {record["custom_id"]: record for record in records if record["response"]}
    for _, raw in _lines(input_path):
        try:
            line = parse_line(raw)
        except RequestError:
            continue
        record = results.get(line.custom_id)
        if record is None:
            continue
        console.rule(printable(line.custom_id), align="left")
        if record["error"]:
            console.print(printable(record["error"]["message"]), style="red", **plain)
            continue
        console.print(printable(_prompt_text(line, tokenizer)), style="dim", end="", **plain)
        for choice in record["response"]["body"]["choices"]:
            text = choice["text"] if "text" in choice else _message_text(choice["message"])
            console.print(printable(text), style="bold", **plain)


def printable(text: str) -> str:
    """`text` with what no terminal can be sent, a lone surrogate of a JSON escape, written as an escape."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _prompt_text(line: Line, tokenizer: Tokenizer) -> str:
    """What a request asked: a prompt's text, or a chat's messages by role."""
    if line.url == COMPLETIONS:
        return tokenizer.decode(prompt_ids(line.body, tokenizer))
    contents = [(message["role"], message.get("content") or "") for message in line.body["messages"]]
    return "".join(f"{role}: {text if isinstance(text, str) else _parts_text(text)}\n" for role, text in contents)


def _parts_text(parts: list[dict[str, Any]]) -> str:
    """The texts of a content in parts; an image is told, not shown."""
    return " ".join(part.get("text", "[image]") for part in parts)


def _message_text(message: dict[str, Any]) -> str:
    """A chat's answer: its reasoning in brackets, its content, its calls."""
    parts = [f"[{message['reasoning_content']}]"] if message["reasoning_content"] else []
    parts += [message["content"]] if message["content"] else []
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return "\n".join([*parts, *(f"{call['name']}({call['arguments']})" for call in calls)])


class StopSignal:
    """Turns the first SIGTERM or SIGINT into a flag; the second one acts as if nothing were installed.

    With several processes JAX's own service takes SIGTERM: whichever is told, all have the flag when they ask for it
    the same number of times.
    """

    def __init__(self) -> None:
        self.received, self._asked, self._shared = False, 0, jax.process_count() > 1

    def __enter__(self) -> StopSignal:
        numbers = () if self._shared else (signal.SIGTERM, signal.SIGINT)
        self._previous = {number: signal.signal(number, self._receive) for number in numbers}
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def __call__(self) -> bool:
        if self._shared and not self.received:
            self._asked += 1
            self.received = multihost_utils.reached_preemption_sync_point(self._asked)
        return self.received

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers from 1; a byte order mark before the first is dropped."""
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if line.strip():
                yield number, line
