"""A batch file from end to end: read lines, keep the slots filled, append a result a line, resume, stop on SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from k3jax.config import ConfigError
from k3jax.serve.answer import Answer, TextStream
from k3jax.serve.request import Completion, Limits, Line, RequestError, parse_completion_request, parse_line, prompt_ids
from k3jax.serve.results import OutputFile, completed, refused, unusable
from k3jax.serve.scheduler import Scheduler, Slots
from k3jax.text import Tokenizer

EXIT_PREEMPTED = 75  # what is written stays; a rerun resumes


@dataclass(kw_only=True)
class Summary:
    """What one run did. `skipped` lines have a result of an earlier run."""

    completed: int = 0
    failed: int = 0
    skipped: int = 0
    tokens: int = 0
    interrupted: bool = False

    def __str__(self) -> str:
        parts = [f"{self.completed} completed", f"{self.failed} failed"]
        parts += [f"{self.skipped} already done"] if self.skipped else []
        return ", ".join(parts) + ("; interrupted, a rerun resumes" if self.interrupted else "")


@dataclass(kw_only=True)
class Batch:
    """One batch over one engine."""

    engine: Slots
    tokenizer: Tokenizer
    limits: Limits
    model_name: str
    stopping: Callable[[], bool] = lambda: False  # asked before every step
    summary: Summary = field(default_factory=Summary)

    def run(self, input_path: Path, output: OutputFile, progress: Progress) -> Summary:
        """Serve every line of `input_path` that has no result in `output` yet."""
        scheduler, answers = Scheduler(self.engine), dict[str, Answer]()
        todo = self._completions(input_path, output)
        bar = progress.add_task("completions", total=count_lines(input_path), speed="")
        more = True
        while not self.stopping():
            while more and scheduler.num_waiting < self.engine.slots:
                completion = next(todo, None)
                more = completion is not None
                if completion is not None:
                    answers[completion.request.key] = self._answer(completion)
                    scheduler.submit(completion.request)
            if not answers:
                break
            self._step(scheduler, answers, output)
            progress.update(bar, completed=self._num_done(), speed=self._speed(progress, bar))
        progress.update(bar, completed=self._num_done())
        self.summary.interrupted |= more or bool(answers)
        return self.summary

    def _step(self, scheduler: Scheduler, answers: dict[str, Answer], output: OutputFile) -> None:
        for event in scheduler.step():
            answer = answers[event.request.key]
            answer.feed(event)
            self.summary.tokens += event.token is not None
            if answer.finish is None:
                continue
            scheduler.release(event.request)
            del answers[event.request.key]
            if answer.finish == "error":
                error = RequestError("the model gave logits that are not finite", code="non_finite_logits")
                self._write_failure(output, refused(event.request.key, error, status=500))
            else:
                output.write(completed(answer, model=self.model_name))
                self.summary.completed += 1

    def _completions(self, input_path: Path, output: OutputFile) -> Iterator[Completion]:
        """The requests still to serve; every other line gets its error record on the way."""
        seen: dict[str, int] = {}
        for number, raw in _lines(input_path):
            if self.stopping():
                self.summary.interrupted = True
                return
            try:
                line = parse_line(raw)
            except RequestError as error:
                self._unusable(output, number, None, error)
                continue
            first = seen.setdefault(line.custom_id, number)
            if first != number:
                message = f"custom_id {line.custom_id!r} is already line {first}'s"
                self._unusable(output, number, line.custom_id, RequestError(message, code="duplicate_custom_id"))
            elif line.custom_id in output.done_ids:
                self.summary.skipped += 1
            else:
                yield from self._checked(line, output)

    def _checked(self, line: Line, output: OutputFile) -> Iterator[Completion]:
        try:
            yield parse_completion_request(line, tokenizer=self.tokenizer, limits=self.limits)
        except RequestError as error:
            self._write_failure(output, refused(line.custom_id, error))

    def _answer(self, completion: Completion) -> Answer:
        stream = TextStream(self.tokenizer, completion.stops)
        return Answer(request=completion.request, tokenizer=self.tokenizer, stream=stream)

    def _unusable(self, output: OutputFile, number: int, custom_id: str | None, error: RequestError) -> None:
        if number in output.done_lines:
            self.summary.skipped += 1
        else:
            self._write_failure(output, unusable(number, custom_id, error))

    def _write_failure(self, output: OutputFile, record: dict) -> None:
        output.write(record)
        self.summary.failed += 1

    def _num_done(self) -> int:
        return self.summary.completed + self.summary.failed + self.summary.skipped

    def _speed(self, progress: Progress, bar: int) -> str:
        elapsed = progress.tasks[bar].elapsed or 0.0
        return f"{self.summary.tokens / elapsed:,.0f} tokens/s" if elapsed else ""


def check_input(path: Path) -> None:
    """Raise `ConfigError` unless the input is a file that can be read, more than once."""
    try:
        with open(path, "rb") as file:
            regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except OSError as error:
        raise ConfigError(f"--input {path}: cannot be read ({error.strerror})") from error
    if not regular:
        raise ConfigError(f"--input {path}: must be a regular file")


def count_lines(path: Path) -> int:
    """Lines that are not blank."""
    return sum(1 for _ in _lines(path))


def make_progress(console: Console) -> Progress:
    """The progress bar: requests done, tokens/s, time."""
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
        record = results.pop(line.custom_id, None)
        if record is None:
            continue
        console.rule(line.custom_id, align="left")
        if record["error"]:
            console.print(record["error"]["message"], style="red", **plain)
        else:
            console.print(tokenizer.decode(prompt_ids(line.body, tokenizer)), style="dim", end="", **plain)
            console.print(record["response"]["body"]["choices"][0]["text"], style="bold", **plain)


class StopSignal:
    """Turns the first SIGTERM or SIGINT into a flag; the second one acts as if nothing were installed."""

    def __init__(self) -> None:
        self.received = False

    def __enter__(self) -> StopSignal:
        self._previous = {number: signal.signal(number, self._receive) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def __call__(self) -> bool:
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
