"""Shares of depth: what the reads compute, and a uniform average before training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config import load_model_config
from k3jax.nn.attn_res import Residual
from k3jax.nn.embed import embed_tokens
from k3jax.nn.transformer import Transformer
from k3jax.train.depth import depth_shares

LAYERS, BLOCK, TOKEN = 3, 2, np.array([[7]])
TINY = ["width=32", "num_layers=3", "mla_layers=[2]", "dense_width=32", "kda.head_dim=16", "mla.q_rank=16"]
TINY += ["mla.kv_rank=16", "moe.num_experts=4", "moe.expert_width=32", "moe.latent_width=32"]


@pytest.fixture(scope="module")
def model():
    return jax.jit(lambda: Transformer(load_model_config("k3_tiny", TINY), jax.random.key(0), stack="loop"))()


def test_before_training_every_source_counts_alike(model):
    shares = depth_shares(model, TOKEN)
    third, half = 1 / 3, 1 / 2
    expected = [[1, 0, 0], [half, 0, half], [half, half, 0], [third, third, third]]
    np.testing.assert_allclose(shares, expected, atol=1e-6)


def test_shares_are_those_of_the_read_before_the_head(model):
    key = jax.random.key(1)
    model = jax.tree.map(lambda leaf: leaf + 0.3 * jax.random.normal(key, leaf.shape, leaf.dtype), model)
    sums = jax.jit(lambda model: model.hidden(TOKEN, collect=True).trace.sums)(model)
    embedding = embed_tokens(model.embed, TOKEN, sums.dtype)
    bank = jnp.stack([embedding, sums[BLOCK - 1]])
    read = model.out_mix.of(Residual(bank, 2, sums[-1], True))
    shares = depth_shares(model, TOKEN)
    assert np.ptp(shares[-1]) > 0.1
    mixed = jnp.tensordot(shares[-1], jnp.stack([*bank, sums[-1]]), 1)
    np.testing.assert_allclose(mixed, read, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(jnp.sum(shares, axis=1), np.ones(LAYERS + 1), rtol=1e-5)
