"""KDA's forward pass in two Mosaic GPU kernels for Hopper: the inside of all chunks at once, then the states.

The parts of a chunk have the names that they have in `xla.py`: R = update - read S;  O = query S + scores R;
S' = decay * S + write^T R. Operands of the matrix unit are bf16, sums and the state float32.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import e, log2
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float

from pallas_kernels.kda.inputs import L2_EPS, Parameters, Segments

CHUNK = 64
WIDTH = 128
HALF = WIDTH // 2  # columns that are in registers at a time: the code of one half fits the instruction cache
STRIP = 32  # rows that share their middle row as the reference of their exponents
STAGES = 2  # chunks of parts in shared memory
F32, BF16 = jnp.float32, jnp.bfloat16
MATRIX = plgpu.Layout.WGMMA
ROWS, COLUMNS = MATRIX.reduce(1), MATRIX.reduce(0)  # one number per row, one per column
# Every store to shared memory here is followed by `commit_smem`, which is a barrier, before anyone reads it, and every
# tile is overwritten only after a later one: the barriers around each access would only cost time.
COMPILER = plgpu.CompilerParams(
    approx_math=True, unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
)


class Tokens(NamedTuple):
    """The inputs of the first kernel; T is a multiple of 64."""

    q: Any  # [B, T, H, K] bf16, as k, v and gate
    k: Any
    v: Any
    gate: Any
    beta: Any  # [B, H, T] float32
    rows: Any  # [B, N, 3, C]: does a row see the incoming state; does it reach the outgoing; its document's first row
    sharpness: Any  # [H], log2(e) exp(a_log)
    bias: Any  # [H, K]
    sums: Any  # [3, C, C] bf16, of `sum_matrices`


class Parts(NamedTuple):
    """What chunks do to a state, in memory or in shared memory; bf16 but for the decay."""

    read: Any  # [B, N, H, C, K]
    update: Any  # [B, N, H, C, V]
    write: Any  # [B, N, H, C, K]
    decay: Any  # [B, N, H, K]
    query: Any  # [B, N, H, C, K]
    scores: Any  # [B, N, H, C, C]


class Tiles(NamedTuple):
    """Shared memory of the first kernel; tiles are two halves of columns, and a to d hold one thing after another."""

    q: Any
    k: Any
    a: Any  # gate; high part of the log decays; the inverse and its products; read
    b: Any  # low part of the log decays; what the inverse's last correction needs; update
    c: Any  # keys relative to the middles of their strips; keys relative to the chunk's start
    d: Any  # keys relative to the end of the first strip; v
    scores: Any
    beta: Any
    rows: Any
    bias: Any
    decay: Any
    loaded: Any
    loaded_v: Any


class Place(NamedTuple):
    """Which chunk of which sequence and head."""

    batch: Array
    chunk: Array
    head: Array


# ---------------------------------------------------------------------------------------------------------------------
# Registers and the matrix unit
# ---------------------------------------------------------------------------------------------------------------------


def multiply(accumulator: Any, a: Any, b: Any) -> None:
    """Issue accumulator += a b; `a` is in registers or shared memory, `b` in shared memory."""
    plgpu.wgmma(accumulator, a, b)


def _dot(*factors: tuple[Any, Any]) -> Array:
    """The sum of the products a b, waited for."""

    def run(accumulator: Any) -> Array:
        for a, b in factors:
            multiply(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(run, plgpu.ACC((factors[0][0].shape[0], factors[0][1].shape[1]), F32))


def load(ref: Any, layout: Any, *, optimized: bool = False) -> Array:
    """Load into registers in `layout`; `optimized` refuses what would not be a few wide accesses."""
    return plgpu.load(ref, layout=layout, optimized=optimized)  # type: ignore[call-arg]  # jax 0.10 wants an index


def _tile(ref: Any) -> Array:
    return load(ref, MATRIX, optimized=True).astype(F32)


def down(rows: Array, like: Array) -> Array:
    """A number per row, as wide as `like`."""
    return lax.broadcast_in_dim(rows, like.shape, [0])


def _across(columns: Array, like: Array) -> Array:
    return lax.broadcast_in_dim(columns, like.shape, [1])


def _indices(shape: tuple[int, ...]) -> tuple[Array, Array]:
    return tuple(plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=MATRIX) for axis in (0, 1))  # type: ignore


def _split(x: Array) -> tuple[Array, Array]:
    """x as the sum of two bf16 numbers, the first cut off and not rounded: that converts in pairs."""
    high = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & -(2**16), F32)
    return high.astype(BF16), (x - high).astype(BF16)


def transposed(ref: Any) -> Any:
    """The matrix unit reads shared memory either way."""
    return ref.transpose((1, 0))


# ---------------------------------------------------------------------------------------------------------------------
# First kernel: the inside of a chunk
# ---------------------------------------------------------------------------------------------------------------------


def sum_matrices() -> np.ndarray:
    """0/1/-1 matrices M such that M g is, for row i: G_i - G_middle of its strip; the way from row i to the end of the
    first strip, or from there to row i; G_i."""
    i, t = np.arange(CHUNK)[:, None], np.arange(CHUNK)
    middle = i // STRIP * STRIP + STRIP // 2
    centred = ((t > middle) & (t <= i)).astype(int) - ((t > i) & (t <= middle)).astype(int)
    border = np.where(i >= STRIP, (t >= STRIP) & (t <= i), (t > i) & (t < STRIP))
    return np.stack([centred, border, t <= i]).astype(np.float32)


def _intra(lower_bound: float, scale: float, *refs: Any, **tiles: Any) -> None:
    """One chunk of one head in one warp group."""
    tokens, parts, s = Tokens(*refs[:9]), Parts(*refs[9:]), Tiles(**tiles)
    place = Place(*(lax.axis_index(name) for name in Place._fields))
    _start_loads(tokens, s, place)
    plgpu.barrier_wait(s.loaded)
    norms = _norm(s.q) * scale, _norm(s.k)

    def run(*products: Any) -> list[Array]:
        @pl.loop(0, 2)
        def _(half: Array) -> None:
            _half(lower_bound, tokens, parts, s, place, norms, products, half)

        return [product[...] for product in products]

    square, beside = plgpu.ACC((CHUNK, CHUNK), F32), plgpu.ACC((CHUNK, STRIP), F32)
    keys, queries, border_keys, border_queries = pl.run_scoped(run, square, square, beside, beside)
    for half in range(2):
        here = tokens.v.at[place.batch, pl.ds(place.chunk * CHUNK, CHUNK), place.head, columns_of(half)]
        plgpu.copy_gmem_to_smem(here, s.d.at[half], s.loaded_v)
    start = load(s.rows.at[2], ROWS)
    s.scores[...] = _below(queries, border_queries, start, 1).astype(BF16)
    lower = _below(keys, border_keys, start, 0)
    inverse = _inverse(s, lower * down(load(s.beta, ROWS), lower))
    solve = _split(inverse * _across(load(s.beta, COLUMNS), inverse))
    at = place.batch, place.chunk, place.head
    plgpu.copy_smem_to_gmem(s.scores, parts.scores.at[at])
    _store_products(solve, s.c, s.a, parts.read, at)
    plgpu.barrier_wait(s.loaded_v)
    _store_products(solve, s.d, s.b, parts.update, at)
    plgpu.wait_smem_to_gmem(0)


def columns_of(half: Any) -> Any:
    """The 64 columns of a half."""
    return pl.ds(half * HALF, HALF)


def _start_loads(tokens: Tokens, s: Tiles, place: Place) -> None:
    batch, chunk, head = place
    rows = pl.ds(chunk * CHUNK, CHUNK)
    for half in range(2):
        for source, target in ((tokens.gate, s.a), (tokens.q, s.q), (tokens.k, s.k)):
            plgpu.copy_gmem_to_smem(source.at[batch, rows, head, columns_of(half)], target.at[half], s.loaded)
        plgpu.copy_gmem_to_smem(tokens.bias.at[head, columns_of(half)], s.bias.at[half], s.loaded)
    plgpu.copy_gmem_to_smem(tokens.beta.at[batch, head, rows], s.beta, s.loaded)
    plgpu.copy_gmem_to_smem(tokens.rows.at[batch, chunk], s.rows, s.loaded)


def _norm(tile: Any) -> Array:
    """1 / the norm of every row."""
    squares = sum(jnp.square(_tile(tile.at[half])) for half in range(2))
    return lax.rsqrt(jnp.sum(squares, axis=1) + L2_EPS)


def _half(
    lower_bound: float,
    tokens: Tokens,
    parts: Parts,
    s: Tiles,
    place: Place,
    norms: tuple[Array, Array],
    products: tuple[Any, ...],
    half: Array,
) -> None:
    """Half of the key channels: adds to the products of keys and queries; stores decay, query, write and, in c, keys
    relative to the chunk's start."""
    batch, chunk, head = place
    keys, queries, border_keys, border_queries = products
    gate = _tile(s.a.at[half])
    x = tokens.sharpness[head] * (gate + _across(load(s.bias.at[half], COLUMNS), gate))
    # -5 sigmoid: the square of a reciprocal square root takes fewer instructions than a quotient.
    high, low = _split((lower_bound * log2(e)) * jnp.square(lax.rsqrt(1 + jnp.exp2(-x))))
    s.a[half], s.b[half] = high, low
    plgpu.commit_smem()
    total = jnp.sum(high.astype(F32) + low.astype(F32), axis=0)
    s.decay[half] = jnp.exp2(total) * tokens.rows[batch, chunk, 0, CHUNK - 1]

    def sums(kind: int) -> Array:
        matrix = load(tokens.sums.at[kind], MATRIX)
        return _dot((matrix, s.a.at[half]), (matrix, s.b.at[half]))

    q, k = _tile(s.q.at[half]), _tile(s.k.at[half])
    q, k = q * down(norms[0], q), k * down(norms[1], k)
    centred = sums(0)
    s.c[half] = (k * jnp.exp2(-centred)).astype(BF16)
    plgpu.commit_smem()
    decay = jnp.exp2(centred)
    multiply(keys, (k * decay).astype(BF16), transposed(s.c.at[half]))
    multiply(queries, (q * decay).astype(BF16), transposed(s.c.at[half]))
    plgpu.wgmma_wait(0)
    decay = jnp.exp2(sums(1))
    at_border = (k * decay).astype(BF16)
    s.d[half] = at_border
    plgpu.commit_smem()
    multiply(border_keys, at_border, transposed(s.d.at[half, :STRIP]))
    multiply(border_queries, (q * decay).astype(BF16), transposed(s.d.at[half, :STRIP]))
    plgpu.wgmma_wait(0)
    since_start = sums(2)
    decay = jnp.exp2(since_start) * down(load(s.rows.at[0], ROWS), q)
    until_end = jnp.exp2(_across(total, q) - since_start) * down(load(s.rows.at[1], ROWS), q)
    s.c[half], s.q[half], s.k[half] = ((k * decay).astype(BF16), (q * decay).astype(BF16), (k * until_end).astype(BF16))
    plgpu.commit_smem()
    at = batch, chunk, head
    plgpu.copy_smem_to_gmem(s.q.at[half], parts.query.at[*at, :, columns_of(half)])
    plgpu.copy_smem_to_gmem(s.k.at[half], parts.write.at[*at, :, columns_of(half)])
    plgpu.copy_smem_to_gmem(s.decay.at[half], parts.decay.at[*at, columns_of(half)])


