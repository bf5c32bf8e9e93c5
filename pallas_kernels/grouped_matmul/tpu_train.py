"""Float experts on a TPU: the ragged matmul, its two gradients as kernels of their own, and the expert MLP from them.

out = rows W_e          a step multiplies a subtile of rows by [K, 512] of the weights
d_rows = g W_e^T        the same kernel; the matrix unit turns [256, N] of the weights around
d_W_e = rows_e^T g_e    a float32 sum of [1792, 1536] stays in VMEM while the expert's rows pass
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from pallas_kernels.grouped_matmul.common import in_groups
from pallas_kernels.grouped_matmul.tpu_matmul import (
    LANES,
    SUBTILE,
    VMEM_LIMIT,
    Operand,
    Ref,
    Shape,
    Span,
    Work,
    by_platform,
    divisor,
    own_rows,
    plan,
    ragged_product,
    span,
    subtile_rows,
    tile_height,
)
from pallas_kernels.mx import fake_quantize_mxfp8
from pallas_kernels.situ import situ_glu

WIDTH = 512  # columns of a forward step
TRANSPOSED = 256  # columns of a step of d_rows, and rows of its products, where turning weights around costs about 200
DEEP = 256  # rows of a product of d_W: the depth of the matrix unit
GRADIENT_TILE = 1792, 1536  # of d_W

Precision = jax.lax.PrecisionLike


def grouped_matmul(
    rows: Float[Array, "M K"], experts: Float[Array, "E K N"], group_sizes: Int[Array, " E"], *, precision: Precision
) -> Float[Array, "M N"]:
    """See `pallas_kernels.grouped_matmul.grouped_matmul`; `experts` are floats, and their gradient has their dtype."""
    return _grouped_matmul(precision if rows.dtype == jnp.float32 else None, rows, experts, group_sizes)


def expert_ffn(
    rows: Float[Array, "M L"],
    w1: Float[Array, "E L F"],
    w3: Float[Array, "E L F"],
    w2: Float[Array, "E F L"],
    group_sizes: Int[Array, " E"],
    row_weights: Float[Array, " M"] | None,
    *,
    beta: float,
    linear_beta: float,
    quantize_hidden: bool,
    precision: Precision,
) -> Float[Array, "M L"]:
    """See `pallas_kernels.grouped_matmul.expert_ffn`; the weights are floats."""
    gate = grouped_matmul(rows, w1, group_sizes, precision=precision)
    up = grouped_matmul(rows, w3, group_sizes, precision=precision)
    hidden = situ_glu(gate, up, beta=beta, linear_beta=linear_beta)
    hidden = fake_quantize_mxfp8(hidden) if quantize_hidden else hidden
    if row_weights is None:
        return grouped_matmul(hidden, w2, group_sizes, precision=precision)
    precision = precision if rows.dtype == jnp.float32 else None
    return _weighted_matmul(precision, hidden, w2, group_sizes, row_weights)


def why_not(rows: Array, experts: Array) -> str | None:
    """What keeps the kernels from rows [M, K or N] and experts [E, K, N], in words; None where nothing does."""
    if rows.dtype not in (jnp.bfloat16, jnp.float32):
        return f"its kernels compute in bfloat16 or float32, not in {rows.dtype}"
    _, depth, columns = experts.shape
    if depth % LANES or columns % LANES:
        return f"its kernels need widths that {LANES} divides, not {depth} and {columns}"
    needed = max(_block_bytes(rows, depth, columns, WIDTH), _block_bytes(rows, columns, depth, TRANSPOSED))
    if needed > VMEM_LIMIT:
        return f"weights of {depth} x {columns} need {needed} bytes of VMEM, of which it takes {VMEM_LIMIT}"
    return None


def _block_bytes(rows: Array, depth: int, columns: int, width: int) -> int:
    """Two buffers of the rows' tile, of the weights of one step and of the result's tile."""
    height, width = tile_height(rows.shape[0], rows.dtype), divisor(columns, width)
    return 2 * rows.dtype.itemsize * (height * depth + depth * width + height * columns)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_matmul(precision: Precision, rows: Array, experts: Array, group_sizes: Array) -> Array:
    return by_platform(partial(_product, precision=precision, transposed=False), rows, experts, group_sizes)


def _grouped_matmul_fwd(precision: Precision, rows: Array, experts: Array, group_sizes: Array) -> tuple[Array, Any]:
    return _grouped_matmul(precision, rows, experts, group_sizes), (rows, experts, group_sizes)


def _grouped_matmul_bwd(precision: Precision, saved: Any, g: Array) -> tuple[Array, Array, None]:
    rows, experts, group_sizes = saved
    d_rows = by_platform(partial(_product, precision=precision, transposed=True), g, experts, group_sizes)
    gradient = partial(_weight_gradient, precision=precision, dtype=experts.dtype)
    return d_rows, by_platform(gradient, rows, g, group_sizes), None


_grouped_matmul.defvjp(_grouped_matmul_fwd, _grouped_matmul_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weighted_matmul(precision: Precision, rows: Array, experts: Array, group_sizes: Array, weights: Array) -> Array:
    """Each row's product times its weight; the gradient needs no product, so a recomputation leaves it out."""
    out = by_platform(partial(_product, precision=precision, transposed=False), rows, experts, group_sizes)
    return (out.astype(jnp.float32) * _scale(weights, group_sizes)).astype(rows.dtype)


