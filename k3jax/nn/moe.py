"""Stable LatentMoE: sigmoid router on the full width, experts in a latent space, one shared expert (text-model 2.6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from k3jax.config import ModelConfig
from k3jax.nn.ffn import FFN
from k3jax.nn.norm import RMSNorm
from k3jax.nn.param import RouterBias, cast, island, matmul_precision, normal, project
from k3jax.nn.watch import NOTHING, Watch, show
from pallas_kernels.grouped_matmul import expert_ffn
from pallas_kernels.grouped_matmul.routing import Routing, combine_rows, gather_rows, sort_by_expert
from pallas_kernels.mx import fake_quantize_mxfp8


@dataclass(frozen=True, kw_only=True)
class RouterView:
    """What a watch sees of one layer's router; constants to the gradient."""

    scores: Float[Array, "B T E"]
    cutoff: Float[Array, "B T"]  # the best score plus bias among the experts not chosen
    bias: Float[Array, " E"]
    valid: Bool[Array, "B T"] | None
    load: Int[Array, " E"]  # rows given to each expert


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A router's choice: experts and weights of each token, all scores, and the ranked scores plus bias."""

    experts: Int[Array, "B T k"]
    weights: Float[Array, "B T k"]
    scores: Float[Array, "B T E"]
    ranked: Float[Array, "B T r"]  # of the chosen experts, then of the runners-up


class Router(nnx.Module):
    """Chooses top_k experts by score plus correction bias; the weights come from the unbiased scores."""

    def __init__(self, config: ModelConfig, key: PRNGKeyArray, *, dtype: Any):
        c = config.moe
        self.weight = normal(
            key, (config.width, c.num_experts), ("embed", "experts"), std=config.width**-0.5, dtype=dtype
        )
        self.bias = RouterBias(jnp.zeros(c.num_experts, jnp.float32), axes=("experts",))
        self.top_k, self.scaling_factor = c.top_k, c.scaling_factor

    def __call__(self, x: Float[Array, "B T D"], *, runners_up: int = 0) -> Choice:
        """The choice for each token, ranked down to the given number of runners-up; bf16 scores would flip choices."""
        wide = island(x.dtype)
        scores = jax.nn.sigmoid(project(x.astype(wide), self.weight))
        biased = jax.lax.stop_gradient(scores) + cast(self.bias, wide)
        ranked, experts = jax.lax.top_k(biased, self.top_k + runners_up)
        experts = experts[..., : self.top_k].astype(jnp.int32)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        weights = self.scaling_factor * weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return Choice(experts=experts, weights=weights, scores=scores, ranked=ranked)


class LatentMoE(nnx.Module):
    """up(RMSNorm(sum_e weight_e expert_e(down x))) + shared(x)."""

    def __init__(self, config: ModelConfig, key: PRNGKeyArray, *, dtype: Any):
        c, d = config.moe, config.width
        e, l, f = c.num_experts, c.latent_width, c.expert_width
        keys = jax.random.split(key, 7)
        self.router = Router(config, keys[0], dtype=dtype)
        self.down = normal(keys[1], (d, l), ("embed", "latent"), std=d**-0.5, dtype=dtype)
        self.w1 = normal(keys[2], (e, l, f), ("experts", "latent", "expert_mlp"), std=l**-0.5, dtype=dtype)
        self.w3 = normal(keys[3], (e, l, f), ("experts", "latent", "expert_mlp"), std=l**-0.5, dtype=dtype)
        self.w2 = normal(keys[4], (e, f, l), ("experts", "expert_mlp", "latent"), std=f**-0.5, dtype=dtype)
        self.norm = RMSNorm(l, eps=config.norm_eps, axis="latent", dtype=dtype)
        self.up = normal(keys[5], (l, d), ("latent", "embed"), std=l**-0.5, dtype=dtype)
        self.shared = FFN(config, c.shared_width, keys[6], dtype=dtype)
        self.beta, self.linear_beta = config.situ_beta, config.situ_linear_beta
        self.mxfp8 = c.activations == "mxfp8"

    def __call__(
        self, x: Float[Array, "B T D"], *, valid: Bool[Array, "B T"] | None = None, watch: Watch = NOTHING
    ) -> tuple[Float[Array, "B T D"], dict[str, Any]]:
        """Returns the output and what it shows: the tokens' `"experts"`, and for a watch its `"router"`.

        Tokens that are not `valid` take no expert's time.
        """
        choice = self.router(x, runners_up=int("router" in watch))
        routing = sort_by_expert(
            choice.experts.reshape(-1, self.router.top_k),
            self.router.weight.shape[-1],
            None if valid is None else valid.reshape(-1),
        )
        latent = project(x, self.down)
        mixed = self.norm(self._routed(latent, routing, choice.weights))
        shown = {"experts": choice.experts, **show(watch, "router", lambda: self._view(choice, routing, valid))}
        return project(mixed, self.up) + self.shared(x), shown

    def _view(self, choice: Choice, routing: Routing, valid: Bool[Array, "B T"] | None) -> RouterView:
        return RouterView(
            scores=jax.lax.stop_gradient(choice.scores),
            cutoff=choice.ranked[..., -1],
            bias=self.router.bias.get_value(),
            valid=valid,
            load=routing.group_sizes,
        )

    def _routed(
        self, latent: Float[Array, "B T L"], routing: Routing, weights: Float[Array, "B T k"]
    ) -> Float[Array, "B T L"]:
        flat, top_k = latent.reshape(-1, latent.shape[-1]), weights.shape[-1]
        flat = fake_quantize_mxfp8(flat) if self.mxfp8 else flat  # once a token, not once a choice
        w1, w3, w2 = (self._expert_weight(w, latent.dtype) for w in (self.w1, self.w3, self.w2))
        rows = expert_ffn(
            gather_rows(flat, routing, top_k),
            w1,
            w3,
            w2,
            routing.group_sizes,
            beta=self.beta,
            linear_beta=self.linear_beta,
            activations="mxfp8_hidden" if self.mxfp8 else "bf16",
            precision=matmul_precision(latent.dtype),
        )
        return combine_rows(rows, routing, weights.reshape(-1, top_k)).reshape(latent.shape).astype(latent.dtype)

    @staticmethod
    def _expert_weight(weight: nnx.Variable, dtype: Any) -> Any:
        """A float weight in the compute dtype; an MXFP4 leaf stays as it is."""
        value = weight.get_value()
        return value.astype(dtype) if isinstance(value, jax.Array) else value
