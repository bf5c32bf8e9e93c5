"""What every body shares: dense weights, and which expert each sorted row belongs to."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.mx import MXFP4Array, dequantize

Experts = Float[Array, "E K N"] | MXFP4Array


def dense_experts(experts: Experts, dtype: DTypeLike) -> Float[Array, "E K N"]:
    """Return the weights [E, K, N] in `dtype`; an MXFP4Array, logically [E, N, K], is dequantised and transposed."""
    if isinstance(experts, MXFP4Array):
        return jnp.swapaxes(dequantize(experts, dtype), -1, -2)
    return experts.astype(dtype)


def sliced(experts: Experts) -> Experts:
    """Return the weights as arrays of their own, where they are one layer of a stack."""
    return experts.sliced() if isinstance(experts, MXFP4Array) else experts


def input_output_widths(experts: Experts) -> tuple[int, int]:
    """Return (K, N) of either kind of weights."""
    *_, first, second = experts.shape
    return (second, first) if isinstance(experts, MXFP4Array) else (first, second)


def row_experts(group_sizes: Int[Array, " E"], rows: int) -> Int[Array, " M"]:
    """Return the expert of each of `rows` sorted rows, and E for rows past the last group."""
    ends = jnp.cumsum(group_sizes)
    return jnp.sum(jnp.arange(rows)[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)


def in_groups(group_sizes: Int[Array, " E"], rows: int) -> Int[Array, "M 1"]:
    """Return a boolean column that is true for rows that belong to a group."""
    return (jnp.arange(rows) < jnp.sum(group_sizes))[:, None]


def accumulator(dtype: DTypeLike) -> jnp.dtype:
    """Return the dtype products of `dtype` accumulate in: float32, or float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)
