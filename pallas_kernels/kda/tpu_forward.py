"""Fused KDA forward for TPU (Pallas Mosaic): gate, norms, scores, inverse, recurrence and output in one kernel.

A chunk has 64 tokens. With G the running sum of the log2 decays inside it, k1 = l2(k) exp2(G),
k2 = beta l2(k) exp2(-G), q1 = scale l2(q) exp2(G), and S the state:
    X = (I + strict_lower(k1 k2^T))^-1 (V - k1 S)
    O = q1 S + lower(q1 k2^T) X
    S' = diag(exp2(G_end)) S + (k2 exp2(G_end))^T X
README.md of this folder says why it is cut the way it is.
"""

import json
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float

from pallas_kernels.kda.inputs import L2_EPS, Parameters, Segments

CHUNK = 64
STRIP = 32  # rows that share the reference of their exponents
MIDDLE = 15  # of a strip: at most 16 decays lie between it and any of its rows
BLOCK_BITS = 4
BLOCK = 1 << BLOCK_BITS  # rows that are inverted exactly, one by one
WIDTH = 128  # of a key and of a value
LOG2E = 1.4426950408889634
MAX_EXPONENT = 118.0  # 2^-118 times the entries of a normalised key is still a normal number
CHUNKS = 2  # of one step of the kernel's loop
MAX_HEADS = 16  # of one step
TILE = 16  # rows of a bf16 register


class Static(NamedTuple):
    """What is fixed when the kernel is traced. `operand`: dtype of the matrix unit's operands; `heads` of one step."""

    sequences: int
    groups: int
    heads: int
    blocks: int
    scale: float
    operand: jnp.dtype
    segmented: bool


# ---------------------------------------------------------------------------------------------------------------------
# The gate's prefix sum
# ---------------------------------------------------------------------------------------------------------------------

# Sums of log2 decays that the matrix yields besides G_i - G_ref of every row: refs are the strips' middle rows.
ROWS = ("ref0", "ref1", "end0-ref0", "ref1-end0", "end1-ref0", "end1-ref1", "end1")
# k2 exp2(end1 - ref0) is taken with one factor, which is zero below 2^-126; k2 is made smaller and the factor larger by
# this power of two, so that what is lost is below 2^-14 of the token's weight. k1 and q1 are made larger by as much.
SHIFT = 4


def prefix_matrix(lower_bound: float, operand: jnp.dtype) -> np.ndarray:
    """The matrix that turns stacked squashed gates into sums of log2 decays: [80, 208] bf16, or [80, 80] float32.

    The log2 decay of a token is c (1 + tanh) with c = lower_bound log2(e) / 2. Columns for 1 + tanh as two bf16 terms:
    high part (64), low part (64), high part again for the low part of c (64), ones (16). Float32: 1 + tanh (64), ones.
    """
    index = np.arange(CHUNK)
    upto = (index[None] <= index[:, None]).astype(np.float64)  # sums of tokens 0..i
    ref0, ref1, end0, end1 = (upto[i] for i in (MIDDLE, STRIP + MIDDLE, STRIP - 1, CHUNK - 1))
    reference = np.where(index[:, None] < STRIP, ref0, ref1)
    extra = np.stack([ref0, ref1, end0 - ref0, ref1 - end0, end1 - ref0, end1 - ref1, end1])
    sums = np.concatenate([upto - reference, extra, np.zeros((TILE - len(ROWS), CHUNK))])
    weights = lower_bound * LOG2E / 2 * sums
    ones = np.zeros((CHUNK + TILE, TILE))
    ones[:, 0] = [*[SHIFT] * CHUNK, -SHIFT, -SHIFT, 0, 0, SHIFT, SHIFT, 0, *[0] * (TILE - len(ROWS))]
    if operand == jnp.float32:
        return np.concatenate([weights, ones], 1).astype(np.float32)
    high = weights.astype(jnp.bfloat16).astype(np.float64)
    return np.concatenate([high, high, weights - high, ones], 1).astype(jnp.bfloat16)


# ---------------------------------------------------------------------------------------------------------------------
# The three stages of one chunk of two heads; `yield` marks where the work of other heads may be put between
# ---------------------------------------------------------------------------------------------------------------------

Stage = Iterator[None]
Ref = Any  # of an array in HBM or VMEM
Copy = Any  # between them, not yet started
Index = Array | int  # numbers known when the kernel is traced stay Python's
YIELDS = (24, 21, 10)  # of the three stages


