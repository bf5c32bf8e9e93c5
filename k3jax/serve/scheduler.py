"""Which request holds which slot, and what one step does: every decoding slot gains a token, every new one a chunk.

A step decodes first and prefills after, so a long prompt delays the others by one chunk a step, and a slot that a step
frees is filled in the same step. The scheduler knows token ids only; who reads text may `release` a request early.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from k3jax.serve.constraint import Constraint, ConstraintError, Guide
from k3jax.serve.fields import RequestError
from k3jax.serve.sampler import ALL_BITS, Sampled, Sampling


@dataclass(frozen=True, kw_only=True)
class Request:
    """One sequence to complete. `stop_ids` end it and are not part of the text; `top_logprobs` None asks for none.

    `constraint` says which tokens may follow; it is followed on the host, token by token.
    """

    key: str  # unique among the requests in flight
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stop_ids: frozenset[int]
    top_logprobs: int | None = None
    constraint: Constraint | None = None


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Log-probability in nats of a token, and of the likeliest tokens at its position."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True)
class Event:
    """One generated token of a request. The last one has `finish`; with "error" comes what went wrong."""

    request: Request
    token: int | None
    logprobs: TokenLogprobs | None = None
    finish: Literal["stop", "length", "error"] | None = None
    error: RequestError | None = None


class Slots(Protocol):
    """What the scheduler needs of an engine."""

    slots: int
    prefill_chunk: int

    def prefill(
        self,
        slot: int,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        fresh: bool,
        logprobs: bool,
        allowed: np.ndarray | None = None,
    ) -> Sampled:
        """Feed up to `prefill_chunk` tokens to `slot`, emptied first if `fresh`; row 0 is the token after them."""

    def decode(
        self, tokens: np.ndarray, active: np.ndarray, *, logprobs: bool, allowed: np.ndarray | None = None
    ) -> Sampled:
        """Feed one token to each active slot; row i is slot i's next token, of those that row i of `allowed` has."""


@dataclass(kw_only=True)
class _Running:
    request: Request
    guide: Guide | None
    prefilled: int = 0
    generated: list[int] = field(default_factory=list)


class Scheduler:
    """Requests in, events out."""

    def __init__(self, engine: Slots) -> None:
        self._engine = engine
        self._running: list[_Running | None] = [None] * engine.slots
        self._waiting: deque[Request] = deque()

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests with a slot."""
        return sum(running is not None for running in self._running)

    def submit(self, request: Request) -> None:
        """Queue a request; its prompt must hold at least one token."""
        self._waiting.append(request)

    def release(self, request: Request) -> None:
        """Drop a request that needs no more tokens; no further event comes from it."""
        self._waiting = deque(waiting for waiting in self._waiting if waiting is not request)
        for slot, running in enumerate(self._running):
            if running is not None and running.request is request:
                self._running[slot] = None

    def step(self) -> list[Event]:
        """One token for each decoding slot, then one chunk for each slot that still reads its prompt."""
        events = self._decode()
        self._admit()
        return events + self._prefill()

    def _admit(self) -> None:
        for slot, running in enumerate(self._running):
            if running is None and self._waiting:
                request = self._waiting.popleft()
                guide = request.constraint.start() if request.constraint else None
                self._running[slot] = _Running(request=request, guide=guide)

    def _decode(self) -> list[Event]:
        ready = [(slot, r) for slot, r in enumerate(self._running) if r is not None and r.generated]
        if not ready:
            return []
        tokens, active = np.zeros(self._engine.slots, np.int32), np.zeros(self._engine.slots, bool)
        for slot, running in ready:
            tokens[slot], active[slot] = running.generated[-1], True
        logprobs = any(running.request.top_logprobs is not None for _, running in ready)
        allowed = _allowed(ready, num_rows=self._engine.slots)
        sampled = self._engine.decode(tokens, active, logprobs=logprobs, allowed=allowed)
        return [self._event(slot, running, sampled, slot) for slot, running in ready]

    def _prefill(self) -> list[Event]:
        events = []
        for slot, running in enumerate(self._running):
            if running is None or running.generated:
                continue
            request, start = running.request, running.prefilled
            chunk = request.prompt[start : start + self._engine.prefill_chunk]
            running.prefilled += len(chunk)
            wants = request.top_logprobs is not None
            allowed = _allowed([(0, running)], num_rows=1)
            sampled = self._engine.prefill(
                slot, chunk, request.sampling, fresh=start == 0, logprobs=wants, allowed=allowed
            )
            if running.prefilled == len(request.prompt):
                events.append(self._event(slot, running, sampled, 0))
        return events

    def _event(self, slot: int, running: _Running, sampled: Sampled, row: int) -> Event:
        """Record row `row` of `sampled` as `running`'s next token and free its slot if that is the last one."""
        request = running.request
        if not sampled.finite[row]:
            error = RequestError("the model gave logits that are not finite", code="non_finite_logits")
            return self._failed(slot, request, error)
        token = int(sampled.token[row])
        try:
            if running.guide is not None:
                running.guide.advance(token)
        except ConstraintError as error:
            return self._failed(slot, request, RequestError(str(error), code="constraint_failed"))
        running.generated.append(token)
        finish: Literal["stop", "length"] | None = None
        if token in request.stop_ids:
            finish = "stop"
        elif len(running.generated) == request.max_tokens:
            finish = "length"
        if finish:
            self._running[slot] = None
        return Event(request=request, token=token, logprobs=_logprobs(request, sampled, row), finish=finish)

    def _failed(self, slot: int, request: Request, error: RequestError) -> Event:
        self._running[slot] = None
        return Event(request=request, token=None, finish="error", error=error)


def _allowed(rows: Sequence[tuple[int, _Running]], *, num_rows: int) -> np.ndarray | None:
    """The tokens that each row may draw, as `sample` takes them; None where no row is constrained."""
    allowed = None
    for row, running in rows:
        mask = running.guide.allowed if running.guide is not None else None
        if mask is not None:
            allowed = np.full((num_rows, len(mask)), ALL_BITS, np.uint32) if allowed is None else allowed
            allowed[row] = mask
    return allowed


def _logprobs(request: Request, sampled: Sampled, row: int) -> TokenLogprobs | None:
    if request.top_logprobs is None or sampled.logprobs is None:
        return None
    values = sampled.logprobs
    top = zip(values.top_ids[row].tolist(), values.top[row].tolist(), strict=True)
    return TokenLogprobs(logprob=float(values.chosen[row]), top=tuple(top)[: request.top_logprobs])
