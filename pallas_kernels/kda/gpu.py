"""KDA's GPU bodies: Mosaic GPU kernels for Hopper. Differentiation keeps the inputs and nothing else."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels.dispatch import on_hopper
from pallas_kernels.kda import decode as plain
from pallas_kernels.kda import reference, xla
from pallas_kernels.kda.inputs import Parameters, Segments

WIDTH = 128
LOWEST_BOUND = -5.11  # exponents within a strip of 32 rows reach 2^115; bf16 and float32 end at 2^127

Results = tuple[Array, Array]


def _check(op: str, width: int, value: int, lower_bound: float = LOWEST_BOUND) -> None:
    if (width, value) != (WIDTH, WIDTH):
        raise NotImplementedError(f"{op}'s gpu body needs K = V = {WIDTH}, not K={width} and V={value}: use 'xla'")
    if lower_bound < LOWEST_BOUND:
        raise NotImplementedError(f"{op}'s gpu body needs lower_bound >= {LOWEST_BOUND}, not {lower_bound}: use 'xla'")
    if not on_hopper():
        here = f"{jax.devices()[0].device_kind} and jax {jax.__version__}"
        raise NotImplementedError(f"{op}'s gpu body needs a Hopper GPU and jax 0.11, not {here}: use 'xla'")


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
    """As `reference.forward`; raises NotImplementedError off Hopper, unless K = V = 128, and for a bound below -5.11.

    The kernels take bf16; other inputs ask for more than bf16 operands give and run the xla body.
    """
    a_log, dt_bias, lower_bound, scale = parameters
    _check("kda", q.shape[-1], v.shape[-1], lower_bound)
    if any(x.dtype != jnp.bfloat16 for x in (q, k, v, gate)):
        return xla.forward(q, k, v, gate, beta, initial_state, parameters, segments)
    return _forward((lower_bound, scale), (q, k, v, gate, beta, initial_state, a_log, dt_bias), segments)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _forward(static: tuple[float, float], arrays: tuple[Array, ...], segments: Segments | None) -> Results:
    from pallas_kernels.kda import gpu_forward  # here, since it needs a jax with Mosaic GPU

    q, k, v, gate, beta, initial_state, a_log, dt_bias = arrays
    parameters = Parameters(a_log, dt_bias, *static)
    return gpu_forward.forward(q, k, v, gate, beta, initial_state, parameters, segments)


def _forward_fwd(static: tuple[float, float], arrays: tuple[Array, ...], segments: Segments | None) -> tuple[Any, Any]:
    return _forward(static, arrays, segments), (arrays, segments)


def _forward_bwd(static: tuple[float, float], saved: tuple[Any, Any], cotangents: Results) -> tuple[Any, None]:
    from pallas_kernels.kda import gpu_backward

    arrays, segments = saved
    return gpu_backward.backward(arrays, *static, segments, *cotangents), None


_forward.defvjp(_forward_fwd, _forward_bwd)


def step(
    state: Float[Array, "B H K V"],
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    gate: Float[Array, "B H K"],
    beta: Float[Array, "B H"],
    parameters: Parameters,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B H V"]]:
    """As `reference.step`, in place where `state` is donated; refuses what `forward` refuses."""
    _check("kda_decode", q.shape[-1], v.shape[-1])
    from pallas_kernels.kda import gpu_decode

    if state.dtype != jnp.float32:
        return reference.step(state, q, k, v, gate, beta, parameters)
    output, state = gpu_decode.decode(q, k, v, gate, beta, state, parameters)
    return state, output


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
    """As `decode.step`; raises NotImplementedError off Hopper and unless K = V = 128."""
    _check("kda_decode_step", gate.shape[-1], state_pool.shape[-1])
    from pallas_kernels.kda import gpu_decode

    body = gpu_decode.step if state_pool.dtype == jnp.float32 else plain.step
    return body(
        qkv, gate, beta, out_gate, conv_pool, state_pool, slots, parameters, conv_weights, norm_weight, norm_eps
    )