class Refs(NamedTuple):
    """What the stages read and write in VMEM; the scratch from `state` on is indexed by slot and pair or head."""

    q: Ref
    k: Ref
    gate: Ref
    beta: Ref
    documents: Ref
    v: Ref
    out: Ref
    affine: Ref
    prefix: Ref
    selectors: Ref
    state: Ref
    lower: Ref
    blocks: Ref
    scores: Ref
    read: Ref
    write: Ref
    decay: Ref
    inverse: Ref
    valid: Ref


class Documents(NamedTuple):
    """Masks of one chunk: rows as [64, 1], lanes as [1, 128] (two heads' columns side by side)."""

    valid: Array
    row: Array
    lane: Array
    first: Array
    last: Array
    same: Array


def _documents(tile: Array) -> Documents:
    """From rows of float32: document of every token (twice), document before the chunk, after it, validity (twice)."""
    row = _column(tile[0:1, :CHUNK])
    first, last = ((row == tile[i : i + 1, :1]).astype(jnp.float32) for i in (1, 2))
    same = (tile[1:2] == tile[2:3]).astype(jnp.float32)
    return Documents(_column(tile[3:4, :CHUNK]) > 0, row, tile[0:1], first, last, same)


def _column(row: Array) -> Array:
    """[1, n] -> [n, 1]."""
    n = row.shape[1]
    i, j = (jax.lax.broadcasted_iota(jnp.int32, (n, n), axis) for axis in (0, 1))
    return jnp.sum(jnp.where(i == j, row, 0.0), axis=1, keepdims=True)


def _dot(a: Array, b: Array, *, transpose_b: bool = False) -> Array:
    dims = (((1,), (1 if transpose_b else 0,)), ((), ()))
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _three_terms(x: Array) -> Array:
    """Float32 rows as bf16 rows that sum to them (to 2^-24), stacked three times, and as many zeros."""
    terms = []
    for _ in range(3):
        terms.append(x.astype(jnp.bfloat16))
        x = x - terms[-1].astype(jnp.float32)
    return jnp.concatenate([*terms, jnp.zeros_like(terms[0])], axis=0)


def selectors(heads: int) -> np.ndarray:
    """[pairs, 4 heads, 256]: times transposed `_three_terms`, a pair's two rows as columns over 128 lanes each."""
    pair, row, lane = np.ogrid[: heads // 2, : 4 * heads, : 2 * WIDTH]
    return (row % heads == 2 * pair + lane // WIDTH).astype(jnp.bfloat16)


def _lane(rows: int) -> Array:
    return jax.lax.broadcasted_iota(jnp.int32, (rows, WIDTH), 1)


def _diagonal(x: Array) -> Array:
    """[n, 128] with two heads' n x 64 side by side -> [2 n, 128] block diagonal."""
    left = _lane(x.shape[0]) < CHUNK
    return jnp.concatenate([jnp.where(left, x, 0), jnp.where(left, 0, x)], axis=0)


def _strip(row: Array, dtype: jnp.dtype) -> Array:
    """A [1, 128] row of factors as the 32 rows of a strip."""
    tile = jnp.broadcast_to(row, (TILE, WIDTH)).astype(dtype)
    return jnp.concatenate([tile, tile], axis=0)


def _squash(z: Array, scale: Array, bias: Array, valid: Array | None, operand: jnp.dtype) -> Array:
    """1 + tanh(x / 2) of the gate's argument x; padding does not decay.

    The 1 comes first: split into bf16 terms afterwards, a small decay keeps 16 bits of its own.
    """
    x = z * scale + bias
    y = 2 * jax.nn.sigmoid(2 * x) if operand == jnp.float32 else 1 + jnp.tanh(x)
    return y if valid is None else jnp.where(valid, y, 0.0)


def _stack(squashed: Array, operand: jnp.dtype) -> Array:
    """The right-hand side that `prefix_matrix` multiplies."""
    ones = jnp.ones((TILE, squashed.shape[1]), operand)
    if operand == jnp.float32:
        return jnp.concatenate([squashed, ones], axis=0)
    high = squashed.astype(operand)
    low = (squashed - high.astype(jnp.float32)).astype(operand)
    return jnp.concatenate([high, low, high, ones], axis=0)


def _normalised(x: Array, scale: float = 1.0) -> Array:
    norm = jax.lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) + L2_EPS)
    return x * (norm if scale == 1.0 else norm * scale)


