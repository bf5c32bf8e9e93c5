"""Paged latent decode for TPU (Pallas Mosaic): every cached token is read once for all heads, in bfloat16 or float8.

A loop runs over rows, inside it one over groups of pages. While the softmax and the weighted sum of one group are made,
the scores of the next are, too, and the pages of the two after that are on their way; so it goes on from row to row.
The new token never waits for its page: it starts the row's online softmax, and its latent goes to the page meanwhile.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Int

from pallas_kernels.mla import pages as paging
from pallas_kernels.mla.pages import Pages
from pallas_kernels.mla.partial import LOWEST

LANES = 128
GROUP = 1024  # tokens that one step of the inner loop reads
CHUNK = 256  # tokens of one matrix product: the matrix unit's width
ENTRIES = 200_000  # of a page table that lies in scalar memory (1 MiB)
BUFFERS = 3  # of groups: one is weighed, one scored, one arrives
QUERY_BUFFERS = 3
TILE = 32  # tokens of a page that a write replaces together: float8's tile, two of bfloat16's
EXTRA_TILE = 16

Ref = Any


class Static(NamedTuple):
    """Sizes and numbers that are fixed when the kernel is traced."""

    rows: int
    table_width: int
    group: int  # pages
    page: int
    rank: int
    factor: float  # of the scores, in units of log 2
    fp8: bool


class Scalars(NamedTuple):
    """Inputs in SMEM, one number a row; the table is flat."""

    table: Ref  # pages, -1 for holes
    cached: Ref  # tokens before the new one
    groups: Ref  # that hold them; at least 1, so that the order of groups is simple
    target: Ref  # the new token's page, -1 where it is not written
    offset: Ref  # in that page


class Inputs(NamedTuple):
    """Queries in HBM; the new tokens, whole, in VMEM."""

    queries: Ref  # [S, H, R + 2 * 128]: latent part, [extra | 0], [0 | extra]
    new: Ref  # [S, R + 128]: the new token as the cache holds it, [latent | extra | 0]
    new_scale: Ref


class Cache(NamedTuple):
    """The pages in HBM, or the groups of them in VMEM."""

    latent: Ref
    extra: Ref
    scale: Ref | None


class Scratch(NamedTuple):
    """Buffers in VMEM, counters in SMEM, semaphores."""

    queries: Ref
    latent: Ref
    extra: Ref
    scale: Ref
    scores: Ref
    values: Ref
    top: Ref
    total: Ref
    output: Ref
    log_sum_exp: Ref
    tile: Ref
    extra_tile: Ref
    scale_tile: Ref
    at: Ref
    query_arrival: Ref
    arrival: Ref
    leaving: Ref
    tile_in: Ref
    tile_out: Ref


class Kernel(NamedTuple):
    """Everything a step of the kernel refers to."""

    static: Static
    scalars: Scalars
    inputs: Inputs
    cache: Cache
    output: Ref
    log_sum_exp: Ref
    scratch: Scratch


def _query_copy(k: Kernel, row: Array) -> Any:
    slot = jax.lax.rem(row, QUERY_BUFFERS)
    return pltpu.make_async_copy(k.inputs.queries.at[row], k.scratch.queries.at[slot], k.scratch.query_arrival.at[slot])


def _group_copies(k: Kernel, row: Array, group: Array, buffer: Array) -> list[Any]:
    """Of the group's pages; a hole copies page 0, and is masked later."""
    copies = []
    first = row * k.static.table_width + group * k.static.group
    parts = [(k.cache.latent, k.scratch.latent), (k.cache.extra, k.scratch.extra), (k.cache.scale, k.scratch.scale)]
    for i in range(k.static.group):
        page = jnp.maximum(k.scalars.table[first + i], 0)
        copies += [
            pltpu.make_async_copy(source.at[page], target.at[buffer, i], k.scratch.arrival.at[buffer])
            for source, target in parts
            if source is not None
        ]
    return copies


def _wait_for_group(k: Kernel, buffer: Array) -> None:
    for target in (k.scratch.latent, k.scratch.extra, k.scratch.scale):
        if target is not None:  # a wait looks at the size only
            pltpu.make_async_copy(target.at[buffer], target.at[buffer], k.scratch.arrival.at[buffer]).wait()


