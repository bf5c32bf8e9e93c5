"""The training step of a run: its estimate, and the program itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from k3jax.config import ConfigError, TrainRun
from k3jax.plan.estimate import Estimate, Weight, local_bytes, weights_of
from k3jax.train.flops import mean_keys, training_flops
from k3jax.train.start import Setting
from k3jax.train.step import make_train_step

PASSES = 3  # that read a weight: forward, its recomputation, and the backward pass
RECOMPUTED = 4 / 3  # operations with every layer's forward pass run again, over those without
ROUTED = 6  # exchanges of a MoE layer's rows: two forward, two in the recomputation, two backward
INNER = 190  # bytes a token and channel of KDA's heads that its backward pass holds, as the compiler has it for K3
ROUTED_BYTES = 3 * 2**30  # of the rows that are with their experts at a time
ACTIVATIONS = 60  # times that a layer's pass reads or writes an array of [tokens, width], forward and backward together


@dataclass(frozen=True)
class TrainProgram:
    """A run's training step on devices that need not be there."""

    run: TrainRun
    setting: Setting

    @classmethod
    def of(cls, run: TrainRun, devices: list[Any]) -> TrainProgram:
        """Of a run's largest stage. Raises `ConfigError` where the mesh does not fit devices, model or some stage."""
        if run.lora.rank:
            raise ConfigError(f"lora.rank = {run.lora.rank}: plans are made for runs that train the whole model")
        if run.remat != "layer":
            raise ConfigError(f"remat = {run.remat}: plans are made for remat=layer")
        if run.model.num_dense_layers == run.model.num_layers:
            raise ConfigError("model.num_dense_layers: plans are made for models with experts")
        setting = Setting.of(run, devices)
        stages = [run.in_stage(index) for index in range(max(1, len(run.stages)))]
        for stage in stages:
            setting.devices.check_batch(stage.data, accumulate=stage.accumulate)
        largest = max(stages, key=lambda stage: stage.data.batch_size * stage.data.seq_len / stage.accumulate)
        return cls(largest, setting)

    def lower(self) -> Any:
        """The step that `train.py` runs, lowered for TPUs with its state donated."""
        devices, blank = self.setting.devices, self.setting.blank
        step = make_train_step(self.run, self.setting.optimizer, self.setting.rest)
        jitted = devices.jit(step, self.run.data, (devices.state_specs, PartitionSpec()), donate=True)
        return jitted.trace(devices.blank(blank), devices.batch(self.run.data)).lower(lowering_platforms=("tpu",))

    def estimate(self) -> Estimate:
        """What a step holds, computes and moves."""
        run, state = self.run, self.setting.blank
        placement, specs = self.setting.devices.placement, self.setting.devices.state_specs
        tokens = run.data.batch_size * run.data.seq_len
        shares = placement.count(placement.split["batch"]) * placement.count(placement.split["seq"])
        split = placement.count(placement.split["mlp"])
        weights = list(weights_of(state.params, placement))
        params = local_bytes(state.params, specs.params, placement)
        held = {
            "weights": params,
            "optimizer": local_bytes(state.opt_state, specs.opt_state, placement),
            "working_copy": params * jnp.dtype(run.model.dtype).itemsize / 4,
            "gradients": params * jnp.dtype(run.model.dtype).itemsize / 4,
        }
        rows = tokens / shares / run.accumulate
        held |= _activations(run, rows, weights, parts=placement.count(placement.split["kda_heads"]))
        flops = RECOMPUTED * training_flops(run.model, keys=mean_keys(run.data.seq_len)) * tokens / shares / split
        out = Estimate(held, flops=flops, hbm_bytes=0.0, tokens=tokens)
        out.results = local_bytes(state, specs, placement)
        batch = self.setting.devices.batch(run.data)
        out.arguments = local_bytes(state, specs, placement)
        out.arguments += local_bytes(batch, self.setting.devices.batch_specs(batch), placement)
        out.hbm_bytes = _memory_traffic(run, tokens / shares, weights, held)
        self._traffic(out, weights, tokens / shares)
        return out

    def _traffic(self, out: Estimate, weights: list[Weight], rows: float) -> None:
        """Weights to where they are used and gradients back; rows to their experts; sums over heads; pieces of rows."""
        run, placement = self.run, self.setting.devices.placement
        width = jnp.dtype(run.model.dtype).itemsize
        for weight in weights:
            reads = run.accumulate * (1 if "vocab" in weight.axes else PASSES - 1)
            whole = float(weight.elements)
            for axes in reversed(weight.gathers):
                count = placement.count(axes)
                out.send(axes, count, whole * width, reads)
                out.send(axes, count, whole * 4, run.accumulate)
                whole /= count
        moe, mixers = run.model.num_layers - run.model.num_dense_layers, run.model.num_layers
        experts = placement.split["experts"]
        routed = rows * run.model.moe.top_k * run.model.moe.latent_width * width
        out.send(experts, placement.count(experts), routed, ROUTED * moe)
        heads = placement.split["kda_heads"]
        out.send(heads, placement.count(heads), 2 * rows * run.model.width * width, 2 * PASSES * mixers)
        seq, mla = placement.split["seq"], run.model.mla
        latents = rows * placement.count(seq) * (mla.kv_rank + mla.extra_dim) * width
        out.send(seq, placement.count(seq), latents, PASSES * len(run.model.mla_layers))


def _activations(run: TrainRun, rows: float, weights: list[Weight], *, parts: int) -> dict[str, float]:
    """What is kept of every layer, and the buffers of the largest one; `parts` devices share the heads.

    Kept are the sum before each layer, the bank and its gradient, and a block's reads of it. Buffers are the head's
    gradient, and in a KDA layer's backward pass arrays of [tokens, heads, head_dim] beside its experts' rows.
    """
    model, width = run.model, jnp.dtype(run.model.dtype).itemsize
    stream = rows * model.width * width
    experts = sum(w.elements for w in weights if "experts" in w.axes) / (model.num_layers - model.num_dense_layers)
    vocab = max(w.elements for w in weights if w.axes == ("embed", "vocab"))
    routed = rows * model.moe.top_k * (model.moe.latent_width + 3 * model.moe.expert_width) * width
    inner = rows * model.kda.num_heads * model.kda.head_dim / parts
    return {
        "activations": stream * (model.num_layers + 2 * model.num_snapshots + 2 * model.attn_res_block),
        "buffers": vocab * width + INNER * inner + 6 * experts * width + min(routed, ROUTED_BYTES),
    }


def _memory_traffic(run: TrainRun, rows: float, weights: list[Weight], held: dict[str, float]) -> float:
    """Weights written and read in each pass, activations in each layer, and the state once through the optimizer."""
    width = jnp.dtype(run.model.dtype).itemsize
    read = sum(2 * PASSES * width * weight.elements for weight in weights) * run.accumulate
    layers = ACTIVATIONS * rows * run.model.width * width * run.model.num_layers
    return read + layers + 2 * (held["weights"] + held["optimizer"]) + 2 * held["gradients"]
