"""The device side of serving: the pools, and the few programs that change them, compiled before the first request.

Token ids and numbers of slots and pages in, token ids out; who asked for them is the scheduler's business. Every
program takes the pools donated and returns them, so they exist once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, UInt32

from k3jax.config import ModelConfig
from k3jax.nn.cache import Pools
from k3jax.nn.transformer import Transformer
from k3jax.serve import programs
from k3jax.serve.devices import ServeDevices
from k3jax.serve.programs import DecodeRows, PrefillRows
from k3jax.serve.sampler import History, Sampled, Sampling, SamplingRows, all_allowed, token_bits

COUNTS = ("slots", "snapshots", "pages", "prefill_rows")  # of `Sizes`, what shares of a mesh have of their own
LARGEST_PAGE = 128  # tokens: a good size for the TPU's paged decode
LATENTS: dict[str, Any] = {"": None, "fp8": jnp.float8_e4m3fn}  # dtypes of the MLA pages by name


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The shapes of the compiled programs, and what the pools hold.

    `slots` sequences decode together; `snapshots` more slots behind them keep states of prompts that have been read. A
    sequence has up to `table_width` of the `pages`, each of `page` tokens; page 0 is never given away: the TPU's decode
    reads it where a row has none. A prefill call reads up to `prefill_chunk` tokens, a multiple of the page, of each of
    `prefill_rows` prompts.

    A mesh may split all of these but page and chunk into `shares` of equal size. A sequence lives in one: slots
    0 to slots/shares - 1 and that many rows of prefill are the first's, and each numbers its own pages from 0.
    """

    slots: int
    snapshots: int
    pages: int
    page: int
    table_width: int
    prefill_chunk: int
    prefill_rows: int = 1
    shares: int = 1

    @property
    def each(self) -> Sizes:
        """What one share has."""
        counts = {name: getattr(self, name) // self.shares for name in COUNTS}
        return dataclasses.replace(self, shares=1, **counts)

    def times(self, shares: int) -> Sizes:
        """What as many shares have, each of this size."""
        return dataclasses.replace(self, shares=shares, **{name: getattr(self, name) * shares for name in COUNTS})

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        *,
        slots: int,
        max_context: int,
        prefill_chunk: int,
        prefill_rows: int = 1,
        cache_tokens: int = 0,
        snapshot_bytes: int = 0,
        pieces: int = 1,
    ) -> Sizes:
        """Sizes for sequences of up to `max_context` tokens.

        All sequences together, and the prompts that are kept, have `cache_tokens` tokens of MLA cache (0: as many as
        all slots can fill; one sequence always fits) and `snapshot_bytes` for snapshots of the KDA state. Every page
        lies in `pieces` on as many devices.
        """
        page = math.gcd(prefill_chunk, LARGEST_PAGE * pieces)
        width = -(-max_context // page)
        pages = 1 + max(width, -(-cache_tokens // page) if cache_tokens else slots * width)
        snapshots = min(snapshot_bytes // slot_bytes(config), pages * page // prefill_chunk)
        return cls(
            slots=slots,
            snapshots=snapshots,
            pages=pages,
            page=page,
            table_width=width,
            prefill_chunk=prefill_chunk,
            prefill_rows=prefill_rows,
        )


def slot_bytes(config: ModelConfig) -> int:
    """What a sequence keeps in all KDA layers; a byte where there are none."""
    pools = jax.eval_shape(lambda: Pools.zeros(config, slots=1, pages=0, page=2))
    return max(1, sum(leaf.size * leaf.dtype.itemsize for leaf in (pools.state, pools.history)))


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """What one row of a prefill call reads: `tokens`, after `start` earlier ones of the same sequence.

    `seen` are the bits of all of its prompt's tokens; `allowed` those that may be sampled (`sample`), None for all.
    `features` are those of the images in `tokens`, in order, if there are any.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    pages: Int[np.ndarray, "W"]
    seen: UInt32[np.ndarray, "words"]
    sampling: Sampling
    targets: Sequence[int] = ()  # the token after each of `tokens`, to have its log-probability; none: it is not wanted
    allowed: UInt32[np.ndarray, "words"] | None = None
    features: Float[np.ndarray, "n D"] | None = None


class Engine:
    """The pools of `sizes` and the programs over them; `report` is told what is being compiled.

    `mesh` has the size of each of its axes, and the model lies on it; empty is one device. Another model of the same
    shapes may take the place of `model` while no request runs. `latents` "fp8" keeps the
    MLA latents in float8_e4m3fn with one scale a token; "" in the compute dtype. Only with `scores` can a chunk ask for
    log-probabilities of a prompt's own tokens.
    """

    def __init__(
        self,
        model: Transformer,
        sizes: Sizes,
        *,
        max_top_logprobs: int,
        latents: str = "",
        scores: bool = False,
        mesh: Mapping[str, int] | None = None,
        report: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._devices = {mode: ServeDevices.of(dict(mesh or {}), mode, model) for mode in ("prefill", "decode")}
        self.sizes, self.scores, self.model, self._top, self._report = sizes, scores, model, max_top_logprobs, report
        self._vocab = model.config.vocab_size
        self._pools, self._history = self._make_state(LATENTS[latents])
        self._all_allowed = self._put(all_allowed(sizes.slots, self._vocab))  # no upload where nothing is barred
        self._samplings = [Sampling(temperature=0.0)] * sizes.slots
        self._rows: SamplingRows | None = None
        self._compile_all()

    @property
    def temporary_bytes(self) -> int:
        """Memory that the larger of prefill and decode needs beside weights and pools."""
        return max(program.memory_analysis().temp_size_in_bytes for program in (self._prefill, self._decode))

    def vocabulary_bits(self, tokens: Sequence[int]) -> UInt32[np.ndarray, "words"]:
        """`Chunk.seen` of a prompt."""
        return token_bits(tokens, self._vocab)

    def prefill(self, chunks: Sequence[Chunk], *, logprobs: bool) -> Sampled:
        """Read up to `prefill_rows` chunks; row i of the result is the token sampled after chunk i.

        `logprobs` false leaves the arrays of log-probabilities on the device. Raises IndexError for a slot that does
        not exist.
        """
        for chunk in chunks:
            self._check_slot(chunk.slot, self.sizes.slots)
            if self._samplings[chunk.slot] != chunk.sampling:
                self._samplings[chunk.slot], self._rows = chunk.sampling, None
        placed = self._places(chunks)
        rows = self._prefill_rows(placed)
        program = self._prefill if rows.features is None else self._prefill_images
        sampled = self._run(program, (rows, *self._targets(placed)), logprobs=logprobs)
        return jax.tree.map(lambda x: x[list(placed)], sampled)

    def decode(
        self,
        tokens: Int[np.ndarray, "S"],
        length: Int[np.ndarray, "S"],
        page_table: Int[np.ndarray, "S W"],
        *,
        logprobs: bool,
        allowed: UInt32[np.ndarray, "S words"] | None = None,
    ) -> Sampled:
        """Feed `tokens[i]` to every slot i that holds `length[i]` > 0 tokens; row i of the result is what follows.

        Other slots stay unchanged.
        """
        return self._run(self._decode, (self._decode_rows(tokens, length, page_table, allowed),), logprobs=logprobs)

    def copy(self, source: int, target: int, *, share: int = 0) -> None:
        """Make a share's slot `target` equal to its `source`; behind its slots, numbered from 0, are its snapshots.

        Raises IndexError for a slot that does not exist.
        """
        each = self.sizes.each
        for slot in (source, target):
            self._check_slot(slot, each.slots + each.snapshots)
        self._pools = self._copy(self._pools, self._for_share(share, source, -1), self._for_share(share, target, -1))

    def clear(self, pages: Sequence[int], *, share: int = 0) -> None:
        """Empty pages of a share."""
        size, shares = self.sizes.each.slots, self.sizes.shares
        for start in range(0, len(pages), size):
            numbers, part = np.zeros((shares, size), np.int32), pages[start : start + size]
            numbers[share, : len(part)] = part
            self._pools = self._clear(self._pools, numbers.reshape(-1), self._for_share(share, len(part), 0))

    def _for_share(self, share: int, value: int, other: int) -> Int[np.ndarray, "shares"]:
        values = np.full(self.sizes.shares, other, np.int32)
        values[share] = value
        return values

    def _places(self, chunks: Sequence[Chunk]) -> dict[int, Chunk]:
        """Chunks by the row of a prefill call, which must be one of their share's. Raises ValueError for too many."""
        each, placed = self.sizes.each, dict[int, Chunk]()
        for chunk in chunks:
            first = chunk.slot // each.slots * each.prefill_rows
            row = next((row for row in range(first, first + each.prefill_rows) if row not in placed), None)
            if row is None:
                raise ValueError(
                    f"a share has {each.prefill_rows} rows for the chunks of a prefill call: too many chunks"
                )
            placed[row] = chunk
        return placed

    def _check_slot(self, slot: int, count: int) -> None:
        if not 0 <= slot < count:  # a dynamic index would be clipped to another sequence's slot
            raise IndexError(f"slot {slot} of {count}")

    def _make_state(self, latents: Any) -> tuple[Pools, History]:
        """The empty pools and history, made where they will lie."""
        s, config, devices = self.sizes, self.model.config, self._devices["decode"]

        def pools() -> Pools:
            return Pools.zeros(config, slots=s.slots + s.snapshots, pages=s.pages, page=s.page, latents=latents)

        def history() -> History:
            return History.zeros(slots=s.slots, vocab=self._vocab)

        pool_specs = devices.pool_specs(jax.eval_shape(pools))
        return devices.create(pools, pool_specs), devices.create(history, devices.row_specs(jax.eval_shape(history)))

    def _put(self, rows: Any) -> Any:
        devices = self._devices["decode"]
        return devices.put(rows, devices.row_specs(rows))

    def _compile_all(self) -> None:
        """Trace the programs one after the other and compile them side by side."""
        s, top = self.sizes, self._top
        idle, numbers = np.zeros(s.slots, np.int32), np.zeros(s.shares, np.int32)
        read = partial(programs.prefill_and_score if self.scores else programs.prefill, top=top)
        chunks, targets = self._prefill_rows({}), self._targets({})
        self._report(f"compiling prefill [{s.prefill_rows}, {s.prefill_chunk}]")
        lowered = {"prefill": self._lowered("prefill", read, (chunks, *targets))}
        if self.model.vision is not None:
            no_features: Any = self._no_features()
            chunks = dataclasses.replace(chunks, features=no_features)
            lowered["prefill_images"] = self._lowered("prefill", read, (chunks, *targets))
        self._report(f"compiling decode [{s.slots}, 1]")
        tokens = self._decode_rows(idle, idle, np.full((s.slots, s.table_width), -1, np.int32), None)
        lowered["decode"] = self._lowered("decode", partial(programs.decode, top=top), (tokens,))
        devices = self._devices["decode"]
        for name, program, first in (("copy", programs.copy_slot, numbers), ("clear", programs.clear_pages, idle)):
            lowered[name] = devices.jit_pools(program, self._pools).lower(
                self._pools, *devices.blank_rows((first, numbers))
            )
        with ThreadPoolExecutor() as threads:
            compiled = dict(zip(lowered, threads.map(lambda program: program.compile(), lowered.values()), strict=True))
        self._prefill, self._decode = compiled["prefill"], compiled["decode"]
        self._copy, self._clear = compiled["copy"], compiled["clear"]
        self._prefill_images = compiled.get("prefill_images", self._prefill)

    def _lowered(self, mode: str, program: Callable, rows: tuple[Any, ...]) -> jax.stages.Lowered:
        devices, state = self._devices[mode], (self._pools, self._history)
        return devices.jit(program, *state, rows).lower(self.model, *state, *devices.blank_rows(rows))

    def _run(self, program: Callable, rows: tuple[Any, ...], *, logprobs: bool) -> Sampled:
        self._pools, self._history, sampled = program(self.model, self._pools, self._history, *rows)
        return jax.device_get(sampled if logprobs else dataclasses.replace(sampled, logprobs=None, prompt=None))

    def _prefill_rows(self, chunks: Mapping[int, Chunk]) -> PrefillRows:
        s, count = self.sizes, self.sizes.prefill_rows
        rows: Any = {
            "tokens": np.zeros((count, s.prefill_chunk), np.int32),
            "num_valid": np.zeros(count, np.int32),
            "slots": np.full(count, -1, np.int32),
            "page_table": np.full((count, s.table_width), -1, np.int32),
            "length": np.zeros(count, np.int32),
            "seen": np.zeros((count, -(-self._vocab // 32)), np.uint32),
            "allowed": all_allowed(count, self._vocab),
        }
        for row, chunk in chunks.items():
            size = len(chunk.tokens)
            rows["tokens"][row, :size], rows["num_valid"][row] = chunk.tokens, size
            rows["slots"][row], rows["length"][row] = chunk.slot % s.each.slots, chunk.start
            rows["page_table"][row], rows["seen"][row] = chunk.pages, chunk.seen
            if chunk.allowed is not None:
                rows["allowed"][row] = chunk.allowed
        if any(chunk.features is not None for chunk in chunks.values()):
            rows["features"] = self._no_features()
            for row, chunk in chunks.items():
                if chunk.features is not None:
                    rows["features"][row, : len(chunk.features)] = chunk.features
        samplings = [chunks[row].sampling if row in chunks else Sampling() for row in range(count)]
        return PrefillRows(**rows, sampling=SamplingRows.of(samplings))

    def _targets(self, chunks: Mapping[int, Chunk]) -> tuple[np.ndarray, ...]:
        """The further argument of a prefill that scores."""
        if not self.scores:
            return ()
        targets = np.full((self.sizes.prefill_rows, self.sizes.prefill_chunk), -1, np.int32)
        for row, chunk in chunks.items():
            targets[row, : len(chunk.targets)] = chunk.targets
        return (targets,)

    def _no_features(self) -> np.ndarray:
        config = self.model.config
        shape = (self.sizes.prefill_rows, self.sizes.prefill_chunk, config.width)
        return np.zeros(shape, jnp.dtype(config.dtype))

    def _decode_rows(self, tokens: Any, length: Any, page_table: Any, allowed: Any) -> DecodeRows:
        if self._rows is None:
            self._rows = self._put(SamplingRows.of(self._samplings))
        allowed = self._all_allowed if allowed is None else allowed
        return DecodeRows(tokens=tokens, page_table=page_table, length=length, sampling=self._rows, allowed=allowed)
