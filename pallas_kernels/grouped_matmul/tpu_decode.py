"""The expert MLP of few rows an expert for TPU (Pallas Mosaic): MXFP4 weights stream once, others are never read.

A list of items, blocks of one expert's rows, is made in scalar memory; two loops inside an item run over column tiles
of w1 and w3, then of w2, while later tiles, of later items too, are on their way. An item takes one of two bodies:

- few rows: the matrix unit multiplies unscaled codes (exact in float8) by rows that are zero outside one block of 32,
  eight blocks at once; each block's result meets its scale in float32. Nothing is done to a weight but a cast.
- many rows: scales go into the exponents of the codes, as float8 e5m2 bytes; the column's smallest scale multiplies the
  result. Exact where a column's scales span at most 13 powers of two; experts with a wider column take the first body.

TPU7x has a float4 type and converts it; elsewhere integer operations on words make the same e5m2 bytes.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul.tpu_codes import (
    folded,
    in_layout,
    situ,
    smallest_scale,
    smallest_scale_bits,
    unscaled,
)
from pallas_kernels.grouped_matmul.tpu_decode_rows import LANES, SUBLANES, collect, pair, pitch, spread
from pallas_kernels.mx import BLOCK, MXFP4Array
from pallas_kernels.mx_layout import SUPERBLOCK, scale_rows

FOLDED = 8  # blocks of 32 in the matrix unit's depth
TILES = (512, 256)  # columns of one step
SLOTS = 3  # tiles in flight or in use, for each of the two loops

Ref = Any  # of an array in HBM, VMEM or SMEM
Copy = Any  # between them, not yet started


class Body(NamedTuple):
    """How one item is computed: at most `rows` rows, scales in float32 (`few`) or in the exponents."""

    rows: int
    few: bool


FEW_ROWS = 4  # of the largest body that takes any scales
FEW, MANY = (Body(2, few=True), Body(FEW_ROWS, few=True)), (Body(16, few=False), Body(64, few=False))


def bodies_for(rows: int, words: bool) -> tuple[Body, ...]:
    """The bodies that a call with `rows` rows may need, smallest first.

    Taken out of words, a code costs more than its scale: there the first kind is for wide scales only.
    """
    few, many = (FEW[-1:] if words else FEW), 1 + (rows > MANY[0].rows)
    if words or rows > FEW_ROWS:
        return *few, *MANY[:many]
    return few[: 1 + (rows > few[0].rows)]


class Stage(NamedTuple):
    """One matmul: `matrices` of depth x columns, in `tiles` steps of `tile` columns."""

    matrices: int
    depth: int
    tile: int
    tiles: int


class Static(NamedTuple):
    """Sizes and numbers that are fixed when the kernel is traced."""

    rows: int
    experts: int
    first: Stage
    second: Stage
    row_pitch: int  # sublanes that a row takes as words [L / 256, 128], padded
    pitch: int  # and its result, as float32 [L / 128, 128]
    bodies: tuple[Body, ...]
    beta: float
    linear_beta: float
    words: bool  # the layout "decode_words"
    interpret: bool


class Refs(NamedTuple):
    """The kernel's arguments in order: inputs, output, lists in SMEM, buffers in VMEM, semaphores."""

    sizes: Ref
    narrow: Ref
    layers: Ref
    rows: Ref
    w1: Ref
    w1_scales: Ref
    w3: Ref
    w3_scales: Ref
    w2: Ref
    w2_scales: Ref
    out: Ref
    expert: Ref
    start: Ref
    count: Ref
    bounds: Ref
    upcoming: Ref
    row_buffer: Ref
    out_buffer: Ref
    left: Ref
    hidden: Ref
    codes1: Ref
    scales1: Ref
    codes2: Ref
    scales2: Ref
    exponents1: Ref
    exponents2: Ref
    arrival1: Ref
    arrival2: Ref
    row_arrival: Ref
    out_leaving: Ref


# ---- the list of items


def _choose(options: list[int], index: Array) -> Array:
    value = jnp.int32(options[0])
    for i, option in enumerate(options[1:], 1):
        value = jnp.where(index == i, option, value)
    return value


