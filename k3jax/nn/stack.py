"""The layers in depth order: a loop that reads like the model, and a scan with one body for each kind of layer.

Both run on the same weights: one stack for each kind of layer, layers in depth order (docs/adr/0002). Training feeds
the scan slices of the stacks as scan inputs, so that gradients come out as scan outputs; with a cache the stacks stay
whole and are indexed inside the innermost body, so that no weight or cache stack is copied.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from k3jax.config import ModelConfig
from k3jax.nn.attn_res import Residual
from k3jax.nn.cache import Cache
from k3jax.nn.layer import Layer
from k3jax.nn.param import island
from k3jax.nn.plan import EMPTY, Depth, StackPlan
from k3jax.nn.watch import Watch
from pallas_kernels.attn_res import BankRead, read_bank
from pallas_kernels.mx import MXFP4Array

Stacks = Mapping[str, Layer]
LIVE = "live"  # name of what the backward pass keeps of each layer
Traced = tuple[Any, dict[str, Any]]  # of one layer, where asked for: the live sum after it, what it shows


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
    watch: Watch

    def keep(self, live: Array, shown: dict[str, Any]) -> Traced:
        """What of a layer's run leaves the stack."""
        if self.collect:
            return live, shown
        return None, {name: seen for name, seen in shown.items() if name in self.watch}


@dataclass(frozen=True)
class StackOutput:
    """The residual after the last layer, the new cache (None without one) and, where asked for, the trace.

    `watched[kind][name]` is what the watch of that name returned for each layer of a kind, stacked in depth order like
    its weights.
    """

    residual: Residual
    cache: Cache | None
    trace: Trace | None
    watched: dict[str, Any]


def run_loop(stacks: Stacks, x: Float[Array, "B T D"], inputs: StackInput) -> StackOutput:
    """Run all layers one after the other; `x` is the token embedding."""
    residual = Residual.start(x, inputs.config.num_snapshots)
    residual, cache, traced = _run_layers(stacks, range(inputs.config.num_layers), residual, inputs)
    return _output(residual, cache, traced, inputs)


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
        queries = [slots.queries(units, x.dtype) for slots, units in ((kda, block["kda"]), (mla, block["mla"]))]
        banks = _read_bank(snapshots, block["index"] + 1, queries, inputs.config.norm_eps)

        def unit_step(carry: tuple, unit: tuple) -> tuple[tuple, Any]:
            carry, kda_traced = jax.lax.scan(kda.step, carry, unit[0])
            carry, mla_traced = mla.step(carry, unit[1])
            return carry, (kda_traced, mla_traced)

        units = (block["kda"], banks[0]), (block["mla"], banks[1])
        (live, _, cache), traced = jax.lax.scan(unit_step, (live, ~block["seal"], cache), units)
        return (snapshots, live, cache), traced

    blocks = {
        "index": jnp.arange(len(plan.kda)),
        "seal": jnp.asarray(plan.seals),
        "kda": kda.inputs,
        "mla": mla.inputs,
    }
    carry = (residual.snapshots, residual.live, cache)
    (snapshots, live, cache), scanned = jax.lax.scan(_keep_live(block_step, inputs), carry, blocks)
    residual = Residual(snapshots, inputs.config.num_snapshots, live, True)
    return _output(residual, cache, [*traced, *_in_depth_order(scanned, plan)], inputs)


def _keep_live(block: Any, inputs: StackInput) -> Any:
    """An AttnRes block that keeps each layer's live sum for the backward pass, and reads the bank there again.

    What the reads saw of the bank is as large as all of the block's sums; together with the checkpoint of every layer,
    as much is kept as for a plain residual stream.
    """
    policy = jax.checkpoint_policies.save_only_these_names(LIVE)
    return jax.checkpoint(block, prevent_cse=False, policy=policy) if inputs.remat else block


def _read_bank(snapshots: Array, count: Any, queries: list[Array], eps: float) -> list[BankRead]:
    """One pass over the bank for the queries of all parts, each [*lead, 2, D]; its reads for each part."""
    seen = read_bank(snapshots, count, jnp.concatenate([q.reshape(-1, q.shape[-1]) for q in queries]), eps=eps)
    ends = np.cumsum([math.prod(q.shape[:-1]) for q in queries])[:-1]
    parts = zip(*(jnp.split(x, ends) for x in seen), strict=True)
    return [
        BankRead(*(x.reshape(*q.shape[:-1], *x.shape[1:]) for x in part))
        for q, part in zip(queries, parts, strict=True)
    ]


