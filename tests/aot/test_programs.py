"""The programs of training and serving compile for a TPU and fit its memory. Nothing is allocated."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from k3jax.config import CONFIG_DIR, ModelConfig, TrainRun, load_model_config, load_run
from k3jax.data import Batch
from k3jax.nn.cache import Cache
from k3jax.nn.generate import extend
from k3jax.nn.param import split_model
from k3jax.nn.transformer import Transformer
from k3jax.train.optimizer import make_optimizer
from k3jax.train.step import init_state, make_train_step

pytestmark = [pytest.mark.aot, pytest.mark.timeout(1500)]

GIB = 2**30


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return load_model_config("k3_mini")


def num_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def model_shapes(config: ModelConfig, **options: Any) -> Transformer:
    return jax.eval_shape(lambda key: Transformer(config, key, stack="scan", **options), jax.random.key(0))


def test_train_step_of_k3_mini_fits_one_device(config: ModelConfig, compile_on):
    run = load_run(TrainRun, CONFIG_DIR / "train" / "k3_mini.yaml", ["accumulate=1"])
    assert (run.model, run.stack, run.remat) == (config, "scan", "layer")
    model = model_shapes(config, remat=run.remat)
    params, _, rest = split_model(model)
    optimizer = make_optimizer(run.optimizer, params, steps=run.steps)
    state = jax.eval_shape(functools.partial(init_state, optimizer=optimizer), model)
    ids = jax.ShapeDtypeStruct((4, 1024), jnp.int32)
    batch = Batch(tokens=ids, targets=ids, segment_ids=ids, loss_mask=jax.ShapeDtypeStruct(ids.shape, jnp.bool_))

    memory = compile_on(make_train_step(run, optimizer, rest), state, batch, donate=(0,)).memory_analysis()

    assert memory.alias_size_in_bytes >= num_bytes(state)  # updated in place
    assert memory.temp_size_in_bytes < 12 * GIB


@pytest.mark.parametrize(
    ("batch", "length", "temporaries"),
    [pytest.param(64, 1, 3 * GIB, id="decode"), pytest.param(1, 512, GIB, id="prefill")],
)
def test_serving_k3_mini_updates_the_cache_in_place(config, compile_on, batch: int, length: int, temporaries: int):
    model = model_shapes(config, param_dtype="bfloat16")
    cache = jax.eval_shape(lambda: Cache.zeros(config, batch=batch, max_len=8192))
    tokens, num_valid = jax.ShapeDtypeStruct((batch, length), jnp.int32), jax.ShapeDtypeStruct((batch,), jnp.int32)

    memory = compile_on(extend, model, tokens, cache, num_valid, donate=(2,)).memory_analysis()

    assert memory.alias_size_in_bytes >= num_bytes(cache)
    assert memory.temp_size_in_bytes < temporaries
