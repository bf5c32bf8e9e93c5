"""The whole K3 text model: embedding, layers, output mix, final norm, head (spec text-model 2)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray

from k3jax.config import ModelConfig
from k3jax.nn import generate
from k3jax.nn.attn_res import Mix
from k3jax.nn.cache import Cache
from k3jax.nn.layer import Layer
from k3jax.nn.moe import RouterWatch
from k3jax.nn.norm import RMSNorm
from k3jax.nn.param import cast, island, matmul_precision, normal
from k3jax.nn.plan import Depth, StackPlan
from k3jax.nn.stack import StackInput, Trace, run_loop, run_scan


@dataclass(frozen=True)
class Output:
    """A forward pass: the normed hidden state before the head, the new cache, and the trace where asked for.

    `watched[kind]` is what the watch returned, stacked over the layers of `Transformer.stacks[kind]`.
    """

    hidden: Float[Array, "B T D"]
    cache: Cache | None
    trace: Trace | None
    watched: dict[str, Any]


class Transformer(nnx.Module):
    """Kimi K3. `stacks[kind]` holds all layers of a kind in depth order; `stack` and `remat` say how they run."""

    def __init__(
        self,
        config: ModelConfig,
        key: PRNGKeyArray,
        *,
        param_dtype: Any = "float32",
        stack: str = "scan",
        remat: str = "layer",
    ):
        self.config, self.stack, self.remat = config, stack, remat
        dtype, (embed_key, head_key, *keys) = jnp.dtype(param_dtype), jax.random.split(key, 6)
        shape, d = (config.vocab_size, config.width), config.width
        self.embed = normal(embed_key, shape, ("vocab", "embed"), std=config.init_std, dtype=dtype)
        self.stacks = nnx.Dict(
            {
                kind: jax.vmap(lambda k, kind=kind: Layer(config, kind, k, dtype=dtype))(
                    jax.random.split(key, len(layers))
                )
                for key, (kind, layers) in zip(keys, Depth(config).layers_of.items(), strict=False)
            }
        )
        self.out_mix = Mix(d, eps=config.norm_eps, dtype=dtype)
        self.final_norm = RMSNorm(d, eps=config.norm_eps, dtype=dtype)
        self.lm_head = normal(head_key, (d, shape[0]), ("embed", "vocab"), std=config.init_std, dtype=dtype)

    def __call__(
        self, tokens: Int[Array, "B T"], *, segment_ids: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T V"]:
        """Logits in float32; tokens see earlier tokens of their own segment (-1 is padding)."""
        return _logits(self, jnp.asarray(tokens), segment_ids)

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        cache: Cache | None = None,
        collect: bool = False,
        watch: RouterWatch | None = None,
    ) -> Output:
        """Run all layers. With a cache the tokens continue its sequences; segment ids are then 0, or -1 for padding.

        `watch` is shown the router of every MoE layer, once: a rematerialised pass does not run it again.
        """
        x = cast(self.embed, jnp.dtype(self.config.dtype))[tokens]
        if segment_ids is not None:  # zero times what padding holds is zero in values and in gradients
            x = jnp.where(segment_ids[..., None] >= 0, x, 0)
        remat = self.remat == "layer" and cache is None
        inputs = StackInput(self.config, segment_ids, cache, remat=remat, collect=collect, watch=watch)
        plan = StackPlan.of(self.config) if self.stack == "scan" else None
        out = run_scan(self.stacks, x, inputs, plan) if plan else run_loop(self.stacks, x, inputs)
        cache = out.cache
        if cache is not None:
            consumed = tokens.shape[1] if segment_ids is None else jnp.sum(segment_ids >= 0, axis=1, dtype=jnp.int32)
            cache = dataclasses.replace(cache, length=cache.length + consumed)
        return Output(self.final_norm(self.out_mix.of(out.residual)), cache, out.trace, out.watched)

    def logits(self, hidden: Float[Array, "*b D"]) -> Float[Array, "*b V"]:
        """The head, accumulated and returned in float32."""
        wide = island(hidden.dtype)
        head, precision = cast(self.lm_head, hidden.dtype), matmul_precision(hidden.dtype)
        return jnp.matmul(hidden, head, precision=precision, preferred_element_type=wide)

    def generate(
        self,
        tokens: Int[Array, "B T"],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        key: PRNGKeyArray | None = None,
    ) -> Int[Array, "B N"]:
        """Continue each row by `max_new_tokens` tokens: greedy, or sampled where `temperature` > 0 (needs `key`)."""
        return generate.generate(self, tokens, max_new_tokens=max_new_tokens, temperature=temperature, key=key)


@jax.jit
def _logits(model: Transformer, tokens: Array, segment_ids: Array | None) -> Array:
    return model.logits(model.hidden(tokens, segment_ids=segment_ids).hidden)
