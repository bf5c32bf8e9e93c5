"""Choosing by rounds is the library's top-k, whatever the ties, and picking is take_along_axis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.nn import top_k as module
from k3jax.nn.top_k import pick, top_k


@pytest.mark.parametrize("kinds", [2, 7, 1000], ids="{}-different-values".format)
def test_rounds_choose_as_the_library_does(kinds, monkeypatch):
    monkeypatch.setattr(module, "_FEW", 0)
    x = jnp.float32(np.random.default_rng(kinds).integers(kinds, size=(3, 50, 40)))
    assert "scan" in str(jax.make_jaxpr(top_k, static_argnums=1)(x, 7))
    for found, expected in zip(jax.jit(top_k, static_argnums=1)(x, 7), jax.lax.top_k(x, 7), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_picking_takes_along_the_last_dim_and_its_gradient_goes_back_there():
    rng = np.random.default_rng(0)
    x, g = (jnp.float32(rng.normal(size=shape)) for shape in ((5, 4, 9), (5, 4, 3)))
    places = jnp.argsort(rng.normal(size=x.shape), axis=-1)[..., :3].astype(jnp.int32)
    found, back = jax.vjp(lambda x: pick(x, places), x)
    expected, expected_back = jax.vjp(lambda x: jnp.take_along_axis(x, places, axis=-1), x)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(back(g)[0], expected_back(g)[0])
