"""Rows in order of expert and back, without a sort and with gathers for gradients; and ragged exchanges of rows.

A stable counting sort: the rank of a pair within its expert is the number of equal ids before it, which a triangular
matmul counts for a block of pairs at a time. XLA sorts on a TPU take minutes to compile where this takes seconds.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int32, Shaped

from sharding.expert_plan import Leg

_BLOCK = 1024  # pairs that are counted at a time; their one-hot rows are exact in bfloat16, counts in float32
_TOKENS = 512  # whose rows are summed at a time, so that they take no memory
FEW = 256  # tokens up to which rows are moved by one-hot matmuls: row by row, a gather costs more


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Order:
    """M rows in order of expert, out of the (token, slot) pairs of S tokens, token * k + slot.

    Row r is pair `pair[r]`, for r below the sum of `sizes`; pair p is row `row[p]`, if that is below it.
    """

    pair: Int32[Array, " M"]
    row: Int32[Array, " Sk"]
    sizes: Int32[Array, " E"]
    slots: int = field(metadata={"static": True})

    @property
    def tokens(self) -> int:
        return self.row.shape[0] // self.slots

    @property
    def used(self) -> Bool[Array, " Sk"]:
        """Which pairs have a row."""
        return self.row < jnp.sum(self.sizes)


def order_by_expert(ids: Int32[Array, "S k"], experts: int, rows: int) -> Order:
    """Sort pairs by their expert, stable; those of the id `experts` get no row. `rows` must be enough for the rest."""
    flat = ids.reshape(-1)
    sizes = jnp.sum(flat[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)
    ends = jnp.cumsum(sizes)
    row = _places(flat, jnp.append(ends - sizes, ends[-1]))
    index = jnp.arange(flat.shape[0], dtype=jnp.int32)
    pair = jnp.zeros(rows, jnp.int32).at[row].set(index, mode="drop", unique_indices=True)
    return Order(pair, row, sizes, ids.shape[1])


def _places(ids: Int32[Array, " N"], starts: Int32[Array, " E"]) -> Int32[Array, " N"]:
    """Where each id stands after a stable sort, given where each value's first one does."""
    count, values = ids.shape[0], jnp.arange(starts.shape[0])
    block = min(_BLOCK, count)
    blocks = jnp.pad(ids, (0, -count % block), constant_values=starts.shape[0] - 1).reshape(-1, block)
    earlier = jnp.tri(block, k=-1, dtype=jnp.bfloat16)

    def step(starts: Array, ids: Array) -> tuple[Array, Array]:
        hot = ids[:, None] == values
        seen = jnp.matmul(earlier, hot.astype(jnp.bfloat16), preferred_element_type=jnp.float32).astype(jnp.int32)
        place = jnp.sum(jnp.where(hot, seen + starts, 0), axis=1, dtype=jnp.int32)
        return starts + jnp.sum(hot, axis=0, dtype=jnp.int32), place

    return jax.lax.scan(step, starts, blocks)[1].reshape(-1)[:count]


