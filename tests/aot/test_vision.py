"""The full-size vision tower and projector compile for a TPU. Nothing is allocated."""

import jax
import jax.numpy as jnp
import pytest

from k3jax.config import ModelConfig, VisionConfig
from k3jax.nn.vision import Vision

pytestmark = [pytest.mark.aot, pytest.mark.timeout(600)]

GIB = 2**30


def test_the_full_size_tower_encodes_the_largest_images_in_bounded_memory(compile_on):
    config = ModelConfig(vision=VisionConfig())
    vision = jax.eval_shape(lambda: Vision(config, jax.random.key(0), dtype=jnp.bfloat16))
    patches = jax.ShapeDtypeStruct((1, 16_384, 3, 14, 14), jnp.bfloat16)  # one image of 1792 x 1792 pixels
    grids = jax.ShapeDtypeStruct((1, 4, 3), jnp.int32)

    memory = compile_on(lambda vision, *rows: vision(*rows)[0], vision, patches, grids).memory_analysis()

    assert memory.output_size_in_bytes >= 4096 * 7168 * 2
    assert memory.temp_size_in_bytes < 3 * GIB
