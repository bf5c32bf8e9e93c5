"""Multi-token prediction: one more layer that predicts the token after the next (DeepSeek-V3, arXiv:2412.19437, 2.2).

K3 was pre-trained with one such layer, which mirrors a layer of the model; the release leaves it out (training 8). It
reads the model's hidden state at token t and the embedding of token t + 1, and its output goes through the model's own
head. Attention Residuals are off in it: with an empty bank a read is the live sum itself.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray

from k3jax.config import ModelConfig
from k3jax.nn.layer import Layer
from k3jax.nn.norm import RMSNorm
from k3jax.nn.param import island, normal, project
from k3jax.nn.watch import NOTHING, Watch
from pallas_kernels.attn_res import BankRead

KIND = "mla_moe"  # of the layer


class MTP(nnx.Module):
    """norm(layer(join [norm(embedding of the next token) | norm(hidden)]))."""

    def __init__(self, config: ModelConfig, key: PRNGKeyArray, *, dtype: Any):
        d, eps = config.width, config.norm_eps
        join_key, layer_key = jax.random.split(key)
        self.embed_norm = RMSNorm(d, eps=eps, dtype=dtype)
        self.hidden_norm = RMSNorm(d, eps=eps, dtype=dtype)
        self.join = normal(join_key, (2 * d, d), ("mtp_pair", "embed"), std=(2 * d) ** -0.5, dtype=dtype)
        self.layer = Layer(config, KIND, layer_key, dtype=dtype)
        self.norm = RMSNorm(d, eps=eps, dtype=dtype)

    def __call__(
        self,
        hidden: Float[Array, "B T D"],
        next_embedding: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None,
        watch: Watch = NOTHING,
    ) -> tuple[Float[Array, "B T D"], dict[str, Any]]:
        """What the head reads to predict the token after the next, and what the layer shows."""
        pair = jnp.concatenate([self.embed_norm(next_embedding), self.hidden_norm(hidden)], axis=-1)
        x = project(pair, self.join)
        empty = BankRead(jnp.zeros((2, *x.shape), x.dtype), jnp.full((2, *x.shape[:-1]), -jnp.inf, island(x.dtype)))
        out, _, shown = self.layer(empty, x, True, segment_ids=segment_ids, watch=watch)
        return self.norm(out), shown
