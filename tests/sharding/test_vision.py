"""The vision tower on a mesh: each device its own rows of images, the weights in parts; all as on one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config import load_model_config
from k3jax.nn.param import is_variable
from k3jax.nn.placement import lay_out, on_devices, on_mesh, specs_of
from k3jax.nn.vision import Vision
from sharding.local import total_of_copies
from sharding.rules import TRAIN

SMALL = ["width=32", "vision.width=16", "vision.mlp_width=32", "vision.num_blocks=1"]
CONFIG = load_model_config("k3_tiny_vision", SMALL)
PATCHES = 48
# The items of each row, all of other sizes; two rows have none.
ROWS: list[list[tuple[int, int, int]]] = [
    [(1, 4, 4), (1, 2, 4), (1, 2, 2)],
    [(1, 6, 8)],
    [],
    [(4, 2, 4)],
    [(1, 2, 2)],
    [],
    [(1, 4, 2), (1, 2, 4)],
    [(1, 4, 6)],
]


def features_and_gradients(vision: Vision, patches: jax.Array, grids: jax.Array) -> Any:
    """Features of the rows, and the gradients of a number that depends on all of them."""

    def loss(vision: Vision) -> tuple[jax.Array, jax.Array]:
        features, _ = vision(patches, grids)
        return jnp.sum(jnp.sin(features)), features

    gradients, features = jax.grad(loss, has_aux=True)(vision)
    whole = lambda grad: grad.replace(total_of_copies(grad.get_value(), grad.axes))  # noqa: E731
    return features, jax.tree.map(whole, gradients, is_leaf=is_variable)


@pytest.mark.parametrize("sizes", [{"data": 8}, {"data": 2, "fsdp": 2, "expert": 2}], ids=str)
def test_rows_of_unequal_images_are_encoded_and_trained_as_on_one_device(sizes: dict[str, int]) -> None:
    grids = np.zeros((len(ROWS), 3, 3), np.int32)
    for row, items in enumerate(ROWS):
        grids[row, : len(items)] = np.reshape(items, (-1, 3))
    patches = np.random.default_rng(0).standard_normal((len(ROWS), PATCHES, 3, 14, 14)).astype(np.float32)
    vision = Vision(CONFIG, jax.random.key(0), dtype=jnp.float32)
    expected = jax.jit(features_and_gradients)(vision, patches, grids)

    mesh, placement = lay_out(sizes, TRAIN, vision, None)
    specs, batch = specs_of(vision, placement), placement.spec_of("batch")
    layout = {"in_specs": (specs, batch, batch), "out_specs": (batch, specs)}
    program = on_devices(features_and_gradients, mesh, placement, **layout, donate=())
    found = program(jax.device_put(vision, on_mesh(mesh, specs)), patches, grids)
    for value, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(value, right, atol=2e-5 * float(np.max(np.abs(right))))
