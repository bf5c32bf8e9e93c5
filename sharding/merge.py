"""Softmax attention in parts: the exact result from the output and the log-sum-exp of each part of the keys.

With part p's output o_p and log-sum-exp l_p:  l = log sum_p exp(l_p);  o = sum_p exp(l_p - l) o_p.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float


def merge_parts(
    outputs: Float[Array, "P *b V"], log_sum_exps: Float[Array, "P *b"]
) -> tuple[Float[Array, "*b V"], Float[Array, "*b"]]:
    """Merge P parts that lie on the leading axis; returns the output in its dtype and the log-sum-exp of all keys.

    A part without keys has a log-sum-exp of -inf; its output is ignored and may be NaN. Where no part has any, the
    output is 0.
    """
    weights, largest = _weights(log_sum_exps, jnp.max(jax.lax.stop_gradient(log_sum_exps), axis=0))
    total = jnp.sum(weights, axis=0)
    return _finish(jnp.sum(_weighted(outputs, weights), axis=0), total, largest, outputs.dtype)


def merge_over(
    axis: str, output: Float[Array, "*b V"], log_sum_exp: Float[Array, "*b"]
) -> tuple[Float[Array, "*b V"], Float[Array, "*b"]]:
    """As `merge_parts`, for parts that lie on the shards of a mesh axis; every shard returns the whole result."""
    largest = jax.lax.pmax(jax.lax.stop_gradient(log_sum_exp), axis)
    weights, largest = _weights(log_sum_exp, largest)
    total, merged = jax.lax.psum((weights, _weighted(output, weights)), axis)
    return _finish(merged, total, largest, output.dtype)


def _weights(log_sum_exps: Array, largest: Array) -> tuple[Array, Array]:
    """exp(l_p - largest), 0 for a part without keys, and `largest` made finite where no part has any."""
    largest = jnp.where(largest == -jnp.inf, 0, largest)
    return jnp.exp(log_sum_exps - largest), largest


def _weighted(outputs: Array, weights: Array) -> Array:
    weights = weights[..., None]
    return weights * jnp.where(weights == 0, 0, outputs)


def _finish(merged: Array, total: Array, largest: Array, dtype: jnp.dtype) -> tuple[Array, Array]:
    some = total > 0
    total = jnp.where(some, total, 1)  # before the division and the logarithm, for their gradients
    return (merged / total[..., None]).astype(dtype), jnp.where(some, jnp.log(total) + largest, -jnp.inf)
