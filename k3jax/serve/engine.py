"""The device side of serving: one pool of slots and two compiled programs, a prefill chunk and a decode step.

Slot = row of the pool `Cache` (KDA recurrent and conv state, MLA latent). Both programs take the pool donated and
return it, so it exists once. Token ids in, token ids out; who asked for them is the scheduler's business.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt32

from k3jax.nn.cache import Cache
from k3jax.nn.generate import extend
from k3jax.nn.transformer import Transformer
from k3jax.serve.sampler import History, Sampled, Sampling, SamplingRows, all_allowed, sample


class Engine:
    """`slots` sequences of up to `max_context` tokens, decoded together.

    Both programs are compiled here, before the first request; `report` is told what is being compiled. The prompt is
    read `prefill_chunk` tokens at a time.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        slots: int,
        max_context: int,
        prefill_chunk: int,
        max_top_logprobs: int,
        report: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.slots, self.prefill_chunk = slots, prefill_chunk
        self._top, self._model = max_top_logprobs, model
        self._cache = Cache.zeros(model.config, batch=slots, max_len=max_context)
        self._history = History.zeros(batch=slots, vocab=model.config.vocab_size)
        self._all_allowed = jnp.asarray(
            all_allowed(slots, model.config.vocab_size)
        )  # no upload where nothing is barred
        self._samplings = [Sampling(temperature=0.0)] * slots
        self._rows: SamplingRows | None = None
        report(f"compiling prefill [1, {prefill_chunk}]")
        self._prefill = self._compile(_prefill, *self._prefill_arguments(0, [0], Sampling(), fresh=True))
        report(f"compiling decode [{slots}, 1]")
        self._decode = self._compile(_decode, *self._decode_arguments(np.zeros(slots, np.int32), np.zeros(slots, bool)))

    def prefill(
        self,
        slot: int,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        fresh: bool,
        logprobs: bool,
        allowed: UInt32[np.ndarray, "1 W"] | None = None,
    ) -> Sampled:
        """Feed 1..prefill_chunk `tokens` to `slot`, emptied first if `fresh`; row 0 is the token sampled after them.

        `logprobs` false leaves the arrays of log-probabilities on the device. `allowed` says which tokens may be
        sampled (`sample`), None all. Raises IndexError for a slot that does not exist.
        """
        arguments = self._prefill_arguments(slot, tokens, sampling, fresh=fresh, allowed=allowed)
        if self._samplings[slot] != sampling:
            self._samplings[slot], self._rows = sampling, None
        self._cache, self._history, sampled = self._prefill(self._model, self._cache, self._history, *arguments)
        return _to_host(sampled, logprobs)

    def decode(
        self,
        tokens: Int[np.ndarray, "S"],
        active: Bool[np.ndarray, "S"],
        *,
        logprobs: bool,
        allowed: UInt32[np.ndarray, "S W"] | None = None,
    ) -> Sampled:
        """Feed `tokens[i]` to every active slot i; row i of the result is what follows. Other slots stay unchanged."""
        arguments = self._decode_arguments(tokens, active, allowed)
        self._cache, self._history, sampled = self._decode(self._model, self._cache, self._history, *arguments)
        return _to_host(sampled, logprobs)

    def _compile(self, program: Callable, *arguments: object) -> Callable:
        jitted = jax.jit(partial(program, top=self._top), donate_argnums=(1, 2))
        return jitted.lower(self._model, self._cache, self._history, *arguments).compile()

    def _prefill_arguments(
        self,
        slot: int,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        fresh: bool,
        allowed: UInt32[np.ndarray, "1 W"] | None = None,
    ) -> tuple:
        if not 0 <= slot < self.slots:  # a dynamic index would be clipped to another request's slot
            raise IndexError(f"slot {slot} of {self.slots}")
        padded = np.zeros((1, self.prefill_chunk), np.int32)
        padded[0, : len(tokens)] = tokens
        length, rows = np.asarray([len(tokens)], np.int32), SamplingRows.of([sampling])
        mask = self._all_allowed[:1] if allowed is None else allowed
        return np.int32(slot), np.bool_(fresh), padded, length, rows, mask

    def _decode_arguments(self, tokens: np.ndarray, active: np.ndarray, allowed: np.ndarray | None = None) -> tuple:
        if self._rows is None:
            self._rows = SamplingRows.of(self._samplings)
        mask = self._all_allowed if allowed is None else allowed
        return tokens[:, None], active.astype(np.int32), self._rows, mask


def _prefill(
    model: Transformer,
    pool: Cache,
    history: History,
    slot: Int[Array, ""],
    fresh: Bool[Array, ""],
    tokens: Int[Array, "1 C"],
    num_valid: Int[Array, "1"],
    rows: SamplingRows,
    allowed: UInt32[Array, "1 W"],
    *,
    top: int,
) -> tuple[Cache, History, Sampled]:
    """Extend one slot. A fresh slot starts from zeros, not only from length 0: a NaN left behind would spread."""
    old = (pool.row(slot), history.row(slot))
    row, seen = jax.tree.map(lambda leaf: jnp.where(fresh, jnp.zeros_like(leaf), leaf), old)
    logits, row = extend(model, tokens, row, num_valid)
    seen = seen.add(tokens, num_valid, generated=jnp.zeros(tokens.shape, bool))
    sampled = sample(logits, rows, seen, allowed, row.length, top=top)
    return pool.with_row(slot, row), history.with_row(slot, seen), sampled


def _decode(
    model: Transformer,
    pool: Cache,
    history: History,
    tokens: Int[Array, "S 1"],
    num_valid: Int[Array, "S"],
    rows: SamplingRows,
    allowed: UInt32[Array, "S W"],
    *,
    top: int,
) -> tuple[Cache, History, Sampled]:
    logits, pool = extend(model, tokens, pool, num_valid)
    history = history.add(tokens, num_valid, generated=jnp.ones(tokens.shape, bool))
    return pool, history, sample(logits, rows, history, allowed, pool.length, top=top)


def _to_host(sampled: Sampled, logprobs: bool) -> Sampled:
    return jax.device_get(sampled if logprobs else dataclasses.replace(sampled, logprobs=None))
