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
import numpy as np
from jaxtyping import Array, Float

from k3jax.nn.cache import Cache
from k3jax.nn.layer import Layer
from k3jax.nn.plan import StackPlan
from k3jax.nn.slots import Slots, StackInput, Stacks, read_for
from pallas_kernels.attn_res import BankRead

# Bytes of a block's reads above which a cached pass reads the bank anew for every unit: prefill of long chunks.
READS_AT_ONCE = 2**30

Carry = tuple[Array, Array, Cache | None]  # snapshots, live sum, cache
Weights = tuple[Layer | None, Layer | None]  # of the KDA slots, of the MLA slots


class Blocks:
    """The layers of a plan's blocks, of one model and one forward pass."""

    def __init__(self, stacks: Stacks, plan: StackPlan, inputs: StackInput):
        self.input, self.plan = inputs, plan
        self.kda, self.mla = Slots(stacks, "kda_moe", plan, inputs), Slots(stacks, "mla_moe", plan, inputs)
        self.kinds = [slots for slots in (self.kda, self.mla) if slots.stack is not None]
        self._number_reads()
        self.blocks = {
            "index": jnp.arange(len(plan.kda)),
            "seal": jnp.asarray(plan.seals),
            "kda": self.kda.inputs,
            "mla": self.mla.inputs,
        }

    def _number_reads(self) -> None:
        """Tell every slot where its reads are among those of its unit (`place`), and of its block (`read`)."""
        first, units = 0, np.arange(self.plan.kda.shape[1], dtype=np.int32)
        slots_of_unit = sum(self._slots_of_unit(slots) for slots in self.kinds)
        for slots in self.kinds:
            shape, own = slots.inputs["active"].shape, self._slots_of_unit(slots)
            place = np.broadcast_to(np.arange(first, first + own, dtype=np.int32), (len(units), own))
            for name, numbers in {"place": place, "read": units[:, None] * slots_of_unit + place}.items():
                slots.inputs[name] = jnp.broadcast_to(numbers.reshape(shape[1:]), shape)
            first += own

    def _slots_of_unit(self, slots: Slots) -> int:
        return self.plan.kda.shape[2] if slots is self.kda else 1

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
        by_unit = carry[2] is not None and self._bytes_of_reads(carry[1]) > READS_AT_ONCE

        def block_step(carry: Carry, inputs: tuple[dict, Weights]) -> tuple[Carry, Any]:
            (snapshots, live, cache), (block, weights) = carry, inputs
            # A seal, as in Residual.seal. From here to the end of the block the bank is a constant of the inner scans.
            sealed = jnp.where(block["seal"], live, snapshots[block["index"]])
            snapshots = snapshots.at[block["index"]].set(sealed)
            live = jnp.where(block["seal"], 0, live).astype(live.dtype)
            read = lambda inputs, weights: self._read(inputs, weights, snapshots, block["index"] + 1)  # noqa: E731
            of_block = None if by_unit else (read(block, weights), "read")

            def unit_step(carry: tuple, unit: tuple) -> tuple[tuple, Any]:
                kda, mla = unit
                reads = of_block or (read({"kda": kda[0], "mla": mla[0]}, (kda[1], mla[1])), "place")
                carry, of_kda = jax.lax.scan(partial(step, self.kda, reads), carry, kda)
                carry, of_mla = step(self.mla, reads, carry, mla)
                return carry, (of_kda, of_mla)

            units = (block["kda"], weights[0]), (block["mla"], weights[1])
            (live, cache), found = jax.lax.scan(unit_step, (live, cache), units)
            return (snapshots, live, cache), found

        carry, (of_kda, of_mla) = jax.lax.scan(block_step, carry, (self.blocks, weights))
        return carry, ((of_kda[0], of_mla[0]), (of_kda[1], of_mla[1]))

    def _bytes_of_reads(self, live: Float[Array, "B T D"]) -> int:
        units = self.plan.kda.shape[1]
        return 2 * units * sum(map(self._slots_of_unit, self.kinds)) * live.size * live.dtype.itemsize

    def _read(self, inputs: dict, weights: Weights, snapshots: Array, count: Array) -> BankRead:
        """The reads of all slots of a block or of a unit, [slots, 2, B, T, D], one unit after the other."""
        of_kind, dtype = {"kda": weights[0], "mla": weights[1]}, snapshots.dtype
        queries = [
            slots.queries(inputs[slots.mixer], of_kind[slots.mixer], dtype).reshape(
                -1, self._slots_of_unit(slots), 2, snapshots.shape[-1]
            )
            for slots in self.kinds
        ]
        in_order = jnp.concatenate(queries, axis=1)
        return read_for(snapshots, count, in_order.reshape(-1, *in_order.shape[2:]), self.input.config.norm_eps)

    def _backward(
        self, floating: Any, rest: Any, bank: Array, sums: tuple[Any, Any], gradients: tuple[Array, Array]
    ) -> tuple[Any, Array, Array]:
        """Gradients of the slots' weights, of the bank before the first block and of the live sum before it.

        The bank is read again unit by unit: a block's reads and their gradients would be the largest arrays of all.
        """

        def block_back(carry: tuple[Array, Array], inputs: tuple) -> tuple[tuple[Array, Array], Any]:
            block, *of_block = inputs

            def unit_back(carry: tuple[Array, Array], unit: tuple) -> tuple[tuple[Array, Array], Any]:
                (d_bank, d_live), (of_unit, floating, rest, sums) = carry, unit
                reads = lambda floating, bank: self._read(of_unit, _join(floating, rest), bank, block["index"] + 1)  # noqa: E731
                seen, of_reads = jax.vjp(reads, floating, bank)
                kda, mla = zip((of_unit["kda"], of_unit["mla"]), floating, rest, sums, strict=True)
                d_live, of_mla = _step_back(self.mla, seen, d_live, mla)
                d_live, of_kda = jax.lax.scan(partial(_step_back, self.kda, seen), d_live, kda, reverse=True)
                d_seen = [d for d in (of_kda[1], jax.tree.map(lambda d: d[None], of_mla[1])) if d is not None]
                d_floating, d_read = of_reads(jax.tree.map(lambda *d: jnp.concatenate(d), *d_seen))
                d_floating = jax.tree.map(jnp.add, d_floating, (of_kda[0], of_mla[0]))
                return (d_bank + d_read, d_live), d_floating

            units = {"kda": block["kda"], "mla": block["mla"]}, *of_block
            (d_bank, d_live), d_floating = jax.lax.scan(unit_back, carry, units, reverse=True)
            # Undo the seal: the live sum before the block is the snapshot that it made.
            sealed = jax.lax.dynamic_index_in_dim(d_bank, block["index"], keepdims=False)
            kept = d_bank.at[block["index"]].set(0)
            d_bank = jnp.where(block["seal"], kept, d_bank)
            return (d_bank, jnp.where(block["seal"], sealed, d_live)), d_floating

        xs = (self.blocks, floating, rest, sums)
        (d_bank, d_live), d_floating = jax.lax.scan(block_back, gradients, xs, reverse=True)
        return d_floating, d_bank, d_live


