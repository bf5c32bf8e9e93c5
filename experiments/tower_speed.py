"""Images a second of the full-size vision tower and projector on the accelerator at hand, in bfloat16.

    python -m experiments.tower_speed [SIDE ...]

Images of one size, a row each, as many as make about 16,384 patches; random weights, which cost the same.
"""

from __future__ import annotations

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.config import ModelConfig, VisionConfig
from k3jax.nn.vision import Vision
from k3jax.vision.image import PATCH, image_size

PATCHES, REPEATS = 16_384, 5


def measure(vision: Vision, side: int) -> str:
    """One line of figures for images of side x side pixels."""
    rows, columns = image_size(side, side).grid
    count = max(1, PATCHES // (rows * columns))
    patches = jnp.zeros((count, rows * columns, 3, PATCH, PATCH), jnp.bfloat16)
    grids = jnp.asarray(np.broadcast_to([1, rows, columns], (count, 1, 3)), jnp.int32)
    compiled = jax.jit(lambda vision, *args: vision(*args)[0]).lower(vision, patches, grids).compile()
    jax.block_until_ready(compiled(vision, patches, grids))
    began = time.perf_counter()
    for _ in range(REPEATS):
        out = compiled(vision, patches, grids)
    jax.block_until_ready(out)
    seconds = (time.perf_counter() - began) / REPEATS
    memory = compiled.memory_analysis()
    return (
        f"{side}x{side}: {count} images of {rows * columns} patches in {seconds * 1e3:.1f} ms, "
        f"{count / seconds:.1f} images/s; temporaries {memory.temp_size_in_bytes / 2**30:.2f} GiB, "
        f"arguments {memory.argument_size_in_bytes / 2**30:.2f} GiB"
    )


def main() -> None:
    """Measure the sides that the command line names."""
    config = ModelConfig(vision=VisionConfig())
    vision = jax.jit(lambda: Vision(config, jax.random.key(0), dtype=jnp.bfloat16))()
    print(jax.devices()[0].device_kind, flush=True)
    for side in map(int, sys.argv[1:] or (448, 1792)):
        print(measure(vision, side), flush=True)


if __name__ == "__main__":
    main()
