"""What loop and scan share: one layer's run, the bank's reads, and the slots that a scan over layers goes through."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from k3jax.config import ModelConfig
from k3jax.nn.cache import Cache
from k3jax.nn.layer import Layer
from k3jax.nn.plan import EMPTY, Depth, StackPlan
from k3jax.nn.watch import NOTHING, Watch
from pallas_kernels.attn_res import BankRead, read_bank
from pallas_kernels.mx import MXFP4Array

Stacks = Mapping[str, Layer]
Traced = tuple[Any, dict[str, Any]]  # of one layer, where asked for: the live sum after it, what it shows


@dataclass(frozen=True)
class StackInput:
    """What every layer of a forward pass gets besides the residual, and what the stack is asked for."""

    config: ModelConfig
    segment_ids: Int[Array, "B T"] | None
    cache: Cache | None
    remat: str  # which layers the backward pass computes again: "layer" (all), "none", or kinds as in "kda_moe,mla_moe"
    collect: bool  # return a trace
    watch: Watch

    def recomputes(self, kind: str) -> bool:
        """Whether the backward pass computes layers of a kind again."""
        return self.remat == "layer" or kind in self.remat.split(",")

    @property
    def recomputes_all(self) -> bool:
        """Whether it computes every layer again."""
        return all(map(self.recomputes, Depth(self.config).layers_of))

    def keep(self, live: Array, shown: dict[str, Any]) -> Traced:
        """What of a layer's run leaves the stack."""
        if self.collect:
            return live, shown
        return None, {name: seen for name, seen in shown.items() if name in self.watch}


def layer_function(inputs: StackInput, has_live: Any) -> Any:
    """(layer, its reads of the bank, live sum, what it keeps) -> (live sum, what it keeps, what it shows)."""

    def apply(layer: Layer, bank: BankRead, live: Array, kept: Any) -> tuple[Array, Any, dict[str, Any]]:
        return layer(bank, live, has_live, segment_ids=inputs.segment_ids, cache=kept, watch=inputs.watch)

    return apply


def read_for(snapshots: Array, count: Any, queries: Float[Array, "layers 2 D"], eps: float) -> BankRead:
    """One pass over the bank for the two reads of some layers; shapes [layers, 2, B, T, D] and [layers, 2, B, T]."""
    seen = read_bank(snapshots, count, queries.reshape(-1, queries.shape[-1]), eps=eps)
    return BankRead(*(x.reshape(*queries.shape[:-1], *x.shape[1:]) for x in seen))


class Slots:
    """The slots of one kind of layer in the scan: their scan inputs, and the layer that runs in one of them."""

    def __init__(self, stacks: Stacks, kind: str, plan: StackPlan, inputs: StackInput):
        layers = plan.mla if kind.startswith("mla") else plan.kda
        depth, present, filled = Depth(inputs.config), layers != EMPTY, np.maximum(layers, 0)
        self.input, self.kind, self.stack, self.mixer = inputs, kind, stacks.get(kind), kind[:3]
        self.has_empty = not present.all()
        in_stack, in_cache = (np.where(present, index[filled], 0) for index in (depth.in_stack, depth.in_cache))
        self.inputs: dict[str, Any] = {
            "active": jnp.asarray(present),
            "has_live": jnp.asarray(plan.has_live[1 if self.mixer == "mla" else 0]),
            "in_stack": jnp.asarray(in_stack),
            "in_cache": jnp.asarray(in_cache),
        }
        self.weights: Layer | None = None  # of every slot, where they are not read in place
        if inputs.cache is None:
            self.weights = jax.tree.map(lambda w: _take_slots(w, present), self.stack)
        elif self.stack is not None:
            self.inputs["queries"] = self.stack.queries(inputs.config.dtype)[in_stack]

    def queries(self, slots: dict[str, Any], weights: Layer | None, dtype: Any) -> Float[Array, "*slots 2 D"]:
        """The queries of a block's slots."""
        return slots["queries"] if weights is None else weights.queries(dtype)

    def run_again(self, slot: dict[str, Any], weights: Layer | None, bank: BankRead, live: Array) -> Array:
        """The live sum after a slot's layer once more, for the backward pass: nobody watches."""
        return self._run(dataclasses.replace(self.input, watch=NOTHING), slot, weights, bank, live, None)[0]

    def run(self, slot: dict[str, Any], weights: Layer | None, bank: BankRead, live: Array, kept: Any) -> tuple:
        """A slot's layer: (live sum after it, what it keeps, what it shows); an empty slot changes nothing."""
        return self._run(self.input, slot, weights, bank, live, kept)

    def _run(self, inputs: StackInput, slot: dict, weights: Any, bank: BankRead, live: Array, kept: Any) -> tuple:
        apply = layer_function(inputs, slot["has_live"])

        def run(weights: Layer | None, bank: BankRead, live: Array, kept: Any) -> tuple:
            layer = _layer_of(self.stack, slot["in_stack"]) if weights is None else weights
            return apply(layer, bank, live, kept)

        operands = weights, bank, live, kept
        if not self.has_empty:
            return run(*operands)
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run, *operands)[2])
        skip = lambda _, __, live, kept: (live, kept, nothing)  # noqa: E731
        return jax.lax.cond(slot["active"], run, skip, *operands)


def _layer_of(stack: Layer | None, index: Array) -> Layer:
    """One layer of a stack; an MXFP4 leaf may stay whole and note the layer, which its kernel reads in place."""
    is_mxfp4 = lambda w: isinstance(w, MXFP4Array)  # noqa: E731
    return jax.tree.map(lambda w: w.at_layer(index) if is_mxfp4(w) else w[index], stack, is_leaf=is_mxfp4)


def _take_slots(stack: Array, present: np.ndarray) -> Array:
    """The stack's layers at the slots, which they fill in depth order; an empty slot gets zeros and gives no gradient.

    Pieces side by side, and so is the transpose: compilers make a gather of whole weights in several passes.
    """
    filled = present.reshape(-1)
    edges = [0, *(np.flatnonzero(np.diff(filled)) + 1), filled.size]
    runs = [(filled[a], int(b - a)) for a, b in itertools.pairwise(edges)]  # of slots, filled and empty in turn
    layers = iter(jax.lax.split(stack, [size for is_filled, size in runs if is_filled]))
    empty = lambda size: jnp.zeros((size, *stack.shape[1:]), stack.dtype)  # noqa: E731
    pieces = [next(layers) if is_filled else empty(size) for is_filled, size in runs]
    return jnp.concatenate(pieces).reshape(*present.shape, *stack.shape[1:])
