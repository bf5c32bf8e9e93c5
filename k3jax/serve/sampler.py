"""From logits to the next token, one row per slot, with results that do not depend on the other rows.

The key of a draw is fold_in(fold_in(key of the request's seed, choice), position of the drawn token in its sequence):
neither the slot, nor the batch mates, nor an interruption enters it.

A row's logits pass, in this order: logit bias; repetition, frequency and presence penalty; the tokens that a constraint
allows; temperature; min_p; top_k; top_p. What a request leaves at its default changes no bit of them, whatever the
other rows ask for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt32

MIN_TEMPERATURE = 1e-6  # below it float32 quotients overflow; the draw is greedy long before
MAX_BIAS = 300  # entries of one request's logit bias
ALL_BITS = np.uint32(0xFFFFFFFF)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one request draws. The defaults draw from the model's own distribution.

    `temperature` 0 is greedy; `top_k` 0 keeps every token; `min_p` keeps tokens at least that likely, relative to the
    likeliest. `presence_penalty` is subtracted from a generated token's logit, `frequency_penalty` once per occurrence;
    `repetition_penalty` divides a positive and multiplies a negative logit of what was generated or is in the prompt.
    `logit_bias` are up to `MAX_BIAS` pairs (token id, added logit). `seed` is a 64-bit integer; `choice` numbers the
    completions of one request.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    choice: int = 0


_ROWS = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


@partial(jax.tree_util.register_dataclass, data_fields=[*_ROWS, "bias_ids", "bias", "seed", "choice"], meta_fields=[])
@dataclass(frozen=True, kw_only=True)
class SamplingRows:
    """`Sampling` of every slot as arrays; `seed` holds the high and the low 32 bits."""

    temperature: Float[Array, "B"]
    top_p: Float[Array, "B"]
    top_k: Int[Array, "B"]
    min_p: Float[Array, "B"]
    presence_penalty: Float[Array, "B"]
    frequency_penalty: Float[Array, "B"]
    repetition_penalty: Float[Array, "B"]
    bias_ids: Int[Array, "B N"]  # past a row's entries: an id beyond every vocabulary
    bias: Float[Array, "B N"]
    seed: UInt32[Array, "B 2"]
    choice: Int[Array, "B"]

    @classmethod
    def of(cls, samplings: list[Sampling]) -> SamplingRows:
        """One row per entry. Raises ValueError for a logit bias of more than `MAX_BIAS` entries."""
        seeds = np.asarray([s.seed for s in samplings], np.int64).astype(np.uint64)
        ids = np.full((len(samplings), MAX_BIAS), np.iinfo(np.int32).max, np.int32)
        bias = np.zeros(ids.shape, np.float32)
        for row, sampling in enumerate(samplings):
            if len(sampling.logit_bias) > MAX_BIAS:
                raise ValueError(f"logit_bias has {len(sampling.logit_bias)} entries: at most {MAX_BIAS}")
            for place, (token, value) in enumerate(sampling.logit_bias):
                ids[row, place], bias[row, place] = token, value
        rows: dict[str, Any] = {"bias_ids": ids, "bias": bias}
        rows |= {name: np.asarray([getattr(s, name) for s in samplings], _dtype(name)) for name in (*_ROWS, "choice")}
        rows["seed"] = np.stack([seeds >> np.uint64(32), seeds & np.uint64(0xFFFFFFFF)], axis=-1).astype(np.uint32)
        return cls(**rows)


def _dtype(name: str) -> type:
    return np.int32 if name in ("top_k", "choice") else np.float32


@partial(jax.tree_util.register_dataclass, data_fields=["generated", "prompt"], meta_fields=[])
@dataclass(frozen=True, kw_only=True)
class History:
    """What the penalties of every slot look at: how often a token was generated, and whether the prompt has it."""

    generated: Int[Array, "S V"]
    prompt: UInt32[Array, "S words"]  # bits, as in `token_bits`

    @classmethod
    def zeros(cls, *, slots: int, vocab: int) -> History:
        """Nothing seen yet."""
        return cls(
            generated=jnp.zeros((slots, vocab), jnp.int32), prompt=jnp.zeros((slots, -(-vocab // 32)), jnp.uint32)
        )

    def rows(self, slots: Int[Array, "B"]) -> History:
        """The history of some slots; of -1 that of any, which the row's reader ignores."""
        return jax.tree.map(lambda leaf: leaf[jnp.maximum(slots, 0)], self)

    def begin(self, slots: Int[Array, "B"], prompt: UInt32[Array, "B words"]) -> History:
        """With slots that start from a prompt's tokens and nothing generated; -1 is dropped."""
        at = jnp.where(slots >= 0, slots, len(self.prompt))
        return History(
            generated=self.generated.at[at].set(0, mode="drop"), prompt=self.prompt.at[at].set(prompt, mode="drop")
        )

    def add(self, tokens: Int[Array, "B"], slots: Int[Array, "B"]) -> History:
        """With one generated token more in each slot; -1 is dropped."""
        at = jnp.where(slots >= 0, slots, len(self.prompt))
        return History(generated=self.generated.at[at, tokens].add(1, mode="drop"), prompt=self.prompt)


