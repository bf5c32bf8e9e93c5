"""The expert MLP of many rows an expert for TPU (Pallas Mosaic): MXFP4 weights are expanded in VMEM, chunk by chunk.

One kernel gives situ(w1 x, w3 x), one multiplies by w2 and by the row's weight. What they multiply must have its
columns in the order of the weights' layout: the first kernel reorders rows on the way, or a third does it before. A
chunk of weights is expanded once for all of an item's rows, in one block of instructions with its first product, so
that one hides behind the other. An expert takes one of two ways:

- narrow: scales go into the exponents of the codes as float8 e5m2 bytes, half of what the matrix unit has to load;
  the column's smallest scale multiplies the result. Exact where no column's scales span more than 13 powers of two.
- wide: codes become bfloat16 and are multiplied by their scale, exact for the scale bytes 2 to 252.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Int

from pallas_kernels.grouped_matmul import blocked
from pallas_kernels.grouped_matmul.tpu_codes import folded, in_layout, situ, smallest_scale, unscaled
from pallas_kernels.grouped_matmul.tpu_matmul import (
    SUBTILE,
    TILE,
    VMEM_LIMIT,
    Operand,
    Ref,
    Shape,
    Span,
    by_platform,
    divisor,
    ragged_product,
    subtile_rows,
    tile_height,
)
from pallas_kernels.mx import MXFP4Array
from pallas_kernels.mx_layout import BLOCK, SUPERBLOCK, minimum_row, scale_rows

LANES, SUBLANES = 128, 8
LAYOUT_ROWS = 64  # of one step of the kernel that reorders columns
STEP = 6144  # columns of the matrices of one step of the grid together, at most
# Columns of a chunk, at most: of one matrix, of each of two. Long blocks of instructions leave less idle at their ends;
# where other products follow, which hide nothing, short ones do, and compile sooner.
LONG, SHORT = (1792, 1024), (512, 512)

_MAX_EXPONENT = 8  # of 448, the largest e4m3 element
_CARRY = 0x007FFFFF - 0x00600000  # with the fraction of 448 it just does not carry


class Chunk(NamedTuple):
    """Columns of every matrix that are expanded together, of `matrices` matrices of this depth, by layout."""

    depth: int
    columns: int
    matrices: int
    words: bool  # the layout "decode_words"


class Static(NamedTuple):
    """Numbers of SiTU, and whether the hidden is rounded to MXFP8."""

    beta: float
    linear_beta: float
    quantize: bool


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def expert_ffn(
    static: Static,
    rows: Float[Array, "M L"],
    weights: tuple[MXFP4Array, MXFP4Array, MXFP4Array],
    group_sizes: Int[Array, " E"],
    row_weights: Float[Array, " M"] | None,
) -> Float[Array, "M L"]:
    """See `pallas_kernels.grouped_matmul.expert_ffn`: bf16 rows; w1, w3, w2 in a decode layout, without gradient."""
    return by_platform(partial(_expert_ffn, static), rows, weights, group_sizes, row_weights)


def _expert_ffn_fwd(static: Static, *arguments: Any) -> tuple[Array, Any]:
    return expert_ffn(static, *arguments), arguments


def _expert_ffn_bwd(static: Static, saved: Any, g: Array) -> tuple[Array, None, None, Array | None]:
    rows, (w1, w3, w2), group_sizes, row_weights = saved

    def run(rows: Array, row_weights: Array | None) -> Array:
        return blocked.expert_ffn(
            rows,
            w1.sliced(),
            w3.sliced(),
            w2.sliced(),
            group_sizes,
            row_weights,
            beta=static.beta,
            linear_beta=static.linear_beta,
            quantize_hidden=static.quantize,
            precision=None,
        )

    d_rows, d_row_weights = jax.vjp(run, rows, row_weights)[1](g)
    return d_rows, None, None, d_row_weights


expert_ffn.defvjp(_expert_ffn_fwd, _expert_ffn_bwd)


@jax.custom_vjp
def grouped_matmul(
    rows: Float[Array, "M K"], experts: MXFP4Array, group_sizes: Int[Array, " E"]
) -> Float[Array, "M N"]:
    """See `pallas_kernels.grouped_matmul.grouped_matmul`: bf16 rows, experts in a decode layout, without gradient."""
    return by_platform(_grouped_matmul, rows, experts, group_sizes)


def _grouped_matmul_fwd(*arguments: Any) -> tuple[Array, Any]:
    return grouped_matmul(*arguments), arguments


def _grouped_matmul_bwd(saved: Any, g: Array) -> tuple[Array, None, None]:
    rows, experts, group_sizes = saved
    run = partial(blocked.grouped_matmul, experts=experts.sliced(), group_sizes=group_sizes, precision=None)
    return *jax.vjp(run, rows)[1](g), None, None


grouped_matmul.defvjp(_grouped_matmul_fwd, _grouped_matmul_bwd)


def why_not(rows: Array, w1: MXFP4Array) -> str | None:
    """What keeps the kernels from an MLP of these rows and widths, in words; None where nothing does."""
    experts, hidden, width = w1.shape
    up, down = _shapes(rows.shape[0], experts, width, hidden)
    return _why_not(rows, width, hidden, max(_vmem_bytes(up, width, 2), _vmem_bytes(down, hidden, 1)))


def why_not_matmul(rows: Array, weights: MXFP4Array) -> str | None:
    """What keeps the kernel from one product, in words; None where nothing does."""
    experts, columns, depth = weights.shape
    return _why_not(rows, depth, columns, _vmem_bytes(_shape(rows.shape[0], experts, columns, 1), depth, 1))


def _why_not(rows: Array, width: int, hidden: int, needed: int) -> str | None:
    if rows.dtype != jnp.bfloat16:
        return f"its kernels for MXFP4 experts read bfloat16 rows, not {rows.dtype}"
    if width % SUPERBLOCK or hidden % SUPERBLOCK:
        return f"its kernels need widths that {SUPERBLOCK} divides, not {width} and {hidden}"
    if needed > VMEM_LIMIT:
        return f"experts of {width} x {hidden} need {needed} bytes of VMEM, of which it takes {VMEM_LIMIT}"
    return None


def _shapes(rows: int, experts: int, width: int, hidden: int) -> tuple[Shape, Shape]:
    """Of the product with w1 and w3, and of that with w2."""
    return _shape(rows, experts, hidden, 2), _shape(rows, experts, width, 1)


def _shape(rows: int, experts: int, columns: int, matrices: int) -> Shape:
    height = min(tile_height(rows, jnp.bfloat16), SUBTILE if rows <= SUBTILE * experts else TILE)
    return Shape(rows, experts, columns, divisor(columns, STEP // matrices), height, min(SUBTILE, height))


def _vmem_bytes(shape: Shape, depth: int, matrices: int) -> int:
    """Two buffers of the blocks of rows, results, codes and scales, and the scratch of `_product`."""
    rows = 2 * shape.height * (depth + shape.columns)
    weights = matrices * shape.width * (depth // 2 + scale_rows(depth))
    columns = matrices * _chunk_columns(shape, matrices)
    return 2 * (rows + weights) + columns * (depth + 4 * shape.subtile + 8 * (depth // SUPERBLOCK))


def _chunk_columns(shape: Shape, matrices: int) -> int:
    return divisor(shape.width, (LONG if shape.height == shape.subtile else SHORT)[matrices - 1])


def _expert_ffn(
    static: Static,
    rows: Array,
    weights: tuple[MXFP4Array, ...],
    group_sizes: Array,
    row_weights: Array | None,
    *,
    interpret: bool,
) -> Array:
    (w1, w3, w2), (count, width), (experts, hidden, _) = weights, rows.shape, weights[0].shape
    up, down = _shapes(count, experts, width, hidden)
    inputs = [_reordered_before(rows, up, interpret)]
    inputs = [_product(inputs, (w1, w3), group_sizes, up, partial(_situ, static), "up", interpret)]
    if row_weights is not None:
        inputs.append(row_weights.astype(jnp.float32)[:, None])
    return _product(inputs, (w2,), group_sizes, down, _weighted, "down", interpret)


def _grouped_matmul(rows: Array, experts: MXFP4Array, group_sizes: Array, *, interpret: bool) -> Array:
    number, columns, _ = experts.shape
    shape = _shape(rows.shape[0], number, columns, 1)
    inputs = [_reordered_before(rows, shape, interpret)]
    return _product(inputs, (experts,), group_sizes, shape, _weighted, "matmul", interpret)


def _product(
    inputs: Sequence[Array],
    weights: Sequence[MXFP4Array],
    group_sizes: Array,
    shape: Shape,
    finish: Callable[..., Array],
    name: str,
    interpret: bool,
) -> Array:
    """`finish(products, factors, inputs)` of a subtile: with each matrix, what the columns lack, its other inputs."""
    depth = weights[0].shape[-1]
    matrices = len(weights)
    chunk = Chunk(depth, _chunk_columns(shape, matrices), matrices, weights[0].layout == "decode_words")
    narrow = jnp.ones(shape.experts, jnp.int32)
    operands = []
    for w in weights:
        narrow &= w.narrow if w.layer is None else w.narrow[w.layer]
        base = 0 if w.layer is None else w.layer * shape.experts  # of a stack, whole: a slice would be a copy
        for leaf, height in ((w.codes, depth // 2), (w.scales, scale_rows(depth))):
            operands.append(Operand(leaf.reshape(-1, *leaf.shape[-2:]), (height, shape.width), 1, base))
    columns = chunk.columns * chunk.matrices
    return ragged_product(
        inputs,
        operands,
        group_sizes,
        shape=shape,
        body=partial(_body, shape, chunk, name != "down" and _reorders_inside(shape), finish, interpret),
        dtype=jnp.bfloat16,
        name=f"mxfp4_prefill_{name}",
        interpret=interpret,
        scalars=[narrow],
        scratch=[
            pltpu.VMEM((depth, columns), jnp.float8_e5m2),
            pltpu.VMEM((shape.subtile, columns), jnp.float32),
            pltpu.VMEM((2 * (depth // SUPERBLOCK), columns), jnp.uint32),
        ],
    )


def _body(
    shape: Shape,
    chunk: Chunk,
    reorder: bool,
    finish: Callable[..., Array],
    interpret: bool,
    rows: Span,
    inputs: Sequence[Ref],
    weights: Sequence[Ref],
    write: Callable[..., None],
    scratch: Sequence[Ref],
    scalars: Sequence[Array],
) -> None:
    """One step of an item; loops of at most one trip choose the way, so that a schedule shows what each costs."""
    expanded, totals, scale_words = scratch
    (narrow,) = scalars

    @pl.loop(0, shape.width // chunk.columns)
    def _(index: Array) -> None:
        columns = pl.ds(pl.multiple_of(index * chunk.columns, LANES), chunk.columns)
        codes, scales = ([w.at[:, columns] for w in weights[kind::2]] for kind in (0, 1))
        own = [slice(i * chunk.columns, (i + 1) * chunk.columns) for i in range(chunk.matrices)]
        matrices = list(zip(codes, scales, [scale_words.at[:, lanes] for lanes in own], strict=True))

        def read(subtile: Array, depth: Any) -> Array:
            x = inputs[0][subtile_rows(shape, subtile), depth]
            return in_layout(x) if reorder else x

        def finished(subtile: Array, products: Sequence[Array], factors: Sequence[Array | float]) -> None:
            others = [ref[subtile_rows(shape, subtile), :] for ref in inputs[1:]]
            write(subtile, index * chunk.columns, finish(products, factors, others))

        def multiplied(subtile: Array, tiles: Sequence[Array]) -> list[Array]:
            x = read(subtile, slice(None))
            return [jnp.dot(x, tile, preferred_element_type=jnp.float32) for tile in tiles]

        @pl.loop(0, narrow)
        def _(once: Array) -> None:
            tiles = [folded(*m, chunk.depth, words=chunk.words, interpret=interpret) for m in matrices]
            factors = [smallest_scale(s, chunk.depth) for s in scales]
            finished(rows.first, multiplied(rows.first, tiles), factors)
            if shape.height > shape.subtile:
                expanded[...] = jnp.concatenate(tiles, axis=1)

                @pl.loop(rows.first + 1, rows.last)
                def _(subtile: Array) -> None:
                    finished(subtile, multiplied(subtile, [expanded[:, lanes] for lanes in own]), factors)

        @pl.loop(0, 1 - narrow)
        def _(once: Array) -> None:
            for _codes, s, w in matrices:
                _store_scale_words(s, w, chunk.depth)

            @pl.loop(rows.first, rows.last)
            def _(subtile: Array) -> None:
                totals[...] = jnp.zeros_like(totals)

                @pl.loop(0, chunk.depth // SUPERBLOCK)
                def _(superblock: Array) -> None:
                    depth = pl.ds(pl.multiple_of(superblock * SUPERBLOCK, SUPERBLOCK), SUPERBLOCK)
                    x = read(subtile, depth)
                    for (c, _scales, w), lanes in zip(matrices, own, strict=True):
                        tile = _expanded(c, w, superblock, chunk.words)
                        totals[:, lanes] += jnp.dot(x, tile, preferred_element_type=jnp.float32)

                finished(subtile, [totals[:, lanes] for lanes in own], [1.0] * chunk.matrices)


# ---- weights


def _store_scale_words(scales: Ref, words: Ref, depth: int) -> None:
    """The scales' bfloat16 bits, two to a word as the codes stand: blocks 0 and 1 of each superblock, then 2 and 3."""
    superblocks, row = depth // SUPERBLOCK, minimum_row(depth) // 4
    packed = pltpu.bitcast(scales[...], jnp.uint32)
    absolute = packed[:superblocks] + (packed[row : row + 1] & jnp.uint32(0xFF)) * jnp.uint32(0x01010101)
    for i, pair in enumerate((absolute, absolute >> 16)):
        bits = ((pair & jnp.uint32(0xFF)) << 7) | ((pair & jnp.uint32(0xFF00)) << 15)
        words[i * superblocks : (i + 1) * superblocks] = bits


