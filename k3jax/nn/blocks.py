"""The scan over AttnRes blocks, units and slots, and its backward pass.

    scan over blocks                  seals the live sum, reads the bank once for all slots of the block
      scan over units
        scan over KDA slots, then an MLA slot

In training the backward pass is written by hand. It needs the live sum before every slot and, because the bank only
grows, one bank for all blocks: the first `count` snapshots of the last one. Automatic differentiation would keep a bank
for every block. Each layer runs again from its live sum, and its gradient follows at once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from k3jax.nn.cache import Cache
from k3jax.nn.layer import Layer
from k3jax.nn.plan import StackPlan
from k3jax.nn.slots import Slots, StackInput, Stacks, read_for
from pallas_kernels.attn_res import BankRead

Carry = tuple[Array, Array, Cache | None]  # snapshots, live sum, cache
Weights = tuple[Layer | None, Layer | None]  # of the KDA slots, of the MLA slots


class Blocks:
    """The layers of a plan's blocks, of one model and one forward pass."""

    def __init__(self, stacks: Stacks, plan: StackPlan, inputs: StackInput):
        self.input, self.plan = inputs, plan
        self.kda, self.mla = Slots(stacks, "kda_moe", plan, inputs), Slots(stacks, "mla_moe", plan, inputs)
        self.blocks = {
            "index": jnp.arange(len(plan.kda)),
            "seal": jnp.asarray(plan.seals),
            "kda": self.kda.inputs,
            "mla": self.mla.inputs,
        }

    def run(
        self, snapshots: Float[Array, "N B T D"], live: Float[Array, "B T D"], cache: Cache | None
    ) -> tuple[Carry, Any]:
        """The residual and cache after the last block, and what every slot traced."""
        weights = self.kda.weights, self.mla.weights
        if cache is not None or self.input.collect or not self.input.recomputes_all:
            carry, (traced, _) = self._forward(weights, (snapshots, live, cache), keep_sums=False)
            return carry, traced
        floating, rest = _partition(weights)

        def outputs(floating: Any, snapshots: Array, live: Array, *, keep_sums: bool) -> tuple[Any, Any]:
            carry = (snapshots, live, None)
            (snapshots, live, _), found = self._forward(_join(floating, rest), carry, keep_sums=keep_sums)
            traced, sums = found
            return (snapshots, live, traced), sums

        @jax.custom_vjp
        def run(floating: Any, snapshots: Array, live: Array) -> Any:
            return outputs(floating, snapshots, live, keep_sums=False)[0]

        def forward(floating: Any, snapshots: Array, live: Array) -> tuple[Any, Any]:
            out, sums = outputs(floating, snapshots, live, keep_sums=True)
            return out, (floating, out[0], sums)

        def backward(kept: Any, gradients: Any) -> tuple[Any, Array, Array]:
            floating, bank, sums = kept
            return self._backward(floating, rest, bank, sums, gradients[:2])

        run.defvjp(forward, backward)
        snapshots, live, traced = run(floating, snapshots, live)
        return (snapshots, live, None), traced

    def _forward(self, weights: Weights, carry: Carry, *, keep_sums: bool) -> tuple[Carry, Any]:
        """Also returns what every slot traced and, where asked, the live sum before it."""
        step = partial(_step, keep_sums)

        def block_step(carry: Carry, inputs: tuple[dict, Weights]) -> tuple[Carry, Any]:
            (snapshots, live, cache), (block, weights) = carry, inputs
            # A seal, as in Residual.seal. From here to the end of the block the bank is a constant of the inner scans.
            snapshots = jnp.where(block["seal"], snapshots.at[block["index"]].set(live), snapshots)
            live = jnp.where(block["seal"], 0, live).astype(live.dtype)
            kda, mla = self._read(block, weights, snapshots)

            def unit_step(carry: tuple, unit: tuple) -> tuple[tuple, Any]:
                carry, of_kda = jax.lax.scan(partial(step, self.kda), carry, unit[0])
                carry, of_mla = step(self.mla, carry, unit[1])
                return carry, (of_kda, of_mla)

            units = (block["kda"], weights[0], kda), (block["mla"], weights[1], mla)
            (live, cache), found = jax.lax.scan(unit_step, (live, cache), units)
            return (snapshots, live, cache), found

        carry, (of_kda, of_mla) = jax.lax.scan(block_step, carry, (self.blocks, weights))
        return carry, ((of_kda[0], of_mla[0]), (of_kda[1], of_mla[1]))

    def _read(self, block: dict, weights: Weights, snapshots: Array) -> list[BankRead]:
        queries = [
            slots.queries(block[name], of_slots, snapshots.dtype)
            for slots, name, of_slots in ((self.kda, "kda", weights[0]), (self.mla, "mla", weights[1]))
        ]
        return read_for(snapshots, block["index"] + 1, queries, self.input.config.norm_eps)

    def _backward(
        self, floating: Any, rest: Any, bank: Array, sums: tuple[Any, Any], gradients: tuple[Array, Array]
    ) -> tuple[Any, Array, Array]:
        """Gradients of the slots' weights, of the bank before the first block and of the live sum before it."""

        def block_back(carry: tuple[Array, Array], inputs: tuple) -> tuple[tuple[Array, Array], Any]:
            (d_bank, d_live), (block, floating, rest, sums) = carry, inputs
            reads = lambda floating, bank: self._read(block, _join(floating, rest), bank)  # noqa: E731
            (kda, mla), of_reads = jax.vjp(reads, floating, bank)

            def unit_back(d_live: Array, unit: tuple) -> tuple[Array, Any]:
                d_live, of_mla = _step_back(self.mla, d_live, unit[1])
                d_live, of_kda = jax.lax.scan(partial(_step_back, self.kda), d_live, unit[0], reverse=True)
                return d_live, (of_kda, of_mla)

            units = tuple(zip((block["kda"], block["mla"]), floating, rest, (kda, mla), sums, strict=True))
            d_live, (of_kda, of_mla) = jax.lax.scan(unit_back, d_live, units, reverse=True)
            d_floating, d_read = of_reads([of_kda[1], of_mla[1]])
            d_floating = jax.tree.map(jnp.add, d_floating, (of_kda[0], of_mla[0]))
            d_bank = d_bank + d_read
            # Undo the seal: the live sum before the block is the snapshot that it made.
            sealed = jax.lax.dynamic_index_in_dim(d_bank, block["index"], keepdims=False)
            kept = d_bank.at[block["index"]].set(0)
            d_bank = jnp.where(block["seal"], kept, d_bank)
            return (d_bank, jnp.where(block["seal"], sealed, d_live)), d_floating

        xs = (self.blocks, floating, rest, sums)
        (d_bank, d_live), d_floating = jax.lax.scan(block_back, gradients, xs, reverse=True)
        return d_floating, d_bank, d_live


