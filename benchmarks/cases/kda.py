"""KDA as K3 runs it: prefill of one sequence, and a decode step of a full pool. Unit of work: one head and token."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.cases.case import Case, Program, shape
from pallas_kernels.kda import kda, kda_decode_step

WIDTH = 128  # of K3's heads


def _forward(heads: int, length: int, **options: Any) -> Program:
    """K3's prefill of one sequence: bf16 inputs, float32 state in and out.

    Tokens come and go as the projections around the kernel hold them, [B, T, H 128]: with separate head axes in the
    arguments of a whole program XLA would pick another layout for them, and copy.
    """

    def forward(q, k, v, gate, beta, a_log, dt_bias, state):  # type: ignore[no-untyped-def]
        q, k, v, gate = (x.reshape(1, length, heads, WIDTH) for x in (q, k, v, gate))
        arguments = {"a_log": a_log, "dt_bias": dt_bias, "initial_state": state}
        o, state = kda(q, k, v, gate, beta, lower_bound=-5.0, implementation="tpu", **arguments, **options)
        return o.reshape(1, length, heads * WIDTH), state

    tokens = [shape(jnp.bfloat16, 1, length, heads * WIDTH)] * 4
    parameters = shape(jnp.float32, heads), shape(jnp.float32, heads, WIDTH)
    beta, state = shape(jnp.float32, 1, length, heads), shape(jnp.float32, 1, heads, WIDTH, WIDTH)
    return forward, (*tokens, beta, *parameters, state), ()


def _forward_backward(heads: int, length: int) -> Program:
    """A training step's pass through one sequence: the forward that saves, and all gradients of it."""
    forward, (*tokens, beta, a_log, dt_bias, state), _ = _forward(heads, length)

    def both(*arguments):  # type: ignore[no-untyped-def]
        *inputs, cotangent, state_cotangent = arguments
        results, pull = jax.vjp(forward, *inputs)
        return results, pull((cotangent, state_cotangent))

    return both, (*tokens, beta, a_log, dt_bias, state, tokens[2], state), ()


def _decode(rows: int, heads: int) -> Program:
    """K3's decode step of `rows` sequences that fill their pool, which is donated."""

    def decode(taps, *arguments):  # type: ignore[no-untyped-def]
        *tokens, a_log, dt_bias, norm_weight = arguments
        return kda_decode_step(
            *tokens,
            conv_weights=jnp.moveaxis(taps, 0, -1),
            a_log=a_log,
            dt_bias=dt_bias,
            norm_weight=norm_weight,
            lower_bound=-5.0,
            implementation="tpu",
        )

    bf16, f32, wide = jnp.bfloat16, jnp.float32, (3 * heads, WIDTH)
    shapes = (
        shape(f32, 4, *wide),  # conv taps
        shape(bf16, rows, *wide),
        shape(bf16, rows, heads, WIDTH),  # gate
        shape(f32, rows, heads),  # beta
        shape(bf16, rows, heads, WIDTH),  # output gate
        shape(bf16, rows, 3, *wide),  # conv pool
        shape(f32, rows, heads, WIDTH, WIDTH),  # state pool
        shape(jnp.int32, rows),  # slots
        shape(f32, heads),
        shape(f32, heads, WIDTH),
        shape(f32, WIDTH),
    )
    return decode, shapes, (5, 6)


CASES = (
    *(Case(f"kda_fwd_h{heads}_t4096", heads * 4096, partial(_forward, heads, 4096)) for heads in (8, 16, 96)),
    *(Case(f"kda_fwd_bwd_h{heads}_t4096", heads * 4096, partial(_forward_backward, heads, 4096)) for heads in (8, 16)),
    Case("kda_fwd_high_h8_t4096", 8 * 4096, partial(_forward, 8, 4096, precision="high")),
    Case("kda_decode_b256_h96", 256 * 96, partial(_decode, 256, 96)),
)
