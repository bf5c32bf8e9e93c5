"""Which weight gets which update: Muon for matrices, AdamW for the rest (spec: K3 report sections 2.5 and 3.3).

One table, `MATRICES`, says for each kind of weight (its tuple of logical axes) which axes Muon takes as a matrix's
inputs and outputs. Axes it does not name, and the leading layer axis of a stack, are batch: every layer, expert and
attention head is orthogonalised on its own, so Per-Head Muon is a line of the table. Optax's own Muon has the same
rule but one set of products for each weight, which costs a small model more to compile and to run than its layers do;
AdamW and the schedules are optax's.

QK-Clip (`clip_queries_and_keys`) comes after the update: heads of MLA whose attention scores grew past a limit get
smaller query and key weights (Kimi K2, arXiv:2507.20534; training 3.5). KDA normalises its queries and keys and needs
none.
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
from jaxtyping import Array, Float, Int

from k3jax.checkpoint.orbax_io import named_leaves, with_leaves
from k3jax.config import OptimizerConfig
from k3jax.nn.param import is_variable, island
from k3jax.nn.transformer import Transformer
from sharding.local import (
    count_of,
    exchange,
    exchange_back,
    joined_over,
    parts_of,
    stored_part,
    total_of_parts,
    total_over,
)

Axes = tuple[str, ...]
Table = Mapping[Axes, tuple[Axes, Axes]]

# axes of the weight -> (input axes, output axes)
MATRICES: dict[Axes, tuple[Axes, Axes]] = {
    # attention, one matrix a head: queries, keys and values (the report), decay and output gates (our choice)
    ("embed", "kda_heads", "head_dim"): (("embed",), ("head_dim",)),
    ("low_rank", "kda_heads", "head_dim"): (("low_rank",), ("head_dim",)),
    ("q_rank", "mla_heads", "qk_dim"): (("q_rank",), ("qk_dim",)),
    ("kv_rank", "mla_heads", "nope_dim"): (("kv_rank",), ("nope_dim",)),
    ("kv_rank", "mla_heads", "v_dim"): (("kv_rank",), ("v_dim",)),
    ("embed", "mla_heads", "v_dim"): (("embed",), ("v_dim",)),
    # attention, whole matrices; kv_down holds the latent and the extra key side by side
    ("embed", "low_rank"): (("embed",), ("low_rank",)),
    ("embed", "q_rank"): (("embed",), ("q_rank",)),
    ("embed", "kv_rank"): (("embed",), ("kv_rank",)),
    ("kda_heads", "head_dim", "embed"): (("kda_heads", "head_dim"), ("embed",)),
    ("mla_heads", "v_dim", "embed"): (("mla_heads", "v_dim"), ("embed",)),
    # feed-forward: one matrix an expert, whole matrices elsewhere. K3's choice for the router is not published; as a
    # matrix it gets updates of the size that all others get, whatever the scale of its gradient
    ("embed", "mlp"): (("embed",), ("mlp",)),
    ("mlp", "embed"): (("mlp",), ("embed",)),
    ("embed", "expert_scores"): (("embed",), ("expert_scores",)),
    ("embed", "latent"): (("embed",), ("latent",)),
    ("mtp_pair", "embed"): (("mtp_pair",), ("embed",)),
    ("latent", "embed"): (("latent",), ("embed",)),
    ("experts", "expert_latent", "expert_mlp"): (("expert_latent",), ("expert_mlp",)),
    ("experts", "expert_mlp", "expert_latent"): (("expert_mlp",), ("expert_latent",)),
    # vision tower and projector: queries, keys and values one matrix a head
    ("vit", "vit_qkv", "vit_heads", "vit_head_dim"): (("vit",), ("vit_head_dim",)),
    ("vit_heads", "vit_head_dim", "vit"): (("vit_heads", "vit_head_dim"), ("vit",)),
    ("vit", "vit_mlp"): (("vit",), ("vit_mlp",)),
    ("vit_mlp", "vit"): (("vit_mlp",), ("vit",)),
    ("merged", "merged_mlp"): (("merged",), ("merged_mlp",)),
    ("merged_mlp", "embed"): (("merged_mlp",), ("embed",)),
}
# AdamW with weight decay: tables of vectors, and the rows of per-head scalars behind KDA's beta
DECAYED: set[Axes] = {("vocab", "embed"), ("embed", "vocab"), ("embed", "kda_heads")}
# and the vision tower's embeddings: of patches, and of their places
DECAYED |= {("channels", "patch_rows", "patch_columns", "vit"), ("grid_rows", "grid_columns", "vit")}
# AdamW without: convolution taps, dt_bias; and whatever has one axis (norms, AttnRes queries, A_log)
NOT_DECAYED: set[Axes] = {("kda_heads", "head_dim", "conv"), ("kda_heads", "head_dim")}
NOT_DECAYED |= {("lora_in", "lora_rank"), ("lora_rank", "lora_out")}  # adapters, of `k3jax.train.lora`
TOGETHER = 2**23  # elements on a device up to which weights of the same axes are orthogonalised together
AT_A_TIME = 2**28  # elements of matrices that are orthogonalised at one time: their copies are temporary memory
UPDATE_RMS = 0.2  # of a Muon update before the learning rate: AdamW's usual size, so one rate serves both


@dataclass(frozen=True)
class MatrixSpec:
    """How a weight of `shape` is a batch of matrices: its dims by role, and the logical axes of its last dims."""

    shape: tuple[int, ...]
    axes: Axes
    batch: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, int]:
        """Inputs and outputs of one matrix."""
        return math.prod(self.shape[d] for d in self.inputs), math.prod(self.shape[d] for d in self.outputs)

    @property
    def update_scale(self) -> float:
        """What makes the root mean square of an orthogonal matrix of these sizes `UPDATE_RMS`."""
        return UPDATE_RMS * max(self.sizes) ** 0.5

    @property
    def per_head(self) -> bool:
        """Whether every attention head is a matrix of its own."""
        lead = len(self.shape) - len(self.axes)
        return any(d >= lead and self.axes[d - lead].endswith("_heads") for d in self.batch)

    def to_matrices(self, weight: Array) -> Float[Array, "n small large"]:
        """The matrices, on the side where the Gram matrix is small."""
        fan_in, fan_out = (math.prod(weight.shape[d] for d in side) for side in (self.inputs, self.outputs))
        matrices = weight.transpose(self._order).reshape(-1, fan_in, fan_out)
        return matrices.mT if self._is_tall else matrices

    def from_matrices(self, matrices: Float[Array, "n small large"], shape: tuple[int, ...]) -> Array:
        """Undo `to_matrices` of a weight, or a device's part of one, of `shape`."""
        matrices = matrices.mT if self._is_tall else matrices
        weight = matrices.reshape([shape[d] for d in self._order])
        return weight.transpose([self._order.index(d) for d in range(len(self.shape))])

    @property
    def split_over(self) -> tuple[Axes, Axes]:
        """The mesh axes over which the small and the large side of the matrices lie in parts."""
        parts, lead = parts_of(self.axes), len(self.shape) - len(self.axes)
        inputs, outputs = (
            tuple(axis for d in side for axis in parts[d - lead]) for side in (self.inputs, self.outputs)
        )
        return (outputs, inputs) if self._is_tall else (inputs, outputs)

    @property
    def _is_tall(self) -> bool:
        fan_in, fan_out = self.sizes
        return fan_in > fan_out

    @property
    def _order(self) -> tuple[int, ...]:
        return self.batch + self.inputs + self.outputs