def _below(strips: Array, border: Array, start: Array, diagonal: int) -> Array:
    """[C, C] products of rows i with the columns j < i + diagonal of the same document; `border` has the second strip's
    rows over the first strip's columns."""
    i, j = _indices(border.shape)
    left = jnp.where(i < STRIP, strips[:, :STRIP], border)
    whole = jnp.concatenate([left, strips[:, STRIP:]], axis=1)
    i, j = _indices(whole.shape)
    return jnp.where((j < i + diagonal) & (j.astype(F32) >= down(start, whole)), whole, 0.0)


def _inverse(s: Tiles, lower: Array) -> Array:
    """(I + lower)^-1 [C, C], from blocks of 2 rows to blocks of 64: X -= X (L X) with L between two blocks.

    Every step inverts blocks on the diagonal, so nothing grows; powers of L would. The steps round to bf16, and one
    Newton step with L and X as pairs of bf16 removes what that left.
    """
    i, j = _indices(lower.shape)
    x_high, product, x_low, error = s.a.at[0], s.a.at[1], s.b.at[0], s.b.at[1]
    apart = i ^ j  # n <= apart < 2 n: in two neighbouring blocks of n
    identity = jnp.where(i == j, 1.0, 0.0)

    def double(level: Array, x: Array) -> Array:
        high = x.astype(BF16)
        x_high[...] = high
        plgpu.commit_smem()
        between = jnp.where((apart >> level) == 1, lower, 0.0).astype(BF16)
        product[...] = _dot((between, x_high)).astype(BF16)
        plgpu.commit_smem()
        return x - _dot((high, product))

    x = lax.fori_loop(1, CHUNK.bit_length() - 1, double, identity - jnp.where(apart == 1, lower, 0.0))
    (high, low), (l_high, l_low) = _split(x), _split(lower)
    x_high[...], x_low[...] = high, low
    plgpu.commit_smem()
    product_now = x + _dot((l_high, x_high), (l_high, x_low), (l_low, x_high))
    error[...] = (identity - product_now).astype(BF16)
    plgpu.commit_smem()
    return x + _dot((high, error))


