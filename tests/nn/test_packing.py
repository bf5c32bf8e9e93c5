"""Packed documents do not see each other, and padding reaches nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config import ModelConfig
from k3jax.nn.cache import Cache, Pools
from k3jax.nn.generate import extend
from k3jax.nn.loss import batch_loss, next_token_loss
from k3jax.nn.param import value_and_grad
from k3jax.nn.transformer import Transformer
from tests.nn.helpers import random_model, random_tokens, relative

jitted_extend = jax.jit(extend)


@pytest.fixture(scope="module")
def model(small: ModelConfig) -> Transformer:
    """A random model of the small config."""
    return random_model(small)


def test_packed_documents_equal_documents_alone(model: Transformer) -> None:
    lengths = (5, 1, 23, 2)
    documents = [random_tokens(model.config, 1, n, seed=n) for n in lengths]
    packed = segments([np.full(n, i) for i, n in enumerate(lengths)])
    logits = model(jnp.pad(jnp.concatenate(documents, axis=1), ((0, 0), (0, 3))), segment_ids=packed)
    start = 0
    for document, length in zip(documents, lengths, strict=True):
        alone = model(jnp.pad(document, ((0, 0), (0, 34 - length))), segment_ids=segments([np.zeros(length)]))
        assert relative(logits[:, start : start + length], alone[:, :length]) < 1e-5
        start += length


def segments(parts: list[np.ndarray]) -> jax.Array:
    """Segment ids of one row of 34 tokens, padded with -1."""
    ids = np.concatenate(parts)
    return jnp.asarray(np.pad(ids, (0, 34 - len(ids)), constant_values=-1)[None], jnp.int32)


def test_padding_changes_neither_loss_nor_gradients(model: Transformer) -> None:
    poison = 60  # a token that embeds to NaN and stands in the padding only
    poisoned = jax.tree.map(lambda w: w, model)
    poisoned.embed = model.embed.replace(model.embed.get_value().at[poison].set(jnp.nan))
    tokens = jnp.minimum(random_tokens(model.config, 2, 14), poison - 1)

    def padded_loss(model: Transformer) -> jax.Array:
        pad = lambda x, value: jnp.pad(x, ((0, 0), (0, 6)), constant_values=value)  # noqa: E731
        segment_ids, mask = pad(jnp.zeros((2, 13), jnp.int32), -1), pad(jnp.ones((2, 13), bool), False)
        total, count = batch_loss(
            model, pad(tokens[:, :-1], poison), pad(tokens[:, 1:], poison), segment_ids, mask, chunk=8
        )
        return total / count

    expected, expected_grads = jax.jit(value_and_grad(next_token_loss))(model, tokens)
    loss, grads = jax.jit(value_and_grad(padded_loss))(poisoned)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for actual, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        assert np.isfinite(actual).all()
        assert np.linalg.norm(actual - wanted) <= 1e-3 * np.linalg.norm(wanted) + 1e-6


def test_a_row_without_tokens_keeps_its_cache_bit_for_bit(model: Transformer) -> None:
    cache = Cache.zeros(model.config, batch=3, max_len=24)
    for chunk, num_valid in ((7, (7, 3, 5)), (1, (1, 0, 1)), (4, (0, 4, 0))):
        before = cache
        tokens = random_tokens(model.config, 3, chunk, seed=chunk)
        _, cache = jitted_extend(model, tokens, cache, jnp.array(num_valid))
        for row in np.flatnonzero(np.array(num_valid) == 0):
            for a, b in zip(kept(before, int(row)), kept(cache, int(row)), strict=True):
                np.testing.assert_array_equal(a, b)
    assert cache.length.tolist() == [8, 7, 6]


def test_tokens_past_the_end_of_the_cache_are_dropped_not_clipped(model: Transformer) -> None:
    cache = Cache.zeros(model.config, batch=1, max_len=64)
    _, cache = jitted_extend(model, random_tokens(model.config, 1, 64), cache, jnp.array([64]))
    _, after = jitted_extend(model, random_tokens(model.config, 1, 1, seed=9), cache, jnp.array([1]))
    np.testing.assert_array_equal(after.pools.pages.latent, cache.pools.pages.latent)


def kept(cache: Cache, row: int) -> list[jax.Array]:
    """State, conv history and latents of one row."""
    slots = [pool[:, cache.slots[row]] for pool in (cache.pools.state, cache.pools.history)]
    return [*slots, *(pages[:, cache.page_table[row]] for pages in jax.tree.leaves(cache.pools.pages))]


def test_rows_may_lie_anywhere_in_the_pools_and_one_without_a_slot_changes_nothing(model: Transformer) -> None:
    tokens, num_valid = random_tokens(model.config, 3, 5), jnp.array([5, 2, 4])
    expected, cache = jitted_extend(model, tokens, Cache.zeros(model.config, batch=3, max_len=8), num_valid)
    pools = Pools.zeros(model.config, slots=5, pages=4, page=64)
    elsewhere = Cache(pools, jnp.array([4, -1, 0]), jnp.array([[2], [-1], [3]]), jnp.zeros(3, jnp.int32))
    logits, moved = jitted_extend(model, tokens, elsewhere, num_valid)
    for row in (0, 2):
        np.testing.assert_array_equal(logits[row], expected[row])
        for a, b in zip(kept(cache, row), kept(moved, row), strict=True):
            np.testing.assert_array_equal(a, b)
    assert not any(pool[:, 1:4].any() for pool in (moved.pools.state, moved.pools.history))
    assert not moved.pools.pages.latent[:, :2].any()


def test_a_row_of_length_0_starts_clean_whatever_its_slot_and_pages_hold(model: Transformer) -> None:
    clean = Cache.zeros(model.config, batch=2, max_len=64)
    dirty = dataclasses.replace(clean, pools=jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), clean.pools))
    tokens, num_valid = random_tokens(model.config, 2, 64), jnp.array([5, 3])  # a chunk that fills whole pages
    (logits, clean), (found, dirty) = (jitted_extend(model, tokens, x, num_valid) for x in (clean, dirty))
    np.testing.assert_array_equal(found, logits)
    jax.tree.map(np.testing.assert_array_equal, dirty.pools, clean.pools)
