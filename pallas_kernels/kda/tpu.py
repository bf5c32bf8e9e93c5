"""KDA's TPU bodies: the Pallas kernels in programs for a TPU, their interpretation elsewhere (slow, for tests).

Gradients are the xla body's for now: it recomputes its forward pass from the inputs, so nothing else is saved.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels.kda import tpu_decode, tpu_forward, xla
from pallas_kernels.kda.inputs import Parameters, Segments

WIDTH = tpu_forward.WIDTH

Results = tuple[Array, Array]


def forward(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    gate: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    initial_state: Float[Array, "B H K V"],
    parameters: Parameters,
    segments: Segments | None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """As `reference.forward`; raises NotImplementedError unless K = V = 128 and for a lower_bound below -5.11."""
    tpu_forward.check(q.shape[-1], v.shape[-1], parameters.lower_bound)
    a_log, dt_bias, lower_bound, scale = parameters
    return _forward((lower_bound, scale), (q, k, v, gate, beta, initial_state, a_log, dt_bias), segments)


def _with(
    body: Callable[..., Results], static: tuple[float, float], segments: Segments | None
) -> Callable[..., Results]:
    """`body` as a function of the arrays that differentiate."""

    def run(q, k, v, gate, beta, initial_state, a_log, dt_bias):
        return body(q, k, v, gate, beta, initial_state, Parameters(a_log, dt_bias, *static), segments)

    return run


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _forward(static: tuple[float, float], arrays: tuple[Array, ...], segments: Segments | None) -> Results:
    def run(arrays: tuple[Array, ...], segments: Segments | None, *, interpret: bool) -> Results:
        return _with(partial(tpu_forward.forward, interpret=interpret), static, segments)(*arrays)

    return _by_platform(run, arrays, segments)


def _forward_fwd(static: tuple[float, float], arrays: tuple[Array, ...], segments: Segments | None) -> tuple[Any, Any]:
    return _forward(static, arrays, segments), (arrays, segments)


def _forward_bwd(static: tuple[float, float], saved: tuple[Any, Any], cotangents: Results) -> tuple[Any, None]:
    arrays, segments = saved
    return jax.vjp(_with(xla.forward, static, segments), *arrays)[1](cotangents), None


_forward.defvjp(_forward_fwd, _forward_bwd)


def decode_step(
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
    """As `decode.step`; raises NotImplementedError unless K = V = 128."""
    a_log, dt_bias, static = parameters.a_log, parameters.dt_bias, parameters[2:]

    def run(*arrays: Array, interpret: bool) -> tuple[Array, Array, Array]:
        a_log, dt_bias, conv_weights, norm_weight = arrays[7:]
        rest: Any = (*arrays[:7], Parameters(a_log, dt_bias, *static), conv_weights, norm_weight, norm_eps)
        return tpu_decode.step(*rest, interpret=interpret)

    tokens = (qkv, gate, beta, out_gate, conv_pool, state_pool, slots)
    return _by_platform(run, *tokens, a_log, dt_bias, conv_weights, norm_weight)


def _by_platform(run: Callable[..., Any], *args: Any) -> Any:
    """`run` by the platform that the program is lowered for, which need not be the one it is traced on."""
    return jax.lax.platform_dependent(*args, tpu=partial(run, interpret=False), default=partial(run, interpret=True))
