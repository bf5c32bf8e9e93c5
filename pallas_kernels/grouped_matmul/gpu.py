"""MXFP4 experts on an NVIDIA GPU (Pallas Triton): blocks of rows as in `blocked`, codes decoded in registers.

A program multiplies one block of rows by a tile of an expert's columns, so that codes and scales are all that is read
of a weight. The even and the odd elements of a depth lie in different nibbles: rows come split the same way, and two
products are added up. A code's bits, moved into a bfloat16, are 2^-126 of its value, subnormals included.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.grouped_matmul import blocked
from pallas_kernels.grouped_matmul.common import Experts
from pallas_kernels.mx import BLOCK, NAN_SCALE, MXFP4Array, e2m1_bits

MIN_ROWS, MAX_ROWS = 16, 128  # of a block; the tensor cores want 16
COLUMNS = 64  # of a program
BYTES = 64  # of a column's codes in one step, 128 elements
WARPS, STAGES = 4, 3

Ref = Any


def grouped_matmul(rows: Array, experts: Any, group_sizes: Array, *, precision: jax.lax.PrecisionLike) -> Array:
    """See `pallas_kernels.grouped_matmul.grouped_matmul`; NotImplementedError for what the kernel does not do."""
    _check("grouped_matmul", rows, experts)
    return blocked.grouped_matmul(rows, experts, group_sizes, precision=precision, blocking=BLOCKING)


def expert_ffn(rows: Array, w1: Any, w3: Any, w2: Any, *arguments: Any, **options: Any) -> Array:
    """See `pallas_kernels.grouped_matmul.expert_ffn`; NotImplementedError for what the kernel does not do."""
    _check("expert_ffn", rows, w1, w3, w2)
    return blocked.expert_ffn(rows, w1, w3, w2, *arguments, **options, blocking=BLOCKING)


def why_not(rows: Array, *experts: Experts) -> str | None:
    """What keeps the kernel from these rows and experts, in words; None where nothing does."""
    if rows.dtype != jnp.bfloat16:
        return f"its kernel reads bfloat16 rows, not {rows.dtype}"
    for weights in experts:
        if not isinstance(weights, MXFP4Array) or weights.layout != "checkpoint":
            return "its kernel is for MXFP4 experts in the checkpoint's layout"
        _, columns, depth = weights.shape
        if columns % COLUMNS or depth % (2 * BYTES):
            return f"its kernel needs outputs in {COLUMNS}s and inputs in {2 * BYTES}s, not {columns} x {depth}"
    return None


def _check(op: str, rows: Array, *experts: Experts) -> None:
    if problem := why_not(rows, *experts):
        raise NotImplementedError(f"{op}'s gpu body: {problem}; use implementation='blocked'")


def block_rows(rows: int, experts: int) -> int:
    """Rows of a block: the mean group, as a power of two from 16 to 128."""
    mean = max(rows // experts, 1)
    return min(max(1 << (mean - 1).bit_length(), MIN_ROWS), MAX_ROWS)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(x: Array, experts: MXFP4Array, blocks: blocked.Blocks, precision: jax.lax.PrecisionLike) -> Array:
    """As `blocked.product`, of bfloat16 rows."""
    used = jnp.any(blocks.is_row.reshape(x.shape[:2]), axis=1).astype(jnp.int32)
    arrays = blocks.expert, used, x[..., 0::2], x[..., 1::2], experts.codes, experts.scales
    count, rows = x.shape[:2]
    run = partial(_call, count, rows)
    return jax.lax.platform_dependent(*arrays, cuda=partial(run, interpret=False), default=partial(run, interpret=True))


def _product_fwd(x: Array, experts: MXFP4Array, blocks: blocked.Blocks, precision: Any) -> tuple[Array, Any]:
    return _product(x, experts, blocks, precision), (x, experts, blocks)


def _product_bwd(precision: Any, saved: Any, g: Array) -> tuple[Array, None, None]:
    x, experts, blocks = saved
    product = jax.vjp(lambda x: blocked.product(x, experts, blocks, precision).astype(g.dtype), x)[1]
    return *product(g), None, None


_product.defvjp(_product_fwd, _product_bwd)

BLOCKING = blocked.Blocking(block_rows, _product)


def _call(count: int, rows: int, *arrays: Array, interpret: bool) -> Array:
    _, columns, half = arrays[-2].shape
    out = jax.ShapeDtypeStruct((count, rows, columns), jnp.float32)
    return pl.pallas_call(
        partial(_kernel, half // BYTES, interpret),
        out_shape=out,
        grid=(count, columns // COLUMNS),
        in_specs=[*map(_whole, arrays)],
        out_specs=_whole(out),
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        name="mxfp4_product",
        interpret=interpret,
    )(*arrays)


def _whole(x: Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
    return pl.BlockSpec(x.shape, lambda block, tile: (0,) * x.ndim)


def _kernel(
    steps: int, interpret: bool, expert: Ref, used: Ref, even: Ref, odd: Ref, codes: Ref, scales: Ref, out: Ref
) -> None:
    """Weights are the second operand: as the first, which tensor cores read from registers, Triton gave NaN."""
    block, per_step = pl.program_id(0), 2 * BYTES // BLOCK
    own, columns = expert[block], pl.ds(pl.program_id(1) * COLUMNS, COLUMNS)

    def step(i: Array, total: Array) -> Array:
        places, blocks = pl.ds(i * BYTES, BYTES), pl.ds(i * per_step, per_step)
        low, high = _decoded(codes[own, columns, places], scales[own, columns, blocks], interpret)
        total += jnp.dot(even[block, :, places], low.T, preferred_element_type=jnp.float32)
        return total + jnp.dot(odd[block, :, places], high.T, preferred_element_type=jnp.float32)

    total = jnp.zeros((out.shape[1], COLUMNS), jnp.float32)
    out[block, :, columns] = jax.lax.fori_loop(0, steps * used[block], step, total)


def _decoded(codes: Array, scales: Array, interpret: bool) -> tuple[Array, Array]:
    """The even and the odd elements of [n, bytes], bfloat16."""
    codes, scales = codes.astype(jnp.int16), scales.astype(jnp.int16)
    bits = jnp.where(scales == 0, 0x40, scales << 7) | jnp.where(scales == NAN_SCALE, 0x40, 0)  # 2^-127; NaN
    scale = jnp.broadcast_to(_bfloat16(bits)[:, :, None], (*scales.shape, BLOCK // 2)).reshape(codes.shape)
    low, high = (_values(part, interpret) for part in (codes, codes >> 4))
    return low * scale, high * scale


def _values(codes: Array, interpret: bool) -> Array:
    """Of the low nibbles of int16, bfloat16."""
    if interpret:  # a CPU takes subnormals for zeros
        return jax.lax.bitcast_convert_type(e2m1_bits((codes & 15).astype(jnp.int32)), jnp.float32).astype(jnp.bfloat16)
    return _bfloat16(((codes & 7) << 6) | ((codes & 8) << 12)) * jnp.bfloat16(2.0**126)


def _bfloat16(bits: Array) -> Array:
    return jax.lax.bitcast_convert_type(bits.astype(jnp.int16), jnp.bfloat16)
