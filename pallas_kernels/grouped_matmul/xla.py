"""The portable bodies: `jax.lax.ragged_dot`, with MXFP4 weights dequantised to the rows' dtype first."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.grouped_matmul.common import Experts, accumulator, dense_experts, in_groups
from pallas_kernels.mx import fake_quantize_mxfp8
from pallas_kernels.situ import situ_glu


def grouped_matmul(rows: Array, experts: Experts, group_sizes: Array, *, precision: jax.lax.PrecisionLike) -> Array:
    """See `pallas_kernels.grouped_matmul.grouped_matmul`."""
    valid = in_groups(group_sizes, rows.shape[0])
    out = _product(jnp.where(valid, rows, 0), experts, group_sizes, precision)
    return jnp.where(valid, out, 0).astype(rows.dtype)


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
    gate = _product(inputs, w1, group_sizes, precision).astype(rows.dtype)
    up = _product(inputs, w3, group_sizes, precision).astype(rows.dtype)
    hidden = jnp.where(valid, situ_glu(gate, up, beta=beta, linear_beta=linear_beta), 0)
    hidden = fake_quantize_mxfp8(hidden) if quantize_hidden else hidden
    out = jnp.where(valid, _product(hidden, w2, group_sizes, precision), 0)
    if row_weights is not None:
        out = out * jnp.where(valid, row_weights[:, None], 0).astype(out.dtype)
    return out.astype(rows.dtype)


def _product(rows: Array, experts: Experts, group_sizes: Array, precision: jax.lax.PrecisionLike) -> Array:
    """Rows must hold zeros past the last group; what comes out there is not specified."""
    weights = dense_experts(experts, rows.dtype)
    accumulate = accumulator(rows.dtype)
    return jax.lax.ragged_dot(rows, weights, group_sizes, precision=precision, preferred_element_type=accumulate)
