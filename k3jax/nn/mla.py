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
from pallas_kernels.mla import attention, chunk_attention


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
            o = self._expanded(q, latent, segment_ids)
        else:
            latent, positions = _append(latent, segment_ids, cache, length)
            attend = self._absorbed if x.shape[1] == 1 else self._prefill
            o = attend(q, latent, positions)
        gate = jax.nn.sigmoid(project(x, self.out_gate))
        return project(o.astype(x.dtype) * gate, self.out, dims=2), latent

    def _latent(self, x: Float[Array, "B T D"]) -> Float[Array, "B T R"]:
        """[normed latent | extra key]: only the first kv_rank values are normed."""
        down = project(x, self.kv_down)
        return jnp.concatenate([self.kv_norm(down[..., : self.kv_rank]), down[..., self.kv_rank :]], axis=-1)

    def _expanded(
        self, q: Float[Array, "B T H C"], latent: Float[Array, "B T R"], segment_ids: Int[Array, "B T"] | None
    ) -> Float[Array, "B T H V"]:
        """Training: keys and values per head."""
        k, v = (project(latent[..., : self.kv_rank], w) for w in (self.k_up, self.v_up))
        extra = latent[:, :, None, self.kv_rank :]
        k = jnp.concatenate([k, jnp.broadcast_to(extra, (*k.shape[:3], extra.shape[-1]))], axis=-1)
        return attention(q, k, v, segment_ids=segment_ids, scale=self.scale).output

    def _prefill(
        self, q: Float[Array, "B T H C"], latent: Float[Array, "B S R"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T H V"]:
        """A chunk of queries against the cache, whose keys and values are never all expanded."""
        k_up, v_up = cast(self.k_up, q.dtype), cast(self.v_up, q.dtype)
        return chunk_attention(q, latent, k_up, v_up, positions=positions, scale=self.scale).output

    def _absorbed(
        self, q: Float[Array, "B T H C"], latent: Float[Array, "B S R"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T H V"]:
        """Decode: the up-projections move to the query and output side, keys and values are the latents themselves."""
        q_latent = _dot("bthn,rhn->bthr", q[..., : self.nope_dim], cast(self.k_up, q.dtype)).astype(q.dtype)
        query = jnp.concatenate([q_latent, q[..., self.nope_dim :]], axis=-1)
        visible = jnp.arange(latent.shape[1]) <= positions[:, :, None]
        weights = _softmax(_dot("bthr,bsr->bhts", query, latent) * self.scale, visible)
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


def _append(
    latent: Float[Array, "B T R"],
    segment_ids: Int[Array, "B T"] | None,
    cached: Float[Array, "B S R"],
    length: Int[Array, "B"],
) -> tuple[Float[Array, "B S R"], Int[Array, "B T"]]:
    """Write the new latents behind the cached ones (padding is dropped, never clipped); returns their positions too."""
    rows, steps, size = jnp.arange(latent.shape[0])[:, None], jnp.arange(latent.shape[1]), cached.shape[1]
    positions = length[:, None] + steps
    if segment_ids is not None:
        positions = jnp.where(segment_ids >= 0, positions, -1)
    target = jnp.where(positions >= 0, positions, size)
    return cached.at[rows, target].set(latent.astype(cached.dtype), mode="drop"), positions
