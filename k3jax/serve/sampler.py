"""From logits to the next token, one row per slot, with results that do not depend on the other rows.

The key of a draw is fold_in(key of the request's seed, position of the drawn token in its sequence): neither the slot,
nor the batch mates, nor an interruption enters it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt32

MIN_TEMPERATURE = 1e-6  # below it float32 quotients overflow; the draw is greedy long before


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one request draws. `temperature` 0 is greedy; `top_k` 0 keeps every token; `seed` is a 64-bit integer."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


@partial(jax.tree_util.register_dataclass, data_fields=["temperature", "top_p", "top_k", "seed"], meta_fields=[])
@dataclass(frozen=True, kw_only=True)
class SamplingRows:
    """`Sampling` of every slot as arrays; `seed` holds the high and the low 32 bits."""

    temperature: Float[Array, "B"]
    top_p: Float[Array, "B"]
    top_k: Int[Array, "B"]
    seed: UInt32[Array, "B 2"]

    @classmethod
    def of(cls, samplings: list[Sampling]) -> SamplingRows:
        """One row per entry."""
        seeds = np.asarray([s.seed for s in samplings], np.int64).astype(np.uint64)
        return cls(
            temperature=jnp.asarray([s.temperature for s in samplings], jnp.float32),
            top_p=jnp.asarray([s.top_p for s in samplings], jnp.float32),
            top_k=jnp.asarray([s.top_k for s in samplings], jnp.int32),
            seed=jnp.asarray(np.stack([seeds >> np.uint64(32), seeds & np.uint64(0xFFFFFFFF)], axis=-1), jnp.uint32),
        )


@partial(jax.tree_util.register_dataclass, data_fields=["chosen", "top_ids", "top"], meta_fields=[])
@dataclass(frozen=True, kw_only=True)
class Logprobs:
    """Log-probabilities in nats under the distribution before temperature, top_k and top_p."""

    chosen: Float[Array, "B"]
    top_ids: Int[Array, "B N"]  # the N likeliest tokens, likeliest first
    top: Float[Array, "B N"]


@partial(jax.tree_util.register_dataclass, data_fields=["token", "finite", "logprobs"], meta_fields=[])
@dataclass(frozen=True, kw_only=True)
class Sampled:
    """The next token of every row. Where `finite` is false the logits held NaN or infinity: ignore `token`."""

    token: Int[Array, "B"]
    finite: Bool[Array, "B"]
    logprobs: Logprobs | None


def sample(logits: Float[Array, "B V"], rows: SamplingRows, position: Int[Array, "B"], *, top: int) -> Sampled:
    """Draw one token per row; `position` is the drawn token's index in its sequence, `top` the number of top_logprobs.

    top_k applies first and top_p to what remains, renormalised; both after the temperature.
    """
    logits = logits.astype(jnp.float32)
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    drawn = jax.lax.cond(jnp.any(rows.temperature > 0), lambda: _draw(logits, rows, position), lambda: greedy)
    token = jnp.where(rows.temperature > 0, drawn, greedy)
    chosen = jnp.take_along_axis(logprobs, token[:, None], axis=-1)[:, 0]
    top_values, top_ids = jax.lax.top_k(logprobs, top)
    return Sampled(
        token=token,
        finite=jnp.all(jnp.isfinite(logits), axis=-1),
        logprobs=Logprobs(chosen=chosen, top_ids=top_ids, top=top_values),
    )


def row_keys(rows: SamplingRows, position: Int[Array, "B"]) -> PRNGKeyArray:
    """One key per row, from the row's own seed and position only."""
    keys = jax.random.wrap_key_data(rows.seed, impl="threefry2x32")
    return jax.vmap(jax.random.fold_in)(keys, position)


def _draw(logits: Float[Array, "B V"], rows: SamplingRows, position: Int[Array, "B"]) -> Int[Array, "B"]:
    temperature = jnp.maximum(rows.temperature, MIN_TEMPERATURE)[:, None]
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    filters = jnp.any((rows.top_p < 1) | (rows.top_k > 0))
    kept = jax.lax.cond(filters, lambda: _filtered(scaled, rows), lambda: scaled)  # the sort is the costly part
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:], jnp.float32))(row_keys(rows, position))
    return jnp.argmax(kept + noise, axis=-1).astype(jnp.int32)


def _filtered(scaled: Float[Array, "B V"], rows: SamplingRows) -> Float[Array, "B V"]:
    """`scaled` with -inf for what top_k and top_p leave out; equal logits rank by token id, as in argmax."""
    order = jnp.argsort(-scaled, axis=-1, stable=True)
    ranked = jnp.take_along_axis(scaled, order, axis=-1)
    top_k = jnp.where(rows.top_k > 0, rows.top_k, scaled.shape[-1])[:, None]
    ranked = jnp.where(jnp.arange(scaled.shape[-1]) < top_k, ranked, -jnp.inf)
    probability = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    # top_p = 1 keeps all, whatever the rounding of the sum: a row draws the same with and without filtering mates.
    ranked = jnp.where((before < rows.top_p[:, None]) | (rows.top_p[:, None] >= 1), ranked, -jnp.inf)
    return jnp.take_along_axis(ranked, jnp.argsort(order, axis=-1), axis=-1)
