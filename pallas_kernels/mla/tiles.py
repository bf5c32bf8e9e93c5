"""Which tiles of queries and keys meet under a causal mask whose offset may be traced."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

Numbers = np.ndarray | Array


class Pairs(NamedTuple):
    """Tiles that meet, in the order of one side; of P entries the first `number` are in use (int32).

    `first` and `last` mark where a tile of that side begins and ends.
    """

    queries: Numbers
    keys: Numbers
    first: Numbers
    last: Numbers
    number: int | Array


def causal_pairs(rows: int, columns: int, tile: int, offset: int | Array, *, by_key: bool = False) -> Pairs:
    """Of `rows` tiles of queries from position `offset` on and `columns` tiles of keys from 0, those that may meet.

    In the order of the queries, or of the keys. Every tile of that side is in at least one pair, even if the mask
    leaves nothing of it, so that its outputs are written. Numpy arrays for an int, traced ones for an Array.
    """
    xp: Any = np if isinstance(offset, int) else jnp
    if by_key:
        begin = xp.clip((xp.arange(columns) * tile - offset) // tile, 0, rows - 1)
        end = xp.full_like(begin, rows)
    else:
        end = xp.clip((xp.arange(rows) * tile + tile - 1 + offset) // tile + 1, 1, columns)
        begin = xp.zeros_like(end)
    stop = xp.cumsum(end - begin)
    step = xp.arange(stop[-1] if xp is np else rows * columns)
    outer = xp.minimum(xp.searchsorted(stop, step, side="right"), len(stop) - 1)
    inner = end[outer] - stop[outer] + step
    first, last = inner == begin[outer], inner == end[outer] - 1
    queries, keys = (inner, outer) if by_key else (outer, inner)
    return _pairs(queries, keys, first, last, int(stop[-1]) if xp is np else stop[-1].astype(jnp.int32))


def all_pairs(rows: int, columns: int) -> Pairs:
    """All of them, in the order of the queries."""
    keys, queries = (x.reshape(-1) for x in np.meshgrid(np.arange(columns), np.arange(rows)))
    first, last = keys == 0, keys == columns - 1
    return _pairs(queries, keys, first, last, len(keys))


def _pairs(queries: Numbers, keys: Numbers, first: Numbers, last: Numbers, number: int | Array) -> Pairs:
    queries, keys, first, last = (x.astype(np.int32) for x in (queries, keys, first, last))
    return Pairs(queries, keys, first, last, number)
