"""MXFP4 codes in a decode layout as operands of the matrix unit, inside kernels for TPU (Pallas Mosaic); SiTU there.

TPU7x has a float4 type and converts it; elsewhere integer operations on words make the same float8 e5m2 bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mx_layout import BLOCK, SUPERBLOCK, minimum_row

SUBLANES = 8

Ref = Any
Product = tuple[Array, Array | float]  # and the factors [1, n] that its columns still lack


def folded(codes: Ref, scales: Ref, exponents: Ref, depth: int, *, words: bool, interpret: bool) -> Array:
    """float8 e5m2 [depth, n]: weights over their column's smallest scale, by adding the rest to their exponents.

    `exponents` is scratch, uint32 [at least depth / 128, n].
    """
    superblocks = depth // SUPERBLOCK
    packed = pltpu.bitcast(scales[...], jnp.uint32)[:superblocks]
    codes_bytes = _bytes(codes[...], words)
    exponents[:superblocks] = ((packed & jnp.uint32(0x0F0F0F0F)) + jnp.uint32(0x01010101 * codes_bytes.rise)) << 2
    raise_by = []
    for superblock in range(superblocks):
        # Byte b of each of the 32 words below holds a code of block b: one word of exponents serves all of them.
        raise_by += [_every_sublane(exponents, superblock, interpret)] * (SUPERBLOCK // 4 // SUBLANES)
    return codes_bytes.floats(codes_bytes.bits + jnp.concatenate(raise_by, axis=0))


def unscaled(packed: Array, words: bool) -> Array:
    """The codes' own values as float8."""
    if not words:
        return pltpu.bitcast(packed, jnp.float4_e2m1fn).astype(jnp.float8_e5m2)
    codes = _bytes(packed, words)
    return codes.floats(codes.bits + jnp.uint32(0x04040404 * codes.rise))


def smallest_scale(scales: Ref, depth: int) -> Array:
    """Each column's smallest scale, float32 [1, n]."""
    return pltpu.bitcast(smallest_scale_bits(scales, depth), jnp.float32)


def smallest_scale_bits(scales: Ref, depth: int) -> Array:
    """Its exponent as a float32 has it, int32 [1, n]."""
    words = pltpu.bitcast(scales[...], jnp.int32)
    row = minimum_row(depth) // 4
    return (words[row : row + 1] & 0xFF) << 23


def situ(gate: Product, up: Product, *, beta: float, linear_beta: float) -> Array:
    """`situ_glu` of products times factors, with three tanh and no division."""
    (gate_product, gate_factor), (up_product, up_factor) = gate, up
    half = 0.5 * beta * linear_beta
    opened = half + half * jnp.tanh(gate_product * (0.5 * gate_factor))
    capped = jnp.tanh(gate_product * (gate_factor * (1 / beta)))
    return opened * capped * jnp.tanh(up_product * (up_factor * (1 / linear_beta)))


def in_layout(x: Array) -> Array:
    """[m, n] with lane 4 j + b of each 128 being element 32 b + j; of bfloat16, two rows move as one word."""
    words = pltpu.bitcast(x, jnp.int32)
    lane = jax.lax.broadcasted_iota(jnp.int32, (words.shape[0], SUPERBLOCK), 1)
    source = BLOCK * (lane & 3) + (lane >> 2)
    tiles = [words[:, i : i + SUPERBLOCK] for i in range(0, words.shape[1], SUPERBLOCK)]
    moved = [jnp.take_along_axis(tile, source, axis=1, mode="promise_in_bounds") for tile in tiles]
    return pltpu.bitcast(jnp.concatenate(moved, axis=1), x.dtype)


class Bytes(NamedTuple):
    """Codes as float8 e5m2, four in a word [n / 4, tile]: bits with zeros not yet zero, and what tells them apart.

    `zero` holds, for each byte, `mark` where its code is a zero. 4 `rise` is still to be added to the bits.
    """

    bits: Array
    zero: Array
    mark: int
    rise: int

    def floats(self, raised: Array) -> Array:
        """[n, tile] with zeros for zeros and otherwise the bytes `raised`."""
        is_zero = pltpu.bitcast(self.zero, jnp.int8) == self.mark
        return pltpu.bitcast(jnp.where(is_zero, jnp.int8(0), pltpu.bitcast(raised, jnp.int8)), jnp.float8_e5m2)


RISE = 14  # from the lowest exponent of an e5m2 number to that of 0.5


def _bytes(packed: Array, words: bool) -> Bytes:
    """The codes of [n / 2, tile] bytes."""
    if not words:
        weights = pltpu.bitcast(packed, jnp.float4_e2m1fn).astype(jnp.float8_e5m2)
        bits = pltpu.bitcast(weights, jnp.uint32)
        return Bytes(bits, bits & jnp.uint32(0x7F7F7F7F), 0, 0)
    packed = pltpu.bitcast(packed, jnp.uint32)
    magnitude = jnp.uint32(0x0E0E0E0E)
    first, second = packed & jnp.uint32(0x8E8E8E8E), (packed >> 3) & magnitude
    both = _alternate(first, second | ((packed << 7) & jnp.uint32(0x80808080)))
    return Bytes(both, _alternate(first & magnitude, second), 2, RISE)


def _alternate(first: Array, second: Array) -> Array:
    """Eight rows of the one, eight of the other, and so on."""
    rows = range(0, first.shape[0], SUBLANES)
    return jnp.concatenate([x[i : i + SUBLANES] for i in rows for x in (first, second)], axis=0)


def _every_sublane(rows: Ref, row: int, interpret: bool) -> Array:
    """One row as [8, n]; on a TPU by a load of stride zero, which the interpreter does not have."""
    if interpret:
        return jnp.broadcast_to(rows[row : row + 1], (SUBLANES, rows.shape[1]))
    return rows[pl.ds(row, SUBLANES, 0), :]
