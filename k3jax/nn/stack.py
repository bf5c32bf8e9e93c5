"""The layers in depth order: a loop that reads like the model, and a scan with one body for each kind of layer.

Both run on the same weights: one stack for each kind of layer, layers in depth order (docs/adr/0002). Training feeds
the scan slices of the stacks as scan inputs, so that gradients come out as scan outputs; with a cache the stacks stay
whole and are indexed inside the innermost body, so that no weight or cache stack is copied.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from k3jax.nn.attn_res import Residual
from k3jax.nn.blocks import Blocks
from k3jax.nn.cache import Cache
from k3jax.nn.layer import Layer
from k3jax.nn.plan import EMPTY, Depth, StackPlan
from k3jax.nn.slots import StackInput, Stacks, Traced, layer_function, read_for

LIVE = "live"  # name of what the backward pass keeps of each layer


@dataclass(frozen=True)
class Trace:
    """What a forward pass did: the live sum after each layer, and the experts that each MoE layer chose."""

    sums: Float[Array, "layers B T D"]
    experts: Int[Array, "moe B T k"]


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
    blocks = Blocks(stacks, plan, inputs)
    (snapshots, live, cache), scanned = blocks.run(residual.snapshots, residual.live, cache)
    residual = Residual(snapshots, inputs.config.num_snapshots, live, True)
    return _output(residual, cache, [*traced, *_in_depth_order(scanned, plan)], inputs)


def _keep_live(block: Any, inputs: StackInput) -> Any:
    """An AttnRes block that keeps each layer's live sum for the backward pass, and reads the bank there again.

    What the reads saw of the bank is as large as all of the block's sums; together with the checkpoint of every layer,
    as much is kept as for a plain residual stream. Where some kind of layer keeps everything, so does the block.
    """
    policy = jax.checkpoint_policies.save_only_these_names(LIVE)
    return jax.checkpoint(block, prevent_cse=False, policy=policy) if inputs.recomputes_all else block


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
        queries = jnp.stack([module.queries(live.dtype) for module in modules])
        banks = _unstack(read_for(snapshots, count, queries, inputs.config.norm_eps))
        traced: list[Traced] = []
        for number, module, bank in zip(numbers, modules, banks, strict=True):
            apply = layer_function(inputs, has_live or number != numbers[0])
            apply = jax.checkpoint(apply) if inputs.recomputes(inputs.config.layer_kind(number)) else apply
            index, is_mla = int(depth.in_cache[number]), inputs.config.is_mla(number)
            kept = None if cache is None else cache.read(is_mla, index)
            live, kept, shown = apply(module, bank, live, kept)
            live = checkpoint_name(live, LIVE)
            cache = None if cache is None else cache.write(kept)
            traced.append(inputs.keep(live, shown))
        return live, cache, traced

    return run


def _unstack(stack: Any) -> list[Any]:
    """The parts along the first axis of a tree's arrays.

    The transpose is one concatenation; that of indexing adds a stack for each part.
    """
    leaves, treedef = jax.tree.flatten(stack)
    sizes = (1,) * leaves[0].shape[0]
    parts = [[part.squeeze(0) for part in jax.lax.split(leaf, sizes)] for leaf in leaves]
    return [jax.tree.unflatten(treedef, leaf) for leaf in zip(*parts, strict=True)]


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
