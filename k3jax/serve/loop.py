"""The engine's own thread: it steps the scheduler, while coroutines hand it jobs and wait for what comes of them.

Nothing else touches the scheduler. Jobs and cancellations lie in an inbox that the thread looks into between two steps;
it sleeps only where nothing is in flight. With several processes all read what process 0 finds there (`follow`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any

import jax

from k3jax.serve.fields import RequestError
from k3jax.serve.hosts import from_first
from k3jax.serve.jobs import Jobs, Running
from k3jax.serve.metrics import Metrics
from k3jax.serve.request import Job, Line
from k3jax.serve.results import completion_body, usage

IDLE_S = 1.0  # between two signs of life to other processes, whose collectives wait no longer than so long


class BusyError(Exception):
    """All seats are taken."""


@dataclass(frozen=True)
class Update:
    """News of a job: deltas of its choices, and at the end its whole body, its token counts, or its error."""

    deltas: tuple[dict[str, Any], ...] = ()
    body: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None
    error: RequestError | None = None

    @property
    def is_last(self) -> bool:
        """Whether nothing follows."""
        return self.usage is not None or self.error is not None


class Ticket:
    """A seat, from a request's arrival to its end, and the updates of its job. Close it whatever happens."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop, self._home = loop, asyncio.get_running_loop()
        self._updates: asyncio.Queue[Update] = asyncio.Queue()
        self._arrived, self._first_token = time.monotonic(), 0.0
        self._closed = self._ended = False
        self.job: Job | None = None
        self.line: Line | None = None
        self.streams = False

    def start(self, job: Job, line: Line, *, streams: bool) -> None:
        """Hand over the job of a line; with `streams` its deltas come as they are made."""
        self.job, self.line, self.streams = job, line, streams
        self._loop.post("start", self)

    async def updates(self) -> AsyncIterator[Update]:
        """The job's updates up to the last."""
        while not self._ended:
            update = await self._updates.get()
            self._ended = update.is_last
            yield update

    def close(self) -> None:
        """Give the seat back, and end the job if it has not ended."""
        if self._closed:
            return
        self._closed = True
        self._loop.leave(self)
        if self.job is not None and not self._ended:
            self._loop.dropped += self._loop.draining
            self._loop.post("cancel", self)

    def tell(self, update: Update) -> None:
        """Add an update; called by the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the server has ended, and its event loop with it
            self._home.call_soon_threadsafe(self._updates.put_nowait, update)

    def note_times(self, one: Running, metrics: Metrics) -> None:
        """Measure the first token, and at the end the time between tokens."""
        now, tokens = time.monotonic(), sum(answer.num_tokens for answer in one.answers)
        if tokens and not self._first_token:
            self._first_token = now
            metrics.first_token.observe(now - self._arrived)
        if one.is_done and tokens > len(one.answers):
            metrics.per_token.observe((now - self._first_token) * len(one.answers) / (tokens - len(one.answers)))


class EngineLoop:
    """The thread over `jobs`, with `seats` requests at one time. Use as a context manager."""

    def __init__(self, jobs: Jobs, metrics: Metrics, *, seats: int) -> None:
        self.jobs, self.metrics, self.seats = jobs, metrics, seats
        self.failure: Exception | None = None
        self.draining = False  # the server takes no more requests
        self.dropped = 0  # requests that ended without their answer after that
        self._taken: set[Ticket] = set()
        self._inbox: queue.SimpleQueue[tuple[str, Ticket | None]] = queue.SimpleQueue()
        self._running: dict[Running, Ticket] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def __enter__(self) -> EngineLoop:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.post("stop", None)
        self._thread.join()

    def enter(self) -> Ticket:
        """A seat for a request that has arrived. Raises `BusyError`."""
        if len(self._taken) >= self.seats:
            raise BusyError
        ticket = Ticket(self)
        self._taken.add(ticket)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Free a seat."""
        self._taken.discard(ticket)

    def post(self, what: str, ticket: Ticket | None) -> None:
        """Put a message into the inbox: "start", "cancel" or "stop"."""
        self._inbox.put((what, ticket))

    def _run(self) -> None:
        try:
            while self._act_on(self._messages()):
                for one in self.jobs.step():
                    self._tell(one)
        except Exception as error:  # whatever it was, nobody must wait for this thread any more
            self.failure = error
            self._fail_everyone(error)

    def _messages(self) -> list[tuple[str, Ticket | None]]:
        """All that lies in the inbox; where nothing is in flight, wait for it, as long as other processes can."""
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self._inbox.get(block=not self.jobs, timeout=IDLE_S if jax.process_count() > 1 else None))
            while True:
                found.append(self._inbox.get_nowait())
        if jax.process_count() > 1:
            from_first(lambda: [_spelled(what, ticket) for what, ticket in found])
        return found

    def _act_on(self, messages: Iterable[tuple[str, Ticket | None]]) -> bool:
        """Start and end jobs as the messages say; False to stop."""
        for what, ticket in messages:
            if ticket is None:
                return False
            assert ticket.job is not None
            if what == "start":
                self._running[self.jobs.start(ticket.job)] = ticket
            else:
                self._cancel(ticket)
        return True

    def _cancel(self, ticket: Ticket) -> None:
        one = next((one for one, other in self._running.items() if other is ticket), None)
        if one is not None:  # else it has ended while the message was on its way
            self.jobs.drop(one)
            del self._running[one]

    def _tell(self, one: Running) -> None:
        ticket = self._running[one]
        ticket.note_times(one, self.metrics)
        if one.error is not None:
            del self._running[one]
            ticket.tell(Update(error=one.error))
            return
        deltas = tuple(one.deltas()) if ticket.streams else ()
        if one.is_done:
            del self._running[one]
            body = None if ticket.streams else completion_body(one, model=self.jobs.model_name)
            ticket.tell(Update(deltas=deltas, body=body, usage=usage(one)))
        elif deltas:
            ticket.tell(Update(deltas=deltas))

    def _fail_everyone(self, error: Exception) -> None:
        """Answer those that wait, and those that still come, until the thread is stopped."""
        update = Update(error=RequestError(f"the engine failed: {error}", code="engine_failed"))
        for seated in list(self._taken):  # wherever its job is
            seated.tell(update)
        while True:
            what, ticket = self._inbox.get()
            if ticket is None:
                return
            if what == "start":
                ticket.tell(update)


def follow(jobs: Jobs) -> None:
    """The loop of a process beside the one that has the clients: the same jobs and steps, until that one stops."""
    running: dict[str, Running] = {}
    while True:
        for message in from_first(list):
            what, line = message["what"], message["line"]
            if what == "stop":
                return
            if what == "start":
                running[line["custom_id"]] = jobs.start(jobs.parse(Line(**line)))
            elif (one := running.pop(line["custom_id"], None)) is not None:
                jobs.drop(one)
        for one in jobs.step():
            if one.is_done:
                del running[one.job.custom_id]


def _spelled(what: str, ticket: Ticket | None) -> dict[str, Any]:
    """A message as other processes read it."""
    line = None if ticket is None or ticket.line is None else dataclasses.asdict(ticket.line)
    return {"what": what, "line": line}
