"""The full-size vision tower compiles for a TPU, and keeps no scores in memory."""

import jax
import jax.numpy as jnp

from k3jax.config import ModelConfig, VisionConfig
from k3jax.nn.vision import Vision
from pallas_kernels.dispatch import compiling_for
from tests.aot.marks import NEEDS_TPU_COMPILER

pytestmark = NEEDS_TPU_COMPILER

GIB = 2**30
PATCHES = 4096  # of a row: an image of 896 x 896 pixels, or two smaller ones
SCORES = 12 * PATCHES**2 * 4  # bytes of one block's in float32


def test_the_full_tower_encodes_a_row_without_its_scores(compile_on):
    vision = jax.eval_shape(lambda: Vision(ModelConfig(vision=VisionConfig()), jax.random.key(0), dtype=jnp.bfloat16))
    patches = jax.ShapeDtypeStruct((1, PATCHES, 3, 14, 14), jnp.bfloat16)
    grids = jax.ShapeDtypeStruct((1, 2, 3), jnp.int32)
    with compiling_for("tpu"):
        compiled = compile_on(lambda vision, *row: vision(*row)[0], vision, patches, grids)
    memory = compiled.memory_analysis()
    assert 0.83 * GIB < memory.argument_size_in_bytes < 0.9 * GIB  # 447 M parameters
    # What there is: the stacks of attention's weights in another layout, and activations.
    assert memory.temp_size_in_bytes < 0.9 * SCORES