def _body_of(static: Static, size: Array, narrow: Array) -> Array:
    """The index of the smallest body that holds `size` rows, or of the last; of a few-rows body for wide scales."""
    few = sum(body.few for body in static.bodies)
    index = sum(((size > body.rows).astype(jnp.int32) for body in static.bodies[:-1]), jnp.int32(0))
    first = few if static.words else 0
    return jnp.where(narrow != 0, jnp.maximum(index, first), jnp.minimum(index, few - 1))


def _list_items(static: Static, refs: Refs) -> None:
    """Blocks of every touched expert's rows, sorted by body; body b owns items bounds[b] to bounds[b + 1]."""
    bodies = len(static.bodies)
    for b in range(bodies):
        refs.upcoming[b] = 0

    def blocks_of(expert: Array) -> tuple[Array, Array, Array]:
        size = refs.sizes[expert]
        body = _body_of(static, size, refs.narrow[expert])
        rows = _choose([b.rows for b in static.bodies], body)
        shift = _choose([b.rows.bit_length() - 1 for b in static.bodies], body)
        return body, rows, (size + rows - 1) >> shift

    @pl.loop(0, static.experts)
    def _(expert: Array) -> None:
        body, _, blocks = blocks_of(expert)
        refs.upcoming[body] = refs.upcoming[body] + blocks

    refs.bounds[0] = 0
    for b in range(bodies):
        refs.bounds[b + 1] = refs.bounds[b] + refs.upcoming[b]
        refs.upcoming[b] = refs.bounds[b]

    def place(expert: Array, start: Array) -> Array:
        body, rows, blocks = blocks_of(expert)
        size, first = refs.sizes[expert], refs.upcoming[body]

        @pl.loop(0, blocks)
        def _(block: Array) -> None:
            refs.expert[first + block] = expert
            refs.start[first + block] = start + block * rows
            refs.count[first + block] = jnp.minimum(rows, size - block * rows)

        refs.upcoming[body] = first + blocks
        return start + size

    jax.lax.fori_loop(0, static.experts, place, jnp.int32(0))


# ---- copies


def _first_copies(static: Static, refs: Refs, step: Array) -> list[Copy]:
    """w1's and w3's codes and scales of a step; step = item * tiles + tile."""
    sources = [(refs.w1, refs.codes1, 0), (refs.w3, refs.codes1, 1)]
    sources += [(refs.w1_scales, refs.scales1, 0), (refs.w3_scales, refs.scales1, 1)]
    expert, columns, slot = _locate(static.first, refs, step)
    return [
        pltpu.make_async_copy(source.at[refs.layers[i], expert, :, columns], target.at[slot, i], refs.arrival1.at[slot])
        for source, target, i in sources
    ]


def _second_copies(static: Static, refs: Refs, step: Array) -> list[Copy]:
    expert, columns, slot = _locate(static.second, refs, step)
    return [
        pltpu.make_async_copy(source.at[refs.layers[2], expert, :, columns], target.at[slot], refs.arrival2.at[slot])
        for source, target in ((refs.w2, refs.codes2), (refs.w2_scales, refs.scales2))
    ]


def _locate(stage: Stage, refs: Refs, step: Array) -> tuple[Array, Any, Array]:
    expert = refs.expert[jax.lax.div(step, stage.tiles)]
    tile = jax.lax.rem(step, stage.tiles)
    return expert, pl.ds(pl.multiple_of(tile * stage.tile, stage.tile), stage.tile), jax.lax.rem(step, SLOTS)


def _row_copy(static: Static, refs: Refs, item: Array, rows: int) -> Copy:
    """A block's rows, and what follows them up to the body's number of rows."""
    size = rows * static.row_pitch
    source = refs.rows.at[pl.ds(pl.multiple_of(refs.start[item] * static.row_pitch, SUBLANES), size)]
    return pltpu.make_async_copy(source, refs.row_buffer.at[item & 1, pl.ds(0, size)], refs.row_arrival.at[item & 1])


