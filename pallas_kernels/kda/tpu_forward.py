"""Fused KDA forward for TPU (Pallas Mosaic): gate, norms, scores, inverse, recurrence and output in one kernel.

A chunk has 64 tokens. With G the running sum of the log2 decays inside it, k1 = l2(k) exp2(G), k2 = beta l2(k) exp2(-G),
q1 = scale l2(q) exp2(G), and S the state:
    X = (I + strict_lower(k1 k2^T))^-1 (V - k1 S)
    O = q1 S + lower(q1 k2^T) X
    S' = diag(exp2(G_end)) S + (k2 exp2(G_end))^T X
README.md of this folder says why it is cut the way it is.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

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
BLOCK = 16  # inverted exactly, row by row
WIDTH = 128  # of a key and of a value
LOG2E = 1.4426950408889634
MAX_EXPONENT = 118.0  # 2^-118 times the entries of a normalised key is still a normal number


class Shape(NamedTuple):
    """Static sizes: heads of one program (even), chunks of one grid step, tokens of a sequence."""

    sequences: int
    groups: int
    heads: int
    chunks: int
    blocks: int
    scale: float


# ---------------------------------------------------------------------------------------------------------------------
# Constants of the gate's prefix sum
# ---------------------------------------------------------------------------------------------------------------------

ROWS = ("ref0", "ref1", "end0-ref0", "ref1-end0", "end1-ref1", "end1")


def prefix_matrix(lower_bound: float) -> np.ndarray:
    """[80, 208] bf16 matrix that turns stacked tanh values into sums of log2 decays.

    The decay is c (1 + tanh) with c = lower_bound log2(e) / 2. Columns: tanh high part (64), low part (64), high part
    again for the low part of c (64), ones (16, of which two carry the constant). Rows: G_i - G_ref of the row's strip
    (64), then the sums of `ROWS`.
    """
    index = np.arange(CHUNK)
    upto = (index[None] <= index[:, None]).astype(np.float64)  # sums of tokens 0..i
    ref0, ref1, end0, end1 = (upto[i] for i in (MIDDLE, STRIP + MIDDLE, STRIP - 1, CHUNK - 1))
    reference = np.where(index[:, None] < STRIP, ref0, ref1)
    extra = np.stack([ref0, ref1, end0 - ref0, ref1 - end0, end1 - ref1, end1])
    sums = np.concatenate([upto - reference, extra, np.zeros((10, CHUNK))])
    c = lower_bound * LOG2E / 2
    high, low = _split(c * sums)
    constant = _split(c * sums.sum(1, keepdims=True))
    ones = np.concatenate([*constant, np.zeros((80, 14))], 1)
    return np.concatenate([high, high, low, ones], 1).astype(jnp.bfloat16)


def _split(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    high = x.astype(jnp.bfloat16).astype(np.float64)
    return high, x - high


# ---------------------------------------------------------------------------------------------------------------------
# The three stages of one chunk of two heads; `yield` marks where the work of other heads may be put between
# ---------------------------------------------------------------------------------------------------------------------

Stage = Iterator[None]


def _dot(a: Array, b: Array, *, transpose_b: bool = False) -> Array:
    dims = (((1,), (1 if transpose_b else 0,)), ((), ()))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def _bf16(x: Array) -> Array:
    return x.astype(jnp.bfloat16)


def _lanes(shape: tuple[int, int]) -> Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, 1)


def _diagonal(x: Array) -> Array:
    """[n, 128] with two heads' n x 64 side by side -> [2 n, 128] block diagonal."""
    left = _lanes(x.shape) < CHUNK
    return jnp.concatenate([jnp.where(left, x, 0), jnp.where(left, 0, x)], axis=0)


def _rows(factor: Array, row: int) -> Array:
    """One row of float32 factors as a bf16 strip."""
    tile = _bf16(jnp.broadcast_to(factor[row : row + 1], (16, WIDTH)))
    return jnp.concatenate([tile, tile], axis=0)


class Refs(NamedTuple):
    """What the kernel reads and writes, in VMEM; scratch is indexed by slot and pair or head."""

    q: Array
    k: Array
    gate: Array
    beta: Array
    v: Array
    out: Array
    scale: float
    affine: Array
    prefix: Array
    state: Array
    lower: Array
    blocks: Array
    scores: Array
    read: Array
    write: Array
    decay: Array
    inverse: Array


