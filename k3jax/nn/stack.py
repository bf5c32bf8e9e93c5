"""The layers in depth order: a loop that reads like the model, and a scan with one body for each kind of layer.

Both run on the same weights: one stack for each kind of layer, layers in depth order (docs/adr/0002). Training feeds
the scan slices of the stacks as scan inputs, so that gradients come out as scan outputs; with a cache the stacks stay
whole and are indexed inside the innermost body, so that no weight or cache stack is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from k3jax.config import ModelConfig
from k3jax.nn.attn_res import Residual
from k3jax.nn.cache import Cache
from k3jax.nn.layer import Layer
from k3jax.nn.plan import EMPTY, Depth, StackPlan

Stacks = Mapping[str, Layer]
Traced = tuple[Array, Array | None]  # of one layer: the live sum after it, the experts it chose


@dataclass(frozen=True)
class Trace:
    """What a forward pass did: the live sum after each layer, and the experts that each MoE layer chose."""

    sums: Float[Array, "layers B T D"]
    experts: Int[Array, "moe B T k"]


@dataclass(frozen=True)
class StackInput:
    """What every layer of a forward pass gets besides the residual, and what the stack is asked for."""

    config: ModelConfig
    segment_ids: Int[Array, "B T"] | None
    cache: Cache | None
    remat: bool  # recompute each layer in the backward pass
    collect: bool  # return a trace


@dataclass(frozen=True)
class StackOutput:
    """The residual after the last layer, the new cache (None without one) and, where asked for, the trace."""

    residual: Residual
    cache: Cache | None
    trace: Trace | None


def run_loop(stacks: Stacks, x: Float[Array, "B T D"], inputs: StackInput) -> StackOutput:
    """Run all layers one after the other; `x` is the token embedding."""
    residual = Residual.start(x, inputs.config.num_snapshots)
    residual, cache, traced = _run_layers(stacks, range(inputs.config.num_layers), residual, inputs)
    return StackOutput(residual, cache, _trace(traced) if inputs.collect else None)


def run_scan(stacks: Stacks, x: Float[Array, "B T D"], inputs: StackInput, plan: StackPlan) -> StackOutput:
    """Run `plan.prefix` one after the other and all other layers as nested scans: blocks, units, KDA slots."""
    residual = Residual.start(x, inputs.config.num_snapshots)
    residual, cache, traced = _run_layers(stacks, plan.prefix, residual, inputs)
    kda = _Slots(stacks, "kda_moe", plan.kda, inputs)
    mla = _Slots(stacks, "mla_moe", plan.mla, inputs)

    def block_step(carry: tuple, block: dict) -> tuple[tuple, Any]:
        snapshots, live, cache = carry
        # A seal, as in Residual.seal. From here to the end of the block the bank is a constant of the inner scans.
        snapshots = jnp.where(block["seal"], snapshots.at[block["index"]].set(live), snapshots)
        live = jnp.where(block["seal"], 0, live).astype(live.dtype)
        count = block["index"] + 1

        def unit_step(carry: tuple, unit: dict) -> tuple[tuple, Any]:
            carry, kda_traced = jax.lax.scan(lambda c, slot: kda.step(snapshots, count, c, slot), carry, unit["kda"])
            carry, mla_traced = mla.step(snapshots, count, carry, unit["mla"])
            return carry, (kda_traced, mla_traced)

        (live, _, cache), traced = jax.lax.scan(unit_step, (live, ~block["seal"], cache), block["units"])
        return (snapshots, live, cache), traced

    blocks = {
        "index": jnp.arange(len(plan.kda)),
        "seal": jnp.asarray(plan.seals),
        "units": {"kda": kda.inputs, "mla": mla.inputs},
    }
    carry = (residual.snapshots, residual.live, cache)
    (snapshots, live, cache), scanned = jax.lax.scan(block_step, carry, blocks)
    residual = Residual(snapshots, inputs.config.num_snapshots, live, True)
    trace = _trace([*traced, *_in_depth_order(scanned, plan)]) if inputs.collect else None
    return StackOutput(residual, cache, trace)


def _run_layers(
    stacks: Stacks, layers: Iterable[int], residual: Residual, inputs: StackInput
) -> tuple[Residual, Cache | None, list[Traced]]:
    depth, cache, traced = Depth(inputs.config), inputs.cache, []
    unstacked = {kind: _unstack(stacks[kind]) for kind in dict.fromkeys(map(inputs.config.layer_kind, layers))}
    for layer in layers:
        if layer % inputs.config.attn_res_block == 0:
            residual = residual.seal()
        module = unstacked[inputs.config.layer_kind(layer)][depth.in_stack[layer]]
        index, is_mla = int(depth.in_cache[layer]), inputs.config.is_mla(layer)
        apply = _layer_function(inputs, residual.count, residual.has_live)
        apply = jax.checkpoint(apply) if inputs.remat else apply
        kept = None if cache is None else cache.read(is_mla, index)
        live, kept, experts = apply(module, residual.snapshots, residual.live, kept)
        cache = None if cache is None else cache.write(is_mla, index, kept)
        residual = Residual(residual.snapshots, residual.count, live, True)
        traced.append((live, experts))
    return residual, cache, traced


def _layer_function(inputs: StackInput, count: Any, has_live: Any) -> Any:
    """(layer, snapshots, live sum, what it keeps) -> (live sum, what it keeps, chosen experts)."""
    length = None if inputs.cache is None else inputs.cache.length

    def apply(layer: Layer, snapshots: Array, live: Array, kept: Any) -> tuple[Array, Any, Array | None]:
        residual = Residual(snapshots, count, live, has_live)
        residual, new, experts = layer(residual, segment_ids=inputs.segment_ids, cache=kept, length=length)
        return residual.live, None if kept is None else new, experts

    return apply


class _Slots:
    """The slots of one kind of layer in the scan: their scan inputs, and the step that runs one of them."""

    def __init__(self, stacks: Stacks, kind: str, layers: np.ndarray, inputs: StackInput):
        depth, present, filled = Depth(inputs.config), layers != EMPTY, np.maximum(layers, 0)
        self.input, self.stack, self.is_mla = inputs, stacks.get(kind), kind.startswith("mla")
        self.has_empty = not present.all()
        in_stack, in_cache = (np.where(present, index[filled], 0) for index in (depth.in_stack, depth.in_cache))
        self.inputs: dict[str, Any] = {
            "active": jnp.asarray(present),
            "in_stack": jnp.asarray(in_stack),
            "in_cache": jnp.asarray(in_cache),
        }
        if inputs.cache is None:
            self.inputs["weights"] = jax.tree.map(lambda w: _take_slots(w, present, in_stack), self.stack)

    def step(self, snapshots: Array, count: Array, carry: tuple, slot: dict[str, Any]) -> tuple[tuple, Any]:
        """Run the slot's layer on carry (live sum, whether it holds anything, cache); an empty slot changes nothing."""
        if self.stack is None:  # the config has no such layer at all
            return carry, None
        live, has_live, cache = carry
        apply = _layer_function(self.input, count, has_live)

        def run(weights: Layer | None, snapshots: Array, live: Array, kept: Any) -> tuple:
            layer = jax.tree.map(lambda w: w[slot["in_stack"]], self.stack) if weights is None else weights
            return apply(layer, snapshots, live, kept)

        def run_or_skip(*operands: Any) -> tuple:
            if not self.has_empty:
                return run(*operands)
            experts = jax.eval_shape(run, *operands)[2]
            skip = lambda _, __, live, kept: (live, kept, jnp.zeros(experts.shape, experts.dtype))  # noqa: E731
            return jax.lax.cond(slot["active"], run, skip, *operands)

        # The checkpoint stands outside the branch: a checkpoint inside it would save the weights and the bank.
        run_or_skip = jax.checkpoint(run_or_skip, prevent_cse=False) if self.input.remat else run_or_skip
        kept = None if cache is None else cache.read(self.is_mla, slot["in_cache"])
        live, kept, experts = run_or_skip(slot.get("weights"), snapshots, live, kept)
        cache = None if cache is None else cache.write(self.is_mla, slot["in_cache"], kept)
        return (live, has_live | slot["active"], cache), (live, experts) if self.input.collect else None


