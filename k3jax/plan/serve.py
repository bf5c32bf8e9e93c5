"""Prefill and decode of a serving recipe: their estimates, and the programs themselves."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from k3jax.config import ModelConfig, ServeRun, load_model_config
from k3jax.nn.cache import Pools
from k3jax.nn.transformer import Transformer
from k3jax.plan.chips import KIND
from k3jax.plan.estimate import Estimate, local_bytes, weights_of
from k3jax.quant.qat import quantize_experts
from k3jax.serve import programs
from k3jax.serve.devices import ServeDevices, lay_out_heads
from k3jax.serve.engine import LATENTS
from k3jax.serve.programs import DecodeRows, PrefillRows
from k3jax.serve.run import check_context, check_recipe, sizes_on_mesh
from k3jax.serve.sampler import History, Sampling, SamplingRows
from k3jax.train.flops import forward_flops
from pallas_kernels.mx import SUPERBLOCK, MXFP4Array, decode_layout, layout_for


@dataclass(frozen=True)
class ServeProgram:
    """One program of a serving recipe on devices that need not be there; arrays are shapes."""

    run: ServeRun
    config: ModelConfig
    mode: str
    devices: ServeDevices
    model: Transformer
    pools: Pools
    history: History
    rows: PrefillRows | DecodeRows

    @classmethod
    def of(cls, run: ServeRun, mode: str, devices: list[Any], chip: str) -> ServeProgram:
        """Raises `ConfigError` where the mesh does not fit devices, model or slots."""
        check_recipe(run)
        config = load_model_config(run.plan_model, [f"dtype={run.dtype}"] if run.dtype else [])
        check_context(run, config)
        model = jax.eval_shape(lambda: _served_model(config, KIND[chip]))
        placed = ServeDevices.of(dataclasses.asdict(run.mesh), mode, model, devices)
        sizes = sizes_on_mesh(run, config, placed, mode=mode)
        asked, latents = run.slots if mode == "decode" else run.prefill_rows, LATENTS[run.latents]
        options: Any = {"slots": sizes.slots + sizes.snapshots, "pages": sizes.pages, "page": sizes.page}
        pools = jax.eval_shape(lambda: Pools.zeros(config, latents=latents, **options))
        history = jax.eval_shape(lambda: History.zeros(slots=run.slots, vocab=config.vocab_size))
        rows = _rows(mode, asked, sizes.prefill_chunk, sizes.table_width, config.vocab_size)
        return cls(run, config, mode, placed, model, pools, history, rows)

    def lower(self) -> Any:
        """The program that `serve.py` runs, lowered for TPUs with its pools donated."""
        devices, program = self.devices, programs.decode if self.mode == "decode" else programs.prefill
        program = partial(program, top=self.run.max_top_logprobs)
        jitted = devices.jit(program, self.pools, self.history, (self.rows,))
        arguments = (
            lay_out_heads(
                devices.blank(self.model, devices.model_specs),
                lambda x, format: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=format),
            ),
            devices.blank(self.pools, devices.pool_specs(self.pools)),
            devices.blank(self.history, devices.row_specs(self.history)),
            devices.blank(self.rows, devices.row_specs(self.rows)),
        )
        return jitted.trace(*arguments).lower(lowering_platforms=("tpu",))

    def estimate(self) -> Estimate:
        """What a decode step, or a prefill chunk at the end of a full context, holds, computes and moves."""
        devices, placement, config = self.devices, self.devices.placement, self.config
        specs = devices.pool_specs(self.pools)
        weights = local_bytes(self.model, devices.model_specs, placement)
        latents = local_bytes(self.pools.pages, specs.pages, placement)
        states = local_bytes((self.pools.state, self.pools.history), (specs.state, specs.history), placement)
        decode = self.mode == "decode"
        rows = len(self.rows.length) // devices.shares
        tokens = rows if decode else rows * self.run.prefill_chunk // placement.count(placement.split["seq"])
        stream = tokens * config.width * 2
        vocab = next(w.elements for w in weights_of(self.model, placement) if w.axes == ("embed", "vocab"))
        history = local_bytes(self.history, devices.row_specs(self.history), placement)
        held: dict[str, float] = {
            "weights": weights,
            "kda_state": states,
            "mla_cache": latents,
            "sampling": history,
            "buffers": stream * (2 * config.num_snapshots + 20) + rows * config.vocab_size * 8,
        }
        if not decode and placement.split["page"]:  # a layer's cache from all devices
            held["buffers"] += self._cache_of_a_layer()
        keys = self.run.max_context
        attention = "absorbed" if decode else "expanded"
        flops = sum(forward_flops(config, keys=keys, attention=attention).values())
        out = Estimate(held, flops=flops * tokens / placement.count(placement.split["kda_heads"]), hbm_bytes=0.0)
        rows_bytes = local_bytes(self.rows, devices.row_specs(self.rows), placement)
        out.arguments = weights + states + latents + history + rows_bytes
        out.results = states + latents + history
        touched = min(1.0, tokens * devices.shares * config.moe.top_k / config.moe.num_experts)
        is_expert = lambda leaf: isinstance(leaf, MXFP4Array)  # noqa: E731
        found = jax.tree.leaves([w for w in jax.tree.leaves(self.model, is_leaf=is_expert) if is_expert(w)])
        experts = sum(x.size * x.dtype.itemsize for x in found) / placement.count(placement.split["experts"])
        out.hbm_bytes = weights - experts * (1 - touched) - 2 * vocab * (not decode) + latents + 2 * states
        out.hbm_bytes += 40 * stream * config.num_layers
        out.tokens = float(len(self.rows.length) * (1 if decode else self.run.prefill_chunk))
        self._traffic(out, tokens)
        return out

    def _traffic(self, out: Estimate, tokens: float) -> None:
        """Sums over heads, latents of tokens to their experts and back, and in prefill the cache along a row."""
        config, placement = self.config, self.devices.placement
        layers, moe = config.num_layers, config.num_layers - config.num_dense_layers
        heads, experts, seq = (placement.split.get(name, ()) for name in ("kda_heads", "experts", "seq"))
        stream = tokens * config.width * 2
        out.send(heads, placement.count(heads), 2 * stream, 2 * layers)
        everyone = tokens * self.devices.shares * config.moe.latent_width
        routed = tokens * config.moe.top_k * config.moe.latent_width * 2
        out.send(experts, placement.count(experts), everyone * (2 + 4) if self.mode == "decode" else 2 * routed, moe)
        out.send(seq, placement.count(seq), self._cache_of_a_layer(), len(config.mla_layers))

    def _cache_of_a_layer(self) -> float:
        """Bytes of a sequence's latents in one layer, at full context."""
        return self.run.max_context * (self.config.mla.kv_rank + self.config.mla.extra_dim) * 2.0


