"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) in the three forms that a model needs, and their merge.

Per head, with the latent c_s and the extra key e_s of token s (shared by all heads):
    k_s = [k_up c_s | e_s];  v_s = v_up c_s;  score_ts = scale * q_t . k_s;  o_t = sum_s softmax_s(score_ts) v_s
Absorbed, with q'_t = [k_up^T q_t | q_t's extra part]: score_ts = scale * q'_t . [c_s | e_s];  o_t = v_up sum_s p_ts c_s
"""

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from pallas_kernels.dispatch import BY_PLATFORM, resolve
from pallas_kernels.mla import reference, tpu, tpu_decode, xla
from pallas_kernels.mla.pages import Pages, read, write
from pallas_kernels.mla.partial import Attended, Mask, merge

__all__ = ["Attended", "Pages", "attention", "chunk_attention", "merge", "paged_decode", "read", "write"]


def attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H V"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
    q_offset: int | Int[Array, ""] = 0,
    scale: float | None = None,
    output_dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> Attended:
    """Causal attention inside segments (-1 is padding: output 0, its contents ignored), for training and prefill.

    The queries are those of positions q_offset to q_offset + T - 1, the keys those of 0 to S - 1: with a traced offset,
    a device of a context-parallel group attends to the gathered keys. `kv_segment_ids` are the queries' by default
    (S = T). Softmax and sums are float32; the output has v's dtype or `output_dtype` (a float32 output also makes the
    backward pass exact in it). Output and log_sum_exp differentiate, max_logit (for QK-Clip; over these queries) does
    not. `scale` is K**-0.5 by default.
    Raises ValueError on shapes that do not fit, NotImplementedError for a body that does not exist.
    """
    batch, length, heads, width = _check_rank("q", q, 4)
    keys = _check_rank("k", k, 4)[1]
    _check_shapes({"k": (k, (batch, keys, heads, width))})
    _check_shapes({"v": (v, (*k.shape[:3], v.shape[-1]))}, by="k")
    ids, valid = None, None
    if segment_ids is not None:
        ids = segment_ids, segment_ids if kv_segment_ids is None else kv_segment_ids
        _check_shapes({"segment_ids": (segment_ids, (batch, length))})
        _check_shapes({"kv_segment_ids": (ids[1], (batch, keys))}, by="k")
        # Padding may hold NaN, and 0 * NaN would reach values and gradients.
        valid, kv_valid = ((x >= 0)[..., None, None] for x in ids)
        q, k, v = jnp.where(valid, q, 0), jnp.where(kv_valid, k, 0), jnp.where(kv_valid, v, 0)
    elif kv_segment_ids is not None:
        raise ValueError("kv_segment_ids needs segment_ids, the segments of the queries")
    offset = None if isinstance(q_offset, int) and q_offset == 0 else jnp.asarray(q_offset, jnp.int32)
    bodies = {"reference": reference.attention, "xla": xla.attention, "tpu": tpu.attention}
    fits = tpu.takes(q.dtype, width, v.shape[-1])
    body = resolve("mla_attention", implementation, bodies, by_platform=_by_platform(fits))
    dtype = jnp.dtype(v.dtype if output_dtype is None else output_dtype)
    out = body(q, k, v, Mask(ids, offset), width**-0.5 if scale is None else scale, dtype)
    if valid is None:
        return out
    return Attended(jnp.where(valid, out.output, 0), jnp.where(valid[..., 0], out.log_sum_exp, -jnp.inf), out.max_logit)


def chunk_attention(
    q: Float[Array, "B T H K"],
    latents: Float[Array, "B S C"] | Pages,
    k_up: Float[Array, "R H N"],
    v_up: Float[Array, "R H V"],
    *,
    positions: Int[Array, "B T"],
    key_positions: Int[Array, "B S"] | None = None,
    page_table: Int[Array, "B P"] | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> Attended:
    """Attention of a chunk of queries to a cache of latents [c | e] that already holds them; chunked prefill.

    A query sees the keys whose position is at most its own; position -1 is padding, of a query (output 0) or a key.
    `key_positions` is 0..S-1 by default. With `Pages` in place of the array, `page_table` names each row's pages in
    order (-1: a hole, seen by none). Keys and values are expanded a tile at a time and never stored. There is no
    gradient.
    Raises ValueError on shapes that do not fit, NotImplementedError for a body that does not exist.
    """
    batch, length, heads, width = _check_rank("q", q, 4)
    rank, _, nope = _check_rank("k_up", k_up, 3)
    _check_shapes(
        {"k_up": (k_up, (rank, heads, nope)), "v_up": (v_up, (rank, heads, v_up.shape[-1]))}
        | {"positions": (positions, (batch, length))}
    )
    if isinstance(latents, Pages) != (page_table is not None):
        raise ValueError("page_table goes with latents given as Pages, and only with them")
    if not isinstance(latents, Pages):
        _check_shapes({"latents": (latents, (batch, latents.shape[1], rank + width - nope))})
        if key_positions is not None:
            _check_shapes({"key_positions": (key_positions, latents.shape[:2])})
    elif key_positions is not None:
        raise ValueError("key_positions goes with latents given as an array: pages hold the positions of their table")
    bodies = {"reference": reference.chunk_attention, "xla": xla.chunk_attention, "tpu": tpu.chunk_attention}
    fits = tpu.takes(q.dtype, width, v_up.shape[-1])
    body = resolve("mla_chunk_attention", implementation, bodies, by_platform=_by_platform(fits))
    scale = width**-0.5 if scale is None else scale
    return body(q, latents, k_up, v_up, positions, key_positions, page_table, scale)


def paged_decode(
    q: Float[Array, "S H C"],
    new: Float[Array, "S C"],
    pages: Pages,
    page_table: Int[Array, "S P"],
    lengths: Int[Array, "S"],
    *,
    scale: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "S H R"], Float[Array, "S H"], Pages]:
    """Absorbed decode of one token a row: write its latent [c | e] to the row's pages, then attend to all of them.

    `q` is in the latent space, [R + E]; the output is [R], in q's dtype, beside the float32 log_sum_exp. `lengths`
    counts the new token, which goes to position lengths - 1; a row of length 0 writes nothing and outputs 0 and -inf.
    `page_table` holds the pages of a row in order; -1 is a hole: unseen, and a new token that falls in it is dropped
    (another device holds it; see `merge`). A row that names a page which does not exist outputs NaN. What a page holds
    after its row's last token must be finite for "tpu", as in new pages.
    The pages are updated in place where they are donated; on a TPU by the kernel that reads them.
    Raises ValueError on shapes that do not fit, NotImplementedError for a body that does not exist.
    """
    rows, _, width = _check_rank("q", q, 3)
    _check_shapes(
        {
            "new": (new, (rows, width)),
            "page_table": (page_table, (rows, page_table.shape[-1])),
            "lengths": (lengths, (rows,)),
            "pages.latent": (pages.latent, (*pages.latent.shape[:2], width - pages.extra.shape[2] // 2)),
        }
    )
    bodies = {"reference": reference.paged_decode, "xla": xla.paged_decode, "tpu": tpu.paged_decode}
    body = resolve(
        "mla_paged_decode", implementation, bodies, by_platform=_by_platform(tpu_decode.takes(pages, q.dtype))
    )
    output, log_sum_exp, pages = body(q, new, pages, page_table, lengths, scale)
    needed = jnp.arange(page_table.shape[1]) * pages.page < lengths[:, None]
    missing = jnp.any(needed & ((page_table < -1) | (page_table >= len(pages.latent))), axis=1)
    missing = missing | (lengths > page_table.shape[1] * pages.page)
    output = jnp.where(missing[:, None, None], jnp.nan, output)
    return output, jnp.where(missing[:, None], jnp.nan, log_sum_exp), pages


def _by_platform(fits: bool) -> dict[str, str]:
    """The TPU kernels are for bfloat16 and widths that fill lanes; else the portable body runs there."""
    return {**BY_PLATFORM, "tpu": "tpu" if fits else "xla"}


def _check_rank(name: str, x: Array, rank: int) -> tuple[int, ...]:
    if x.ndim != rank:
        raise ValueError(f"{name} has shape {x.shape}: {x.ndim} axes where {rank} are needed")
    return x.shape


def _check_shapes(arguments: dict[str, tuple[Array, tuple[int, ...]]], *, by: str = "q") -> None:
    for name, (x, shape) in arguments.items():
        if x.shape != shape:
            raise ValueError(f"{name} has shape {x.shape}; {by} asks for {shape}")