def _unstack(stack: Layer) -> list[Layer]:
    """The layers of a stack; the transpose is one concatenation, where that of indexing adds a stack for each layer."""
    leaves, treedef = jax.tree.flatten(stack)
    sizes = (1,) * leaves[0].shape[0]
    parts = [[part.squeeze(0) for part in jax.lax.split(leaf, sizes)] for leaf in leaves]
    return [jax.tree.unflatten(treedef, leaf) for leaf in zip(*parts, strict=True)]


def _take_slots(stack: Array, present: np.ndarray, in_stack: np.ndarray) -> Array:
    """The stack's layers at the slots; an empty slot gets layer 0, which nothing reads, and gives no gradient.

    The transpose of this gather is a gather too: a scatter of whole weights would be slow.
    """
    slot_of_layer = np.flatnonzero(present.reshape(-1))  # slots fill the stack in depth order

    def take(stack: Array) -> Array:
        return stack[in_stack.reshape(-1)].reshape(*in_stack.shape, *stack.shape[1:])

    if not jnp.issubdtype(stack.dtype, jnp.floating):
        return take(stack)
    if present.all():
        return stack.reshape(*in_stack.shape, *stack.shape[1:])

    def backward(_: None, gradient: Array) -> tuple[Array]:
        return (gradient.reshape(-1, *gradient.shape[in_stack.ndim :])[slot_of_layer],)

    gather = jax.custom_vjp(take)
    gather.defvjp(lambda stack: (take(stack), None), backward)
    return gather(stack)


def _in_depth_order(scanned: Any, plan: StackPlan) -> list[Traced]:
    """Per-slot outputs of the scan as one entry a layer."""
    found = {}
    for layers, traced in zip((plan.kda, plan.mla), scanned, strict=True):
        for slot in zip(*np.nonzero(layers != EMPTY), strict=True):
            found[int(layers[slot])] = jax.tree.map(lambda x, slot=slot: x[slot], traced)
    return [found[layer] for layer in sorted(found)]


def _trace(traced: list[Traced]) -> Trace:
    experts = [experts for _, experts in traced if experts is not None]
    return Trace(jnp.stack([live for live, _ in traced]), jnp.stack(experts))
