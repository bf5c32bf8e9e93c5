"""Latent attention: every body against float64 numpy, written from the definition."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mla import Pages, attention, chunk_attention, merge, paged_decode, write, xla

BODIES = ("reference", "xla")
PACKED = np.int32([[0] * 5 + [3] * 70 + [-1] * 11 + [4] * 1 + [7] * 50 + [-1] * 13, [-1] * 150])
SHORT = np.int32([[2] * 9 + [-1] * 2 + [5] * 6, [0] * 17])


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles in short sequences."""
    monkeypatch.setattr(xla, "TILE", 64)


def normal(rng, *shape, dtype=jnp.float32):
    return jnp.asarray(rng.normal(size=shape), dtype)


def softmax_attention(q, k, v, visible, scale):
    """float64 [B, T, H, ...]: output, log_sum_exp, max_logit; a query that sees nothing has 0, -inf."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    scores = np.where(visible[:, :, None], np.einsum("bthk,bshk->bths", q, k) * scale, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isinf(top), 0, top))
    total = weights.sum(-1)
    with np.errstate(divide="ignore"):
        log_sum_exp = np.log(total) + np.where(np.isinf(top), 0, top)[..., 0]
    output = np.einsum("bths,bshv->bthv", weights, v) / np.where(total == 0, 1, total)[..., None]
    return output, log_sum_exp, scores.max((1, 3))


def causal_in_segments(batch, length, ids, *, keys=None, kv_ids=None, offset=0):
    """What queries from position `offset` on see, [batch, length, keys]."""
    keys, kv_ids = keys or length, ids if kv_ids is None else kv_ids
    visible = np.broadcast_to(np.arange(keys) <= np.arange(length)[:, None] + offset, (batch, length, keys))
    return visible if ids is None else visible & (ids[:, :, None] == kv_ids[:, None]) & (kv_ids >= 0)[:, None]


def gradients(q, k, v, visible, d_output, d_lse, scale):
    """Of sum(output * d_output) + sum(lse * d_lse), in float64, from the formulas of the softmax."""
    q, k, v, d_output = (np.asarray(x, np.float64) for x in (q, k, v, d_output))
    output, log_sum_exp, _ = softmax_attention(q, k, v, visible, scale)
    log_sum_exp = np.where(np.isinf(log_sum_exp), 0, log_sum_exp)
    scores = np.where(visible[:, :, None], np.einsum("bthk,bshk->bths", q, k) * scale, -np.inf)
    weights = np.exp(scores - log_sum_exp[..., None])
    correction = (d_output * output).sum(-1) - d_lse
    d_scores = weights * (np.einsum("bthv,bshv->bths", d_output, v) - correction[..., None]) * scale
    return (
        np.einsum("bths,bshk->bthk", d_scores, k),
        np.einsum("bths,bthk->bshk", d_scores, q),
        np.einsum("bths,bthv->bshv", weights, d_output),
    )


def relative(actual, expected):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-30)


# Training


@functools.partial(jax.jit, static_argnames="implementation")
def attend(q, k, v, ids, implementation, **chunk):
    return attention(q, k, v, segment_ids=ids, implementation=implementation, **chunk)


@functools.partial(jax.jit, static_argnames="implementation")
def attend_gradients(q, k, v, ids, d_output, d_lse, implementation, **chunk):
    def loss(q, k, v):
        out = attention(q, k, v, segment_ids=ids, implementation=implementation, **chunk)
        lse = jnp.where(jnp.isfinite(out.log_sum_exp), out.log_sum_exp, 0)
        return jnp.sum(out.output * d_output) + jnp.sum(lse * d_lse)

    return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)


def qkv(rng, batch, length, heads=2, width=24, value=16, dtype=jnp.float32):
    shape = (batch, length, heads)
    return (
        normal(rng, *shape, width, dtype=dtype),
        normal(rng, *shape, width, dtype=dtype),
        normal(rng, *shape, value, dtype=dtype),
    )


@pytest.mark.parametrize("implementation", BODIES)
@pytest.mark.parametrize(
    ("length", "ids"),
    [(1, None), (150, None), (17, SHORT), (150, PACKED)],
    ids=["one-token", "odd-length", "two-documents", "packed-with-holes-and-an-empty-row"],
)
def test_attention_and_its_gradients_equal_float64(implementation, length, ids):
    rng = np.random.default_rng(0)
    q, k, v = qkv(rng, 2, length)
    d_output, d_lse = normal(rng, 2, length, 2, 16), normal(rng, 2, length, 2)
    out = attend(q, k, v, ids, implementation)
    visible = causal_in_segments(2, length, ids)
    output, log_sum_exp, max_logit = softmax_attention(q, k, v, visible, 24**-0.5)
    assert relative(out.output, output) < 1e-6
    np.testing.assert_allclose(out.log_sum_exp, log_sum_exp, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out.max_logit, max_logit, rtol=1e-5)
    got = attend_gradients(q, k, v, ids, d_output, d_lse, implementation)
    for actual, expected in zip(got, gradients(q, k, v, visible, d_output, d_lse, 24**-0.5), strict=True):
        assert relative(actual, expected) < 2e-6


@pytest.mark.parametrize("implementation", BODIES)
def test_the_largest_logit_is_that_of_real_tokens(implementation):
    """All are negative here, where the zeros that fill a tile would give 0; in a checkpointed scan of two layers."""
    rng, length = np.random.default_rng(13), 150
    _, k, v = qkv(rng, 1, length, 1, 192, 128, jnp.bfloat16)
    k, q = jnp.abs(k), -jnp.abs(normal(rng, 2, *k.shape, dtype=jnp.bfloat16))

    def layer(v, q):
        out = attention(q, k, v, implementation=implementation)
        return out.output, out.max_logit

    def loss(v):
        v, max_logit = jax.lax.scan(jax.checkpoint(layer), v, q)
        return jnp.sum(v.astype(jnp.float32)), max_logit

    _, found = jax.jit(jax.grad(loss, has_aux=True))(v)
    visible = causal_in_segments(1, length, None)
    expected = np.stack([softmax_attention(x, k, v, visible, 192**-0.5)[2] for x in q])
    assert expected.max() < -0.1
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("implementation", BODIES)
def test_padding_may_hold_nan(implementation):
    rng = np.random.default_rng(1)
    q, k, v = qkv(rng, 2, 17)
    padding = (SHORT < 0)[..., None, None]
    poisoned = [jnp.where(padding, jnp.nan, x) for x in (q, k, v)]
    d_output, d_lse = jnp.where(padding, jnp.nan, normal(rng, 2, 17, 2, 16)), normal(rng, 2, 17, 2)
    for actual, expected in zip(
        attend(*poisoned, SHORT, implementation), attend(q, k, v, SHORT, implementation), strict=True
    ):
        np.testing.assert_array_equal(actual, expected)
    clean = jnp.where(padding, 0, d_output)
    got = attend_gradients(*poisoned, SHORT, clean, d_lse, implementation)
    visible = causal_in_segments(2, 17, SHORT)
    for actual, expected in zip(got, gradients(q, k, v, visible, clean, d_lse, 24**-0.5), strict=True):
        assert relative(actual, expected) < 2e-6


@pytest.mark.parametrize("implementation", BODIES)
def test_a_wide_output_keeps_what_all_values_share_out_of_the_gradients(implementation):
    """It cancels in the scores' gradients, exactly only if the output is not rounded (from bfloat16: 0.14)."""
    rng = np.random.default_rng(12)
    q, k, v = qkv(rng, 1, 256, 1, 192, 128, jnp.bfloat16)
    v = (0.05 * v + 4 * jnp.sign(normal(rng, 1, 1, 1, 128))).astype(jnp.bfloat16)
    d_output = normal(rng, *v.shape)

    @jax.jit
    def run(q, k, v):
        attend = functools.partial(attention, output_dtype=jnp.float32, implementation=implementation)
        output, pull = jax.vjp(lambda *x: attend(*x).output, q, k, v)
        return output, pull(d_output)

    output, got = run(q, k, v)
    assert output.dtype == jnp.float32
    visible = causal_in_segments(1, 256, None)
    for actual, expected in zip(got, gradients(q, k, v, visible, d_output, 0.0, 192**-0.5), strict=True):
        assert relative(actual, expected) < 0.05


