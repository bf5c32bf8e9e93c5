"""Which sequence holds which slot and pages, and what one step does: a token for each that decodes, a chunk for some.

A step decodes first and reads prompts after, a few chunks at most, so that a long prompt delays the others by little; a
slot that a step frees is filled in the same step. Sequences are admitted while pages are free. When they run out, what
is kept of old prompts goes first, then the youngest sequence: it waits again, and later reads its prompt and feeds
itself the tokens it had generated, through the same programs, so that nothing of its answer changes.

The scheduler knows token ids only; who reads text may `release` a request early.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from k3jax.serve.constraint import Constraint, ConstraintError, Guide
from k3jax.serve.engine import Chunk, Sizes
from k3jax.serve.fields import RequestError
from k3jax.serve.images import PromptImages
from k3jax.serve.pages import PagePool
from k3jax.serve.prefix_cache import Match, PrefixCache
from k3jax.serve.sampler import ALL_BITS, Logprobs, Sampled, Sampling

READERS = 4  # prompts that are read at one time, at least; more where there are many slots
SLOTS_PER_READER = 8


@dataclass(frozen=True, kw_only=True)
class Request:
    """One sequence to complete. `stop_ids` end it and are not part of the text; `top_logprobs` None asks for none.

    `constraint` says which tokens may follow; it is followed on the host, token by token. `shared_tokens` is how much
    of the prompt others are likely to begin with (a system prompt), so that its state is worth keeping. `echo` asks for
    the log-probabilities of the prompt's own tokens with the first event (where `top_logprobs` asks for any); such a
    prompt is read whole. `max_tokens` 0 ends after that.
    """

    key: str  # unique among the requests in flight
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stop_ids: frozenset[int]
    top_logprobs: int | None = None
    constraint: Constraint | None = None
    shared_tokens: int = 0
    echo: bool = False
    images: PromptImages | None = None

    @property
    def identity(self) -> tuple[int, ...]:
        """What prompts with the same beginning share: token ids, and keys of images in place of theirs."""
        return self.prompt if self.images is None else self.images.identity

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt's tokens are wanted."""
        return self.echo and self.top_logprobs is not None


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Log-probability in nats of a token, and of the likeliest tokens at its position."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True)
class Event:
    """One generated token of a request. The last one has `finish`; with "error" comes what went wrong.

    Without any generated token (`max_tokens` 0) `token` is None.

    `cached_tokens` of the prompt were not read, because their memory was kept.
    """

    request: Request
    token: int | None
    logprobs: TokenLogprobs | None = None
    finish: Literal["stop", "length", "error"] | None = None
    error: RequestError | None = None
    cached_tokens: int = 0
    prompt: tuple[TokenLogprobs, ...] = ()  # of the prompt's tokens from the second on, with the first event


class Device(Protocol):
    """What the scheduler needs of an `Engine`."""

    sizes: Sizes

    def vocabulary_bits(self, tokens: Sequence[int]) -> np.ndarray:
        """`Chunk.seen` of a prompt."""

    def prefill(self, chunks: Sequence[Chunk], *, logprobs: bool) -> Sampled:
        """Read a chunk of up to `prefill_rows` prompts; row i is the token after chunk i."""

    def decode(
        self,
        tokens: np.ndarray,
        length: np.ndarray,
        page_table: np.ndarray,
        *,
        logprobs: bool,
        allowed: np.ndarray | None = None,
    ) -> Sampled:
        """Feed one token to each slot that holds tokens; row i is slot i's next token, of those that are allowed."""

    def copy(self, source: int, target: int, *, share: int = 0) -> None:
        """Copy the state of a share's slot."""

    def clear(self, pages: Sequence[int], *, share: int = 0) -> None:
        """Empty pages of a share."""


@dataclass(kw_only=True, eq=False)
class _Sequence:
    """A request and how far it is. `length` tokens, of prompt and generated ones, are in its slot and pages."""

    request: Request
    age: int
    guide: Guide | None
    generated: list[int] = field(default_factory=list)
    cached: int | None = None  # tokens of the prompt that were not read when it first started
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    length: int = 0
    seen: np.ndarray | None = None
    marks: set[int] = field(default_factory=set)  # lengths after which its state is worth keeping
    scored: list[TokenLogprobs] = field(default_factory=list)  # the prompt's tokens from the second on

    @property
    def reads(self) -> bool:
        return self.length < len(self.request.prompt)

    @property
    def replays(self) -> bool:
        """Whether it is fed tokens that it had generated before it lost its slot."""
        return self.length - len(self.request.prompt) < len(self.generated)


