"""What a sequence keeps between forward passes: KDA states, conv history and MLA latents (spec text-model 5)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from k3jax.config import ModelConfig
from k3jax.nn.param import island


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Caches of B sequences, stacked over the KDA and the MLA layers in depth order; a row starts as all zeros.

    `state` is float32 whatever the compute dtype: rounding it loses what the model must remember.
    """

    state: Float[Array, "kda B H K V"]
    history: Float[Array, "kda B W C"]  # last inputs of the short convolutions, q | k | v
    latent: Float[Array, "mla B S R"]
    length: Int[Array, "B"]  # tokens consumed so far

    @classmethod
    def zeros(cls, config: ModelConfig, *, batch: int, max_len: int, dtype: Any = None) -> Cache:
        """An empty cache for `batch` sequences of up to `max_len` tokens, in the model's compute dtype."""
        dtype = jnp.dtype(dtype or config.dtype)
        kda, mla, num_mla = config.kda, config.mla, len(config.mla_layers)
        num_kda, h, k = config.num_layers - num_mla, kda.num_heads, kda.head_dim
        return cls(
            state=jnp.zeros((num_kda, batch, h, k, k), island(dtype)),
            history=jnp.zeros((num_kda, batch, kda.conv_width - 1, 3 * h * k), dtype),
            latent=jnp.zeros((num_mla, batch, max_len, mla.kv_rank + mla.extra_dim), dtype),
            length=jnp.zeros(batch, jnp.int32),
        )

    def read(self, is_mla: bool, index: int | Int[Array, ""]) -> Any:
        """What the MLA or KDA layer at `index` of its stack keeps: its latents, or (state, history)."""
        take = lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False)  # noqa: E731
        return take(self.latent) if is_mla else (take(self.state), take(self.history))

    def write(self, is_mla: bool, index: int | Int[Array, ""], value: Any) -> Cache:
        """This cache with what one layer keeps replaced."""
        put = lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, index, 0)  # noqa: E731
        if is_mla:
            return dataclasses.replace(self, latent=put(self.latent, value))
        return dataclasses.replace(self, state=put(self.state, value[0]), history=put(self.history, value[1]))

    def row(self, index: int | Int[Array, ""]) -> Cache:
        """The cache of one sequence, as a batch of one."""
        take = lambda x, axis: jax.lax.dynamic_index_in_dim(x, index, axis)  # noqa: E731
        return Cache(take(self.state, 1), take(self.history, 1), take(self.latent, 1), take(self.length, 0))

    def with_row(self, index: int | Int[Array, ""], row: Cache) -> Cache:
        """This cache with one sequence's cache replaced; `index` must lie inside the batch."""
        put = jax.lax.dynamic_update_index_in_dim
        return Cache(
            put(self.state, row.state, index, 1),
            put(self.history, row.history, index, 1),
            put(self.latent, row.latent, index, 1),
            put(self.length, row.length, index, 0),
        )
