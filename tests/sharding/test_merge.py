"""Merging partial attention: equal to one softmax over all keys, whatever is empty."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from sharding.merge import merge_over, merge_parts

PARTS, QUERIES, KEYS, WIDTH, VALUE = 4, 5, 6, 8, 3


@jax.jit
def attention(scores, values, mask):
    """Output and log-sum-exp of one softmax; NaN output and -inf where no key is seen, as kernels may return."""
    scores = jnp.where(mask, scores, -jnp.inf)
    log_sum_exp = jax.nn.logsumexp(scores, axis=-1)
    return jax.nn.softmax(scores, axis=-1) @ values, log_sum_exp


def over_shards(outputs, log_sum_exps):
    mesh = jax.make_mesh((PARTS,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:PARTS])

    def piece(output, log_sum_exp):
        return merge_over("context", output[0], log_sum_exp[0])

    return jax.shard_map(piece, mesh=mesh, in_specs=P("context"), out_specs=P())(outputs, log_sum_exps)


MERGES = {"parts": jax.jit(merge_parts), "shards": jax.jit(over_shards)}
every_merge = pytest.mark.parametrize("merge", MERGES.values(), ids=MERGES)


def parts(mask, scale=1.0):
    """Scores [P, queries, keys], values [P, keys, value] and which keys each query sees."""
    rng = np.random.default_rng(0)
    scores, values = scale * rng.normal(size=(PARTS, QUERIES, KEYS)), rng.normal(size=(PARTS, KEYS, VALUE))
    return jnp.asarray(scores), jnp.asarray(values), np.broadcast_to(mask, (PARTS, QUERIES, KEYS))


def exact(outputs, log_sum_exps):
    """The same by one softmax over the parts."""
    some = log_sum_exps > -jnp.inf
    finite = jnp.where(some, log_sum_exps, -1e30)
    merged = jnp.sum(jax.nn.softmax(finite, axis=0)[..., None] * jnp.where(some[..., None], outputs, 0), axis=0)
    return merged, jax.nn.logsumexp(finite, axis=0)


@functools.cache
def gradients(merge):
    def loss(outputs, log_sum_exps):
        output, log_sum_exp = merge(outputs, log_sum_exps)
        return jnp.sum(output**2) + jnp.sum(log_sum_exp)

    return jax.jit(jax.grad(loss, argnums=(0, 1)))


MASKS = {
    "all": True,
    "empty-parts": np.arange(PARTS)[:, None, None] % 2 == 0,
    "causal": np.arange(PARTS * KEYS).reshape(PARTS, 1, KEYS) <= 5 * np.arange(QUERIES)[None, :, None],
}


@every_merge
@pytest.mark.parametrize("scale", [1.0, 1000.0])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_the_merge_is_exact(merge, mask, scale):
    with jax.enable_x64(True):
        scores, values, mask = parts(mask, scale)
        whole = [jnp.concatenate(list(x), axis=-1) for x in (scores, mask)]
        expected = attention(whole[0], values.reshape(-1, VALUE), whole[1])
        actual = merge(*jax.vmap(attention)(scores, values, mask))
        for got, want in zip(actual, expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


@every_merge
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_its_gradients_are_those_of_one_softmax(merge, mask):
    with jax.enable_x64(True):
        scores, values, mask = parts(mask)
        outputs, log_sum_exps = jax.vmap(attention)(scores, values, mask)

        for got, want in zip(
            gradients(merge)(outputs, log_sum_exps), gradients(exact)(outputs, log_sum_exps), strict=True
        ):
            np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


@every_merge
def test_without_any_key_the_output_is_zero_and_gradients_are_finite(merge):
    outputs, log_sum_exps = jnp.full((PARTS, QUERIES, VALUE), np.nan), jnp.full((PARTS, QUERIES), -np.inf)
    (output, log_sum_exp), pull = jax.vjp(merge, outputs, log_sum_exps)
    np.testing.assert_array_equal(output, 0)
    np.testing.assert_array_equal(log_sum_exp, -np.inf)
    for gradient in pull((jnp.ones_like(output), jnp.ones_like(log_sum_exp))):
        np.testing.assert_array_equal(gradient, 0)
