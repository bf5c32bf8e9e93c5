"""The full-size vision tower compiles for TPUs: no scores in memory, and on a mesh its weights lie in parts."""

import jax
import jax.numpy as jnp

from k3jax.config import ModelConfig, VisionConfig
from k3jax.nn.placement import lay_out, on_devices, specs_of, with_places
from k3jax.nn.vision import Vision
from k3jax.plan.compiled import compile_program, topology_devices
from pallas_kernels.dispatch import compiling_for
from sharding.rules import TRAIN
from tests.aot.marks import NEEDS_TPU_COMPILER, V7X

pytestmark = NEEDS_TPU_COMPILER

GIB = 2**30
PATCHES = 4096  # of a row: an image of 896 x 896 pixels, or two smaller ones
SCORES = 12 * PATCHES**2 * 4  # bytes of one block's in float32


def tower(dtype: str) -> Vision:
    return jax.eval_shape(lambda: Vision(ModelConfig(vision=VisionConfig()), jax.random.key(0), dtype=jnp.dtype(dtype)))


def rows(count: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Patches, and the grids of two items a row."""
    patches = jax.ShapeDtypeStruct((count, PATCHES, 3, 14, 14), jnp.bfloat16)
    return patches, jax.ShapeDtypeStruct((count, 2, 3), jnp.int32)


def test_the_full_tower_encodes_a_row_without_its_scores(compile_on):
    with compiling_for("tpu"):
        compiled = compile_on(lambda vision, *row: vision(*row)[0], tower("bfloat16"), *rows(1))
    memory = compiled.memory_analysis()
    assert 0.83 * GIB < memory.argument_size_in_bytes < 0.9 * GIB  # 447 M parameters
    # What there is: the stacks of attention's weights in another layout, and activations.
    assert memory.temp_size_in_bytes < 0.9 * SCORES


def test_eight_devices_share_the_full_tower_and_gather_a_block_where_it_runs():
    """A row a device and weights in parts, as in training; gradients compile too, but take two minutes of CPU more."""
    devices, vision = topology_devices(V7X), tower("float32")
    mesh, placement = lay_out({"fsdp": len(devices)}, TRAIN, vision, devices)
    specs, batch = specs_of(vision, placement), placement.spec_of("batch")
    arguments = with_places(vision, mesh, specs), *with_places(rows(len(devices)), mesh, (batch, batch))
    of_rows = {"in_specs": (specs, batch, batch), "out_specs": batch, "donate": ()}
    program = on_devices(lambda vision, *row: vision(*row)[0], mesh, placement, **of_rows)
    _, record = compile_program(lambda: program.trace(*arguments).lower(lowering_platforms=("tpu",)))
    print(f"\n{record}")
    held = sum(leaf.size * 4 for leaf in jax.tree.leaves(vision)) / len(devices)
    row = PATCHES * 3 * 14 * 14 * 2
    assert held < record["argument_bytes"] < 1.01 * held + 2 * row  # small weights whole; lanes padded
    assert record["temp_bytes"] < 0.4 * SCORES  # nor all weights of all blocks, which would take 1.7 GiB
    assert record["collectives"]["all-gather"] >= 4  # of a block's matrices: qkv, out and the two of its FFN