def matrix_spec(axes: Axes, shape: tuple[int, ...], table: Table = MATRICES) -> MatrixSpec:
    """The matrices in a Muon weight of `shape`, whose stacked dims come before its own `axes`."""
    stacked = len(shape) - len(axes)
    inputs, outputs = (tuple(axes.index(name) + stacked for name in side) for side in table[axes])
    batch = tuple(d for d in range(len(shape)) if d not in inputs + outputs)
    return MatrixSpec(shape, axes, batch, inputs, outputs)


def muon_directions(
    momenta: Mapping[str, Array], specs: Mapping[str, MatrixSpec], *, steps: int, dtype: Any
) -> dict[str, Array]:
    """Every weight's momentum with each of its matrices orthogonalised, of root mean square `UPDATE_RMS`, float32.

    Weights of the same axes and sizes are taken together as long as they are small: a few batches of products instead
    of hundreds. Large ones go alone and one after the other, since copies of all of them at one time cost more memory
    than the weights.
    """
    groups: dict[Any, list[str]] = {}
    for name, spec in specs.items():
        is_small = momenta[name].size <= TOGETHER
        groups.setdefault((spec.axes, spec.sizes, None if is_small else name), []).append(name)
    done: dict[str, Array] = {}
    turn = jnp.zeros(())
    for names in groups.values():
        parts, spec = [specs[name].to_matrices(momenta[name]) for name in names], specs[names[0]]
        is_large = momenta[names[0]].size > TOGETHER
        if is_large:
            parts, _ = jax.lax.optimization_barrier((parts, turn))
        result = orthogonalize(jnp.concatenate(parts) if len(parts) > 1 else parts[0], spec, steps=steps, dtype=dtype)
        ends = np.cumsum([len(part) for part in parts])[:-1]
        for name, matrices in zip(names, jnp.split(result, ends), strict=True):
            moved = matrices.astype(island(momenta[name].dtype)) * spec.update_scale
            done[name] = specs[name].from_matrices(moved, momenta[name].shape)
        turn = matrices[0, 0, 0] if is_large else turn
    return {name: done[name] for name in specs}