def _gate_and_scores(static: Static, refs: Refs, chunk: int, slot: Index, pair: int) -> Stage:
    """Stage A: from the inputs to both score matrices, and what reads from and writes to the state."""
    operand = static.operand
    rows, heads = slice(chunk * CHUNK, (chunk + 1) * CHUNK), (2 * pair, 2 * pair + 1)
    documents = _documents(refs.documents[0, chunk]) if static.segmented else None
    valid = None if documents is None else documents.valid

    def load(ref: Ref, h: int) -> Array:
        x = ref[0, rows, h * WIDTH : (h + 1) * WIDTH].astype(jnp.float32)
        return x if valid is None else jnp.where(valid, x, 0.0)

    if valid is not None and pair == 0:
        refs.valid[slot] = jnp.broadcast_to(valid.astype(jnp.float32), (CHUNK, WIDTH))
    squashed = []
    for h in heads:
        lanes = slice(h * WIDTH, (h + 1) * WIDTH)
        squashed.append(_squash(load(refs.gate, h), refs.affine[0:1, lanes], refs.affine[1:2, lanes], valid, operand))
        yield
    stacked = _stack(jnp.concatenate(squashed, axis=1), operand)
    yield
    sums = _dot(refs.prefix[...], stacked)
    yield
    k1, q1, k2, across = [], [], [], []
    for i, h in enumerate(heads):
        own = sums[:, i * WIDTH : (i + 1) * WIDTH]
        up, down = jnp.exp2(own[:CHUNK]), jnp.exp2(-own[:CHUNK])
        factor = dict(zip(ROWS, jnp.split(jnp.exp2(own[CHUNK : CHUNK + 8]), 8), strict=False))
        yield
        q = _normalised(load(refs.q, h), static.scale)
        yield
        k = _normalised(load(refs.k, h))
        yield
        beta = refs.beta[0, rows, h : h + 1]
        k_down = k * (beta if valid is None else jnp.where(valid, beta, 0.0)) * down
        k1.append((k * up).astype(operand))
        q1.append((q * up).astype(operand))
        yield
        reference = jnp.concatenate([_strip(factor[name], operand) for name in ("ref0", "ref1")], axis=0)
        if documents is not None:
            reference = reference * jnp.broadcast_to(documents.first, (CHUNK, WIDTH)).astype(operand)
        refs.read[slot, h, :CHUNK] = k1[i] * reference
        refs.read[slot, h, CHUNK:] = q1[i] * reference
        yield
        k2.append(k_down.astype(operand))
        # Towards the second strip by way of the first's end: exp2(ref1 - ref0) in one factor would underflow.
        to_strip = [_strip(factor[name], operand) for name in ("end0-ref0", "ref1-end0")]
        across.append(k2[i][:STRIP] * to_strip[0] * to_strip[1])
        # Into the state go these rows as they are, so they get float32 factors.
        write = jnp.concatenate([k_down[:STRIP] * factor["end1-ref0"], k_down[STRIP:] * factor["end1-ref1"]], axis=0)
        decay = factor["end1"]
        if documents is not None:
            write, decay = write * documents.last, decay * documents.same
        refs.write[slot, pair, i * CHUNK : (i + 1) * CHUNK] = write.astype(operand)
        refs.decay[slot, h : h + 1] = decay
        yield
    yield from _scores(refs, documents, (k1, q1, k2, across), slot, pair)


