"""Both phases in plain XLA."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.attn_res import reference
from pallas_kernels.attn_res.reference import normalise, wide

HIGHEST = jax.lax.Precision.HIGHEST


def read_bank(snapshots: Array, count: Array, queries: Array, *, eps: float) -> tuple[Array, Array]:
    """See `pallas_kernels.attn_res.read_bank`."""
    return _read_bank(snapshots, count, queries, eps)


@partial(jax.checkpoint, static_argnums=3)
def _read_bank(snapshots: Array, count: Array, queries: Array, eps: float) -> tuple[Array, Array]:
    tokens = snapshots.shape[1:-1]
    flat = snapshots.reshape(snapshots.shape[0], -1, snapshots.shape[-1])
    # Scaling the products is cheaper than scaling the sources.
    squares = jnp.einsum("ntd,ntd->nt", flat, flat, precision=HIGHEST, preferred_element_type=wide(flat.dtype))
    products = jnp.einsum("rd,ntd->rnt", queries, flat.astype(queries.dtype), precision=HIGHEST)
    scores = products * jax.lax.rsqrt(squares / flat.shape[-1] + eps)
    sealed = (jnp.arange(flat.shape[0]) < count)[:, None]
    scores = jnp.where(sealed, scores, -jnp.inf)
    top = jnp.maximum(jnp.max(scores, axis=1), jnp.finfo(scores.dtype).min)
    exponentials = jnp.exp(scores - top[:, None])
    total = jnp.sum(exponentials, axis=1)
    weights = exponentials / jnp.where(total > 0, total, 1)[:, None]
    mixed = jnp.einsum("rnt,ntd->rtd", weights, jnp.where(sealed[..., None], flat, 0), precision=HIGHEST)
    reads = queries.shape[0]
    log_sum_exp = jnp.where(total > 0, top + jnp.log(jnp.where(total > 0, total, 1)), -jnp.inf)
    return mixed.astype(snapshots.dtype).reshape(reads, *tokens, -1), log_sum_exp.reshape(reads, *tokens)


def merge(mixed: Array, log_sum_exp: Array, live: Array, has_live: Array, query: Array, eps: float) -> Array:
    """The read, unrounded: the two parts weighted by their shares of the whole sum."""
    score = jnp.where(has_live, normalise(live, eps) @ query, -jnp.inf)
    share = jax.nn.sigmoid(score - log_sum_exp)[..., None]  # of the live sum; exact at either infinity
    return mixed.astype(share.dtype) + share * (live.astype(share.dtype) - mixed.astype(share.dtype))


read = partial(reference.read, merge=merge)
read_norm = partial(reference.read_norm, merge=merge)
