"""Ragged rows times their expert's weights on a TPU: which tile of rows meets which expert, and the kernel around it.

Rows are cut into tiles of equal height. A group covers one tile or several, and where it ends inside a tile, the next
group shares that tile: a work item is one pair (tile, group). Items run in row order, so an output tile stays in VMEM
until every group that shares it has written its rows, and then leaves once. Rows past the last group form a last
group, the tail, which is set to zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Int

SUBTILE = 128  # rows of one product; a group wastes what it leaves of its first and last subtile
TILE = 4 * SUBTILE
LANES = 128
REGISTER_BYTES = 32  # of one lane of a packed register: 8 rows of float32, 16 of bfloat16
VMEM_LIMIT = 60 << 20  # bytes for the blocks of a kernel, two of each; a core of a tpu7x has 64 MiB

Ref = Any


class Work(NamedTuple):
    """Work items in row order, of which the first `count` [1] are real; group E of `starts` and `ends` is the tail.

    `expert` is the one whose weights an item wants; the tail wants those that are there already.
    """

    count: Any
    tile: Any
    group: Any
    expert: Any
    starts: Any
    ends: Any


def plan(group_sizes: Int[Array, " E"], rows: int, height: int, *, visit_empty: bool = False) -> Work:
    """The items of `rows` rows in tiles of `height`; `visit_empty`: one for each empty group, none for the tail."""
    experts, tiles = group_sizes.shape[0], pl.cdiv(rows, height)
    ends = jnp.append(jnp.cumsum(group_sizes), rows).astype(jnp.int32)
    starts = jnp.append(0, ends[:-1]).astype(jnp.int32)
    used = ends > starts
    first = jnp.minimum(starts // height, tiles - 1)
    count = jnp.where(used, (ends - 1) // height - first + 1, 0)
    if visit_empty:
        count = jnp.maximum(count, 1).at[experts].set(0)
    upto = jnp.cumsum(count, dtype=jnp.int32)
    item = jnp.arange(tiles + experts, dtype=jnp.int32)
    group = jnp.minimum(jnp.sum(item[:, None] >= upto, axis=1, dtype=jnp.int32), experts)
    tile = jnp.minimum(first[group] + item - (upto - count)[group], tiles - 1)
    last_used = jnp.max(jnp.where(used[:-1], jnp.arange(experts, dtype=jnp.int32), 0))
    return Work(upto[-1:], tile, group, jnp.where(group == experts, last_used, group), starts, ends)


def divisor(width: int, at_most: int) -> int:
    """The largest multiple of 128 up to `at_most` that divides `width`; the whole width where there is none."""
    return max((n for n in range(LANES, min(width, at_most) + 1, LANES) if width % n == 0), default=width)


def tile_height(rows: int, dtype: DTypeLike) -> int:
    """Rows of a tile: whole registers up to one subtile, whole subtiles from there."""
    unit = SUBTILE if rows > SUBTILE else REGISTER_BYTES // jnp.dtype(dtype).itemsize
    return min(-(-rows // unit) * unit, TILE)


def by_platform(run: Callable[..., Any], *args: Any) -> Any:
    """`run(*args, interpret=...)` by the platform that the program is lowered for: interpreted unless it is a TPU."""
    return jax.lax.platform_dependent(*args, tpu=partial(run, interpret=False), default=partial(run, interpret=True))


class Span(NamedTuple):
    """Rows [start, end) of an item, counted from its tile's first row, and the subtiles [first, last) they touch."""

    start: Any
    end: Any
    first: Any
    last: Any


def span(work: Work, item: Any, height: int, subtile: int) -> Span:
    """The rows of one item, in a kernel: its divisions are of numbers that are not negative."""
    group, origin = work.group[item], work.tile[item] * height
    start, end = jnp.maximum(work.starts[group] - origin, 0), jnp.minimum(work.ends[group] - origin, height)
    first, last = jax.lax.div(start, subtile), jax.lax.div(end + subtile - 1, subtile)
    return Span(start, end, first, jnp.where(end > start, last, first))


def own_rows(rows: Span, subtile: Any, height: int) -> Array:
    """Which of a subtile's rows are the item's: bool [height, 1]."""
    row = jax.lax.broadcasted_iota(jnp.int32, (height, 1), 0) + subtile * height
    return (row >= rows.start) & (row < rows.end)


# What a step computes, except of the tail: `body(rows, inputs, weights, write, scratch, scalars)`. It calls
# write(subtile, column, value) for each of the item's subtiles and for columns of the step from a static or traced
# one on. `inputs` are the blocks of the row arrays, `weights` those of the operands.
Body = Callable[..., None]


