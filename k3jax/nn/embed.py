"""Token embedding whose gradient is a matrix product."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from k3jax.nn.param import cast, matmul_precision
from sharding.local import index_of, total

BLOCK = 8192  # rows of the table whose gradient is taken at one time


def embed_tokens(table: nnx.Variable, tokens: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
    """Rows of `table` [vocab, D] for `tokens`, in `dtype`."""
    rows = cast(table, dtype)
    local = tokens - index_of("vocab") * rows.shape[0]
    return total(_lookup(rows.shape[0], rows, local), "vocab")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _lookup(size: int, table: Float[Array, "V D"], tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Rows for the tokens that this part of the table has, zero for others."""
    mine = (tokens >= 0) & (tokens < size)
    return jnp.where(mine[..., None], table[jnp.where(mine, tokens, 0)], 0)


def _forward(size: int, table: Array, tokens: Array) -> tuple[Array, Array]:
    return _lookup(size, table, tokens), tokens


def _backward(size: int, tokens: Array, gradient: Array) -> tuple[Array, None]:
    """One-hot tokens times the gradient, block by block: a scatter of rows would sort the tokens on a TPU."""
    tokens, flat, block = tokens.reshape(-1), gradient.reshape(-1, gradient.shape[-1]), min(BLOCK, size)

    def of_block(first: Array) -> Array:
        hot = (tokens[:, None] == first + jnp.arange(block)).astype(flat.dtype)
        return jnp.matmul(hot.T, flat, precision=matmul_precision(flat.dtype))

    blocks = jax.lax.map(of_block, jnp.arange(0, size, block))
    return blocks.reshape(-1, flat.shape[-1])[:size], None


_lookup.defvjp(_forward, _backward)
