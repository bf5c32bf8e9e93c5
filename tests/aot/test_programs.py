"""The programs of training and serving compile for a TPU and fit its memory. Nothing is allocated."""

import functools
import os

import jax
import jax.numpy as jnp
import pytest

from k3jax.config import ModelConfig, TrainRun, load_model_config
from k3jax.data import Batch
from k3jax.nn.cache import Cache
from k3jax.nn.generate import extend
from k3jax.nn.param import split_model
from k3jax.nn.transformer import Transformer
from k3jax.train.optimizer import make_optimizer
from k3jax.train.step import init_state, make_train_step

pytestmark = [pytest.mark.aot, pytest.mark.timeout(1200)]

GIB = 2**30


@pytest.fixture
def config() -> ModelConfig:
    return load_model_config(os.environ.get("MINI", "k3_mini"))


def shapes_of(make, *args):
    return jax.eval_shape(make, *args)


def test_train_step_of_k3_mini_fits_one_device(config, compile_on):
    run = TrainRun(model=config, stack="scan", remat="layer")
    model = shapes_of(lambda key: Transformer(config, key, stack="scan", remat="layer"), jax.random.key(0))
    params, _, rest = split_model(model)
    optimizer = make_optimizer(run.optimizer, params, steps=100)
    state = shapes_of(functools.partial(init_state, optimizer=optimizer), model)
    ids = jax.ShapeDtypeStruct((4, 2048), jnp.int32)
    batch = Batch(tokens=ids, targets=ids, segment_ids=ids, loss_mask=jax.ShapeDtypeStruct(ids.shape, jnp.bool_))

    memory = compile_on(make_train_step(run, optimizer, rest), state, batch, donate=(0,)).memory_analysis()

    assert memory.temp_size_in_bytes < 8 * GIB
    assert memory.alias_size_in_bytes > 0.95 * memory.output_size_in_bytes  # the state is updated in place


def test_decode_step_of_k3_mini_updates_the_cache_in_place(config, compile_on):
    batch, max_len = 64, 8192
    model = shapes_of(lambda key: Transformer(config, key, param_dtype="bfloat16", stack="scan"), jax.random.key(0))
    cache = shapes_of(lambda: Cache.zeros(config, batch=batch, max_len=max_len))
    tokens, num_valid = jax.ShapeDtypeStruct((batch, 1), jnp.int32), jax.ShapeDtypeStruct((batch,), jnp.int32)

    memory = compile_on(extend, model, tokens, cache, num_valid, donate=(2,)).memory_analysis()

    cache_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < 8 * GIB
