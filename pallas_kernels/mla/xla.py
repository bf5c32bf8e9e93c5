"""Online softmax over tiles in plain XLA: no score matrix in memory, forward or backward."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from pallas_kernels.mla import pages as paging
from pallas_kernels.mla.pages import Pages
from pallas_kernels.mla.partial import Attended, Mask, Running, extend, finish, start
from pallas_kernels.mla.reference import expand, island, matmul_precision
from pallas_kernels.mla.tiles import causal_pairs

TILE = 512  # tokens of a tile of queries or keys: a head's scores exist for TILE x TILE pairs at one time

Saved = tuple[Array, Array, Array, Mask, Array, Array]


def attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H V"],
    mask: Mask,
    scale: float,
    dtype: jnp.dtype,
) -> Attended:
    """As `reference.attention`; the backward pass makes the scores again from the saved log_sum_exp."""
    length = q.shape[1]
    tile = min(TILE, max(length, k.shape[1]))
    mask = mask.pad(q, k, tile)
    heads_first = (jnp.pad(x, ((0, 0), (0, -x.shape[1] % tile), (0, 0), (0, 0))).swapaxes(1, 2) for x in (q, k, v))
    output, log_sum_exp, max_logit = _attention(scale, tile, dtype, *heads_first, mask)
    return Attended(output.swapaxes(1, 2)[:, :length], log_sum_exp.swapaxes(1, 2)[:, :length], max_logit)


def _dot(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, precision=matmul_precision(a.dtype), preferred_element_type=island(a.dtype))


def _take(x: Array, index: Array, tile: int, axis: int = 2) -> Array:
    return lax.dynamic_slice_in_dim(x, index * tile, tile, axis)


def _put(x: Array, new: Array, index: Array, tile: int, axis: int = 2) -> Array:
    return lax.dynamic_update_slice_in_dim(x, new, index * tile, axis)


def _visible(i: Array, j: Array, tile: int, mask: Mask) -> Array:
    """[b, 1, tile, tile]: what tile i of the queries sees of tile j of the keys."""
    steps = jnp.arange(tile)
    causal = (j * tile + steps)[None, :] <= (i * tile + steps + mask.start)[:, None]
    if mask.ids is None:
        return causal[None, None]
    ids, keys = (_take(x, at, tile, 1) for x, at in zip(mask.ids, (i, j), strict=True))
    return (causal & (ids[:, :, None] == keys[:, None, :]) & (keys >= 0)[:, None, :])[:, None]


def _over_pairs(step: Callable[[Any, Array, Array], Any], carry: Any, q: Array, k: Array, mask: Mask, tile: int) -> Any:
    """Run `carry = step(carry, i, j)` over the pairs of tiles that the causal mask leaves."""
    pairs = causal_pairs(q.shape[2] // tile, k.shape[2] // tile, tile, mask.start)
    queries, keys = jnp.asarray(pairs.queries), jnp.asarray(pairs.keys)
    if len(queries) == 1:
        return step(carry, jnp.int32(0), jnp.int32(0))
    return lax.fori_loop(0, pairs.number, lambda p, carry: step(carry, queries[p], keys[p]), carry)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attention(
    scale: float, tile: int, dtype: jnp.dtype, q: Array, k: Array, v: Array, mask: Mask
) -> tuple[Array, Array, Array]:
    """Heads first: output [B, H, T, V], log_sum_exp [B, H, T], max_logit [B, H]."""
    batch, heads, length, _ = q.shape
    wide = island(q.dtype)

    def step(carry: tuple[Running, Array], i: Array, j: Array) -> tuple[Running, Array]:
        running, top = carry
        scores = _dot("bhtk,bhsk->bhts", _take(q, i, tile), _take(k, j, tile)) * scale
        visible = _visible(i, j, tile, mask)
        part = Running(*(_take(x, i, tile) for x in running))
        part = extend(part, scores, visible, _take(v, j, tile), "bhts,bhsv->bhtv", matmul_precision(v.dtype))
        top = jnp.maximum(top, jnp.max(scores, axis=(2, 3), where=visible, initial=-jnp.inf))
        return Running(*(_put(x, new, i, tile) for x, new in zip(running, part, strict=True))), top

    empty = start((batch, heads, length), v.shape[-1], wide), jnp.full((batch, heads), -jnp.inf, wide)
    running, max_logit = _over_pairs(step, empty, q, k, mask, tile)
    output, log_sum_exp = finish(running)
    return output.astype(dtype), log_sum_exp, max_logit


def _forward(
    scale: float, tile: int, dtype: jnp.dtype, q: Array, k: Array, v: Array, mask: Mask
) -> tuple[tuple[Array, Array, Array], Saved]:
    output, log_sum_exp, max_logit = _attention(scale, tile, dtype, q, k, v, mask)
    return (output, log_sum_exp, max_logit), (q, k, v, mask, output, log_sum_exp)


def _backward(
    scale: float, tile: int, _dtype: jnp.dtype, saved: Saved, cotangents: tuple[Array, Array, Array]
) -> tuple[Array, Array, Array, None]:
    q, k, v, mask, output, log_sum_exp = saved
    d_output, d_log_sum_exp, _ = cotangents
    wide = island(q.dtype)
    # d score = weight * (d weight - sum over keys of weight * d weight + d log_sum_exp), with d_output as both see it.
    d_output = d_output.astype(q.dtype)
    correction = jnp.sum(d_output.astype(wide) * output.astype(wide), axis=-1) - d_log_sum_exp
    log_sum_exp = jnp.maximum(log_sum_exp, jnp.finfo(wide).min)

    def step(carry: tuple[Array, ...], i: Array, j: Array) -> tuple[Array, ...]:
        dq, dk, dv = carry
        q_i, d_i, k_j, v_j = _take(q, i, tile), _take(d_output, i, tile), _take(k, j, tile), _take(v, j, tile)
        scores = _dot("bhtk,bhsk->bhts", q_i, k_j) * scale
        visible = _visible(i, j, tile, mask)
        weights = jnp.where(visible, jnp.exp(scores - _take(log_sum_exp, i, tile)[..., None]), 0.0)
        d_weights = _dot("bhtv,bhsv->bhts", d_i, v_j) - _take(correction, i, tile)[..., None]
        d_scores = jnp.where(visible, weights * d_weights * scale, 0.0).astype(q.dtype)
        dq = _put(dq, _take(dq, i, tile) + _dot("bhts,bhsk->bhtk", d_scores, k_j), i, tile)
        dk = _put(dk, _take(dk, j, tile) + _dot("bhts,bhtk->bhsk", d_scores, q_i), j, tile)
        dv = _put(dv, _take(dv, j, tile) + _dot("bhts,bhtv->bhsv", weights.astype(d_i.dtype), d_i), j, tile)
        return dq, dk, dv

    zeros = tuple(jnp.zeros(x.shape, wide) for x in (q, k, v))
    dq, dk, dv = _over_pairs(step, zeros, q, k, mask, tile)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_attention.defvjp(_forward, _backward)


# Prefill against a cache


def key_tiles(
    latents: Array | Pages, page_table: Array | None, key_positions: Array | None, rows: int, tile: int, dtype: Any
) -> tuple[int, int, Callable[[Array], tuple[Array, Array]]]:
    """How many tiles of how many keys (about `tile`), and a function that gives tile i: latents, positions (-1: none).

    The last tile starts early where the keys are no multiple of it; what it holds twice has position -1.
    """
    if page_table is not None:
        assert isinstance(latents, Pages)
        pages, width = latents, max(1, tile // latents.page)
        rest = -page_table.shape[1] % width
        table = jnp.pad(page_table, ((0, 0), (0, rest)), constant_values=-1)
        size, total = width * pages.page, table.shape[1] * pages.page

        def fetch(i: Array) -> tuple[Array, Array]:
            tokens, held = paging.read(pages, _take(table, i, width, 1), dtype)
            return tokens, jnp.where(held, i * size + jnp.arange(size), -1)

        return total // size, size, fetch
    assert not isinstance(latents, Pages)
    size = min(tile, latents.shape[1])
    last = latents.shape[1] - size
    if key_positions is None:
        key_positions = jnp.broadcast_to(jnp.arange(latents.shape[1]), (rows, latents.shape[1]))

    def cut(i: Array) -> tuple[Array, Array]:
        begin = jnp.minimum(i * size, last)
        again = begin + jnp.arange(size) < i * size
        positions = lax.dynamic_slice_in_dim(key_positions, begin, size, 1)
        return lax.dynamic_slice_in_dim(latents, begin, size, 1).astype(dtype), jnp.where(again, -1, positions)

    return -(-latents.shape[1] // size), size, cut


def where_seen(
    step: Callable[..., Any], fetch: Callable[[Array], tuple[Array, Array]], positions: Int[Array, "B T"]
) -> Callable[..., Any]:
    """`step(number, carry)` for tiles with a key that some query may see; the carry as it is for others."""
    last = jnp.max(positions)

    def some(number: Array, carry: Any) -> Any:
        _, where = fetch(number)
        return lax.cond(jnp.any((where >= 0) & (where <= last)), step, lambda _, carry: carry, number, carry)

    return some


def chunk_attention(
    q: Float[Array, "B T H K"],
    latents: Array | Pages,
    k_up: Float[Array, "R H N"],
    v_up: Float[Array, "R H V"],
    positions: Int[Array, "B T"],
    key_positions: Int[Array, "B S"] | None,
    page_table: Int[Array, "B P"] | None,
    scale: float,
) -> Attended:
    """As `reference.chunk_attention`; one tile of keys is expanded at a time and meets the queries tile by tile."""
    batch, length, heads, _ = q.shape
    wide = island(q.dtype)
    tile = min(TILE, length)
    rest = -length % tile
    q = jnp.pad(q, ((0, 0), (0, rest), (0, 0), (0, 0))).swapaxes(1, 2)
    positions = jnp.pad(positions, ((0, 0), (0, rest)), constant_values=-1)
    count, size, fetch = key_tiles(latents, page_table, key_positions, batch, TILE, q.dtype)

    def keys(number: Array, carry: tuple[Running, Array]) -> tuple[Running, Array]:
        tokens, where = fetch(number)
        tokens = jnp.where((where >= 0)[..., None], tokens, 0)  # padding may hold NaN
        k, v = (x.swapaxes(1, 2) for x in expand(tokens, k_up, v_up))

        def queries(i: Array, carry: tuple[Running, Array]) -> tuple[Running, Array]:
            running, top = carry
            scores = _dot("bhtk,bhsk->bhts", _take(q, i, tile), k) * scale
            visible = (where[:, None] >= 0) & (where[:, None] <= _take(positions, i, tile, 1)[:, :, None])
            visible = visible[:, None]
            part = Running(*(_take(x, i, tile) for x in running))
            part = extend(part, scores, visible, v, "bhts,bhsv->bhtv", matmul_precision(v.dtype))
            top = jnp.maximum(top, jnp.max(scores, axis=(2, 3), where=visible, initial=-jnp.inf))
            return Running(*(_put(x, new, i, tile) for x, new in zip(running, part, strict=True))), top

        return lax.fori_loop(0, q.shape[2] // tile, queries, carry)

    tiles: Array | int = count
    if key_positions is None:  # keys lie in order: the tiles after the last query's position hold nothing to see
        tiles = jnp.minimum(count, (jnp.max(positions) + size) // size)
    else:
        keys = where_seen(keys, fetch, positions)
    empty = start((batch, heads, q.shape[2]), v_up.shape[-1], wide), jnp.full((batch, heads), -jnp.inf, wide)
    running, max_logit = lax.fori_loop(0, tiles, keys, empty)
    output, log_sum_exp = (x.swapaxes(1, 2)[:, :length] for x in finish(running))
    return Attended(output.astype(q.dtype), log_sum_exp, max_logit)


def paged_decode(
    q: Float[Array, "S H C"],
    new: Float[Array, "S C"],
    pages: Pages,
    page_table: Int[Array, "S P"],
    lengths: Int[Array, "S"],
    scale: float,
) -> tuple[Float[Array, "S H R"], Float[Array, "S H"], Pages]:
    """As `reference.paged_decode`, a few pages of every sequence at a time, up to the longest."""
    wide = island(q.dtype)
    dtype = wide if pages.scale is not None else q.dtype
    pages = paging.write(pages, new[:, None], page_table, lengths[:, None] - 1)
    count, size, fetch = key_tiles(pages, page_table, None, len(q), TILE, dtype)

    def keys(number: Array, running: Running) -> Running:
        tokens, where = fetch(number)
        visible = ((where >= 0) & (where < lengths[:, None]))[:, None]
        tokens = jnp.where(visible[:, 0, :, None], tokens, 0)  # what was never written may hold NaN
        scores = _dot("shc,snc->shn", q.astype(dtype), tokens) * scale
        values = tokens[..., : pages.rank]
        return extend(running, scores, visible, values, "shn,snr->shr", matmul_precision(dtype))

    tiles = jnp.minimum(count, (jnp.max(lengths) + size - 1) // size)
    output, log_sum_exp = finish(lax.fori_loop(0, tiles, keys, start(q.shape[:2], pages.rank, wide)))
    return output.astype(q.dtype), log_sum_exp, pages
