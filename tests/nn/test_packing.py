"""Packed documents do not see each other, and padding reaches nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config import ModelConfig
from k3jax.nn.cache import Cache
from k3jax.nn.generate import extend
from k3jax.nn.loss import batch_loss, next_token_loss
from k3jax.nn.param import value_and_grad
from k3jax.nn.transformer import Transformer
from tests.nn.helpers import random_model, random_tokens, relative


@pytest.fixture(scope="module")
def model(small: ModelConfig) -> Transformer:
    """A random model of the small config."""
    return random_model(small)


def test_packed_documents_equal_documents_alone(model: Transformer) -> None:
    lengths = (5, 1, 23, 2)
    documents = [random_tokens(model.config, 1, n, seed=n) for n in lengths]
    segment_ids = np.concatenate([np.full(n, i) for i, n in enumerate(lengths)] + [np.full(3, -1)])[None]
    packed = jnp.concatenate([*documents, jnp.zeros((1, 3), jnp.int32)], axis=1)
    logits = model(packed, segment_ids=jnp.asarray(segment_ids))
    start = 0
    for document, length in zip(documents, lengths, strict=True):
        assert relative(logits[:, start : start + length], model(document)) < 1e-5
        start += length


def test_padding_changes_neither_loss_nor_gradients(model: Transformer) -> None:
    tokens = random_tokens(model.config, 2, 14)

    def padded_loss(model: Transformer, filler: int) -> jax.Array:
        pad = lambda x, value: jnp.pad(x, ((0, 0), (0, 6)), constant_values=value)  # noqa: E731
        real = jnp.ones((2, 13), bool)
        segment_ids = pad(jnp.zeros((2, 13), jnp.int32), -1)
        arguments = (pad(tokens[:, :-1], filler), pad(tokens[:, 1:], filler), segment_ids, pad(real, False))
        total, count = batch_loss(model, *arguments, chunk=8)
        return total / count

    expected, expected_grads = jax.jit(value_and_grad(next_token_loss))(model, tokens)
    poisoned = model.embed.replace(model.embed.get_value().at[60].set(jnp.nan))
    tokens = jnp.where(tokens == 60, 59, tokens)
    expected, expected_grads = jax.jit(value_and_grad(next_token_loss))(model, tokens)
    clean, model.embed = model.embed, poisoned  # every padded token embeds to NaN
    try:
        loss, grads = jax.jit(value_and_grad(padded_loss), static_argnums=1)(model, 60)
    finally:
        model.embed = clean
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for actual, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        assert np.isfinite(actual).all()
        assert np.linalg.norm(actual - wanted) <= 1e-4 * np.linalg.norm(wanted) + 1e-7


def test_a_row_without_tokens_keeps_its_cache_bit_for_bit(model: Transformer) -> None:
    cache = Cache.zeros(model.config, batch=3, max_len=24)
    for chunk, num_valid in ((7, (7, 3, 5)), (1, (1, 0, 1)), (4, (0, 4, 0))):
        before = cache
        tokens = random_tokens(model.config, 3, chunk, seed=chunk)
        _, cache = extend(model, tokens, cache, jnp.array(num_valid))
        for row in np.flatnonzero(np.array(num_valid) == 0):
            for a, b in zip(jax.tree.leaves(before.row(int(row))), jax.tree.leaves(cache.row(int(row))), strict=True):
                np.testing.assert_array_equal(a, b)
    assert cache.length.tolist() == [8, 7, 6]


def test_tokens_past_the_end_of_the_cache_are_dropped_not_clipped(model: Transformer) -> None:
    cache = Cache.zeros(model.config, batch=1, max_len=6)
    _, cache = extend(model, random_tokens(model.config, 1, 6), cache, jnp.array([6]))
    _, after = extend(model, random_tokens(model.config, 1, 1, seed=9), cache, jnp.array([1]))
    np.testing.assert_array_equal(after.latent, cache.latent)


def test_rows_of_a_cache_can_be_taken_out_and_put_back(model: Transformer) -> None:
    cache = Cache.zeros(model.config, batch=3, max_len=8)
    _, cache = extend(model, random_tokens(model.config, 3, 5), cache, jnp.array([5, 2, 4]))
    moved = Cache.zeros(model.config, batch=3, max_len=8).with_row(1, cache.row(2))
    assert moved.length.tolist() == [0, 4, 0]
    np.testing.assert_array_equal(moved.state[:, 1], cache.state[:, 2])
    np.testing.assert_array_equal(moved.latent[:, 1], cache.latent[:, 2])
    assert not moved.history[:, 0].any()
