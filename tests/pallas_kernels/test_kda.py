"""KDA's bodies against the recurrence in float64: values, states, gradients, segments, chaining, refusals."""

import functools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.kda import kda, kda_decode, xla
from pallas_kernels.kda.inputs import Parameters

BODIES = ("reference", "xla")
LOWER_BOUND = -5.0
NAMES = ("q", "k", "v", "gate", "beta", "a_log", "dt_bias", "initial_state")

# Regimes: correlation of the keys (and queries) of different tokens, and what the raw gate looks like.
SLOW = -6.2  # a raw gate whose log decay is about -0.01
REGIMES = [
    pytest.param(0.0, "slow", id="independent-slow"),
    pytest.param(0.5, "slow", id="corr0.5-slow"),
    pytest.param(0.9, "slow", id="corr0.9-slow"),
    pytest.param(0.98, "slow", id="corr0.98-slow"),
    pytest.param(0.0, "saturated", id="all-gates-at-the-bound"),
    pytest.param(0.9, "open", id="nothing-decays"),
    pytest.param(0.0, "random", id="random-strong-gates"),
    pytest.param(0.9, "bursts", id="corr0.9-bursts"),
]


def make(length, correlation=0.0, gate="slow", *, batch=1, heads=2, width=16, value=24, seed=0):
    """Float32 numpy arguments of `kda` by name."""
    rng = np.random.default_rng(seed)
    shape = (batch, length, heads, width)

    def correlated():
        shared, own = rng.normal(size=(batch, 1, heads, width)), rng.normal(size=shape)
        return np.sqrt(correlation) * shared + np.sqrt(1 - correlation) * own

    raw = {
        "slow": SLOW + 0.1 * rng.normal(size=shape),
        "saturated": 30 + rng.normal(size=shape),
        "open": -30 + rng.normal(size=shape),
        "random": 6 * rng.normal(size=shape),
        "bursts": np.where(rng.random(shape) < 0.1, 10, -7) + rng.normal(size=shape),
    }[gate]
    arguments = {
        "q": correlated(),
        "k": correlated(),
        "v": rng.normal(size=(batch, length, heads, value)),
        "gate": raw,
        "beta": np.full(shape[:3], 0.95),
        "a_log": 0.05 * rng.normal(size=heads),
        "dt_bias": 0.1 * rng.normal(size=(heads, width)),
        "initial_state": 0.3 * rng.normal(size=(batch, heads, width, value)),
    }
    return {name: x.astype(np.float32) for name, x in arguments.items()}


def oracle(q, k, v, gate, beta, a_log, dt_bias, initial_state=None, segment_ids=None, lower_bound=LOWER_BOUND):
    """The recurrence in float64 numpy, written from the definition; returns (o, state)."""
    q, k, v, gate, beta, a_log, dt_bias = (np.float64(x) for x in (q, k, v, gate, beta, a_log, dt_bias))
    batch, length, heads, width = q.shape
    state = np.zeros((batch, heads, width, v.shape[-1])) if initial_state is None else np.float64(initial_state)
    ids = np.zeros((batch, length), int) if segment_ids is None else np.asarray(segment_ids)
    q = q / np.sqrt((q**2).sum(-1, keepdims=True) + 1e-6) * width**-0.5
    k = k / np.sqrt((k**2).sum(-1, keepdims=True) + 1e-6)
    decay = np.exp(lower_bound / (1 + np.exp(-np.exp(a_log)[:, None] * (gate + dt_bias))))
    state, o, current = state.copy(), np.zeros_like(v), [None] * batch
    for b in range(batch):
        for t in np.flatnonzero(ids[b] >= 0):
            if current[b] not in (None, ids[b, t]):
                state[b] = 0
            current[b] = ids[b, t]
            decayed = state[b] * decay[b, t][..., None]
            error = v[b, t] - np.einsum("hkv,hk->hv", decayed, k[b, t])
            state[b] = decayed + k[b, t][..., None] * (beta[b, t][:, None] * error)[:, None]
            o[b, t] = np.einsum("hkv,hk->hv", state[b], q[b, t])
    return o, state


