"""MXFP4 bytes in the order that the TPU decode kernel reads, and back: the same codes and scales, every bit kept.

Checkpoint: codes [out, in/2], the low nibble being the even element; scales [out, in/32]. Decode layout: both
transposed, so that a column of the product lies on a lane, and the depth reordered within superblocks of 128:

    codes  [in/2, out]   place 128 i + 4 j + b of the depth holds element 128 i + 32 b + j, two places a byte: places
                         2 r and 2 r + 1 in "decode", r + 32 (r // 32) and 32 on in "decode_words"
    scales [R, out]      rows 0 .. in/32 - 1: scale minus the column's smallest; row in/32: the column's smallest scale
    narrow []            int32, 1 where no column of the matrix spans more than `SPAN` powers of two

Four consecutive places hold codes of four blocks, as a 32-bit word of four scale rows holds their scales: the kernel
adds one to the other without moving anything. R is a multiple of 32, what a TPU's tile of bytes takes anyway.

"decode" is for chips with a float4 type (TPU7x), whose codes stay E2M1. Others take a code out of its byte with integer
operations, and in "decode_words" that is cheap: the first code's sign is bit 7 and its magnitude bits 3-1, where a
float8 e5m2 has them; the second's are bits 0 and 6-4. Magnitudes 0 and 1 are swapped: read as exponent and fraction,
E2M1's subnormal 0.5 is then a normal number, and zero alone is none.

Functions take NumPy or JAX arrays alike, with any leading axes.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

BLOCK = 32
SUPERBLOCK = 128
ROW_TILE = 32
SPAN = 13  # powers of two by which a float8 e5m2 exponent can still be raised above that of the largest code


def minimum_row(depth: int) -> int:
    """The row of `scales` with each column's smallest scale."""
    return depth // BLOCK


def scale_rows(depth: int) -> int:
    """The rows of `scales` for a matrix of this depth."""
    return -(-(minimum_row(depth) + 1) // ROW_TILE) * ROW_TILE


def to_decode(codes: Any, scales: Any, *, words: bool) -> tuple[Any, Any, Any]:
    """Checkpoint bytes to a decode layout's codes, scales and narrow; ValueError unless 128 divides the depth."""
    xp = _namespace(codes)
    *lead, columns, half = codes.shape
    depth = 2 * half
    if depth % SUPERBLOCK:
        raise ValueError(f"the decode layout needs an input width that {SUPERBLOCK} divides, not {depth}")
    shape, axis = ((depth // SUPERBLOCK, 4, 2, 2, 4), -2) if words else ((depth // SUPERBLOCK, 2, 2, 16), -2)
    parts = codes.reshape(*lead, columns, *shape)  # superblock, block, half, quarter, byte; or pair, block of it, byte
    low, high = xp.split(parts, 2, axis=axis)
    both = xp.concatenate([(low & 15) | (high << 4), (low >> 4) | (high & 0xF0)], axis=axis)  # even and odd elements
    if words:
        both = xp.moveaxis(xp.swapaxes(both, -2, -1), -4, -1)  # superblock, half, byte, parity, block
        both = _for_words(both)
    else:
        both = xp.moveaxis(xp.swapaxes(both, -2, -1), -3, -1)  # superblock, byte, parity, pair
    moved = xp.swapaxes(both.reshape(*lead, columns, half), -1, -2)
    return moved, *_relative_scales(xp, xp.swapaxes(scales, -1, -2), depth)


def from_decode(codes: Any, scales: Any, *, words: bool) -> tuple[Any, Any]:
    """The inverse of `to_decode`, byte for byte."""
    xp = _namespace(codes)
    *lead, half, columns = codes.shape
    depth = 2 * half
    moved = xp.swapaxes(codes, -1, -2)
    if words:
        both = _from_words(moved).reshape(*lead, columns, depth // SUPERBLOCK, 2, 4, 2, 4)
        both = xp.swapaxes(xp.moveaxis(both, -1, -4), -2, -1)
    else:
        both = moved.reshape(*lead, columns, depth // SUPERBLOCK, 16, 2, 2)
        both = xp.swapaxes(xp.moveaxis(both, -1, -3), -2, -1)
    even, odd = xp.split(both, 2, axis=-2)
    parts = xp.concatenate([(even & 15) | (odd << 4), (even >> 4) | (odd & 0xF0)], axis=-2)
    row = minimum_row(depth)
    absolute = scales[..., :row, :] + scales[..., row : row + 1, :]
    return parts.reshape(*lead, columns, half), xp.swapaxes(absolute, -1, -2)


def _for_words(x: Any) -> Any:
    """Two nibbles a byte (sign, magnitude) to the bits of "decode_words"."""
    x = _swap_smallest(x)
    return ((x & 8) << 4) | (x & 0x70) | ((x & 7) << 1) | (x >> 7)


def _from_words(x: Any) -> Any:
    return _swap_smallest(((x >> 7) << 3) | (x & 0x70) | ((x >> 1) & 7) | ((x & 1) << 7))


def _swap_smallest(x: Any) -> Any:
    """Magnitudes 0 and 1 of both nibbles change places."""
    return x ^ (~((x >> 1) | (x >> 2)) & 0x11)


def _namespace(x: Any) -> Any:
    return np if isinstance(x, np.ndarray) else jnp


def _relative_scales(xp: Any, scales: Any, depth: int) -> tuple[Any, Any]:
    """Scales [..., in/32, out] as [..., R, out] relative to each column's smallest, and whether all are narrow.

    A smallest scale of 0 makes a matrix wide: 2^-127 is no normal float32 to multiply by.
    """
    smallest = scales.min(axis=-2, keepdims=True)
    relative = scales - smallest
    narrow = (relative.max(axis=(-2, -1)) <= SPAN) & (smallest.min(axis=(-2, -1)) >= 1)
    padding = xp.zeros((*scales.shape[:-2], scale_rows(depth) - minimum_row(depth) - 1, scales.shape[-1]), "uint8")
    return xp.concatenate([relative, smallest, padding], axis=-2), narrow.astype("int32")