def _step(keep_sums: bool, slots: Slots, carry: tuple, inputs: tuple) -> tuple[tuple, Any]:
    """Run a slot's layer on (live sum, cache); returns what it traces, and the live sum before it where asked."""
    if slots.stack is None:
        return carry, (None, None)
    (live, cache), (slot, weights, bank) = carry, inputs
    run = jax.checkpoint(slots.run, prevent_cse=False) if _some_recomputed(slots) else slots.run
    kept = None if cache is None else cache.read(slots.is_mla, slot["in_cache"])
    after, kept, shown = run(slot, weights, bank, live, kept)
    cache = None if cache is None else cache.write(kept)
    return (after, cache), (slots.input.keep(after, shown), live if keep_sums else None)


def _some_recomputed(slots: Slots) -> bool:
    """Whether automatic differentiation is to recompute this kind of layer; where all are, `Blocks` does it."""
    return slots.input.recomputes(slots.kind) and not slots.input.recomputes_all


def _step_back(slots: Slots, d_live: Array, inputs: tuple) -> tuple[Array, Any]:
    """From the gradient of the live sum after a slot to that before it; also those of its weights and its reads."""
    slot, floating, rest, bank, live = inputs
    if slots.stack is None:
        return d_live, (floating, bank)
    after = lambda floating, bank, live: slots.run_again(slot, _join(floating, rest), bank, live)  # noqa: E731
    _, vjp = jax.vjp(after, floating, bank, live)
    d_floating, d_bank, d_live = vjp(d_live)
    return d_live, (d_floating, d_bank)


def _partition(tree: Any) -> tuple[Any, Any]:
    """A tree's floating-point leaves and its others, each with None in place of the rest."""
    is_floating = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    return (
        jax.tree.map(lambda x: x if is_floating(x) else None, tree),
        jax.tree.map(lambda x: None if is_floating(x) else x, tree),
    )


def _join(floating: Any, rest: Any) -> Any:
    """Undo `_partition`."""
    return jax.tree.map(lambda a, b: b if a is None else a, floating, rest, is_leaf=lambda x: x is None)