@functools.partial(jax.jit, static_argnames=("implementation",))
def run(arguments, segment_ids=None, implementation="xla"):
    return kda(**arguments, segment_ids=segment_ids, lower_bound=LOWER_BOUND, implementation=implementation)


def in_chunks_of_64(arguments, segment_ids=None):
    """The xla body with chunks that are not its default."""
    assert segment_ids is None
    tokens = [arguments[name] for name in NAMES[:5]]
    parameters = Parameters(arguments["a_log"], arguments["dt_bias"], LOWER_BOUND, scale=16**-0.5)
    return xla.forward(*tokens, arguments["initial_state"], parameters, None, chunk=64)


def relative(actual, expected):
    return np.linalg.norm(np.float64(actual) - expected) / np.linalg.norm(expected)


def assert_agrees(actual, expected, tolerance=1e-5):
    for got, want in zip(actual, expected, strict=True):
        assert relative(got, want) < tolerance


# Values


@pytest.mark.parametrize(("correlation", "gate"), REGIMES)
@pytest.mark.parametrize("implementation", BODIES)
def test_matches_the_recurrence_in_every_regime(implementation, correlation, gate):
    arguments = make(200, correlation, gate)
    assert_agrees(run(arguments, implementation=implementation), oracle(**arguments))


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 1000])
@pytest.mark.parametrize("implementation", BODIES)
def test_matches_the_recurrence_at_every_length(implementation, length):
    arguments = make(length, 0.9, "bursts")
    assert_agrees(run(arguments, implementation=implementation), oracle(**arguments))


@pytest.mark.parametrize(("correlation", "gate"), REGIMES)
def test_chunks_of_64_match_the_recurrence(correlation, gate):
    arguments = make(200, correlation, gate)
    assert_agrees(jax.jit(in_chunks_of_64)(arguments), oracle(**arguments))


@pytest.mark.parametrize("implementation", BODIES)
def test_state_holds_over_4096_steps_with_a_decay_near_one(implementation):
    arguments = make(4096, 0.5, heads=1, width=16, value=16)
    arguments["gate"] = np.full_like(arguments["gate"], np.log(1.6e-5 / (1 - 1.6e-5)))  # decay exp(-8e-5) = 0.99992
    arguments["dt_bias"] *= 0
    arguments["a_log"] *= 0
    _, state = run(arguments, implementation=implementation)
    assert relative(state, oracle(**arguments)[1]) < 1e-5


@pytest.mark.parametrize("implementation", BODIES)
def test_state_error_stays_small_over_4096_correlated_steps(implementation):
    arguments = make(4096, 0.98, heads=1, width=16, value=16)
    assert_agrees(run(arguments, implementation=implementation), oracle(**arguments), 1e-4)


@pytest.mark.parametrize("a_log", [-2.0, 0.0, 3.0])
@pytest.mark.parametrize("raw", [-10.0, 0.0, 10.0])
@pytest.mark.parametrize("implementation", BODIES)
def test_gate_is_the_bounded_sigmoid(implementation, raw, a_log):
    arguments = make(1, heads=1, width=2, value=2)
    arguments["k"] *= 0  # writes nothing: what is left of the state is the decay
    arguments |= {"gate": np.full((1, 1, 1, 2), raw, np.float32), "initial_state": np.ones((1, 1, 2, 2), np.float32)}
    bias = np.float32([[0.25, -0.5]])
    arguments |= {"a_log": np.float32([a_log]), "dt_bias": bias}
    _, state = run(arguments, implementation=implementation)
    decay = np.exp(LOWER_BOUND / (1 + np.exp(-np.exp(a_log) * (raw + bias[0].astype(np.float64)))))
    np.testing.assert_allclose(state[0, 0], np.stack([decay, decay], -1), rtol=2e-6)


