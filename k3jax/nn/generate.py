"""Prefill and decode on a cache, and the plain generation loop."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from k3jax.nn.cache import Cache
from sharding.local import index_of, total

if TYPE_CHECKING:
    from k3jax.nn.transformer import Transformer


def extend(
    model: Transformer,
    tokens: Int[Array, "B T"],
    cache: Cache,
    num_valid: Int[Array, "B"],
    features: Float[Array, "B N D"] | None = None,
) -> tuple[Float[Array, "B V"], Cache]:
    """Consume the first `num_valid[b]` tokens of each row and return the logits at each row's last one.

    One function serves prefill (T = chunk) and decode (T = 1). A row with `num_valid` 0 keeps its cache bit for bit;
    its logits mean nothing. The caller keeps cache.length + num_valid within the cache: tokens past its end are lost.
    `features` are those of the images in these tokens (`Transformer.hidden`).
    """
    hidden, cache = extend_hidden(model, tokens, cache, num_valid, features)
    return model.logits(hidden_at(hidden, num_valid - 1)), cache


def hidden_at(hidden: Float[Array, "B T D"], position: Int[Array, "B"]) -> Float[Array, "B D"]:
    """The hidden state of each row at a position, the first one where that is negative; a row may lie in pieces."""
    place = jnp.maximum(position, 0) - index_of("seq") * hidden.shape[1]
    mine = (place >= 0) & (place < hidden.shape[1])
    state = jnp.take_along_axis(hidden, jnp.where(mine, place, 0)[:, None, None], axis=1)[:, 0]
    return total(jnp.where(mine[:, None], state, 0), "seq")


def extend_hidden(
    model: Transformer,
    tokens: Int[Array, "B T"],
    cache: Cache,
    num_valid: Int[Array, "B"],
    features: Float[Array, "B N D"] | None = None,
) -> tuple[Float[Array, "B T D"], Cache]:
    """As `extend`, with the hidden state of every token instead of the last logits."""
    steps = index_of("seq") * tokens.shape[1] + jnp.arange(tokens.shape[1])
    segment_ids = jnp.where(steps < num_valid[:, None], 0, -1)
    out = model.hidden(tokens, segment_ids=segment_ids, features=features, cache=cache)
    assert out.cache is not None
    return out.hidden, out.cache


def generate(
    model: Transformer,
    tokens: Int[Array, "B T"],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    key: PRNGKeyArray | None = None,
    features: Float[Array, "B N D"] | None = None,
) -> Int[Array, "B N"]:
    """Prefill the prompt, then decode `max_new_tokens` tokens; see `Transformer.generate`."""
    tokens = jnp.asarray(tokens, jnp.int32)
    length = tokens.shape[1] + max_new_tokens
    if length > model.config.max_context:
        raise ValueError(f"prompt and new tokens are {length}, but max_context is {model.config.max_context}")
    if temperature > 0 and key is None:
        raise ValueError(f"temperature = {temperature} samples and needs key=jax.random.key(...)")
    if max_new_tokens < 1:
        return jnp.zeros((len(tokens), 0), jnp.int32)
    key = jax.random.key(0) if key is None else key
    return _generate(model, tokens, max_new_tokens, jnp.float32(temperature), key, features)


@partial(jax.jit, static_argnums=2)
def _generate(
    model: Transformer,
    tokens: Array,
    max_new_tokens: int,
    temperature: Array,
    key: PRNGKeyArray,
    features: Array | None,
) -> Int[Array, "B N"]:
    batch, length = tokens.shape
    cache = Cache.zeros(model.config, batch=batch, max_len=length + max_new_tokens)
    logits, cache = extend(model, tokens, cache, jnp.full(batch, length), features)

    def choose(logits: Array, key: PRNGKeyArray) -> Array:
        sampled = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6))
        return jnp.where(temperature > 0, sampled, jnp.argmax(logits, axis=-1)).astype(jnp.int32)

    def step(carry: tuple, key: PRNGKeyArray) -> tuple[tuple, Array]:
        token, cache = carry
        logits, cache = extend(model, token[:, None], cache, jnp.ones(batch, jnp.int32))
        token = choose(logits, key)
        return (token, cache), token

    first, *rest = jax.random.split(key, max_new_tokens)
    token = choose(logits, first)
    if not rest:
        return token[:, None]
    _, following = jax.lax.scan(step, (token, cache), jnp.stack(rest))
    return jnp.concatenate([token[:, None], following.T], axis=1)
