"""A step with a loss or gradient that is not finite leaves the state as it was."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.train.guard import is_finite, keep_unless


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_one_number_that_is_not_finite_keeps_the_old_tree(bad, place):
    numbers = np.ones(2, np.float32)
    old, new = {"w": jnp.arange(3.0), "n": jnp.array(1)}, {"w": jnp.array([9.0, np.nan, 9.0]), "n": jnp.array(2)}
    guarded = jax.jit(lambda numbers: keep_unless(is_finite(*numbers), new, old))
    assert guarded(numbers)["n"] == 2 and np.isnan(guarded(numbers)["w"][1])
    numbers[place] = bad
    kept = guarded(numbers)
    np.testing.assert_array_equal(kept["w"], old["w"])
    assert kept["n"] == 1