def _store_products(terms: tuple[Array, Array], factor: Any, tile: Any, target: Any, at: tuple[Array, ...]) -> None:
    """target = sum(terms) factor, by way of `tile`."""
    for half in range(2):
        tile[half] = _dot(*((term, factor.at[half]) for term in terms)).astype(BF16)
    plgpu.commit_smem()
    for half in range(2):
        plgpu.copy_smem_to_gmem(tile.at[half], target.at[*at, :, columns_of(half)])


def intra(tokens: Tokens, lower_bound: float, scale: float) -> Parts:
    """What every chunk does to a state; arrays are [B, N, H, ...]."""
    batch, length, heads, _ = tokens.q.shape
    grid = batch, length // CHUNK, heads
    shared, vectors = partial(plgpu.SMEM, dtype=BF16), partial(plgpu.SMEM, dtype=F32)
    tile = shared((2, CHUNK, HALF))
    tiles = Tiles(
        **dict.fromkeys("qkabcd", tile),
        scores=shared((CHUNK, CHUNK)),
        beta=vectors((CHUNK,)),
        rows=vectors((3, CHUNK)),
        bias=vectors((2, HALF)),
        decay=vectors((2, HALF)),
        loaded=plgpu.Barrier(num_arrivals=10),
        loaded_v=plgpu.Barrier(num_arrivals=2),
    )
    wide = jax.ShapeDtypeStruct((*grid, CHUNK, WIDTH), BF16)
    decay, scores = jax.ShapeDtypeStruct((*grid, WIDTH), F32), jax.ShapeDtypeStruct((*grid, CHUNK, CHUNK), BF16)
    kernel = plgpu.kernel(
        partial(_intra, lower_bound, scale),
        out_type=Parts(read=wide, update=wide, write=wide, decay=decay, query=wide, scores=scores),
        scratch_types=tiles._asdict(),
        grid=grid,
        grid_names=Place._fields,
        kernel_name="kda_intra",
        compiler_params=COMPILER,
    )
    return Parts(*kernel(*tokens))