CHUNK = 70  # queries of a device; the keys of all devices are gathered


@pytest.mark.parametrize("implementation", BODIES)
@pytest.mark.parametrize("ids", [None, PACKED], ids=["one-document", "packed-with-holes"])
@pytest.mark.parametrize("offset", [0, 33, 80, 128, -30])
def test_a_chunk_of_queries_attends_to_gathered_keys(implementation, ids, offset):
    """Where the chunk begins is traced; behind the last key and before the first it sees less, or nothing."""
    rng = np.random.default_rng(9)
    q, k, v = qkv(rng, 2, 150)
    q, d_output, d_lse = q[:, :CHUNK], normal(rng, 2, CHUNK, 2, 16), normal(rng, 2, CHUNK, 2)
    of_chunk = (
        None if ids is None else np.pad(ids, ((0, 0), (30, CHUNK)), constant_values=-1)[:, 30 + offset :][:, :CHUNK]
    )
    chunk = {"kv_segment_ids": ids, "q_offset": jnp.int32(offset)}
    out = attend(q, k, v, of_chunk, implementation, **chunk)
    visible = causal_in_segments(2, CHUNK, of_chunk, keys=150, kv_ids=ids, offset=offset)
    output, log_sum_exp, max_logit = softmax_attention(q, k, v, visible, 24**-0.5)
    assert relative(out.output, output) < 1e-6
    np.testing.assert_allclose(out.log_sum_exp, log_sum_exp, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out.max_logit, max_logit, rtol=1e-5)
    got = attend_gradients(q, k, v, of_chunk, d_output, d_lse, implementation, **chunk)
    for actual, expected in zip(got, gradients(q, k, v, visible, d_output, d_lse, 24**-0.5), strict=True):
        assert relative(actual, expected) < 2e-6


