"""KDA's Pallas TPU kernels in interpret mode against the recurrence in float64; bf16 operands round as on the TPU."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda import kda, kda_decode, kda_decode_step
from pallas_kernels.kda.tpu_chunk import heads_per_step, windows_for
from pallas_kernels.short_conv import short_conv

LOWER_BOUND = -5.0
WIDTH = 128
TOKENS = ("q", "k", "v", "gate", "beta")
SLOW = -6.2  # a raw gate whose log decay is about -0.01


def make(length, correlation=0.0, gate="random", *, dtype=jnp.bfloat16, batch=1, heads=2, seed=0):
    """Arguments of `kda` by name; tokens' keys have the given correlation."""
    rng = np.random.default_rng(seed)
    shape = (batch, length, heads, WIDTH)

    def correlated():
        shared, own = rng.normal(size=(batch, 1, heads, WIDTH)), rng.normal(size=shape)
        return np.sqrt(correlation) * shared + np.sqrt(1 - correlation) * own

    raw = {
        "random": rng.normal(size=shape) - 2,
        "slow": SLOW + 0.1 * rng.normal(size=shape),
        "saturated": 30 + rng.normal(size=shape),
        "open": -30 + rng.normal(size=shape),
        "strong": 6 * rng.normal(size=shape),
        "bursts": np.where(rng.random(shape) < 0.1, 10, -7) + rng.normal(size=shape),
        "near-the-bound": 4 + np.random.default_rng(seed + 1).normal(size=shape),
    }[gate]
    tokens = {"q": correlated(), "k": correlated(), "v": rng.normal(size=shape), "gate": raw}
    arguments = {name: jnp.asarray(x, dtype) for name, x in tokens.items()}
    beta = rng.uniform(size=shape[:3]) if gate == "random" else np.full(shape[:3], 0.95)
    rest = {
        "beta": beta,
        "a_log": 0.05 * rng.normal(size=heads),
        "dt_bias": 0.1 * rng.normal(size=(heads, WIDTH)),
        "initial_state": 0.3 * rng.normal(size=(batch, heads, WIDTH, WIDTH)),
    }
    return arguments | {name: jnp.asarray(x, jnp.float32) for name, x in rest.items()}


def oracle(q, k, v, gate, beta, a_log, dt_bias, initial_state, segment_ids=None):
    """The recurrence in float64 numpy, written from the definition; returns (o, state)."""
    q, k, v, gate, beta, a_log, dt_bias, state = (
        np.float64(x) for x in (q, k, v, gate, beta, a_log, dt_bias, initial_state)
    )
    ids = np.zeros(q.shape[:2], int) if segment_ids is None else np.asarray(segment_ids)
    q = q / np.sqrt((q**2).sum(-1, keepdims=True) + 1e-6) * WIDTH**-0.5
    k = k / np.sqrt((k**2).sum(-1, keepdims=True) + 1e-6)
    decay = np.exp(LOWER_BOUND / (1 + np.exp(-np.exp(a_log)[:, None] * (gate + dt_bias))))
    state, o = state.copy(), np.zeros_like(v)
    for b in range(len(q)):
        current = None
        for t in np.flatnonzero(ids[b] >= 0):
            if current not in (None, ids[b, t]):
                state[b] = 0
            current = ids[b, t]
            state[b] *= decay[b, t][..., None]
            error = v[b, t] - np.einsum("hkv,hk->hv", state[b], k[b, t])
            state[b] += k[b, t][..., None] * (beta[b, t][:, None] * error)[:, None]
            o[b, t] = np.einsum("hkv,hk->hv", state[b], q[b, t])
    return o, state


@functools.partial(jax.jit, static_argnames=("implementation",))
def run(arguments, segment_ids=None, implementation="tpu"):
    return kda(**arguments, segment_ids=segment_ids, lower_bound=LOWER_BOUND, implementation=implementation)


def errors(actual, expected):
    return [np.linalg.norm(np.float64(x) - y) / np.linalg.norm(y) for x, y in zip(actual, expected, strict=True)]


def assert_within(actual, expected, output, state):
    got = errors(actual, expected)
    assert got[0] < output, got
    assert got[1] < state, got


# Values


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
def test_bf16_operands_stay_within_the_error_budget(correlation, gate, output, state):
    arguments = make(256, correlation, gate, heads=4)
    assert_within(run(arguments), oracle(**arguments), output, state)


