"""What the TPU forward and backward kernels share: the gate's prefix sum, masks of documents, order of emission.

A step of either kernel's loop works on two chunks of 64 tokens of up to 16 heads, which go in pairs.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float

from pallas_kernels.kda.inputs import Parameters, Segments

CHUNK = 64
STRIP = 32  # rows that share the reference of their exponents
MIDDLE = 15  # of a strip: at most 16 decays lie between it and any of its rows
WIDTH = 128  # of a key and of a value
LOG2E = 1.4426950408889634
MAX_EXPONENT = 118.0  # 2^-118 times the entries of a normalised key is still a normal number
CHUNKS = 2  # of one step of the kernel's loop
MAX_HEADS = 16  # of one step
TILE = 16  # rows of a bf16 register
VMEM_LIMIT = (
    24 * 2**20
)  # bytes that a kernel may ask for where the compiler's own limit, 16 MB on v5e and v5p, is too low

# Sums of log2 decays that the matrix yields besides G_i - G_ref of every row: refs are the strips' middle rows.
ROWS = ("ref0", "ref1", "end0-ref0", "ref1-end0", "end1-ref0", "end1-ref1", "end1")
# k2 exp2(end1 - ref0) is taken with one factor, which is zero below 2^-126; k2 is made smaller and the factor larger by
# this power of two, so that what is lost is below 2^-14 of the token's weight. k1 and q1 are made larger by as much.
SHIFT = 4

Stage = Iterator[None]
Ref = Any  # of an array in HBM or VMEM
Copy = Any  # between them, not yet started
Index = Array | int  # numbers known when the kernel is traced stay Python's


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


class Documents(NamedTuple):
    """Masks of one chunk: rows as [64, 1], lanes as [1, 128] (two heads' columns side by side)."""

    valid: Array
    row: Array
    lane: Array
    first: Array
    last: Array
    same: Array


def documents_of(tile: Array) -> Documents:
    """From rows of float32: document of every token (twice), document before the chunk, after it, validity (twice)."""
    row = column_of(tile[0:1, :CHUNK])
    first, last = ((row == tile[i : i + 1, :1]).astype(jnp.float32) for i in (1, 2))
    same = (tile[1:2] == tile[2:3]).astype(jnp.float32)
    return Documents(column_of(tile[3:4, :CHUNK]) > 0, row, tile[0:1], first, last, same)


def column_of(row: Array) -> Array:
    """[1, n] -> [n, 1]."""
    n = row.shape[1]
    i, j = (jax.lax.broadcasted_iota(jnp.int32, (n, n), axis) for axis in (0, 1))
    return jnp.sum(jnp.where(i == j, row, 0.0), axis=1, keepdims=True)


def dot(a: Array, b: Array, *, transpose_b: bool = False) -> Array:
    """One product of the matrix unit: bf16 operands in one pass, float32 ones exactly."""
    dims = (((1,), (1 if transpose_b else 0,)), ((), ()))
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def lane_of(rows: int) -> Array:
    """[rows, 128] with every lane's number."""
    return jax.lax.broadcasted_iota(jnp.int32, (rows, WIDTH), 1)


def block_diagonal(x: Array) -> Array:
    """[n, 128] with two heads' n x 64 side by side -> [2 n, 128] block diagonal."""
    left = lane_of(x.shape[0]) < CHUNK
    return jnp.concatenate([jnp.where(left, x, 0), jnp.where(left, 0, x)], axis=0)


def strip_rows(row: Array, dtype: jnp.dtype) -> Array:
    """A [1, 128] row of factors as the 32 rows of a strip."""
    tile = jnp.broadcast_to(row, (TILE, WIDTH)).astype(dtype)
    return jnp.concatenate([tile, tile], axis=0)


def squash(z: Array, scale: Array, bias: Array, valid: Array | None, operand: jnp.dtype) -> Array:
    """1 + tanh(x / 2) of the gate's argument x; padding does not decay.

    The 1 comes first: split into bf16 terms afterwards, a small decay keeps 16 bits of its own.
    """
    x = z * scale + bias
    y = 2 * jax.nn.sigmoid(2 * x) if operand == jnp.float32 else 1 + jnp.tanh(x)
    return y if valid is None else jnp.where(valid, y, 0.0)


def stack_terms(squashed: Array, operand: jnp.dtype) -> Array:
    """The right-hand side that `prefix_matrix` multiplies."""
    ones = jnp.ones((TILE, squashed.shape[1]), operand)
    if operand == jnp.float32:
        return jnp.concatenate([squashed, ones], axis=0)
    high = squashed.astype(operand)
    low = (squashed - high.astype(jnp.float32)).astype(operand)
    return jnp.concatenate([high, low, high, ones], axis=0)


@cache
def _tuned(kernel: str) -> dict[str, list[list[list[float]]]]:
    """By heads of one step, for each chunk of it and each stage: from where to where it is emitted, and a power."""
    return json.loads((Path(__file__).parent / "tuned" / f"{kernel}.json").read_text())["heads"]


def windows_for(kernel: str, heads: int) -> list[list[list[float]]]:
    """The tuned windows of `heads` heads a step: exact, otherwise of the nearest tuned number."""
    tuned = _tuned(kernel)
    return tuned[min(tuned, key=lambda known: abs(int(known) - heads))]


def emit(stages: list[tuple[list[float], int, list[Stage]]]) -> None:
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


class Position(NamedTuple):
    """A block of work: sequence, group of heads, block of tokens."""

    batch: Index
    group: Index
    block: Index


class BlockCopies:
    """Copies between HBM and the two buffers of every operand; a block's buffer is its number's parity."""

    def __init__(self, static: Any, hbm: Any, refs: Any, semaphores: Ref):
        self.static, self.hbm, self.refs, self.semaphores = static, hbm, refs, semaphores

    def _wide(self, ref: Ref, at: Position) -> Ref:
        """A block of [B, T, H 128]."""
        tall, wide = CHUNKS * CHUNK, self.static.heads * WIDTH
        return ref.at[at.batch, pl.ds(at.block * tall, tall), pl.ds(at.group * wide, wide)]

    def _narrow(self, ref: Ref, at: Position) -> Ref:
        """A block of [B, G, T, heads]."""
        tall = CHUNKS * CHUNK
        return ref.at[at.batch, at.group, pl.ds(at.block * tall, tall)]

    def _chunks(self, at: Position) -> Any:
        return pl.ds(at.block * CHUNKS, CHUNKS)

    def heads(self, at: Position, per: int = 1) -> Any:
        """The heads of a group, or their pairs, as an index."""
        count = self.static.heads // per
        return pl.ds(at.group * count, count)

    def _make(self, pairs: list[tuple[Ref, Ref]], buffer: Index, semaphore: int) -> list[Copy]:
        return [
            pltpu.make_async_copy(source, target, self.semaphores.at[buffer, semaphore + i])
            for i, (source, target) in enumerate(pairs)
        ]


def start(copies: list[Copy]) -> None:
    """Set off copies."""
    for copy in copies:
        copy.start()


def wait(copies: list[Copy]) -> None:
    """Wait for copies that were set off."""
    for copy in copies:
        copy.wait()


def check(width: int, value: int, lower_bound: float) -> None:
    """Raise NotImplementedError for what the kernel does not do."""
    if (width, value) != (WIDTH, WIDTH):
        raise NotImplementedError(f"kda's tpu body needs K = V = {WIDTH}, not K={width} and V={value}: use 'xla'")
    lowest = -MAX_EXPONENT / (LOG2E * (MIDDLE + 1))
    if lower_bound < lowest:
        raise NotImplementedError(f"kda's tpu body needs lower_bound >= {lowest:.2f}, not {lower_bound}")


def heads_per_step(heads: int, most: int = MAX_HEADS) -> int:
    """The largest even divisor up to `most` of an even number of heads."""
    return max(n for n in range(2, most + 1, 2) if heads % n == 0)


class Prepared(NamedTuple):
    """Token arrays of whole blocks and an even number of heads."""

    tokens: list[Array]
    parameters: Parameters
    documents: Float[Array, "B N 8 128"] | None


def prepare(tokens: list[Array], parameters: Parameters, segments: Segments | None) -> Prepared:
    """Pad [B, T, H, ...] arrays to 128 tokens and to an even number of heads: copies unless they are already."""
    batch, length, heads = tokens[0].shape[:3]
    rows, odd = -length % (CHUNK * CHUNKS), heads % 2
    if rows or odd:
        tokens = [pad(x, {1: rows, 2: odd}) for x in tokens]
        a_log, dt_bias = pad(parameters.a_log, {0: odd}), pad(parameters.dt_bias, {0: odd})
        parameters = parameters._replace(a_log=a_log, dt_bias=dt_bias)
    if rows and segments is None:
        segments = Segments(jnp.ones((batch, length), bool), jnp.zeros((batch, length), jnp.int32))
    documents = None
    if segments is not None:
        documents = document_tiles(pad(segments.valid, {1: rows}), pad(segments.document, {1: rows}, "edge"))
    return Prepared(tokens, parameters, documents)


def operand_dtype(*tokens: Array) -> jnp.dtype:
    """Of the matrix unit's operands: bf16 unless an input is float32."""
    return jnp.dtype(jnp.float32 if any(x.dtype == jnp.float32 for x in tokens) else jnp.bfloat16)


def beta_by_group(beta: Float[Array, "B T H"], groups: int) -> Float[Array, "B G T H/G"]:
    """A group's beta as an array of its own: a slice of fewer than 128 lanes cannot be copied."""
    batch, length, heads = beta.shape
    return jnp.moveaxis(beta.astype(jnp.float32).reshape(batch, length, groups, heads // groups), 2, 1)


def gate_rows(parameters: Parameters, groups: int) -> Float[Array, "G 3 lanes"]:
    """Per key channel: slope and bias of half the gate's argument, and d(log decay) / d(gate) over 1 - tanh^2."""
    rate = jnp.repeat(jnp.exp(parameters.a_log.astype(jnp.float32)), WIDTH)
    bias = parameters.dt_bias.astype(jnp.float32).reshape(-1)
    rows = jnp.stack([rate / 2, rate / 2 * bias, rate * (parameters.lower_bound / 4)])
    return jnp.moveaxis(rows.reshape(3, groups, -1), 1, 0)


def in_hbm(arrays: list[Array], *, interpret: bool) -> list[Array]:
    """Arrays pinned to HBM: XLA may otherwise place them in VMEM, where a copy costs vector instructions."""
    return arrays if interpret else [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in arrays]


def pad(x: Array, by: dict[int, int], mode: str = "constant") -> Array:
    """`x` with so many entries appended to the axes named."""
    return jnp.pad(x, [(0, by.get(axis, 0)) for axis in range(x.ndim)], mode=mode)


def document_tiles(valid: Array, document: Array) -> Float[Array, "B N 8 128"]:
    """Per chunk the rows that `documents_of` reads; float32 counts documents exactly up to 2^24."""
    batch = document.shape[0]
    inside = jnp.tile(document.reshape(batch, -1, CHUNK), (1, 1, 2))
    after = jnp.broadcast_to(inside[..., -1:], inside.shape)
    before = jnp.concatenate([jnp.zeros_like(after[:, :1]), after[:, :-1]], axis=1)
    inside_valid = jnp.tile(valid.reshape(batch, -1, CHUNK), (1, 1, 2))
    tiles = jnp.stack([inside, before, after, inside_valid.astype(inside.dtype)], axis=2).astype(jnp.float32)
    return pad(tiles, {2: 4})