def token_bits(tokens: Sequence[int], vocab: int) -> UInt32[np.ndarray, "words"]:
    """A set of token ids as bits: bit t%32 of word t//32 for token t."""
    bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
    bits[np.asarray(tokens, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view("<u4")


@partial(jax.tree_util.register_dataclass, data_fields=["chosen", "top_ids", "top"], meta_fields=[])
@dataclass(frozen=True, kw_only=True)
class Logprobs:
    """Log-probabilities in nats, float32, under the model's own distribution: before biases, penalties and filters."""

    chosen: Float[Array, "*B"]
    top_ids: Int[Array, "*B N"]  # the N likeliest tokens, likeliest first
    top: Float[Array, "*B N"]

    @classmethod
    def of(cls, logits: Float[Array, "*B V"], tokens: Int[Array, "*B"], *, top: int) -> Logprobs:
        """Of `tokens`, and of the `top` likeliest ones."""
        logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        chosen = jnp.take_along_axis(logprobs, tokens[..., None], axis=-1)[..., 0]
        values, ids = jax.lax.top_k(logprobs, top)
        return cls(chosen=chosen, top_ids=ids, top=values)


@partial(jax.tree_util.register_dataclass, data_fields=["token", "finite", "logprobs", "prompt"], meta_fields=[])
@dataclass(frozen=True, kw_only=True)
class Sampled:
    """The next token of every row. Where `finite` is false the logits held NaN or infinity: ignore `token`.

    A prefill has the prompt's own tokens in `prompt`, with one dim more: of each token of the chunk, the next one.
    """

    token: Int[Array, "B"]
    finite: Bool[Array, "B"]
    logprobs: Logprobs | None
    prompt: Logprobs | None = None


def sample(
    logits: Float[Array, "B V"],
    rows: SamplingRows,
    history: History,
    allowed: UInt32[Array, "B W"],
    position: Int[Array, "B"],
    *,
    top: int,
) -> Sampled:
    """Draw one token per row; `position` is the drawn token's index in its sequence, `top` the number of top_logprobs.

    `history` counts the tokens up to `position`, the last one included. Bit t%32 of word t//32 of `allowed` says
    whether token t may be drawn; each row must allow one.
    """
    logits = logits.astype(jnp.float32)
    adjusted = _masked(_adjusted(logits, rows, history), allowed)
    greedy = jnp.argmax(adjusted, axis=-1).astype(jnp.int32)
    drawn = jax.lax.cond(jnp.any(rows.temperature > 0), lambda: _draw(adjusted, rows, position), lambda: greedy)
    token = jnp.where(rows.temperature > 0, drawn, greedy)
    return Sampled(
        token=token, finite=jnp.all(jnp.isfinite(logits), axis=-1), logprobs=Logprobs.of(logits, token, top=top)
    )


def row_keys(rows: SamplingRows, position: Int[Array, "B"]) -> PRNGKeyArray:
    """One key per row, from the row's own seed, choice and position only."""
    keys = jax.random.wrap_key_data(rows.seed, impl="threefry2x32")
    fold_in = jax.vmap(jax.random.fold_in)
    return fold_in(fold_in(keys, rows.choice), position)


def _adjusted(logits: Float[Array, "B V"], rows: SamplingRows, history: History) -> Float[Array, "B V"]:
    """Logits after bias and penalties; each step runs only where some row asks for it."""

    def biased(logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        return logits.at[jnp.arange(logits.shape[0])[:, None], rows.bias_ids].add(rows.bias, mode="drop")

    def penalised(logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        repetition = rows.repetition_penalty[:, None]
        repeated = _bits(history.prompt, logits.shape[-1]) | (history.generated > 0)
        logits = jnp.where(repeated, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
        logits = logits - rows.frequency_penalty[:, None] * history.generated
        return logits - rows.presence_penalty[:, None] * (history.generated > 0)

    penalties = (rows.repetition_penalty != 1) | (rows.frequency_penalty != 0) | (rows.presence_penalty != 0)
    logits = jax.lax.cond(jnp.any(rows.bias != 0), biased, lambda same: same, logits)
    return jax.lax.cond(jnp.any(penalties), penalised, lambda same: same, logits)


def all_allowed(batch: int, vocab: int) -> UInt32[np.ndarray, "B W"]:
    """The `allowed` of rows that may draw any token."""
    return np.full((batch, -(-vocab // 32)), ALL_BITS, np.uint32)


def _bits(words: UInt32[Array, "B words"], vocab: int) -> Bool[Array, "B V"]:
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(words.shape[0], -1)[:, :vocab] == 1


def _masked(logits: Float[Array, "B V"], allowed: UInt32[Array, "B W"]) -> Float[Array, "B V"]:
    def masked(logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        return jnp.where(_bits(allowed, logits.shape[-1]), logits, -jnp.inf)

    return jax.lax.cond(jnp.all(allowed == ALL_BITS), lambda same: same, masked, logits)


def _draw(logits: Float[Array, "B V"], rows: SamplingRows, position: Int[Array, "B"]) -> Int[Array, "B"]:
    temperature = jnp.maximum(rows.temperature, MIN_TEMPERATURE)[:, None]
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    scaled = jnp.where(scaled >= jnp.log(rows.min_p)[:, None], scaled, -jnp.inf)  # the likeliest is at 0
    kept = _filtered(scaled, rows)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:], jnp.float32))(row_keys(rows, position))
    return jnp.argmax(kept + noise, axis=-1).astype(jnp.int32)


def _filtered(scaled: Float[Array, "B V"], rows: SamplingRows) -> Float[Array, "B V"]:
    """`scaled` with -inf for what top_k and top_p leave out; equal logits rank by token id, as in argmax."""
    top_k = jnp.where(rows.top_k > 0, rows.top_k, scaled.shape[-1])

    def most_likely(scaled: Float[Array, "B V"]) -> Float[Array, "B V"]:
        return jnp.where(_ranked_before(scaled, jnp.ones_like(scaled), top_k), scaled, -jnp.inf)

    def nucleus(best: Float[Array, "B V"]) -> Float[Array, "B V"]:
        # top_p = 1 keeps all, whatever the rounding of the sum: a row draws the same with and without filtering mates.
        kept = _ranked_before(best, jax.nn.softmax(best, axis=-1), rows.top_p) | (rows.top_p[:, None] >= 1)
        return jnp.where(kept, best, -jnp.inf)

    best = jax.lax.cond(jnp.any(rows.top_k > 0), most_likely, lambda same: same, scaled)
    return jax.lax.cond(jnp.any(rows.top_p < 1), nucleus, lambda same: same, best)


def _ranked_before(
    values: Float[Array, "B V"], weights: Float[Array, "B V"], limit: Float[Array, "B"]
) -> Bool[Array, "B V"]:
    """Which places have less than `limit` of the weight on those that rank before them: larger values, equal ones left.

    Equal values must have equal weights. The least value that is in is found by bisection over float32's bits, since
    sorting a vocabulary takes a TPU longer than the model.
    """
    bits = jax.lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.uint32)
    keys = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))  # in the order of the values
    above = lambda key: jnp.sum(jnp.where(keys > key[:, None], weights, 0), axis=-1)  # noqa: E731

    def halve(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends  # too much lies above `low - 1`, and less than the limit above `high`
        middle = low + (high - low) // 2
        is_in = above(middle) < limit
        return jnp.where(is_in, low, middle + 1), jnp.where(is_in, middle, high)

    whole = jnp.zeros(len(keys), jnp.uint32), jnp.full(len(keys), ALL_BITS, jnp.uint32)
    _, least = jax.lax.fori_loop(0, 32, halve, whole)
    least = jnp.min(jnp.where(keys >= least[:, None], keys, jnp.uint32(ALL_BITS)), axis=-1)
    ties = keys == least[:, None]
    earlier = jnp.cumsum(ties, axis=-1) - 1
    return (keys > least[:, None]) | (ties & (above(least)[:, None] + earlier * weights < limit[:, None]))
