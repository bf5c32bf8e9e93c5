"""The fused serving step in plain JAX: conv, KDA step and gated RMS norm of one token for every row of a slot pool."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels.kda import reference
from pallas_kernels.kda.inputs import Parameters
from pallas_kernels.short_conv import short_conv_decode


def step(
    qkv: Float[Array, "S C"],
    gate: Float[Array, "S H K"],
    beta: Float[Array, "S H"],
    out_gate: Float[Array, "S H V"],
    conv_pool: Float[Array, "N W-1 C"],
    state_pool: Float[Array, "N H K V"],
    slots: Int[Array, "S"],
    parameters: Parameters,
    conv_weights: Float[Array, "C W"],
    norm_weight: Float[Array, "V"],
    norm_eps: float,
) -> tuple[Float[Array, "S H V"], Float[Array, "N W-1 C"], Float[Array, "N H K V"]]:
    """Gather the rows' slots, advance them by one token, scatter them back; q, k, v, o are rounded to qkv's dtype."""
    pool, (rows, heads, key) = state_pool.shape[0], gate.shape
    valid = (slots >= 0) & (slots < pool)
    # Out of range on purpose where a row has no slot: gathers fill, scatters drop (a negative index would wrap).
    target = jnp.where(valid, slots, pool)
    history = conv_pool.at[target].get(mode="fill", fill_value=0)
    state = state_pool.at[target].get(mode="fill", fill_value=0)
    flat, flat_history = qkv.reshape(rows, -1), history.reshape(*history.shape[:2], -1)
    y, moved = short_conv_decode(flat, conv_weights.reshape(-1, conv_weights.shape[-1]), flat_history)
    q, k, v = jnp.split(y, [heads * key, 2 * heads * key], axis=1)
    q, k, v = q.reshape(gate.shape), k.reshape(gate.shape), v.reshape(rows, heads, -1)
    state, o = reference.step(state, q, k, v, gate, beta, parameters)
    o = o.astype(qkv.dtype).astype(state.dtype)
    o = o * jax.lax.rsqrt(jnp.mean(o * o, axis=-1, keepdims=True) + norm_eps) * norm_weight
    o = o * jax.nn.sigmoid(out_gate.astype(state.dtype))
    missing = jnp.where(slots == -1, 0.0, jnp.nan)[:, None, None]
    o = jnp.where(valid[:, None, None], o, missing)
    conv_pool = conv_pool.at[target].set(moved.reshape(history.shape), mode="drop")
    return o.astype(qkv.dtype), conv_pool, state_pool.at[target].set(state, mode="drop")
