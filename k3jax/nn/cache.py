"""What sequences keep between forward passes: KDA states, conv history, MLA latents (spec text-model 5).

All of it lies in pools that every sequence in flight shares. A sequence has a slot (its constant-size state in every
KDA layer) and a list of pages (its latents, in every MLA layer). A forward pass gets the pools whole and says where its
rows are; layers update them in place, so that no cache is copied and a program's shapes do not follow the sequences.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from k3jax.config import ModelConfig
from k3jax.nn.param import island
from pallas_kernels.mla import Pages

PAGE = 64  # tokens of a page where nobody says


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pools:
    """The slots of the KDA layers and the pages of the MLA layers, layers in depth order.

    `state` is float32 whatever the compute dtype: rounding it loses what the model must remember.
    """

    state: Float[Array, "kda slots H K V"]
    history: Float[Array, "kda slots W 3*H K"]  # last inputs of the short convolutions, q | k | v
    pages: Pages  # each array with a leading axis of MLA layers

    @classmethod
    def zeros(
        cls, config: ModelConfig, *, slots: int, pages: int, page: int, dtype: Any = None, latents: Any = None
    ) -> Pools:
        """Empty pools in the compute `dtype`; `latents` is the pages' dtype where it differs (float8_e4m3fn)."""
        dtype = jnp.dtype(dtype or config.dtype)
        kda, mla, num_mla = config.kda, config.mla, len(config.mla_layers)
        num_kda, h, k = config.num_layers - num_mla, kda.num_heads, kda.head_dim
        one = Pages.zeros(num_mla * pages, page, mla.kv_rank, mla.extra_dim, dtype=latents or dtype)
        return cls(
            state=jnp.zeros((num_kda, slots, h, k, k), island(dtype)),
            history=jnp.zeros((num_kda, slots, kda.conv_width - 1, 3 * h, k), dtype),
            pages=jax.tree.map(lambda x: x.reshape(num_mla, pages, *x.shape[1:]), one),
        )

    def copy_slot(self, source: Int[Array, ""], target: Int[Array, ""]) -> Pools:
        """With slot `target` made equal to `source`; both must exist."""

        def copy(pool: Array) -> Array:
            row = jax.lax.dynamic_index_in_dim(pool, source, 1)
            return jax.lax.dynamic_update_index_in_dim(pool, row, target, 1)

        return dataclasses.replace(self, state=copy(self.state), history=copy(self.history))

    def clear_pages(self, numbers: Int[Array, "n"], count: Int[Array, ""]) -> Pools:
        """With the first `count` of these pages emptied, one after the other; they must exist."""

        def clear(i: Array, pages: Pages) -> Pages:
            def empty(pool: Array) -> Array:
                nothing = jnp.zeros((pool.shape[0], 1, *pool.shape[2:]), pool.dtype)
                return jax.lax.dynamic_update_slice_in_dim(pool, nothing, numbers[i], 1)

            return jax.tree.map(empty, pages)

        return dataclasses.replace(self, pages=jax.lax.fori_loop(0, count, clear, self.pages))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KDACache:
    """One KDA layer's view: the slots of all layers, and which of them the B rows of a forward pass have."""

    state: Float[Array, "N H K V"]
    history: Float[Array, "N W 3*H K"]
    slots: Int[Array, "B"]  # -1: a row that keeps nothing
    fresh: Bool[Array, "B"]  # a row that starts from nothing, whatever its slot holds

    def rows(self) -> tuple[Float[Array, "B H K V"], Float[Array, "B W C"]]:
        """State and conv history of the rows."""
        at = jnp.where(self.slots >= 0, self.slots, len(self.state))

        def take(pool: Array) -> Array:
            rows = pool.at[at].get(mode="fill", fill_value=0)
            return jnp.where(self.fresh.reshape(-1, *[1] * (rows.ndim - 1)), 0, rows)

        history = take(self.history)
        return take(self.state), history.reshape(*history.shape[:2], -1)

    def with_rows(self, state: Float[Array, "B H K V"], history: Float[Array, "B W C"]) -> KDACache:
        """With the rows' state and history replaced."""
        at = jnp.where(self.slots >= 0, self.slots, len(self.state))
        history = history.reshape(*history.shape[:2], *self.history.shape[2:])
        return dataclasses.replace(
            self,
            state=self.state.at[at].set(state, mode="drop"),
            history=self.history.at[at].set(history.astype(self.history.dtype), mode="drop"),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MLACache:
    """One MLA layer's view: the pages of all layers, and which of them the B rows of a forward pass have, in order."""

    pages: Pages
    page_table: Int[Array, "B P"]  # -1: none
    length: Int[Array, "B"]  # tokens before this pass


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """The pools, and where the B rows of a forward pass have their sequences in them.

    Row b continues a sequence of `length[b]` tokens in slot `slots[b]`; token t is in page `page_table[b, t // page]`.
    No two rows share a slot, or a page that one of them writes to; -1 is a row without a slot, an entry without a page.
    """

    pools: Pools
    slots: Int[Array, "B"]
    page_table: Int[Array, "B P"]
    length: Int[Array, "B"]

    @classmethod
    def zeros(cls, config: ModelConfig, *, batch: int, max_len: int, dtype: Any = None) -> Cache:
        """An empty cache of its own for `batch` sequences of up to `max_len` tokens."""
        each = -(-max_len // PAGE)
        return cls(
            pools=Pools.zeros(config, slots=batch, pages=batch * each, page=PAGE, dtype=dtype),
            slots=jnp.arange(batch),
            page_table=jnp.arange(batch * each).reshape(batch, each),
            length=jnp.zeros(batch, jnp.int32),
        )

    def of_rows(self, present: Bool[Array, "B"]) -> Cache:
        """With the slots of other rows taken away, so that nothing of theirs changes."""
        return dataclasses.replace(self, slots=jnp.where(present, self.slots, -1))

    def read(self, is_mla: bool, index: int | Int[Array, ""]) -> MLACache | KDACache:
        """The view of the MLA or KDA layer at `index` of its kind. Layers are offsets: nothing is sliced out."""
        if is_mla:
            pages = jax.tree.map(_flat, self.pools.pages)
            table = _offset(self.page_table, index, self.pools.pages.latent.shape[1])
            return MLACache(pages, table, self.length)
        slots = _offset(self.slots, index, self.pools.state.shape[1])
        return KDACache(_flat(self.pools.state), _flat(self.pools.history), slots, self.length == 0)

    def write(self, view: MLACache | KDACache) -> Cache:
        """With the pools that a layer has updated."""
        back = lambda new, old: new.reshape(old.shape)  # noqa: E731
        if isinstance(view, MLACache):
            pools = dataclasses.replace(self.pools, pages=jax.tree.map(back, view.pages, self.pools.pages))
        else:
            state, history = back(view.state, self.pools.state), back(view.history, self.pools.history)
            pools = dataclasses.replace(self.pools, state=state, history=history)
        return dataclasses.replace(self, pools=pools)


def _flat(pool: Array) -> Array:
    """Layers and their slots or pages as one axis; costs nothing."""
    return pool.reshape(-1, *pool.shape[2:])


def _offset(numbers: Int[Array, "..."], layer: int | Int[Array, ""], size: int) -> Int[Array, "..."]:
    """Numbers within a layer of `size` as numbers within all layers; those that the layer does not have become -1."""
    return jnp.where((numbers >= 0) & (numbers < size), numbers + layer * size, -1)
