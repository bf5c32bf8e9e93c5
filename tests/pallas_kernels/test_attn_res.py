"""Two phases give the mix over all sources, in values and gradients, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attn_res import read, read_bank, reference

EPS = 1e-5
BODIES = ["xla", "tpu"]  # the tpu body is interpreted here


def relative(found, expected):
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def inputs(snapshots: int, count: int, tokens: int, *, reads: int = 3, width: int = 256, dtype=jnp.float32):
    """Snapshots of unequal size, some not sealed; queries that tell them apart."""
    keys = jax.random.split(jax.random.key(snapshots * 100 + tokens), 5)
    bank = jax.random.normal(keys[0], (snapshots, tokens, width)) * jnp.exp(
        jax.random.normal(keys[1], (snapshots, 1, 1))
    )
    bank = jnp.where((jnp.arange(snapshots) < count)[:, None, None], bank, 0).astype(dtype)
    queries = jax.random.normal(keys[2], (reads, width)) * (3 / width**0.5)
    live = (2 * jax.random.normal(keys[3], (tokens, width))).astype(dtype)
    return bank, queries, live


def whole(bank, queries, live, count):
    """Every read over all sources at once, in float64."""
    sources = jnp.concatenate([bank[:count], live[None]])
    return jnp.stack([reference.mix(sources, query, EPS) for query in queries])


def two_phases(bank, queries, live, count, body):
    seen = read_bank(bank, count, queries, eps=EPS, implementation=body)
    reads = [jax.tree.map(lambda x, r=r: x[r], seen) for r in range(len(queries))]
    return jnp.stack([read(one, live, True, query, eps=EPS) for one, query in zip(reads, queries, strict=True)])


def values_and_gradients(fn, cotangent, *args):
    out, vjp = jax.vjp(fn, *args)
    return out, *vjp(cotangent.astype(out.dtype))


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(
    ("snapshots", "count", "tokens"), [(1, 1, 16), (3, 2, 19), (8, 5, 1), (8, 8, 33)], ids=lambda n: str(n)
)
def test_values_and_gradients_of_both_phases(body, snapshots, count, tokens):
    bank, queries, live = inputs(snapshots, count, tokens)
    cotangent = jax.random.normal(jax.random.key(9), (len(queries), *live.shape))
    found = jax.jit(
        lambda *x: values_and_gradients(lambda b, q, v: two_phases(b, q, v, jnp.int32(count), body), cotangent, *x)
    )(bank, queries, live)
    with jax.enable_x64(True):
        exact = [np.asarray(x, np.float64) for x in (bank, queries, live)]
        expected = values_and_gradients(
            lambda b, q, v: whole(b, q, v, count), jnp.asarray(cotangent, jnp.float64), *exact
        )
    for ours, truth in zip(found, expected, strict=True):
        assert relative(ours, truth) < 2e-6
    assert not np.asarray(found[1])[count:].any()  # what is not sealed gets no gradient


@pytest.mark.parametrize("body", BODIES)
def test_bfloat16_is_rounded_once_at_the_end(body):
    """Rounding the exact result to bfloat16 alone is 1.7e-3; float32 inside adds nothing that shows."""
    bank, queries, _ = inputs(8, 6, 32, dtype=jnp.bfloat16)
    cotangents = jax.random.normal(jax.random.key(1), (3, 32, 256), jnp.bfloat16), jnp.ones((3, 32))

    def gradients(bank, queries):
        seen, vjp = jax.vjp(lambda b, q: tuple(read_bank(b, 6, q, eps=EPS, implementation=body)), bank, queries)
        return *seen, *vjp(cotangents)

    mixed, log_sum_exp, d_bank, d_queries = jax.jit(gradients)(bank, queries)
    with jax.enable_x64(True):
        sealed, wide = np.asarray(bank[:6], np.float64), np.asarray(queries, np.float64)
        scores = jnp.stack([reference.normalise(sealed, EPS) @ query for query in wide])
        exact = jnp.stack([reference.mix(sealed, query, EPS) for query in wide])
        exact_sum = jax.nn.logsumexp(scores, axis=1)
    assert relative(mixed, exact) < 2e-3
    assert relative(log_sum_exp, exact_sum) < 5e-6
    assert d_bank.dtype == jnp.bfloat16
    assert np.isfinite(np.asarray(d_bank, np.float32)).all()
    assert np.isfinite(np.asarray(d_queries)).all()


def test_an_empty_bank_leaves_the_live_sum_and_an_empty_live_sum_the_bank():
    bank, queries, live = inputs(3, 2, 5)
    empty = jax.tree.map(lambda x: x[0], read_bank(jnp.zeros_like(bank), 0, queries[:1], eps=EPS))
    np.testing.assert_array_equal(read(empty, live, True, queries[0], eps=EPS), live)
    seen = jax.tree.map(lambda x: x[0], read_bank(bank, 2, queries[:1], eps=EPS))
    np.testing.assert_array_equal(read(seen, jnp.zeros_like(live), False, queries[0], eps=EPS), seen.mixed)


@pytest.mark.parametrize("body", ["reference", *BODIES])
def test_a_zero_query_takes_the_mean(body):
    bank, queries, live = inputs(4, 3, 6)
    zero = jnp.zeros_like(queries)[:1]
    mean = (bank[:3].sum(0) + live) / 4
    np.testing.assert_allclose(two_phases(bank, zero, live, 3, body)[0], mean, rtol=1e-5, atol=1e-6)


def test_what_the_tpu_body_does_not_support_is_refused():
    bank, queries, _ = inputs(9, 9, 4)
    with pytest.raises(NotImplementedError, match=r"width 256 .* the number of snapshots 9 at most 8"):
        read_bank(bank, 9, queries, eps=EPS, implementation="tpu")
    bank, queries, _ = inputs(2, 2, 4, width=96)
    with pytest.raises(NotImplementedError, match="width 96 must be a multiple of 256"):
        read_bank(bank, 2, queries, eps=EPS, implementation="tpu")
