"""Two phases give the mix over all sources, in values and gradients, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.nn.attn_res import Mix
from pallas_kernels.attn_res import BankRead, read, read_bank, read_norm, reference

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


def test_the_key_norm_is_folded_into_the_query_in_float32():
    """A norm that is rounded to bfloat16 before its product with the query moves scores by 1e-3."""
    bank, queries, _ = inputs(8, 8, 32, dtype=jnp.bfloat16)
    mix = Mix(256, eps=EPS, dtype=jnp.bfloat16)
    weight = 1 + jax.random.normal(jax.random.key(2), (256,)) / 3
    mix.query, mix.norm = (
        leaf.replace(x.astype(jnp.bfloat16)) for leaf, x in ((mix.query, queries[0]), (mix.norm, weight))
    )
    seen = read_bank(bank, 8, mix.folded(jnp.bfloat16)[None], eps=EPS)
    with jax.enable_x64(True):
        sources, query, norm = (np.asarray(x, np.float64) for x in (bank, mix.query.get_value(), mix.norm.get_value()))
        scores = (reference.normalise(sources, EPS) * norm) @ query
        exact = jax.nn.logsumexp(scores, axis=0)
    assert relative(seen.log_sum_exp[0], exact) < 5e-6


def read_norm_inputs(tokens: int, *, adds: bool, sealed: bool, width: int = 256, dtype=jnp.float32):
    """Arguments, of which the bank gave nothing unless `sealed`, and cotangents of both outputs."""
    keys = jax.random.split(jax.random.key(tokens), 8)
    mixed, live, update, *cotangents = (jax.random.normal(key, (tokens, width)).astype(dtype) for key in keys[:5])
    log_sum_exp = jax.random.normal(keys[5], (tokens,)) if sealed else jnp.full(tokens, -jnp.inf)
    query, weight = (
        jax.random.normal(keys[6], (width,)) * (3 / width**0.5),
        1 + jax.random.normal(keys[7], (width,)) / 3,
    )
    return (mixed, log_sum_exp, 2 * live, update if adds else None, query, weight.astype(dtype)), tuple(cotangents)


def read_norm_gradients(body, has_live, inputs, cotangents):
    def run(mixed, log_sum_exp, live, update, query, weight):
        options = {"update": update, "eps": EPS, "norm_eps": 2 * EPS, "implementation": body}
        return read_norm(BankRead(mixed, log_sum_exp), live, has_live, query, weight, **options)

    return values_and_gradients_of(run, cotangents, *inputs)


def values_and_gradients_of(fn, cotangents, *args):
    out, vjp = jax.vjp(fn, *args)
    return *out, *vjp(tuple(c.astype(x.dtype) for c, x in zip(cotangents, out, strict=True)))


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(
    ("tokens", "adds", "has_live", "sealed"),
    [(150, True, True, True), (19, False, True, True), (19, False, False, True), (1, True, True, False)],
    ids=["update", "no-update", "right-after-a-seal", "nothing-sealed"],
)
def test_sum_read_and_norm_in_one_against_float64(body, tokens, adds, has_live, sealed):
    inputs, cotangents = read_norm_inputs(tokens, adds=adds, sealed=sealed)
    found = jax.jit(lambda *x: read_norm_gradients(body, has_live, *x))(inputs, cotangents)
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: np.asarray(x, np.float64), (inputs, cotangents))
        expected = read_norm_gradients("reference", has_live, *exact)
    assert len(jax.tree.leaves(found)) == 7 + adds
    for ours, truth in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, truth, rtol=1e-4, atol=2e-6 * max(1.0, float(np.abs(truth).max())))


def test_bfloat16_sum_and_norm_round_as_the_layer_does():
    inputs, cotangents = read_norm_inputs(40, adds=True, sealed=True, dtype=jnp.bfloat16)
    summed, normed, *gradients = jax.jit(lambda *x: read_norm_gradients("tpu", True, *x))(inputs, cotangents)
    mixed, log_sum_exp, live, update, query, weight = inputs
    np.testing.assert_array_equal(summed, live + update)
    with jax.enable_x64(True):
        exact = [np.asarray(x, np.float64) for x in (mixed, log_sum_exp, summed)]
        tail = [np.asarray(x, np.float64) for x in (query, weight)]
        wide = [np.asarray(x, np.float64) for x in cotangents]
        _, expected, *expected_gradients = read_norm_gradients("reference", True, (*exact, None, *tail), wide)
    assert relative(normed, expected) < 4e-3  # two roundings, of the norm and of its product with the weight
    d_mixed, d_log_sum_exp, d_live, d_update, d_query, d_weight = gradients
    np.testing.assert_array_equal(d_live, d_update)
    found = d_mixed, d_log_sum_exp, d_live, d_query, d_weight
    for ours, truth in zip(found, jax.tree.leaves(expected_gradients), strict=True):
        assert relative(ours, truth) < 5e-3


def test_what_the_tpu_body_does_not_support_is_refused():
    bank, queries, _ = inputs(9, 9, 4)
    with pytest.raises(NotImplementedError, match=r"width 256 .* the number of snapshots 9 at most 8"):
        read_bank(bank, 9, queries, eps=EPS, implementation="tpu")
    bank, queries, _ = inputs(2, 2, 4, width=96)
    with pytest.raises(NotImplementedError, match="width 96 must be a multiple of 256"):
        read_bank(bank, 2, queries, eps=EPS, implementation="tpu")
    (mixed, log_sum_exp, live, *_), _ = read_norm_inputs(4, adds=False, sealed=True, width=96)
    with pytest.raises(NotImplementedError, match="width 96 must be a multiple of 128"):
        read_norm(
            BankRead(mixed, log_sum_exp), live, True, live[0], live[0], eps=EPS, norm_eps=EPS, implementation="tpu"
        )
