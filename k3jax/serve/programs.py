"""What runs on the device while serving: pure functions of the model, the pools and a few rows of numbers.

Sizes come from the arrays, so that the same functions run on one device's part of a mesh. `Engine` compiles them; the
pools and the history are donated and updated in place.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from k3jax.nn.cache import Cache, Pools
from k3jax.nn.generate import extend, extend_hidden, hidden_at
from k3jax.nn.transformer import Transformer
from k3jax.serve.sampler import History, Logprobs, Sampled, SamplingRows, sample
from sharding.local import index_of, size_of, total

SCORED = 64  # tokens of a prompt whose logits exist at one time


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PrefillRows:
    """Up to P sequences that read a chunk of their prompts; a row with slot -1 reads nothing.

    `length` tokens have been read before, a multiple of the page. `seen` has a bit for each token id of the prompt.
    `features` are those of the images in the tokens, in order; None where no row has any.
    """

    tokens: Int[Array, "P C"]
    num_valid: Int[Array, "P"]
    slots: Int[Array, "P"]
    page_table: Int[Array, "P W"]
    length: Int[Array, "P"]
    seen: UInt32[Array, "P words"]
    sampling: SamplingRows
    allowed: UInt32[Array, "P words"]
    features: Float[Array, "P C D"] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DecodeRows:
    """One token for each of the first S slots; a row whose sequence has `length` 0 is idle."""

    tokens: Int[Array, "S"]
    page_table: Int[Array, "S W"]
    length: Int[Array, "S"]
    sampling: SamplingRows
    allowed: UInt32[Array, "S words"]


def prefill(
    model: Transformer, pools: Pools, history: History, rows: PrefillRows, *, top: int
) -> tuple[Pools, History, Sampled]:
    """Read a chunk of each row's prompt; row i of the result is the token after it, of use once the prompt is whole.

    It is `finite` where everything that the row computed is: a NaN in the middle of a chunk would stay in the pools.
    """
    return _read(model, pools, history, rows, top)[1:]


def prefill_and_score(
    model: Transformer, pools: Pools, history: History, rows: PrefillRows, targets: Int[Array, "P C"], *, top: int
) -> tuple[Pools, History, Sampled]:
    """As `prefill`, with log-probabilities of the prompts' own tokens: `targets` follow the tokens of a chunk.

    -1 is a target that is not wanted; a call without any costs nothing more.
    """
    hidden, pools, history, sampled = _read(model, pools, history, rows, top)
    return pools, history, dataclasses.replace(sampled, prompt=_scored(model, hidden, targets, top))


def _read(
    model: Transformer, pools: Pools, history: History, rows: PrefillRows, top: int
) -> tuple[Float[Array, "P C D"], Pools, History, Sampled]:
    page, chunk = pools.pages.latent.shape[2] * size_of("page"), rows.tokens.shape[1] * size_of("seq")
    # Pages of later chunks still hold what their last owner left.
    written = jnp.arange(rows.page_table.shape[1]) * page < rows.length[:, None] + chunk
    cache = Cache(pools, rows.slots, jnp.where(written, rows.page_table, -1), rows.length)
    hidden, cache = extend_hidden(model, rows.tokens, cache, rows.num_valid, rows.features)
    logits = model.logits(hidden_at(hidden, rows.num_valid - 1))
    history = history.begin(rows.slots, rows.seen)
    sampled = sample(logits, rows.sampling, history.rows(rows.slots), rows.allowed, cache.length, top=top)
    place = index_of("seq") * hidden.shape[1] + jnp.arange(hidden.shape[1])
    bad = ~jnp.all(jnp.isfinite(hidden), axis=-1) & (place < rows.num_valid[:, None])
    finite = total(jnp.sum(bad, axis=1), "seq") == 0
    return hidden, cache.pools, history, dataclasses.replace(sampled, finite=sampled.finite & finite)


def _scored(model: Transformer, hidden: Float[Array, "P C D"], targets: Int[Array, "P C"], top: int) -> Logprobs:
    """Log-probabilities of the targets, where there are any, with the logits of `SCORED` tokens at one time."""
    lead, block = targets.shape, math.gcd(targets.shape[1], SCORED)
    parts = hidden.reshape(-1, block, hidden.shape[-1]), jnp.maximum(targets, 0).reshape(-1, block)

    def score() -> Logprobs:
        return jax.lax.map(lambda part: Logprobs.of(model.logits(part[0]), part[1], top=top), parts)

    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(score))
    found = jax.lax.cond(jnp.any(targets >= 0), score, lambda: nothing)
    return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[2:]), found)


def decode(
    model: Transformer, pools: Pools, history: History, rows: DecodeRows, *, top: int
) -> tuple[Pools, History, Sampled]:
    """Feed one token to each row that is not idle; row i of the result is what follows. Nothing else changes."""
    active = (rows.length > 0).astype(jnp.int32)
    slots = jnp.where(active > 0, jnp.arange(len(active)), -1)
    logits, cache = extend(model, rows.tokens[:, None], Cache(pools, slots, rows.page_table, rows.length), active)
    history = history.add(rows.tokens, slots)
    return cache.pools, history, sample(logits, rows.sampling, history, rows.allowed, cache.length, top=top)


def copy_slot(pools: Pools, source: Int[Array, "1"], target: Int[Array, "1"]) -> Pools:
    """Make a slot's KDA state equal to another's: a snapshot, or back from one. -1 for both changes nothing."""
    return pools.copy_slot(jnp.maximum(source[0], 0), jnp.maximum(target[0], 0))


def clear_pages(pools: Pools, numbers: Int[Array, "n"], count: Int[Array, "1"]) -> Pools:
    """Empty pages that a sequence will write token by token; what the last owner left there must not be read."""
    return pools.clear_pages(numbers, count[0])
