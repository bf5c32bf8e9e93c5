"""Latent attention's Pallas TPU kernels in interpret mode against float64; bf16 operands round as on the TPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.mla import attention, chunk_attention, merge, paged_decode, tpu, tpu_attention, tpu_decode
from tests.pallas_kernels import test_mla as oracle

ROUNDING = 5e-3
PACKED = np.int32([[0] * 5 + [3] * 70 + [-1] * 11 + [4] * 1 + [7] * 50 + [-1] * 13])
SCALE = 192**-0.5


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles, spans of queries in the backward pass, and groups of pages, in short sequences."""
    monkeypatch.setattr(tpu, "BLOCK", 128)
    monkeypatch.setattr(tpu, "KEYS", 128)
    monkeypatch.setattr(tpu_attention, "QUERIES", 128)
    monkeypatch.setattr(tpu_decode, "GROUP", 256)


def qkv(length, heads=1):
    return oracle.qkv(np.random.default_rng(0), 1, length, heads, 192, 128, jnp.bfloat16)


# Training


@pytest.mark.parametrize("ids", [None, PACKED], ids=["one-document", "packed-with-holes"])
def test_attention_and_its_gradients_equal_float64(ids):
    q, k, v = qkv(150)
    rng = np.random.default_rng(1)
    d_output, d_lse = oracle.normal(rng, *v.shape, dtype=jnp.bfloat16), oracle.normal(rng, 1, 150, 1)

    @jax.jit
    def run(q, k, v):
        out, pull = jax.vjp(lambda *x: attention(*x, segment_ids=ids, implementation="tpu")[:2], q, k, v)
        return out, pull((d_output, d_lse))

    (output, log_sum_exp), got = run(q, k, v)
    visible = oracle.causal_in_segments(1, 150, ids)
    expected = oracle.softmax_attention(q, k, v, visible, SCALE)
    assert oracle.relative(output, expected[0]) < ROUNDING
    np.testing.assert_allclose(log_sum_exp, expected[1], rtol=1e-5, atol=1e-5)
    for actual, right in zip(got, oracle.gradients(q, k, v, visible, d_output, d_lse, SCALE), strict=True):
        assert oracle.relative(actual, right) < ROUNDING


def test_the_largest_logit_is_that_of_real_tokens():
    oracle.test_the_largest_logit_is_that_of_real_tokens("tpu")


def test_a_wide_output_keeps_what_all_values_share_out_of_the_gradients():
    oracle.test_a_wide_output_keeps_what_all_values_share_out_of_the_gradients("tpu")


@functools.partial(jax.jit, static_argnames="packed")
def chunk(q, k, v, ids, kv_ids, offset, d_output, d_lse, packed):
    segments = {"segment_ids": ids, "kv_segment_ids": kv_ids} if packed else {}
    attend = functools.partial(attention, q_offset=offset, implementation="tpu", **segments)
    out, pull = jax.vjp(lambda *x: attend(*x)[:2], q, k, v)
    return *out, attend(q, k, v).max_logit, pull((d_output, d_lse))


@pytest.mark.parametrize(("packed", "offset"), [(False, 0), (False, 100), (False, 200), (False, -150), (True, 60)])
def test_a_chunk_of_queries_attends_to_gathered_keys(packed, offset, monkeypatch):
    """Two spans of queries both ways; the kernels' grids end with the last pair of tiles that the offset leaves."""
    monkeypatch.setattr(tpu_attention, "PAIRS", 3)
    q, k, v = qkv(300)
    rng, length = np.random.default_rng(4), 140
    ids = np.int32([[0] * 90 + [1] * 130 + [-1] * 30 + [2] * 50])
    of_chunk, q = ids[:, 60 : 60 + length], q[:, :length]
    d_output, d_lse = oracle.normal(rng, 1, length, 1, 128, dtype=jnp.bfloat16), oracle.normal(rng, 1, length, 1)
    *out, got = chunk(q, k, v, of_chunk, ids, jnp.int32(offset), d_output, d_lse, packed)
    segments = (of_chunk, ids) if packed else (None, None)
    visible = oracle.causal_in_segments(1, length, segments[0], keys=300, kv_ids=segments[1], offset=offset)
    expected = oracle.softmax_attention(q, k, v, visible, SCALE)
    assert oracle.relative(out[0], expected[0]) < ROUNDING
    for actual, right in zip(out[1:], expected[1:], strict=True):
        np.testing.assert_allclose(actual, right, rtol=1e-5, atol=1e-5)
    for actual, right in zip(got, oracle.gradients(q, k, v, visible, d_output, d_lse, SCALE), strict=True):
        assert oracle.relative(actual, right) < ROUNDING