def _expanded(codes: Ref, scales: Ref, superblock: Array, words: bool) -> Array:
    """bfloat16 [128, n]: the weights of one superblock, codes times scales."""
    half = SUPERBLOCK // 2
    odd = jax.lax.broadcasted_iota(jnp.int32, (half, 1), 0) & 1 != 0
    even, other = (scales[pl.ds(superblock + i, 1)] for i in (0, scales.shape[0] // 2))
    factors = jnp.where(odd, other, even)
    values = unscaled(codes[pl.ds(pl.multiple_of(superblock * half, half), half), :], words)
    return values.astype(jnp.bfloat16) * pltpu.bitcast(factors, jnp.bfloat16)


# ---- rows


def _reorders_inside(shape: Shape) -> bool:
    """Whether products reorder their rows' columns: hidden behind the expansion, but again for every chunk."""
    return shape.height == shape.subtile


def _reordered_before(rows: Array, shape: Shape, interpret: bool) -> Array:
    return rows if _reorders_inside(shape) else _to_layout(rows, interpret=interpret)


def _situ(
    static: Static, products: Sequence[Array], factors: Sequence[Array | float], inputs: Sequence[Array]
) -> Array:
    """The hidden, in the order of the layout."""
    gate, up = zip(products, factors, strict=True)
    hidden = situ(gate, up, beta=static.beta, linear_beta=static.linear_beta).astype(jnp.bfloat16)
    return in_layout(_rounded(hidden) if static.quantize else hidden)


def _weighted(products: Sequence[Array], factors: Sequence[Array | float], inputs: Sequence[Array]) -> Array:
    out = products[0] * factors[0]
    return out * inputs[0] if inputs else out


def _rounded(x: Array) -> Array:
    """bfloat16 [m, n] through MXFP8 (e4m3, "ceil"): `mx.fake_quantize_mxfp8` where no scale is subnormal."""
    tiles = []
    for i in range(0, x.shape[1], LANES):
        tile = x[:, i : i + LANES]
        largest = jnp.abs(tile)
        for shift in (1, 2, 4, 8, 16):  # lane l gets the largest of l - 31 .. l
            rolled = pltpu.roll(pltpu.bitcast(largest, jnp.int32), shift, axis=1)
            largest = jnp.maximum(largest, pltpu.bitcast(rolled, jnp.bfloat16))
        words = pltpu.bitcast(largest, jnp.int32)
        last = jax.lax.broadcasted_iota(jnp.int32, words.shape, 1) | (BLOCK - 1)
        words = jnp.take_along_axis(words, last, axis=1, mode="promise_in_bounds")
        bits = pltpu.bitcast(pltpu.bitcast(words, jnp.bfloat16).astype(jnp.float32), jnp.int32)
        # A fraction above that of 448 carries into the exponent.
        exponent = jnp.maximum(((bits + _CARRY) >> 23) - _MAX_EXPONENT, 1)
        down, up = (pltpu.bitcast(e << 23, jnp.float32).astype(jnp.bfloat16) for e in (254 - exponent, exponent))
        tiles.append((tile * down).astype(jnp.float8_e4m3fn).astype(jnp.bfloat16) * up)
    return jnp.concatenate(tiles, axis=1)


def _layout_kernel(x: Ref, out: Ref) -> None:
    out[...] = in_layout(x[...])


def _to_layout(rows: Array, *, interpret: bool) -> Array:
    count, width = rows.shape
    block = min(LAYOUT_ROWS, tile_height(count, rows.dtype))
    spec = pl.BlockSpec((block, width), lambda i: (i, 0))
    return pl.pallas_call(
        _layout_kernel,
        out_shape=jax.ShapeDtypeStruct(rows.shape, rows.dtype),
        grid=(pl.cdiv(count, block),),
        in_specs=[spec],
        out_specs=spec,
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_LIMIT, disable_bounds_checks=True),
        name="mxfp4_prefill_rows",
        interpret=interpret,
    )(rows)