def test_high_precision_leaves_the_rounding_of_the_output_alone():
    arguments = make(200, 0.9, "slow")
    high = functools.partial(kda, lower_bound=LOWER_BOUND, implementation="tpu", precision="high")
    o, state = jax.jit(high)(**arguments)
    assert o.dtype == jnp.bfloat16
    assert_within((o, state), oracle(**arguments), 2.5e-3, 1e-4)
    with pytest.raises(ValueError, match="precision='low' is unknown"):
        kda(**arguments, lower_bound=LOWER_BOUND, precision="low")


@pytest.mark.parametrize(
    ("correlation", "gate"),
    [(0.0, "slow"), (0.5, "slow"), (0.9, "slow"), (0.98, "slow"), (0.0, "saturated"), (0.9, "open"), (0.9, "bursts")],
)
def test_float32_operands_match_the_recurrence_in_every_regime(correlation, gate):
    arguments = make(200, correlation, gate, dtype=jnp.float32)
    assert_within(run(arguments), oracle(**arguments), 1e-4, 1e-4)


def test_a_gate_that_hardly_decays_holds_over_2048_tokens():
    arguments = make(2048, 0.0, "open")
    arguments["k"] *= 0  # writes nothing: what is left of the state is the decay
    arguments["gate"] = jnp.full_like(arguments["gate"], -8.0)
    _, state = run(arguments)
    expected = oracle(**arguments)[1]
    assert np.linalg.norm(state - expected) / np.linalg.norm(expected) < 2e-3


@pytest.mark.parametrize("length", [3, 129])
def test_lengths_alone(length):
    arguments = make(length, 0.5, "bursts", dtype=jnp.float32)
    assert_within(run(arguments), oracle(**arguments), 1e-4, 1e-4)


def test_heads_that_do_not_fill_a_pair():
    arguments = make(130, 0.5, "bursts", batch=2, heads=3)
    assert_within(run(arguments), oracle(**arguments), 1.3e-2, 1.3e-2)


def test_two_groups_of_heads_and_two_sequences_keep_their_states_apart():
    arguments = make(300, 0.0, "random", batch=2, heads=22)
    assert heads_per_step(22) == 2
    assert_within(run(arguments), oracle(**arguments), 5e-3, 4e-3)


@pytest.mark.parametrize(("heads", "expected"), [(2, 2), (8, 8), (12, 12), (16, 16), (24, 12), (96, 16)])
def test_groups_are_even_divisors(heads, expected):
    assert heads_per_step(heads) == expected


@pytest.mark.parametrize("heads", [2, 8, 16])
def test_tuned_windows_let_no_stage_run_before_what_it_reads(heads):
    first, second = windows_for("forward", heads)
    (_, scores_end, _), (_, inverse_end, _), (_, output_end, _) = first
    (_, _, _), (inverse_start, _, _), (output_start, output_stop, output_power) = second
    assert scores_end <= inverse_start  # the second inverse is of the chunk whose scores the first chunk's stage makes
    assert output_end <= output_start  # states follow one another
    needs = output_start + (output_stop - output_start) * 0.45**output_power  # the fifth of ten parts reads the inverse
    assert inverse_end <= needs


# Segments


def all_lengths(shortest, longest):
    """Documents of every length in a range, one after another."""
    return np.repeat(np.arange(longest - shortest + 1), np.arange(shortest, longest + 1))[None].astype(np.int32)


@pytest.mark.parametrize("ids", [all_lengths(1, 45), all_lengths(125, 130)], ids=["short", "around-two-chunks"])
def test_packed_documents_start_from_zero(ids):
    arguments = make(ids.shape[1], 0.9, "bursts", dtype=jnp.float32)
    assert_within(run(arguments, ids), oracle(**arguments, segment_ids=ids), 1e-4, 1e-4)


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-4), (jnp.bfloat16, 1.5e-2)])
def test_padding_may_stand_anywhere_and_hold_nan(dtype, tolerance):
    ids = np.int32([[-1] * 40 + [4] * 5 + [-1] * 60 + [4] * 65 + [-1] * 2 + [9] * 28, [-1] * 200])
    arguments = make(200, 0.5, "bursts", dtype=dtype, batch=2)
    expected = oracle(**arguments, segment_ids=ids)
    for name in TOKENS:
        padding = (ids < 0).reshape(ids.shape + (1,) * (arguments[name].ndim - 2))
        arguments[name] = jnp.where(padding, jnp.nan, arguments[name])
    output, state = run(arguments, ids)
    assert_within((output, state), expected, tolerance, tolerance)
    assert np.all(np.asarray(output)[ids < 0] == 0)
    np.testing.assert_array_equal(state[1], arguments["initial_state"][1])


