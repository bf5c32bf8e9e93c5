"""One decoder layer: two reads of the residual, one for the token mixer (KDA or MLA), one for the FFN or MoE."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from k3jax.config import ModelConfig
from k3jax.nn.attn_res import Mix
from k3jax.nn.ffn import FFN
from k3jax.nn.kda import KDA
from k3jax.nn.mla import MLA
from k3jax.nn.moe import LatentMoE
from k3jax.nn.norm import RMSNorm
from k3jax.nn.watch import NOTHING, Watch
from pallas_kernels.attn_res import BankRead


class Layer(nnx.Module):
    """A layer of one kind: `"kda_dense"`, `"kda_moe"`, `"mla_dense"` or `"mla_moe"`."""

    kda_class, mix_class = KDA, Mix  # an experiment's subclass names its own

    def __init__(self, config: ModelConfig, kind: str, key: PRNGKeyArray, *, dtype: Any):
        mixer_key, ffn_key = jax.random.split(key)
        width, eps = config.width, config.norm_eps
        self.mixer_mix = self.mix_class(width, eps=eps, dtype=dtype)
        self.mixer_norm = RMSNorm(width, eps=eps, dtype=dtype)
        self.mixer = (self.kda_class if kind.startswith("kda") else MLA)(config, mixer_key, dtype=dtype)
        self.ffn_mix = self.mix_class(width, eps=eps, dtype=dtype)
        self.ffn_norm = RMSNorm(width, eps=eps, dtype=dtype)
        self.ffn: LatentMoE | FFN = (
            LatentMoE(config, ffn_key, dtype=dtype)
            if kind.endswith("moe")
            else FFN(config, config.dense_width, ffn_key, dtype=dtype)
        )

    def queries(self, dtype: Any) -> Float[Array, "*lead 2 D"]:
        """The folded queries of the two reads, of one layer or of stacked ones."""
        return jnp.stack([self.mixer_mix.folded(dtype), self.ffn_mix.folded(dtype)], axis=-2)

    def __call__(
        self,
        bank: BankRead,
        live: Float[Array, "B T D"],
        has_live: bool | Bool[Array, ""],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        cache: Any = None,
        watch: Watch = NOTHING,
    ) -> tuple[Float[Array, "B T D"], Any, dict[str, Any]]:
        """Returns the live sum after the layer, the mixer's new cache and what mixer and MoE show.

        `bank` is what the two reads saw of the bank; `live` is the live sum, empty (zero) unless `has_live`. Sums are
        rounded to the compute dtype, as in the released model.
        """
        first, second = (jax.tree.map(lambda x, i=i: x[i], bank) for i in range(2))
        live, x = self.mixer_mix(first, live, has_live, self.mixer_norm)
        y, cache, shown = self.mixer(x, segment_ids=segment_ids, cache=cache, watch=watch)
        live, x = self.ffn_mix(second, live, True, self.ffn_norm, update=y)
        if isinstance(self.ffn, FFN):
            return live + self.ffn(x), cache, shown
        y, routed = self.ffn(x, valid=None if segment_ids is None else segment_ids >= 0, watch=watch)
        return live + y, cache, shown | routed