# ---------------------------------------------------------------------------------------------------------------------
# Second kernel: from chunk to chunk
# ---------------------------------------------------------------------------------------------------------------------


class Stages(NamedTuple):
    """Shared memory of the second kernel: parts of the next chunks, and per half of the value columns what follows."""

    parts: Parts
    state: Any
    residual: Any
    output: Any
    full: Any
    free: Any


def _recurrence(*refs: Any, **stages: Any) -> None:
    """All chunks of one head: two warp groups with half of the value columns each, and one that fetches."""
    parts, (initial, *results), s = Parts(*refs[:6]), refs[6:], Stages(**stages)
    chunks, slots = parts.read.shape[1], s.parts
    whole = [pair for pair in zip(parts, slots, strict=True) if pair[0] is not parts.update]

    def copies(at: tuple[Array, ...]) -> list[tuple[Any, Any]]:
        update = [(parts.update.at[*at, :, columns_of(half)], slots.update.at[:, half]) for half in range(2)]
        return [*((source.at[at], target) for source, target in whole), *update]

    split_warp_groups(
        lambda at: fetch(chunks, copies, s, at, lambda n: n),
        lambda at, group: _advance(chunks, initial, results, s, at, group),
    )


def split_warp_groups(fetching: Callable[..., None], computing: Callable[..., None]) -> None:
    """Two warp groups that compute, each with its number, and one that fetches, with few registers."""
    at = lax.axis_index("batch"), lax.axis_index("head")
    group = lax.axis_index("group")

    @pl.when(group == 2)
    def _() -> None:
        plgpu.set_max_registers(40, action="decrease")
        fetching(at)

    @pl.when(group < 2)
    def _() -> None:
        plgpu.set_max_registers(232, action="increase")
        computing(at, group)


