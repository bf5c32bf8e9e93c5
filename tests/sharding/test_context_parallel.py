"""KDA and the short convolution on pieces of rows: shards of 2, 4 and 8 devices against the one-device run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels.kda import kda
from pallas_kernels.short_conv import short_conv
from sharding.context_parallel import context_parallel_kda, context_parallel_short_conv

BATCH, LENGTH, HEADS, WIDTH, VALUE = 2, 64, 2, 8, 12
SHARDS = (2, 4, 8)
TOKENS = ("q", "k", "v", "gate", "beta")
ROWS, BATCHES = P("data", "context"), P("data")


def rows(*parts):
    """A row of segment ids from (id, tokens) pairs; the last id fills it."""
    row = [i for i, n in parts[:-1] for _ in range(n)]
    return row + [parts[-1]] * (LENGTH - len(row))


def random_layout(seed):
    """Documents of 1 to 40 tokens, ids with gaps, padding at the end of the second row."""
    rng = np.random.default_rng(seed)
    ids = np.zeros((BATCH, LENGTH), np.int32)
    for row in ids:
        lengths = rng.integers(1, rng.choice([4, 20, 40]), LENGTH)
        row[:] = np.repeat(np.cumsum(rng.integers(1, 4, LENGTH)), lengths)[:LENGTH]
    ids[1, rng.integers(1, LENGTH) :] = -1
    return ids


LAYOUTS = {
    "one-document": [rows(0), rows(7)],
    "ends-at-the-edges-of-shards": [rows((0, 8), (1, 8), (2, 16), 3), rows((0, 32), 1)],
    "ends-inside-of-shards": [rows((0, 5), (1, 1), (2, 1), (3, 30), 9), rows((4, 33), (5, 2), 6)],
    "whole-shards-of-padding": [rows((0, 20), (1, 3), -1), rows(-1)],
    "padding-between-documents": [rows((-1, 17), (0, 10), (-1, 20), (0, 9), 2), rows((1, 8), (-1, 40), 4)],
    **{f"random-{seed}": random_layout(seed) for seed in range(4)},
}
every_layout = pytest.mark.parametrize("ids", [np.int32(ids) for ids in LAYOUTS.values()], ids=LAYOUTS)


def arguments(dtype=np.float64):
    rng = np.random.default_rng(0)
    shape = (BATCH, LENGTH, HEADS, WIDTH)
    shared = rng.normal(size=(BATCH, 1, HEADS, WIDTH))
    values = {
        "q": rng.normal(size=shape) + shared,
        "k": rng.normal(size=shape) + shared,
        "v": rng.normal(size=(*shape[:3], VALUE)),
        "gate": 2 * rng.normal(size=shape) - 5,  # states outlive several shards
        "beta": rng.uniform(0.3, 1, size=shape[:3]),
        "a_log": 0.1 * rng.normal(size=HEADS),
        "dt_bias": 0.1 * rng.normal(size=(HEADS, WIDTH)),
        "initial_state": rng.normal(size=(BATCH, HEADS, WIDTH, VALUE)),
    }
    return {name: jnp.asarray(x, dtype) for name, x in values.items()}


def on_shards(fn, shards, sharded, *, data=1, **options):
    """`fn(arguments, ids)` with the rows of the `sharded` arguments, and of the first result, cut into pieces."""
    auto, used = (AxisType.Auto,) * 2, jax.devices()[: data * shards]
    mesh = jax.make_mesh((data, shards), ("data", "context"), axis_types=auto, devices=used)

    def run(arguments, ids):
        others = {"initial_state": BATCHES}
        specs = {name: ROWS if name in sharded else others.get(name, P()) for name in arguments}
        ids_spec = None if ids is None else ROWS
        mapped = jax.shard_map(fn, mesh=mesh, in_specs=(specs, ids_spec), out_specs=(ROWS, BATCHES), **options)
        return mapped(arguments, ids)

    return run


def one_device_kda(implementation):
    local = functools.partial(kda, lower_bound=-5.0, implementation=implementation)
    return lambda arguments, ids: local(**arguments, segment_ids=ids)


def sharded_kda(shards, implementation, **options):
    local = functools.partial(kda, lower_bound=-5.0, implementation=implementation)

    def piece(arguments, ids):
        return context_parallel_kda(local, **arguments, segment_ids=ids, axis="context")

    return on_shards(piece, shards, TOKENS, **options)


def one_device_conv(arguments, ids):
    return short_conv(**arguments, segment_ids=ids)


def sharded_conv(shards):
    def piece(arguments, ids):
        return context_parallel_short_conv(short_conv, **arguments, segment_ids=ids, axis="context")

    return on_shards(piece, shards, ("x",), check_vma=False)


@functools.cache
def compiled(make, *setting):
    """Jitted results and gradients of a loss through output and state: {name: array}."""
    body = make(*setting) if setting else make

    def loss(arguments, ids):
        output, state = body(arguments, ids)
        weights = [jnp.asarray(np.random.default_rng(n).normal(size=x.shape)) for n, x in enumerate((output, state))]
        return jnp.sum(output * weights[0]) + jnp.sum(state * weights[1]), {"output": output, "state": state}

    def both(arguments, ids):
        gradients, results = jax.grad(loss, has_aux=True)(arguments, ids)
        return results | {f"d {name}": x for name, x in gradients.items()}

    return jax.jit(both)


def results(make, *setting, arguments, ids):
    return {name: np.asarray(x) for name, x in compiled(make, *setting)(arguments, ids).items()}


def two_axes(shards, implementation):
    """Each row of the batch on its own half of the devices, and `shard_map` keeping account of what varies."""
    return sharded_kda(shards, implementation, data=2, check_vma=True)


def unchecked(shards, implementation):
    return sharded_kda(shards, implementation, check_vma=False)


def assert_equal(actual, expected, tolerance):
    """Relative to the largest entry, for each array and, where it has rows, for each eighth of them apart."""
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        scale = np.max(np.abs(want)) + 1e-300
        error = np.abs(actual[name] - want) / scale
        pieces = np.split(error, 8, axis=1) if want.shape[:2] == (BATCH, LENGTH) else [error]
        worst = [np.max(piece) for piece in pieces]
        assert max(worst) < tolerance, (name, worst)


@every_layout
@pytest.mark.parametrize("shards", SHARDS)
def test_every_shard_equals_the_one_device_run_in_float64(shards, ids):
    with jax.enable_x64(True):
        case = {"arguments": arguments(), "ids": ids}
        expected = results(one_device_kda, "reference", **case)
        assert_equal(results(unchecked, shards, "reference", **case), expected, 1e-9)


@every_layout
@pytest.mark.parametrize("shards", SHARDS)
def test_every_shard_equals_the_one_device_run_in_float32(shards, ids):
    with jax.enable_x64(True):
        expected = results(one_device_kda, "reference", arguments=arguments(), ids=ids)
    actual = results(unchecked, shards, "xla", arguments=arguments(np.float32), ids=ids)
    assert_equal(actual, expected, 2e-5)


def test_rows_without_documents_and_without_an_initial_state():
    with jax.enable_x64(True):
        case = {"arguments": arguments(), "ids": None}
        del case["arguments"]["initial_state"]
        expected = results(one_device_kda, "reference", **case)
        assert_equal(results(unchecked, 4, "reference", **case), expected, 1e-9)


def test_batches_may_lie_on_another_axis():
    with jax.enable_x64(True):
        case = {"arguments": arguments(), "ids": LAYOUTS["random-0"]}
        expected = results(one_device_kda, "reference", **case)
        assert_equal(results(two_axes, 4, "reference", **case), expected, 1e-9)


def test_bfloat16_tokens_keep_float32_states():
    tokens = {name: x.astype(jnp.bfloat16) for name, x in arguments(np.float32).items() if name in TOKENS[:4]}
    rounded, ids = arguments(np.float32) | tokens, LAYOUTS["random-1"]
    with jax.enable_x64(True):
        exact = {name: jnp.asarray(x, np.float64) for name, x in rounded.items()}
        expected = results(one_device_kda, "reference", arguments=exact, ids=ids)
    actual = results(unchecked, 2, "xla", arguments=rounded, ids=ids)
    assert (actual["output"].dtype, actual["state"].dtype) == (jnp.bfloat16, np.float32)
    assert all(actual[f"d {name}"].dtype == x.dtype for name, x in rounded.items())
    assert_equal({name: np.float64(x) for name, x in actual.items()}, expected, 1e-2)


def test_padding_may_hold_nan():
    ids = np.int32(LAYOUTS["padding-between-documents"])
    clean = arguments(np.float32)
    poisoned = clean | {
        name: jnp.where((ids < 0).reshape(*ids.shape, *(1,) * (clean[name].ndim - 2)), np.nan, clean[name])
        for name in TOKENS
    }
    got, want = (results(unchecked, 8, "xla", arguments=a, ids=ids) for a in (poisoned, clean))
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])


@pytest.mark.parametrize(("shards", "runs"), [(1, 1), (2, 3)])
def test_an_axis_of_one_shard_is_the_local_call_and_others_take_three(shards, runs):
    calls = []

    def local(**arguments):
        calls.append(arguments)
        return kda(**arguments, lower_bound=-5.0, implementation="xla")

    def piece(arguments, ids):
        return context_parallel_kda(local, **arguments, segment_ids=ids, axis="context")

    run = on_shards(piece, shards, TOKENS, check_vma=False)
    jax.eval_shape(run, arguments(np.float32), np.int32(LAYOUTS["random-0"]))
    assert len(calls) == runs


# The short convolution


def conv_arguments(dtype=np.float64):
    rng = np.random.default_rng(1)
    shapes = {"x": (BATCH, LENGTH, 5), "weights": (5, 4), "initial_state": (BATCH, 3, 5)}
    return {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("ids", [ids for name, ids in LAYOUTS.items() if name != "padding-between-documents"])
@pytest.mark.parametrize("shards", SHARDS)
def test_the_convolution_sees_the_tokens_before_its_shard(shards, ids):
    with jax.enable_x64(True):
        case = {"arguments": conv_arguments(), "ids": np.int32(ids)}
        expected = results(one_device_conv, **case)
        assert_equal(results(sharded_conv, shards, **case), expected, 1e-12)


def test_the_convolution_ignores_nan_in_padding():
    ids = np.int32(LAYOUTS["whole-shards-of-padding"])
    clean = conv_arguments(np.float32)
    poisoned = clean | {"x": jnp.where((ids < 0)[..., None], np.nan, clean["x"])}
    got, want = (results(sharded_conv, 8, arguments=a, ids=ids) for a in (poisoned, clean))
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])


def test_a_shard_shorter_than_the_history_is_refused_with_both_numbers():
    short = conv_arguments(np.float32)
    short["x"] = short["x"][:, :8]
    with pytest.raises(ValueError, match="a shard of 2 tokens is too short for 4 taps: it needs 3"):
        jax.eval_shape(sharded_conv(4), short, None)