def _fetch_rows(static: Static, refs: Refs, item: Array) -> None:
    for b, body in enumerate(static.bodies):

        @pl.when((item >= refs.bounds[b]) & (item < refs.bounds[b + 1]))
        def _(body: Body = body) -> None:
            _row_copy(static, refs, item, body.rows).start()


def _each_out_copy(static: Static, refs: Refs, item: Array, most: int, act: str) -> None:
    """Start or wait for the copies of exactly the block's rows: a copy for each power of two in their number."""
    count, piece = refs.count[item], 1
    while piece <= min(most, static.rows):
        done = count & (piece - 1)  # rows that smaller pieces take

        @pl.when((count & piece) != 0)
        def _(piece: int = piece, done: Array = done) -> None:
            size = piece * static.pitch
            source = pl.ds(pl.multiple_of(done * static.pitch, SUBLANES), size)
            target = pl.ds(pl.multiple_of((refs.start[item] + done) * static.pitch, SUBLANES), size)
            copy = pltpu.make_async_copy(refs.out_buffer.at[source], refs.out.at[target], refs.out_leaving.at[0])
            getattr(copy, act)()

        piece *= 2


# ---- arithmetic


def _store_left(body: Body, ref: Ref, column: Any, half: int, x: Array) -> None:
    """Put float32 [max(m, 8), 128] in `ref` as the left operand: [m, 128], or [8 m, 128] with each block apart."""
    if body.few:
        block = jax.lax.broadcasted_iota(jnp.int32, (FOLDED, LANES), 0)
        lane = jax.lax.broadcasted_iota(jnp.int32, (FOLDED, LANES), 1)
        own = block == half * (FOLDED // 2) + jax.lax.rem(lane, SUPERBLOCK // BLOCK)
        x = jnp.concatenate([jnp.where(own, x[r : r + 1], 0.0) for r in range(body.rows)], axis=0)
    ref[pl.ds(0, x.shape[0]), pl.ds(pl.multiple_of(column, LANES), LANES)] = x.astype(ref.dtype)


def _store_rows(static: Static, refs: Refs, body: Body, item: Array) -> None:
    """The item's rows, which have come, as the left operand of the first stage."""
    for i in range(static.first.depth // (2 * LANES)):
        words = refs.row_buffer[item & 1, pl.ds(i, max(body.rows, SUBLANES), static.row_pitch), :]
        for half, x in enumerate(pair(in_layout(words))):
            _store_left(body, refs.left, (2 * i + half) * LANES, half, x)


def _few_product(body: Body, left: Ref, codes: Ref, scales: Ref, depth: int, words: bool) -> Array:
    """[8, tile], rows past the body's zero: float8 products of blocks, scaled in float32 and added up."""
    tile = codes.shape[-1]
    smallest = smallest_scale_bits(scales, depth)
    sums = [jnp.zeros((FOLDED, tile), jnp.float32)] * body.rows
    width = FOLDED * BLOCK
    for k in range(depth // width):
        weights = unscaled(codes[pl.ds(k * width // 2, width // 2), :], words)
        x = left[pl.ds(0, FOLDED * body.rows), pl.ds(k * width, width)]
        parts = jnp.dot(x, weights, preferred_element_type=jnp.float32)
        bits = scales[pl.ds(k * FOLDED, FOLDED), :].astype(jnp.int32) << 23
        factors = pltpu.bitcast(bits + smallest, jnp.float32)
        sums = [total + parts[FOLDED * r : FOLDED * (r + 1)] * factors for r, total in enumerate(sums)]
    row = jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, tile), 0)
    out = jnp.zeros((SUBLANES, tile), jnp.float32)
    for r, total in enumerate(sums):
        out = jnp.where(row == r, jnp.sum(total, axis=0, keepdims=True), out)
    return out


def _many_product(
    body: Body, left: Ref, codes: Ref, scales: Ref, exponents: Ref, depth: int, words: bool, interpret: bool
) -> tuple[Array, Array]:
    """[m, tile] and what its columns lack: scales in the weights' exponents, one matmul over the whole depth."""
    weights = folded(codes, scales, exponents, depth, words=words, interpret=interpret)
    product = jnp.dot(left[pl.ds(0, body.rows), pl.ds(0, depth)], weights, preferred_element_type=jnp.float32)
    return product, smallest_scale(scales, depth)


def _product(
    static: Static, body: Body, left: Ref, codes: Ref, scales: Ref, exponents: Ref, depth: int
) -> tuple[Array, Array | float]:
    """[m, tile], and the factors [1, tile] that its columns still lack."""
    if body.few:
        return _few_product(body, left, codes, scales, depth, static.words), 1.0
    return _many_product(body, left, codes, scales, exponents, depth, static.words, static.interpret)


# ---- the loops


def _first_stage(static: Static, refs: Refs, body: Body, item: Array, total: Array) -> None:
    """hidden = situ(w1 x, w3 x), ready as the left operand of the second stage."""
    stage = static.first

    @pl.loop(0, stage.tiles)
    def _(tile: Array) -> None:
        step = item * stage.tiles + tile
        slot = jax.lax.rem(step, SLOTS)
        for copy in _first_copies(static, refs, step):
            copy.wait()
        products = [
            _product(
                static,
                body,
                refs.left,
                refs.codes1.at[slot, i],
                refs.scales1.at[slot, i],
                refs.exponents1.at[i],
                stage.depth,
            )
            for i in range(2)
        ]
        hidden = situ(*products, beta=static.beta, linear_beta=static.linear_beta)
        for i in range(stage.tile // LANES):
            column = tile * stage.tile + i * LANES
            _store_left(body, refs.hidden, column, i % 2, in_layout(hidden[:, i * LANES : (i + 1) * LANES]))
        _prefetch(partial(_first_copies, static, refs), step + SLOTS, total * stage.tiles)


def _second_stage(static: Static, refs: Refs, body: Body, item: Array, total: Array) -> None:
    stage = static.second

    @pl.loop(0, stage.tiles)
    def _(tile: Array) -> None:
        step = item * stage.tiles + tile
        slot = jax.lax.rem(step, SLOTS)
        for copy in _second_copies(static, refs, step):
            copy.wait()
        product, factor = _product(
            static, body, refs.hidden, refs.codes2.at[slot], refs.scales2.at[slot], refs.exponents2, stage.depth
        )
        out = product * factor
        for i in range(stage.tile // LANES):
            rows = pl.ds(tile * (stage.tile // LANES) + i, out.shape[0], static.pitch)
            refs.out_buffer[rows, :] = out[:, i * LANES : (i + 1) * LANES]
        _prefetch(partial(_second_copies, static, refs), step + SLOTS, total * stage.tiles)


def _prefetch(copies: Any, step: Array, steps: Array) -> None:
    @pl.when(step < steps)
    def _() -> None:
        for copy in copies(step):
            copy.start()


def _kernel(static: Static, *args: Ref) -> None:
    refs = Refs(*args)
    _list_items(static, refs)
    total = refs.bounds[len(static.bodies)]
    for step in range(SLOTS):
        _prefetch(partial(_first_copies, static, refs), jnp.int32(step), total * static.first.tiles)
        _prefetch(partial(_second_copies, static, refs), jnp.int32(step), total * static.second.tiles)
    _fetch_rows(static, refs, jnp.int32(0))
    most = 1
    for b, body in enumerate(static.bodies):
        most = max(most, body.rows)

        @pl.loop(refs.bounds[b], refs.bounds[b + 1])
        def _(item: Array, body: Body = body, most: int = most) -> None:
            _row_copy(static, refs, item, body.rows).wait()
            _fetch_rows(static, refs, item + 1)
            _store_rows(static, refs, body, item)
            _first_stage(static, refs, body, item, total)

            @pl.when(item > 0)
            def _() -> None:
                _each_out_copy(static, refs, item - 1, most, "wait")

            _second_stage(static, refs, body, item, total)
            _each_out_copy(static, refs, item, body.rows, "start")

    @pl.when(total > 0)
    def _() -> None:
        _each_out_copy(static, refs, total - 1, most, "wait")


def expert_ffn(
    rows: Array,
    w1: MXFP4Array,
    w3: MXFP4Array,
    w2: MXFP4Array,
    group_sizes: Array,
    row_weights: Array,
    *,
    beta: float,
    linear_beta: float,
    interpret: bool,
) -> Array:
    """The MLP of bf16 rows [M, L], times their weights float32 [M]; 0 past the last group."""
    (count, width), (experts, hidden, _) = rows.shape, w1.shape
    words = w1.layout == "decode_words"
    static = _static(count, width, hidden, experts, beta, linear_beta, words, interpret)
    tiled = spread(rows, past=static.bodies[-1].rows, interpret=interpret)
    narrow = w1.sliced().narrow & w3.sliced().narrow & w2.sliced().narrow
    layers = jnp.stack([jnp.int32(0 if w.layer is None else w.layer) for w in (w1, w3, w2)])
    weights = [leaf[None] if w.layer is None else leaf for w in (w1, w3, w2) for leaf in (w.codes, w.scales)]
    out = _call(static)(group_sizes, narrow, layers, tiled, *weights)
    total = jnp.sum(group_sizes)
    return collect(out, row_weights, total, width=width, dtype=rows.dtype, interpret=interpret)


def why_not_widths(width: int, hidden: int) -> str | None:
    """What keeps the kernel from experts of these widths, in words; None where nothing does."""
    if width % TILES[-1] or hidden % TILES[-1]:
        return f"its decode kernel needs widths that {TILES[-1]} divides, not L={width} and F={hidden}"
    return None


def _static(
    count: int, width: int, hidden: int, experts: int, beta: float, linear_beta: float, words: bool, interpret: bool
) -> Static:
    tile = {n: next(tile for tile in TILES if n % tile == 0) for n in (width, hidden)}
    bodies = bodies_for(count, words)
    return Static(
        count,
        experts,
        Stage(2, width, tile[hidden], hidden // tile[hidden]),
        Stage(1, hidden, tile[width], width // tile[width]),
        pitch(width // 2),
        pitch(width),
        bodies,
        beta,
        linear_beta,
        words,
        interpret,
    )


def _call(static: Static) -> Any:
    first, second = static.first, static.second
    items = min(static.experts, static.rows) + -(-static.rows // FEW_ROWS)
    longest = max(static.bodies[-1].rows, SUBLANES)
    left = max(FOLDED * body.rows if body.few else body.rows for body in static.bodies)

    def slots(stage: Stage) -> list[Any]:
        lead = (SLOTS, 2) if stage.matrices == 2 else (SLOTS,)
        return [pltpu.VMEM((*lead, n, stage.tile), jnp.uint8) for n in (stage.depth // 2, scale_rows(stage.depth))]

    hbm, smem = pl.BlockSpec(memory_space=pltpu.HBM), pl.BlockSpec(memory_space=pltpu.SMEM)
    return pl.pallas_call(
        partial(_kernel, static),
        out_shape=jax.ShapeDtypeStruct((static.rows * static.pitch, LANES), jnp.float32),
        in_specs=[*[smem] * 3, *[hbm] * 7],
        out_specs=hbm,
        scratch_shapes=[
            *[pltpu.SMEM((items,), jnp.int32)] * 3,
            pltpu.SMEM((len(static.bodies) + 1,), jnp.int32),
            pltpu.SMEM((len(static.bodies),), jnp.int32),
            pltpu.VMEM((2, longest * static.row_pitch, LANES), jnp.uint32),
            pltpu.VMEM((longest * static.pitch, LANES), jnp.float32),
            pltpu.VMEM((left, first.depth), jnp.bfloat16),
            pltpu.VMEM((left, second.depth), jnp.bfloat16),
            *slots(first),
            *slots(second),
            pltpu.VMEM((2, first.depth // SUPERBLOCK, first.tile), jnp.uint32),
            pltpu.VMEM((second.depth // SUPERBLOCK, second.tile), jnp.uint32),
            pltpu.SemaphoreType.DMA((SLOTS,)),
            pltpu.SemaphoreType.DMA((SLOTS,)),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA((1,)),
        ],
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True, vmem_limit_bytes=48 * 2**20),
        name="mxfp4_expert_decode",
        interpret=static.interpret,
    )
