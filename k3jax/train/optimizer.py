"""Which weight gets which update: Muon for matrices, AdamW for the rest (spec: K3 report sections 2.5 and 3.3).

One table, `MATRICES`, says for each kind of weight (its tuple of logical axes) which axes Muon takes as a matrix's
inputs and outputs. Axes it does not name, and the leading layer axis of a stack, are batch: every layer, expert and
attention head is orthogonalised on its own, so Per-Head Muon is a line of the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import optax
from flax import nnx
from jaxtyping import Array, Float

from k3jax.checkpoint.orbax_io import named_leaves, with_leaves
from k3jax.config import OptimizerConfig
from k3jax.nn.param import is_variable

Axes = tuple[str, ...]

# axes of the weight -> (input axes, output axes)
MATRICES: dict[Axes, tuple[Axes, Axes]] = {
    # attention, one matrix a head: queries, keys, values, decay and output gates
    ("embed", "kda_heads", "head_dim"): (("embed",), ("head_dim",)),
    ("low_rank", "kda_heads", "head_dim"): (("low_rank",), ("head_dim",)),
    ("q_rank", "mla_heads", "qk_dim"): (("q_rank",), ("qk_dim",)),
    ("kv_rank", "mla_heads", "nope_dim"): (("kv_rank",), ("nope_dim",)),
    ("kv_rank", "mla_heads", "v_dim"): (("kv_rank",), ("v_dim",)),
    ("embed", "mla_heads", "v_dim"): (("embed",), ("v_dim",)),
    # attention, whole matrices
    ("embed", "low_rank"): (("embed",), ("low_rank",)),
    ("embed", "q_rank"): (("embed",), ("q_rank",)),
    ("embed", "kv_rank"): (("embed",), ("kv_rank",)),
    ("kda_heads", "head_dim", "embed"): (("kda_heads", "head_dim"), ("embed",)),
    ("mla_heads", "v_dim", "embed"): (("mla_heads", "v_dim"), ("embed",)),
    # feed-forward: one matrix an expert
    ("embed", "mlp"): (("embed",), ("mlp",)),
    ("mlp", "embed"): (("mlp",), ("embed",)),
    ("embed", "experts"): (("embed",), ("experts",)),
    ("embed", "latent"): (("embed",), ("latent",)),
    ("latent", "embed"): (("latent",), ("embed",)),
    ("experts", "latent", "expert_mlp"): (("latent",), ("expert_mlp",)),
    ("experts", "expert_mlp", "latent"): (("expert_mlp",), ("latent",)),
}
# AdamW with weight decay: tables of vectors, and the rows of per-head scalars behind KDA's beta
DECAYED: set[Axes] = {("vocab", "embed"), ("embed", "vocab"), ("embed", "kda_heads")}
# AdamW without: convolution taps, dt_bias; and whatever has one axis (norms, AttnRes queries, A_log)
NOT_DECAYED: set[Axes] = {("kda_heads", "head_dim", "conv"), ("kda_heads", "head_dim")}
UPDATE_RMS = 0.2  # of a Muon update before the learning rate: AdamW's usual size, so one rate serves both


def matrix_spec(axes: Axes, ndim: int) -> optax.contrib.MuonDimensionNumbers | None:
    """The dims of a weight of `ndim` dims (stacked ones lead) that form a matrix; None for an AdamW weight."""
    if axes not in MATRICES:
        return None
    inputs, outputs = (tuple(axes.index(name) + ndim - len(axes) for name in side) for side in MATRICES[axes])
    return optax.contrib.MuonDimensionNumbers(reduction_axis=inputs, output_axis=outputs)


def group_of(axes: Axes) -> str:
    """`"muon"`, `"adam_decayed"` or `"adam"`; `ValueError` for axes that no table names."""
    if axes in MATRICES:
        return "muon"
    if axes in DECAYED:
        return "adam_decayed"
    if len(axes) == 1 or axes in NOT_DECAYED:
        return "adam"
    raise ValueError(f"a weight with axes {axes}: add it to a table in {__name__}")


def learning_rate(config: OptimizerConfig, *, steps: int, peak: float) -> optax.Schedule:
    """A linear rise to `peak`, then a cosine or a line down to `min_lr_ratio * peak` at the last of `steps` updates."""
    warmup = max(1, round(config.warmup_fraction * steps))
    rise = optax.schedules.linear_schedule(peak / warmup, peak, warmup - 1) if warmup > 1 else optax.constant_schedule(peak)
    rest = max(1, steps - warmup)
    if config.schedule == "cosine":
        fall = optax.schedules.cosine_decay_schedule(peak, rest, config.min_lr_ratio)
    else:
        fall = optax.schedules.linear_schedule(peak, config.min_lr_ratio * peak, rest)
    return optax.schedules.join_schedules([rise, fall], [warmup])


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An optax transformation that sees the trainable weights as a flat dict by name."""

    transform: optax.GradientTransformation
    schedule: optax.Schedule  # of the Muon weights; what a run reports as its learning rate
    clip_norm: float

    def init(self, params: nnx.Module) -> Any:
        """The optimizer's state at step 0."""
        return self.transform.init(named_leaves(params))

    def update(self, grads: nnx.Module, opt_state: Any, params: nnx.Module) -> tuple[nnx.Module, Any, Float[Array, ""]]:
        """New params, new state, and the norm of the gradients before they are clipped."""
        named_grads, named_params = named_leaves(grads), named_leaves(params)
        norm = optax.global_norm(named_grads)
        scale = jax.numpy.minimum(1.0, self.clip_norm / jax.numpy.maximum(norm, 1e-12))
        updates, opt_state = self.transform.update(
            jax.tree.map(lambda grad: grad * scale, named_grads), opt_state, named_params
        )
        return with_leaves(params, optax.apply_updates(named_params, updates)), opt_state, norm


def make_optimizer(config: OptimizerConfig, params: nnx.Module, *, steps: int) -> Optimizer:
    """The optimizer of a run of `steps` updates for model-shaped `params` (arrays or shapes)."""
    axes = {name: variable.axes for name, variable in _variables(params).items()}
    ndims = {name: leaf.ndim for name, leaf in named_leaves(params).items()}
    muon_rate = learning_rate(config, steps=steps, peak=config.learning_rate)
    adam_rate = learning_rate(config, steps=steps, peak=config.adam_learning_rate or config.learning_rate)
    adam = {"b1": config.adam_b1, "b2": config.adam_b2, "eps": 1e-8}
    transforms = {
        "muon": optax.contrib.muon(
            muon_rate,
            ns_steps=config.muon_steps,
            beta=config.muon_momentum,
            weight_decay=config.weight_decay,
            consistent_rms=UPDATE_RMS,
            muon_weight_dimension_numbers=lambda _: {name: matrix_spec(axes[name], ndims[name]) for name in axes},
        ),
        "adam_decayed": optax.adamw(adam_rate, **adam, weight_decay=config.weight_decay),
        "adam": optax.adam(adam_rate, **adam),
    }
    labels = {name: group_of(axes[name]) for name in axes}
    return Optimizer(
        transform=optax.partition(transforms, labels), schedule=muon_rate, clip_norm=config.clip_norm
    )


def _variables(params: nnx.Module) -> dict[str, Any]:
    variables = [leaf for leaf in jax.tree.leaves(params, is_leaf=is_variable) if leaf.get_value() is not None]
    return dict(zip(named_leaves(params), variables, strict=True))