def orthogonalize(
    matrices: Float[Array, "n small large"], spec: MatrixSpec, *, steps: int, dtype: Any
) -> Float[Array, "n small large"]:
    """`newton_schulz` of a weight's matrices, whose sides many devices may hold in parts.

    The devices trade the parts for whole matrices, fewer of them each, and trade back: two all-to-alls, in `dtype`,
    whether one side is in parts or both, and no device gathers a whole weight.
    """
    small, large = spec.split_over
    if not small and not large:
        return newton_schulz(matrices, steps=steps, dtype=dtype)
    (n, p, q), (rows, columns) = (len(matrices), count_of(small), count_of(large)), matrices.shape[1:]
    parts = exchange(matrices.astype(dtype), small + large)  # of fewer matrices, those of each device in turn
    parts = parts.reshape(p, q, -1, rows, columns).transpose(2, 0, 3, 1, 4)
    done = newton_schulz(parts.reshape(-1, p * rows, q * columns), steps=steps, dtype=dtype)
    parts = done.reshape(-1, p, rows, q, columns).transpose(1, 3, 0, 2, 4)
    return exchange_back(parts.reshape(-1, rows, columns), small + large, n=n)


def newton_schulz(
    matrices: Float[Array, "n small large"], *, steps: int, dtype: Any = "float32"
) -> Float[Array, "n small large"]:
    """Drive singular values to about 0.7..1.2: X <- aX + (bA + cA^2)X with A = XX^T, in `dtype` (training 3.2).

    The norms before it are float32, so that bfloat16 cannot lose a matrix of small entries.
    """
    a, b, c = 3.4445, -4.7750, 2.0315

    def step(_: Any, x: Float[Array, "n small large"]) -> Float[Array, "n small large"]:
        gram = x @ x.mT
        return a * x + (b * gram + c * (gram @ gram)) @ x

    def iterate(x: Float[Array, "n small large"]) -> Float[Array, "n small large"]:
        x = x.astype(jnp.promote_types(jnp.float32, x.dtype))
        x = (x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-8)).astype(dtype)
        return jax.lax.fori_loop(0, steps, step, x)  # unrolled, K3 compiles for minutes more

    pieces = -(-matrices.size // AT_A_TIME)
    pieces = next((k for k in range(pieces, len(matrices) + 1) if len(matrices) % k == 0), 1)
    if pieces == 1:
        return iterate(matrices)
    return jax.lax.map(iterate, matrices.reshape(pieces, -1, *matrices.shape[1:])).reshape(matrices.shape)


def group_of(axes: Axes, table: Table = MATRICES) -> str:
    """`"muon"`, `"adam_decayed"` or `"adam"`; `ValueError` for axes that no table names."""
    if axes in table:
        return "muon"
    if axes in DECAYED or axes in MATRICES:  # a matrix that an experiment's table leaves out
        return "adam_decayed"
    if len(axes) == 1 or axes in NOT_DECAYED:
        return "adam"
    raise ValueError(f"a weight with axes {axes}: add it to a table in {__name__}")


def learning_rate(config: OptimizerConfig, *, steps: int, peak: float) -> optax.Schedule:
    """A linear rise to `peak`, then down to `min_lr_ratio * peak` at the last of `steps` updates.

    Down by a cosine, by a line, or ("wsd") by a line over the last `decay_fraction` of the steps only.
    """
    warmup = max(1, round(config.warmup_fraction * steps))
    rise = optax.schedules.linear_schedule(peak / warmup, peak, max(1, warmup - 1))
    rest = max(1, steps - warmup)
    if config.schedule == "cosine":
        fall = optax.schedules.cosine_decay_schedule(peak, rest, config.min_lr_ratio)
    else:
        decay = rest if config.schedule == "linear" else min(rest, max(1, round(config.decay_fraction * steps)))
        fall = optax.schedules.linear_schedule(peak, config.min_lr_ratio * peak, decay, rest - decay)
    return optax.schedules.join_schedules([rise, fall], [warmup])


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Updated:
    """What one update makes: the new weights and state, and numbers to report."""

    params: Any
    opt_state: Any
    metrics: dict[str, Float[Array, "..."]]


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Muon for the weights in `specs`, AdamW for the others; weights are a tree of variables, by name inside.

    The state is `{"momentum": {name: float32}, "adam": optax's}`. Metrics of an update: `grad_norm` before clipping,
    `grad_norm/GROUP` and `update_norm/GROUP` of each group (the update before the learning rate, without decay), and
    the root mean square of heads' updates: `head_update_rms/WEIGHT` of every head, and `/min` and `/max` of all.
    """

    config: OptimizerConfig
    specs: Mapping[str, MatrixSpec]
    groups: Mapping[str, str]  # of every weight
    axes: Mapping[str, Axes]  # of every weight
    adam: optax.GradientTransformation
    schedule: optax.Schedule  # of the Muon weights; what a run reports as its learning rate
    adam_schedule: optax.Schedule
    dtype: Any  # of Newton-Schulz

    def init(self, params: Any) -> Any:
        """The optimizer's state at step 0."""
        named = named_leaves(params)
        momentum = {name: jnp.zeros(named[name].shape, island(named[name].dtype)) for name in self.specs}
        return {"momentum": momentum, "adam": self.adam.init(self._others(named))}

    def update(self, grads: Any, opt_state: Any, params: Any, step: Int[Array, ""]) -> Updated:
        """The update number `step` (from 0)."""
        named_grads, named_params = named_leaves(grads), named_leaves(params)
        norms = self._norms(named_grads)
        norm = jnp.sqrt(sum(jnp.square(value) for value in norms.values()))
        scale = jnp.minimum(1.0, self.config.clip_norm / jnp.maximum(norm, 1e-12))
        clipped = {name: grad * scale for name, grad in named_grads.items()}

        mu = self.config.muon_momentum
        momentum = {name: mu * opt_state["momentum"][name] + clipped[name] for name in self.specs}
        nesterov = {name: clipped[name] + mu * momentum[name] for name in self.specs}
        directions = muon_directions(nesterov, self.specs, steps=self.config.muon_steps, dtype=self.dtype)
        metrics = {"grad_norm": norm, **{f"grad_norm/{group}": value for group, value in norms.items()}}
        metrics |= head_rms(directions, self.specs)

        adam, adam_state = self.adam.update(self._others(clipped), opt_state["adam"])
        directions |= adam
        metrics |= {f"update_norm/{group}": value for group, value in self._norms(directions).items()}
        new = {name: self._moved(name, named_params[name], directions[name], step) for name in named_params}
        return Updated(
            params=with_leaves(params, new), opt_state={"momentum": momentum, "adam": adam_state}, metrics=metrics
        )

    def _moved(self, name: str, weight: Array, direction: Array, step: Int[Array, ""]) -> Array:
        rate = (self.schedule if name in self.specs else self.adam_schedule)(step)
        decay = 0.0 if self.groups[name] == "adam" else self.config.weight_decay
        return weight - rate * (direction + decay * weight)

    def _norms(self, named: Mapping[str, Array]) -> dict[str, Float[Array, ""]]:
        """The norm of each group's weights taken together."""
        squares: dict[str, Any] = {}
        for name, leaf in named.items():
            of_part = jnp.sum(jnp.square(leaf.astype(island(leaf.dtype))))
            squares[self.groups[name]] = squares.get(self.groups[name], 0.0) + total_of_parts(of_part, self.axes[name])
        return {group: jnp.sqrt(value) for group, value in sorted(squares.items())}

    def _others(self, named: Mapping[str, Array]) -> dict[str, Array]:
        return {name: leaf for name, leaf in named.items() if name not in self.specs}


def make_optimizer(
    config: OptimizerConfig, params: Any, *, steps: int, dtype: Any = "float32", table: Table = MATRICES
) -> Optimizer:
    """The optimizer of a run of `steps` updates for a tree of variables (arrays or shapes), computing in `dtype`."""
    axes = {name: variable.axes for name, variable in _variables(params).items()}
    shapes = {name: leaf.shape for name, leaf in named_leaves(params).items()}
    schedule, adam_schedule = (
        learning_rate(config, steps=steps, peak=peak or config.learning_rate)
        for peak in (config.learning_rate, config.adam_learning_rate)
    )
    return Optimizer(
        config=config,
        specs={name: matrix_spec(axes[name], shapes[name], table) for name in axes if axes[name] in table},
        groups={name: group_of(axes[name], table) for name in axes},
        axes=axes,
        adam=optax.scale_by_adam(config.adam_b1, config.adam_b2, eps=1e-8),
        schedule=schedule,
        adam_schedule=adam_schedule,
        dtype=jnp.dtype(dtype),
    )


def clip_queries_and_keys(
    params: Transformer, max_logits: Mapping[str, Float[Array, "*layers H"]], limit: float
) -> Transformer:
    """QK-Clip: heads whose largest score of the step exceeds `limit` get weights that would have scored `limit`.

    `max_logits` is by kind of layer; -inf (a head that scored nothing) changes nothing. A score is query times key, so
    each side takes the square root; the extra key is shared by all heads and stays, so the query's part takes it all.
    """
    clipped = jax.tree.map(lambda leaf: leaf, params)
    for kind, largest in max_logits.items():
        mixer = clipped.layers(kind).mixer
        factor = (limit / jnp.maximum(largest, limit))[..., None, :, None]
        q_factor, k_factor = (stored_part(factor, w.axes, "mla_heads", dim=-2) for w in (mixer.q_up, mixer.k_up))
        q, k = mixer.q_up.get_value(), mixer.k_up.get_value()
        own = jnp.arange(q.shape[-1]) < k.shape[-1]
        mixer.q_up = mixer.q_up.replace(q * jnp.where(own, jnp.sqrt(q_factor), q_factor))
        mixer.k_up = mixer.k_up.replace(k * jnp.sqrt(k_factor))
    return clipped


def head_rms(directions: Mapping[str, Array], specs: Mapping[str, MatrixSpec]) -> dict[str, Float[Array, "..."]]:
    """The root mean square of every head's update by weight, and the least and largest of all."""
    sizes = {name: _rms_of_heads(directions[name], spec) for name, spec in specs.items() if spec.per_head}
    if not sizes:
        return {}
    every = jnp.concatenate([x.reshape(-1) for x in sizes.values()])
    by_weight = {f"head_update_rms/{name}": x for name, x in sizes.items()}
    return {**by_weight, "head_update_rms/min": jnp.min(every), "head_update_rms/max": jnp.max(every)}


def _rms_of_heads(direction: Array, spec: MatrixSpec) -> Float[Array, "..."]:
    """Of the heads of all devices, over the weight's batch dims."""
    sides, parts = spec.inputs + spec.outputs, parts_of(spec.axes)
    squares = jnp.sum(jnp.square(direction), axis=sides, keepdims=True)
    squares = total_over(squares, sum(spec.split_over, ()))
    for d in spec.batch:
        name = d - (direction.ndim - len(spec.axes))
        squares = joined_over(squares, parts[name] if name >= 0 else (), dim=d)
    return jnp.sqrt(squares / math.prod(spec.sizes)).squeeze(sides)


def _variables(params: Any) -> dict[str, Any]:
    variables = [leaf for leaf in jax.tree.leaves(params, is_leaf=is_variable) if leaf.get_value() is not None]
    return dict(zip(named_leaves(params), variables, strict=True))
