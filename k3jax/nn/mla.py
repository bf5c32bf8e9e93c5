"""Gated multi-head latent attention without rotary positions (spec text-model 2.4)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray

from k3jax.config import ModelConfig
from k3jax.nn.cache import MLACache
from k3jax.nn.norm import RMSNorm
from k3jax.nn.param import cast, island, matmul_precision, normal, project
from k3jax.nn.watch import NOTHING, Watch, show
from pallas_kernels.mla import Pages, attention, chunk_attention, paged_decode, read, write
from sharding.local import axes_of, index_of, joined
from sharding.pages import PAGE, all_pages, held_here, merged_heads, table_for_next


class MLA(nnx.Module):
    """One MLA mixer. It keeps, for each token, the normed latent and the shared extra key: R + extra values."""

    def __init__(self, config: ModelConfig, key: PRNGKeyArray, *, dtype: Any):
        c, d = config.mla, config.width
        h, r, n, e, v = c.num_heads, c.kv_rank, c.nope_dim, c.extra_dim, c.v_dim
        keys = jax.random.split(key, 7)
        self.q_down = normal(keys[0], (d, c.q_rank), ("embed", "q_rank"), std=d**-0.5, dtype=dtype)
        self.q_norm = RMSNorm(c.q_rank, eps=c.latent_norm_eps, axis="q_rank", dtype=dtype)
        self.q_up = normal(
            keys[1], (c.q_rank, h, n + e), ("q_rank", "mla_heads", "qk_dim"), std=c.q_rank**-0.5, dtype=dtype
        )
        self.kv_down = normal(keys[2], (d, r + e), ("embed", "kv_rank"), std=d**-0.5, dtype=dtype)
        self.kv_norm = RMSNorm(r, eps=c.latent_norm_eps, axis="kv_rank", dtype=dtype)
        self.k_up = normal(keys[3], (r, h, n), ("kv_rank", "mla_heads", "nope_dim"), std=r**-0.5, dtype=dtype)
        self.v_up = normal(keys[4], (r, h, v), ("kv_rank", "mla_heads", "v_dim"), std=r**-0.5, dtype=dtype)
        self.out_gate = normal(keys[5], (d, h, v), ("embed", "mla_heads", "v_dim"), std=d**-0.5, dtype=dtype)
        self.out = normal(keys[6], (h, v, d), ("mla_heads", "v_dim", "embed"), std=(h * v) ** -0.5, dtype=dtype)
        self.kv_rank, self.nope_dim, self.scale = r, n, (n + e) ** -0.5

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        cache: MLACache | None = None,
        watch: Watch = NOTHING,
    ) -> tuple[Float[Array, "B T D"], MLACache | None, dict[str, Any]]:
        """Mix tokens causally inside their segments (-1 is padding); returns the output, the cache and what it shows.

        With a `cache` the new tokens join it and see it. Without one it shows a watch its `"max_logit"`, [B, H].
        """
        q = project(self.q_norm(project(x, self.q_down)), self.q_up)
        latent = self._latent(x)
        shown: dict[str, Any] = {}
        if cache is None:
            o, max_logit = self._expanded(q, latent, segment_ids)
            shown = show(watch, "max_logit", lambda: max_logit)
        else:
            attend = self._one_token if x.shape[1] == 1 else self._chunk
            o, cache = attend(q, latent, segment_ids, cache)
        gate = jax.nn.sigmoid(project(x, self.out_gate))
        return project((o * gate).astype(x.dtype), self.out, dims=2), cache, shown

    def _latent(self, x: Float[Array, "B T D"]) -> Float[Array, "B T R"]:
        """[normed latent | extra key]: only the first kv_rank values are normed."""
        down = project(x, self.kv_down)
        return jnp.concatenate([self.kv_norm(down[..., : self.kv_rank]), down[..., self.kv_rank :]], axis=-1)

    def _expanded(
        self, q: Float[Array, "B T H C"], latent: Float[Array, "B T R"], segment_ids: Int[Array, "B T"] | None
    ) -> tuple[Float[Array, "B T H V"], Float[Array, "B H"]]:
        """Training: keys and values per head. The output stays wide up to the gate: rounding it biases the gradient."""
        latent = joined(latent, "seq", dim=1)
        k, v = (project(latent[..., : self.kv_rank], w) for w in (self.k_up, self.v_up))
        extra = latent[:, :, None, self.kv_rank :]
        k = jnp.concatenate([k, jnp.broadcast_to(extra, (*k.shape[:3], extra.shape[-1]))], axis=-1)
        out = attention(
            q,
            k,
            v,
            segment_ids=segment_ids,
            kv_segment_ids=None if segment_ids is None else joined(segment_ids, "seq", dim=1),
            q_offset=index_of("seq") * q.shape[1],
            scale=self.scale,
            output_dtype=island(q.dtype),
        )
        return out.output, out.max_logit

    def _chunk(
        self, q: Float[Array, "B T H C"], latent: Float[Array, "B T R"], ids: Int[Array, "B T"] | None, cache: MLACache
    ) -> tuple[Float[Array, "B T H V"], MLACache]:
        """Prefill: a chunk of queries against the pages, whose keys and values are never all expanded.

        Padding behind a row's tokens is written as zeros as far as the row has pages, so that a page holds nothing of
        its last owner: a masked key has weight zero, but zero times NaN is NaN.
        """
        first, latent = q.shape[1] * index_of("seq"), joined(latent, "seq", dim=1)
        positions = cache.length[:, None] + jnp.arange(latent.shape[1])
        seen = cache.length[:, None] + first + jnp.arange(q.shape[1])
        if ids is not None:
            seen, real = jnp.where(ids >= 0, seen, -1), joined(ids, "seq", dim=1) >= 0
            positions = jnp.where(jnp.any(real, axis=1, keepdims=True), positions, -1)
            latent = jnp.where(real[..., None], latent, 0)
        pages = write(cache.pages, latent, cache.page_table, held_here(positions, cache.pages.page))
        k_up, v_up = cast(self.k_up, q.dtype), cast(self.v_up, q.dtype)
        keys = _keys(pages, cache.page_table, q.dtype)
        out = chunk_attention(q, k_up=k_up, v_up=v_up, positions=seen, scale=self.scale, **keys)
        return out.output, dataclasses.replace(cache, pages=pages)

    def _one_token(
        self, q: Float[Array, "B 1 H C"], latent: Float[Array, "B 1 R"], ids: Int[Array, "B 1"] | None, cache: MLACache
    ) -> tuple[Float[Array, "B 1 H V"], MLACache]:
        """Decode: the up-projections move to the query and output side, keys and values are the latents themselves."""
        query = _dot("bhn,rhn->bhr", q[:, 0, :, : self.nope_dim], cast(self.k_up, q.dtype)).astype(q.dtype)
        query = jnp.concatenate([query, q[:, 0, :, self.nope_dim :]], axis=-1)
        table, lengths = table_for_next(cache.page_table, cache.length, cache.pages.page)
        lengths = lengths if ids is None else jnp.where(ids[:, 0] >= 0, lengths, 0)
        query = joined(query, "mla_heads", dim=1) if axes_of(PAGE) else query
        context, sums, pages = paged_decode(query, latent[:, 0], cache.pages, table, lengths, scale=self.scale)
        context = merged_heads(context, sums, "mla_heads")
        o = _dot("bhr,rhv->bhv", context, cast(self.v_up, q.dtype))
        return o[:, None], dataclasses.replace(cache, pages=pages)


def _keys(pages: Pages, table: Int[Array, "B P"], dtype: Any) -> dict[str, Any]:
    """What `chunk_attention` reads: the pages, or where devices hold pieces of them the tokens of all pieces."""
    if not axes_of(PAGE):
        return {"latents": pages, "page_table": table}
    tokens, _ = read(pages, table, dtype)
    tokens, positions = all_pages(tokens.reshape(*table.shape, pages.page, -1))
    held = jnp.take(table, positions // (tokens.shape[1] // table.shape[1]), axis=1) >= 0
    return {"latents": tokens, "key_positions": jnp.where(held, positions, -1)}


def _dot(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, precision=matmul_precision(a.dtype), preferred_element_type=island(a.dtype))