class Operand(NamedTuple):
    """Weights [n, ...]: a step reads `block` of expert e at `base` + e; along `axis` of it lie the step's columns."""

    array: Any
    block: tuple[int, ...]
    axis: int
    base: Any = 0


class Shape(NamedTuple):
    """Rows, experts, columns of the result; columns of one step; rows of a tile and of one product."""

    rows: int
    experts: int
    columns: int
    width: int
    height: int
    subtile: int

    @property
    def steps(self) -> int:
        return self.columns // self.width


def _kernel(shape: Shape, body: Body, counts: tuple[int, int, int], *refs: Ref) -> None:
    scalars, inputs, operands = counts
    cuts = np.cumsum([len(Work._fields), 1, scalars, inputs, operands, 1])
    prefetched, _bases, extra, blocks, weights, (out,), scratch = (
        refs[start:end] for start, end in zip([0, *cuts], [*cuts, None], strict=True)
    )
    work = Work(*prefetched)
    item, step = pl.program_id(0), pl.program_id(1)
    rows = span(work, item, shape.height, shape.subtile)

    def write(subtile: Any, column: Any, value: Array) -> None:
        where = subtile_rows(shape, subtile)
        columns = pl.ds(pl.multiple_of(step * shape.width + column, LANES), value.shape[1])
        if value.shape[1] == shape.columns:
            columns = slice(None)
        mine = own_rows(rows, subtile, shape.subtile)
        out[where, columns] = jnp.where(mine, value.astype(out.dtype), out[where, columns])

    tail = work.group[item] == shape.experts

    @pl.when(tail)
    def _() -> None:
        @pl.loop(rows.first, rows.last)
        def _(subtile: Array) -> None:
            write(subtile, 0, jnp.zeros((shape.subtile, shape.width), out.dtype))

    @pl.when(jnp.logical_not(tail))
    def _() -> None:
        own = [scalar[work.expert[item]] for scalar in extra]
        body(rows, blocks, [w.at[0] for w in weights], write, scratch, own)


def subtile_rows(shape: Shape, subtile: Any) -> Any:
    """The rows of a subtile, as an index into blocks of rows."""
    return pl.ds(pl.multiple_of(subtile * shape.subtile, shape.subtile), shape.subtile)


def ragged_product(
    inputs: Sequence[Array],
    operands: Sequence[Operand],
    group_sizes: Array,
    *,
    shape: Shape,
    body: Body,
    dtype: DTypeLike,
    name: str,
    interpret: bool,
    scalars: Sequence[Array] = (),
    scratch: Sequence[Any] = (),
) -> Array:
    """[M, columns] in `dtype`, from arrays [M, ...] of which a step sees a tile's rows; `scalars` [E] are int32."""
    work, steps, tail = plan(group_sizes, shape.rows, shape.height), shape.steps, shape.experts
    bases = jnp.stack([jnp.int32(w.base) for w in operands])

    def weights_at(operand: int, axis: int, item: Any, step: Any, *prefetched: Ref) -> tuple[Any, ...]:
        work, bases = Work(*prefetched[: len(Work._fields)]), prefetched[len(Work._fields)]
        column = jnp.where(work.group[item] == tail, steps - 1, step)
        return (bases[operand] + work.expert[item], *(column if i == axis else 0 for i in range(2)))

    def rows_at(item: Any, step: Any, *prefetched: Ref) -> tuple[Any, ...]:
        return Work(*prefetched[: len(Work._fields)]).tile[item], 0

    row_blocks = [pl.BlockSpec((shape.height, x.shape[1]), rows_at) for x in inputs]
    blocks = [pl.BlockSpec((1, *w.block), partial(weights_at, i, w.axis)) for i, w in enumerate(operands)]
    return pl.pallas_call(
        partial(_kernel, shape, body, (len(scalars), len(inputs), len(operands))),
        out_shape=jax.ShapeDtypeStruct((shape.rows, shape.columns), dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(work) + 1 + len(scalars),
            grid=(work.count[0], steps),
            in_specs=[*row_blocks, *blocks],
            out_specs=pl.BlockSpec((shape.height, shape.columns), rows_at),
            scratch_shapes=list(scratch),
        ),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_LIMIT, disable_bounds_checks=True),
        name=name,
        interpret=interpret,
    )(*work, bases, *scalars, *inputs, *(w.array for w in operands))