def _served_model(config: ModelConfig, kind: str) -> Transformer:
    """The model with its experts as a device of this kind serves them."""
    model = quantize_experts(Transformer(config, jax.random.key(0), param_dtype="bfloat16"))
    is_expert = lambda leaf: isinstance(leaf, MXFP4Array)  # noqa: E731
    fits = lambda leaf: is_expert(leaf) and leaf.shape[-1] % SUPERBLOCK == 0  # noqa: E731
    lay_out = lambda leaf: decode_layout(leaf, layout_for(kind)) if fits(leaf) else leaf  # noqa: E731
    return jax.tree.map(lay_out, model, is_leaf=is_expert)


def _rows(mode: str, rows: int, chunk: int, width: int, vocab: int) -> PrefillRows | DecodeRows:
    ints: Any = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    bits: Any = jax.ShapeDtypeStruct((rows, -(-vocab // 32)), jnp.uint32)
    sampling = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, SamplingRows.of([Sampling(temperature=0.0)] * rows)))
    shared: dict[str, Any] = {"page_table": ints(rows, width), "length": ints(rows)}
    shared |= {"sampling": sampling, "allowed": bits}
    if mode == "decode":
        return DecodeRows(tokens=ints(rows), **shared)
    return PrefillRows(tokens=ints(rows, chunk), num_valid=ints(rows), slots=ints(rows), seen=bits, **shared)
