"""MLA as K3 runs it. Units of work: decode of 128 sequences of 32k tokens, one cached token; training, one pair of a
query and a key that it sees, in one head.

`splash_fwd_*` is JAX's own splash attention on the same shape, for comparison. Its loop also counts the tiles that it
skips: of 64 pairs it works on 36, as ours does.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from benchmarks.cases.case import Case, Program, shape
from pallas_kernels.mla import Pages, attention, paged_decode

PAGE, ROWS, CONTEXT = 128, 128, 32768
GROUPS = CONTEXT // 1024  # of pages that the decode kernel reads at one time
WIDTH, VALUE = 192, 128
BLOCK = 512


def _decode(heads: int, cache: str) -> Program:
    """A decode step over full page tables; the pages are donated.

    The queries are cut from an array without padding in its layout: for [rows, 12, 576] as the argument of a whole
    program XLA picks another layout, and copies.
    """
    pool, fp8 = ROWS * CONTEXT // PAGE, cache == "float8_e4m3fn"
    latent, extra = shape(cache, pool, PAGE, 512), shape(jnp.bfloat16, pool, PAGE // 2, 128)
    arrays: Any = latent, extra, shape(jnp.float32, pool, 1, PAGE) if fp8 else None
    pages = Pages(*arrays)
    padded = -(-heads // 16) * 16
    tokens = shape(jnp.bfloat16, ROWS, padded, 640), shape(jnp.bfloat16, ROWS, 640)
    table, lengths = shape(jnp.int32, ROWS, CONTEXT // PAGE), shape(jnp.int32, ROWS)

    def decode(q, new, pages, page_table, lengths):  # type: ignore[no-untyped-def]
        rest = pages, page_table, lengths
        return paged_decode(q[:, :heads, :576], new[:, :576], *rest, scale=WIDTH**-0.5, implementation="tpu")

    return decode, (*tokens, pages, table, lengths), (2,)


def _training(heads: int, length: int, body: str, *, backward: bool) -> Program:
    """One sequence, heads first. Queries and keys are cut from 256: XLA would pick another layout for 192, and copy."""

    def ours(q, k, v):  # type: ignore[no-untyped-def]
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        return attention(q, k, v, implementation="tpu").output.swapaxes(1, 2)

    def theirs(q, k, v):  # type: ignore[no-untyped-def]
        mask = masks.MultiHeadMask([masks.CausalMask((length, length))] * heads)
        names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
        blocks: Any = {f"block_{name}": BLOCK for name in names}
        sizes = splash.BlockSizes(**blocks)
        kernel = splash.make_splash_mha(mask=mask, head_shards=1, q_seq_shards=1, block_sizes=sizes)
        return jax.vmap(kernel)(q, k, v)

    body_of = {"ours": ours, "splash": theirs}[body]

    def run(q, k, v):  # type: ignore[no-untyped-def]
        return body_of(q[..., :WIDTH], k[..., :WIDTH], v)

    def gradients(q, k, v, d_output):  # type: ignore[no-untyped-def]
        output, pull = jax.vjp(run, q, k, v)
        return output, pull(d_output)

    wide, narrow = (shape(jnp.bfloat16, 1, heads, length, size) for size in (256, VALUE))
    return (gradients, (wide, wide, narrow, narrow), ()) if backward else (run, (wide, wide, narrow), ())


def _attention(name: str, body: str, *, backward: bool = False) -> Case:
    heads, length = 8, 4096
    build = partial(_training, heads, length, body, backward=backward)
    return Case(f"{name}_h{heads}_t{length}", heads * length * (length + 1) // 2, build)


CASES = (
    *(
        Case(f"mla_decode_b128_s32k_h{heads}", ROWS * CONTEXT, partial(_decode, heads, "bfloat16"), (GROUPS,))
        for heads in (3, 6, 12, 96)
    ),
    Case("mla_decode_fp8_b128_s32k_h12", ROWS * CONTEXT, partial(_decode, 12, "float8_e4m3fn"), (GROUPS,)),
    _attention("mla_attention_fwd", "ours"),
    _attention("mla_attention_fwd_bwd", "ours", backward=True),
    _attention("splash_fwd", "splash"),
)
