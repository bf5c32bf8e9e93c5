"""What every KDA body does first: mask padding, normalise q and k, turn the raw gate into a log decay."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

L2_EPS = 1e-6  # on the sum of squares, not on the mean


class Parameters(NamedTuple):
    """The learned and fixed numbers of the gate and of the query scale."""

    a_log: Float[Array, "H"]
    dt_bias: Float[Array, "H K"]
    lower_bound: float
    scale: float


class Segments(NamedTuple):
    """Where tokens count and which document they belong to.

    `valid`: not padding. `document`: 0 for the first document, + 1 at every change of id; padding keeps the number of
    the document before it, so that it never starts one.
    """

    valid: Bool[Array, "B T"]
    document: Int[Array, "B T"]


def compute_dtype(x: Array) -> jnp.dtype:
    """Float32, or float64 where the inputs are float64 (an oracle under `jax_enable_x64`)."""
    return jnp.promote_types(jnp.float32, x.dtype)


def segments_of(segment_ids: Int[Array, "B T"]) -> Segments:
    """Number the documents of non-decreasing ids, -1 being padding (anywhere in the row)."""
    valid = segment_ids >= 0
    latest = jax.lax.cummax(segment_ids, axis=1)
    before = jnp.pad(latest, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    starts = valid & (before >= 0) & (segment_ids != before)
    return Segments(valid, jnp.cumsum(starts, axis=1, dtype=jnp.int32))


def l2_normalise(x: Float[Array, "... K"]) -> Float[Array, "... K"]:
    """x / sqrt(sum x^2 + 1e-6) over the last axis."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + L2_EPS)


def log_decay(gate: Array, a_log: Array, dt_bias: Array, lower_bound: float) -> Array:
    """g = lower_bound * sigmoid(exp(a_log) * (gate + dt_bias)), in (lower_bound, 0); all broadcast to `gate`."""
    return lower_bound * jax.nn.sigmoid(jnp.exp(a_log) * (gate + dt_bias))