class _Share:
    """The slots and pages that one part of the mesh has, one device's all: `sizes` of them, numbered from 0."""

    def __init__(self, number: int, sizes: Sizes) -> None:
        self.number, self.sizes = number, sizes
        self.slots = range(number * sizes.slots, (number + 1) * sizes.slots)  # among those of all shares
        self.pool = PagePool(range(1, sizes.pages))
        snapshots = range(sizes.slots, sizes.slots + sizes.snapshots)
        self.prefixes = PrefixCache(self.pool, page=sizes.page, slots=snapshots)

    def make_room(self, count: int, *, spare: int = 0) -> bool:
        """Whether `count` pages are free, after giving up old prompts if need be; `spare` more should be left."""
        if self.pool.num_free + self.prefixes.num_evictable < count + spare:
            return False
        while self.pool.num_free < count:
            self.prefixes.evict()
        return True


class Scheduler:
    """Requests in, events out. A state is kept every `snapshot_every` tokens of a prompt, and where prompts part."""

    def __init__(self, device: Device, *, snapshot_every: int = 4096) -> None:
        self._device, self._sizes, self._snapshot_every = device, device.sizes, snapshot_every
        s = device.sizes
        self._slots: list[_Sequence | None] = [None] * s.slots
        self._waiting: deque[_Sequence] = deque()
        self._table = np.full((s.slots, s.table_width), -1, np.int32)
        self._each = s.each
        self._shares = [_Share(number, self._each) for number in range(s.shares)]
        self._submitted = 0
        self.prompt_tokens = self.cached_tokens = 0  # of all requests that have started

    @property
    def num_slots(self) -> int:
        """Requests that can have a slot at one time."""
        return len(self._slots)

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests with a slot."""
        return len(self._running())

    @property
    def num_free_pages(self) -> int:
        """Pages that nobody holds, not even for a later prompt."""
        return sum(share.pool.num_free for share in self._shares)

    @property
    def unstarted(self) -> list[Request]:
        """Requests that wait and have no token yet."""
        return [sequence.request for sequence in self._waiting if not sequence.generated]

    def submit(self, request: Request) -> None:
        """Queue a request; its prompt must hold at least one token, and with `max_tokens` fit into the context."""
        guide = request.constraint.start() if request.constraint else None
        self._waiting.append(_Sequence(request=request, age=self._submitted, guide=guide))
        self._submitted += 1

    def release(self, request: Request) -> None:
        """Drop a request that needs no more tokens; no further event comes from it."""
        self._waiting = deque(waiting for waiting in self._waiting if waiting.request is not request)
        for sequence in self._running():
            if sequence.request is request:
                self._take_slot_from(sequence)

    def step(self) -> list[Event]:
        """One token for each sequence that decodes, then one chunk for each that reads its prompt."""
        events = self._decode()
        self._admit()
        return events + self._prefill()

    # Decoding

    def _decode(self) -> list[Event]:
        for sequence in self._running():
            if not sequence.reads:
                self._give_page(sequence)
        ready = [sequence for sequence in self._running() if not sequence.reads]
        if not ready:
            return []
        tokens, length = (np.zeros(self._sizes.slots, np.int32) for _ in range(2))
        for sequence in ready:
            tokens[sequence.slot] = sequence.generated[sequence.length - len(sequence.request.prompt)]
            length[sequence.slot] = sequence.length
        logprobs = any(sequence.request.top_logprobs is not None for sequence in ready)
        allowed = _allowed([(sequence.slot, sequence) for sequence in ready], num_rows=self._sizes.slots)
        sampled = self._device.decode(tokens, length, self._table, logprobs=logprobs, allowed=allowed)
        for sequence in ready:
            sequence.length += 1
        return [self._event(sequence, sampled, sequence.slot) for sequence in ready if not sequence.replays]

    def _give_page(self, sequence: _Sequence) -> None:
        """See to it that a sequence's next token has a page. For want of one, the youngest loses its slot."""
        share = self._share_of(sequence)
        while sequence.slot >= 0 and sequence.length >= len(sequence.pages) * self._sizes.page:
            if share.make_room(1):
                pages = share.pool.take(1)
                self._device.clear(pages, share=share.number)
                self._hold(sequence, [*sequence.pages, *pages])
            else:
                self._suspend(self._running(share)[-1])

    def _suspend(self, sequence: _Sequence) -> None:
        """Take slot and pages from a sequence, which waits for its turn again before all younger ones."""
        self._take_slot_from(sequence)
        self._waiting.appendleft(sequence)

    # Reading prompts

    def _admit(self) -> None:
        readers = max(READERS, self._sizes.slots // SLOTS_PER_READER)
        reading = [sequence for sequence in self._running() if sequence.reads]
        for sequence in list(self._waiting):
            if len(reading) >= readers or None not in self._slots:
                return
            if self._waits_for(sequence, reading):
                continue
            if not self._start(sequence):
                return
            self._waiting.remove(sequence)
            reading.append(sequence)

    def _waits_for(self, sequence: _Sequence, reading: Sequence[_Sequence]) -> bool:
        """Whether somebody is about to read what `sequence` begins with; the state after it will then be kept."""
        if not self._sizes.snapshots or sequence.request.scores_prompt:
            return False
        identity = sequence.request.identity
        for other in reading:
            shared = _common(identity[:-1], other.request.identity, self._sizes.prefill_chunk)
            if shared > other.length:
                other.marks.add(shared)
                return True
        return False

    def _start(self, sequence: _Sequence) -> bool:
        """Give a slot and pages to a sequence; False where there are too few.

        It goes where most of its prompt is kept, else where most pages are free.
        """
        request = sequence.request
        # One token at least is read, for its logits; a prompt that is scored is read whole.
        known = () if request.scores_prompt else request.identity[:-1]
        shares = [share for share in self._shares if None in self._slots_of(share)]
        hits = [(share.prefixes.match(known), share) for share in shares]
        hits.sort(key=lambda hit: (-hit[0].length, -hit[1].pool.num_free, hit[1].number))
        return any(self._start_in(share, sequence, hit) for hit, share in hits)

    def _start_in(self, share: _Share, sequence: _Sequence, hit: Match) -> bool:
        page, length = self._sizes.page, len(sequence.request.prompt)
        total = -(-(length + max(1, len(sequence.generated))) // page)
        share.pool.hold(hit.pages)
        slot = self._slots_of(share).index(None)
        if hit.length:  # before making room can evict it
            self._device.copy(hit.snapshot, slot, share=share.number)
        others = len(self._running(share))  # each may need a page soon
        if not share.make_room(total - len(hit.pages), spare=others):
            share.pool.drop(hit.pages)
            return False
        pages = share.pool.take(total - len(hit.pages))
        sequence.slot, sequence.length, sequence.scored = share.slots[slot], hit.length, []
        self._slots[sequence.slot] = sequence
        self._hold(sequence, [*hit.pages, *pages])
        # Chunks overwrite whole pages, tokens do not.
        self._device.clear(sequence.pages[-(-length // page) :], share=share.number)
        self._note_start(sequence, hit.length, hit.shared)
        return True

    def _note_start(self, sequence: _Sequence, cached: int, shared: int) -> None:
        request, chunk = sequence.request, self._sizes.prefill_chunk
        sequence.marks = {length // chunk * chunk for length in (shared, request.shared_tokens)}
        if sequence.cached is None:
            sequence.cached = cached
            sequence.seen = self._device.vocabulary_bits(request.prompt)
            self.prompt_tokens += len(request.prompt)
            self.cached_tokens += cached

    def _prefill(self) -> list[Event]:
        rows = self._each.prefill_rows
        reading = [[sequence for sequence in self._running(share) if sequence.reads] for share in self._shares]
        events = []
        for start in range(0, max(map(len, reading)), rows):
            events += self._read([sequence for part in reading for sequence in part[start : start + rows]])
        return events

    def _read(self, sequences: Sequence[_Sequence]) -> list[Event]:
        """One chunk for each of up to `prefill_rows` sequences, as many in every share."""
        chunks = [self._chunk(sequence) for sequence in sequences]
        logprobs = any(sequence.request.top_logprobs is not None for sequence in sequences)
        sampled = self._device.prefill(chunks, logprobs=logprobs)
        events = []
        for row, (sequence, chunk) in enumerate(zip(sequences, chunks, strict=True)):
            sequence.length += len(chunk.tokens)
            if not sampled.finite[row]:
                events.append(self._event(sequence, sampled, row))
                continue
            sequence.scored += _scored(sequence.request, chunk, sampled, row)
            self._keep_state(sequence)
            if not sequence.reads and not sequence.replays:
                events.append(self._event(sequence, sampled, row))
        return events

    def _chunk(self, sequence: _Sequence) -> Chunk:
        request, start = sequence.request, sequence.length
        tokens = request.prompt[start : start + self._sizes.prefill_chunk]
        ends = start + len(tokens) == len(request.prompt) and not sequence.generated
        allowed = sequence.guide.allowed if ends and sequence.guide is not None else None
        assert sequence.seen is not None
        images = request.images
        return Chunk(
            slot=sequence.slot,
            start=start,
            tokens=tokens,
            pages=self._table[sequence.slot],
            seen=sequence.seen,
            sampling=request.sampling,
            targets=request.prompt[start + 1 : start + 1 + len(tokens)] if request.scores_prompt else (),
            allowed=allowed,
            features=None if images is None else images.within(start, start + len(tokens)),
        )

    def _keep_state(self, sequence: _Sequence) -> None:
        """Keep the state between two chunks where it is worth it: at the end of a prompt, in intervals, at marks."""
        chunk, every, length = self._sizes.prefill_chunk, self._snapshot_every, sequence.length
        if length % chunk or not self._sizes.snapshots:
            return
        last = length + chunk > len(sequence.request.prompt)
        if last or length in sequence.marks or length // every > (length - chunk) // every:
            share, pages = self._share_of(sequence), sequence.pages[: length // self._sizes.page]
            slot = share.prefixes.insert(sequence.request.identity[:length], pages)
            if slot is not None:
                self._device.copy(sequence.slot - share.slots.start, slot, share=share.number)

    # Slots and pages

    def _running(self, share: _Share | None = None) -> list[_Sequence]:
        """Sequences with a slot, of one share or all, oldest first."""
        slots = self._slots if share is None else self._slots_of(share)
        return sorted((sequence for sequence in slots if sequence is not None), key=lambda s: s.age)

    def _slots_of(self, share: _Share) -> list[_Sequence | None]:
        return self._slots[share.slots.start : share.slots.stop]

    def _share_of(self, sequence: _Sequence) -> _Share:
        """The share that a sequence with a slot lives in."""
        return self._shares[sequence.slot // self._each.slots]

    def _hold(self, sequence: _Sequence, pages: list[int]) -> None:
        sequence.pages = pages
        self._table[sequence.slot, : len(pages)] = pages

    def _take_slot_from(self, sequence: _Sequence) -> None:
        self._share_of(sequence).pool.drop(sequence.pages)
        self._slots[sequence.slot] = None
        self._table[sequence.slot] = -1
        sequence.slot, sequence.pages, sequence.length = -1, [], 0

    # Events

    def _event(self, sequence: _Sequence, sampled: Sampled, row: int) -> Event:
        """Record row `row` of `sampled` as the next token and free the slot if that is the last one."""
        request = sequence.request
        if not sampled.finite[row]:
            error = RequestError("the model gave logits that are not finite", code="non_finite_logits")
            return self._failed(sequence, error)
        if request.max_tokens == 0:
            return self._scored_only(sequence)
        token = int(sampled.token[row])
        try:
            if sequence.guide is not None:
                sequence.guide.advance(token)
        except ConstraintError as error:
            return self._failed(sequence, RequestError(str(error), code="constraint_failed"))
        sequence.generated.append(token)
        finish: Literal["stop", "length"] | None = None
        if token in request.stop_ids:
            finish = "stop"
        elif len(sequence.generated) == request.max_tokens:
            finish = "length"
        if finish:
            self._take_slot_from(sequence)
        return Event(
            request=request,
            token=token,
            logprobs=_logprobs(request, sampled, row),
            finish=finish,
            cached_tokens=sequence.cached or 0,
            prompt=tuple(sequence.scored) if len(sequence.generated) == 1 else (),
        )

    def _scored_only(self, sequence: _Sequence) -> Event:
        self._take_slot_from(sequence)
        cached = sequence.cached or 0
        return Event(
            request=sequence.request, token=None, finish="length", cached_tokens=cached, prompt=tuple(sequence.scored)
        )

    def _failed(self, sequence: _Sequence, error: RequestError) -> Event:
        self._take_slot_from(sequence)
        return Event(request=sequence.request, token=None, finish="error", error=error)


def _common(a: Sequence[int], b: Sequence[int], chunk: int) -> int:
    """Tokens that two prompts begin with alike, in whole chunks."""
    length = 0
    while length + chunk <= min(len(a), len(b)) and a[length : length + chunk] == b[length : length + chunk]:
        length += chunk
    return length


def _allowed(rows: Sequence[tuple[int, _Sequence]], *, num_rows: int) -> np.ndarray | None:
    """The tokens that each row may draw, as `sample` takes them; None where no row is constrained."""
    allowed = None
    for row, sequence in rows:
        mask = sequence.guide.allowed if sequence.guide is not None else None
        if mask is not None:
            allowed = np.full((num_rows, len(mask)), ALL_BITS, np.uint32) if allowed is None else allowed
            allowed[row] = mask
    return allowed


def _logprobs(request: Request, sampled: Sampled, row: int) -> TokenLogprobs | None:
    if request.top_logprobs is None or sampled.logprobs is None:
        return None
    return _entry(request, sampled.logprobs, row)


def _scored(request: Request, chunk: Chunk, sampled: Sampled, row: int) -> list[TokenLogprobs]:
    """Of the tokens after each of a chunk's, where they are wanted."""
    if not chunk.targets or sampled.prompt is None:
        return []
    return [_entry(request, sampled.prompt, (row, at)) for at in range(len(chunk.targets))]


def _entry(request: Request, values: Logprobs, at: int | tuple[int, int]) -> TokenLogprobs:
    top = zip(values.top_ids[at].tolist(), values.top[at].tolist(), strict=True)
    return TokenLogprobs(logprob=float(values.chosen[at]), top=tuple(top)[: request.top_logprobs])
