"""A LatentMoE whose experts lie on eight devices, by the tables of training, prefill and decode, against one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config import MoEConfig
from k3jax.nn import moe
from k3jax.nn.moe import LatentMoE
from k3jax.nn.placement import place, specs_of
from sharding.expert_parallel import Choice
from sharding.local import placed
from sharding.mesh import make_mesh
from sharding.rules import TABLES
from tests.nn.conftest import make_config

BATCH, LENGTH = 8, 8


@pytest.fixture(scope="module")
def layer():
    with jax.enable_x64(True):
        experts = MoEConfig(num_experts=16, top_k=3, num_shared=1, expert_width=20, latent_width=16)
        yield LatentMoE(make_config(dtype="float64", moe=experts), jax.random.key(0), dtype=jnp.float64)


@pytest.mark.parametrize(
    ("table", "sizes", "form"),
    [
        ("train", {"expert": 8}, "balanced"),
        ("train", {"expert": 4, "tensor": 2}, "gathered"),
        ("train", {"fsdp": 2, "expert": 2, "context": 2}, "balanced"),
        ("prefill", {"context": 4, "tensor": 2}, "balanced"),
        ("decode", {"data": 4, "tensor": 2}, "gathered"),
    ],
)
def test_a_layer_on_a_mesh_is_the_layer_on_one_device(layer, table, sizes, form, monkeypatch):
    monkeypatch.setattr(moe, "choose", lambda **_: Choice(form, ""))
    x = jax.random.normal(jax.random.key(1), (BATCH, LENGTH, layer.down.shape[0]))
    valid = jax.random.bernoulli(jax.random.key(2), 0.8, (BATCH, LENGTH))
    mesh, placement = make_mesh(sizes), place(sizes, TABLES[table], layer)
    tokens = placement.spec_of("batch", "seq")

    def local(layer, x, valid):
        with placed(placement):
            return layer(x, valid=valid)[0]

    specs = specs_of(layer, placement)
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(specs, tokens, tokens), out_specs=tokens, check_vma=False))
    expected = jax.jit(lambda layer: layer(x, valid=valid)[0])(layer)
    found = run(layer, x, valid)
    np.testing.assert_allclose(found[valid], expected[valid], rtol=0, atol=1e-9)
