"""Paged caches whose pages lie in equal pieces on the devices of the logical axis `page`.

A page of n g tokens has its first g on the first of n devices, and so on. So one page table serves them all, every
device holds the same share of every long sequence, and a device sees a cache with pages of g tokens: its own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from sharding.local import axes_of, index_of, joined, size_of
from sharding.merge import merge_over, merge_parts

PAGE = "page"


def held_here(positions: Int[Array, "*b"], piece: int) -> Int[Array, "*b"]:
    """Positions in sequences as positions among the tokens that this device holds, `piece` of a page; -1 for others."""
    page, offset = positions // (piece * size_of(PAGE)), positions % (piece * size_of(PAGE))
    mine = (positions >= 0) & (offset // piece == index_of(PAGE))
    return jnp.where(mine, page * piece + offset % piece, -1)


def lengths_here(lengths: Int[Array, "*b"], piece: int) -> Int[Array, "*b"]:
    """How many of a sequence's first `lengths` tokens this device holds."""
    page, rest = lengths // (piece * size_of(PAGE)), lengths % (piece * size_of(PAGE))
    return page * piece + jnp.clip(rest - index_of(PAGE) * piece, 0, piece)


def table_for_next(
    table: Int[Array, "S P"], lengths: Int[Array, "S"], piece: int
) -> tuple[Int[Array, "S P"], Int[Array, "S"]]:
    """Page table and lengths with which a device attends when token number `lengths` is the next of each sequence.

    The lengths count the new token everywhere; where another device will hold it, it falls in a hole of the table.
    """
    if not axes_of(PAGE):
        return table, lengths + 1
    held, mine = lengths_here(lengths, piece), held_here(lengths, piece) >= 0
    table = jnp.pad(table, ((0, 0), (0, 1)), constant_values=-1)
    at_end = jnp.arange(table.shape[1]) == held[:, None] // piece
    return jnp.where(at_end & ~mine[:, None], -1, table), held + 1


def merged_heads(output: Float[Array, "S H R"], log_sum_exp: Float[Array, "S H"], heads: str) -> Float[Array, "S h R"]:
    """What all heads found in this device's pages, as what this device's `heads` found in all pages."""
    over, axes = axes_of(heads), axes_of(PAGE)
    if not axes:
        return output
    both = jnp.concatenate([output.astype(log_sum_exp.dtype), log_sum_exp[..., None]], axis=-1)
    if over:
        parts = jax.lax.all_to_all(both[None], over, split_axis=2, concat_axis=0, tiled=True)
        output, log_sum_exp = merge_parts(parts[..., :-1], parts[..., -1])
    for axis in axes:
        if axis not in over:
            output, log_sum_exp = merge_over(axis, output, log_sum_exp)
    return output


def all_pages(latents: Float[Array, "S P g C"]) -> tuple[Float[Array, "S K C"], Int[Array, "K"]]:
    """The tokens of each row's pages from all devices, and their positions; `latents` are this device's pieces.

    They come device by device, as they arrive: to put them in order would take copies of a whole context.
    """
    _, pages, piece, width = latents.shape
    whole = joined(latents.reshape(latents.shape[0], -1, width), PAGE, dim=1)
    device, page, token = jnp.ogrid[: size_of(PAGE), :pages, :piece]
    return whole, ((page * size_of(PAGE) + device) * piece + token).reshape(-1)
