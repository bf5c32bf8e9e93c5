"""KDA's TPU bodies: the Pallas kernels in programs for a TPU, their interpretation elsewhere (slow, for tests).

Differentiation keeps q, k, gate, beta and what the forward kernel saves: 64 KB of bf16 a head and 64 tokens.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels.kda import tpu_backward, tpu_chunk, tpu_decode, tpu_forward
from pallas_kernels.kda.inputs import Parameters, Segments

WIDTH = tpu_chunk.WIDTH


class Static(NamedTuple):
    """What is fixed when the body is traced."""

    lower_bound: float
    scale: float
    states_every: int | None


Results = tuple[Array, ...]


def forward(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    gate: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    initial_state: Float[Array, "B H K V"],
    parameters: Parameters,
    segments: Segments | None,
    *,
    states_every: int | None = None,
) -> Results:
    """As `reference.forward`; raises NotImplementedError unless K = V = 128 and for a lower_bound below -5.11.

    With `states_every` as `reference.forward_with_states`, and NotImplementedError for its gradients.
    """
    tpu_chunk.check(q.shape[-1], v.shape[-1], parameters.lower_bound)
    a_log, dt_bias, lower_bound, scale = parameters
    arrays = (q, k, v, gate, beta, initial_state, a_log, dt_bias)
    return _forward(Static(lower_bound, scale, states_every), arrays, segments)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _forward(static: Static, arrays: tuple[Array, ...], segments: Segments | None) -> Results:
    out, state, states, _ = _run(static, arrays, segments, saves=False)
    return (out, state) if states is None else (out, state, states)


def _run(static: Static, arrays: tuple[Array, ...], segments: Segments | None, *, saves: bool) -> Any:
    def run(arrays: tuple[Array, ...], segments: Segments | None, *, interpret: bool) -> Any:
        *inputs, a_log, dt_bias = arrays
        rest: Any = (*inputs, Parameters(a_log, dt_bias, static.lower_bound, static.scale), segments)
        return tpu_forward.forward(*rest, saves=saves, states_every=static.states_every, interpret=interpret)

    return _by_platform(run, arrays, segments)


def _forward_fwd(static: Static, arrays: tuple[Array, ...], segments: Segments | None) -> tuple[Any, Any]:
    if static.states_every is not None:
        raise NotImplementedError(f"kda's tpu body has no gradients with states_every={static.states_every}: use 'xla'")
    out, state, _, saved = _run(static, arrays, segments, saves=True)
    q, k, _, gate, beta, initial_state, a_log, dt_bias = arrays
    # The values are not needed again, and of the state only the dtype.
    return (out, state), ((q, k, gate, beta, a_log, dt_bias), segments, saved, jnp.zeros((), initial_state.dtype))


def _forward_bwd(static: Static, residuals: tuple[Any, ...], cotangents: Results) -> tuple[Any, None]:
    def run(
        arrays: tuple[Array, ...], segments: Segments | None, saved: Any, cotangents: Results, *, interpret: bool
    ) -> Any:
        *tokens, a_log, dt_bias = arrays
        parameters = Parameters(a_log, dt_bias, static.lower_bound, static.scale)
        rest: Any = (*tokens, parameters, segments, saved, *cotangents)
        return tpu_backward.backward(*rest, interpret=interpret)

    arrays, segments, saved, state = residuals
    beta, a_log, dt_bias = arrays[3:]
    gradients = _by_platform(run, arrays, segments, saved, cotangents)
    narrow = zip(gradients[4:], (beta, state, a_log, dt_bias), strict=True)
    return (*gradients[:4], *(gradient.astype(x.dtype) for gradient, x in narrow)), None


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
    """`run` by the platform that the program is lowered for, which need not be the one it is traced on.

    A mapped axis becomes a loop around the kernel, which has no batching rule of its own.
    """

    @jax.custom_batching.sequential_vmap
    def call(*args: Any) -> Any:
        return jax.lax.platform_dependent(
            *args, tpu=partial(run, interpret=False), default=partial(run, interpret=True)
        )

    return call(*args)