def _weighted_matmul_bwd(precision: Precision, saved: Any, g: Array) -> tuple[Array, Array, None, Array]:
    """A weight's gradient is g . (row W) = (g W^T) . row, and g W^T is also the way to the row's gradient."""
    rows, experts, group_sizes, weights = saved
    g, scale = jnp.where(in_groups(group_sizes, len(g)), g, 0), _scale(weights, group_sizes)
    back = by_platform(partial(_product, precision=precision, transposed=True), g, experts, group_sizes)
    back, weighted = back.astype(jnp.float32), (g.astype(jnp.float32) * scale).astype(g.dtype)
    gradient = partial(_weight_gradient, precision=precision, dtype=experts.dtype)
    d_experts = by_platform(gradient, rows, weighted, group_sizes)
    d_weights = jnp.sum(jnp.where(in_groups(group_sizes, len(g)), rows.astype(jnp.float32) * back, 0), axis=1)
    return (back * scale).astype(rows.dtype), d_experts, None, d_weights.astype(weights.dtype)


def _scale(weights: Array, group_sizes: Array) -> Array:
    return jnp.where(in_groups(group_sizes, len(weights)), weights[:, None].astype(jnp.float32), 0)


_weighted_matmul.defvjp(lambda *args: (_weighted_matmul(*args), args[1:]), _weighted_matmul_bwd)


def _dot(a: Array, b: Array, contracted: tuple[int, int], precision: Precision) -> Array:
    dims = ((contracted[:1], contracted[1:]), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _product(
    rows: Array, experts: Array, group_sizes: Array, *, precision: Precision, transposed: bool, interpret: bool
) -> Array:
    """Rows [M, K] times [E, K, N], or rows [M, N] times each of them transposed."""
    count, depth, columns = experts.shape
    if transposed:
        depth, columns = columns, depth
    width = divisor(columns, TRANSPOSED if transposed else WIDTH)
    height = tile_height(rows.shape[0], rows.dtype)
    subtile = min(TRANSPOSED if transposed and height % TRANSPOSED == 0 else SUBTILE, height)
    block, axis = ((width, depth), 0) if transposed else ((depth, width), 1)

    shape = Shape(rows.shape[0], count, columns, width, height, subtile)

    def body(rows: Span, inputs: Any, weights: Any, write: Any, scratch: Any, scalars: Any) -> None:
        @pl.loop(rows.first, rows.last)
        def _(index: Array) -> None:
            write(index, 0, _dot(inputs[0][subtile_rows(shape, index), :], weights[0][...], (1, 1 - axis), precision))

    return ragged_product(
        [rows],
        [Operand(experts.astype(rows.dtype), block, axis)],
        group_sizes,
        shape=shape,
        body=body,
        dtype=rows.dtype,
        name="grouped_matmul_transposed" if transposed else "grouped_matmul",
        interpret=interpret,
    )


def _gradient_kernel(height: int, subtile: int, precision: Precision, *refs: Ref) -> None:
    work, (x, g, out, total) = Work(*refs[:6]), refs[6:]
    item = pl.program_id(2)
    rows, group = span(work, item, height, subtile), work.group[item]
    first = (item == 0) | (work.group[jnp.maximum(item - 1, 0)] != group)
    last = (item == pl.num_programs(2) - 1) | (work.group[jnp.minimum(item + 1, work.group.shape[0] - 1)] != group)

    @pl.loop(rows.first, rows.last)
    def _(index: Array) -> None:
        where = pl.ds(pl.multiple_of(index * subtile, subtile), subtile)
        mine = own_rows(rows, index, subtile)
        # Both, since 0 times a NaN of another group's row is NaN.
        product = _dot(jnp.where(mine, x[where, :], 0), jnp.where(mine, g[where, :], 0), (0, 0), precision)
        total[...] = product + jnp.where(first & (index == rows.first), 0.0, total[...])

    @pl.when(last & (rows.first < rows.last))
    def _() -> None:
        out[0] = total[...].astype(out.dtype)

    @pl.when(rows.first == rows.last)
    def _() -> None:
        out[0] = jnp.zeros_like(out[0])


def _weight_gradient(
    rows: Array, g: Array, group_sizes: Array, *, precision: Precision, dtype: DTypeLike, interpret: bool
) -> Array:
    """Each expert's rows [M, K], transposed, times its rows of g [M, N]: [E, K, N] in `dtype`, 0 for an empty group."""
    (count, depth), columns, experts = rows.shape, g.shape[1], group_sizes.shape[0]
    height = tile_height(count, rows.dtype)
    subtile = DEEP if height % DEEP == 0 else min(SUBTILE, height)
    tall, wide = (divisor(n, limit) for n, limit in zip((depth, columns), GRADIENT_TILE, strict=True))
    work = plan(group_sizes, count, height, visit_empty=True)

    def rows_at(i: Any, j: Any, item: Any, *scalars: Ref) -> tuple[Any, ...]:
        return Work(*scalars).tile[item], i

    def g_at(i: Any, j: Any, item: Any, *scalars: Ref) -> tuple[Any, ...]:
        return Work(*scalars).tile[item], j

    def out_at(i: Any, j: Any, item: Any, *scalars: Ref) -> tuple[Any, ...]:
        return Work(*scalars).group[item], i, j

    return pl.pallas_call(
        partial(_gradient_kernel, height, subtile, precision),
        out_shape=jax.ShapeDtypeStruct((experts, depth, columns), dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(work),
            grid=(depth // tall, columns // wide, work.count[0]),
            in_specs=[pl.BlockSpec((height, tall), rows_at), pl.BlockSpec((height, wide), g_at)],
            out_specs=pl.BlockSpec((1, tall, wide), out_at),
            scratch_shapes=[pltpu.VMEM((tall, wide), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_LIMIT, disable_bounds_checks=True),
        name="grouped_matmul_weights",
        interpret=interpret,
    )(*work, rows, g)