@pytest.mark.parametrize("implementation", BODIES)
def test_beta_is_not_rounded_to_bfloat16(implementation):
    arguments = make(1, heads=1, width=2, value=1)
    for name in ("q", "k", "v", "gate"):
        arguments[name] = arguments[name].astype(jnp.bfloat16)
    arguments |= {"k": np.array([[[[64, 0]]]], jnp.bfloat16), "v": np.array([[[[1]]]], jnp.bfloat16)}
    arguments |= {"beta": np.float32([[[0.62246]]]), "initial_state": np.zeros((1, 1, 2, 1), np.float32)}
    output, state = run(arguments, implementation=implementation)
    np.testing.assert_allclose(state[0, 0, 0, 0], 0.62246, rtol=1e-6)
    assert (output.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize("implementation", BODIES)
def test_scale_multiplies_the_output_and_not_the_state(implementation):
    arguments = make(40, 0.5)
    _, state = run(arguments, implementation=implementation)
    scaled = functools.partial(kda, lower_bound=LOWER_BOUND, scale=1.0, implementation=implementation)
    output, same = jax.jit(scaled)(**arguments)
    assert_agrees((output, same), (4 * oracle(**arguments)[0], np.asarray(state)))  # 16**-0.5 is the default


# Segments, padding and states

IDS = np.int32([[0] * 20 + [1] * 3 + [5] * 60 + [6] * 7 + [-1] * 10, [2] * 64 + [3] * 36])


@pytest.mark.parametrize("gate", ["slow", "bursts"])
@pytest.mark.parametrize("implementation", BODIES)
def test_segments_start_from_zero_and_padding_changes_nothing(implementation, gate):
    arguments = make(100, 0.9, gate, batch=2)
    output, state = run(arguments, IDS, implementation)
    assert_agrees((output, state), oracle(**arguments, segment_ids=IDS))
    assert np.all(np.asarray(output)[IDS < 0] == 0)


@pytest.mark.parametrize("implementation", BODIES)
def test_padding_may_stand_anywhere(implementation):
    ids = np.int32([[-1] * 40 + [4] * 5 + [-1] * 30 + [4] * 5 + [-1] * 2 + [9] * 18, [-1] * 100])
    arguments = make(100, 0.5, batch=2)
    output, state = run(arguments, ids, implementation)
    assert_agrees((output, state), oracle(**arguments, segment_ids=ids))
    np.testing.assert_array_equal(state[1], arguments["initial_state"][1])


@pytest.mark.parametrize("implementation", BODIES)
def test_nan_in_padding_reaches_neither_results_nor_gradients(implementation):
    clean = make(100, 0.9, "bursts", batch=2)
    poisoned = dict(clean)
    for name in NAMES[:5]:
        poisoned[name] = np.where((IDS < 0).reshape(2, 100, *(1,) * (clean[name].ndim - 2)), np.nan, clean[name])

    @jax.jit
    def results(arguments):
        def loss(arguments):
            output, state = run(arguments, IDS, implementation)
            return jnp.sum(output**2) + jnp.sum(state**2), (output, state)

        return jax.value_and_grad(loss, has_aux=True)(arguments)

    jax.tree.map(np.testing.assert_array_equal, results(poisoned), results(clean))


@pytest.mark.parametrize("implementation", BODIES)
def test_one_piece_equals_five_uneven_pieces(implementation):
    arguments = make(195, 0.9, "bursts")
    whole = run(arguments, implementation=implementation)
    state, outputs = arguments["initial_state"], []
    for start, stop in [(0, 1), (1, 66), (66, 68), (68, 131), (131, 195)]:
        piece = {name: x[:, start:stop] if name in NAMES[:5] else x for name, x in arguments.items()}
        output, state = run(piece | {"initial_state": state}, implementation=implementation)
        outputs.append(output)
    assert_agrees((np.concatenate(outputs, 1), state), map(np.asarray, whole))


@pytest.mark.parametrize("every", [64, 128])
@pytest.mark.parametrize("implementation", BODIES)
def test_states_at_boundaries_are_those_of_the_prefixes(implementation, every):
    arguments = make(200, 0.9, "bursts", batch=2)
    ids = np.stack([np.repeat([0, 1, -1, 2], [50, 60, 30, 60]), np.zeros(200, int)])
    forward = functools.partial(kda, lower_bound=LOWER_BOUND, implementation=implementation, states_every=every)
    output, state, states = jax.jit(forward)(**arguments, segment_ids=ids)
    assert states.shape[1] == 200 // every
    assert_agrees((output, state), oracle(**arguments, segment_ids=ids))
    for i in range(200 // every):
        stop = (i + 1) * every
        prefix = {name: x[:, :stop] if name in NAMES[:5] else x for name, x in arguments.items()}
        assert relative(states[:, i], oracle(**prefix, segment_ids=ids[:, :stop])[1]) < 1e-5


def test_boundaries_that_no_body_stops_at_are_refused():
    with pytest.raises(ValueError, match="states_every=96 must be a positive multiple of 64"):
        kda(**make(8), lower_bound=LOWER_BOUND, states_every=96)


@pytest.mark.parametrize("implementation", BODIES)
def test_decode_equals_one_step(implementation):
    arguments = make(1, gate="random", batch=3)
    output, state = run(arguments)
    token = {name: x[:, 0] if name in NAMES[:5] else x for name, x in arguments.items()}
    token["state"] = token.pop("initial_state")
    decode = functools.partial(kda_decode, lower_bound=LOWER_BOUND, implementation=implementation)
    one, moved = jax.jit(decode)(**token)
    assert_agrees((one, moved), (np.asarray(output[:, 0]), np.asarray(state)))
    assert (one.dtype, moved.dtype) == (jnp.float32, jnp.float32)


# Gradients


@functools.cache
def gradient(body):
    """Jitted gradient of a loss through the outputs and the last state, for all arguments."""

    def loss(arguments, segment_ids, output_weights, state_weights):
        output, state = body(arguments, segment_ids)
        return jnp.sum(output * output_weights) + jnp.sum(state * state_weights)

    return jax.jit(jax.grad(loss))


by_reference = functools.partial(run, implementation="reference")


def gradients(body, arguments, dtype=np.float32, segment_ids=None):
    rng = np.random.default_rng(7)
    weights = rng.normal(size=arguments["v"].shape), rng.normal(size=arguments["initial_state"].shape)
    with jax.enable_x64(dtype == np.float64):
        arguments, *weights = jax.tree.map(lambda x: jnp.asarray(x, dtype), (arguments, *weights))
        return jax.tree.map(np.asarray, gradient(body)(arguments, segment_ids, *weights))


def assert_gradients_agree(actual, expected):
    for name in NAMES:
        if np.linalg.norm(expected[name]) > 1e-9:
            assert relative(actual[name], expected[name]) < 1e-3, name
        else:
            assert np.linalg.norm(actual[name]) < 1e-6, name


@pytest.mark.parametrize(
    "ids", [np.zeros((1, 70), np.int32), IDS[:1, 10:80], IDS[:1, 30:]], ids=["one", "many", "tail"]
)
@pytest.mark.parametrize(("correlation", "gate"), REGIMES)
def test_gradients_match_float64_autodiff_of_the_recurrence(correlation, gate, ids):
    arguments = make(70, correlation, gate)
    if gate == "saturated":
        arguments["gate"] -= 24  # at the bound to 1 in 400, yet with a gradient that float32 can hold
    expected = gradients(by_reference, arguments, np.float64, ids)
    assert_gradients_agree(gradients(run, arguments, segment_ids=ids), expected)


def test_gradients_in_chunks_of_64_match_too():
    arguments = make(64, 0.9, "bursts")
    expected = gradients(by_reference, arguments, np.float64)
    assert_gradients_agree(gradients(in_chunks_of_64, arguments), expected)


@pytest.mark.parametrize("raw", [-200.0, 200.0])
@pytest.mark.parametrize("body", [by_reference, run], ids=BODIES)
def test_gradients_are_finite_when_every_gate_saturates(body, raw):
    arguments = make(70, 0.9)
    arguments["gate"] = np.full_like(arguments["gate"], raw)
    for name, x in gradients(body, arguments, segment_ids=np.zeros((1, 70), np.int32)).items():
        assert np.all(np.isfinite(x)), name


def test_triangular_inverse_is_exact_and_keeps_its_gradient_below_the_diagonal():
    lower = np.tril(np.full((32, 32), 0.95, np.float32), -1)  # norm 19: powers of it reach 1e7
    inverse, pull = jax.vjp(xla.unit_lower_inverse, lower)
    expected = np.linalg.inv(np.eye(32) + np.float64(lower))
    np.testing.assert_allclose(inverse, expected, atol=1e-6)
    weights = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)
    np.testing.assert_allclose(pull(weights)[0], np.tril(-expected.T @ weights @ expected.T, -1), atol=1e-4)


# Memory and choice of body


def test_differentiation_keeps_only_inputs_states_and_residuals():
    arguments = make(256, heads=2, width=16, value=16)
    pull = jax.eval_shape(lambda a: jax.vjp(run, a)[1], arguments)
    kept = sum(x.size for x in jax.tree.leaves(pull))
    inputs = sum(x.size for x in arguments.values())
    states, residuals = 8 * 2 * 16 * 16, 256 * 2 * 16
    assert kept <= inputs + states + residuals + 1000


def test_the_body_that_runs_is_said_once(caplog, monkeypatch):
    monkeypatch.setattr(dispatch, "_announced", set())
    arguments = make(2)
    with caplog.at_level(logging.INFO, logger="pallas_kernels"):
        for _ in range(2):
            jax.eval_shape(functools.partial(kda, lower_bound=LOWER_BOUND), **arguments)
    assert [record.getMessage() for record in caplog.records] == [
        "kda runs its 'xla' body on cpu (implementation=None)"
    ]


def test_chunked_is_an_alias_of_xla():
    arguments = make(40)
    for got, want in zip(run(arguments, implementation="chunked"), run(arguments, implementation="xla"), strict=True):
        np.testing.assert_array_equal(got, want)


# Refusals


def test_unknown_and_missing_bodies_are_named():
    arguments = make(2)
    with pytest.raises(ValueError, match=r"'mosaic'.*reference, xla, blocked, tpu, gpu, chunked"):
        kda(**arguments, lower_bound=LOWER_BOUND, implementation="mosaic")
    with pytest.raises(NotImplementedError, match="gpu body needs K = V = 128, not K=16 and V=24: use 'xla'"):
        kda(**arguments, lower_bound=LOWER_BOUND, implementation="gpu")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("k", (1, 8, 2, 15)),
        ("v", (1, 8, 3, 24)),
        ("gate", (1, 8, 2, 24)),
        ("beta", (1, 8, 2, 1)),
        ("a_log", (3,)),
        ("dt_bias", (32,)),
        ("initial_state", (1, 2, 24, 16)),
        ("segment_ids", (1, 9)),
    ],
)
def test_a_shape_that_does_not_fit_is_refused_with_both_shapes(name, shape):
    arguments = make(8) | {"segment_ids": np.zeros((1, 8), np.int32)}
    wanted = (*shape[:2], 2, 24) if name == "v" else arguments[name].shape
    arguments[name] = np.zeros(shape, arguments[name].dtype)
    with pytest.raises(ValueError, match=re.escape(f"{name} has shape {shape}; q and v ask for {wanted}")):
        kda(**arguments, lower_bound=LOWER_BOUND)


def test_lower_bounds_out_of_range_are_refused_with_the_number():
    arguments = make(8)
    with pytest.raises(ValueError, match=r"lower_bound=0\.5"):
        kda(**arguments, lower_bound=0.5)
    with pytest.raises(NotImplementedError, match=r">= -8\.0, not -9\.0"):
        kda(**arguments, lower_bound=-9.0, implementation="xla")