def test_one_piece_equals_uneven_pieces():
    arguments = make(195, 0.9, "bursts", dtype=jnp.float32)
    whole = run(arguments)
    state, outputs = arguments["initial_state"], []
    for start, stop in [(0, 67), (67, 195)]:
        piece = {name: x[:, start:stop] if name in TOKENS else x for name, x in arguments.items()}
        output, state = run(piece | {"initial_state": state})
        outputs.append(output)
    assert_within((np.concatenate(outputs, 1), state), map(np.float64, whole), 1e-5, 1e-5)


def test_states_at_boundaries_are_those_of_the_prefixes():
    arguments = make(200, 0.9, "bursts", dtype=jnp.float32)
    ids = np.repeat([0, 1, -1, 2], [50, 60, 30, 60])[None]
    forward = functools.partial(kda, lower_bound=LOWER_BOUND, implementation="tpu", states_every=64)
    output, state, states = jax.jit(forward)(**arguments, segment_ids=ids)
    assert_within((output, state), oracle(**arguments, segment_ids=ids), 1e-4, 1e-4)
    assert states.shape[1] == 3
    for i, stop in enumerate((64, 128, 192)):
        prefix = {name: x[:, :stop] if name in TOKENS else x for name, x in arguments.items()}
        expected = oracle(**prefix, segment_ids=ids[:, :stop])[1]
        assert np.linalg.norm(states[:, i] - expected) < 1e-4 * np.linalg.norm(expected)


# Transforms


def test_works_in_a_checkpointed_scan():
    arguments = make(128, 0.0, "random")
    tokens = {name: arguments[name] for name in TOKENS}
    rest = {name: x for name, x in arguments.items() if name not in tokens and name != "initial_state"}

    @jax.checkpoint
    def layer(state, _):
        output, state = kda(**tokens, **rest, initial_state=state, lower_bound=LOWER_BOUND, implementation="tpu")
        return state, jnp.sum(output.astype(jnp.float32))

    state, _ = jax.jit(lambda state: jax.lax.scan(layer, state, length=2))(arguments["initial_state"])
    once = run(arguments)[1]
    twice = run(arguments | {"initial_state": once})[1]
    np.testing.assert_allclose(state, twice, rtol=1e-5, atol=1e-5)


IN_TWO_SHARDS = """
import jax, numpy as np, sys
from functools import partial
from jax.sharding import AxisType, PartitionSpec
from pallas_kernels.kda import kda

arguments = dict(np.load(sys.argv[1]))
shared = {name: arguments.pop(name) for name in ("a_log", "dt_bias")}
mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
split = PartitionSpec("data")

def forward(arguments):
    return kda(**arguments, **shared, lower_bound=-5.0, implementation="tpu")

sharded = jax.shard_map(forward, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
np.savez(sys.argv[2], *jax.jit(sharded)(arguments))
"""


def test_works_on_the_shards_of_a_shard_map(tmp_path):
    arguments = make(64, 0.5, "bursts", dtype=jnp.float32, batch=2)
    np.savez(tmp_path / "in.npz", **arguments)
    devices = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    command = [sys.executable, "-c", IN_TWO_SHARDS, str(tmp_path / "in.npz"), str(tmp_path / "out.npz")]
    subprocess.run(command, env=os.environ | {"XLA_FLAGS": devices}, check=True)
    actual = np.load(tmp_path / "out.npz")
    assert_within([actual[name] for name in actual.files], oracle(**arguments), 1e-4, 1e-4)


# Refusals


def test_what_the_kernel_does_not_do_is_refused_with_the_numbers():
    arguments = make(2)
    narrow = {name: x[..., :64] if x.shape[-1] == WIDTH else x for name, x in arguments.items()}
    narrow["initial_state"] = arguments["initial_state"][..., :64, :64]
    with pytest.raises(NotImplementedError, match="K = V = 128, not K=64 and V=64"):
        kda(**narrow, lower_bound=LOWER_BOUND, implementation="tpu")
    with pytest.raises(NotImplementedError, match=r"lower_bound >= -5\.11, not -6\.0"):
        kda(**arguments, lower_bound=-6.0, implementation="tpu")


def test_states_at_boundaries_have_no_gradients():
    arguments = make(64)

    def loss(v):
        return jnp.sum(kda(**arguments | {"v": v}, lower_bound=LOWER_BOUND, implementation="tpu", states_every=64)[2])

    with pytest.raises(NotImplementedError, match="no gradients with states_every=64: use 'xla'"):
        jax.eval_shape(jax.grad(loss), arguments["v"])


# Decode


