"""Attention with keys wider than values for TPU (Pallas Mosaic): forward with log_sum_exp and largest logit, backward.

JAX's splash attention takes these widths, too, but neither returns the largest logit, nor lets another forward pass use
its backward pass, nor gives the log_sum_exp a gradient. The grids here run over the pairs of tiles that the mask leaves
(splash visits all and skips), so that a causal forward and backward pass take half of the steps.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Int

from pallas_kernels.mla.partial import LOWEST

LANES = 128
BLOCK = 512  # tokens of a tile of queries or keys
QUERIES = 4096  # whose gradients lie in VMEM while the backward pass goes through the keys
VMEM = 48 * 2**20

Ref = Any


class Static(NamedTuple):
    """`causal`: by the tokens' numbers and, where there are ids, inside equal ids; else ids are positions."""

    block: int
    factor: float  # of the scores, in units of log 2
    causal: bool
    ids: bool


class Ids(NamedTuple):
    """Segment ids or positions, as columns [B, T, 128] and as rows [B, 1, T]."""

    column: Int[Array, "B T 128"]
    row: Int[Array, "B 1 S"]


def as_ids(columns: Int[Array, "B T"], rows: Int[Array, "B S"]) -> Ids:
    """Laid out as the kernels read them."""
    return Ids(jnp.broadcast_to(columns[..., None], (*columns.shape, LANES)), rows[:, None])


def _dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    return jax.lax.dot_general(a, b, (((contract[0],), (contract[1],)), ((), ())), preferred_element_type=jnp.float32)


