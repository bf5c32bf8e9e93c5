"""Attention as it is defined, with every score in memory: the body to read, and the oracle of the others."""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from pallas_kernels.mla import pages as paging
from pallas_kernels.mla.pages import Pages
from pallas_kernels.mla.partial import LOWEST, Attended, Mask


def island(dtype: jnp.dtype) -> jnp.dtype:
    """Float32, or float64 where the inputs are float64 (an oracle under `jax_enable_x64`)."""
    return jnp.promote_types(jnp.float32, dtype)


def attend(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H V"],
    visible: Bool[Array, "B T S"],
    scale: float,
    output_dtype: jnp.dtype,
) -> Attended:
    """Softmax over the visible keys, in float32."""
    wide = island(q.dtype)
    q, k, values = q.astype(wide), k.astype(wide), v.astype(wide)
    scores = jnp.einsum("bthk,bshk->bths", q, k, precision="highest") * scale
    visible = visible[:, :, None]
    top = jnp.max(scores, axis=-1, where=visible, initial=LOWEST)
    weights = jnp.where(visible, jnp.exp(jnp.where(visible, scores, LOWEST) - lax.stop_gradient(top)[..., None]), 0.0)
    total = jnp.sum(weights, axis=-1)
    none = total == 0
    safe = jnp.where(none, 1.0, total)
    output = jnp.einsum("bths,bshv->bthv", weights, values, precision="highest") / safe[..., None]
    log_sum_exp = jnp.where(none, -jnp.inf, lax.stop_gradient(top) + jnp.log(safe))
    max_logit = lax.stop_gradient(jnp.max(scores, axis=(1, 3), where=visible, initial=-jnp.inf))
    return Attended(output.astype(output_dtype), log_sum_exp, max_logit)


def attention(q: Array, k: Array, v: Array, mask: Mask, scale: float, dtype: jnp.dtype) -> Attended:
    """Causal, inside the segments."""
    visible = (jnp.arange(k.shape[1]) <= jnp.arange(q.shape[1])[:, None] + mask.start)[None]
    if mask.ids is not None:
        queries, keys = mask.ids[0][:, :, None], mask.ids[1][:, None, :]
        visible = visible & (queries == keys) & (keys >= 0)
    return attend(q, k, v, visible, scale, dtype)


def expand(latents: Array, k_up: Array, v_up: Array) -> tuple[Array, Array]:
    """Keys and values of every head, in the latents' dtype."""
    rank, dtype = k_up.shape[0], latents.dtype
    precision, wide = matmul_precision(dtype), island(dtype)
    k, v = (
        jnp.einsum("bsr,rhn->bshn", latents[..., :rank], w, precision=precision, preferred_element_type=wide)
        for w in (k_up.astype(dtype), v_up.astype(dtype))
    )
    extra = jnp.broadcast_to(latents[:, :, None, rank:], (*k.shape[:3], latents.shape[-1] - rank))
    return jnp.concatenate([k.astype(dtype), extra], axis=-1), v.astype(dtype)


def matmul_precision(dtype: jnp.dtype) -> lax.Precision | None:
    """Full float32 for float32 operands, which accelerators would otherwise round."""
    return lax.Precision.HIGHEST if jnp.dtype(dtype).itemsize >= 4 else None


def chunk_attention(
    q: Array,
    latents: Array | Pages,
    k_up: Array,
    v_up: Array,
    positions: Int[Array, "B T"],
    key_positions: Int[Array, "B S"] | None,
    page_table: Int[Array, "B P"] | None,
    scale: float,
) -> Attended:
    """Expands all latents."""
    held: Array | bool = True
    if page_table is not None:
        assert isinstance(latents, Pages)
        latents, held = paging.read(latents, page_table, q.dtype)
    assert not isinstance(latents, Pages)
    k, v = expand(latents.astype(q.dtype), k_up, v_up)
    if key_positions is None:
        key_positions = jnp.broadcast_to(jnp.arange(k.shape[1]), k.shape[:2])
    key_positions = jnp.where(held, key_positions, -1)
    k, v = (jnp.where((key_positions >= 0)[..., None, None], x, 0) for x in (k, v))  # padding may hold NaN
    key_positions = key_positions[:, None]
    return attend(q, k, v, (key_positions >= 0) & (key_positions <= positions[:, :, None]), scale, v.dtype)


def paged_decode(
    q: Float[Array, "S H C"],
    new: Float[Array, "S C"],
    pages: Pages,
    page_table: Int[Array, "S P"],
    lengths: Int[Array, "S"],
    scale: float,
) -> tuple[Float[Array, "S H R"], Float[Array, "S H"], Pages]:
    """Write the new tokens, read whole sequences, attend."""
    pages = paging.write(pages, new[:, None], page_table, lengths[:, None] - 1)
    tokens, held = paging.read(pages, page_table, island(q.dtype))
    visible = held & (jnp.arange(tokens.shape[1]) < lengths[:, None])
    keys = jnp.where(visible[..., None], tokens, 0)[:, :, None]  # what was never written may hold NaN
    out = attend(q[:, None], keys, keys[..., : pages.rank], visible[:, None], scale, keys.dtype)
    return out.output[:, 0].astype(q.dtype), out.log_sum_exp[:, 0], pages