def decode_arguments(slots, *, pool=6, heads=16, dtype=jnp.bfloat16, split=True):
    rng = np.random.default_rng(1)
    rows, channels = len(slots), (3 * heads, WIDTH) if split else (3 * heads * WIDTH,)

    def normal(*shape, dtype=jnp.float32, scale=1.0):
        return jnp.asarray(scale * rng.normal(size=shape), dtype)

    return {
        "qkv": normal(rows, *channels, dtype=dtype),
        "gate": normal(rows, heads, WIDTH, dtype=dtype),
        "beta": jax.nn.sigmoid(normal(rows, heads)),
        "out_gate": normal(rows, heads, WIDTH, dtype=dtype),
        "conv_pool": normal(pool, 3, *channels, dtype=dtype),
        "state_pool": normal(pool, heads, WIDTH, WIDTH, scale=0.3),
        "slots": jnp.asarray(slots, jnp.int32),
        "conv_weights": normal(*channels, 4, scale=0.5),
        "a_log": normal(heads, scale=0.1),
        "dt_bias": normal(heads, WIDTH, scale=0.1),
        "norm_weight": 1 + normal(WIDTH, scale=0.1),
    }


@functools.partial(jax.jit, static_argnames=("implementation",))
def decode(arguments, implementation):
    return kda_decode_step(**arguments, lower_bound=LOWER_BOUND, implementation=implementation)


def expected_decode(arguments):
    """From the parts: conv, KDA step and gated norm of the rows that have a slot, on the slots' own state."""
    a = {name: np.asarray(x, np.float64) for name, x in arguments.items() if name != "slots"}
    slots = np.asarray(arguments["slots"])
    pool = len(a["conv_pool"])
    heads = a["gate"].shape[1]
    conv, state = a["conv_pool"].reshape(pool, 3, -1).copy(), a["state_pool"].copy()
    output, dtype = np.zeros(a["gate"].shape), arguments["qkv"].dtype
    for row, slot in enumerate(slots):
        if not 0 <= slot < pool:
            output[row] = 0.0 if slot == -1 else np.nan
            continue
        x = arguments["qkv"][row].reshape(1, 1, -1)
        y, _ = short_conv(
            x, arguments["conv_weights"].reshape(-1, 4), initial_state=jnp.asarray(conv[slot : slot + 1], dtype)
        )
        conv[slot] = np.concatenate([conv[slot, 1:], np.float64(x[0])])
        q, k, v = (part.reshape(1, heads, WIDTH) for part in jnp.split(y[0], 3, axis=-1))
        o, new = kda_decode(
            q,
            k,
            v,
            arguments["gate"][row : row + 1],
            arguments["beta"][row : row + 1],
            jnp.asarray(state[slot : slot + 1], jnp.float32),
            a_log=arguments["a_log"],
            dt_bias=arguments["dt_bias"],
            lower_bound=LOWER_BOUND,
            implementation="reference",
        )
        state[slot], o = new[0], np.float64(o[0])
        o = o / np.sqrt((o**2).mean(-1, keepdims=True) + 1e-5) * a["norm_weight"]
        output[row] = o / (1 + np.exp(-a["out_gate"][row]))
    return output, conv.reshape(a["conv_pool"].shape), state


@pytest.mark.parametrize("implementation", ["xla", "tpu"])
@pytest.mark.parametrize(
    ("slots", "options"),
    [
        pytest.param([3, -1, 0, 5, 9], {}, id="padding-and-a-missing-slot"),
        pytest.param([-1, -1, 2, 1], {"heads": 24}, id="three-groups"),
        pytest.param([1], {"heads": 2, "dtype": jnp.float32, "split": False}, id="flat-channels"),
        pytest.param([-1], {"heads": 2}, id="only-padding"),
    ],
)
def test_decode_step_moves_the_rows_slots_and_nothing_else(implementation, slots, options):
    arguments = decode_arguments(slots, **options)
    output, conv, state = decode(arguments, implementation)
    expected = expected_decode(arguments)
    np.testing.assert_allclose(np.float64(output), expected[0], rtol=2e-2, atol=2e-2)
    np.testing.assert_array_equal(np.float64(conv), expected[1])
    np.testing.assert_allclose(state, expected[2], rtol=1e-4, atol=1e-4)
    others = np.setdiff1d(np.arange(6), slots)
    np.testing.assert_array_equal(state[others], arguments["state_pool"][others])
    assert output.dtype == arguments["qkv"].dtype


def test_decode_step_refuses_a_pool_that_does_not_fit():
    arguments = decode_arguments([0], heads=2)
    arguments["conv_pool"] = arguments["conv_pool"][:, :2]
    with pytest.raises(
        ValueError, match=r"conv_pool has shape \(6, 2, 6, 128\); gate and state_pool ask for \(6, 3, 6, 128\)"
    ):
        kda_decode_step(**arguments, lower_bound=LOWER_BOUND)