def _visible(static: Static, column: Ref, row: Ref, rows: Array, columns: Array, *, keys: int) -> Array:
    """[block, block] mask; `rows` and `columns` are the first tokens of the two sides, `keys` the axis of the keys."""
    shape = (static.block, static.block)
    side = [jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1)]
    queries, others = (side[1 - keys], side[keys])
    offset = (rows - columns) if keys else (columns - rows)
    visible = others <= queries + offset if static.causal else None
    if static.ids:
        tall = jnp.tile(column[...], (1, static.block // LANES))
        if visible is not None:
            return visible & (tall == row[...])
        return row[...] <= tall
    assert visible is not None
    return visible


def _forward_kernel(static: Static, queries: Ref, keys: Ref, first: Ref, last: Ref, *refs: Ref) -> None:
    q, k, v = refs[:3]
    column, row = refs[3:5] if static.ids else (None, None)
    output, log_sum_exp, largest, values, top, total = refs[-6:]
    step = pl.program_id(2)

    @pl.when(first[step] == 1)
    def _() -> None:
        values[...] = jnp.zeros_like(values)
        total[...] = jnp.zeros_like(total)
        top[...] = jnp.full_like(top, LOWEST)

    @pl.when(step == 0)
    def _() -> None:
        largest[...] = jnp.full_like(largest, LOWEST)

    scores = _dot(q[...], k[...], (1, 1)) * static.factor
    offsets = queries[step] * static.block, keys[step] * static.block
    scores = jnp.where(_visible(static, column, row, *offsets, keys=1), scores, LOWEST)
    old = top[...]
    new = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
    # A query may see nothing by ids only: then LOWEST must not count.
    base = jnp.where(new <= LOWEST, 0.0, new) if static.ids else new
    weights = jnp.exp2(scores - jnp.tile(base, (1, static.block // LANES)))
    fade = jnp.exp2(old - new)
    total[...] = total[...] * fade + jnp.sum(weights, axis=1, keepdims=True)
    added = _dot(weights.astype(v.dtype), v[...], (1, 0))
    values[...] = values[...] * jnp.tile(fade, (1, values.shape[1] // LANES)) + added
    top[...] = new

    @pl.when(last[step] == 1)
    def _() -> None:
        none = total[...] == 0
        safe = jnp.where(none, 1.0, total[...]) if static.ids else total[...]
        output[...] = (values[...] * jnp.tile(1.0 / safe, (1, values.shape[1] // LANES))).astype(output.dtype)
        column = (top[...] + jnp.log2(safe)) * math.log(2)
        log_sum_exp[...] = (jnp.where(none, LOWEST, column) if static.ids else column).T[:1]
        largest[...] = jnp.maximum(largest[...], jnp.max(top[...], axis=0, keepdims=True))


def _pairs(rows: int, columns: int, causal: bool, first: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Tiles of queries, from `first` on, and of keys that may see each other, row after row."""
    pairs = [(i, j) for i in range(first, first + rows) for j in range(min(i + 1, columns) if causal else columns)]
    i, j = np.array(pairs, np.int32).T
    return i, j


def _spec(shape: tuple[int, ...], index: Any) -> pl.BlockSpec:
    return pl.BlockSpec((None, None, *shape), index)


def _id_specs(block: int, tall: Any, wide: Any) -> list[pl.BlockSpec]:
    """Of `Ids`, by the tile of the column's and of the row's side."""
    return [
        pl.BlockSpec((None, block, LANES), lambda b, h, p, *s: (b, tall(p, s), 0)),
        pl.BlockSpec((None, 1, block), lambda b, h, p, *s: (b, 0, wide(p, s))),
    ]


def forward(
    q: Float[Array, "B H T K"],
    k: Float[Array, "B H S K"],
    v: Float[Array, "B H S V"],
    ids: Ids | None,
    scale: float,
    *,
    block: int,
    causal: bool,
    dtype: Any,
    interpret: bool,
) -> tuple[Float[Array, "B H T V"], Float[Array, "B H T"], Float[Array, "B H"]]:
    """Output in `dtype`, log_sum_exp and largest logit (-inf of nothing); lengths are multiples of `block`."""
    batch, heads, length, width = q.shape
    value = v.shape[-1]
    i, j = _pairs(length // block, k.shape[2] // block, causal)
    first = np.diff(i, prepend=-1) != 0
    last = np.diff(i, append=-1) != 0
    static = Static(block, scale / math.log(2), causal, ids is not None)
    of_query, of_key = lambda p, s: s[0][p], lambda p, s: s[1][p]
    specs = [
        _spec((block, width), lambda b, h, p, *s: (b, h, of_query(p, s), 0)),
        _spec((block, width), lambda b, h, p, *s: (b, h, of_key(p, s), 0)),
        _spec((block, value), lambda b, h, p, *s: (b, h, of_key(p, s), 0)),
        *(_id_specs(block, of_query, of_key) if ids is not None else []),
    ]
    output, log_sum_exp, largest = pl.pallas_call(
        partial(_forward_kernel, static),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(batch, heads, len(i)),
            in_specs=specs,
            out_specs=[
                _spec((block, value), lambda b, h, p, *s: (b, h, of_query(p, s), 0)),
                _spec((1, block), lambda b, h, p, *s: (b, h, 0, of_query(p, s))),
                _spec((1, LANES), lambda b, h, p, *s: (b, h, 0, 0)),
            ],
            scratch_shapes=[pltpu.VMEM((block, size), jnp.float32) for size in (value, LANES, LANES)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, length, value), dtype),
            jax.ShapeDtypeStruct((batch, heads, 1, length), jnp.float32),
            jax.ShapeDtypeStruct((batch, heads, 1, LANES), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM
        ),
        name="mla_attention_forward",
        interpret=interpret,
    )(i, j, first.astype(np.int32), last.astype(np.int32), q, k, v, *(ids or ()))
    log_sum_exp, largest = log_sum_exp[:, :, 0], largest[:, :, 0, 0] * math.log(2)
    nothing = LOWEST / 2
    return (
        output,
        jnp.where(log_sum_exp < nothing, -jnp.inf, log_sum_exp),
        jnp.where(largest < nothing, -jnp.inf, largest),
    )


def _backward_kernel(static: Static, queries: Ref, keys: Ref, first: Ref, last: Ref, *refs: Ref) -> None:
    """Everything is transposed, keys by queries, so that what belongs to a query is a row."""
    q, k, v, d_output, log_sum_exp, correction = refs[:6]
    column, row = refs[6:8] if static.ids else (None, None)
    dq, dk, dv, dk_sum, dv_sum = refs[-5:]
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _() -> None:
        dq[...] = jnp.zeros_like(dq)

    @pl.when(first[step] == 1)
    def _() -> None:
        dk_sum[...] = jnp.zeros_like(dk_sum)
        dv_sum[...] = jnp.zeros_like(dv_sum)

    scores = _dot(k[...], q[...], (1, 1)) * static.factor
    offsets = keys[step] * static.block, queries[step] * static.block
    scores = jnp.where(_visible(static, column, row, *offsets, keys=0), scores, LOWEST)
    weights = jnp.exp2(scores - log_sum_exp[...])
    d_weights = _dot(v[...], d_output[...], (1, 1))
    dv_sum[...] += _dot(weights.astype(d_output.dtype), d_output[...], (1, 0))
    d_scores = (weights * (d_weights - correction[...])).astype(q.dtype)
    dk_sum[...] += _dot(d_scores, q[...], (1, 0))
    here = pl.ds(pl.multiple_of((queries[step] - queries[0]) * static.block, static.block), static.block)
    dq[here] += _dot(d_scores, k[...], (0, 0))

    @pl.when(last[step] == 1)
    def _() -> None:
        scale = static.factor * math.log(2)
        dk[...] = (dk_sum[...] * scale).astype(dk.dtype)
        dv[...] = dv_sum[...].astype(dv.dtype)

    @pl.when(step == pl.num_programs(2) - 1)
    def _() -> None:
        dq[...] *= static.factor * math.log(2)


def backward(
    q: Float[Array, "B H T K"],
    k: Float[Array, "B H T K"],
    v: Float[Array, "B H T V"],
    ids: Ids | None,
    log_sum_exp: Float[Array, "B H T"],
    correction: Float[Array, "B H T"],
    d_output: Float[Array, "B H T V"],
    scale: float,
    *,
    block: int,
    interpret: bool,
) -> tuple[Array, Array, Array]:
    """Gradients of a causal `forward` by q, k and v; `correction` is sum(d_output * output) - d_log_sum_exp."""
    length = q.shape[2]
    rows = (jnp.maximum(log_sum_exp, -1e29) / math.log(2))[:, :, None], correction[:, :, None]
    run = partial(_backward_of, q, k, v, ids, *rows, d_output, scale, block=block, interpret=interpret)
    spans = [(at, min(QUERIES, length - at)) for at in range(0, length, QUERIES)]
    parts = [run(at, count) for at, count in spans]
    dq = jnp.concatenate([part[0] for part in parts], axis=2)
    dk, dv = (_add_up([part[i] for part in parts]) for i in (1, 2))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def _add_up(parts: list[Array]) -> Array:
    """The sum of what the spans of queries give the keys; each sees the keys up to its own end."""
    total = parts[-1]
    for part in parts[:-1]:
        total = total.at[:, :, : part.shape[2]].add(part)
    return total


def _backward_of(
    q: Array,
    k: Array,
    v: Array,
    ids: Ids | None,
    log_sum_exp: Array,
    correction: Array,
    d_output: Array,
    scale: float,
    start: int,
    count: int,
    *,
    block: int,
    interpret: bool,
) -> tuple[Array, Array, Array]:
    """Of the queries `start` to `start + count`: float32 dq, and what they give the keys up to their end."""
    batch, heads, _, width = q.shape
    value, seen = v.shape[-1], start + count
    i, j = _pairs(count // block, seen // block, True, start // block)
    order = np.lexsort((i, j))
    i, j = i[order], j[order]
    # The kernel takes queries[0] as the first tile of the span: key tile 0 is seen by all of them, in order.
    first, last = np.diff(j, prepend=-1) != 0, np.diff(j, append=-1) != 0
    static = Static(block, scale / math.log(2), True, ids is not None)
    of_query, of_key = lambda p, s: s[0][p], lambda p, s: s[1][p]
    by_query, by_key = (
        [lambda b, h, p, *s, of=of: (b, h, of(p, s), 0), lambda b, h, p, *s, of=of: (b, h, 0, of(p, s))]
        for of in (of_query, of_key)
    )
    specs = [
        _spec((block, width), by_query[0]),
        _spec((block, width), by_key[0]),
        _spec((block, value), by_key[0]),
        _spec((block, value), by_query[0]),
        *[_spec((1, block), by_query[1])] * 2,
        *(_id_specs(block, of_key, of_query) if ids is not None else []),
    ]
    partial_dtype = k.dtype if seen == count == q.shape[2] else jnp.float32
    return pl.pallas_call(
        partial(_backward_kernel, static),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(batch, heads, len(i)),
            in_specs=specs,
            out_specs=[
                _spec((count, width), lambda b, h, p, *s: (b, h, 0, 0)),
                _spec((block, width), by_key[0]),
                _spec((block, value), by_key[0]),
            ],
            scratch_shapes=[pltpu.VMEM((block, size), jnp.float32) for size in (width, value)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, count, width), jnp.float32),
            jax.ShapeDtypeStruct((batch, heads, seen, width), partial_dtype),
            jax.ShapeDtypeStruct((batch, heads, seen, value), partial_dtype),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM
        ),
        name="mla_attention_backward",
        interpret=interpret,
    )(i, j, first.astype(np.int32), last.astype(np.int32), q, k, v, d_output, log_sum_exp, correction, *(ids or ()))
