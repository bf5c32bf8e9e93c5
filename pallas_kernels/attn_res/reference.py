"""The mix as it is defined, over all sources at once; float64 where the inputs are."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def wide(dtype: DTypeLike) -> jnp.dtype:
    """The dtype inside: float32, or float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)


def normalise(x: Float[Array, "*b D"], eps: float) -> Float[Array, "*b D"]:
    """x over its root mean square along D."""
    x = x.astype(wide(x.dtype))
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def mix(sources: Float[Array, "N *tokens D"], query: Float[Array, " D"], eps: float) -> Float[Array, "*tokens D"]:
    """softmax_j(query . normalise(source_j)) over the raw sources, unrounded."""
    weights = jax.nn.softmax(normalise(sources, eps) @ query, axis=0)
    return jnp.sum(weights[..., None] * sources.astype(weights.dtype), axis=0)


def read_bank(snapshots: Array, count: Array, queries: Array, *, eps: float) -> tuple[Array, Array]:
    """See `pallas_kernels.attn_res.read_bank`; `count` must be concrete here."""
    sealed = snapshots[: int(count)]
    mixed = jnp.stack([mix(sealed, query, eps) for query in queries])
    scores = jnp.stack([normalise(sealed, eps) @ query for query in queries])
    return mixed.astype(snapshots.dtype), jax.nn.logsumexp(scores, axis=1)


def merge(mixed: Array, log_sum_exp: Array, live: Array, has_live: Array, query: Array, eps: float) -> Array:
    """The read, unrounded."""
    scores = jnp.stack([log_sum_exp, jnp.where(has_live, normalise(live, eps) @ query, -jnp.inf)])
    weights = jax.nn.softmax(scores, axis=0)[..., None]
    return weights[0] * mixed.astype(weights.dtype) + weights[1] * live.astype(weights.dtype)


def read(
    mixed: Array,
    log_sum_exp: Array,
    live: Array,
    has_live: Array,
    query: Array,
    *,
    eps: float,
    merge: Callable[..., Array] = merge,
) -> Array:
    """See `pallas_kernels.attn_res.read`; `merge` is what a body does in its own way."""
    return merge(mixed, log_sum_exp, live, has_live, query, eps).astype(live.dtype)


def norm(x: Array, weight: Array, eps: float) -> Array:
    """RMS norm, rounded to the weight's dtype before the weight as the released model does."""
    return weight * normalise(x, eps).astype(weight.dtype)


def read_norm(
    mixed: Array,
    log_sum_exp: Array,
    live: Array,
    update: Array | None,
    has_live: Array,
    query: Array,
    weight: Array,
    *,
    eps: float,
    norm_eps: float,
    merge: Callable[..., Array] = merge,
) -> tuple[Array, Array]:
    """See `pallas_kernels.attn_res.read_norm`; `merge` as in `read`."""
    live = live if update is None else live + update
    return live, norm(merge(mixed, log_sum_exp, live, has_live, query, eps), weight, norm_eps)
