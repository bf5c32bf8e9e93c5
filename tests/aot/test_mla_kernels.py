"""The kernels of latent attention compile for the TPUs we name, within their cycles and without a copy of the cache."""

import functools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from benchmarks.static_cycles import environment
from pallas_kernels.mla import attention, chunk_attention
from tests.aot.marks import NEEDS_TPU_COMPILER, V7X

pytestmark = NEEDS_TPU_COMPILER

# 1,152 bytes a cached token at 3.7 TB/s and 2.2 GHz: cycles that a tpu7x device needs to read it.
READ = 1152 / 3.7e12 * 2.2e9


@pytest.mark.parametrize("topology", ["v6e:2x2", "v5p:2x2x1"])
@pytest.mark.parametrize("case", ["mla_decode_b128_s32k_h12", "mla_attention_fwd_bwd_h8_t4096"])
def test_mla_compiles_for_other_chips(case, topology):
    command = [sys.executable, "-m", "benchmarks.compile_case", case, topology]
    done = subprocess.run(command, env=environment(topology), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    sizes = json.loads(done.stdout.splitlines()[-1])
    assert sizes["temp_bytes"] < sizes["hbm_bytes"]


@pytest.mark.parametrize(("heads", "budget"), [(12, 1.04), (96, 1.36)])
def test_decode_reads_the_cache_once_and_copies_none_of_it(heads, budget, row_of):
    row = row_of(f"mla_decode_b128_s32k_h{heads}", V7X)
    # 0.05 of it are the two guarded loops that would copy the pages, had they not been donated.
    assert row["cycles_per_unit"] <= budget * READ
    assert row["temp_bytes"] < 0.01 * row["hbm_bytes"]


def test_training_takes_no_longer_than_splash_on_the_same_shapes(row_of):
    forward, splash, both = (
        row_of(f"{name}_h8_t4096", V7X)["cycles"]
        for name in ("mla_attention_fwd", "splash_fwd", "mla_attention_fwd_bwd")
    )
    # Both have 36 pairs of tiles that the mask leaves; splash's loop also counts the 28 that it skips. It makes neither
    # log_sum_exp nor largest logit here; with the former, its step takes 1.08 of this.
    assert forward <= 1.05 * 1.08 * splash * 36 / 64
    # Splash's three loops of training (forward, dq, dkv; jax 0.10.2) take 5,027 cycles a pair of tiles.
    assert both <= 1.05 * 5027 * 36 * 8


def test_a_chunk_against_a_million_tokens_needs_memory_for_a_few_thousand(compile_on):
    heads, length, context = 12, 2048, 2**20
    bf16 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    shapes = bf16((1, length, heads, 192)), bf16((1, context, 576)), bf16((512, heads, 128)), bf16((512, heads, 128))

    def chunk(q, latents, k_up, v_up, positions):
        return chunk_attention(q, latents, k_up, v_up, positions=positions, implementation="tpu")

    compiled = compile_on(chunk, *shapes, jax.ShapeDtypeStruct((1, length), jnp.int32))
    assert compiled.memory_analysis().temp_size_in_bytes < 2**28  # all keys and values of 12 heads: 8 GB


def test_a_chunk_of_queries_trains_against_gathered_keys(compile_on):
    """The offset is traced, and with it the number of the kernels' steps; no scores in memory."""
    heads, length, keys = 4, 4096, 16384
    bf16, ids = (functools.partial(jax.ShapeDtypeStruct, dtype=dtype) for dtype in (jnp.bfloat16, jnp.int32))
    tokens = bf16((1, length, heads, 192)), bf16((1, keys, heads, 192)), bf16((1, keys, heads, 128))
    d_output = jax.ShapeDtypeStruct((1, length, heads, 128), jnp.float32)

    def gradients(q, k, v, of_chunk, of_keys, offset, d_output):
        options = {"segment_ids": of_chunk, "kv_segment_ids": of_keys, "q_offset": offset, "implementation": "tpu"}
        output, pull = jax.vjp(lambda *x: attention(*x, output_dtype=jnp.float32, **options).output, q, k, v)
        return output, pull(d_output)

    compiled = compile_on(gradients, *tokens, ids((1, length)), ids((1, keys)), ids(()), d_output)
    assert compiled.memory_analysis().temp_size_in_bytes < 2**28  # all scores of one head in float32: 2**28