def _after(k: Kernel, row: Array, group: Array) -> tuple[Array, Array]:
    """The group that follows, in this row or the next. Behind the last row is one of holes, over and over."""
    end = group + 1 >= k.scalars.groups[row]
    return jnp.where(end, jnp.minimum(row + 1, k.static.rows), row), jnp.where(end, 0, group + 1)


def _chunks(k: Kernel) -> list[tuple[int, slice]]:
    """The group in pieces of CHUNK tokens: first or second halves (0, 1) of some pages. Tokens keep this order."""
    pages = max(1, min(CHUNK // (k.static.page // 2), k.static.group))
    return [(part, slice(i, i + pages)) for part in range(2) for i in range(0, k.static.group, pages)]


def _latent(k: Kernel, buffer: Array, part: int, pages: slice) -> Array:
    """[tokens, R] of a chunk."""
    half = k.static.page // 2
    latent = k.scratch.latent[buffer, pages, pl.ds(part * half, half)]
    return latent.reshape(-1, k.static.rank).astype(jnp.bfloat16)


def _scale(k: Kernel, buffer: Array, part: int, pages: slice) -> Array:
    """The float8 factors of a chunk's tokens, [1, tokens]."""
    half = k.static.page // 2
    rows = [k.scratch.scale[buffer, i] for i in range(pages.start, pages.stop)]
    return jnp.concatenate([x[:, part * half : (part + 1) * half] for x in rows], 1)


def _dot(a: Array, b: Array, *, transposed: bool = False) -> Array:
    dims = (((1,), (1 if transposed else 0,)), ((), ()))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def _score(k: Kernel, row: Array, buffer: Array, part: int, pages: slice, *, stream: bool) -> Array:
    """Scores of one chunk of the group in `buffer`, [H, tokens], by the query of `row`; unmasked.

    The matrix unit holds one operand and streams the other through. Holding the keys costs transposing and loading
    them, streaming them costs their passage: half of the chunks go either way, so that neither is what takes longest.
    """
    rank, query = k.static.rank, k.scratch.queries.at[jax.lax.rem(row, QUERY_BUFFERS)]
    latent, extra = _latent(k, buffer, part, pages), k.scratch.extra[buffer, pages].reshape(-1, LANES)
    ours = slice(rank + part * LANES, rank + (part + 1) * LANES)

    def product(query: Array, keys: Array) -> Array:
        return _dot(keys, query, transposed=True).T if stream else _dot(query, keys, transposed=True)

    if k.static.fp8:
        scores = product(query[:, :rank], latent) * _scale(k, buffer, part, pages)
        return scores + product(query[:, ours], extra)
    query = jnp.concatenate([query[:, :rank], query[:, ours]], axis=1)
    return product(query, jnp.concatenate([latent, extra], axis=1))


def _scores(k: Kernel, row: Array, buffer: Array) -> list[Array]:
    """Of all chunks."""
    chunks = _chunks(k)
    return [_score(k, row, buffer, *chunk, stream=i < len(chunks) // 2) for i, chunk in enumerate(chunks)]


def _masked(k: Kernel, row: Array, group: Array, slot: Array) -> list[Array]:
    """The group's scores in columns of 128 tokens, LOWEST where the row has no such token."""
    half, chunks = k.static.page // 2, _chunks(k)
    heads, tokens = k.scratch.scores.shape[1], k.scratch.scores.shape[2] // len(chunks)
    lane = jax.lax.broadcasted_iota(jnp.int32, (heads, LANES), 1)
    limits = []
    for i in range(k.static.group):
        number = group * k.static.group + i
        held = k.scalars.table[row * k.static.table_width + number] >= 0
        limits.append(jnp.where(held, k.scalars.cached[row] - number * k.static.page, 0))
    columns = []
    for chunk, (part, pages) in enumerate(chunks):
        for column in range(0, tokens, LANES):
            # Lane j holds the token at (page - first page) * half + offset = column + j of the chunk.
            own = [limits[i] - part * half + (i - pages.start) * half - column for i in range(pages.start, pages.stop)]
            limit = own[column // half]
            for i in range(column // half + 1, -(-(column + LANES) // half)):
                limit = jnp.where(lane >= i * half - column, own[i], limit)
            scores = k.scratch.scores[slot, :, pl.ds(chunk * tokens + column, LANES)]
            columns.append(jnp.where(lane < limit, scores, LOWEST))
    return columns


def _softmax(k: Kernel, row: Array, group: Array, slot: Array) -> tuple[Array, Array]:
    """The group's weights in the row's online softmax, [H, tokens], and the factor that fades what came before.

    `total` holds a partial sum in every lane.
    """
    scratch = k.scratch
    columns = _masked(k, row, group, slot)
    top = scratch.top[...]
    new = jnp.maximum(top, jnp.max(_tree(jnp.maximum, columns), axis=1, keepdims=True))
    fade = jnp.exp2(top - new)
    # A row whose tokens are all masked so far keeps LOWEST as maximum: exp2(LOWEST - LOWEST) must not count.
    base = jnp.where(new <= LOWEST, 0.0, new)
    columns = [jnp.exp2(x - base) for x in columns]
    scratch.top[...] = new
    scratch.total[...] = scratch.total[...] * fade + _tree(jnp.add, columns)
    return jnp.concatenate(columns, axis=1), fade


def _tree(combine: Any, items: list[Array]) -> Array:
    while len(items) > 1:
        items = [combine(*items[i : i + 2]) if i + 1 < len(items) else items[i] for i in range(0, len(items), 2)]
    return items[0]


def _begin_row(k: Kernel, row: Array) -> None:
    """Start the row's online softmax with its new token, or with nothing."""
    scratch, rank = k.scratch, k.static.rank
    query = scratch.queries[jax.lax.rem(row, QUERY_BUFFERS), :, : rank + LANES].astype(jnp.float32)
    new = k.inputs.new[pl.ds(row, 1)]
    ours = k.scalars.target[row] >= 0
    score = jnp.sum(query * new, axis=1, keepdims=True) * k.static.factor
    shape = scratch.top.shape
    scratch.top[...] = jnp.broadcast_to(jnp.where(ours, score, LOWEST), shape)
    lane = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    scratch.total[...] = jnp.where((lane == 0) & ours, 1.0, 0.0)
    scratch.values[...] = jnp.broadcast_to(jnp.where(ours, new[:, :rank], 0.0), scratch.values.shape)


def _end_row(k: Kernel, row: Array) -> None:
    scratch, slot = k.scratch, row & 1
    total = jnp.sum(scratch.total[...], axis=1, keepdims=True)
    none = total == 0
    safe = jnp.where(none, 1.0, total)
    scratch.output[slot] = (scratch.values[...] * (1.0 / safe)).astype(scratch.output.dtype)
    log_sum_exp = (scratch.top[...] + jnp.log2(safe)) * math.log(2)
    scratch.log_sum_exp[slot] = jnp.where(none, -jnp.inf, log_sum_exp)
    for copy in _out_copies(k, row):
        copy.start()


def _out_copies(k: Kernel, row: Array) -> list[Any]:
    slot, scratch = row & 1, k.scratch
    return [
        pltpu.make_async_copy(scratch.output.at[slot], k.output.at[row], scratch.leaving.at[slot]),
        pltpu.make_async_copy(scratch.log_sum_exp.at[slot], k.log_sum_exp.at[row], scratch.leaving.at[slot]),
    ]


def _tile_pairs(k: Kernel, row: Array) -> list[tuple[Any, Any]]:
    """The tiles of the row's page that its new token falls in, and their buffers."""
    page, offset, slot, scratch = k.scalars.target[row], k.scalars.offset[row], row & 1, k.scratch
    packed = offset & (k.static.page // 2 - 1)
    first, first_packed = offset & -TILE, packed & -EXTRA_TILE
    pairs = [
        (k.cache.latent.at[page, pl.ds(pl.multiple_of(first, TILE), TILE)], scratch.tile.at[slot]),
        (
            k.cache.extra.at[page, pl.ds(pl.multiple_of(first_packed, EXTRA_TILE), EXTRA_TILE)],
            scratch.extra_tile.at[slot],
        ),
    ]
    if k.cache.scale is not None:
        pairs.append((k.cache.scale.at[page], scratch.scale_tile.at[slot]))
    return pairs


def _tile_reads(k: Kernel, row: Array) -> list[Any]:
    return [pltpu.make_async_copy(a, b, k.scratch.tile_in.at[row & 1]) for a, b in _tile_pairs(k, row)]


def _tile_writes(k: Kernel, row: Array) -> list[Any]:
    return [pltpu.make_async_copy(b, a, k.scratch.tile_out.at[row & 1]) for a, b in _tile_pairs(k, row)]


def _put_new_token(k: Kernel, row: Array) -> None:
    """Replace the new token's values in the tiles of its page; the rest of them goes back as it came."""
    scratch, slot, rank, half = k.scratch, row & 1, k.static.rank, k.static.page // 2
    offset = k.scalars.offset[row]
    new, scale = k.inputs.new[pl.ds(row, 1)], k.inputs.new_scale[row]
    # `new` is what the cache will hold, so that float8 values are restored exactly from it.
    latent = new[:, :rank] / scale if k.static.fp8 else new[:, :rank]
    token = jax.lax.broadcasted_iota(jnp.int32, (TILE, rank), 0) == (offset & (TILE - 1))
    tile = scratch.tile[slot].astype(jnp.float32)
    scratch.tile[slot] = jnp.where(token, latent, tile).astype(scratch.tile.dtype)
    extra = new[:, rank:]
    both = extra + pltpu.roll(extra, LANES // 2, 1)
    sublane, lane = (jax.lax.broadcasted_iota(jnp.int32, (EXTRA_TILE, LANES), axis) for axis in (0, 1))
    token = (sublane == (offset & (half - 1) & (EXTRA_TILE - 1))) & ((lane >= LANES // 2) == (offset >= half))
    tile = scratch.extra_tile[slot].astype(jnp.float32)
    scratch.extra_tile[slot] = jnp.where(token, both, tile).astype(scratch.extra_tile.dtype)
    if k.static.fp8:
        row_of_page = scratch.scale_tile[slot]
        here = jax.lax.broadcasted_iota(jnp.int32, row_of_page.shape, 1) == offset
        scratch.scale_tile[slot] = jnp.where(here, scale, row_of_page)


# Positions in `Scratch.at`
COUNT, FETCH_ROW, FETCH_GROUP = range(3)


def _fetch(k: Kernel, row: Array, group: Array, buffer: Array) -> None:
    k.scratch.at[FETCH_ROW], k.scratch.at[FETCH_GROUP] = row, group
    for copy in _group_copies(k, row, group, buffer):
        copy.start()


def _step(k: Kernel, row: Array, group: Array) -> None:
    """Weigh and sum one group, score the next, fetch the one after the one that is on its way."""
    at, scratch = k.scratch.at, k.scratch
    count = at[COUNT]
    at[COUNT] = count + 1
    this, upcoming = (jax.lax.rem(count + i, BUFFERS) for i in range(2))
    _wait_for_group(k, upcoming)
    # The compiler keeps near this order. The softmax is a long chain on units that streamed scores leave alone; the
    # sums come last, when its weights are there.
    weights, fade = _softmax(k, row, group, count & 1)
    scores = _scores(k, _after(k, row, group)[0], upcoming)
    values = [_sum(k, weights, this, i) for i in range(len(scores))]
    scratch.values[...] = scratch.values[...] * fade[:, :1] + _tree(jnp.add, values)
    _keep(k, scores, (count + 1) & 1)
    _fetch(k, *_after(k, at[FETCH_ROW], at[FETCH_GROUP]), this)


def _sum(k: Kernel, weights: Array, buffer: Array, number: int) -> Array:
    """The weighted sum of one chunk's latents, [H, R]."""
    chunks = _chunks(k)
    tokens = weights.shape[1] // len(chunks)
    weights = weights[:, number * tokens : (number + 1) * tokens]
    if k.static.fp8:
        weights = weights * _scale(k, buffer, *chunks[number])
    return _dot(weights.astype(jnp.bfloat16), _latent(k, buffer, *chunks[number]))


def _keep(k: Kernel, scores: list[Array], slot: Array) -> None:
    """Scores for the next step, in units of log 2."""
    tokens = scores[0].shape[1]
    for i, x in enumerate(scores):
        k.scratch.scores[slot, :, pl.ds(i * tokens, tokens)] = x * k.static.factor


def _row(k: Kernel, row: Array) -> None:
    groups, ours = k.scalars.groups[row], k.scalars.target[row] >= 0

    # The tiles of this row arrive where those of the row before the last leave from.
    @pl.when((row >= 2) & (k.scalars.target[jnp.maximum(row - 2, 0)] >= 0))
    def _() -> None:
        for copy in _tile_writes(k, row - 2):
            copy.wait()

    @pl.when(ours)
    def _() -> None:
        for copy in _tile_reads(k, row):
            copy.start()

    @pl.when(row + 1 < k.static.rows)
    def _() -> None:
        _query_copy(k, row + 1).wait()

    @pl.when(row + 2 < k.static.rows)
    def _() -> None:
        _query_copy(k, row + 2).start()

    _begin_row(k, row)

    jax.lax.fori_loop(0, groups, lambda group, _: _step(k, row, group), None)

    @pl.when(row >= 2)
    def _() -> None:
        for copy in _out_copies(k, row - 2):
            copy.wait()

    _end_row(k, row)

    @pl.when(ours)
    def _() -> None:
        for copy in _tile_reads(k, row):
            copy.wait()
        _put_new_token(k, row)
        for copy in _tile_writes(k, row):
            copy.start()


def _kernel(static: Static, *refs: Ref) -> None:
    groups = iter(refs)
    take = lambda count: [next(groups) for _ in range(count)]  # noqa: E731
    scalars, inputs = Scalars(*take(len(Scalars._fields))), Inputs(*take(len(Inputs._fields)))
    parts = 3 if static.fp8 else 2
    take(parts)  # the cache as an input: the output is the same memory
    output, log_sum_exp = take(2)
    cache = Cache(*take(parts), *([] if static.fp8 else [None]))
    buffers = {
        name: None if name in ("scale", "scale_tile") and not static.fp8 else next(groups) for name in Scratch._fields
    }
    k = Kernel(static, scalars, inputs, cache, output, log_sum_exp, Scratch(**buffers))
    k.scratch.at[COUNT] = 0
    first = k.scratch.at[COUNT]
    for row in range(min(2, static.rows)):
        _query_copy(k, jnp.int32(row)).start()
    _fetch(k, first, first, first)
    for buffer in range(1, BUFFERS):
        _fetch(k, *_after(k, k.scratch.at[FETCH_ROW], k.scratch.at[FETCH_GROUP]), first + buffer)
    _query_copy(k, first).wait()
    _wait_for_group(k, first)
    _keep(k, _scores(k, first, first), first)

    jax.lax.fori_loop(0, static.rows, lambda row, _: _row(k, row), None)

    for ahead in range(1, BUFFERS):
        _wait_for_group(k, jax.lax.rem(k.scratch.at[COUNT] + ahead, BUFFERS))
    for last in range(max(static.rows - 2, 0), static.rows):
        for copy in _out_copies(k, jnp.int32(last)):
            copy.wait()

        @pl.when(k.scalars.target[last] >= 0)
        def _(last: int = last) -> None:
            for copy in _tile_writes(k, jnp.int32(last)):
                copy.wait()


def takes(pages: Pages, dtype: Any) -> bool:
    """Whether the kernel reads such pages, for queries of `dtype`."""
    fp8, page = pages.scale is not None, pages.page
    types = dtype == jnp.bfloat16 and (fp8 or pages.latent.dtype == jnp.bfloat16)
    widths = pages.rank % LANES == 0 and pages.extra.shape[2] == LANES
    return types and widths and TILE <= page <= 2 * CHUNK and page & (page - 1) == 0


def check(pages: Pages, dtype: Any, table_width: int) -> None:
    """Raises NotImplementedError for what the kernel does not take."""
    if table_width > ENTRIES:
        raise NotImplementedError(f"paged_decode's tpu body takes {ENTRIES} pages a row, not {table_width}")
    if not takes(pages, dtype):
        raise NotImplementedError(
            "paged_decode's tpu body is for bfloat16 queries, bfloat16 or float8_e4m3fn pages of a power of two from "
            f"{TILE} to {2 * CHUNK} tokens, a latent of a multiple of {LANES} and {LANES // 2} extra values, "
            f"not {dtype}, {pages.latent.dtype}, {pages.page}, {pages.rank} and {pages.extra.shape[2] // 2}"
        )


def paged_decode(
    q: Float[Array, "S H C"],
    new: Float[Array, "S C"],
    pages: Pages,
    page_table: Int[Array, "S P"],
    lengths: Int[Array, "S"],
    scale: float,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "S H R"], Float[Array, "S H"], Pages]:
    """As `reference.paged_decode`, in one kernel; see `check` for what it takes."""
    rows, heads, width = q.shape
    rank, page, pool, fp8 = pages.rank, pages.page, len(pages.latent), pages.scale is not None
    extra_width = width - rank
    least = -(-2 * LANES // page)  # so that half a group fills lanes
    group = min(GROUP // page, -(-page_table.shape[1] // least) * least)
    table = jnp.where(page_table < pool, page_table, -1)
    table = jnp.pad(table, ((0, 0), (0, -page_table.shape[1] % group)), constant_values=-1)
    static = Static(rows, table.shape[1], group, page, rank, scale / math.log(2), fp8)

    position = jnp.maximum(lengths - 1, 0)
    target, offset = paging.locate(pages, page_table, lengths[:, None] - 1)
    target = jnp.where(target[:, 0] < pool, target[:, 0], -1)
    groups = jnp.clip(-(-position // (group * page)), 1, table.shape[1] // group)
    offset = jnp.where(target >= 0, offset[:, 0], 0)
    # One row more, of holes: what is scored and fetched behind the last one.
    table = jnp.pad(table, ((0, 1), (0, 0)), constant_values=-1).reshape(-1)
    position, groups = jnp.pad(position, (0, 1)), jnp.pad(groups, (0, 1), constant_values=1)
    scalars = Scalars(table, position, groups, target, offset)

    padded = -(-heads // 16) * 16
    q = jnp.pad(q, ((0, 0), (0, padded - heads), (0, 0)))
    extra, zeros = q[..., rank:], jnp.zeros((rows, padded, extra_width), q.dtype)
    queries = jnp.concatenate([q[..., :rank], extra, zeros, zeros, extra], axis=-1)
    latent, new_extra, new_scale = paging.encode(pages, new)
    wide = latent.astype(jnp.float32) * (1.0 if new_scale is None else new_scale[:, None])
    held = jnp.concatenate([wide, new_extra.astype(jnp.float32), zeros[:, 0].astype(jnp.float32)], axis=-1)
    new_scale = jnp.ones(rows, jnp.float32) if new_scale is None else new_scale

    cache = [x for x in (pages.latent, pages.extra, pages.scale) if x is not None]
    scratch = [
        pltpu.VMEM((QUERY_BUFFERS, padded, rank + 2 * LANES), q.dtype),
        pltpu.VMEM((BUFFERS, group, page, rank), pages.latent.dtype),
        pltpu.VMEM((BUFFERS, group, page // 2, LANES), pages.extra.dtype),
        *([pltpu.VMEM((BUFFERS, group, 1, page), jnp.float32)] if fp8 else []),
        pltpu.VMEM((2, padded, group * page), jnp.float32),
        *[pltpu.VMEM((padded, width), jnp.float32) for width in (rank, LANES, LANES)],
        pltpu.VMEM((2, padded, rank), q.dtype),
        pltpu.VMEM((2, padded, LANES), jnp.float32),
        pltpu.VMEM((2, TILE, rank), pages.latent.dtype),
        pltpu.VMEM((2, EXTRA_TILE, LANES), pages.extra.dtype),
        *([pltpu.VMEM((2, 1, page), jnp.float32)] if fp8 else []),
        pltpu.SMEM((3,), jnp.int32),
        pltpu.SemaphoreType.DMA((QUERY_BUFFERS,)),
        pltpu.SemaphoreType.DMA((BUFFERS,)),
        *[pltpu.SemaphoreType.DMA((2,))] * 3,
    ]
    hbm, vmem, smem = (pl.BlockSpec(memory_space=space) for space in (pltpu.HBM, pltpu.VMEM, pltpu.SMEM))
    before = len(Scalars._fields) + len(Inputs._fields)
    shapes = [
        ((rows, padded, rank), q.dtype),
        ((rows, padded, LANES), jnp.float32),
        *((x.shape, x.dtype) for x in cache),
    ]
    output, log_sum_exp, *cache = pl.pallas_call(
        partial(_kernel, static),
        out_shape=tuple(pltpu.HBM(shape, dtype) for shape, dtype in shapes),
        in_specs=[*[smem] * len(Scalars._fields), hbm, vmem, smem, *[hbm] * len(cache)],
        out_specs=(hbm,) * len(shapes),
        input_output_aliases={before + i: 2 + i for i in range(len(cache))},
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),
        name="mla_paged_decode",
        interpret=interpret,
    )(*scalars, queries, held, new_scale, *cache)
    pages = Pages(cache[0], cache[1], cache[2] if fp8 else None)
    return output[:, :heads], log_sum_exp[:, :heads, 0], pages
