"""Both passes over the bank in Pallas for TPU.

A step takes 16 tokens: their N snapshots are N 16 rows of D, which a bf16 tile's 16 sublanes make free to see as one
matrix X [(n, t), D]. Scores of R queries are one product Q X^T [R, (n, t)]; a row r is then repeated for the 16 tokens,
and everything about weights lives in that array of [(r, t), (n, t')], where only t = t' is not zero. So the mix is one
product with X, and its transposes are the backward pass: the matrix unit does with 1/16 of useful work what would take
the vector unit R N multiplications and additions for every token and column, and is faster at it.

float32 factors go in as two bf16 terms side by side, which costs no time: they fill the depth of the matrix unit.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

TOKENS = 16  # of a step
LANES = 128
LOWEST = float(jnp.finfo(jnp.float32).min)  # stands for -inf, whose product with zero would be NaN
COLUMNS = 256  # of the mix at one time
VMEM_BYTES = 60 * 2**20
NT = (((1,), (1,)), ((), ()))  # a b^T
TN = (((0,), (0,)), ((), ()))  # a^T b
NN = (((1,), (0,)), ((), ()))


def read_bank(snapshots: Array, count: Array, queries: Array, *, eps: float) -> tuple[Array, Array]:
    """See `pallas_kernels.attn_res.read_bank`; NotImplementedError unless D is a multiple of 256 and N at most 8."""
    n, *tokens, width = snapshots.shape
    if not supports(snapshots):
        raise NotImplementedError(
            f"attn_res 'tpu': width {width} must be a multiple of {COLUMNS} and the number of snapshots {n} at most 8"
        )
    flat = snapshots.reshape(n, -1, width)
    short = -flat.shape[1] % TOKENS
    flat = jnp.pad(flat, ((0, 0), (0, short), (0, 0))) if short else flat
    mixed, log_sum_exp = _read_bank(eps, flat, count.reshape(1), queries)
    size = flat.shape[1] - short
    return mixed[:, :size].reshape(-1, *tokens, width), log_sum_exp[:, :size].reshape(-1, *tokens)


def supports(snapshots: Array) -> bool:
    """Whether D fills columns of the matrix unit and the snapshots of 16 tokens its depth."""
    return snapshots.shape[-1] % COLUMNS == 0 and snapshots.shape[0] <= 8


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _read_bank(eps: float, snapshots: Array, count: Array, queries: Array) -> tuple[Array, Array]:
    return _by_platform(partial(_forward, eps), snapshots, count, queries)


def _read_bank_fwd(eps: float, *inputs: Array) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    return _read_bank(eps, *inputs), inputs


def _read_bank_bwd(eps: float, inputs: tuple[Array, ...], cotangents: tuple[Array, Array]) -> tuple:
    d_snapshots, d_queries = _by_platform(partial(_backward, eps), *inputs, *cotangents)
    return d_snapshots, None, d_queries


_read_bank.defvjp(_read_bank_fwd, _read_bank_bwd)


def _by_platform(run, *args):
    return lax.platform_dependent(*args, tpu=partial(run, interpret=False), default=partial(run, interpret=True))


def _forward(eps: float, snapshots: Array, count: Array, queries: Array, *, interpret: bool) -> tuple[Array, Array]:
    n, m, width = snapshots.shape
    reads, steps = queries.shape[0], m // TOKENS
    mixed, log_sum_exp = pl.pallas_call(
        partial(_forward_kernel, eps),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(steps,),
            in_specs=[_tokens_spec(n, width), _whole_spec(2 * reads, width)],
            out_specs=[_tokens_spec(reads, width), _lanes_spec(reads)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((reads, m, width), snapshots.dtype),
            jax.ShapeDtypeStruct((steps, reads, LANES), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES, dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="attn_res_read_bank",
    )(count, snapshots, _rows_of_terms(queries, snapshots.dtype))
    return mixed, _from_steps(log_sum_exp)


def _backward(
    eps: float, snapshots: Array, count: Array, queries: Array, d_mixed: Array, d_log_sum_exp: Array, *, interpret: bool
) -> tuple[Array, Array]:
    n, m, width = snapshots.shape
    reads, steps = queries.shape[0], m // TOKENS
    return pl.pallas_call(
        partial(_backward_kernel, eps),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(steps,),
            in_specs=[
                _tokens_spec(n, width),
                _whole_spec(2 * reads, width),
                _tokens_spec(reads, width),
                _lanes_spec(reads),
            ],
            out_specs=[_tokens_spec(n, width), _whole_spec(reads, width)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(snapshots.shape, snapshots.dtype),
            jax.ShapeDtypeStruct(queries.shape, jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES, dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="attn_res_read_bank_backward",
    )(count, snapshots, _rows_of_terms(queries, snapshots.dtype), d_mixed, _to_steps(d_log_sum_exp, steps))


def _tokens_spec(lead: int, width: int) -> pl.BlockSpec:
    return pl.BlockSpec((lead, TOKENS, width), lambda i, _: (0, i, 0))


def _whole_spec(*shape: int) -> pl.BlockSpec:
    return pl.BlockSpec(shape, lambda i, _: (0,) * len(shape))


def _lanes_spec(reads: int) -> pl.BlockSpec:
    return pl.BlockSpec((1, reads, LANES), lambda i, _: (i, 0, 0))


def _from_steps(x: Array) -> Array:
    """[steps, R, lanes], a token a lane -> [R, M]."""
    return x[..., :TOKENS].swapaxes(0, 1).reshape(x.shape[1], -1)


def _to_steps(x: Array, steps: int) -> Array:
    """[R, M] -> [steps, R, lanes]."""
    x = x.reshape(x.shape[0], steps, TOKENS).swapaxes(0, 1)
    return jnp.pad(x, ((0, 0), (0, 0), (0, LANES - TOKENS)))


def _forward_kernel(eps, count, snapshots, queries, mixed, log_sum_exp):
    n, _, width = snapshots.shape
    reads = mixed.shape[0]
    x = snapshots[...].reshape(n * TOKENS, width)
    scores, _ = _scores(x, queries[...], eps)
    weights, lse = _softmax(_by_token(scores, count[0]))
    log_sum_exp[0] = _to_lanes(jnp.maximum(lse, LOWEST), reads)
    pair = _columns_of_terms(weights, x.dtype)

    def columns(i, _):
        at = pl.ds(i * COLUMNS, COLUMNS)
        part = snapshots[:, :, at].reshape(n * TOKENS, COLUMNS)
        out = _dot(pair, _twice(part), NN)
        mixed[:, :, at] = out.astype(mixed.dtype).reshape(reads, TOKENS, COLUMNS)
        return 0

    lax.fori_loop(0, width // COLUMNS, columns, 0)


def _backward_kernel(eps, count, snapshots, queries, d_mixed, d_log_sum_exp, d_snapshots, d_queries):
    n, _, width = snapshots.shape
    reads = d_mixed.shape[0]
    x = snapshots[...].reshape(n * TOKENS, width)
    scores, scale = _scores(x, queries[...], eps)
    table = _by_token(scores, count[0])
    weights, _ = _softmax(table)
    d_weights = _dot(d_mixed[...].reshape(reads * TOKENS, width), x, NT)
    inner = jnp.sum(weights * d_weights, axis=1, keepdims=True)
    d_scores = weights * (d_weights - inner + _to_rows(d_log_sum_exp[0]))
    # Sums over the 16 rows of a read leave [R, (n, t)], and scaling there is scaling of columns.
    d_products = jnp.sum(d_scores.reshape(reads, TOKENS, -1), axis=1) * scale
    # d(1/rms) pulls every source towards itself.
    pull = jnp.sum(d_products * scores, axis=0, keepdims=True) * scale / width
    pair = _columns_of_terms(weights.T, x.dtype)
    from_queries = _columns_of_terms(d_products.T, x.dtype)
    pull = jnp.broadcast_to(pull, (8, pull.shape[1])).T[:, :1]

    @pl.when(pl.program_id(0) == 0)
    def start():
        d_queries[...] = jnp.zeros_like(d_queries)

    def columns(i, _):
        at = pl.ds(i * COLUMNS, COLUMNS)
        part = snapshots[:, :, at].reshape(n * TOKENS, COLUMNS)
        query = queries[:, at]
        from_mixes = _dot(pair, _twice(d_mixed[:, :, at].reshape(reads * TOKENS, COLUMNS)), NN)
        high, low = query[:reads], query[reads:]
        keys = _dot(from_queries, _twice(high), NN) + _dot(from_queries[:, :reads], low, NN)
        out = from_mixes + keys - pull * part.astype(jnp.float32)
        d_snapshots[:, :, at] = out.astype(d_snapshots.dtype).reshape(n, TOKENS, COLUMNS)
        d_queries[:, at] += _dot(_columns_of_terms(d_products, x.dtype), _twice(part), NN)
        return 0

    lax.fori_loop(0, width // COLUMNS, columns, 0)


def _scores(x, queries, eps):
    """Scores [R, (n, t)] and 1/rms [1, (n, t)] of the sources x [(n, t), D]; `queries` are two terms [2 R, D]."""
    wide = x.astype(jnp.float32)
    squares = jnp.sum(wide * wide, axis=1, keepdims=True)
    squares = jnp.broadcast_to(squares, (squares.shape[0], 8)).T[:1]
    scale = lax.rsqrt(squares / x.shape[1] + eps)
    high, low = jnp.split(_dot(queries, x, NT), 2)
    return (high + low) * scale, scale


def _by_token(scores, count):
    """[R, (n, t')] -> [(r, t), (n, t')], -inf where t and t' differ or snapshot n is not sealed."""
    reads, columns = scores.shape
    table = jnp.broadcast_to(scores[:, None], (reads, TOKENS, columns)).reshape(reads * TOKENS, columns)
    row, column = (lax.broadcasted_iota(jnp.int32, table.shape, axis) for axis in (0, 1))
    same_token = (row & (TOKENS - 1)) == (column & (TOKENS - 1))
    return jnp.where(same_token & (column < count * TOKENS), table, -jnp.inf)


