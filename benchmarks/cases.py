"""The registered measurements: for every kernel family, its cases with shapes and units of work."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kda import kda


@dataclass(frozen=True)
class Case:
    """One program to compile: `build()` returns the function, its arguments' shapes and the arguments it donates."""

    name: str
    units: int
    build: Callable[[], tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]]


def _kda_forward(heads: int, length: int) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]:
    """K3's prefill: bf16 inputs, float32 state in and out, one sequence."""

    def forward(q, k, v, gate, beta, a_log, dt_bias, state):  # type: ignore[no-untyped-def]
        arguments = {"a_log": a_log, "dt_bias": dt_bias, "initial_state": state}
        return kda(q, k, v, gate, beta, lower_bound=-5.0, implementation="tpu", **arguments)

    token = jax.ShapeDtypeStruct((1, length, heads, 128), jnp.bfloat16)
    beta, a_log, dt_bias, state = (
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in ((1, length, heads), (heads,), (heads, 128), (1, heads, 128, 128))
    )
    return forward, (token, token, token, token, beta, a_log, dt_bias, state), ()


CASES: dict[str, tuple[Case, ...]] = {
    "kda": tuple(
        Case(f"kda_fwd_h{heads}_t4096", heads * 4096, partial(_kda_forward, heads, 4096)) for heads in (8, 16, 96)
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
