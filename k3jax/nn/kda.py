"""Kimi Delta Attention: gated delta-rule token mixing with a constant-size state (spec text-model 2.3)."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray

from k3jax.config import ModelConfig
from k3jax.nn.cache import KDACache
from k3jax.nn.norm import rms_normalise
from k3jax.nn.param import Param, cast, constant, island, normal, project
from k3jax.nn.watch import NOTHING, Watch
from pallas_kernels.kda import kda, kda_decode_step
from pallas_kernels.short_conv import short_conv
from sharding.context_parallel import context_parallel_kda, context_parallel_short_conv
from sharding.local import axis_of


class KDA(nnx.Module):
    """One KDA mixer. It keeps the recurrent state [H, K, V] float32 and the last conv inputs [W-1, 3 H, K]."""

    def __init__(self, config: ModelConfig, key: PRNGKeyArray, *, dtype: Any):
        c, d = config.kda, config.width
        h, k = c.num_heads, c.head_dim
        keys = jax.random.split(key, 12)
        heads = ("embed", "kda_heads", "head_dim")
        self.q = normal(keys[0], (d, h, k), heads, std=d**-0.5, dtype=dtype)
        self.k = normal(keys[1], (d, h, k), heads, std=d**-0.5, dtype=dtype)
        self.v = normal(keys[2], (d, h, k), heads, std=d**-0.5, dtype=dtype)
        taps = ("kda_heads", "head_dim", "conv")
        self.q_conv = normal(keys[3], (h, k, c.conv_width), taps, std=c.conv_width**-0.5, dtype=jnp.float32)
        self.k_conv = normal(keys[4], (h, k, c.conv_width), taps, std=c.conv_width**-0.5, dtype=jnp.float32)
        self.v_conv = normal(keys[5], (h, k, c.conv_width), taps, std=c.conv_width**-0.5, dtype=jnp.float32)
        self.decay_down = normal(keys[6], (d, k), ("embed", "low_rank"), std=d**-0.5, dtype=dtype)
        self.decay_up = normal(keys[7], (k, h, k), ("low_rank", "kda_heads", "head_dim"), std=k**-0.5, dtype=dtype)
        self.beta = normal(keys[8], (d, h), ("embed", "kda_heads"), std=d**-0.5, dtype=dtype)
        self.a_log = constant(0.0, (h,), ("kda_heads",), dtype=jnp.float32)
        self.dt_bias = _initial_dt_bias(keys[9], (h, k))
        self.out_gate = normal(keys[10], (d, h, k), heads, std=d**-0.5, dtype=dtype)
        self.out_norm = constant(1.0, (k,), ("head_dim",), dtype=jnp.float32)
        self.out = normal(keys[11], (h, k, d), ("kda_heads", "head_dim", "embed"), std=(h * k) ** -0.5, dtype=dtype)
        self.gate_lower_bound, self.norm_eps = c.gate_lower_bound, config.norm_eps

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        cache: KDACache | None = None,
        watch: Watch = NOTHING,
    ) -> tuple[Float[Array, "B T D"], KDACache | None, dict[str, Any]]:
        """Mix tokens; segment id -1 is padding. Returns the output, the cache after the last real token, and nothing
        to show.
        """
        qkv = jnp.concatenate([self._flat(project(x, w)) for w in (self.q, self.k, self.v)], axis=-1)
        taps = jnp.concatenate(
            [w.get_value().reshape(-1, w.shape[-1]) for w in (self.q_conv, self.k_conv, self.v_conv)]
        )
        gate = project(project(x, self.decay_down), self.decay_up)
        beta = jax.nn.sigmoid(project(x, self.beta).astype(island(x.dtype)))
        if cache is not None and x.shape[1] == 1:
            o, cache = self._one_token(qkv, taps, gate, beta, project(x, self.out_gate), cache)
            return project(o, self.out, dims=2), cache, {}
        state, history = (None, None) if cache is None else cache.rows()
        o, state, history = self._sequence(qkv, taps, gate, beta, state, history, segment_ids)
        cache = None if cache is None else cache.with_rows(state, history)
        return self._output(x, o), cache, {}

    def _sequence(self, qkv, taps, gate, beta, state, history, segment_ids):  # type: ignore[no-untyped-def]
        pieces: dict[str, Any] = {"axis": axis_of("seq"), "segment_ids": segment_ids}
        qkv, history = context_parallel_short_conv(short_conv, qkv, taps, initial_state=history, **pieces)
        q, k, v = self._heads(qkv)
        decay = self._decay()
        local: Any = partial(kda, lower_bound=decay.pop("lower_bound"))
        o, state = context_parallel_kda(local, q, k, v, gate, beta, initial_state=state, **decay, **pieces)
        return o, state, history

    def _one_token(self, qkv, taps, gate, beta, out_gate, cache: KDACache):  # type: ignore[no-untyped-def]
        """Conv, step, norm and gate of one token a row, on the pools in place. A row without a slot changes nothing."""
        channels = cache.history.shape[2:]  # as the pool has them: it must not be laid out anew
        o, history, state = kda_decode_step(
            qkv[:, 0].reshape(-1, *channels),
            gate[:, 0],
            beta[:, 0],
            out_gate[:, 0],
            cache.history,
            cache.state,
            cache.slots,
            conv_weights=taps.reshape(*channels, -1),
            norm_weight=cast(self.out_norm, cache.state.dtype),
            norm_eps=self.norm_eps,
            **self._decay(),
        )
        return o[:, None], dataclasses.replace(cache, state=state, history=history)

    def _decay(self) -> dict[str, Any]:
        parameters = {"a_log": self.a_log.get_value(), "dt_bias": self.dt_bias.get_value()}
        return {**parameters, "lower_bound": self.gate_lower_bound}

    def _output(self, x: Float[Array, "B T D"], o: Float[Array, "B T H V"]) -> Float[Array, "B T D"]:
        """RMS norm per head, then weight, then sigmoid gate, then the output projection."""
        wide = island(x.dtype)
        gate = jax.nn.sigmoid(project(x, self.out_gate).astype(wide))
        normed = rms_normalise(o, eps=self.norm_eps) * cast(self.out_norm, wide)
        return project((normed * gate).astype(x.dtype), self.out, dims=2)

    def _heads(self, qkv: Float[Array, "*b C"]) -> list[Float[Array, "*b H K"]]:
        h, k = self.a_log.shape[-1], self.out_norm.shape[-1]
        return [part.reshape(*part.shape[:-1], h, k) for part in jnp.split(qkv, 3, axis=-1)]

    @staticmethod
    def _flat(x: Float[Array, "B T H K"]) -> Float[Array, "B T C"]:
        return x.reshape(*x.shape[:2], -1)


def _initial_dt_bias(key: PRNGKeyArray, shape: tuple[int, int]) -> Param:
    """softplus^-1 of a time step drawn log-uniformly from [1e-3, 0.1]: slow decay at the start (spec training 8)."""
    dt = jnp.exp(jax.random.uniform(key, shape, jnp.float32, jnp.log(1e-3), jnp.log(0.1)))
    return Param(dt + jnp.log(-jnp.expm1(-dt)), axes=("kda_heads", "head_dim"))