def test_works_in_a_checkpointed_scan_and_in_shard_map():
    q, k, v = qkv(20)
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    spec = PartitionSpec("data")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    def layer(v):
        return attention(q, k, v, implementation="tpu").output

    def loss(v):
        v, _ = jax.lax.scan(jax.checkpoint(lambda v, _: (layer(v), None)), v, length=2)
        return jnp.sum(v.astype(jnp.float32)), v

    gradient, twice = jax.jit(jax.grad(loss, has_aux=True))(v)
    weights = oracle.softmax_attention(q, k, np.eye(20)[None, :, None], oracle.causal_in_segments(1, 20, None), SCALE)[
        0
    ]
    both = np.linalg.matrix_power(weights[0, :, 0], 2)
    assert oracle.relative(twice[0, :, 0], both @ np.float64(v[0, :, 0])) < 2 * ROUNDING
    assert oracle.relative(gradient[0, :, 0], np.tile(both.sum(0)[:, None], 128)) < 2 * ROUNDING


# Prefill against a cache


def test_a_chunk_sees_the_cache_up_to_itself():
    rng = np.random.default_rng(2)
    sizes = {"length": 9, "keys": 300, "heads": 1, "nope": 128, "extra": 64, "rank": 32, "value": 128}
    arguments = {name: x.astype(jnp.bfloat16) for name, x in oracle.cache_arguments(rng, 2, **sizes).items()}
    positions = np.asarray([[0], [180]]) + np.arange(9)
    positions[1, 6:] = -1
    out = jax.jit(lambda a, p: chunk_attention(**a, positions=p, implementation="tpu"))(arguments, positions)
    k, v = oracle.expanded(arguments["latents"], arguments["k_up"], arguments["v_up"])
    visible = np.arange(300) <= positions[:, :, None]
    expected = oracle.softmax_attention(arguments["q"], k, v, visible, SCALE)
    assert oracle.relative(out.output, expected[0]) < 2 * ROUNDING  # the expanded keys round, too
    np.testing.assert_allclose(out.log_sum_exp, expected[1], rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(out.max_logit, expected[2], rtol=1e-2)


# Paged decode


@pytest.mark.parametrize("cache", [jnp.bfloat16, jnp.float8_e4m3fn], ids=["bf16", "fp8"])
def test_paged_decode_equals_float64_and_changes_only_the_new_tokens(cache):
    oracle.test_paged_decode_equals_float64_and_changes_only_the_new_tokens("tpu", jnp.bfloat16, cache, ROUNDING)


def test_a_page_that_does_not_exist_gives_nan_and_touches_nothing():
    oracle.test_a_page_that_does_not_exist_gives_nan_and_touches_nothing("tpu")


def test_pages_spread_over_devices_merge_to_the_whole(monkeypatch):
    monkeypatch.setattr(tpu_decode, "ENTRIES", 16)  # of a table of 6 rows of 4: the rows take two calls
    arguments = oracle.decode_arguments()
    decode = jax.jit(functools.partial(paged_decode, scale=0.07, implementation="tpu"))
    parts = []
    for part in range(2):
        table = np.where(np.asarray([0, 1, 1, 0]) == part, oracle.TABLE, -1)
        parts.append(decode(**(arguments | {"page_table": table})))
    output, log_sum_exp = merge(*(jnp.stack([p[i] for p in parts]) for i in (0, 1)))
    whole = oracle.decode(arguments, "reference")
    assert oracle.relative(output, whole[0]) < 2 * ROUNDING
    np.testing.assert_allclose(log_sum_exp, whole[1], atol=1e-2)


# Refusals


def test_what_the_kernels_do_not_take_is_refused_with_the_numbers():
    q, k, v = oracle.qkv(np.random.default_rng(3), 1, 4)
    with pytest.raises(NotImplementedError, match="not float32, 24 and 16"):
        attention(q, k, v, implementation="tpu")
    arguments = oracle.decode_arguments(rank=64)
    with pytest.raises(NotImplementedError, match="not bfloat16, bfloat16, 128, 64 and 64"):
        paged_decode(**arguments, scale=1.0, implementation="tpu")
