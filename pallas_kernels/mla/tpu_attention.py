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
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Int

from pallas_kernels.mla.partial import LOWEST
from pallas_kernels.mla.tiles import Pairs, all_pairs, causal_pairs

LANES = 128
BLOCK = 512  # tokens of a tile of queries or keys
QUERIES = 4096  # whose gradients lie in VMEM while the backward pass goes through the keys
PAIRS = 16384  # of tiles, whose numbers fit into scalar memory
VMEM = 48 * 2**20

Ref = Any


class Static(NamedTuple):
    """`causal`: by the tokens' numbers and, where there are ids, inside equal ids; else ids are positions."""

    block: int
    factor: float  # of the scores, in units of log 2
    causal: bool
    ids: bool
    blind: bool  # whether a query may see nothing


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


def _forward_kernel(static: Static, queries: Ref, keys: Ref, first: Ref, last: Ref, offset: Ref, *refs: Ref) -> None:
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
    starts = queries[step] * static.block + offset[0], keys[step] * static.block
    scores = jnp.where(_visible(static, column, row, *starts, keys=1), scores, LOWEST)
    old = top[...]
    new = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
    base = jnp.where(new <= LOWEST, 0.0, new) if static.blind else new  # so that LOWEST does not count
    weights = jnp.exp2(scores - jnp.tile(base, (1, static.block // LANES)))
    fade = jnp.exp2(old - new)
    total[...] = total[...] * fade + jnp.sum(weights, axis=1, keepdims=True)
    added = _dot(weights.astype(v.dtype), v[...], (1, 0))
    values[...] = values[...] * jnp.tile(fade, (1, values.shape[1] // LANES)) + added
    top[...] = new

    @pl.when(last[step] == 1)
    def _() -> None:
        none = total[...] == 0
        safe = jnp.where(none, 1.0, total[...]) if static.blind else total[...]
        output[...] = (values[...] * jnp.tile(1.0 / safe, (1, values.shape[1] // LANES))).astype(output.dtype)
        column = (top[...] + jnp.log2(safe)) * math.log(2)
        log_sum_exp[...] = (jnp.where(none, LOWEST, column) if static.blind else column).T[:1]
        largest[...] = jnp.maximum(largest[...], jnp.max(top[...], axis=0, keepdims=True))


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
    offset: int | Int[Array, ""] | None,
    dtype: Any,
    interpret: bool,
) -> tuple[Float[Array, "B H T V"], Float[Array, "B H T"], Float[Array, "B H"]]:
    """Output in `dtype`, log_sum_exp and largest logit (-inf of nothing); lengths are multiples of `block`.

    Causal from the position `offset` of the first query on; with None by `ids` alone, which then are positions.
    """
    run = partial(_forward_of, q, k, v, ids, scale, block=block, offset=offset, dtype=dtype, interpret=interpret)
    most = max(1, PAIRS // (k.shape[2] // block)) * block
    outputs, log_sum_exps, largest = zip(*(run(*span) for span in _spans(q.shape[2], most)), strict=True)
    output, log_sum_exp = jnp.concatenate(outputs, axis=2), jnp.concatenate(log_sum_exps, axis=2)
    return output, _lowest_to_inf(log_sum_exp), _lowest_to_inf(jnp.stack(largest).max(0))


def _spans(length: int, most: int) -> list[tuple[int, int]]:
    """Start and size of the spans of queries that share one call."""
    return [(at, min(most, length - at)) for at in range(0, length, most)]


def _lowest_to_inf(x: Array) -> Array:
    return jnp.where(x < LOWEST / 2, -jnp.inf, x)


def _forward_of(
    q: Array,
    k: Array,
    v: Array,
    ids: Ids | None,
    scale: float,
    start: int,
    count: int,
    *,
    block: int,
    offset: int | Array | None,
    dtype: Any,
    interpret: bool,
) -> tuple[Array, Array, Array]:
    """Of the queries `start` to `start + count`, with LOWEST for -inf."""
    batch, heads, _, width = q.shape
    value, rows, columns, begin = v.shape[-1], count // block, k.shape[2] // block, start // block
    shift = 0 if offset is None else offset + start
    pairs = all_pairs(rows, columns) if offset is None else causal_pairs(rows, columns, block, shift)
    blind = ids is not None or isinstance(shift, Array)
    static = Static(block, scale / math.log(2), offset is not None, ids is not None, blind)
    of_query, of_key = lambda p, s: begin + s[0][p], lambda p, s: s[1][p]
    specs = [
        _spec((block, width), lambda b, h, p, *s: (b, h, of_query(p, s), 0)),
        _spec((block, width), lambda b, h, p, *s: (b, h, of_key(p, s), 0)),
        _spec((block, value), lambda b, h, p, *s: (b, h, of_key(p, s), 0)),
        *(_id_specs(block, of_query, of_key) if ids is not None else []),
    ]
    output, log_sum_exp, largest = pl.pallas_call(
        partial(_forward_kernel, static),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(batch, heads, pairs.number),
            in_specs=specs,
            out_specs=[
                _spec((block, value), lambda b, h, p, *s: (b, h, s[0][p], 0)),
                _spec((1, block), lambda b, h, p, *s: (b, h, 0, s[0][p])),
                _spec((1, LANES), lambda b, h, p, *s: (b, h, 0, 0)),
            ],
            scratch_shapes=[pltpu.VMEM((block, size), jnp.float32) for size in (value, LANES, LANES)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, count, value), dtype),
            jax.ShapeDtypeStruct((batch, heads, 1, count), jnp.float32),
            jax.ShapeDtypeStruct((batch, heads, 1, LANES), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM
        ),
        name="mla_attention_forward",
        interpret=interpret,
    )(*_scalars(pairs, shift), q, k, v, *(ids or ()))
    return output, log_sum_exp[:, :, 0], largest[:, :, 0, 0] * math.log(2)


def _scalars(pairs: Pairs, shift: int | Array) -> tuple[Array, ...]:
    """The kernels' scalar arguments: the pairs, and the position of the first query."""
    return (*(jnp.asarray(x) for x in pairs[:4]), jnp.asarray(shift, jnp.int32).reshape(1))


def _backward_kernel(static: Static, queries: Ref, keys: Ref, first: Ref, last: Ref, offset: Ref, *refs: Ref) -> None:
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
    starts = keys[step] * static.block, queries[step] * static.block + offset[0]
    scores = jnp.where(_visible(static, column, row, *starts, keys=0), scores, LOWEST)
    weights = jnp.exp2(scores - log_sum_exp[...])
    d_weights = _dot(v[...], d_output[...], (1, 1))
    dv_sum[...] += _dot(weights.astype(d_output.dtype), d_output[...], (1, 0))
    d_scores = (weights * (d_weights - correction[...])).astype(q.dtype)
    dk_sum[...] += _dot(d_scores, q[...], (1, 0))
    here = pl.ds(pl.multiple_of(queries[step] * static.block, static.block), static.block)
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
    k: Float[Array, "B H S K"],
    v: Float[Array, "B H S V"],
    ids: Ids | None,
    log_sum_exp: Float[Array, "B H T"],
    correction: Float[Array, "B H T"],
    d_output: Float[Array, "B H T V"],
    *,
    scale: float,
    block: int,
    offset: int | Int[Array, ""],
    interpret: bool,
) -> tuple[Array, Array, Array]:
    """Gradients of a causal `forward` by q, k and v; `correction` is sum(d_output * output) - d_log_sum_exp."""
    rows = (jnp.maximum(log_sum_exp, -1e29) / math.log(2))[:, :, None], correction[:, :, None]
    options: Any = {"scale": scale, "block": block, "offset": offset, "interpret": interpret}
    run = partial(_backward_of, q, k, v, ids, *rows, d_output, **options)
    parts = [run(start=at, count=count) for at, count in _spans(q.shape[2], QUERIES)]
    dq = jnp.concatenate([part[0] for part in parts], axis=2)
    dk, dv = (_add_up([part[i] for part in parts], x) for i, x in ((1, k), (2, v)))
    return dq.astype(q.dtype), dk, dv


def _add_up(parts: list[Array], x: Array) -> Array:
    """The sum of what the spans of queries give the keys, shaped like `x`; the last span sees the most of them."""
    total = parts[-1]
    for part in parts[:-1]:
        total = total.at[:, :, : part.shape[2]].add(part)
    unseen = x.shape[2] - total.shape[2]
    total = jnp.pad(total, ((0, 0), (0, 0), (0, unseen), (0, 0))) if unseen else total
    return total.astype(x.dtype)


def _backward_of(
    q: Array,
    k: Array,
    v: Array,
    ids: Ids | None,
    log_sum_exp: Array,
    correction: Array,
    d_output: Array,
    *,
    start: int,
    count: int,
    scale: float,
    block: int,
    offset: int | Array,
    interpret: bool,
) -> tuple[Array, Array, Array]:
    """Of the queries `start` to `start + count`: float32 dq, and what they give the keys that they may see."""
    batch, heads, _, width = q.shape
    value, begin, shift = v.shape[-1], start // block, offset + start
    seen = k.shape[2] if isinstance(shift, Array) else min(k.shape[2], shift + count)
    pairs = causal_pairs(count // block, seen // block, block, shift, by_key=True)
    static = Static(block, scale / math.log(2), True, ids is not None, True)
    of_query, of_key = lambda p, s: begin + s[0][p], lambda p, s: s[1][p]
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
    partial_dtype = k.dtype if count == q.shape[2] else jnp.float32
    return pl.pallas_call(
        partial(_backward_kernel, static),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(batch, heads, pairs.number),
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
    )(*_scalars(pairs, shift), q, k, v, d_output, log_sum_exp, correction, *(ids or ()))
