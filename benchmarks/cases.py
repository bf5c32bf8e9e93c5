"""The registered measurements: for every kernel family, its cases with shapes and units of work."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kda import kda, kda_decode_step

WIDTH = 128  # of K3's heads


@dataclass(frozen=True)
class Case:
    """One program to compile: `build()` returns the function, its arguments' shapes and the arguments it donates."""

    name: str
    units: int
    build: Callable[[], "Program"]


Program = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]


def _shape(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _kda_forward(heads: int, length: int) -> Program:
    """K3's prefill of one sequence: bf16 inputs, float32 state in and out.

    Tokens come and go as the projections around the kernel hold them, [B, T, H 128]: with separate head axes in the
    arguments of a whole program XLA would pick another layout for them, and copy.
    """

    def forward(q, k, v, gate, beta, a_log, dt_bias, state):  # type: ignore[no-untyped-def]
        q, k, v, gate = (x.reshape(1, length, heads, WIDTH) for x in (q, k, v, gate))
        arguments = {"a_log": a_log, "dt_bias": dt_bias, "initial_state": state}
        o, state = kda(q, k, v, gate, beta, lower_bound=-5.0, implementation="tpu", **arguments)
        return o.reshape(1, length, heads * WIDTH), state

    tokens = [_shape(jnp.bfloat16, 1, length, heads * WIDTH)] * 4
    parameters = _shape(jnp.float32, heads), _shape(jnp.float32, heads, WIDTH)
    beta, state = _shape(jnp.float32, 1, length, heads), _shape(jnp.float32, 1, heads, WIDTH, WIDTH)
    return forward, (*tokens, beta, *parameters, state), ()


def _kda_decode(rows: int, heads: int) -> Program:
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
        _shape(f32, 4, *wide),  # conv taps
        _shape(bf16, rows, *wide),
        _shape(bf16, rows, heads, WIDTH),  # gate
        _shape(f32, rows, heads),  # beta
        _shape(bf16, rows, heads, WIDTH),  # output gate
        _shape(bf16, rows, 3, *wide),  # conv pool
        _shape(f32, rows, heads, WIDTH, WIDTH),  # state pool
        _shape(jnp.int32, rows),  # slots
        _shape(f32, heads),
        _shape(f32, heads, WIDTH),
        _shape(f32, WIDTH),
    )
    return decode, shapes, (5, 6)


CASES: dict[str, tuple[Case, ...]] = {
    "kda": (
        *(Case(f"kda_fwd_h{heads}_t4096", heads * 4096, partial(_kda_forward, heads, 4096)) for heads in (8, 16, 96)),
        Case("kda_decode_b256_h96", 256 * 96, partial(_kda_decode, 256, 96)),
    ),
}


def cases_of(name: str) -> tuple[str, tuple[Case, ...]]:
    """The kernel family and its cases; `name` is a family or one case. Raises ValueError for an unknown name."""
    if name in CASES:
        return name, CASES[name]
    for kernel, cases in CASES.items():
        for case in cases:
            if case.name == name:
                return kernel, (case,)
    known = [*CASES, *(case.name for cases in CASES.values() for case in cases)]
    raise ValueError(f"unknown kernel {name!r}; use one of {', '.join(known)}")