def _gate_and_scores(refs: Refs, rows: slice, slot: int, pair: int) -> Stage:
    """Stage A: from the inputs to both score matrices, and what reads from and writes to the state."""
    heads = (2 * pair, 2 * pair + 1)
    tanh = []
    for h in heads:
        lanes = slice(h * WIDTH, (h + 1) * WIDTH)
        z = refs.gate[0, rows, lanes].astype(jnp.float32)
        tanh.append(jnp.tanh(z * refs.affine[0:1, lanes] + refs.affine[1:2, lanes]))
        yield
    tanh = jnp.concatenate(tanh, axis=1)
    high = _bf16(tanh)
    low = _bf16(tanh - high.astype(jnp.float32))
    yield
    stacked = jnp.concatenate([high, low, high, jnp.ones((16, 2 * WIDTH), jnp.bfloat16)], axis=0)
    sums = _dot(refs.prefix[...], stacked)
    yield
    k1, q1, k2, off = [], [], [], []
    for i, h in enumerate(heads):
        lanes = slice(h * WIDTH, (h + 1) * WIDTH)
        own = sums[:, i * WIDTH : (i + 1) * WIDTH]
        up, down = jnp.exp2(own[:CHUNK]), jnp.exp2(-own[:CHUNK])
        factor = jnp.exp2(own[CHUNK : CHUNK + 8])
        yield
        q = refs.q[0, rows, lanes].astype(jnp.float32)
        q = q * (jax.lax.rsqrt(jnp.sum(q * q, axis=1, keepdims=True) + L2_EPS) * refs.scale)
        yield
        k = refs.k[0, rows, lanes].astype(jnp.float32)
        k = k * jax.lax.rsqrt(jnp.sum(k * k, axis=1, keepdims=True) + L2_EPS)
        yield
        q_up, k_up = q * up, k * up
        k_down = k * refs.beta[0, rows, h : h + 1] * down
        yield
        k1.append(_bf16(k_up))
        q1.append(_bf16(q_up))
        reference = jnp.concatenate([_rows(factor, 0), _rows(factor, 1)], axis=0)
        refs.read[slot, h, :CHUNK] = k1[i] * reference
        refs.read[slot, h, CHUNK:] = q1[i] * reference
        yield
        k2.append(_bf16(k_down))
        off.append(k2[i][:STRIP] * _rows(factor, 2) * _rows(factor, 3))
        end = _rows(factor, 4)
        write = jnp.concatenate([off[i] * end, k2[i][STRIP:] * end], axis=0)
        refs.write[slot, pair, h % 2 * CHUNK : h % 2 * CHUNK + CHUNK] = write
        refs.decay[slot, h : h + 1] = factor[5:6]
        yield
    left = _lanes((STRIP, WIDTH)) < CHUNK
    lower, scores = [], []
    for strip in range(2):
        part = slice(strip * STRIP, (strip + 1) * STRIP)
        first = [k2[0][:STRIP], k2[1][:STRIP]] if strip == 0 else off
        weights = jnp.concatenate([first[0], k2[0][STRIP:], first[1], k2[1][STRIP:]], axis=0)
        stream = jnp.concatenate([k1[0][part], q1[0][part], k1[1][part], q1[1][part]], axis=0)
        products = _dot(stream, weights, transpose_b=True)
        yield
        row = jax.lax.broadcasted_iota(jnp.int32, (STRIP, WIDTH), 0) + strip * STRIP
        column = _lanes((STRIP, WIDTH)) & (CHUNK - 1)
        kk = jnp.where(left, products[:STRIP], products[2 * STRIP : 3 * STRIP])
        lower.append(jnp.where(column < row, kk, 0.0))
        yield
        qk = jnp.where(left, products[STRIP : 2 * STRIP], products[3 * STRIP :])
        scores.append(jnp.where(column <= row, qk, 0.0))
        yield
    lower, scores = (jnp.concatenate(x, axis=0) for x in (lower, scores))
    refs.scores[slot, pair] = _bf16(scores)
    refs.lower[slot, pair] = _bf16(lower)
    yield
    group = (_lanes((BLOCK, WIDTH)) & (CHUNK - 1)) >> 4
    blocks = lower[:BLOCK]
    for i in range(1, CHUNK // BLOCK):
        blocks = jnp.where(group == i, lower[i * BLOCK : (i + 1) * BLOCK], blocks)
    refs.blocks[slot, pair] = blocks
    yield


def _invert(refs: Refs, slot: int, pair: int) -> Stage:
    """Stage B: (I + lower)^-1, 16 x 16 blocks by exact elimination, then twice by X -= X (L X) of the joined blocks."""
    blocks = refs.blocks[slot, pair]
    lane = _lanes((BLOCK, WIDTH))
    row = jax.lax.broadcasted_iota(jnp.int32, (BLOCK, WIDTH), 0)
    inverse = jnp.where((lane & (BLOCK - 1)) == row, 1.0, 0.0)
    start = lane & -BLOCK
    tops = [inverse[:8], inverse[8:]]
    parts = [blocks[:8], blocks[8:]]
    for j in range(BLOCK - 1):
        pivot = tops[j // 8][j % 8 : j % 8 + 1]
        for half in range((j + 1) // 8, 2):
            column = jnp.take_along_axis(parts[half], start[:8] + j, axis=1, mode="promise_in_bounds")
            tops[half] = tops[half] - column * pivot
        yield
    exact = jnp.concatenate(tops, axis=0)
    group = (lane & (CHUNK - 1)) >> 4
    whole = _bf16(jnp.concatenate([jnp.where(group == i, exact, 0.0) for i in range(CHUNK // BLOCK)], axis=0))
    yield
    lower = refs.lower[slot, pair]
    group = (_lanes((BLOCK, WIDTH)) & (CHUNK - 1)) >> 4
    zero = jnp.zeros((BLOCK, WIDTH), jnp.bfloat16)
    below = [jnp.where(group == i - 1, lower[i * BLOCK : (i + 1) * BLOCK], 0) for i in (1, 3)]
    product = _bf16(_dot(jnp.concatenate(below, axis=0), _diagonal(whole)))
    yield
    odd = jnp.concatenate([zero, product[:BLOCK], zero, product[BLOCK:]], axis=0)
    stream = jnp.concatenate([whole[BLOCK : 2 * BLOCK], whole[3 * BLOCK :]], axis=0)
    product = _bf16(_dot(stream, _diagonal(odd)))
    yield
    whole = whole - jnp.concatenate([zero, product[:BLOCK], zero, product[BLOCK:]], axis=0)
    below = jnp.where((_lanes((STRIP, WIDTH)) & (CHUNK - 1)) < STRIP, lower[STRIP:], 0)
    product = _bf16(_dot(below, _diagonal(whole)))
    yield
    zero = jnp.zeros((STRIP, WIDTH), jnp.bfloat16)
    product = _bf16(_dot(whole[STRIP:], _diagonal(jnp.concatenate([zero, product], axis=0))))
    yield
    refs.inverse[slot, pair] = jnp.concatenate([whole[:STRIP], whole[STRIP:] - product], axis=0)
    yield


def _advance(refs: Refs, decays: Array, rows: slice, slot: int, pair: int) -> Stage:
    """Stage C: the outputs of a chunk and the state after it."""
    heads = (2 * pair, 2 * pair + 1)
    zero = jnp.zeros((CHUNK, WIDTH), jnp.bfloat16)

    def diagonal(a: Array, b: Array) -> Array:
        return jnp.concatenate([jnp.concatenate([a, zero], 1), jnp.concatenate([zero, b], 1)], 0)

    seen = []
    for h in heads:
        seen.append(_dot(refs.read[slot, h], _bf16(refs.state[h])))
        yield
    values = []
    for h, read in zip(heads, seen, strict=True):
        v = refs.v[0, rows, h * WIDTH : (h + 1) * WIDTH].astype(jnp.float32)
        values.append(_bf16(v - read[:CHUNK]))
        yield
    solved = _bf16(_dot(refs.inverse[slot, pair], diagonal(*values)))
    yield
    stream = jnp.concatenate([refs.scores[slot, pair], refs.write[slot, pair].T], axis=0)
    result = _dot(stream, diagonal(solved[:, :WIDTH], solved[:, WIDTH:]))
    yield
    for i, h in enumerate(heads):
        lanes = slice(i * WIDTH, (i + 1) * WIDTH)
        output = seen[i][CHUNK:] + result[:CHUNK, lanes]
        refs.out[0, rows, h * WIDTH : (h + 1) * WIDTH] = output.astype(refs.out.dtype)
        yield
        refs.state[h] = refs.state[h] * decays[:, h : h + 1] + result[CHUNK:, lanes]
        yield


def _run(stages: list[tuple[float, float, int, list[Stage]]]) -> None:
    """Emit the stages' operations interleaved: each stage, all pairs in lockstep, spread evenly over its window."""
    events = []
    for index, (lo, hi, count, group) in enumerate(stages):
        events += [(lo + (hi - lo) * (i + 0.5) / count, index, i) for i in range(count)]
    for _, index, _ in sorted(events):
        for stage in stages[index][3]:
            next(stage)
    for *_, group in stages:
        for stage in group:
            assert next(stage, 0) == 0


import os
WINDOWS = eval(os.environ.get('W','[(0, 1), (0, 1), (0, 1)]'))
ORDER = eval(os.environ.get('O','(0,1,2)'))
COUNTS = (24, 21, 10)


class Position(NamedTuple):
    """A block of the grid: sequence, group of heads, block of tokens."""

    batch: Array
    group: Array
    block: Array


class Hbm(NamedTuple):
    """The arrays in HBM."""

    q: Array
    k: Array
    gate: Array
    beta: Array
    v: Array
    state: Array
    out: Array
    last: Array


def _kernel(shape: Shape, *refs: Array) -> None:
    q, k, v, gate, beta, affine, prefix, state_in, out, state_out, *rest = refs
    hbm = Hbm(q, k, gate, beta, v, state_in, out, state_out)
    buffers, scratch, semaphores, once = rest[:6], rest[6:14], rest[14], rest[15]
    *early, v_buffer, out_buffer = buffers
    tall, wide = shape.chunks * CHUNK, shape.heads * WIDTH
    count = shape.sequences * shape.groups * shape.blocks

    def window(ref: Array, at: Position) -> Array:
        return ref.at[at.batch, pl.ds(at.block * tall, tall), pl.ds(at.group * wide, wide)]

    def inputs(at: Position, slot: Array) -> list[Array]:
        sources = [window(hbm.q, at), window(hbm.k, at), window(hbm.gate, at)]
        sources.append(hbm.beta.at[at.batch, at.group, pl.ds(at.block * tall, tall)])
        return [
            pltpu.make_async_copy(source, buffer.at[slot], semaphores.at[slot, i])
            for i, (source, buffer) in enumerate(zip(sources, early, strict=True))
        ]

    def values(at: Position, slot: Array) -> list[Array]:
        return [pltpu.make_async_copy(window(hbm.v, at), v_buffer.at[slot], semaphores.at[slot, 4])]

    def outputs(at: Position, slot: Array) -> list[Array]:
        return [pltpu.make_async_copy(out_buffer.at[slot], window(hbm.out, at), semaphores.at[slot, 5])]

    def start(copies: list[Array]) -> None:
        for copy in copies:
            copy.start()

    def wait(copies: list[Array]) -> None:
        for copy in copies:
            copy.wait()

    def following(at: Position) -> Position:
        wrap = at.block + 1 == shape.blocks
        block = jnp.where(wrap, 0, at.block + 1)
        group = at.group + wrap.astype(jnp.int32)
        wrap = group == shape.groups
        return Position(at.batch + wrap.astype(jnp.int32), jnp.where(wrap, 0, group), block)

    state = scratch[0]

    def step(i: Array, carry: tuple[Position, Position]) -> tuple[Position, Position]:
        previous, current = carry
        upcoming = following(current)
        here, there = i & 1, 1 - (i & 1)

        @pl.when(i < count)
        def _() -> None:
            wait(inputs(current, here))
            start(values(current, here))

        @pl.when(i + 1 < count)
        def _() -> None:
            start(inputs(upcoming, there))

        @pl.when(i > 0)
        def _() -> None:
            wait(values(previous, there))

        heads = pl.ds(previous.group * shape.heads, shape.heads)

        @pl.when((i > 0) & (previous.block == 0))
        def _() -> None:
            pltpu.sync_copy(hbm.state.at[previous.batch, heads], state)

        @pl.when(i > 2)
        def _() -> None:
            wait(outputs(previous, there))

        named = Refs(
            *(ref.at[pl.ds(x, 1)] for ref, x in zip(buffers, (here, here, here, here, there, there), strict=True)),
            shape.scale,
            affine.at[current.group],
            prefix,
            *scratch,
        )
        pairs = range(shape.heads // 2)
        stages = []
        for u in range(shape.chunks):
            rows = slice(u * CHUNK, (u + 1) * CHUNK)

            def slot(lag: int, u: int = u) -> Array:
                steps, sub = divmod(u - lag, shape.chunks)
                return (here if steps == 0 else there) * shape.chunks + sub

            decays = named.decay[slot(2)].T
            work = [
                [_gate_and_scores(named, rows, slot(0), p) for p in pairs],
                [_invert(named, slot(1), p) for p in pairs],
                [_advance(named, decays, rows, slot(2), p) for p in pairs],
            ]
            stages += [(WINDOWS[i][0] + u, WINDOWS[i][1] + u, COUNTS[i], work[i]) for i in ORDER]
        _run(stages)

        @pl.when(i > 0)
        def _() -> None:
            start(outputs(previous, there))

        @pl.when((i > 0) & (previous.block == shape.blocks - 1))
        def _() -> None:
            pltpu.sync_copy(state, hbm.last.at[previous.batch, heads])

        return current, upcoming

    first = Position(jnp.int32(0), jnp.int32(0), jnp.int32(0))
    start(inputs(first, jnp.int32(0)))
    jax.lax.fori_loop(0, count + 1, step, (first, first))
    wait(outputs(first, jnp.int32(count & 1)))
    if count > 1:
        wait(outputs(first, jnp.int32((count - 1) & 1)))


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
    chunks: int = 2,
    heads_per_step: int = 8,
    interpret: bool = False,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """As `reference.forward`, in one kernel."""
    batch, length, heads, width = q.shape
    local = min(heads, heads_per_step)
    shape = Shape(batch, heads // local, local, chunks, -(-length // (CHUNK * chunks)), parameters.scale)
    flat = [x.reshape(batch, length, heads * WIDTH) for x in (q, k, v, gate)]
    beta = jnp.moveaxis(beta.astype(jnp.float32).reshape(batch, length, shape.groups, local), 2, 1)
    tall, wide = CHUNK * chunks, local * WIDTH
    a = jnp.repeat(0.5 * jnp.exp(parameters.a_log.astype(jnp.float32)), WIDTH)
    affine = jnp.stack([a, a * parameters.dt_bias.reshape(-1)])
    affine = jnp.moveaxis(affine.reshape(2, shape.groups, wide), 1, 0)
    pairs, slots = local // 2, 2 * chunks
    token = pltpu.VMEM((2, tall, wide), jnp.bfloat16)
    scratch = [
        token,
        token,
        token,
        pltpu.VMEM((2, tall, local), jnp.float32),
        token,
        token,
        pltpu.VMEM((local, WIDTH, WIDTH), jnp.float32),
        pltpu.VMEM((slots, pairs, CHUNK, WIDTH), jnp.bfloat16),
        pltpu.VMEM((slots, pairs, BLOCK, WIDTH), jnp.float32),
        pltpu.VMEM((slots, pairs, CHUNK, WIDTH), jnp.bfloat16),
        pltpu.VMEM((slots, local, 2 * CHUNK, WIDTH), jnp.bfloat16),
        pltpu.VMEM((slots, pairs, 2 * CHUNK, WIDTH), jnp.bfloat16),
        pltpu.VMEM((slots, local, WIDTH), jnp.float32),
        pltpu.VMEM((slots, pairs, CHUNK, WIDTH), jnp.bfloat16),
        pltpu.SemaphoreType.DMA((2, 6)),
        pltpu.SemaphoreType.DMA,
    ]
    anywhere, inside = pl.BlockSpec(memory_space=pltpu.HBM), pl.BlockSpec(memory_space=pltpu.VMEM)
    in_hbm = [*flat, beta, initial_state]
    if not interpret:  # without this XLA may place them in VMEM, where a copy costs vector instructions
        in_hbm = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in in_hbm]
    *tokens, initial_state = in_hbm
    out, state = pl.pallas_call(
        partial(_kernel, shape),
        out_shape=(
            pltpu.HBM(flat[2].shape, v.dtype),
            pltpu.HBM(initial_state.shape, jnp.float32),
        ),
        in_specs=[anywhere] * 5 + [inside] * 2 + [anywhere],
        out_specs=(anywhere, anywhere),
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),
        name="kda_forward",
        interpret=interpret,
    )(*tokens, affine, jnp.asarray(prefix_matrix(parameters.lower_bound)), initial_state)
    return out.reshape(v.shape), state
