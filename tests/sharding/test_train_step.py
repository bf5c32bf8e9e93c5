"""The training step on meshes of eight devices is the one-device step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from k3jax.config import ConfigError, MeshShape, TrainRun, load_model_config
from k3jax.data import Batch
from k3jax.nn.param import is_variable, split_model
from k3jax.nn.transformer import Transformer
from k3jax.train.devices import Devices
from k3jax.train.optimizer import make_optimizer
from k3jax.train.step import init_state, make_train_step
from sharding import local

ROWS, LENGTH = 8, 64
# Every axis alone or in company; a mesh that leaves a device several heads or experts, and one that does not.
MESHES = {
    "expert 8": {"expert": 8},
    "expert 4, tensor 2": {"expert": 4, "tensor": 2},
    "fsdp 2, expert 4": {"fsdp": 2, "expert": 4},
    "context 4, expert 2": {"context": 4, "expert": 2},
    "data 2, fsdp 2, tensor 2": {"data": 2, "fsdp": 2, "tensor": 2},
}


def tiny_run(dtype: str) -> TrainRun:
    model = load_model_config("k3_tiny")
    model.dtype = dtype
    run = TrainRun(model=model, steps=10, loss_chunk=32)
    run.optimizer.learning_rate = 1e-3
    return run


def batch() -> Batch:
    """Rows of two documents and padding."""
    tokens = np.random.default_rng(0).integers(0, 512, (ROWS, LENGTH)).astype(np.int32)
    lengths = [40, 20, 4]
    ids = np.concatenate([np.full((ROWS, n), i, np.int32) for n, i in zip(lengths, (0, 1, -1), strict=True)], axis=1)
    return Batch(tokens=tokens, targets=np.roll(tokens, -1, 1), segment_ids=ids, loss_mask=ids >= 0)


@pytest.fixture(autouse=True, scope="module")
def many_parts():
    """Weights of this size would stay in few parts; here they are cut as those of the full model are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "SMALL_PART", 0)
        yield


@functools.cache
def start(dtype: str):
    """(optimizer, what nothing changes, the state at step 0: that of float64, rounded to `dtype`)."""
    run = tiny_run(dtype)

    def model() -> Transformer:
        made = Transformer(run.model, jax.random.key(0), param_dtype=dtype)
        return jax.tree.map(lambda v: v.replace(v.get_value().astype(dtype)), made, is_leaf=is_variable)

    params, _, rest = split_model(jax.eval_shape(model))
    optimizer = make_optimizer(run.optimizer, params, steps=run.steps, dtype=dtype)
    if dtype == "float64":
        return optimizer, rest, jax.device_get(jax.jit(lambda: init_state(model(), optimizer))())
    with jax.enable_x64(True):
        exact = jax.tree.leaves(start("float64")[2])
    blank, tree = jax.tree.flatten(jax.eval_shape(lambda: init_state(model(), optimizer)))
    return optimizer, rest, tree.unflatten([x.astype(like.dtype) for x, like in zip(exact, blank, strict=True)])


@functools.cache
def steps(dtype: str, sizes: tuple[tuple[str, int], ...]):
    """(state, metrics) after two steps on a mesh, and the text of the program."""
    with jax.enable_x64(dtype == "float64"):
        run, count = tiny_run(dtype), int(np.prod([size for _, size in sizes]))
        optimizer, rest, state = start(dtype)
        devices = Devices.of(MeshShape(**dict(sizes)), state, jax.devices()[:count])
        run.data.batch_size, run.data.seq_len = ROWS, LENGTH
        step = devices.jit(make_train_step(run, optimizer, rest), run.data, (devices.state_specs, PartitionSpec()))
        state, rows = devices.put_state(state), devices.put(batch(), first=0, batch_size=ROWS)
        program = step.lower(state, rows)
        compiled = program.compile()
        for _ in range(2):
            state, metrics = compiled(state, rows)
        return jax.device_get(state), jax.device_get(metrics), program.as_text()


def worst(ours, theirs) -> float:
    """The largest relative difference of any tensor."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return max(float(np.linalg.norm(a - b) / (np.linalg.norm(b) + 1e-30)) for a, b in pairs)


SLOW = {"data 2, fsdp 2, tensor 2", "expert 8", "fsdp 2, expert 4"}


@pytest.mark.parametrize(
    "sizes", [pytest.param(v, id=k, marks=[pytest.mark.soak] if k in SLOW else []) for k, v in MESHES.items()]
)
def test_two_steps_in_float64_equal_those_of_one_device(sizes):
    ours, metrics, _ = steps("float64", tuple(sizes.items()))
    theirs, expected, _ = steps("float64", ())
    assert worst(ours, theirs) < 1e-9
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-9), name
    assert metrics["dropped"] == 0


def test_two_steps_in_float32_stay_close_to_those_of_one_device_in_float64():
    ours, metrics, _ = steps("float32", tuple(MESHES["fsdp 2, expert 4"].items()))
    theirs, expected, _ = steps("float64", ())
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=2e-6)
    assert worst(ours.opt_state["momentum"], theirs.opt_state["momentum"]) < 3e-4
    assert worst(ours.router_bias, theirs.router_bias) < 1e-2  # a bin's width, where a choice flips


def test_each_device_holds_its_share_of_the_state():
    sizes = MESHES["fsdp 2, expert 4"]
    run = tiny_run("float32")
    model = jax.eval_shape(lambda: Transformer(run.model, jax.random.key(0)))
    params, _, _ = split_model(model)
    optimizer = make_optimizer(run.optimizer, params, steps=1)
    blank = jax.eval_shape(lambda model: init_state(model, optimizer), model)
    zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), blank)  # noqa: E731
    state = Devices.of(MeshShape(**sizes), blank).create(zeros)
    w1 = state.params.stacks["kda_moe"].ffn.w1.get_value()
    assert {shard.data.size for shard in w1.addressable_shards} == {w1.size // 8}
    embed = state.opt_state["adam"].mu["embed"]
    assert {shard.data.size for shard in embed.addressable_shards} == {embed.size // 8}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"expert": 3}, "mesh = expert 3 = 3 devices, but there are 8; mesh.fsdp=8 and 1 elsewhere would fit"),
        ({"expert": 2}, "mesh = expert 2 = 2 devices, but there are 8; mesh.fsdp=4 would fit"),
        ({"tensor": 8}, "mesh: tensor 8 does not divide the 2 of kda_heads; the nearest size that does is 2"),
        ({"data": 0, "fsdp": 8}, "mesh.data = 0: must be at least 1"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused_with_one_that_can(sizes, message):
    run = tiny_run("float32")
    model = jax.eval_shape(lambda: Transformer(run.model, jax.random.key(0)))
    optimizer = make_optimizer(run.optimizer, split_model(model)[0], steps=1)
    blank = jax.eval_shape(lambda model: init_state(model, optimizer), model)
    with pytest.raises(ConfigError) as error:
        Devices.of(MeshShape(**sizes), blank)
    assert str(error.value) == message


def test_the_step_never_talks_to_the_host():
    _, _, text = steps("float32", tuple(MESHES["fsdp 2, expert 4"].items()))
    assert "all_gather" in text
    for word in ("callback", "infeed", "outfeed", "stablehlo.send", "stablehlo.recv"):
        assert word not in text
