"""Gated multi-head latent attention without rotary positions (spec text-model 2.4)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from k3jax.config import ModelConfig
from k3jax.nn.norm import RMSNorm
from k3jax.nn.param import cast, island, matmul_precision, normal, project

QUERY_CHUNK = 512  # queries whose [chunk, S] scores exist at one time


class MLA(nnx.Module):
    """One MLA mixer. Its cache holds, per token, the normed latent and the shared extra key: [B, S, R + extra]."""

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
        cache: Float[Array, "B S R"] | None = None,
        length: Int[Array, "B"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B S R"]]:
        """Mix tokens causally inside their segments (-1 is padding); returns the output and the latents.

        With a `cache`, of which the first `length` tokens of each row are in use, the new tokens join it and see it.
        """
        q = project(self.q_norm(project(x, self.q_down)), self.q_up)
        latent = self._latent(x)
        if cache is None or length is None:
            mask = _same_segment_and_earlier(segment_ids, x.shape[1])
        else:
            latent, mask = _append(latent, segment_ids, cache, length)
        attend = self._absorbed if cache is not None and x.shape[1] == 1 else self._expanded
        o = attend(q, latent, mask)
        gate = jax.nn.sigmoid(project(x, self.out_gate))
        return project(o.astype(x.dtype) * gate, self.out, dims=2), latent

    def _latent(self, x: Float[Array, "B T D"]) -> Float[Array, "B T R"]:
        """[normed latent | extra key]: only the first kv_rank values are normed."""
        down = project(x, self.kv_down)
        return jnp.concatenate([self.kv_norm(down[..., : self.kv_rank]), down[..., self.kv_rank :]], axis=-1)

    def _expanded(
        self, q: Float[Array, "B T H C"], latent: Float[Array, "B S R"], mask: Bool[Array, "b T S"]
    ) -> Float[Array, "B T H V"]:
        """Training and prefill: keys and values per head, heads first, a chunk of queries at a time."""
        k, v = (project(latent[..., : self.kv_rank], w).swapaxes(1, 2) for w in (self.k_up, self.v_up))
        extra = latent[:, None, :, self.kv_rank :]
        k = jnp.concatenate([k, jnp.broadcast_to(extra, (*k.shape[:3], extra.shape[-1]))], axis=-1)

        def attend(q: Float[Array, "B H C K"], mask: Bool[Array, "b C S"]) -> Float[Array, "B H C V"]:
            weights = _softmax(_dot("bhtk,bhsk->bhts", q, k) * self.scale, mask)
            return _dot("bhts,bhsv->bhtv", weights.astype(v.dtype), v)

        q = q.swapaxes(1, 2)
        if q.shape[2] <= QUERY_CHUNK:
            return attend(q, mask).swapaxes(1, 2)
        spans = [slice(i, i + QUERY_CHUNK) for i in range(0, q.shape[2], QUERY_CHUNK)]
        remat = jax.checkpoint(attend)
        return jnp.concatenate([remat(q[:, :, span], mask[:, span]) for span in spans], axis=2).swapaxes(1, 2)

    def _absorbed(
        self, q: Float[Array, "B T H C"], latent: Float[Array, "B S R"], mask: Bool[Array, "b T S"]
    ) -> Float[Array, "B T H V"]:
        """Decode: the up-projections move to the query and output side, keys and values are the latents themselves."""
        q_latent = _dot("bthn,rhn->bthr", q[..., : self.nope_dim], cast(self.k_up, q.dtype)).astype(q.dtype)
        query = jnp.concatenate([q_latent, q[..., self.nope_dim :]], axis=-1)
        weights = _softmax(_dot("bthr,bsr->bhts", query, latent) * self.scale, mask)
        context = _dot("bhts,bsr->bthr", weights.astype(latent.dtype), latent[..., : self.kv_rank])
        return _dot("bthr,rhv->bthv", context.astype(q.dtype), cast(self.v_up, q.dtype))


def _dot(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, precision=matmul_precision(a.dtype), preferred_element_type=island(a.dtype))


def _softmax(scores: Float[Array, "B H T S"], mask: Bool[Array, "b T S"]) -> Float[Array, "B H T S"]:
    """Softmax over the visible keys; a query that sees none (padding) gets zeros rather than NaN."""
    mask = mask[:, None]
    scores = jnp.where(mask, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True, initial=-1e30)
    weights = jnp.where(mask, jnp.exp(scores - jax.lax.stop_gradient(top)), 0.0)
    return weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1e-30)


def _same_segment_and_earlier(segment_ids: Int[Array, "B T"] | None, length: int) -> Bool[Array, "b T T"]:
    causal = jnp.tril(jnp.ones((length, length), bool))[None]
    if segment_ids is None:
        return causal
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    return causal & same & (segment_ids >= 0)[:, None, :]


def _append(
    latent: Float[Array, "B T R"],
    segment_ids: Int[Array, "B T"] | None,
    cached: Float[Array, "B S R"],
    length: Int[Array, "B"],
) -> tuple[Float[Array, "B S R"], Bool[Array, "B T S"]]:
    """Write the new latents behind the cached ones (padding is dropped, never clipped) and say what each query sees."""
    rows, steps, size = jnp.arange(latent.shape[0])[:, None], jnp.arange(latent.shape[1]), cached.shape[1]
    position = length[:, None] + steps
    target = position if segment_ids is None else jnp.where(segment_ids >= 0, position, size)
    cached = cached.at[rows, target].set(latent.astype(cached.dtype), mode="drop")
    return cached, jnp.arange(size) <= position[:, :, None]
