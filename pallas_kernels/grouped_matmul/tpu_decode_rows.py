"""Rows for the decode kernel and back (Pallas Mosaic): a row becomes whole tiles, so that any row can be copied.

A TPU keeps a matrix in tiles of 8 x 128, so a copy can start at every eighth row only, but an expert's rows start
anywhere. `spread` writes a bf16 row of L elements as words [L / 256, 128], padded to `pitch` sublanes: word l of
sublane i holds elements 256 i + l and 256 i + 128 + l. Results are float32 [L / 128, 128], padded alike; `collect`
makes rows of them, with the rows' weights, the zeros past the last group and the rounding that the caller wants.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

LANES, SUBLANES = 128, 8
PACKED = 16  # rows of a bf16 tile
STEP = 128  # rows of one step

Ref = Any


def pitch(words: int) -> int:
    """Sublanes that a row takes: an odd number of tiles, as eight rows 32 sublanes apart would share a memory bank."""
    return (-(-words // LANES // SUBLANES) | 1) * SUBLANES


def pair(words: Array) -> tuple[Array, Array]:
    """The elements in the low halves and in the high halves of a `spread` array's words, float32."""
    low, high = words << 16, words & jnp.uint32(0xFFFF0000)
    return pltpu.bitcast(low, jnp.float32), pltpu.bitcast(high, jnp.float32)


def _spread(rows: Ref, out: Ref) -> None:
    words = rows.shape[1] // 2
    for i in range(words // LANES):
        columns = (rows[:, pl.ds((2 * i + half) * LANES, LANES)].astype(jnp.float32) for half in range(2))
        low, high = (pltpu.bitcast(x, jnp.uint32) for x in columns)
        out[pl.ds(i, STEP, pitch(words)), :] = (low >> 16) | high


def spread(rows: Array, *, past: int, interpret: bool) -> Array:
    """bf16 [M, L] -> uint32 [at least (M + past) pitch, 128]; what is not a row's element is not specified."""
    count, width = rows.shape
    step = STEP * pitch(width // 2)
    steps = pl.cdiv(count + past, STEP)
    last = pl.cdiv(count, STEP) - 1
    out = pl.pallas_call(
        _spread,
        out_shape=jax.ShapeDtypeStruct((steps * step, LANES), jnp.uint32),
        grid=(last + 1,),
        in_specs=[pl.BlockSpec((STEP, width), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((step, LANES), lambda i: (i, 0)),
        name="spread_rows",
        interpret=interpret,
    )(rows)
    # XLA would keep few rows in VMEM, whence a copy takes the core's own loads and stores.
    return out if interpret else pltpu.with_memory_space_constraint(out, pltpu.HBM)


def _collect(total: Ref, spread_rows: Ref, weights: Ref, out: Ref) -> None:
    width = out.shape[1]
    for first in range(0, STEP, PACKED):
        own = pl.ds(first, PACKED)
        row = pl.program_id(0) * STEP + first + jax.lax.broadcasted_iota(jnp.int32, (PACKED, LANES), 0)
        valid, weight = row < total[0], jnp.broadcast_to(weights[own, :], (PACKED, LANES))
        for i in range(width // LANES):
            part = spread_rows[pl.ds(first * pitch(width) + i, PACKED, pitch(width)), :]
            out[own, pl.ds(i * LANES, LANES)] = jnp.where(valid, part * weight, 0.0).astype(out.dtype)


def collect(rows: Array, weights: Array, total: Array, *, width: int, dtype: DTypeLike, interpret: bool) -> Array:
    """The first M rows of results times `weights` float32 [M], as [M, L] in `dtype`; 0 from row `total` on."""
    count = weights.shape[0]
    return pl.pallas_call(
        _collect,
        out_shape=jax.ShapeDtypeStruct((count, width), dtype),
        grid=(pl.cdiv(count, STEP),),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec((STEP * pitch(width), LANES), lambda i: (i, 0)),
            pl.BlockSpec((STEP, 1), lambda i: (i, 0)),
        ],
        out_specs=pl.BlockSpec((STEP, width), lambda i: (i, 0)),
        name="collect_rows",
        interpret=interpret,
    )(total.reshape(1), rows, weights[:, None])
