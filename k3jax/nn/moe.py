"""Stable LatentMoE: sigmoid router on the full width, experts in a latent space, one shared expert (text-model 2.6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from k3jax.config import ModelConfig
from k3jax.nn.ffn import FFN
from k3jax.nn.norm import RMSNorm
from k3jax.nn.param import RouterBias, cast, island, matmul_precision, normal, partial_product, project
from k3jax.nn.top_k import pick, top_k
from k3jax.nn.watch import NOTHING, Watch, show
from pallas_kernels.grouped_matmul import expert_ffn
from pallas_kernels.grouped_matmul.routing import combine_rows, gather_rows, sort_by_expert
from pallas_kernels.mx import MXFP4Array, fake_quantize_mxfp8
from sharding.expert_parallel import OUTPUT, PLAN, choose, load_of, route
from sharding.local import axes_of, count_of, size_of, total, total_of


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
            key, (config.width, c.num_experts), ("embed", "expert_scores"), std=config.width**-0.5, dtype=dtype
        )
        self.bias = RouterBias(jnp.zeros(c.num_experts, jnp.float32), axes=("expert_scores",))
        self.top_k, self.scaling_factor = c.top_k, c.scaling_factor

    def __call__(self, x: Float[Array, "B T D"], *, runners_up: int = 0) -> Choice:
        """The choice for each token, ranked down to the given number of runners-up; bf16 scores would flip choices."""
        wide = island(x.dtype)
        scores = jax.nn.sigmoid(project(x.astype(wide), self.weight))
        biased = jax.lax.stop_gradient(scores) + cast(self.bias, wide)
        ranked, experts = top_k(biased, self.top_k + runners_up)
        experts = experts[..., : self.top_k]
        experts = checkpoint_name(experts.reshape(-1), PLAN).reshape(experts.shape)  # flat, as TPUs pad short last dims
        weights = pick(scores, experts)
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
        self.w1 = normal(keys[2], (e, l, f), ("experts", "expert_latent", "expert_mlp"), std=l**-0.5, dtype=dtype)
        self.w3 = normal(keys[3], (e, l, f), ("experts", "expert_latent", "expert_mlp"), std=l**-0.5, dtype=dtype)
        self.w2 = normal(keys[4], (e, f, l), ("experts", "expert_mlp", "expert_latent"), std=f**-0.5, dtype=dtype)
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
        mixed = self.norm(self._routed(project(x, self.down), choice, valid))
        shown = {"experts": choice.experts, **show(watch, "router", lambda: self._view(choice, valid))}
        return total_of({"latent": partial_product(mixed, self.up), "mlp": self.shared.partial(x)}), shown

    def _view(self, choice: Choice, valid: Bool[Array, "B T"] | None) -> RouterView:
        bias, experts = self.router.bias.get_value(), choice.experts.reshape(-1, choice.experts.shape[-1])
        return RouterView(
            scores=jax.lax.stop_gradient(choice.scores),
            cutoff=choice.ranked[..., -1],
            bias=bias,
            valid=valid,
            load=load_of(experts, None if valid is None else valid.reshape(-1), bias.shape[-1]),
        )

    def _routed(
        self, latent: Float[Array, "B T L"], choice: Choice, valid: Bool[Array, "B T"] | None
    ) -> Float[Array, "B T L"]:
        """Mixed by weight, before the norm; whole or, like `latent`, a part: as `route` gives it."""
        flat, valid = latent.reshape(-1, latent.shape[-1]), None if valid is None else valid.reshape(-1)
        flat = fake_quantize_mxfp8(flat) if self.mxfp8 else flat  # once a token, not once a choice
        experts, weights = (x.reshape(flat.shape[0], -1) for x in (choice.experts, choice.weights))
        across = self._across_devices if axes_of("experts") else self._here
        mixed = total(across(flat, experts, weights, valid), "expert_mlp")
        return checkpoint_name(mixed.reshape(*latent.shape[:-1], -1).astype(latent.dtype), OUTPUT)

    def _here(
        self,
        latent: Float[Array, "S L"],
        experts: Int[Array, "S k"],
        weights: Float[Array, "S k"],
        valid: Bool[Array, " S"] | None,
    ) -> Float[Array, "S L"]:
        routing = sort_by_expert(experts, self.router.bias.shape[-1], valid)
        rows = gather_rows(latent, routing, experts.shape[1])
        out = self._compute(rows, self._expert_weights(latent.dtype), routing.group_sizes)
        return combine_rows(out, routing, weights)

    def _across_devices(
        self,
        latent: Float[Array, "S L"],
        experts: Int[Array, "S k"],
        weights: Float[Array, "S k"],
        valid: Bool[Array, " S"] | None,
    ) -> Float[Array, "S L"]:
        axes, count = axes_of("experts"), self.router.bias.shape[-1]
        token_axes = tuple(axis for axis in axes if axis in axes_of("batch", "seq"))
        own = self._expert_weights(latent.dtype)
        quantized = isinstance(own[0], MXFP4Array)
        form = choose(
            tokens=latent.shape[0] * count_of(token_axes) // size_of("experts"),
            top_k=experts.shape[1],
            latent=latent.shape[1] * size_of("latent"),
            hidden=own[0].shape[1 if quantized else 2],
            experts=count,
            devices=size_of("experts"),
            element_bytes=latent.dtype.itemsize,
            weight_bytes=0.53 if quantized else latent.dtype.itemsize,
        ).form
        if form == "balanced" and quantized:
            own = tuple(w.sliced() for w in own)
        return route(
            latent,
            experts,
            weights,
            valid,
            own,
            self._compute,
            count=count,
            axes=axes,
            form=form,
            token_axes=token_axes,
            latent_axes=axes_of("latent"),
        )

    def _compute(self, rows: Array, weights: Any, group_sizes: Array, row_weights: Array | None = None) -> Array:
        w1, w3, w2 = weights
        return expert_ffn(
            rows,
            w1,
            w3,
            w2,
            group_sizes,
            beta=self.beta,
            linear_beta=self.linear_beta,
            row_weights=row_weights,
            activations="mxfp8_hidden" if self.mxfp8 else "bf16",
            precision=matmul_precision(rows.dtype),
        )

    def _expert_weights(self, dtype: Any) -> tuple[Any, ...]:
        """Float weights in the compute dtype; MXFP4 leaves stay as they are."""
        values = ((w, w.get_value()) for w in (self.w1, self.w3, self.w2))
        return tuple(cast(w, dtype) if isinstance(value, jax.Array) else value for w, value in values)