def _softmax(table):
    """Weights along the columns, and the log of their sum [(r, t), 1]; zero and -inf where nothing is sealed."""
    top = jnp.maximum(jnp.max(table, axis=1, keepdims=True), LOWEST)
    exponentials = jnp.exp(table - top)
    total = jnp.sum(exponentials, axis=1, keepdims=True)
    found = total > 0
    safe = jnp.where(found, total, 1.0)
    return exponentials / safe, jnp.where(found, top + jnp.log(safe), -jnp.inf)


def _own_lane(reads):
    """True at [(r, t), lane t]."""
    row, lane = (lax.broadcasted_iota(jnp.int32, (reads * TOKENS, LANES), axis) for axis in (0, 1))
    return (row & (TOKENS - 1)) == lane


def _to_lanes(column, reads):
    """[(r, t), 1] -> [R, lanes], a token a lane."""
    return jnp.sum(jnp.where(_own_lane(reads), column, 0.0).reshape(reads, TOKENS, LANES), axis=1)


def _to_rows(lanes):
    """[R, lanes] -> [(r, t), 1]."""
    reads = lanes.shape[0]
    rows = jnp.broadcast_to(lanes[:, None], (reads, TOKENS, LANES)).reshape(reads * TOKENS, LANES)
    return jnp.sum(jnp.where(_own_lane(reads), rows, 0.0), axis=1, keepdims=True)


def _terms(x, dtype):
    """x as two terms of `dtype`: exact to 16 bits for bfloat16; the second is zero for float32."""
    high = x.astype(dtype)
    return high, (x - high.astype(jnp.float32)).astype(dtype)


def _rows_of_terms(x, dtype):
    return jnp.concatenate(_terms(x, dtype), axis=0)


def _columns_of_terms(x, dtype):
    return jnp.concatenate(_terms(x, dtype), axis=1)


def _twice(x):
    """The other factor of a product with `_columns_of_terms`."""
    return jnp.concatenate([x, x], axis=0)


def _dot(a, b, dims):
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)
