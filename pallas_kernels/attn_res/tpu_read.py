"""A sub-layer's read of the residual in Pallas for TPU, with the sum before it and the norm after it.

What needs a sum along D (the score, two norms, their gradients) takes several looks at a token, so a step holds 128
tokens in VMEM and every array crosses HBM once. All sums follow from the inner products of the two sources a (the
bank's part) and b (the live sum), the query and the cotangent: the mix m = (1 - s) a + s b has |m|^2 = (1 - s)^2 |a|^2
+ 2 s (1 - s) a.b + s^2 |b|^2, and so on. The matrix unit makes them for 128 tokens at once, as the diagonal of a
product of all with all: 1/128 of its work is of use, and it takes less time than the vector unit would. What is one
number for each token is a row of lanes; in the last pass over the tokens, a column that is equal in all lanes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128  # also the tokens of a step
ROWS = 16  # of a bf16 tile, which the last pass takes at one time
COLUMNS = (1024, 512, 256, 128)  # likewise: the first that divides D
VMEM_BYTES = 60 * 2**20
NT = (((1,), (1,)), ((), ()))  # a b^T

Ref = Any


class Static(NamedTuple):
    """`adds`: whether there is an update to add to the live sum."""

    adds: bool
    eps: float
    norm_eps: float


def supports(live: Array) -> bool:
    """Whether D fills lanes."""
    return live.shape[-1] % LANES == 0


def read_norm(
    mixed: Array,
    log_sum_exp: Array,
    live: Array,
    update: Array | None,
    has_live: Array,
    query: Array,
    weight: Array,
    *,
    eps: float,
    norm_eps: float,
) -> tuple[Array, Array]:
    """See `pallas_kernels.attn_res.read_norm`; NotImplementedError unless D is a multiple of 128."""
    width = live.shape[-1]
    if not supports(live):
        raise NotImplementedError(f"attn_res 'tpu': width {width} must be a multiple of {LANES}")
    flat = [None if x is None else x.reshape(-1, width) for x in (mixed, live, update)]
    size = live.size // width
    short = -size % ROWS
    if short:
        flat = [None if x is None else jnp.pad(x, ((0, short), (0, 0))) for x in flat]
    factors = jnp.stack([query, weight.astype(jnp.float32)])
    rest = jnp.pad(log_sum_exp.reshape(-1), (0, short)), has_live.astype(jnp.int32).reshape(1), factors
    summed, normed = _read_norm(Static(update is not None, eps, norm_eps), *flat, *rest)
    return summed[:size].reshape(live.shape), normed[:size].reshape(live.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _read_norm(
    static: Static,
    mixed: Array,
    live: Array,
    update: Array | None,
    log_sum_exp: Array,
    has_live: Array,
    factors: Array,
) -> tuple[Array, Array]:
    """[M, D] and [M], M a multiple of 16; `factors` are the query and the norm's weight, [2, D]."""
    arrays = (mixed, live) if update is None else (mixed, live, update)
    *summed, normed = _by_platform(partial(_forward, static), log_sum_exp, has_live, factors, *arrays)
    return (summed[0] if summed else live), normed


def _read_norm_fwd(static: Static, *inputs: Any) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    mixed, _, _, *rest = inputs
    summed, normed = _read_norm(static, *inputs)
    return (summed, normed), (*rest, mixed, summed)


def _read_norm_bwd(static: Static, saved: tuple[Array, ...], cotangents: tuple[Array, Array]) -> tuple:
    found = _by_platform(partial(_backward, static), *saved, *cotangents)
    d_mixed, d_live, d_log_sum_exp, d_factors = found
    return d_mixed, d_live, d_live if static.adds else None, d_log_sum_exp, None, d_factors


_read_norm.defvjp(_read_norm_fwd, _read_norm_bwd)


def _by_platform(run: Callable[..., Any], *args: Any) -> Any:
    return lax.platform_dependent(*args, tpu=partial(run, interpret=False), default=partial(run, interpret=True))


def _call(kernel: Any, inputs: tuple[Array, ...], outputs: list[Any], scratch: list[Any], *, interpret: bool) -> Any:
    """Run a kernel of (log_sum_exp, has_live, factors, *[M, D]) whose `outputs` are shapes and block specs."""
    log_sum_exp, has_live, factors, *arrays = inputs
    size, width = arrays[0].shape
    shapes, specs = zip(*outputs, strict=True)
    return pl.pallas_call(
        partial(kernel, size),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(size, LANES),),
            in_specs=[_lanes_spec(), _whole_spec(factors.shape), *[_tokens_spec(width)] * len(arrays)],
            out_specs=specs,
            scratch_shapes=scratch,
        ),
        out_shape=shapes,
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES, dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name=kernel.func.__name__.strip("_"),
    )(has_live, _to_lanes(log_sum_exp), factors, *arrays)


