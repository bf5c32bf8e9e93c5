"""Weights that lie in parts between their uses: joined, as they are and as matrices, and their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from sharding.local import Placement, placed, whole, whole_matrix, whole_shape

SIZES = {"fsdp": 2, "expert": 4}
NAMES = ("a", "b", "c")
PLACES = [
    ((8, 6, 5), (("expert",), ("fsdp",), ())),
    ((8, 4, 6), ((), ("expert",), ("fsdp",))),
    ((6, 5, 8), (("fsdp",), (), ("expert",))),
    ((4, 8, 5), (("fsdp",), ("expert",), ())),
    ((3, 8, 5), ((), ("expert", "fsdp"), ())),
    ((8, 6, 5), (("fsdp", "expert"), (), ())),
    ((8, 6, 5), ((), ("fsdp",), ())),
    ((8, 6, 5), ((), (), ())),
]


def joined(fn, shape, parts, stacked=()):
    """(`fn` of a weight stored in parts, the gradient of its sum of squares), and the weight itself."""
    mesh = jax.make_mesh(tuple(SIZES.values()), tuple(SIZES), axis_types=(AxisType.Auto,) * len(SIZES))
    placement = Placement(sizes=SIZES, split={}, kept={NAMES: parts})
    weight = jnp.asarray(np.random.default_rng(0).normal(size=(*stacked, *shape)), jnp.float32)

    def program(part):
        with placed(placement):
            assert whole_shape(part.shape, NAMES) == weight.shape
            return fn(part), jax.grad(lambda part: jnp.sum(fn(part) ** 2))(part)

    spec = PartitionSpec(*[None] * len(stacked), *(axes or None for axes in parts))
    mapped = jax.shard_map(program, mesh=mesh, in_specs=spec, out_specs=(PartitionSpec(), spec), check_vma=False)
    return *jax.jit(mapped)(weight), weight


def gradient_of_all_devices(weight, parts):
    """Each device that gathered the weight took its own share: equal ones, summed over the axes of its parts."""
    return 2 * weight * np.prod([SIZES[axis] for axes in parts for axis in axes])


@pytest.mark.parametrize(("shape", "parts"), PLACES)
@pytest.mark.parametrize("stacked", [(), (2,)])
def test_a_weight_in_parts_is_whole_again(shape, parts, stacked):
    found, gradient, weight = joined(lambda part: whole(part, NAMES), shape, parts, stacked)
    np.testing.assert_array_equal(found, weight)
    np.testing.assert_allclose(gradient, gradient_of_all_devices(weight, parts), rtol=1e-6)


@pytest.mark.parametrize(("shape", "parts"), PLACES)
@pytest.mark.parametrize("rows", [1, 2])
def test_and_as_a_matrix(shape, parts, rows):
    found, gradient, weight = joined(lambda part: whole_matrix(part, NAMES, rows=rows), shape, parts)
    np.testing.assert_array_equal(found, weight.reshape(np.prod(shape[:rows]), -1))
    np.testing.assert_allclose(gradient, gradient_of_all_devices(weight, parts), rtol=1e-6)


def test_gradients_are_summed_in_float32_where_the_weight_is_bfloat16():
    """Four shares of 1 + 2^-7 and four of -1: in bfloat16 the small parts would be lost on the way."""
    mesh = jax.make_mesh((2, 4), ("fsdp", "expert"), axis_types=(AxisType.Auto,) * 2)
    placement = Placement(sizes=SIZES, split={}, kept={NAMES: (("expert",), ("fsdp",), ())})

    def program(part):
        first = jax.lax.axis_index(("fsdp", "expert")) % 2 == 0
        with placed(placement):
            share = jnp.where(first, 1 + 2.0**-7, -1.0).astype(jnp.bfloat16)
            return jax.grad(lambda part: jnp.sum(whole(part, NAMES) * share).astype(jnp.float32))(part)

    spec = PartitionSpec("expert", "fsdp")
    mapped = jax.shard_map(program, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    gradient = jax.jit(mapped)(jnp.ones((4, 2, 3), jnp.bfloat16))
    assert np.all(np.asarray(gradient, np.float32) == 4 * 2.0**-7)


def test_one_device_has_whole_weights():
    weight = jnp.ones((4, 6, 5))
    assert whole(weight, NAMES) is weight
    assert whole_matrix(weight, NAMES, rows=2).shape == (24, 5)