def _run_layers(
    stacks: Stacks, layers: Sequence[int], residual: Residual, inputs: StackInput
) -> tuple[Residual, Cache | None, list[Traced]]:
    depth, cache, traced = Depth(inputs.config), inputs.cache, []
    unstacked = {kind: _unstack(stacks[kind]) for kind in dict.fromkeys(map(inputs.config.layer_kind, layers))}
    for _, block in itertools.groupby(layers, lambda layer: layer // inputs.config.attn_res_block):
        numbers = list(block)
        if numbers[0] % inputs.config.attn_res_block == 0:
            residual = residual.seal()
        modules = [unstacked[inputs.config.layer_kind(n)][depth.in_stack[n]] for n in numbers]
        run = _keep_live(_block_function(numbers, depth, residual.count, residual.has_live, inputs), inputs)
        live, cache, block_traced = run(modules, residual.snapshots, residual.live, cache)
        residual = Residual(residual.snapshots, residual.count, live, True)
        traced += block_traced
    return residual, cache, traced


def _block_function(numbers: list[int], depth: Depth, count: Any, has_live: Any, inputs: StackInput) -> Any:
    """(layers, snapshots, live sum, cache) -> (live sum, cache, traces) for the layers `numbers` of one block."""

    def run(modules: list[Layer], snapshots: Array, live: Array, cache: Cache | None) -> tuple:
        queries = [module.queries(live.dtype) for module in modules]
        banks = _read_bank(snapshots, count, queries, inputs.config.norm_eps)
        traced: list[Traced] = []
        for number, module, bank in zip(numbers, modules, banks, strict=True):
            apply = _layer_function(inputs, has_live or number != numbers[0])
            apply = jax.checkpoint(apply) if inputs.remat else apply
            index, is_mla = int(depth.in_cache[number]), inputs.config.is_mla(number)
            kept = None if cache is None else cache.read(is_mla, index)
            live, kept, shown = apply(module, bank, live, kept)
            live = checkpoint_name(live, LIVE)
            cache = None if cache is None else cache.write(is_mla, index, kept)
            traced.append(inputs.keep(live, shown))
        return live, cache, traced

    return run


def _layer_function(inputs: StackInput, has_live: Any) -> Any:
    """(layer, its reads of the bank, live sum, what it keeps) -> (live sum, what it keeps, what it shows)."""
    length = None if inputs.cache is None else inputs.cache.length

    def apply(layer: Layer, bank: BankRead, live: Array, kept: Any) -> tuple[Array, Any, dict[str, Any]]:
        live, new, shown = layer(
            bank, live, has_live, segment_ids=inputs.segment_ids, cache=kept, length=length, watch=inputs.watch
        )
        return live, None if kept is None else new, shown

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
        elif self.stack is not None:
            self.inputs["queries"] = self.stack.queries(inputs.config.dtype)[in_stack]

    def queries(self, slots: dict[str, Any], dtype: Any) -> Float[Array, "*slots 2 D"]:
        """The queries of a block's slots; none where the config has no such layer at all."""
        if self.stack is None:
            return jnp.zeros((*slots["active"].shape, 0, self.input.config.width), island(dtype))
        return slots["queries"] if "queries" in slots else slots["weights"].queries(dtype)

    def step(self, carry: tuple, inputs: tuple[dict[str, Any], BankRead]) -> tuple[tuple, Any]:
        """Run a slot's layer on carry (live sum, whether it holds anything, cache); an empty slot changes nothing."""
        if self.stack is None:
            return carry, None
        (live, has_live, cache), (slot, bank) = carry, inputs
        apply = _layer_function(self.input, has_live)

        def run(weights: Layer | None, bank: BankRead, live: Array, kept: Any) -> tuple:
            layer = _layer_of(self.stack, slot["in_stack"]) if weights is None else weights
            return apply(layer, bank, live, kept)

        def run_or_skip(*operands: Any) -> tuple:
            if not self.has_empty:
                return run(*operands)
            nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run, *operands)[2])
            skip = lambda _, __, live, kept: (live, kept, nothing)  # noqa: E731
            return jax.lax.cond(slot["active"], run, skip, *operands)

        # The checkpoint stands outside the branch: a checkpoint inside it would save the weights.
        run_or_skip = jax.checkpoint(run_or_skip, prevent_cse=False) if self.input.remat else run_or_skip
        kept = None if cache is None else cache.read(self.is_mla, slot["in_cache"])
        live, kept, shown = run_or_skip(slot.get("weights"), bank, live, kept)
        live = checkpoint_name(live, LIVE)
        cache = None if cache is None else cache.write(self.is_mla, slot["in_cache"], kept)
        return (live, has_live | slot["active"], cache), self.input.keep(live, shown)


def _layer_of(stack: Layer | None, index: Array) -> Layer:
    """One layer of a stack; an MXFP4 leaf may stay whole and note the layer, which its kernel reads in place."""
    is_mxfp4 = lambda w: isinstance(w, MXFP4Array)  # noqa: E731
    return jax.tree.map(lambda w: w.at_layer(index) if is_mxfp4(w) else w[index], stack, is_leaf=is_mxfp4)


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


def _output(residual: Residual, cache: Cache | None, traced: list[Traced], inputs: StackInput) -> StackOutput:
    """The output of a stack from what each layer kept, in depth order."""
    watched: dict[str, list[Any]] = {}
    for layer, (_, shown) in enumerate(traced):
        if seen := {name: shown[name] for name in inputs.watch if name in shown}:
            watched.setdefault(inputs.config.layer_kind(layer), []).append(seen)
    stacked = {kind: jax.tree.map(lambda *x: jnp.stack(x), *layers) for kind, layers in watched.items()}
    return StackOutput(residual, cache, _trace(traced) if inputs.collect else None, stacked)


def _trace(traced: list[Traced]) -> Trace:
    experts = [shown["experts"] for _, shown in traced if "experts" in shown]
    return Trace(jnp.stack([live for live, _ in traced]), jnp.stack(experts))
