"""Jobs in flight over one scheduler: a request's body in, its answers out. Batch files and HTTP both end here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from k3jax.serve.answer import Answer
from k3jax.serve.chat import chat_job
from k3jax.serve.fields import RequestError
from k3jax.serve.images import ImageEncoder, ImageReader
from k3jax.serve.request import CHAT, COMPLETIONS, Job, Limits, Line, completion_job
from k3jax.serve.scheduler import Event, Scheduler
from k3jax.text import Tokenizer


class Running:
    """A job and its answers so far, one for each choice; `error` where it has failed."""

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self.job = job
        self.answers = [Answer.of(job, request, tokenizer) for request in job.requests]
        self.cached_tokens = 0  # of the prompt
        self.error: RequestError | None = None
        self._given = set[int]()  # choices whose last delta was taken

    def deltas(self) -> Iterator[dict[str, Any]]:
        """What has become certain of each choice since the last call."""
        for choice, answer in enumerate(self.answers):
            if choice in self._given:
                continue
            delta = answer.delta()
            if answer.finish:
                self._given.add(choice)
            if delta is not None:
                yield delta

    @property
    def is_done(self) -> bool:
        """Whether nothing more comes: every answer is complete, or the job has failed."""
        return self.error is not None or all(answer.finish for answer in self.answers)


@dataclass(kw_only=True)
class Jobs:
    """What serves jobs, and those that it serves; `reader` and `encoder` where the model sees images."""

    scheduler: Scheduler
    tokenizer: Tokenizer
    limits: Limits
    model_name: str
    reader: ImageReader | None = None
    encoder: ImageEncoder | None = None
    generated_tokens: int = 0
    _running: dict[str, Running] = field(default_factory=dict)  # by key of the request

    def __len__(self) -> int:
        """Choices in flight."""
        return len(self._running)

    def parse(self, line: Line) -> Job:
        """Check a request; any thread may ask. Raises `RequestError`."""
        return parse_request(line, tokenizer=self.tokenizer, limits=self.limits, reader=self.reader)

    def start(self, job: Job) -> Running:
        """Queue a job's requests, once its images are encoded."""
        if self.encoder is not None and self.reader is not None:
            job = self.encoder.job(job, self.reader.media_id)
        one = Running(job, self.tokenizer)
        for request in job.requests:
            self._running[request.key] = one
            self.scheduler.submit(request)
        return one

    def drop(self, one: Running) -> None:
        """End a job early; nothing more comes of it."""
        for request in one.job.requests:
            if self._running.pop(request.key, None) is not None:
                self.scheduler.release(request)

    def unstarted(self) -> list[Running]:
        """Jobs of which no choice has begun."""
        waiting = {request.key for request in self.scheduler.unstarted}
        jobs = dict.fromkeys(self._running.values())
        return [one for one in jobs if all(request.key in waiting for request in one.job.requests)]

    def step(self) -> Iterable[Running]:
        """One step of the scheduler; the jobs that have something new, each once."""
        return dict.fromkeys(one for event in self.scheduler.step() if (one := self._take(event)) is not None)

    def _take(self, event: Event) -> Running | None:
        """Pass an event on to its job; None where another choice of it has failed in the same step."""
        self.generated_tokens += event.token is not None
        one = self._running.get(event.request.key)
        if one is None:
            return None
        choice = event.request.sampling.choice
        answer = one.answers[choice]
        if choice == 0:  # the choices share their prompt, and the first has read it
            one.cached_tokens = event.cached_tokens
        answer.feed(event)
        if answer.finish == "error":
            one.error = event.error
            self.drop(one)
        elif answer.finish:
            self.scheduler.release(event.request)
            del self._running[event.request.key]
        return one


def parse_request(line: Line, *, tokenizer: Tokenizer, limits: Limits, reader: ImageReader | None = None) -> Job:
    """Check a request's url, method and body, and prepare its images where there is a `reader` of them.

    Raises `RequestError` naming the field, its value and what is allowed.
    """
    if line.url == COMPLETIONS:
        job = completion_job(line, tokenizer=tokenizer, limits=limits)
        if reader is not None:
            reader.check(job.requests[0].prompt)
        return job
    if line.url == CHAT:
        return chat_job(line, tokenizer=tokenizer, limits=limits, reader=reader)
    raise RequestError(
        f"url {line.url!r}: no such endpoint; supported: {COMPLETIONS}, {CHAT}", code="unsupported_url", param="url"
    )