@jax.custom_vjp
def spread(x: Float[Array, "S L"], order: Order) -> Float[Array, "M L"]:
    """Each row's token; rows past the last group hold anything. The gradient sums in float32 or wider."""
    if order.tokens <= FEW:
        return _exactly(_hot(order, x.dtype), x).astype(x.dtype)
    return x[order.pair // order.slots]


@jax.custom_vjp
def together(rows: Float[Array, "M L"], order: Order) -> Float[Array, "S L"]:
    """The sum of each token's rows in float32 or wider; 0 where it has none. Rows past the last group are finite."""
    if order.tokens <= FEW:
        return _exactly(_hot(order, rows.dtype).T, rows)
    wide = jnp.promote_types(jnp.float32, rows.dtype)

    def of_token(row_and_used: tuple[Array, Array]) -> Array:
        row, used = row_and_used
        return jnp.sum(jnp.where(used[:, None], jnp.take(rows, row, axis=0, mode="clip"), 0).astype(wide), axis=0)

    slots = tuple(x.reshape(-1, order.slots) for x in (order.row, order.used))
    return jax.lax.map(of_token, slots, batch_size=_TOKENS)


spread.defvjp(
    lambda x, order: (spread(x, order), (order, jnp.zeros(0, x.dtype))),
    lambda saved, g: (together(g, saved[0]).astype(saved[1].dtype), None),
)
together.defvjp(
    lambda rows, order: (together(rows, order), (order, jnp.zeros(0, rows.dtype))),
    lambda saved, g: (spread(g.astype(saved[1].dtype), saved[0]), None),
)


@jax.custom_vjp
def spread_weights(weights: Float[Array, "S k"], order: Order) -> Float[Array, " M"]:
    """Each row's own number out of one for each pair."""
    return weights.reshape(-1)[order.pair]


spread_weights.defvjp(
    lambda weights, order: (spread_weights(weights, order), order),
    lambda order, g: (_weights_back(g, order), None),
)


def _weights_back(g: Array, order: Order) -> Array:
    return jnp.where(order.used, jnp.take(g, order.row, mode="clip"), 0).reshape(-1, order.slots)


def _hot(order: Order, dtype: Any) -> Array:
    """[M, S]: 1 where a row in a group is of a token."""
    used = jnp.arange(order.pair.shape[0]) < jnp.sum(order.sizes)
    return (used[:, None] & (order.pair[:, None] // order.slots == jnp.arange(order.tokens))).astype(dtype)


def _exactly(a: Array, b: Array) -> Array:
    wide = jnp.promote_types(jnp.float32, b.dtype)
    return jnp.matmul(a, b, preferred_element_type=wide, precision=jax.lax.Precision.HIGHEST)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def exchange(
    axes: tuple[str, ...], count: int, x: Shaped[Array, "N ..."], away: Leg, home: Leg
) -> Shaped[Array, "count ..."]:
    """Send the segments of `away` and receive those of `home` in [count, ...], 0 elsewhere; the gradient returns."""
    return ragged(x, jnp.zeros((count, *x.shape[1:]), x.dtype), away, home, axes)


def _exchange_backward(axes: tuple[str, ...], count: int, saved: Any, g: Array) -> tuple[Array, None, None]:
    rows, away, home = saved
    return exchange(axes, rows.shape[0], g, home, away), None, None


exchange.defvjp(
    lambda axes, count, x, away, home: (exchange(axes, count, x, away, home), (jnp.zeros(x.shape[:1]), away, home)),
    _exchange_backward,
)


def ragged(
    operand: Shaped[Array, "N ..."], output: Shaped[Array, "M ..."], away: Leg, home: Leg, axes: tuple[str, ...]
) -> Shaped[Array, "M ..."]:
    """`jax.lax.ragged_all_to_all`, and where the platform has none the same by dense collectives; no gradient."""
    return jax.lax.platform_dependent(
        operand,
        output,
        away,
        home.sizes,
        tpu=functools.partial(_native, axes),
        cuda=functools.partial(_native, axes),
        default=functools.partial(_dense, axes),
    )


def _native(axes: tuple[str, ...], operand: Array, output: Array, away: Leg, received: Array) -> Array:
    return jax.lax.ragged_all_to_all(operand, output, away.here, away.sizes, away.there, received, axis_name=axes)


def _dense(axes: tuple[str, ...], operand: Array, output: Array, away: Leg, received: Array) -> Array:
    """Every rank sees all operands and picks its segments."""
    size, length = jax.lax.axis_size(axes), operand.shape[0]
    legs = jnp.stack(away).reshape(len(away), size, -1)
    here, there, sizes = jax.lax.all_to_all(legs, axes, 1, 1).reshape(len(away), -1)
    start = here + jnp.repeat(jnp.arange(size) * length, here.shape[0] // size)
    row = jnp.arange(output.shape[0])[:, None]
    hit = (row >= there) & (row < there + sizes)
    source = jnp.sum(jnp.where(hit, start + row - there, 0), axis=1)
    everything = jax.lax.all_gather(operand, axes, tiled=True)
    return jnp.where(jnp.any(hit, axis=1).reshape(-1, *[1] * (operand.ndim - 1)), everything[source], output)