def fetch(
    chunks: int, copies: Callable[..., Any], s: Any, at: tuple[Array, Array], chunk_at: Callable[..., Any]
) -> None:
    """Keep the stages full: `copies((batch, chunk, head))` are pairs of memory and all its stages."""
    batch, head = at

    @pl.loop(0, chunks)
    def _(step: Array) -> None:
        slot = lax.rem(step, STAGES)

        @pl.when(step >= STAGES)
        def _() -> None:
            plgpu.barrier_wait(s.free.at[slot])

        for source, target in copies((batch, chunk_at(step), head)):
            plgpu.copy_gmem_to_smem(source, target.at[slot], s.full.at[slot])


def _advance(
    chunks: int, initial: Any, results: Sequence[Any], s: Stages, at: tuple[Array, Array], group: Array
) -> None:
    batch, head = at
    columns = columns_of(group)
    output, final, *saved = results
    state_tile, residual_tile, output_tile = s.state.at[group], s.residual.at[group], s.output.at[group]

    def products(n: Array, part: Parts, read: Any, out: Any, added: Any) -> tuple[Array, Array]:
        multiply(read, part.read, state_tile)
        multiply(out, part.query, state_tile)
        residual_tile[...] = (_tile(part.update.at[group]) - read[...]).astype(BF16)
        plgpu.commit_smem()
        for tile, target in zip((state_tile, residual_tile), saved, strict=False):
            plgpu.copy_smem_to_gmem(tile, target.at[batch, n, head, :, columns])
        multiply(added, transposed(part.write), residual_tile)
        multiply(out, part.scores, residual_tile)
        return added[...], out[...]

    def chunk(n: Array, state: Array) -> Array:
        slot = lax.rem(n, STAGES)
        plgpu.barrier_wait(s.full.at[slot])
        part = Parts(*(x.at[slot] for x in s.parts))
        half, whole = plgpu.ACC((CHUNK, HALF), F32), plgpu.ACC((WIDTH, HALF), F32)
        added, out = pl.run_scoped(partial(products, n, part), half, half, whole)
        state = state * down(load(part.decay, ROWS), state) + added
        plgpu.barrier_arrive(s.free.at[slot])
        plgpu.wait_smem_to_gmem(0)  # the tiles of the last copies are free
        state_tile[...], output_tile[...] = state.astype(BF16), out.astype(BF16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(output_tile, output.at[batch, pl.ds(n * CHUNK, CHUNK), head, columns])
        return state

    state = load(initial.at[batch, head, :, columns], MATRIX)
    state_tile[...] = state.astype(BF16)
    plgpu.commit_smem()
    final[batch, head, :, columns] = lax.fori_loop(0, chunks, chunk, state)
    plgpu.wait_smem_to_gmem(0)


def recurrence(parts: Parts, initial: Float[Array, "B H K V"], *, save: bool = False) -> tuple[Array, ...]:
    """Outputs [B, T, H, V] in bf16 and the last state in float32; with `save` also, in bf16, the state [B, N, H, K, V]
    that every chunk starts from and R [B, N, H, C, V]."""
    batch, chunks, heads = parts.read.shape[:3]
    shared = partial(plgpu.SMEM, dtype=BF16)
    wide, halves = shared((STAGES, CHUNK, WIDTH)), shared((2, CHUNK, HALF))
    stages = Stages(
        Parts(
            read=wide,
            update=shared((STAGES, 2, CHUNK, HALF)),
            write=wide,
            decay=plgpu.SMEM((STAGES, WIDTH), F32),
            query=wide,
            scores=shared((STAGES, CHUNK, CHUNK)),
        ),
        state=shared((2, WIDTH, HALF)),
        residual=halves,
        output=halves,
        full=plgpu.Barrier(num_arrivals=7, num_barriers=STAGES),
        free=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
    )
    output = jax.ShapeDtypeStruct((batch, chunks * CHUNK, heads, WIDTH), BF16)
    saved = [jax.ShapeDtypeStruct((*parts.read.shape[:3], rows, WIDTH), BF16) for rows in (WIDTH, CHUNK)]
    out_type = (output, jax.ShapeDtypeStruct(initial.shape, F32), *(saved if save else ()))
    return by_head(_recurrence, "kda_recurrence", (batch, heads), out_type, stages)(*parts, initial)


def by_head(body: Callable[..., None], name: str, grid: tuple[int, int], out_type: Any, stages: Any) -> Any:
    """A kernel with the three warp groups of `split_warp_groups` for every sequence and head."""
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=stages._asdict(),
        grid=grid,
        grid_names=("batch", "head"),
        num_threads=3,
        thread_name="group",
        kernel_name=name,
        compiler_params=COMPILER,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Around the kernels
# ---------------------------------------------------------------------------------------------------------------------


def forward(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    gate: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    initial_state: Float[Array, "B H K V"],
    parameters: Parameters,
    segments: Segments | None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """As `reference.forward` for bf16 inputs with K = V = 128."""
    tokens = tokens_of(q, k, v, gate, beta, parameters, segments)
    output, state = recurrence(intra(tokens, parameters.lower_bound, parameters.scale), initial_state.astype(F32))
    return output[:, : q.shape[1]], state


def tokens_of(
    q: Array, k: Array, v: Array, gate: Array, beta: Array, parameters: Parameters, segments: Segments | None
) -> Tokens:
    """The first kernel's inputs: padded to whole chunks, padding made harmless."""
    batch, length = q.shape[:2]
    padding = -length % CHUNK
    if padding:
        q, k, v, gate, beta = (
            jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2)) for x in (q, k, v, gate, beta)
        )
        segments = _padded(segments, batch, length, padding)
    if segments is None:
        rows = jnp.broadcast_to(jnp.float32([1, 1, 0])[:, None], (batch, length // CHUNK, 3, CHUNK))
    else:
        valid = segments.valid[..., None]
        q, k, v = (jnp.where(valid[..., None], x, 0) for x in (q, k, v))
        gate = jnp.where(valid[..., None], gate, -jnp.inf)  # a log decay of 0
        beta = jnp.where(valid, beta, 0)
        rows = document_rows(segments.document)
    beta = jnp.swapaxes(beta, 1, 2).astype(F32)
    sharpness, bias = log2(e) * jnp.exp(parameters.a_log.astype(F32)), parameters.dt_bias.astype(F32)
    return Tokens(q, k, v, gate, beta, rows, sharpness, bias, jnp.asarray(sum_matrices(), BF16))


def _padded(segments: Segments | None, batch: int, length: int, padding: int) -> Segments:
    if segments is None:
        segments = Segments(jnp.ones((batch, length), bool), jnp.zeros((batch, length), jnp.int32))
    after = (0, 0), (0, padding)
    return Segments(jnp.pad(segments.valid, after), jnp.pad(segments.document, after, mode="edge"))


def document_rows(document: Array) -> Float[Array, "B N 3 C"]:
    """`Tokens.rows`: rows of the incoming document, rows of the last document, and where a row's document starts."""
    document = document.reshape(document.shape[0], -1, CHUNK)
    before = jnp.pad(document[:, :-1, -1:], ((0, 0), (1, 0), (0, 0)))
    start = jnp.sum(document[..., None, :] < document[..., :, None], axis=-1)
    return jnp.stack([document == before, document == document[..., -1:], start], axis=2).astype(F32)
