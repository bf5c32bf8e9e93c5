"""The short convolution against a float64 loop over tokens: values, states, gradients, segments, refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.short_conv import short_conv, short_conv_decode

LENGTHS = [1, 2, 3, 4, 9]


def make(length, *, batch=2, channels=6, taps=4, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"x": (batch, length, channels), "weights": (channels, taps), "initial_state": (batch, taps - 1, channels)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def oracle(x, weights, initial_state, segment_ids=None):
    """One token after another in float64: push the token into the window, weigh, SiLU."""
    x, weights, windows = np.float64(x), np.float64(weights), np.float64(initial_state).copy()
    ids = np.zeros(x.shape[:2], int) if segment_ids is None else segment_ids
    y = np.zeros_like(x)
    for b in range(len(x)):
        current = None
        for t in np.flatnonzero(ids[b] >= 0):
            if current not in (None, ids[b, t]):
                windows[b] = 0
            current = ids[b, t]
            window = np.concatenate([windows[b], x[b, t][None]])
            total = (window * weights.T).sum(0)
            y[b, t] = total / (1 + np.exp(-total))
            windows[b] = window[1:]
    return y, windows


def assert_close(actual, expected):
    for got, want in zip(actual, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("length", LENGTHS)
def test_matches_the_loop_over_tokens(length, taps):
    arguments = make(length, taps=taps)
    assert_close(short_conv(**arguments), oracle(**arguments))


def test_history_is_zero_without_an_initial_state():
    arguments = make(5)
    expected = oracle(**arguments | {"initial_state": np.zeros((2, 3, 6))})
    del arguments["initial_state"]
    assert_close(short_conv(**arguments), expected)


@pytest.mark.parametrize(
    "ids",
    [
        [[0, 0, 0, 0, 0, 1, 1, 1, 1], [3, 3, 4, 5, 5, 5, 5, -1, -1]],  # a boundary inside the window, a padded tail
        [[0, 1, 1, 2, 2, 2, 3, 3, -1], [7, 7, -1, -1, -1, -1, -1, -1, -1]],  # last segments shorter than the window
        [[2, -1, -1, -1, -1, -1, -1, -1, -1], [-1] * 9],  # the initial state shows through
    ],
)
def test_segments_start_from_zero_and_padding_stays_out(ids):
    arguments, ids = make(9), np.int32(ids)
    y, state = short_conv(**arguments, segment_ids=ids)
    assert_close((y, state), oracle(**arguments, segment_ids=ids))
    assert np.all(np.asarray(y)[ids < 0] == 0)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("segmented", [False, True])
def test_gradients_match_finite_differences_in_float64(length, segmented):
    arguments = jax.tree.map(np.float64, make(length))
    ids = np.int32([[0] * length, [1] + [2] * (length - 1)]) if segmented else None
    rng = np.random.default_rng(1)
    weights = rng.normal(size=(2, length, 6)), rng.normal(size=(2, 3, 6))
    direction = {name: rng.normal(size=x.shape) for name, x in arguments.items()}

    def value(step):
        moved = {name: x + step * direction[name] for name, x in arguments.items()}
        return sum(np.sum(w * r) for w, r in zip(weights, oracle(**moved, segment_ids=ids), strict=True))

    def loss(arguments):
        results = short_conv(**arguments, segment_ids=ids)
        return sum(jnp.sum(w * r) for w, r in zip(weights, results, strict=True))

    with jax.enable_x64(True):
        gradient = jax.grad(loss)(jax.tree.map(jnp.asarray, arguments))
    slope = sum(np.sum(np.asarray(gradient[name]) * direction[name]) for name in arguments)
    np.testing.assert_allclose(slope, (value(1e-5) - value(-1e-5)) / 2e-5, rtol=1e-6)


def test_nan_in_padding_reaches_neither_results_nor_gradients():
    arguments, ids = make(9), np.int32([[0, 0, 0, 1, 1, -1, -1, -1, -1], [2] * 9])
    poisoned = arguments | {"x": np.where(ids[..., None] < 0, np.nan, arguments["x"])}

    def loss(arguments):
        y, state = short_conv(**arguments, segment_ids=ids)
        return jnp.sum(y**2) + jnp.sum(state**2), (y, state)

    results = functools.partial(jax.value_and_grad(loss, has_aux=True))
    jax.tree.map(np.testing.assert_array_equal, results(poisoned), results(arguments))


def test_one_piece_equals_uneven_pieces_and_single_tokens():
    arguments = make(9)
    x, state = arguments["x"], arguments["initial_state"]
    outputs = []
    for start, stop in [(0, 1), (1, 3), (3, 7)]:
        y, state = short_conv(x[:, start:stop], arguments["weights"], initial_state=state)
        outputs.append(y)
    for t in (7, 8):
        y, state = short_conv_decode(x[:, t], arguments["weights"], state)
        outputs.append(y[:, None])
    assert_close((np.concatenate(outputs, 1), state), oracle(**arguments))


def test_bfloat16_sums_in_float32_and_keeps_inputs_exact():
    arguments = make(9)
    arguments |= {name: arguments[name].astype(jnp.bfloat16) for name in ("x", "initial_state")}
    y, state = short_conv(**arguments)
    exact, window = oracle(**arguments)
    np.testing.assert_array_equal(y, exact.astype(np.float32).astype(jnp.bfloat16))
    np.testing.assert_array_equal(np.float64(state), window)
    assert (y.dtype, state.dtype) == (jnp.bfloat16, jnp.bfloat16)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weights": np.zeros((5, 4))}, r"weights has shape \(5, 4\); x has 6 channels"),
        ({"initial_state": np.zeros((2, 4, 6))}, r"state has shape \(2, 4, 6\); x and weights ask for \(2, 3, 6\)"),
        (
            {"segment_ids": np.zeros((2, 8), np.int32)},
            r"segment_ids has shape \(2, 8\); x \(2, 9, 6\) asks for \(2, 9\)",
        ),
        ({"implementation": "fast"}, "implementation='fast' is unknown"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_shapes(changed, message):
    with pytest.raises(ValueError, match=message):
        short_conv(**make(9) | changed)