def _scores(
    refs: Refs, documents: Documents | None, operands: tuple[list[Array], ...], slot: Index, pair: int
) -> Stage:
    """Both score matrices of two heads side by side, strip after strip, from one product with both heads' keys."""
    k1, q1, k2, across = operands
    left, column = _lane(STRIP) < CHUNK, _lane(STRIP) & (CHUNK - 1)
    lower, scores = [], []
    for strip in range(2):
        part = slice(strip * STRIP, (strip + 1) * STRIP)
        first = [x[:STRIP] for x in k2] if strip == 0 else across
        weights = jnp.concatenate([first[0], k2[0][STRIP:], first[1], k2[1][STRIP:]], axis=0)
        stream = jnp.concatenate([k1[0][part], q1[0][part], k1[1][part], q1[1][part]], axis=0)
        products = _dot(stream, weights, transpose_b=True)
        yield
        row = jax.lax.broadcasted_iota(jnp.int32, (STRIP, WIDTH), 0) + strip * STRIP
        below, upto = column < row, column <= row
        if documents is not None:
            same = documents.row[part] == documents.lane
            below, upto = below & same, upto & same
        lower.append(jnp.where(below, jnp.where(left, products[:STRIP], products[2 * STRIP : 3 * STRIP]), 0.0))
        yield
        scores.append(jnp.where(upto, jnp.where(left, products[STRIP : 2 * STRIP], products[3 * STRIP :]), 0.0))
        yield
    dtype = refs.lower.dtype
    refs.scores[slot, pair] = jnp.concatenate(scores, axis=0).astype(dtype)
    refs.lower[slot, pair, :CHUNK] = jnp.concatenate(lower, axis=0).astype(dtype)
    # The corner of the last join decides the error of the state: it is kept as a sum of two.
    corner = jnp.where(column < STRIP, lower[1], 0.0)
    refs.lower[slot, pair, CHUNK : CHUNK + STRIP] = corner.astype(dtype)
    refs.lower[slot, pair, CHUNK + STRIP :] = (corner - corner.astype(dtype).astype(jnp.float32)).astype(dtype)
    yield
    blocks = [lower[i // 2][i % 2 * BLOCK : i % 2 * BLOCK + BLOCK] for i in range(CHUNK // BLOCK)]
    group = (_lane(BLOCK) & (CHUNK - 1)) >> BLOCK_BITS
    gathered = blocks[0]
    for i in range(1, CHUNK // BLOCK):
        gathered = jnp.where(group == i, blocks[i], gathered)
    refs.blocks[slot, pair] = gathered
    yield


def _invert(refs: Refs, slot: Index, pair: int) -> Stage:
    """Stage B: (I + lower)^-1, 16 x 16 blocks by exact elimination, then twice by X -= X (L X) of the joined blocks."""
    dtype = refs.inverse.dtype
    lane = _lane(BLOCK)
    row = jax.lax.broadcasted_iota(jnp.int32, (BLOCK, WIDTH), 0)
    start = lane[:8] & -BLOCK
    identity = jnp.where((lane & (BLOCK - 1)) == row, 1.0, 0.0)
    blocks = refs.blocks[slot, pair]
    inverse, columns = [identity[:8], identity[8:]], [blocks[:8], blocks[8:]]
    for j in range(BLOCK - 1):
        pivot = inverse[j // 8][j % 8 : j % 8 + 1]
        for half in range((j + 1) // 8, 2):
            column = jnp.take_along_axis(columns[half], start + j, axis=1, mode="promise_in_bounds")
            inverse[half] = inverse[half] - column * pivot
        yield
    exact = jnp.concatenate(inverse, axis=0)
    group = (lane & (CHUNK - 1)) >> BLOCK_BITS
    diagonal = [jnp.where(group == i, exact, 0.0) for i in range(CHUNK // BLOCK)]
    whole = jnp.concatenate(diagonal, axis=0).astype(dtype)
    yield
    lower = refs.lower[slot, pair, :CHUNK]
    zero = jnp.zeros((BLOCK, WIDTH), dtype)
    below = [jnp.where(group == i - 1, lower[i * BLOCK : (i + 1) * BLOCK], 0) for i in (1, 3)]
    product = _dot(jnp.concatenate(below, axis=0), _diagonal(whole)).astype(dtype)
    yield
    odd = jnp.concatenate([zero, product[:BLOCK], zero, product[BLOCK:]], axis=0)
    stream = jnp.concatenate([whole[BLOCK : 2 * BLOCK], whole[3 * BLOCK :]], axis=0)
    product = _dot(stream, _diagonal(odd)).astype(dtype)
    yield
    whole = whole - jnp.concatenate([zero, product[:BLOCK], zero, product[BLOCK:]], axis=0)
    product = _dot(refs.lower[slot, pair, CHUNK:], _diagonal(whole))
    product = (product[:STRIP] + product[STRIP:]).astype(dtype)
    yield
    zero = jnp.zeros((STRIP, WIDTH), dtype)
    product = _dot(whole[STRIP:], _diagonal(jnp.concatenate([zero, product], axis=0))).astype(dtype)
    yield
    refs.inverse[slot, pair] = jnp.concatenate([whole[:STRIP], whole[STRIP:] - product], axis=0)
    yield


def _advance(static: Static, refs: Refs, decays: Array, chunk: int, slot: Index, pair: int) -> Stage:
    """Stage C: the outputs of a chunk and the state after it."""
    operand = static.operand
    rows, heads = slice(chunk * CHUNK, (chunk + 1) * CHUNK), (2 * pair, 2 * pair + 1)
    zero = jnp.zeros((CHUNK, WIDTH), operand)

    def diagonal(a: Array, b: Array) -> Array:
        return jnp.concatenate([jnp.concatenate([a, zero], 1), jnp.concatenate([zero, b], 1)], 0)

    seen = []
    for h in heads:
        seen.append(_dot(refs.read[slot, h], refs.state[h].astype(operand)))
        yield
    values = []
    for h, read in zip(heads, seen, strict=True):
        v = refs.v[0, rows, h * WIDTH : (h + 1) * WIDTH].astype(jnp.float32)
        if static.segmented:
            v = jnp.where(refs.valid[slot] > 0, v, 0.0)
        values.append((v - read[:CHUNK]).astype(operand))
        yield
    solved = _dot(refs.inverse[slot, pair], diagonal(*values)).astype(operand)
    # The matrix unit copies decays of key channels over the lanes: the unit that moves lanes has more to do.
    decay = _dot(decays, refs.selectors[pair])
    yield
    stream = jnp.concatenate([refs.scores[slot, pair], refs.write[slot, pair].T], axis=0)
    result = _dot(stream, diagonal(solved[:, :WIDTH], solved[:, WIDTH:]))
    yield
    for i, h in enumerate(heads):
        lanes = slice(i * WIDTH, (i + 1) * WIDTH)
        output = seen[i][CHUNK:] + result[:CHUNK, lanes]
        refs.out[0, rows, h * WIDTH : (h + 1) * WIDTH] = output.astype(refs.out.dtype)
        yield
        refs.state[h] = refs.state[h] * decay[:, lanes] + result[CHUNK:, lanes]
        yield


# ---------------------------------------------------------------------------------------------------------------------
# The order in which the stages' operations are emitted
# ---------------------------------------------------------------------------------------------------------------------


@cache
def _tuned() -> dict[str, list[list[list[float]]]]:
    """By heads of one step, for each chunk of it and each stage: from where to where it is emitted, and a power."""
    return json.loads((Path(__file__).parent / "tuned" / "forward.json").read_text())["heads"]


def windows_for(heads: int) -> list[list[list[float]]]:
    """The tuned windows of `heads` heads a step: exact, otherwise of the nearest tuned number."""
    tuned = _tuned()
    return tuned[min(tuned, key=lambda known: abs(int(known) - heads))]


def _emit(stages: list[tuple[list[float], int, list[Stage]]]) -> None:
    """Emit stages of (window, yields, one generator per pair) interleaved.

    The compiler keeps close to the order of emission. Each stage runs through all pairs in lockstep, which hides
    latencies, and is spread over its window: evenly at power 1, denser at the end below 1.
    """
    events = []
    for index, ((start, stop, power), yields, _) in enumerate(stages):
        events += [(start + (stop - start) * ((i + 0.5) / yields) ** power, i, index) for i in range(yields)]
    for _, _, index in sorted(events):
        for stage in stages[index][2]:
            next(stage)
    for _, yields, group in stages:
        for stage in group:
            if next(stage, group) is not group:
                raise AssertionError(f"a stage has more than its {yields} yields")


# ---------------------------------------------------------------------------------------------------------------------
# The loop over all blocks of all sequences and groups of heads, with its own pipeline of copies
# ---------------------------------------------------------------------------------------------------------------------


class Position(NamedTuple):
    """A block of work: sequence, group of heads, block of tokens."""

    batch: Index
    group: Index
    block: Index


class Hbm(NamedTuple):
    """The arrays in HBM: token arrays [B, T, H 128], beta [B, G, T, heads], documents [B, T / 64, 8, 128], states."""

    q: Ref
    k: Ref
    v: Ref
    gate: Ref
    beta: Ref
    documents: Ref
    initial: Ref
    out: Ref
    final: Ref


class Copies:
    """The copies between HBM and the two buffers of every operand; a block's buffer is its number's parity."""

    def __init__(self, static: Static, hbm: Hbm, refs: Refs, semaphores: Ref):
        self.static, self.hbm, self.refs, self.semaphores = static, hbm, refs, semaphores

    def _window(self, ref: Ref, at: Position) -> Ref:
        tall, wide = CHUNKS * CHUNK, self.static.heads * WIDTH
        return ref.at[at.batch, pl.ds(at.block * tall, tall), pl.ds(at.group * wide, wide)]

    def inputs(self, at: Position, buffer: Index) -> list[Copy]:
        """What stage A needs."""
        hbm, refs, tall = self.hbm, self.refs, CHUNKS * CHUNK
        pairs = [(self._window(getattr(hbm, name), at), getattr(refs, name)) for name in ("q", "k", "gate")]
        pairs.append((hbm.beta.at[at.batch, at.group, pl.ds(at.block * tall, tall)], refs.beta))
        if self.static.segmented:
            pairs.append((hbm.documents.at[at.batch, pl.ds(at.block * CHUNKS, CHUNKS)], refs.documents))
        return [
            pltpu.make_async_copy(source, target.at[buffer], self.semaphores.at[buffer, i])
            for i, (source, target) in enumerate(pairs)
        ]

    def values(self, at: Position, buffer: Index) -> list[Copy]:
        """What stage C needs."""
        source, target = self._window(self.hbm.v, at), self.refs.v.at[buffer]
        return [pltpu.make_async_copy(source, target, self.semaphores.at[buffer, 5])]

    def outputs(self, at: Position, buffer: Index) -> list[Copy]:
        """What stage C yields."""
        source, target = self.refs.out.at[buffer], self._window(self.hbm.out, at)
        return [pltpu.make_async_copy(source, target, self.semaphores.at[buffer, 6])]

    def heads(self, at: Position) -> Any:
        """The heads of a group, as an index into states."""
        return pl.ds(at.group * self.static.heads, self.static.heads)


def _start(copies: list[Copy]) -> None:
    for copy in copies:
        copy.start()


def _wait(copies: list[Copy]) -> None:
    for copy in copies:
        copy.wait()


def _following(static: Static, at: Position) -> Position:
    """The block after a traced position."""
    block = at.block + 1
    group = jnp.where(block == static.blocks, at.group + 1, at.group)
    batch = jnp.where(group == static.groups, at.batch + 1, at.batch)
    return Position(batch, jnp.where(group == static.groups, 0, group), jnp.where(block == static.blocks, 0, block))


# Stages by chunk of the step: A and B of the first step, all, B and C of the step after the last block.
FIRST = ("A", "AB")
ALL = ("ABC", "ABC")
LAST = ("BC", "C")


def _compute(static: Static, refs: Refs, current: Position, here: Index, wanted: tuple[str, str]) -> None:
    """One step: gate and scores of block i, the output of block i - 1, the inverses of the chunks between."""
    there = 1 - here
    buffers = (here,) * 5 + (there,) * 2
    views = [ref.at[pl.ds(buffer, 1)] for ref, buffer in zip(refs[:7], buffers, strict=True)]
    refs = Refs._make([*views, refs.affine.at[current.group], *refs[8:]])
    pairs = range(static.heads // 2)
    work = []
    for chunk, windows in enumerate(windows_for(static.heads)):
        # Slots by age in chunks; the scratch holds two blocks.
        ages = [(there if chunk < age else here) * CHUNKS + (chunk - age) % CHUNKS for age in range(3)]
        stages = {"A": [_gate_and_scores(static, refs, chunk, ages[0], pair) for pair in pairs]}
        stages["B"] = [_invert(refs, ages[1], pair) for pair in pairs]
        if "C" in wanted[chunk]:
            decays = _three_terms(refs.decay[ages[2]]).T
            stages["C"] = [_advance(static, refs, decays, chunk, ages[2], pair) for pair in pairs]
        emitted = zip("ABC", windows, YIELDS, strict=True)
        work += [(window, yields, stages[name]) for name, window, yields in emitted if name in wanted[chunk]]
    _emit(work)


def _kernel(static: Static, *args: Ref) -> None:
    q, k, v, gate, beta, documents, affine, prefix, copiers, initial, out, final, *rest = args
    *buffers, semaphores = rest
    hbm = Hbm(q, k, v, gate, beta, documents, initial, out, final)
    refs = Refs._make([*buffers[:7], affine, prefix, copiers, *buffers[7:]])
    copies = Copies(static, hbm, refs, semaphores)
    count = static.sequences * static.groups * static.blocks

    def begin(i: Index, current: Position, upcoming: Position) -> None:
        """Stage A's inputs have come; those of the next step and stage C's values are on their way."""
        here = i & 1
        _wait(copies.inputs(current, here))
        _start(copies.values(current, here))

        @pl.when(i + 1 < count)
        def _() -> None:
            _start(copies.inputs(upcoming, 1 - here))

    def end(i: Index, current: Position, previous: Position, wanted: tuple[str, str]) -> None:
        """Block i - 1 is finished, whatever else the step computes."""
        here, there = i & 1, 1 - (i & 1)
        _wait(copies.values(previous, there))

        @pl.when(previous.block == 0)
        def _() -> None:
            pltpu.sync_copy(hbm.initial.at[previous.batch, copies.heads(previous)], refs.state)

        @pl.when(i > 2)
        def _() -> None:
            _wait(copies.outputs(previous, there))

        _compute(static, refs, current, here, wanted)
        _start(copies.outputs(previous, there))

        @pl.when(previous.block == static.blocks - 1)
        def _() -> None:
            pltpu.sync_copy(refs.state, hbm.final.at[previous.batch, copies.heads(previous)])

    def step(i: Array, carry: tuple[Position, Position]) -> tuple[Position, Position]:
        previous, current = carry
        upcoming = _following(static, current)
        begin(i, current, upcoming)
        end(i, current, previous, ALL)
        return current, upcoming

    first = Position(0, 0, 0)
    second = Position(0, 0, 1) if static.blocks > 1 else Position(0, 1, 0) if static.groups > 1 else Position(1, 0, 0)
    _start(copies.inputs(first, 0))
    begin(0, first, second)
    _compute(static, refs, first, 0, FIRST)
    carry = jax.tree.map(jnp.int32, (first, second))
    last, _ = jax.lax.fori_loop(1, count, step, carry)
    end(count, last, last, LAST)
    for block in range(max(count - 2, 0), count):
        _wait(copies.outputs(first, block & 1))


# ---------------------------------------------------------------------------------------------------------------------
# From arrays to the kernel
# ---------------------------------------------------------------------------------------------------------------------


def check(width: int, value: int, lower_bound: float) -> None:
    """Raise NotImplementedError for what the kernel does not do."""
    if (width, value) != (WIDTH, WIDTH):
        raise NotImplementedError(f"kda's tpu body needs K = V = {WIDTH}, not K={width} and V={value}: use 'xla'")
    lowest = -MAX_EXPONENT / (LOG2E * (MIDDLE + 1))
    if lower_bound < lowest:
        raise NotImplementedError(f"kda's tpu body needs lower_bound >= {lowest:.2f}, not {lower_bound}")


def heads_per_step(heads: int) -> int:
    """The largest even divisor up to 16 of an even number of heads."""
    return max(n for n in range(2, MAX_HEADS + 1, 2) if heads % n == 0)


def forward(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    gate: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    initial_state: Float[Array, "B H K V"],
    parameters: Parameters,
    segments: Segments | None,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """As `reference.forward`, in one kernel; operands are rounded to bf16 unless an input is float32.

    Rows are padded to 128 tokens and heads to an even number, which copies the inputs where they are not.
    """
    check(q.shape[-1], v.shape[-1], parameters.lower_bound)
    batch, length, heads = beta.shape
    rows, odd = -length % (CHUNK * CHUNKS), heads % 2
    if rows or odd:
        q, k, v, gate, beta = (_pad(x, {1: rows, 2: odd}) for x in (q, k, v, gate, beta))
        initial_state = _pad(initial_state, {1: odd})
        a_log, dt_bias = _pad(parameters.a_log, {0: odd}), _pad(parameters.dt_bias, {0: odd})
        parameters = parameters._replace(a_log=a_log, dt_bias=dt_bias)
    if rows and segments is None:
        segments = Segments(jnp.ones((batch, length), bool), jnp.zeros((batch, length), jnp.int32))
    documents = None
    if segments is not None:
        documents = _document_tiles(_pad(segments.valid, {1: rows}), _pad(segments.document, {1: rows}, "edge"))
    out, state = _call(q, k, v, gate, beta, initial_state, parameters, documents, interpret)
    return out[:, :length, :heads], state[:, :heads]


def _pad(x: Array, by: dict[int, int], mode: str = "constant") -> Array:
    return jnp.pad(x, [(0, by.get(axis, 0)) for axis in range(x.ndim)], mode=mode)


def _document_tiles(valid: Array, document: Array) -> Float[Array, "B N 8 128"]:
    """Per chunk the rows that `_documents` reads; float32 counts documents exactly up to 2^24."""
    batch = document.shape[0]
    inside = jnp.tile(document.reshape(batch, -1, CHUNK), (1, 1, 2))
    after = jnp.broadcast_to(inside[..., -1:], inside.shape)
    before = jnp.concatenate([jnp.zeros_like(after[:, :1]), after[:, :-1]], axis=1)
    inside_valid = jnp.tile(valid.reshape(batch, -1, CHUNK), (1, 1, 2))
    tiles = jnp.stack([inside, before, after, inside_valid.astype(inside.dtype)], axis=2).astype(jnp.float32)
    return _pad(tiles, {2: 4})


def _call(
    q: Array,
    k: Array,
    v: Array,
    gate: Array,
    beta: Array,
    initial_state: Array,
    parameters: Parameters,
    documents: Array | None,
    interpret: bool,
) -> tuple[Array, Array]:
    """The kernel on an even number of heads and whole blocks of tokens."""
    batch, length, heads, _ = q.shape
    exact = any(x.dtype == jnp.float32 for x in (q, k, v, gate))
    local = heads_per_step(heads)
    static = Static(
        sequences=batch,
        groups=heads // local,
        heads=local,
        blocks=length // (CHUNK * CHUNKS),
        scale=parameters.scale,
        operand=jnp.dtype(jnp.float32 if exact else jnp.bfloat16),
        segmented=documents is not None,
    )
    if documents is None:
        documents = jnp.zeros((1, 1, 8, WIDTH), jnp.float32)
    beta = jnp.moveaxis(beta.astype(jnp.float32).reshape(batch, length, static.groups, local), 2, 1)
    slope = jnp.repeat(0.5 * jnp.exp(parameters.a_log.astype(jnp.float32)), WIDTH)
    affine = jnp.stack([slope, slope * parameters.dt_bias.astype(jnp.float32).reshape(-1)])
    affine = jnp.moveaxis(affine.reshape(2, static.groups, -1), 1, 0)
    in_hbm = [*(x.reshape(batch, length, -1) for x in (q, k, v, gate)), beta, documents]
    in_hbm.append(initial_state.astype(jnp.float32))
    if not interpret:  # without this XLA may place them in VMEM, where a copy costs vector instructions
        in_hbm = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in in_hbm]
    prefix = jnp.asarray(prefix_matrix(parameters.lower_bound, static.operand))
    hbm, vmem = pl.BlockSpec(memory_space=pltpu.HBM), pl.BlockSpec(memory_space=pltpu.VMEM)
    out, state = pl.pallas_call(
        partial(_kernel, static),
        out_shape=(
            pltpu.HBM(in_hbm[2].shape, v.dtype),
            pltpu.HBM(initial_state.shape, jnp.float32),
        ),
        in_specs=[hbm] * 6 + [vmem] * 3 + [hbm],
        out_specs=(hbm, hbm),
        scratch_shapes=_scratch(static, {"q": q, "k": k, "gate": gate, "v": v}),
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),
        name="kda_forward",
        interpret=interpret,
    )(*in_hbm[:6], affine, prefix, jnp.asarray(selectors(local)), in_hbm[6])
    return out.reshape(v.shape), state


def _scratch(static: Static, tokens: dict[str, Array]) -> list[Any]:
    """In the order of `Refs`, without its VMEM inputs, and the semaphores."""
    heads, pairs, operand = static.heads, static.heads // 2, static.operand
    tall = CHUNKS * CHUNK

    def token(name: str) -> Any:
        return pltpu.VMEM((2, tall, heads * WIDTH), tokens[name].dtype)

    def slots(*shape: int, dtype: jnp.dtype = operand) -> Any:
        return pltpu.VMEM((2 * CHUNKS, *shape, WIDTH), dtype)

    return [
        token("q"),
        token("k"),
        token("gate"),
        pltpu.VMEM((2, tall, heads), jnp.float32),  # beta
        pltpu.VMEM((2, CHUNKS, 8, WIDTH), jnp.float32),  # documents
        token("v"),
        token("v"),  # out
        pltpu.VMEM((heads, WIDTH, WIDTH), jnp.float32),  # state
        slots(pairs, 2 * CHUNK),  # lower, and its corner twice
        slots(pairs, BLOCK, dtype=jnp.dtype(jnp.float32)),  # blocks
        slots(pairs, CHUNK),  # scores
        slots(heads, 2 * CHUNK),  # read
        slots(pairs, 2 * CHUNK),  # write
        slots(heads, dtype=jnp.dtype(jnp.float32)),  # decay
        slots(pairs, CHUNK),  # inverse
        slots(CHUNK, dtype=jnp.dtype(jnp.float32)),  # valid
        pltpu.SemaphoreType.DMA((2, 7)),
    ]
