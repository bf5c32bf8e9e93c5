"""The KDA recurrence, one token after another: the body that reads like the paper, and the oracle of the others."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from pallas_kernels.kda.inputs import Parameters, Segments, compute_dtype, l2_normalise, log_decay


def step(
    state: Float[Array, "B H K V"],
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    gate: Float[Array, "B H K"],
    beta: Float[Array, "B H"],
    parameters: Parameters,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B H V"]]:
    """One token of every sequence, in the state's dtype: decay, predict with the decayed state, write, read."""
    a_log, dt_bias, lower_bound, scale = parameters
    q, k, v, gate, beta, a_log, dt_bias = (x.astype(state.dtype) for x in (q, k, v, gate, beta, a_log, dt_bias))
    q, k = l2_normalise(q) * scale, l2_normalise(k)
    state = state * jnp.exp(log_decay(gate, a_log[:, None], dt_bias, lower_bound))[..., None]
    # Multiply and sum, not a matmul: exact float32 on every platform, whatever its matmul precision.
    error = v - jnp.sum(state * k[..., None], axis=-2)
    state = state + k[..., None] * (beta[..., None] * error)[..., None, :]
    return state, jnp.sum(state * q[..., None], axis=-2)


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
    """A scan of `step` over tokens; padding leaves the state alone and outputs 0."""
    state = initial_state.astype(compute_dtype(q))
    if segments is None:
        segments = Segments(jnp.ones(q.shape[:2], bool), jnp.zeros(q.shape[:2], jnp.int32))
    # Padding may hold NaN, so it is replaced before it is used: 0 * NaN would reach the gradients.
    tokens = [jnp.where(_over(segments.valid, x), x, 0) for x in (q, k, v, gate, beta)]
    starts = jnp.diff(segments.document, axis=1, prepend=0) > 0

    def token(state: Array, inputs: list[Array]) -> tuple[Array, Array]:
        valid, starts, q, k, v, gate, beta = inputs
        new, output = step(jnp.where(_over(starts, state), 0, state), q, k, v, gate, beta, parameters)
        return jnp.where(_over(valid, state), new, state), jnp.where(_over(valid, output), output, 0)

    time_first = [jnp.moveaxis(x, 1, 0) for x in (segments.valid, starts, *tokens)]
    state, outputs = jax.lax.scan(token, state, time_first)
    return jnp.moveaxis(outputs, 0, 1).astype(v.dtype), state


def _over(flags: Array, x: Array) -> Array:
    """`flags` with unit axes appended up to the rank of `x`."""
    return flags.reshape(flags.shape + (1,) * (x.ndim - flags.ndim))
