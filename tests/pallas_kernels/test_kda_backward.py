"""Gradients of KDA's Pallas TPU kernels, end to end in interpret mode, against float64 autodiff of the recurrence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda import kda
from pallas_kernels.kda.tpu_chunk import windows_for
from tests.pallas_kernels.test_kda_tpu import LOWER_BOUND, TOKENS, make


def weights_of(arguments, scale=1.0):
    """Random gradients of the outputs, exact in their dtype, and of the last state."""
    rng = np.random.default_rng(7)
    output = scale * rng.normal(size=arguments["v"].shape)
    state = scale * rng.normal(size=arguments["initial_state"].shape)
    return np.float32(jnp.asarray(output, arguments["v"].dtype)), np.float32(state)


@functools.cache
def gradient(implementation):
    """Jitted gradients of a loss through the outputs and the last state, for all arguments."""

    def loss(arguments, weights, segment_ids):
        output, state = kda(
            **arguments, segment_ids=segment_ids, lower_bound=LOWER_BOUND, implementation=implementation
        )
        return jnp.sum(output * weights[0].astype(output.dtype)) + jnp.sum(state * weights[1])

    return jax.jit(jax.grad(loss))


def expected(arguments, weights, segment_ids=None):
    with jax.enable_x64(True):
        arguments, weights = jax.tree.map(lambda x: jnp.asarray(np.float64(x)), (arguments, weights))
        return jax.tree.map(np.asarray, gradient("reference")(arguments, weights, segment_ids))


def errors(actual, wanted):
    return {name: float(np.linalg.norm(np.float64(actual[name]) - x) / np.linalg.norm(x)) for name, x in wanted.items()}


def assert_within(actual, wanted, tolerance):
    got = errors(actual, wanted)
    for name, error in got.items():
        assert error < (tolerance if np.isscalar(tolerance) else tolerance[name]), got


# Values

SUMS = ("a_log", "dt_bias")  # of 256 gradients each, whose errors do not cancel as they may


def budget(tokens, gate):
    return dict.fromkeys(("q", "k", "v", "beta", "initial_state"), tokens) | {"gate": gate} | dict.fromkeys(SUMS, 4e-2)


@pytest.mark.parametrize(
    ("correlation", "gate", "tolerances", "scale"),
    [
        pytest.param(0.0, "random", budget(1e-2, 1e-2), 1.0, id="independent"),
        pytest.param(0.5, "slow", budget(1e-2, 1e-2), 1.0, id="corr0.5"),
        pytest.param(0.9, "slow", budget(2.5e-2, 2.5e-2), 1.0, id="corr0.9"),
        pytest.param(0.0, "near-the-bound", budget(1e-2, 2e-2), 1.0, id="all-gates-near-the-bound"),
        pytest.param(0.0, "strong", budget(1e-2, 2e-2), 1.0, id="random-strong-gates"),
        pytest.param(0.0, "strong", budget(1e-2, 2e-2), 1e-6, id="small-gradients"),
        pytest.param(0.0, "near-the-bound", budget(1e-2, 2e-2), 1e-6, id="small-gradients-near-the-bound"),
    ],
)
def test_bf16_gradients_stay_within_the_error_budget(correlation, gate, tolerances, scale):
    arguments = make(256, correlation, gate, dtype=jnp.bfloat16)
    weights = weights_of(arguments, scale)
    assert_within(gradient("tpu")(arguments, weights, None), expected(arguments, weights), tolerances)


def documents(*lengths):
    return np.repeat(np.arange(len(lengths)), lengths)


PADDED = np.r_[np.full(5, -1), np.full(70, 3), np.full(25, -1), np.full(60, 4), np.full(35, 9), np.full(5, -1)]
PACKED = {
    "padding-anywhere-and-one-document": np.stack([PADDED, documents(200)]),
    "short-documents": np.stack([documents(*range(1, 20), 10), documents(1, 2, 3, 63, 64, 65, 2)]),
    "documents-around-two-chunks-and-only-padding": np.stack([documents(127, 73), np.full(200, -1)]),
}


@pytest.mark.parametrize("ids", PACKED.values(), ids=PACKED.keys())
@pytest.mark.parametrize(("correlation", "gate"), [(0.9, "bursts"), (0.98, "slow")])
def test_float32_gradients_of_packed_documents_match_the_recurrence(ids, correlation, gate):
    # Neither 200 tokens nor one head fill what the kernel works on: both are padded.
    arguments = make(200, correlation, gate, dtype=jnp.float32, batch=2, heads=1)
    weights = weights_of(arguments)
    wanted = expected(arguments, weights, np.int32(ids))
    padding = ids < 0
    for name in TOKENS:
        over = padding.reshape(padding.shape + (1,) * (arguments[name].ndim - 2))
        arguments[name] = jnp.where(over, jnp.nan, arguments[name])
    got = gradient("tpu")(arguments, weights, np.int32(ids))
    assert_within(got, wanted, 1e-4)
    for name in TOKENS:
        assert np.all(np.asarray(got[name])[padding] == 0), name


@pytest.mark.parametrize("heads", [8])
def test_tuned_windows_let_no_stage_run_before_what_it_reads(heads):
    for recompute, retreat, differentiate, finish in windows_for("backward", heads):
        assert retreat[1] <= differentiate[0]  # C reads the gradient of the values that B makes
        assert finish[1] <= min(recompute[0], differentiate[0])  # A and C write where D has read


# Memory and transforms


def test_differentiation_keeps_64_kilobytes_a_head_and_chunk_besides_the_inputs():
    arguments = make(512, 0.0, "random", dtype=jnp.bfloat16, heads=2)

    def forward(arguments):
        return kda(**arguments, lower_bound=LOWER_BOUND, implementation="tpu")

    kept = jax.eval_shape(lambda a: jax.vjp(forward, a)[1], arguments)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept))
    inputs = sum(x.size * x.dtype.itemsize for x in arguments.values())
    assert size <= inputs + 2 * (512 // 64) * 64 * 1024


def test_gradients_in_a_checkpointed_scan_of_a_vmapped_layer():
    arguments = make(64, 0.5, "bursts", dtype=jnp.float32, batch=2, heads=10)  # five groups of two
    tokens = {name: arguments[name] for name in TOKENS}
    rest = {name: arguments[name] for name in ("a_log", "dt_bias")}

    def gradients(implementation):
        def one(tokens, state):
            tokens = {name: x[None] for name, x in tokens.items()}
            output, state = kda(
                **tokens, **rest, initial_state=state[None], lower_bound=LOWER_BOUND, implementation=implementation
            )
            return output[0], state[0]

        @jax.checkpoint
        def layer(carry, _):
            tokens, state = carry
            output, state = jax.vmap(one)(tokens, state)
            return (tokens | {"v": output}, state), None

        def loss(tokens, state):
            (tokens, state), _ = jax.lax.scan(layer, (tokens, state), length=2)
            return jnp.sum(jnp.sin(tokens["v"])) + jnp.sum(jnp.sin(state))

        return jax.jit(jax.grad(loss))(tokens, arguments["initial_state"])

    wanted = jax.tree.map(np.float64, gradients("xla"))
    assert_within(gradients("tpu"), wanted, 1e-4)
