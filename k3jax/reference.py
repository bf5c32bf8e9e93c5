"""The whole K3 text model in plain `jnp`, one layer at a time, straight from checkpoint tensors: the oracle.

No module, no scan over layers, no kernel, no mesh: it reads like the paper and shares no code with `k3jax.nn`. Weights
are a mapping of released tensor names (without MXFP4: `k3jax.hf_tensors(model, dense=True)`) to arrays [out, in].
Equations: Kimi K3 technical report, arXiv 2607.24653; numbers of steps in the comments follow it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from k3jax.config import ModelConfig

Tensors = Mapping[str, Any]
PREFIX = "language_model."


def forward(
    config: ModelConfig, tensors: Tensors, tokens: Int[Array, "*b T"], *, dtype: str = "float32"
) -> tuple[Float[Array, "*b T V"], Float[Array, "L *b T D"], Int[Array, "M *b T k"]]:
    """Logits, the running sum after each layer, and the sorted expert ids of each MoE layer, all in `dtype`."""
    tokens = jnp.asarray(tokens)
    weights = {name.removeprefix(PREFIX): jnp.asarray(value).astype(dtype) for name, value in tensors.items()}
    if tokens.ndim == 1:
        return _forward(config, weights, tokens)
    rows = [_forward(config, weights, row) for row in tokens]
    logits, hidden, routes = zip(*rows, strict=True)
    return jnp.stack(logits), jnp.stack(hidden, axis=1), jnp.stack(routes, axis=1)


def loss(
    config: ModelConfig, tensors: Tensors, tokens: Int[Array, "*b T"], *, dtype: str = "float32"
) -> Float[Array, ""]:
    """Mean cross-entropy in nats of each token after the first."""
    logits = forward(config, tensors, tokens, dtype=dtype)[0][..., :-1, :]
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    return -jnp.mean(jnp.take_along_axis(log_probs, jnp.asarray(tokens)[..., 1:, None], axis=-1))


def _forward(config: ModelConfig, tensors: Tensors, tokens: Int[Array, "T"]) -> tuple[Array, Array, Array]:
    running = tensors["model.embed_tokens.weight"][tokens]  # s; the embedding is the first sum
    sealed: list[Array] = []
    hidden, routes = [], []
    for layer in range(config.num_layers):
        w = _Scope(tensors, f"model.layers.{layer}.")
        x = _mix(config, [*sealed, running], w("self_attention_res_norm.weight"), w("self_attention_res_proj.weight"))
        if layer % config.attn_res_block == 0:  # read before the seal
            sealed, running = [*sealed, running], jnp.zeros_like(running)
        attention = _mla if config.is_mla(layer) else _kda
        running += attention(config, w.scope("self_attn."), _rms(x, config.norm_eps) * w("input_layernorm.weight"))
        x = _mix(config, [*sealed, running], w("mlp_res_norm.weight"), w("mlp_res_proj.weight"))
        x = _rms(x, config.norm_eps) * w("post_attention_layernorm.weight")
        if layer < config.num_dense_layers:
            running += _mlp(config, x, w.scope("mlp."))
        else:
            y, experts = _moe(config, w.scope("block_sparse_moe."), x)
            running += y
            routes.append(jnp.sort(experts, axis=-1))
        hidden.append(running)
    w = _Scope(tensors, "model.")
    x = _mix(config, [*sealed, running], w("output_attn_res_norm.weight"), w("output_attn_res_proj.weight"))
    logits = _rms(x, config.norm_eps) * w("norm.weight") @ tensors["lm_head.weight"].T
    return logits, jnp.stack(hidden), jnp.stack(routes)


class _Scope:
    """Tensors whose names begin with a prefix."""

    def __init__(self, tensors: Tensors, prefix: str):
        self.tensors, self.prefix = tensors, prefix

    def __call__(self, name: str) -> Array:
        return self.tensors[self.prefix + name]

    def scope(self, prefix: str) -> _Scope:
        return _Scope(self.tensors, self.prefix + prefix)


def _rms(x: Array, eps: float) -> Array:
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def _mix(config: ModelConfig, sources: list[Array], norm: Array, query: Array) -> Array:
    """Attention Residuals: softmax over depth, keys normalised, values raw."""
    values = jnp.stack(sources)
    scores = (_rms(values, config.norm_eps) * norm) @ query[0]
    return jnp.sum(jax.nn.softmax(scores, axis=0)[..., None] * values, axis=0)


def _situ(config: ModelConfig, gate: Array, up: Array) -> Array:
    beta, linear_beta = config.situ_beta, config.situ_linear_beta
    return beta * jnp.tanh(gate / beta) * jax.nn.sigmoid(gate) * linear_beta * jnp.tanh(up / linear_beta)


def _mlp(config: ModelConfig, x: Array, w: _Scope) -> Array:
    return _situ(config, x @ w("gate_proj.weight").T, x @ w("up_proj.weight").T) @ w("down_proj.weight").T


def _moe(config: ModelConfig, w: _Scope, x: Float[Array, "T D"]) -> tuple[Array, Array]:
    """Every expert on every token, weighted by a mask: slow and obvious."""
    moe = config.moe
    scores = jax.nn.sigmoid(x @ w("gate.weight").T)
    experts = jnp.argsort(-(scores + w("gate.e_score_correction_bias")), axis=-1)[:, : moe.top_k]
    chosen = jnp.sum(jax.nn.one_hot(experts, moe.num_experts, dtype=x.dtype), axis=1)
    weights = scores * chosen
    weights = moe.scaling_factor * weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    latent = x @ w("routed_expert_down_proj.weight").T
    mixed = jnp.zeros_like(latent)
    for expert in range(moe.num_experts):
        e = w.scope(f"experts.{expert}.")
        y = _situ(config, latent @ e("w1.weight").T, latent @ e("w3.weight").T) @ e("w2.weight").T
        mixed += weights[:, expert, None] * y
    mixed = _rms(mixed, config.norm_eps) * w("routed_expert_norm.weight")
    return mixed @ w("routed_expert_up_proj.weight").T + _mlp(config, x, w.scope("shared_experts.")), experts


def _mla(config: ModelConfig, w: _Scope, x: Float[Array, "T D"]) -> Array:
    mla, length = config.mla, len(x)
    h, n = mla.num_heads, mla.nope_dim
    q = _rms(x @ w("q_a_proj.weight").T, mla.latent_norm_eps) * w("q_a_layernorm.weight") @ w("q_b_proj.weight").T
    q = q.reshape(length, h, n + mla.extra_dim)
    down = x @ w("kv_a_proj_with_mqa.weight").T
    latent = _rms(down[:, : mla.kv_rank], mla.latent_norm_eps) * w("kv_a_layernorm.weight")
    extra = down[:, mla.kv_rank :]  # neither normed nor rotated, shared by all heads
    kv = (latent @ w("kv_b_proj.weight").T).reshape(length, h, n + mla.v_dim)
    k, v = kv[..., :n], kv[..., n:]
    scores = jnp.einsum("thn,shn->hts", q[..., :n], k) + jnp.einsum("the,se->hts", q[..., n:], extra)
    scores = scores * (n + mla.extra_dim) ** -0.5
    causal = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    o = jnp.einsum("hts,shv->thv", weights, v).reshape(length, -1)
    return (o * jax.nn.sigmoid(x @ w("g_proj.weight").T)) @ w("o_proj.weight").T


def _kda(config: ModelConfig, w: _Scope, x: Float[Array, "T D"]) -> Array:
    c, length = config.kda, len(x)
    heads = (length, c.num_heads, c.head_dim)
    q, k, v = (_short_conv(x @ w(f"{n}_proj.weight").T, w(f"{n}_conv1d.weight")).reshape(heads) for n in "qkv")
    q, k = (y / jnp.sqrt(jnp.sum(y * y, axis=-1, keepdims=True) + 1e-6) for y in (q, k))
    gate = (x @ w("f_a_proj.weight").T @ w("f_b_proj.weight").T + w("dt_bias")).reshape(heads)
    decay = c.gate_lower_bound * jax.nn.sigmoid(jnp.exp(w("A_log")[: c.num_heads, None]) * gate)  # log alpha
    beta = jax.nn.sigmoid(x @ w("b_proj.weight").T)

    def step(state: Float[Array, "H K V"], token: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, decay, beta = token
        state = jnp.exp(decay)[..., None] * state  # decay, predict, write, read: in this order
        error = v - jnp.einsum("hkv,hk->hv", state, k)
        state = state + jnp.einsum("hk,hv->hkv", k, beta[:, None] * error)
        return state, jnp.einsum("hkv,hk->hv", state, q)

    start = jnp.zeros((c.num_heads, c.head_dim, c.head_dim), x.dtype)
    _, o = jax.lax.scan(step, start, (q * c.head_dim**-0.5, k, v, decay, beta))
    o = _rms(o, config.norm_eps) * w("o_norm.weight") * jax.nn.sigmoid(x @ w("g_proj.weight").T).reshape(heads)
    return o.reshape(length, -1) @ w("o_proj.weight").T


def _short_conv(x: Float[Array, "T C"], taps: Float[Array, "C 1 W"]) -> Array:
    """Depthwise causal convolution and SiLU; the last tap multiplies the current token."""
    width = taps.shape[-1]
    padded = jnp.concatenate([jnp.zeros((width - 1, x.shape[1]), x.dtype), x])
    return jax.nn.silu(sum(taps[:, 0, j] * padded[j : j + len(x)] for j in range(width)))
