"""The whole K3 model: embedding, images in it, layers, output mix, final norm, head (spec text-model 2)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray

from k3jax.config import ModelConfig
from k3jax.nn import generate
from k3jax.nn.cache import Cache
from k3jax.nn.embed import embed_tokens
from k3jax.nn.layer import Layer
from k3jax.nn.loss import head_logits
from k3jax.nn.mtp import MTP
from k3jax.nn.norm import RMSNorm
from k3jax.nn.param import cast, normal
from k3jax.nn.plan import Depth, StackPlan
from k3jax.nn.slots import StackInput
from k3jax.nn.stack import Trace, run_loop, run_scan
from k3jax.nn.vision import Vision, check_no_places, insert_features, pack_rows
from k3jax.nn.watch import NOTHING, Watch
from sharding.local import joined, total


@dataclass(frozen=True)
class Output:
    """A forward pass: the normed hidden state before the head, the new cache, and the trace where asked for.

    `watched[kind][name]` is what the watch of that name returned, stacked over the layers of `stacks[kind]`.
    """

    hidden: Float[Array, "B T D"]
    cache: Cache | None
    trace: Trace | None
    watched: dict[str, dict[str, Any]]


class Transformer(nnx.Module):
    """Kimi K3. `stacks[kind]` holds all layers of a kind in depth order; `stack` and `remat` say how they run.

    `remat` names what the backward pass computes again: "layer" (every layer), "none", or kinds of layers, as in
    "kda_moe,mla_moe". `with_mtp` adds the layer of multi-token prediction, which only training has.
    """

    layer_class: type[Layer] = Layer  # an experiment's subclass names its own

    def __init__(
        self,
        config: ModelConfig,
        key: PRNGKeyArray,
        *,
        param_dtype: Any = "float32",
        stack: str = "scan",
        remat: str = "layer",
        with_mtp: bool = False,
    ):
        self.config, self.stack, self.remat = config, stack, remat
        dtype, (embed_key, head_key, *keys) = jnp.dtype(param_dtype), jax.random.split(key, 6)
        shape, d = (config.vocab_size, config.width), config.width
        self.embed = normal(embed_key, shape, ("vocab", "embed"), std=config.init_std, dtype=dtype)
        self.stacks = nnx.Dict(
            {
                kind: jax.vmap(lambda k, kind=kind: self.layer_class(config, kind, k, dtype=dtype))(
                    jax.random.split(key, len(layers))
                )
                for key, (kind, layers) in zip(keys, Depth(config).layers_of.items(), strict=False)
            }
        )
        self.out_mix = self.layer_class.mix_class(d, eps=config.norm_eps, dtype=dtype)
        self.final_norm = RMSNorm(d, eps=config.norm_eps, dtype=dtype)
        self.lm_head = normal(head_key, (d, shape[0]), ("embed", "vocab"), std=config.init_std, dtype=dtype)
        self.mtp = nnx.data(MTP(config, jax.random.fold_in(key, 1), dtype=dtype) if with_mtp else None)
        self.vision = Vision(config, jax.random.fold_in(key, 2), dtype=dtype) if config.vision else None

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        pixels: Float[Array, "n 3 S S"] | None = None,
        grids: Int[Array, "items 3"] | None = None,
    ) -> Float[Array, "B T V"]:
        """Logits in float32; tokens see earlier tokens of their own segment (-1 is padding).

        `pixels` are the patches of images, `grids` their (frames, rows, columns), on the host: features replace, in
        order, the embeddings where a token is `config.media_id`. Raises ValueError where there are more or fewer.
        """
        tokens = jnp.asarray(tokens)
        return _logits(self, tokens, segment_ids, self.image_features(tokens, pixels, grids))

    def image_features(
        self,
        tokens: Int[Array, "B T"],
        pixels: Float[Array, "n 3 S S"] | None,
        grids: Int[Array, "items 3"] | None,
    ) -> Float[Array, "B N D"] | None:
        """Features of the images in each row, as `hidden` takes them; not to be traced. Raises as `__call__` does."""
        if pixels is None:
            if self.vision is not None and not isinstance(tokens, jax.core.Tracer):
                check_no_places(self.config, np.asarray(tokens))
            return None
        rows = pack_rows(self.config, np.asarray(tokens), np.asarray(pixels), np.asarray(grids))
        return _features(self.vision, *rows)

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        features: Float[Array, "B N D"] | None = None,
        cache: Cache | None = None,
        collect: bool = False,
        watch: Watch = NOTHING,
    ) -> Output:
        """Run all layers. With a cache the tokens continue its sequences; segment ids are then 0, or -1 for padding.

        `features` stand at a row's tokens `config.media_id`, in order, in place of embeddings; further ones are unused.
        `watch` is shown each layer once (`k3jax.nn.watch`): a rematerialised pass does not run it again.
        """
        x = embed_tokens(self.embed, tokens, jnp.dtype(self.config.dtype))
        if features is not None:
            x = insert_features(x, tokens == self.config.media_id, features)
        if segment_ids is not None:  # zero times what padding holds is zero in values and in gradients
            x = jnp.where(segment_ids[..., None] >= 0, x, 0)
        remat = "none" if cache is not None else self.remat
        count = tokens.shape[1] if segment_ids is None else jnp.sum(segment_ids >= 0, axis=1, dtype=jnp.int32)
        consumed = total(count, "seq")
        kept = cache if cache is None or segment_ids is None else cache.of_rows(consumed > 0)
        inputs = StackInput(self.config, segment_ids, kept, remat=remat, collect=collect, watch=watch)
        plan = StackPlan.of(self.config) if self.stack == "scan" else None
        out = run_scan(self.stacks, x, inputs, plan) if plan else run_loop(self.stacks, x, inputs)
        if cache is not None and out.cache is not None:
            cache = dataclasses.replace(cache, pools=out.cache.pools, length=cache.length + consumed)
        return Output(self.final_norm(self.out_mix.of(out.residual)), cache, out.trace, out.watched)

    def layers(self, kind: str) -> Layer:
        """The stacked layers of a kind, or the single one of `"mtp"`."""
        if kind != "mtp":
            return self.stacks[kind]
        assert self.mtp is not None
        return self.mtp.layer

    def split_mtp(self) -> tuple[Transformer, MTP | None]:
        """The model as it is released, and its layer of multi-token prediction."""
        return self.with_mtp(None), self.mtp

    def with_mtp(self, mtp: MTP | None) -> Transformer:
        """The same model with such a layer, or without."""
        model = jax.tree.map(lambda leaf: leaf, self)
        model.mtp = nnx.data(mtp)
        return model

    def next_but_one(
        self,
        hidden: Float[Array, "B T D"],
        next_tokens: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None,
        watch: Watch = NOTHING,
    ) -> tuple[Float[Array, "B T D"], dict[str, Any]]:
        """The hidden states that predict the token after `next_tokens`, and what the layer of that shows."""
        assert self.mtp is not None
        x = embed_tokens(self.embed, jnp.where(next_tokens >= 0, next_tokens, 0), hidden.dtype)
        run = lambda mtp, *args: mtp(*args, segment_ids=segment_ids, watch=watch)  # noqa: E731
        return (run if self.remat == "none" else jax.checkpoint(run))(self.mtp, hidden, x)

    def logits(self, hidden: Float[Array, "*b D"]) -> Float[Array, "*b V"]:
        """The head, accumulated and returned in float32."""
        return joined(head_logits(hidden, cast(self.lm_head, hidden.dtype)), "vocab", dim=-1)

    def generate(
        self,
        tokens: Int[Array, "B T"],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        key: PRNGKeyArray | None = None,
        pixels: Float[Array, "n 3 S S"] | None = None,
        grids: Int[Array, "items 3"] | None = None,
    ) -> Int[Array, "B N"]:
        """Continue each row by `max_new_tokens` tokens: greedy, or sampled where `temperature` > 0 (needs `key`).

        `pixels` and `grids` are the images in `tokens`, as in `__call__`.
        """
        features = self.image_features(tokens, pixels, grids)
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "key": key}
        options["features"] = features
        return generate.generate(self, tokens, **options)


@jax.jit
def _logits(model: Transformer, tokens: Array, segment_ids: Array | None, features: Array | None) -> Array:
    return model.logits(model.hidden(tokens, segment_ids=segment_ids, features=features).hidden)


@jax.jit
def _features(vision: Vision, patches: Array, grids: Array) -> Array:
    return vision(patches, grids)[0]
