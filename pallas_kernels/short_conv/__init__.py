"""Depthwise causal convolution with SiLU, the few taps that q, k and v go through before KDA.

y_t = SiLU(sum_j w[:, j] x_{t-W+1+j}): the last tap multiplies the current token, missing history is zero.
Its state is the last W - 1 inputs, before the convolution. One body serves every platform: W shifted multiply-adds;
`reference` leaves their gradient to JAX.
"""

import functools
import operator
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from pallas_kernels.dispatch import resolve

__all__ = ["short_conv", "short_conv_decode"]


def short_conv(
    x: Float[Array, "B T C"],
    weights: Float[Array, "C W"],
    *,
    initial_state: Float[Array, "B W-1 C"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T C"], Float[Array, "B W-1 C"]]:
    """Convolve whole sequences; returns y and the last W - 1 inputs of the last segment, both in x's dtype.

    Sums are float32. `segment_ids`: non-decreasing, a new id starts from a zero history; -1 is padding, only at the end
    of a row (output 0, kept out of the state, its contents ignored). `initial_state` is the first segment's history.
    Raises ValueError on shapes that do not fit, NotImplementedError for a body that does not exist.
    """
    batch, length, channels = x.shape
    _check_weights(weights, channels)
    history = weights.shape[1] - 1
    if initial_state is None:
        initial_state = jnp.zeros((batch, history, channels), x.dtype)
    _check_state(initial_state, (batch, history, channels))
    if segment_ids is not None and segment_ids.shape != (batch, length):
        raise ValueError(f"segment_ids has shape {segment_ids.shape}; x {x.shape} asks for {(batch, length)}")
    convolve = resolve("short_conv", implementation, {"reference": _convolve, "xla": _convolve_with_backward})
    return _forward(convolve, x, weights, initial_state.astype(x.dtype), segment_ids)


def short_conv_decode(
    x: Float[Array, "B C"], weights: Float[Array, "C W"], state: Float[Array, "B W-1 C"]
) -> tuple[Float[Array, "B C"], Float[Array, "B W-1 C"]]:
    """Convolve one token of every sequence; returns y in x's dtype and the state moved on by one."""
    _check_weights(weights, x.shape[1])
    _check_state(state, (x.shape[0], weights.shape[1] - 1, x.shape[1]))
    window = jnp.concatenate([state, x[:, None].astype(state.dtype)], axis=1)
    sums = jnp.sum(_wide(window) * weights.T, axis=1)
    return jax.nn.silu(sums).astype(x.dtype), window[:, 1:]


def _forward(
    convolve: Callable[..., Array],
    x: Float[Array, "B T C"],
    weights: Float[Array, "C W"],
    initial_state: Float[Array, "B W-1 C"],
    segment_ids: Int[Array, "B T"] | None,
) -> tuple[Float[Array, "B T C"], Float[Array, "B W-1 C"]]:
    length, taps = x.shape[1], weights.shape[1]
    if segment_ids is not None:
        x = jnp.where((segment_ids >= 0)[..., None], x, 0)  # padding may hold NaN
    padded = jnp.concatenate([initial_state, x], axis=1)
    # The history carries the first segment's id.
    ids = None if segment_ids is None else jnp.pad(segment_ids, ((0, 0), (taps - 1, 0)), mode="edge")
    y = convolve(padded, weights, ids)
    if segment_ids is not None:
        y = jnp.where((segment_ids >= 0)[..., None], y, 0)
    return y, padded[:, length:] if ids is None else _last_inputs(padded, ids, taps - 1)


def _convolve(
    padded: Float[Array, "B T+W-1 C"], weights: Float[Array, "C W"], ids: Int[Array, "B T+W-1"] | None
) -> Float[Array, "B T C"]:
    return jax.nn.silu(_sums(padded, weights, ids)).astype(padded.dtype)


def _sums(padded: Array, weights: Array, ids: Array | None) -> Float[Array, "B T C"]:
    """Of each token's window, before SiLU."""
    windows = _windows(padded, weights.shape[1], ids)
    return functools.reduce(operator.add, (window * weights[:, tap] for tap, window in enumerate(windows)))


def _windows(padded: Array, taps: int, ids: Array | None) -> Iterator[Float[Array, "B T C"]]:
    """What each tap multiplies, for all tokens; 0 where it belongs to another segment."""
    length = padded.shape[1] - taps + 1
    for tap in range(taps):
        window = _wide(padded[:, tap : tap + length])
        yield window if ids is None else jnp.where(_same(ids[:, tap : tap + length], ids[:, taps - 1 :]), window, 0)


@jax.custom_vjp
def _convolve_with_backward(padded: Array, weights: Array, ids: Array | None) -> Float[Array, "B T C"]:
    """The same; kept for the gradient are the inputs, and one array in float32 is all that its backward pass makes.

    Automatic differentiation makes ten: a window, its product and its gradient for every tap.
    """
    return _convolve(padded, weights, ids)


def _convolve_backward(kept: tuple, gradient: Float[Array, "B T C"]) -> tuple[Array, Array, None]:
    padded, weights, ids = kept
    taps = weights.shape[1]
    sums = _sums(padded, weights, ids)
    sigmoid = jax.nn.sigmoid(sums)
    d_sums = _wide(gradient) * sigmoid * (1 + sums * (1 - sigmoid))
    windows = _windows(padded, taps, ids)
    d_weights = jnp.stack([jnp.sum(d_sums * window, axis=(0, 1)) for window in windows], axis=-1)
    # Input u reaches the tokens u - tap: d_sums again in windows, which run the other way.
    around = ((0, 0), (taps - 1, taps - 1))
    behind = jnp.pad(d_sums, (*around, (0, 0)))
    d_padded = jnp.zeros((), sums.dtype)
    for tap in range(taps):
        reached = slice(taps - 1 - tap, taps - 1 - tap + padded.shape[1])
        term = behind[:, reached] * weights[:, tap]
        if ids is not None:
            term = jnp.where(_same(ids, jnp.pad(ids[:, taps - 1 :], around)[:, reached]), term, 0)
        d_padded += term
    return d_padded.astype(padded.dtype), d_weights.astype(weights.dtype), None


_convolve_with_backward.defvjp(
    lambda padded, weights, ids: (_convolve(padded, weights, ids), (padded, weights, ids)), _convolve_backward
)


def _last_inputs(
    padded: Float[Array, "B T+W-1 C"], ids: Int[Array, "B T+W-1"], history: int
) -> Float[Array, "B W-1 C"]:
    """The last inputs before the padding that ends each row, zero where they belong to an earlier segment."""
    tokens = jnp.sum(ids[:, history:] >= 0, axis=1)
    at = tokens[:, None] + jnp.arange(history)
    last = jnp.take_along_axis(ids, at, axis=1)
    return jnp.where(_same(last, last[:, -1:]), jnp.take_along_axis(padded, at[..., None], axis=1), 0)


def _same(a: Int[Array, "B N"], b: Int[Array, "B N"]) -> Bool[Array, "B N 1"]:
    return (a == b)[..., None]


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(jnp.float32, x.dtype))


def _check_weights(weights: Array, channels: int) -> None:
    if weights.ndim != 2 or weights.shape[0] != channels:
        raise ValueError(f"weights has shape {weights.shape}; x has {channels} channels and asks for ({channels}, W)")


def _check_state(state: Array, shape: tuple[int, ...]) -> None:
    if state.shape != shape:
        raise ValueError(f"the conv state has shape {state.shape}; x and weights ask for {shape}")