def _step(keep_sums: bool, slots: Slots, reads: tuple[BankRead, str], carry: tuple, inputs: tuple) -> tuple[tuple, Any]:
    """Run a slot's layer on (live sum, cache); returns what it traces, and the live sum before it where asked.

    Its reads are among those given, at the number that its input of the given name says.
    """
    if slots.stack is None:
        return carry, (None, None)
    (live, cache), (slot, weights) = carry, inputs
    bank = _part(reads[0], slot[reads[1]])
    run = jax.checkpoint(slots.run, prevent_cse=False) if _some_recomputed(slots) else slots.run
    kept = None if cache is None else cache.read(slots.mixer == "mla", slot["in_cache"])
    after, kept, shown = run(slot, weights, bank, live, kept)
    cache = None if cache is None else cache.write(kept)
    return (after, cache), (slots.input.keep(after, shown), live if keep_sums else None)


def _some_recomputed(slots: Slots) -> bool:
    """Whether automatic differentiation is to recompute this kind of layer; where all are, `Blocks` does it."""
    return slots.input.recomputes(slots.kind) and not slots.input.recomputes_all


def _part(reads: BankRead, index: Array) -> BankRead:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), reads)


def _step_back(slots: Slots, reads: BankRead, d_live: Array, inputs: tuple) -> tuple[Array, Any]:
    """From the gradient of the live sum after a slot to that before it; also those of its weights and its reads."""
    slot, floating, rest, live = inputs
    if slots.stack is None:
        return d_live, (floating, None)
    bank = _part(reads, slot["place"])
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
