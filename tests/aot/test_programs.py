"""The programs of serving compile for a TPU and fit its memory. Nothing is allocated."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from k3jax.config import ModelConfig, load_model_config
from k3jax.nn.cache import Cache
from k3jax.nn.generate import extend
from k3jax.nn.transformer import Transformer

pytestmark = [pytest.mark.aot, pytest.mark.timeout(1500)]

GIB = 2**30


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return load_model_config("k3_mini")


def num_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def model_shapes(config: ModelConfig, **options: Any) -> Transformer:
    return jax.eval_shape(lambda key: Transformer(config, key, stack="scan", **options), jax.random.key(0))


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