def _tokens_spec(width: int) -> pl.BlockSpec:
    return pl.BlockSpec((LANES, width), lambda i, _: (i, 0))


def _lanes_spec() -> pl.BlockSpec:
    return pl.BlockSpec((1, 1, LANES), lambda i, _: (i, 0, 0))


def _whole_spec(shape: tuple[int, ...]) -> pl.BlockSpec:
    return pl.BlockSpec(shape, lambda i, _: (0,) * len(shape))


def _forward(static: Static, *inputs: Array, interpret: bool) -> tuple[Array, ...]:
    live = inputs[4]
    tokens = jax.ShapeDtypeStruct(live.shape, live.dtype), _tokens_spec(live.shape[1])
    kernel = partial(_read_norm_forward, static)
    return _call(kernel, inputs, [tokens] * (1 + static.adds), _columns(2), interpret=interpret)


def _backward(static: Static, *inputs: Array, interpret: bool) -> tuple[Array, ...]:
    live = inputs[4]
    size, width = live.shape
    tokens = jax.ShapeDtypeStruct(live.shape, live.dtype), _tokens_spec(width)
    numbers = jax.ShapeDtypeStruct((pl.cdiv(size, LANES), 1, LANES), jnp.float32), _lanes_spec()
    weights = jax.ShapeDtypeStruct((2, 8, width), jnp.float32), _whole_spec((2, 8, width))
    kernel, scratch = partial(_read_norm_backward, static), [pltpu.VMEM((LANES, width), live.dtype), *_columns(7)]
    d_mixed, d_live, d_log_sum_exp, d_factors = _call(
        kernel, inputs, [tokens, tokens, numbers, weights], scratch, interpret=interpret
    )
    return d_mixed, d_live, d_log_sum_exp.reshape(-1)[:size], jnp.sum(d_factors, axis=1)


def _columns(count: int) -> list[Any]:
    return [pltpu.VMEM((LANES, LANES), jnp.float32)] * count


def _read_norm_forward(
    static: Static, size: int, has_live: Ref, log_sum_exp: Ref, factors: Ref, mixed: Ref, live: Ref, *refs: Ref
) -> None:
    normed, of_mixed, of_live = refs[-3:]
    if static.adds:
        update, summed = refs[:2]
        summed[...] = live[...] + update[...]
        live = summed
    products = _products(factors, mixed, live)
    share, *_ = _share(static, products, log_sum_exp, has_live, live.shape[1])
    scale = lax.rsqrt(_square_of_mix(products, share) / live.shape[1] + static.norm_eps)
    of_mixed[...], of_live[...] = _column(scale * (1.0 - share)), _column(scale * share)

    def norm(rows: Any, at: Any) -> None:
        a, b = _wide(mixed[rows, at]), _wide(live[rows, at])
        x = _tile(of_mixed[rows], a) * a + _tile(of_live[rows], a) * b
        normed[rows, at] = x.astype(normed.dtype) * factors[1:, at].astype(normed.dtype)

    _for_all(size, live.shape[1], norm)


def _read_norm_backward(
    static: Static,
    size: int,
    has_live: Ref,
    log_sum_exp: Ref,
    factors: Ref,
    mixed: Ref,
    live: Ref,
    d_summed: Ref,
    d_normed: Ref,
    d_mixed: Ref,
    d_live: Ref,
    d_log_sum_exp: Ref,
    d_factors: Ref,
    d_norm: Ref,
    *columns: Ref,
) -> None:
    width = live.shape[1]

    @pl.when(pl.program_id(0) == 0)
    def _() -> None:
        d_factors[...] = jnp.zeros_like(d_factors)

    d_norm[...] = d_normed[...] * factors[1:].astype(d_norm.dtype)
    products = _products(factors, mixed, live, d_norm)
    share, score, inverse = _share(static, products, log_sum_exp, has_live, width)
    scale = lax.rsqrt(_square_of_mix(products, share) / width + static.norm_eps)
    # The mix m = a + share * (b - a) has the cotangent scale * d - shrink * (scale * m), d that of its norm.
    da, db = products.of_cotangent
    shrink = scale * scale * (da + share * (db - da)) / width
    aa, ab, bb = products.of_sources
    along = (ab - aa) + share * (aa - 2.0 * ab + bb)  # m . (b - a)
    d_score = share * (1.0 - share) * scale * (db - da - shrink * along)
    d_log_sum_exp[0] = -d_score
    slope = d_score * inverse
    numbers = scale * (1.0 - share), scale * share, scale, shrink, share, slope, slope * score * inverse / width
    for ref, number in zip(columns, numbers, strict=True):
        ref[...] = _column(number)

    def gradients(rows: Any, at: Any) -> None:
        a, b, d = _wide(mixed[rows, at]), _wide(live[rows, at]), _wide(d_norm[rows, at])
        of_mixed, of_live, scale, shrink, share, slope, pull = (_tile(ref[rows], a) for ref in columns)
        x = of_mixed * a + of_live * b
        d_factors[0, :, at] += _fold(slope * b)
        d_factors[1, :, at] += _fold(x * _wide(d_normed[rows, at]))
        d_mix = scale * d - shrink * x
        by_share = share * d_mix
        d_mixed[rows, at] = (d_mix - by_share).astype(d_mixed.dtype)
        by_score = slope * factors[:1, at] - pull * b
        d_live[rows, at] = (_wide(d_summed[rows, at]) + by_share + by_score).astype(d_live.dtype)

    _for_all(size, width, gradients)


