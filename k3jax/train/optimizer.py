"""Which weight gets which update: Muon for matrices, AdamW for the rest (spec: K3 report sections 2.5 and 3.3).

One table, `MATRICES`, says for each kind of weight (its tuple of logical axes) which axes Muon takes as a matrix's
inputs and outputs. Axes it does not name, and the leading layer axis of a stack, are batch: every layer, expert and
attention head is orthogonalised on its own, so Per-Head Muon is a line of the table. Optax's own Muon has the same
rule but one set of products for each weight, which costs a small model more to compile and to run than its layers do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from k3jax.checkpoint.orbax_io import named_leaves, with_leaves
from k3jax.config import OptimizerConfig
from k3jax.nn.param import is_variable
from k3jax.nn.transformer import Transformer

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


@dataclass(frozen=True)
class MatrixSpec:
    """How a weight of `shape` is a batch of matrices: its dims by role."""

    shape: tuple[int, ...]
    batch: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, int]:
        """Inputs and outputs of one matrix."""
        return math.prod(self.shape[d] for d in self.inputs), math.prod(self.shape[d] for d in self.outputs)

    def to_matrices(self, weight: Array) -> Float[Array, "n small large"]:
        """The matrices, on the side where the Gram matrix is small."""
        fan_in, fan_out = self.sizes
        matrices = weight.transpose(self._order).reshape(-1, fan_in, fan_out)
        return matrices if fan_in <= fan_out else matrices.mT

    def from_matrices(self, matrices: Float[Array, "n small large"]) -> Array:
        """Undo `to_matrices`."""
        fan_in, fan_out = self.sizes
        matrices = matrices if fan_in <= fan_out else matrices.mT
        weight = matrices.reshape([self.shape[d] for d in self._order])
        return weight.transpose([self._order.index(d) for d in range(len(self.shape))])

    @property
    def _order(self) -> tuple[int, ...]:
        return self.batch + self.inputs + self.outputs


def matrix_spec(axes: Axes, shape: tuple[int, ...]) -> MatrixSpec:
    """The matrices in a Muon weight of `shape`, whose stacked dims come before its own `axes`."""
    stacked = len(shape) - len(axes)
    inputs, outputs = (tuple(axes.index(name) + stacked for name in side) for side in MATRICES[axes])
    batch = tuple(d for d in range(len(shape)) if d not in inputs + outputs)
    return MatrixSpec(shape, batch, inputs, outputs)


def orthogonalize(specs: Mapping[str, MatrixSpec], *, steps: int) -> optax.GradientTransformation:
    """Replace every matrix by one with its singular vectors and singular values near 1, scaled to `UPDATE_RMS`.

    Matrices of equal size are orthogonalised together: a few large batches instead of hundreds of small products.
    """

    def update(updates: dict[str, Any], state: Any, params: Any = None) -> tuple[dict[str, Any], Any]:
        groups: dict[tuple[int, int], list[str]] = {}
        for name in specs:
            small, large = sorted(specs[name].sizes)
            groups.setdefault((small, large), []).append(name)
        done = dict(updates)
        for (_, large), names in groups.items():
            parts = [specs[name].to_matrices(updates[name]) for name in names]
            result = newton_schulz(jnp.concatenate(parts), steps=steps) * (UPDATE_RMS * large**0.5)
            ends = np.cumsum([len(part) for part in parts])[:-1]
            for name, matrices in zip(names, jnp.split(result, ends), strict=True):
                done[name] = specs[name].from_matrices(matrices)
        return done, state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


def newton_schulz(matrices: Float[Array, "n small large"], *, steps: int) -> Float[Array, "n small large"]:
    """Drive singular values to about 0.7..1.2: X <- aX + (bA + cA^2)X with A = XX^T (spec: training.md 3.2)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices / (jnp.linalg.norm(matrices, axis=(-2, -1), keepdims=True) + 1e-8)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x


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
    rise = optax.schedules.linear_schedule(peak / warmup, peak, max(1, warmup - 1))
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

    def init(self, params: Transformer) -> Any:
        """The optimizer's state at step 0."""
        return self.transform.init(named_leaves(params))

    def update(
        self, grads: Transformer, opt_state: Any, params: Transformer
    ) -> tuple[Transformer, Any, Float[Array, ""]]:
        """New params, new state, and the norm of the gradients before they are clipped."""
        named_grads, named_params = named_leaves(grads), named_leaves(params)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(grad)) for grad in named_grads.values()))
        scale = jnp.minimum(1.0, self.clip_norm / jnp.maximum(norm, 1e-12))
        clipped = {name: grad * scale for name, grad in named_grads.items()}
        updates, opt_state = self.transform.update(clipped, opt_state, named_params)
        return with_leaves(params, optax.apply_updates(named_params, updates)), opt_state, norm


def make_optimizer(config: OptimizerConfig, params: Transformer, *, steps: int) -> Optimizer:
    """The optimizer of a run of `steps` updates for model-shaped `params` (arrays or shapes)."""
    axes = {name: variable.axes for name, variable in _variables(params).items()}
    shapes = {name: leaf.shape for name, leaf in named_leaves(params).items()}
    specs = {name: matrix_spec(axes[name], shapes[name]) for name in axes if axes[name] in MATRICES}
    muon_rate = learning_rate(config, steps=steps, peak=config.learning_rate)
    adam_rate = learning_rate(config, steps=steps, peak=config.adam_learning_rate or config.learning_rate)
    adam = {"b1": config.adam_b1, "b2": config.adam_b2, "eps": 1e-8}
    transforms = {
        "muon": optax.chain(
            optax.trace(config.muon_momentum, nesterov=True),
            orthogonalize(specs, steps=config.muon_steps),
            optax.add_decayed_weights(config.weight_decay),
            optax.scale_by_learning_rate(muon_rate),
        ),
        "adam_decayed": optax.adamw(adam_rate, **adam, weight_decay=config.weight_decay),
        "adam": optax.adam(adam_rate, **adam),
    }
    labels = {name: group_of(axes[name]) for name in axes}
    return Optimizer(transform=optax.partition(transforms, labels), schedule=muon_rate, clip_norm=config.clip_norm)


def _variables(params: Transformer) -> dict[str, Any]:
    variables = [leaf for leaf in jax.tree.leaves(params, is_leaf=is_variable) if leaf.get_value() is not None]
    return dict(zip(named_leaves(params), variables, strict=True))
