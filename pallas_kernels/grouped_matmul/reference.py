"""The readable bodies: every expert multiplies every row, and a mask keeps the rows that are its own."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.grouped_matmul.common import Experts, accumulator, dense_experts, in_groups, row_experts
from pallas_kernels.mx import fake_quantize_mxfp8
from pallas_kernels.situ import situ_glu


def grouped_matmul(rows: Array, experts: Experts, group_sizes: Array, *, precision: jax.lax.PrecisionLike) -> Array:
    """See `pallas_kernels.grouped_matmul.grouped_matmul`."""
    out = _product(rows, experts, group_sizes, precision)
    return jnp.where(in_groups(group_sizes, rows.shape[0]), out, 0).astype(rows.dtype)


def expert_ffn(
    rows: Array,
    w1: Experts,
    w3: Experts,
    w2: Experts,
    group_sizes: Array,
    row_weights: Array | None,
    *,
    beta: float,
    linear_beta: float,
    quantize_hidden: bool,
    precision: jax.lax.PrecisionLike,
) -> Array:
    """See `pallas_kernels.grouped_matmul.expert_ffn`."""
    valid = in_groups(group_sizes, rows.shape[0])
    inputs = jnp.where(valid, rows, 0)
    gate = grouped_matmul(inputs, w1, group_sizes, precision=precision)
    up = grouped_matmul(inputs, w3, group_sizes, precision=precision)
    hidden = situ_glu(gate, up, beta=beta, linear_beta=linear_beta)
    hidden = fake_quantize_mxfp8(hidden) if quantize_hidden else hidden
    out = jnp.where(valid, _product(hidden, w2, group_sizes, precision), 0)
    if row_weights is not None:
        out = out * jnp.where(valid, row_weights[:, None], 0).astype(out.dtype)
    return out.astype(rows.dtype)


def _product(rows: Array, experts: Experts, group_sizes: Array, precision: jax.lax.PrecisionLike) -> Array:
    weights = dense_experts(experts, rows.dtype)
    expert = row_experts(group_sizes, rows.shape[0])[:, None]
    accumulate = accumulator(rows.dtype)

    def add_expert(out: Array, indexed_weight: tuple[Array, Array]) -> tuple[Array, None]:
        index, weight = indexed_weight
        own_rows = jnp.where(expert == index, rows, 0)
        return out + jnp.matmul(own_rows, weight, precision=precision, preferred_element_type=accumulate), None

    start = jnp.zeros((rows.shape[0], weights.shape[-1]), accumulate)
    return jax.lax.scan(add_expert, start, (jnp.arange(weights.shape[0]), weights))[0]