class Products(NamedTuple):
    """Inner products of each token, rows [1, 128]: of the sources a and b, and of the cotangent with both."""

    of_sources: tuple[Array, Array, Array]  # a.a, a.b, b.b
    of_query: Array  # query.b
    of_cotangent: tuple[Array, Array]


def _products(factors: Ref, mixed: Ref, live: Ref, cotangent: Ref | None = None) -> Products:
    sources = jnp.concatenate([mixed[...], live[...]], axis=0)
    query = jnp.broadcast_to(factors[:1], (ROWS, live.shape[1]))
    high = query.astype(live.dtype)
    low = (query - _wide(high)).astype(live.dtype)
    of_query = _dot(jnp.concatenate([high, low], axis=0), live[...])
    all_with_all = _dot(sources, sources)
    aa, ab, bb = (_diagonal(all_with_all, i, j) for i, j in ((0, 0), (0, 1), (1, 1)))
    of_cotangent = all_with_all if cotangent is None else _dot(cotangent[...], sources)
    da, db = (_diagonal(of_cotangent, 0, i) for i in range(2))
    return Products((aa, ab, bb), of_query[:1] + of_query[ROWS : ROWS + 1], (da, db))


def _dot(a: Array, b: Array) -> Array:
    """a b^T."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, NT, precision=precision, preferred_element_type=jnp.float32)


def _diagonal(x: Array, i: int, j: int) -> Array:
    """Of the block i, j of 128 by 128, as a row; the rest may be NaN."""
    block = x[i * LANES : (i + 1) * LANES, j * LANES : (j + 1) * LANES]
    row, lane = (lax.broadcasted_iota(jnp.int32, block.shape, axis) for axis in (0, 1))
    return jnp.sum(jnp.where(row == lane, block, 0.0), axis=0, keepdims=True)


def _share(
    static: Static, products: Products, log_sum_exp: Ref, has_live: Ref, width: int
) -> tuple[Array, Array, Array]:
    """Of the live sum in the mix, exact where nothing is sealed (-inf); its score and 1/rms."""
    inverse = lax.rsqrt(products.of_sources[2] / width + static.eps)
    score = products.of_query * inverse
    return jnp.where(has_live[0] != 0, jax.nn.sigmoid(score - log_sum_exp[0]), 0.0), score, inverse


def _square_of_mix(products: Products, share: Array) -> Array:
    aa, ab, bb = products.of_sources
    rest = 1.0 - share
    return jnp.maximum(rest * rest * aa + 2.0 * share * rest * ab + share * share * bb, 0.0)


def _for_all(size: int, width: int, body: Callable[[Any, Any], None]) -> None:
    """Run body(rows, columns) on the step's tokens: 128, or what is left of `size`."""
    tokens = LANES if size % LANES == 0 else jnp.minimum(size - pl.program_id(0) * LANES, LANES)
    columns = next(columns for columns in COLUMNS if width % columns == 0)

    def of_rows(i: Array, _: int) -> int:
        def of_columns(j: Array, _: int) -> int:
            body(pl.ds(pl.multiple_of(i * ROWS, ROWS), ROWS), pl.ds(pl.multiple_of(j * columns, columns), columns))
            return 0

        return lax.fori_loop(0, width // columns, of_columns, 0)

    lax.fori_loop(0, tokens // ROWS, of_rows, 0)


def _wide(x: Array) -> Array:
    return x.astype(jnp.float32)


def _column(row: Array) -> Array:
    """[1, 128] -> [128, 128], equal in all lanes."""
    return jnp.broadcast_to(row, (LANES, LANES)).T


def _tile(column: Array, like: Array) -> Array:
    """[16, 128], equal in all lanes, as wide as `like`."""
    return jnp.tile(column, (1, like.shape[1] // LANES))


def _fold(x: Array) -> Array:
    """[16, D] -> [8, D]."""
    return x[:8] + x[8:]


def _to_lanes(x: Array) -> Array:
    """[M] -> [steps, 1, lanes]."""
    return jnp.pad(x, (0, -len(x) % LANES)).reshape(-1, 1, LANES)
