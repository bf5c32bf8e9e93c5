"""KDA's decode in one Mosaic GPU kernel: a warp group per sequence and head updates the state in place.

A state [128, 128] is read once, kept in registers, and written once; the kernel waits for memory and nothing else.
"""

from functools import partial
from math import e, log2
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float, Int

from pallas_kernels.kda.gpu_forward import load
from pallas_kernels.kda.inputs import L2_EPS, Parameters

WIDTH = 128
F32 = jnp.float32
STATE = plgpu.Layout.WGMMA
KEYS, VALUES = STATE.reduce(1), STATE.reduce(0)  # vectors along the rows and along the columns of a state
COMPILER = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


def _sigmoid(x: Array) -> Array:
    return jnp.square(lax.rsqrt(1 + jnp.exp(-x)))  # fewer instructions than a quotient


def _normalise(x: Array) -> Array:
    return x * lax.rsqrt(jnp.sum(x * x) + L2_EPS)


def _advance(
    parameters: Parameters, head: Array, state: Any, q: Array, k: Array, v: Array, gate: Any, beta: Any
) -> Array:
    """Update the state [K, V] in memory by one token; returns the output [V] in float32."""
    sharpness, bias, lower_bound, scale = parameters
    x = sharpness[head] * (load(gate, KEYS).astype(F32) + load(bias.at[head], KEYS))
    decay = jnp.exp2((lower_bound * log2(e)) * _sigmoid(x))
    s = load(state, STATE) * lax.broadcast_in_dim(decay, state.shape, [0])
    key = lax.broadcast_in_dim(_normalise(k), state.shape, [0])
    written = beta * (v - jnp.sum(s * key, axis=0))
    s += key * lax.broadcast_in_dim(written, state.shape, [1])
    state[...] = s
    return jnp.sum(s * lax.broadcast_in_dim(_normalise(q) * scale, state.shape, [0]), axis=0)


def _token(static: tuple[float, ...], *refs: Any) -> None:
    q, k, v, gate, beta, sharpness, bias, state, output = refs
    at = row, head = lax.axis_index("row"), lax.axis_index("head")
    query, key = (load(x.at[at], KEYS).astype(F32) for x in (q, k))
    value, parameters = load(v.at[at], VALUES).astype(F32), Parameters(sharpness, bias, *static)
    new = _advance(parameters, head, state.at[at], query, key, value, gate.at[at], beta[row, head])
    output[at] = new.astype(output.dtype)


def decode(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    gate: Float[Array, "B H K"],
    beta: Float[Array, "B H"],
    state: Float[Array, "B H K V"],
    parameters: Parameters,
) -> tuple[Float[Array, "B H V"], Float[Array, "B H K V"]]:
    """One token of every sequence, in place where the float32 `state` is donated; K = V = 128."""
    a_log, dt_bias, *static = parameters
    pool = jax.new_ref(state)
    kernel = _kernel(partial(_token, tuple(static)), "kda_decode", beta.shape, jax.ShapeDtypeStruct(v.shape, v.dtype))
    output = kernel(q, k, v, gate, beta.astype(F32), jnp.exp(a_log.astype(F32)), dt_bias.astype(F32), pool)
    return output, jax.freeze(pool)


def _kernel(body: Any, name: str, grid: tuple[int, ...], out_type: Any) -> Any:
    return plgpu.kernel(
        body, out_type=out_type, grid=grid, grid_names=("row", "head"), kernel_name=name, compiler_params=COMPILER
    )


def _serve(static: tuple[float, ...], norm_eps: float, *refs: Any) -> None:
    qkv, gate, beta, out_gate, slots, taps, sharpness, bias, norm_weight, conv, pool, output = refs
    at = row, head = lax.axis_index("row"), lax.axis_index("head")
    heads, slot = beta.shape[1], slots[row]
    valid = (slot >= 0) & (slot < pool.shape[0])

    @pl.when(jnp.logical_not(valid))
    def _() -> None:
        missing = jnp.where(slot == -1, 0.0, jnp.nan)
        output[at] = jnp.full((WIDTH,), missing.astype(output.dtype))

    @pl.when(valid)
    def _() -> None:
        def convolved(part: int, layout: Any) -> Array:
            channel = part * heads + head
            history = conv.shape[1]
            window = [load(conv.at[slot, t, channel], layout) for t in range(history)]
            window.append(load(qkv.at[row, channel], layout).astype(conv.dtype))
            terms = [x.astype(F32) * load(taps.at[t, channel], layout) for t, x in enumerate(window)]
            y = sum(terms[1:], terms[0])
            for t in range(history):
                conv[slot, t, channel] = window[t + 1]
            return (y * _sigmoid(y)).astype(qkv.dtype).astype(F32)

        q, k, v = convolved(0, KEYS), convolved(1, KEYS), convolved(2, VALUES)
        parameters = Parameters(sharpness, bias, *static)
        o = _advance(parameters, head, pool.at[slot, head], q, k, v, gate.at[at], beta[row, head])
        o = o.astype(output.dtype).astype(F32)
        o = o * lax.rsqrt(jnp.sum(o * o) / WIDTH + norm_eps) * load(norm_weight, VALUES)
        output[at] = (o * _sigmoid(load(out_gate.at[at], VALUES).astype(F32))).astype(output.dtype)


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
    """As `decode.step` in one kernel, pools updated in place where they are donated; K = V = 128."""
    a_log, dt_bias, *static = parameters
    split, taps = (3 * gate.shape[1], WIDTH), conv_weights.shape[-1]
    conv = jax.new_ref(conv_pool.reshape(*conv_pool.shape[:2], *split))
    pool = jax.new_ref(state_pool)
    out_type = jax.ShapeDtypeStruct(gate.shape, qkv.dtype)
    kernel = _kernel(partial(_serve, tuple(static), norm_eps), "kda_decode_step", beta.shape, out_type)
    weights = jnp.moveaxis(conv_weights.reshape(*split, taps), -1, 0)
    constants = (weights, jnp.exp(a_log), dt_bias, norm_weight)
    output = kernel(
        qkv.reshape(-1, *split),
        gate,
        beta.astype(F32),
        out_gate,
        slots,
        *(x.astype(F32) for x in constants),
        conv,
        pool,
    )
    return output, jax.freeze(conv).reshape(conv_pool.shape), jax.freeze(pool)