@pytest.mark.parametrize("implementation", BODIES)
def test_more_queries_than_keys_see_no_added_key(implementation):
    q, k, v = qkv(np.random.default_rng(10), 1, 130)
    out = attend(q, k[:, :70], v[:, :70], None, implementation)
    expected = softmax_attention(q, k[:, :70], v[:, :70], causal_in_segments(1, 130, None, keys=70), 24**-0.5)
    assert relative(out.output, expected[0]) < 1e-6


def test_segments_of_keys_alone_are_refused():
    q, k, v = qkv(np.random.default_rng(11), 2, 17)
    with pytest.raises(ValueError, match="kv_segment_ids needs segment_ids"):
        attention(q, k, v, kv_segment_ids=SHORT)
    with pytest.raises(ValueError, match=r"kv_segment_ids has shape \(2, 17\); k asks for \(2, 9\)"):
        attention(q, k[:, :9], v[:, :9], segment_ids=SHORT)


# Prefill against a cache


def cache_arguments(rng, batch=2, length=9, keys=130, heads=2, nope=16, extra=8, rank=24, value=16):
    return {
        "q": normal(rng, batch, length, heads, nope + extra),
        "latents": normal(rng, batch, keys, rank + extra),
        "k_up": normal(rng, rank, heads, nope) * rank**-0.5,
        "v_up": normal(rng, rank, heads, value) * rank**-0.5,
    }


def expanded(latents, k_up, v_up):
    latents, k_up, v_up = (np.asarray(x, np.float64) for x in (latents, k_up, v_up))
    rank = len(k_up)
    k, v = (np.einsum("bsr,rhn->bshn", latents[..., :rank], w) for w in (k_up, v_up))
    extra = np.broadcast_to(latents[:, :, None, rank:], (*k.shape[:3], latents.shape[-1] - rank))
    return np.concatenate([k, extra], -1), v


@functools.partial(jax.jit, static_argnames="implementation")
def prefill(arguments, positions, implementation, key_positions=None, page_table=None):
    rest = {"key_positions": key_positions, "page_table": page_table, "implementation": implementation}
    return chunk_attention(**arguments, positions=positions, **rest)


