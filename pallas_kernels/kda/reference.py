"""The KDA recurrence, one token after another: the body that reads like the paper, and the oracle of the others."""

from collections.abc import Callable

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
    inputs, token = _inputs((q, k, v, gate, beta), segments), _token(parameters)
    state, outputs = jax.lax.scan(token, initial_state.astype(compute_dtype(q)), inputs)
    return jnp.moveaxis(outputs, 0, 1).astype(v.dtype), state


def forward_with_states(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    gate: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    initial_state: Float[Array, "B H K V"],
    parameters: Parameters,
    segments: Segments | None,
    *,
    states_every: int,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"], Float[Array, "B N H K V"]]:
    """As `forward`, and the states after every so many tokens."""
    inputs, token = _inputs((q, k, v, gate, beta), segments), _token(parameters)
    whole = q.shape[1] // states_every * states_every

    def piece(state: Array, inputs: list[Array]) -> tuple[Array, tuple[Array, Array]]:
        state, outputs = jax.lax.scan(token, state, inputs)
        return state, (outputs, state)

    pieces = [x[:whole].reshape(-1, states_every, *x.shape[1:]) for x in inputs]
    state, (outputs, states) = jax.lax.scan(piece, initial_state.astype(compute_dtype(q)), pieces)
    state, rest = jax.lax.scan(token, state, [x[whole:] for x in inputs])
    outputs = jnp.concatenate([outputs.reshape(whole, *outputs.shape[2:]), rest])
    return jnp.moveaxis(outputs, 0, 1).astype(v.dtype), state, jnp.moveaxis(states, 0, 1)


def _inputs(tokens: tuple[Array, ...], segments: Segments | None) -> list[Array]:
    """Validity, starts of documents and the tokens, time first."""
    shape = tokens[0].shape[:2]
    if segments is None:
        segments = Segments(jnp.ones(shape, bool), jnp.zeros(shape, jnp.int32))
    # Padding may hold NaN, so it is replaced before it is used: 0 * NaN would reach the gradients.
    clean = [jnp.where(_over(segments.valid, x), x, 0) for x in tokens]
    starts = jnp.diff(segments.document, axis=1, prepend=0) > 0
    return [jnp.moveaxis(x, 1, 0) for x in (segments.valid, starts, *clean)]


def _token(parameters: Parameters) -> Callable[[Array, list[Array]], tuple[Array, Array]]:
    def token(state: Array, inputs: list[Array]) -> tuple[Array, Array]:
        valid, starts, q, k, v, gate, beta = inputs
        new, output = step(jnp.where(_over(starts, state), 0, state), q, k, v, gate, beta, parameters)
        return jnp.where(_over(valid, state), new, state), jnp.where(_over(valid, output), output, 0)

    return token


def _over(flags: Array, x: Array) -> Array:
    """`flags` with unit axes appended up to the rank of `x`."""
    return flags.reshape(flags.shape + (1,) * (x.ndim - flags.ndim))
