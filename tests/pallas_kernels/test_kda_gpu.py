"""KDA's Mosaic GPU kernels against the recurrence in float64, on a Hopper GPU; elsewhere what surrounds them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import on_hopper
from pallas_kernels.kda import kda, kda_decode, kda_decode_step
from pallas_kernels.kda.gpu_forward import document_rows, sum_matrices
from tests.pallas_kernels.test_kda_tpu import (
    LOWER_BOUND,
    TOKENS,
    all_lengths,
    assert_within,
    decode_arguments,
    expected_decode,
    make,
    oracle,
)

hopper = pytest.mark.skipif(not on_hopper(), reason="needs a Hopper GPU")


@functools.partial(jax.jit, static_argnames=("implementation",))
def run(arguments, segment_ids=None, implementation=None):
    return kda(**arguments, segment_ids=segment_ids, lower_bound=LOWER_BOUND, implementation=implementation)


# Around the kernels


def test_sums_of_log_decays_are_those_of_their_rows():
    g = np.random.default_rng(0).normal(size=64)
    so_far = np.cumsum(g)
    centred, border, since_start = sum_matrices() @ g
    middle = so_far[[16] * 32 + [48] * 32]
    np.testing.assert_allclose(centred, so_far - middle, atol=1e-12)
    np.testing.assert_allclose(border, _to_border(so_far), atol=1e-12)
    np.testing.assert_allclose(since_start, so_far, atol=1e-12)


def _to_border(so_far):
    end = so_far[31]
    return np.concatenate([end - so_far[:32], so_far[32:] - end])


def test_rows_say_what_they_see_of_the_states_and_where_their_document_starts():
    document = np.zeros((1, 192), np.int32)
    document[0, 70:] = 1
    document[0, 100:] = 2
    first, second, third = np.asarray(document_rows(jnp.asarray(document)))[0]
    np.testing.assert_array_equal(first, [np.ones(64), np.ones(64), np.zeros(64)])
    row = np.arange(64, 128)
    np.testing.assert_array_equal(second[0], row < 70)
    np.testing.assert_array_equal(second[1], row >= 100)
    np.testing.assert_array_equal(second[2], np.where(row < 70, 0, np.where(row < 100, 70 - 64, 100 - 64)))
    np.testing.assert_array_equal(third, [np.ones(64), np.ones(64), np.zeros(64)])


@pytest.mark.skipif(on_hopper(), reason="for machines without a Hopper GPU")
def test_refused_by_name_off_hopper():
    with pytest.raises(NotImplementedError, match=r"kda's gpu body needs a Hopper GPU and jax 0\.11, not"):
        kda(**make(2), lower_bound=LOWER_BOUND, implementation="gpu")


def test_what_the_kernel_does_not_do_is_refused_with_the_numbers():
    arguments = make(2)
    narrow = {name: x[..., :64] if x.shape[-1] == 128 else x for name, x in arguments.items()}
    narrow["initial_state"] = arguments["initial_state"][..., :64, :64]
    with pytest.raises(NotImplementedError, match="K = V = 128, not K=64 and V=64"):
        kda(**narrow, lower_bound=LOWER_BOUND, implementation="gpu")
    with pytest.raises(NotImplementedError, match=r"lower_bound >= -5\.11, not -6\.0"):
        kda(**arguments, lower_bound=-6.0, implementation="gpu")


# Values


@hopper
@pytest.mark.parametrize(
    ("correlation", "gate", "output", "state"),
    [
        pytest.param(0.0, "random", 5e-3, 4e-3, id="independent"),
        pytest.param(0.5, "slow", 1.3e-2, 8e-3, id="corr0.5"),
        pytest.param(0.9, "slow", 2.2e-2, 1.1e-2, id="corr0.9"),
        pytest.param(0.0, "saturated", 5e-3, 3e-3, id="all-gates-at-the-bound"),
        pytest.param(0.0, "strong", 5e-3, 5e-3, id="random-strong-gates"),
    ],
)
def test_bf16_stays_within_the_error_budget(correlation, gate, output, state):
    arguments = make(256, correlation, gate, heads=3, batch=2)
    assert_within(run(arguments), oracle(**arguments), output, state)


@hopper
@pytest.mark.parametrize(
    ("correlation", "gate"),
    [(0.0, "slow"), (0.5, "slow"), (0.9, "slow"), (0.98, "slow"), (0.0, "saturated"), (0.9, "open"), (0.9, "bursts")],
)
def test_float32_matches_the_recurrence_in_every_regime(correlation, gate):
    arguments = make(200, correlation, gate, dtype=jnp.float32)
    assert_within(run(arguments), oracle(**arguments), 1e-4, 1e-4)


@hopper
def test_a_gate_that_hardly_decays_holds_over_2048_tokens():
    arguments = make(2048, 0.0, "open")
    arguments["k"] *= 0  # writes nothing: what is left of the state is the decay
    arguments["gate"] = jnp.full_like(arguments["gate"], -8.0)
    _, state = run(arguments)
    expected = oracle(**arguments)[1]
    assert np.linalg.norm(state - expected) / np.linalg.norm(expected) < 2e-3


@hopper
@pytest.mark.parametrize("length", [1, 63, 64, 65, 129])
def test_lengths_alone(length):
    arguments = make(length, 0.0, "random")
    assert_within(run(arguments), oracle(**arguments), 6e-3, 6e-3)


@hopper
@pytest.mark.parametrize("ids", [all_lengths(1, 45), all_lengths(125, 130)], ids=["short", "around-two-chunks"])
def test_packed_documents_start_from_zero(ids):
    arguments = make(ids.shape[1], 0.9, "bursts")
    assert_within(run(arguments, ids), oracle(**arguments, segment_ids=ids), 1.5e-2, 1.5e-2)


@hopper
def test_padding_may_stand_anywhere_and_hold_nan():
    ids = np.int32([[-1] * 40 + [4] * 5 + [-1] * 60 + [4] * 65 + [-1] * 2 + [9] * 28, [-1] * 200])
    arguments = make(200, 0.5, "bursts", batch=2)
    expected = oracle(**arguments, segment_ids=ids)
    for name in TOKENS:
        padding = (ids < 0).reshape(ids.shape + (1,) * (arguments[name].ndim - 2))
        arguments[name] = jnp.where(padding, jnp.nan, arguments[name])
    output, state = run(arguments, ids)
    assert_within((output, state), expected, 1.5e-2, 1.5e-2)
    assert np.all(np.asarray(output)[ids < 0] == 0)
    np.testing.assert_array_equal(state[1], arguments["initial_state"][1])


@hopper
@pytest.mark.parametrize(
    ("correlation", "gate", "tolerance"),
    [(0.5, "slow", 1e-2), (0.9, "slow", 2.5e-2), (0.0, "random", 1e-2), (0.0, "strong", 2e-2)],
)
def test_gradients_against_those_of_the_float32_body(correlation, gate, tolerance):
    arguments = make(150, correlation, gate)
    ids = np.int32([[-1] * 3 + [0] * 30 + [1] * 35 + [-1] * 5 + [3] * 77])
    weights = np.random.default_rng(1).normal(size=(1, 150, 2, 128))

    def gradients(arguments, implementation):
        def loss(arguments):
            output, state = run(arguments, ids, implementation)
            return jnp.sum(output.astype(jnp.float32) * weights) + 0.1 * jnp.sum(jnp.sin(state))

        return jax.jit(jax.grad(loss))(arguments)

    expected = gradients({name: jnp.asarray(x, jnp.float32) for name, x in arguments.items()}, "xla")
    for name, x in gradients(arguments, "gpu").items():
        assert x.dtype == arguments[name].dtype
        difference = np.linalg.norm(np.float32(x) - np.float32(expected[name]))
        assert difference <= tolerance * np.linalg.norm(np.float32(expected[name])), name


# Decode


@hopper
def test_one_token_of_every_sequence():
    arguments = make(6, 0.5, "random", heads=5)
    tokens = {name: arguments[name][0] for name in TOKENS}
    rest = {name: arguments[name] for name in ("a_log", "dt_bias")} | {"lower_bound": LOWER_BOUND}
    state = jnp.tile(arguments["initial_state"], (6, 1, 1, 1))
    output, new = jax.jit(lambda state: kda_decode(**tokens, state=state, **rest))(state)
    expected = kda_decode(**tokens, state=state, **rest, implementation="reference")
    assert_within((output, new), map(np.float64, expected), 4e-3, 1e-6)


@hopper
@pytest.mark.parametrize(
    ("slots", "options"),
    [
        pytest.param([3, -1, 0, 5, 9], {}, id="padding-and-a-missing-slot"),
        pytest.param([1], {"heads": 2, "dtype": jnp.float32, "split": False}, id="flat-channels"),
        pytest.param([-1], {"heads": 2}, id="only-padding"),
    ],
)
def test_decode_step_moves_the_rows_slots_and_nothing_else(slots, options):
    arguments = decode_arguments(slots, **options)
    output, conv, state = jax.jit(lambda a: kda_decode_step(**a, lower_bound=LOWER_BOUND))(arguments)
    expected = expected_decode(arguments)
    np.testing.assert_allclose(np.float64(output), expected[0], rtol=2e-2, atol=2e-2)
    np.testing.assert_array_equal(np.float64(conv), expected[1])
    np.testing.assert_allclose(state, expected[2], rtol=1e-4, atol=1e-4)
    others = np.setdiff1d(np.arange(6), slots)
    np.testing.assert_array_equal(state[others], arguments["state_pool"][others])


@hopper
def test_decode_continues_where_the_forward_pass_stops():
    arguments = make(129, 0.5, "bursts")
    start = arguments | {name: arguments[name][:, :128] for name in TOKENS}
    last = {name: arguments[name][:, 128] for name in TOKENS}
    _, state = run(start)
    rest = {name: arguments[name] for name in ("a_log", "dt_bias")}
    output, state = kda_decode(**last, state=state, **rest, lower_bound=LOWER_BOUND)
    expected = oracle(**arguments)
    assert_within((output, state), (expected[0][:, 128], expected[1]), 2e-2, 1e-2)