@pytest.mark.parametrize("implementation", BODIES)
@pytest.mark.parametrize(
    ("length", "keys", "starts"),
    [(9, 130, (0, 97)), (130, 300, (170, 3))],
    ids=["short-chunk", "several-tiles-of-both"],
)
def test_a_chunk_sees_the_cache_up_to_itself(implementation, length, keys, starts):
    arguments = cache_arguments(np.random.default_rng(2), length=length, keys=keys)
    positions = np.asarray(starts)[:, None] + np.arange(length)
    positions[1, length - 4 :] = -1
    arguments["latents"] = arguments["latents"].at[1, starts[1] + length :].set(0)
    out = prefill(arguments, positions, implementation)
    k, v = expanded(arguments["latents"], arguments["k_up"], arguments["v_up"])
    expected = softmax_attention(arguments["q"], k, v, np.arange(keys) <= positions[:, :, None], 24**-0.5)
    assert relative(out.output, expected[0]) < 1e-6
    np.testing.assert_allclose(out.log_sum_exp, expected[1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out.max_logit, expected[2], rtol=1e-5)


@pytest.mark.parametrize("implementation", BODIES)
def test_striped_keys_merge_to_the_whole(implementation):
    arguments = cache_arguments(np.random.default_rng(3))
    positions = np.asarray([[40], [0]]) + np.arange(9)
    whole = prefill(arguments, positions, implementation)
    parts = []
    for part in range(3):  # each holds every third token, the last of them one fewer
        where = np.where(np.arange(44) * 3 + part < 130, np.arange(44) * 3 + part, -1)
        striped = arguments | {"latents": arguments["latents"][:, where]}
        parts.append(prefill(striped, positions, implementation, np.stack([where] * 2)))
    output, log_sum_exp = merge(*(jnp.stack([getattr(p, name) for p in parts]) for name in ("output", "log_sum_exp")))
    assert relative(output, whole.output) < 1e-6
    np.testing.assert_allclose(log_sum_exp, whole.log_sum_exp, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.max([p.max_logit for p in parts], 0), whole.max_logit, rtol=1e-5)


@pytest.mark.parametrize("implementation", BODIES)
def test_a_chunk_reads_pages_with_holes(implementation):
    arguments = cache_arguments(np.random.default_rng(4), keys=5 * 32)
    table = np.int32([[3, 0, -1, 6, 1], [5, 2, 4, 7, -1]])
    pages = Pages.zeros(8, 32, 24, 8, dtype=jnp.float32)
    pages = write(pages, arguments["latents"], table, np.stack([np.arange(160)] * 2))
    positions = np.asarray([[140], [60]]) + np.arange(9)
    out = prefill(arguments | {"latents": pages}, positions, implementation, page_table=table)
    k, v = expanded(arguments["latents"], arguments["k_up"], arguments["v_up"])
    visible = (np.arange(160) <= positions[:, :, None]) & np.repeat(table >= 0, 32, 1)[:, None]
    expected = softmax_attention(arguments["q"], k, v, visible, 24**-0.5)
    assert relative(out.output, expected[0]) < 1e-6
    np.testing.assert_allclose(out.log_sum_exp, expected[1], rtol=1e-5, atol=1e-5)


# Merge


@pytest.mark.parametrize("cuts", [(), (50,), (1, 2, 40, 41, 97, 120)], ids=["1-part", "2-parts", "7-parts"])
def test_uneven_parts_merge_to_the_whole(cuts):
    rng = np.random.default_rng(5)
    q, k, v = (np.asarray(x, np.float64) for x in qkv(rng, 1, 130))
    q = 6 * q  # sharp: parts differ by many powers of e
    everything = np.ones((1, 130, 130), bool)
    parts = [
        softmax_attention(q, k, v, everything & (np.arange(130) >= a) & (np.arange(130) < b), 0.2)
        for a, b in zip((0, *cuts), (*cuts, 130), strict=True)
    ]
    nothing = np.full_like(parts[0][0], np.nan), np.full_like(parts[0][1], -np.inf)  # an empty part: anything, -inf
    outputs, log_sum_exps = (jnp.asarray(np.stack([p[i] for p in [*parts, nothing]]), jnp.float32) for i in (0, 1))
    output, log_sum_exp = merge(outputs, log_sum_exps)
    expected = softmax_attention(q, k, v, everything, 0.2)
    assert relative(output, expected[0]) < 1e-6
    np.testing.assert_allclose(log_sum_exp, expected[1], rtol=1e-5)


def test_a_merge_of_nothing_is_nothing_and_has_gradients():
    def loss(outputs, log_sum_exps):
        output, log_sum_exp = merge(outputs, log_sum_exps)
        return jnp.sum(output) + jnp.sum(jnp.where(jnp.isfinite(log_sum_exp), log_sum_exp, 0))

    outputs, log_sum_exps = jnp.full((2, 3, 4), jnp.nan), jnp.full((2, 3), -jnp.inf).at[:, 0].set(1.0)
    outputs = outputs.at[:, 0].set(2.0)
    output, log_sum_exp = merge(outputs, log_sum_exps)
    np.testing.assert_array_equal(output[1:], 0)
    np.testing.assert_array_equal(log_sum_exp[1:], -np.inf)
    for gradient in jax.grad(loss, argnums=(0, 1))(outputs, log_sum_exps):
        assert np.all(np.isfinite(gradient))


# Paged decode

PAGE = 128
TABLE = np.int32([[4, 9, 1, 0], [-1, -1, -1, -1], [6, -1, 8, -1], [7, -1, -1, -1], [3, 2, -1, -1], [10, -1, -1, -1]])
LENGTHS = np.int32([400, 0, 360, 1, 256, 128])  # row 2 has a hole inside; row 4's and 5's new token fills a page


def decode_arguments(dtype=jnp.bfloat16, cache=jnp.bfloat16, *, heads=3, rank=128, extra=64, seed=6):
    rng = np.random.default_rng(seed)
    pages = Pages.zeros(11, PAGE, rank, extra, dtype=cache)
    tokens = normal(rng, len(TABLE), TABLE.shape[1] * PAGE, rank + extra, dtype=dtype)
    where = np.arange(tokens.shape[1])
    pages = write(pages, tokens, TABLE, np.where(where < LENGTHS[:, None] - 1, where, -1))
    q, new = (normal(rng, len(TABLE), *shape, dtype=dtype) for shape in [(heads, rank + extra), (rank + extra,)])
    return {"q": q, "new": new, "pages": pages, "page_table": TABLE, "lengths": LENGTHS}


def plain(pages):
    """float64 [N, page, R + E] from the documented layout."""
    latent, extra = np.asarray(pages.latent, np.float64), np.asarray(pages.extra, np.float64)
    if pages.scale is not None:
        latent = latent * np.asarray(pages.scale, np.float64)[:, 0, :, None]
    width = extra.shape[-1] // 2
    return np.concatenate([latent, np.concatenate([extra[..., :width], extra[..., width:]], 1)], -1)


def expected_decode(q, new, pages, page_table, lengths, scale):
    """Row by row from the definition, with the new token rounded as the cache holds it."""
    tokens, rank = plain(pages), pages.rank
    output, log_sum_exp = np.zeros((*q.shape[:2], rank)), np.full(q.shape[:2], -np.inf)
    for row, length in enumerate(lengths):
        held = [(page_table[row, t // PAGE], t % PAGE) for t in range(length)]
        keys = [tokens[page, offset] for page, offset in held if page >= 0]
        if not keys:
            continue
        scores = np.asarray(q[row], np.float64) @ np.stack(keys).T * scale
        top = scores.max(-1, keepdims=True)
        weights = np.exp(scores - top)
        output[row] = weights @ np.stack(keys)[:, :rank] / weights.sum(-1, keepdims=True)
        log_sum_exp[row] = np.log(weights.sum(-1)) + top[:, 0]
    return output, log_sum_exp


@functools.partial(jax.jit, static_argnames="implementation")
def decode(arguments, implementation):
    return paged_decode(**arguments, scale=0.07, implementation=implementation)


@pytest.mark.parametrize("implementation", BODIES)
@pytest.mark.parametrize(
    ("dtype", "cache", "tolerance"),
    [
        pytest.param(jnp.float32, jnp.float32, 1e-6, id="float32"),
        pytest.param(jnp.bfloat16, jnp.bfloat16, 6e-3, id="bf16"),
        pytest.param(jnp.bfloat16, jnp.float8_e4m3fn, 6e-3, id="fp8"),
    ],
)
def test_paged_decode_equals_float64_and_changes_only_the_new_tokens(implementation, dtype, cache, tolerance):
    arguments = decode_arguments(dtype, cache)
    output, log_sum_exp, pages = decode(arguments, implementation)
    expected = expected_decode(**(arguments | {"pages": pages}), scale=0.07)
    assert relative(output, expected[0]) < tolerance
    np.testing.assert_allclose(log_sum_exp, expected[1], atol=10 * tolerance)
    before, after = plain(arguments["pages"]), plain(pages)
    for row, length in enumerate(LENGTHS):
        page = TABLE[row, (length - 1) // PAGE] if length else -1
        if page >= 0:
            new = np.asarray(arguments["new"][row], np.float64)
            # One float8 rounds by up to 1/16 of its value, or half the smallest step of 2^-9 * max / 448.
            bound = 0.0 if cache != jnp.float8_e4m3fn else np.maximum(abs(new) / 16, abs(new).max() / 448 / 1024)
            assert np.all(abs(after[page, (length - 1) % PAGE] - new) <= bound)
            before[page, (length - 1) % PAGE] = after[page, (length - 1) % PAGE]
    np.testing.assert_array_equal(after, before)
    np.testing.assert_array_equal(output[1], 0)


@pytest.mark.parametrize("implementation", BODIES)
def test_a_page_that_does_not_exist_gives_nan_and_touches_nothing(implementation):
    arguments = decode_arguments()
    table = TABLE.copy()
    table[0, 1], table[3, 0], table[5, 3] = 11, -2, 99  # the last lies behind the row's length
    output, log_sum_exp, pages = decode(arguments | {"page_table": table}, implementation)
    bad = np.int32([1, 0, 0, 1, 0, 0]) > 0
    np.testing.assert_array_equal(np.isnan(output).all((1, 2)), bad)
    np.testing.assert_array_equal(np.isnan(log_sum_exp).any(1), bad)
    expected = decode(arguments, implementation)
    for actual, right in zip((output, log_sum_exp), expected, strict=False):
        np.testing.assert_array_equal(actual[~bad], right[~bad])
    np.testing.assert_array_equal(plain(pages)[7], plain(arguments["pages"])[7])


@pytest.mark.parametrize("implementation", BODIES)
@pytest.mark.parametrize("holder", [(0,) * 4, (0, 1, 1, 0), (3, 0, 6, 2)], ids=["1-part", "2-parts", "7-parts"])
def test_pages_spread_over_devices_merge_to_the_whole(implementation, holder):
    arguments = decode_arguments(jnp.float32, jnp.float32)
    parts = []
    for part in range(max(holder) + 1):
        table = np.where(np.asarray(holder) == part, TABLE, -1)
        parts.append(decode(arguments | {"page_table": table}, implementation))
    output, log_sum_exp = merge(*(jnp.stack([p[i] for p in parts]) for i in (0, 1)))
    whole = decode(arguments, implementation)
    assert relative(output, whole[0]) < 1e-6
    np.testing.assert_allclose(log_sum_exp, whole[1], atol=1e-5)


# Refusals


def test_shapes_that_do_not_fit_are_refused_with_the_numbers():
    q, k, v = qkv(np.random.default_rng(7), 1, 4)
    with pytest.raises(ValueError, match=r"k has shape \(1, 4, 1, 24\); q asks for \(1, 4, 2, 24\)"):
        attention(q, k[:, :, :1], v)
    with pytest.raises(ValueError, match=r"v has shape \(1, 4, 2, 16\); k asks for \(1, 3, 2, 16\)"):
        attention(q, k[:, :3], v)
    with pytest.raises(ValueError, match=r"segment_ids has shape \(1, 3\)"):
        attention(q, k, v, segment_ids=np.zeros((1, 3), np.int32))
    arguments = decode_arguments()
    with pytest.raises(ValueError, match=r"lengths has shape \(5,\); q asks for \(6,\)"):
        paged_decode(**(arguments | {"lengths": LENGTHS[:5]}), scale=1.0)
    with pytest.raises(ValueError, match="a page has an even number of tokens, not 5"):
        Pages.zeros(2, 5, 128, 64)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_what_was_never_written_may_hold_nan(implementation):
    pages = Pages.zeros(1, 4, 8, 4, dtype=jnp.float32)
    pages = dataclasses.replace(pages, latent=pages.latent.at[0, 1:].set(jnp.nan))
    table, lengths = jnp.zeros((2, 1), jnp.int32), jnp.asarray([1, 0], jnp.int32)
    q, new = jnp.ones((2, 2, 12)), jnp.ones((2, 12))
    output, log_sum_exp, _ = paged_decode(q, new, pages, table, lengths, scale=0.1, implementation=implementation)
    np.testing.assert_allclose(output, [[[1.0] * 8] * 2, [[0.0] * 8] * 2])
    assert np.isneginf(log_sum_exp[1]).all()


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_padded_latents_may_hold_nan(implementation):
    latents = jnp.ones((1, 5, 12)).at[0, 3:].set(jnp.nan)
    where = {"positions": jnp.asarray([[2, -1]]), "key_positions": jnp.asarray([[0, 1, 2, -1, -1]])}
    up = jnp.ones((8, 2, 4))
    out = chunk_attention(jnp.ones((1, 2, 2, 8)), latents, up, up, **where, implementation=implementation)
    np.testing.assert_allclose(out.output, [[[[8.0] * 4] * 2, [[0.0] * 4] * 2]], rtol=1e-6)
