"""Faults that other KDA implementations had in public, each with a test here or elsewhere that fails on its kind."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda import kda

LOWER_BOUND = -5.0

# The test of the kind, and where the fault was reported.
KNOWN = {
    "pallas_kernels/test_kda.py": {
        "test_matches_the_recurrence_in_every_regime": "tt-metal#54813, #55420: a triangular inverse that cancels",
        "test_gradients_are_finite_when_every_gate_saturates": "fla#701, cuLA#89: overflow of exp(-sum of decays)",
        "test_gate_is_the_bounded_sigmoid": "tokenspeed#847: a clamped softplus as gate",
        "test_beta_is_not_rounded_to_bfloat16": "vllm#53877, sglang#38975: drift with length",
        "test_state_holds_over_4096_steps_with_a_decay_near_one": "vmlx-swift#433: decay rounded to bfloat16",
        "test_one_piece_equals_five_uneven_pieces": "vllm#41292: [V, K] for [K, V] between chunks",
        "test_a_shape_that_does_not_fit_is_refused_with_both_shapes": "fla#624: other heads in v than in k",
        "test_matches_the_recurrence_at_every_length": "sglang-jax#1026: outputs of several chunks",
    },
    "pallas_kernels/test_kda_tpu.py": {
        "test_bf16_operands_stay_within_the_error_budget": "tt-metal#54813, #55420, fla#701, in the kernel",
        "test_decode_step_moves_the_rows_slots_and_nothing_else": "sglang#36880, flashinfer#5042: slot -1 wraps; "
        "tpu-inference#2366: slots beyond the pool are clipped",
    },
    "pallas_kernels/test_kda_bug_log.py": {
        "test_the_kernels_gate_is_the_bounded_sigmoid": "tokenspeed#847, in the kernel",
        "test_the_kernel_does_not_round_beta_to_bfloat16": "vllm#53877, sglang#38975, in the kernel",
        "test_states_do_not_drift_over_65536_steps": "tt-metal#53508: accumulated rounding",
        "test_gradients_of_rows_of_one_two_and_three_tokens": "fla#1140, of KDA itself",
    },
    "pallas_kernels/test_short_conv.py": {
        "test_gradients_match_finite_differences_in_float64": "fla#1140: conv gradients of rows shorter than the taps",
    },
    "sharding/test_context_parallel.py": {
        "test_every_shard_equals_the_one_device_run_in_float64": "fla#1115: gradients of all ranks but the last",
    },
    "aot/test_context_parallel.py": {
        "test_kda_of_a_long_row_compiles_with_few_temporaries": "sglang-jax#1465: VMEM grows with the row",
    },
    "nn/test_golden.py": {
        "test_stack_matches": "llama.cpp#17592: the gate's projection applied twice, seen layer by layer",
    },
}


@pytest.mark.parametrize(("file", "test"), [(file, test) for file, tests in KNOWN.items() for test in tests])
def test_every_known_fault_has_a_test(file, test):
    assert f"def {test}(" in (Path(__file__).parents[1] / file).read_text(encoding="utf-8")


# In the kernel, whose tokens are bfloat16: one token of two heads, from one compiled program

HEADS, WIDTH = 2, 128


@functools.cache
def one_token():
    return jax.jit(functools.partial(kda, lower_bound=LOWER_BOUND, implementation="tpu"))


def state_after(*, k, gate, beta, a_log, initial):
    """The state [H, K] that one token with values of one leaves, in its first value channel."""
    token = (1, 1, HEADS, WIDTH)
    tokens = {name: jnp.broadcast_to(jnp.asarray(x, jnp.bfloat16), token) for name, x in {"k": k, "gate": gate}.items()}
    _, state = one_token()(
        **tokens,
        q=jnp.ones(token, jnp.bfloat16),
        v=jnp.ones(token, jnp.bfloat16),
        beta=jnp.full((1, 1, HEADS), beta, jnp.float32),
        a_log=jnp.asarray(a_log, jnp.float32),
        dt_bias=jnp.zeros((HEADS, WIDTH), jnp.float32),
        initial_state=jnp.full((1, HEADS, WIDTH, WIDTH), initial, jnp.float32),
    )
    return np.float64(state[0, :, :, 0])


@pytest.mark.parametrize("a_log", [(-2.0, 0.0), (3.0, 1.0)])
def test_the_kernels_gate_is_the_bounded_sigmoid(a_log):
    raw, a_log = np.resize([-10.0, 0.0, 10.0], WIDTH), np.array(a_log)
    state = state_after(k=0.0, gate=raw, beta=0.5, a_log=a_log, initial=1.0)
    decay = np.exp(LOWER_BOUND / (1 + np.exp(-np.exp(a_log)[:, None] * raw)))
    np.testing.assert_allclose(state, decay, rtol=1e-3)


def test_the_kernel_does_not_round_beta_to_bfloat16():
    k = np.float64(jnp.asarray(np.random.default_rng(0).normal(size=WIDTH), jnp.bfloat16))
    state = state_after(k=k, gate=0.0, beta=0.62246, a_log=np.zeros(HEADS), initial=0.0)
    key = k / np.sqrt(np.sum(k**2) + 1e-6)
    written = state @ key  # rounding of single operands averages out; that of beta, to 0.62109, would not
    np.testing.assert_allclose(written, 0.62246, atol=4e-4)


# Long and short rows, in the portable body


def arguments(batch, length, correlation, *, heads=1, width=16, seed=0):
    rng = np.random.default_rng(seed)
    shape = (batch, length, heads, width)

    def correlated():
        shared, own = rng.normal(size=(batch, 1, heads, width)), rng.normal(size=shape)
        return np.sqrt(correlation) * shared + np.sqrt(1 - correlation) * own

    values = {
        "q": correlated(),
        "k": correlated(),
        "v": rng.normal(size=shape),
        "gate": rng.normal(size=shape) - 8,  # a log decay of about -0.002
        "beta": rng.uniform(0.1, 1, size=shape[:3]),
        "a_log": 0.05 * rng.normal(size=heads),
        "dt_bias": 0.1 * rng.normal(size=(heads, width)),
        "initial_state": rng.normal(size=(batch, heads, width, width)),
    }
    return {name: x.astype(np.float32) for name, x in values.items()}


@functools.partial(jax.jit, static_argnames=("implementation",))
def run(arguments, segment_ids=None, implementation="xla"):
    return kda(**arguments, segment_ids=segment_ids, lower_bound=LOWER_BOUND, implementation=implementation)


def in_float64(fn, arguments, *rest):
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, fn(jax.tree.map(np.float64, arguments), *rest))


def relative(actual, expected):
    return np.linalg.norm(np.float64(actual) - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_states_do_not_drift_over_65536_steps(correlation):
    long = arguments(1, 65_536, correlation)
    expected = in_float64(functools.partial(run, implementation="reference"), long)
    output, state = run(long)
    assert relative(output, expected[0]) < 1e-5
    assert relative(output[:, -64:], expected[0][:, -64:]) < 1e-5
    assert relative(state, expected[1]) < 1e-5


def test_gradients_of_rows_of_one_two_and_three_tokens():
    short, ids = arguments(3, 3, 0.5, heads=2), np.int32([[0, -1, -1], [0, 0, -1], [0, 0, 0]])

    def gradients(arguments, implementation):
        def loss(arguments):
            output, state = run(arguments, ids, implementation)
            return jnp.sum(jnp.sin(output)) + jnp.sum(jnp.sin(state))

        return jax.jit(jax.grad(loss))(arguments)

    expected = in_float64(functools.partial(gradients, implementation="reference"), short)
    for name, x in gradients(short, "xla").items():
        assert relative(x, expected[name]) < 1e-5, name
