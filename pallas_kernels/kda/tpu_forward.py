"""Fused KDA forward for TPU (Pallas Mosaic): gate, norms, scores, inverse, recurrence and output in one kernel.

A chunk has 64 tokens. With G the running sum of the log2 decays inside it, k1 = l2(k) exp2(G),
k2 = beta l2(k) exp2(-G), q1 = scale l2(q) exp2(G), and S the state:
    X = (I + strict_lower(k1 k2^T))^-1 (V - k1 S)
    O = q1 S + lower(q1 k2^T) X
    S' = diag(exp2(G_end)) S + (k2 exp2(G_end))^T X
README.md of this folder says why it is cut the way it is.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float

from pallas_kernels.kda.inputs import L2_EPS, Parameters, Segments
from pallas_kernels.kda.tpu_chunk import (
    CHUNK,
    CHUNKS,
    MAX_HEADS,
    ROWS,
    STRIP,
    VMEM_LIMIT,
    WIDTH,
    BlockCopies,
    Copy,
    Documents,
    Index,
    Position,
    Ref,
    Stage,
    beta_by_group,
    block_diagonal,
    check,
    documents_of,
    dot,
    emit,
    gate_rows,
    heads_per_step,
    in_hbm,
    lane_of,
    operand_dtype,
    pad,
    prefix_matrix,
    prepare,
    squash,
    stack_terms,
    start,
    strip_rows,
    wait,
    windows_for,
)

BLOCK_BITS = 4
BLOCK = 1 << BLOCK_BITS  # rows that are inverted exactly, one by one


class Static(NamedTuple):
    """What is fixed when the kernel is traced. `operand`: dtype of the matrix unit's operands; `heads` of one step."""

    sequences: int
    groups: int
    heads: int
    blocks: int
    scale: float
    operand: jnp.dtype
    segmented: bool
    saves: bool
    every: int  # chunks between the states that are returned; 0 for none


class Saved(NamedTuple):
    """What the backward pass needs besides the inputs, in the operands' dtype: 64 KB of bf16 a head and chunk.

    The state before every chunk, X of the module's docstring, lower(q1 k2^T) and the inverse (two heads side by side).
    """

    states: Float[Array, "B N H K V"]
    values: Float[Array, "B T HV"]
    scores: Float[Array, "B N H/2 64 128"]
    inverse: Float[Array, "B N H/2 64 128"]


# ---------------------------------------------------------------------------------------------------------------------
# The three stages of one chunk of two heads; `yield` marks where the work of other heads may be put between
# ---------------------------------------------------------------------------------------------------------------------

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
    middle: Ref | None
    saved: Saved | None


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


def _normalised(x: Array, scale: float = 1.0) -> Array:
    norm = jax.lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) + L2_EPS)
    return x * (norm if scale == 1.0 else norm * scale)


def _gate_and_scores(static: Static, refs: Refs, chunk: int, slot: Index, pair: int) -> Stage:
    """Stage A: from the inputs to both score matrices, and what reads from and writes to the state."""
    operand = static.operand
    rows, heads = slice(chunk * CHUNK, (chunk + 1) * CHUNK), (2 * pair, 2 * pair + 1)
    documents = documents_of(refs.documents[0, chunk]) if static.segmented else None
    valid = None if documents is None else documents.valid

    def load(ref: Ref, h: int) -> Array:
        x = ref[0, rows, h * WIDTH : (h + 1) * WIDTH].astype(jnp.float32)
        return x if valid is None else jnp.where(valid, x, 0.0)

    if valid is not None and pair == 0:
        refs.valid[slot] = jnp.broadcast_to(valid.astype(jnp.float32), (CHUNK, WIDTH))
    squashed = []
    for h in heads:
        lanes = slice(h * WIDTH, (h + 1) * WIDTH)
        squashed.append(squash(load(refs.gate, h), refs.affine[0:1, lanes], refs.affine[1:2, lanes], valid, operand))
        yield
    stacked = stack_terms(jnp.concatenate(squashed, axis=1), operand)
    yield
    sums = dot(refs.prefix[...], stacked)
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
        reference = jnp.concatenate([strip_rows(factor[name], operand) for name in ("ref0", "ref1")], axis=0)
        if documents is not None:
            reference = reference * jnp.broadcast_to(documents.first, (CHUNK, WIDTH)).astype(operand)
        refs.read[slot, h, :CHUNK] = k1[i] * reference
        refs.read[slot, h, CHUNK:] = q1[i] * reference
        yield
        k2.append(k_down.astype(operand))
        # Towards the second strip by way of the first's end: exp2(ref1 - ref0) in one factor would underflow.
        to_strip = [strip_rows(factor[name], operand) for name in ("end0-ref0", "ref1-end0")]
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
    left, column = lane_of(STRIP) < CHUNK, lane_of(STRIP) & (CHUNK - 1)
    lower, scores = [], []
    for strip in range(2):
        part = slice(strip * STRIP, (strip + 1) * STRIP)
        first = [x[:STRIP] for x in k2] if strip == 0 else across
        weights = jnp.concatenate([first[0], k2[0][STRIP:], first[1], k2[1][STRIP:]], axis=0)
        stream = jnp.concatenate([k1[0][part], q1[0][part], k1[1][part], q1[1][part]], axis=0)
        products = dot(stream, weights, transpose_b=True)
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
    group = (lane_of(BLOCK) & (CHUNK - 1)) >> BLOCK_BITS
    gathered = blocks[0]
    for i in range(1, CHUNK // BLOCK):
        gathered = jnp.where(group == i, blocks[i], gathered)
    refs.blocks[slot, pair] = gathered
    yield


def _invert(refs: Refs, slot: Index, pair: int) -> Stage:
    """Stage B: (I + lower)^-1, 16 x 16 blocks by exact elimination, then twice by X -= X (L X) of the joined blocks."""
    dtype = refs.inverse.dtype
    lane = lane_of(BLOCK)
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
    product = dot(jnp.concatenate(below, axis=0), block_diagonal(whole)).astype(dtype)
    yield
    odd = jnp.concatenate([zero, product[:BLOCK], zero, product[BLOCK:]], axis=0)
    stream = jnp.concatenate([whole[BLOCK : 2 * BLOCK], whole[3 * BLOCK :]], axis=0)
    product = dot(stream, block_diagonal(odd)).astype(dtype)
    yield
    whole = whole - jnp.concatenate([zero, product[:BLOCK], zero, product[BLOCK:]], axis=0)
    product = dot(refs.lower[slot, pair, CHUNK:], block_diagonal(whole))
    product = (product[:STRIP] + product[STRIP:]).astype(dtype)
    yield
    zero = jnp.zeros((STRIP, WIDTH), dtype)
    product = dot(whole[STRIP:], block_diagonal(jnp.concatenate([zero, product], axis=0))).astype(dtype)
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
        state = refs.state[h].astype(operand)
        if refs.saved is not None:
            refs.saved.states[0, chunk, h] = state
        seen.append(dot(refs.read[slot, h], state))
        yield
    values = []
    for h, read in zip(heads, seen, strict=True):
        v = refs.v[0, rows, h * WIDTH : (h + 1) * WIDTH].astype(jnp.float32)
        if static.segmented:
            v = jnp.where(refs.valid[slot] > 0, v, 0.0)
        values.append((v - read[:CHUNK]).astype(operand))
        yield
    inverse, scores = refs.inverse[slot, pair], refs.scores[slot, pair]
    solved = dot(inverse, diagonal(*values)).astype(operand)
    if refs.saved is not None:
        refs.saved.values[0, rows, heads[0] * WIDTH : (heads[1] + 1) * WIDTH] = solved
        refs.saved.inverse[0, chunk, pair] = inverse
        refs.saved.scores[0, chunk, pair] = scores
    # The matrix unit copies decays of key channels over the lanes: the unit that moves lanes has more to do.
    decay = dot(decays, refs.selectors[pair])
    yield
    stream = jnp.concatenate([scores, refs.write[slot, pair].T], axis=0)
    result = dot(stream, diagonal(solved[:, :WIDTH], solved[:, WIDTH:]))
    yield
    for i, h in enumerate(heads):
        lanes = slice(i * WIDTH, (i + 1) * WIDTH)
        output = seen[i][CHUNK:] + result[:CHUNK, lanes]
        refs.out[0, rows, h * WIDTH : (h + 1) * WIDTH] = output.astype(refs.out.dtype)
        yield
        refs.state[h] = refs.state[h] * decay[:, lanes] + result[CHUNK:, lanes]
        if chunk == 0 and refs.middle is not None:
            refs.middle[h] = refs.state[h]
        yield


# ---------------------------------------------------------------------------------------------------------------------
# The loop over all blocks of all sequences and groups of heads, with its own pipeline of copies
# ---------------------------------------------------------------------------------------------------------------------


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
    states: Ref | None
    saved: Saved | None


class Copies(BlockCopies):
    """The kernel's copies, by the stages that they serve."""

    def inputs(self, at: Position, buffer: Index) -> list[Copy]:
        """What stage A needs."""
        hbm, refs = self.hbm, self.refs
        pairs = [(self._wide(getattr(hbm, name), at), getattr(refs, name)) for name in ("q", "k", "gate")]
        pairs.append((self._narrow(hbm.beta, at), refs.beta))
        if self.static.segmented:
            pairs.append((hbm.documents.at[at.batch, self._chunks(at)], refs.documents))
        return self._make([(source, target.at[buffer]) for source, target in pairs], buffer, 0)

    def values(self, at: Position, buffer: Index) -> list[Copy]:
        """What stage C needs."""
        return self._make([(self._wide(self.hbm.v, at), self.refs.v.at[buffer])], buffer, 5)

    def outputs(self, at: Position, buffer: Index) -> list[Copy]:
        """What stage C yields."""
        pairs = [(self.refs.out, self._wide(self.hbm.out, at))]
        if self.hbm.saved is not None and self.refs.saved is not None:
            states, values, scores, inverse = self.hbm.saved
            targets = [states.at[at.batch, self._chunks(at), self.heads(at)], self._wide(values, at)]
            targets += [x.at[at.batch, self._chunks(at), self.heads(at, per=2)] for x in (scores, inverse)]
            pairs += zip(self.refs.saved, targets, strict=True)
        return self._make([(source.at[buffer], target) for source, target in pairs], buffer, 6)


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
    saved = None if refs.saved is None else Saved._make(ref.at[pl.ds(there, 1)] for ref in refs.saved)
    refs = Refs._make([*views, refs.affine.at[current.group], *refs[8:-1], saved])
    pairs = range(static.heads // 2)
    work = []
    for chunk, windows in enumerate(windows_for("forward", static.heads)):
        # Slots by age in chunks; the scratch holds two blocks.
        ages = [(there if chunk < age else here) * CHUNKS + (chunk - age) % CHUNKS for age in range(3)]
        stages = {"A": [_gate_and_scores(static, refs, chunk, ages[0], pair) for pair in pairs]}
        stages["B"] = [_invert(refs, ages[1], pair) for pair in pairs]
        if "C" in wanted[chunk]:
            decays = _three_terms(refs.decay[ages[2]]).T
            stages["C"] = [_advance(static, refs, decays, chunk, ages[2], pair) for pair in pairs]
        emitted = zip("ABC", windows, YIELDS, strict=True)
        work += [(window, yields, stages[name]) for name, window, yields in emitted if name in wanted[chunk]]
    emit(work)


def _kernel(static: Static, *args: Ref) -> None:
    q, k, v, gate, beta, documents, affine, prefix, copiers, initial, out, final, *others = args
    rest = list(others)
    states = rest.pop(0) if static.every else None
    in_hbm = Saved._make(rest.pop(0) for _ in Saved._fields) if static.saves else None
    buffers = [rest.pop(0) for _ in range(len(Refs._fields) - 5)]
    middle = rest.pop(0) if static.every % CHUNKS else None
    in_vmem = Saved._make(rest.pop(0) for _ in Saved._fields) if static.saves else None
    (semaphores,) = rest
    hbm = Hbm(q, k, v, gate, beta, documents, initial, out, final, states, in_hbm)
    refs = Refs._make([*buffers[:7], affine, prefix, copiers, *buffers[7:], middle, in_vmem])
    copies = Copies(static, hbm, refs, semaphores)
    count = static.sequences * static.groups * static.blocks

    def begin(i: Index, current: Position, upcoming: Position) -> None:
        """Stage A's inputs have come; those of the next step and stage C's values are on their way."""
        here = i & 1
        wait(copies.inputs(current, here))
        start(copies.values(current, here))

        @pl.when(i + 1 < count)
        def _() -> None:
            start(copies.inputs(upcoming, 1 - here))

    def copy_states(at: Position, states: Ref) -> None:
        for chunk, state in ((0, refs.middle), (CHUNKS - 1, refs.state)):
            if state is None:
                continue
            past = at.block * CHUNKS + chunk + 1

            @pl.when(past % static.every == 0)
            def _(state: Ref = state, past: Index = past) -> None:
                place = jax.lax.div(past, jnp.int32(static.every)) - 1
                pltpu.sync_copy(state, states.at[at.batch, place, copies.heads(at)])

    def end(i: Index, current: Position, previous: Position, wanted: tuple[str, str]) -> None:
        """Block i - 1 is finished, whatever else the step computes."""
        here, there = i & 1, 1 - (i & 1)
        wait(copies.values(previous, there))

        @pl.when(previous.block == 0)
        def _() -> None:
            pltpu.sync_copy(hbm.initial.at[previous.batch, copies.heads(previous)], refs.state)

        @pl.when(i > 2)
        def _() -> None:
            wait(copies.outputs(previous, there))

        _compute(static, refs, current, here, wanted)
        start(copies.outputs(previous, there))
        if hbm.states is not None:
            copy_states(previous, hbm.states)

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
    start(copies.inputs(first, 0))
    begin(0, first, second)
    _compute(static, refs, first, 0, FIRST)
    carry = jax.tree.map(jnp.int32, (first, second))
    last, _ = jax.lax.fori_loop(1, count, step, carry)
    end(count, last, last, LAST)
    for block in range(max(count - 2, 0), count):
        wait(copies.outputs(first, block & 1))


# ---------------------------------------------------------------------------------------------------------------------
# From arrays to the kernel
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
    *,
    saves: bool = False,
    states_every: int | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"], Float[Array, "B N H K V"] | None, Saved | None]:
    """As `reference.forward`, in one kernel; operands are rounded to bf16 unless an input is float32.

    Rows are padded to 128 tokens and heads to an even number, which copies the inputs where they are not. `saves` asks
    for what the backward kernel needs, padded likewise.
    """
    check(q.shape[-1], v.shape[-1], parameters.lower_bound)
    length, heads = beta.shape[1:]
    tokens, parameters, documents = prepare([q, k, v, gate, beta], parameters, segments)
    state = pad(initial_state, {1: heads % 2})
    every = 0 if states_every is None else states_every // CHUNK
    out, state, states, saved = _call(
        tokens, state, parameters, documents, saves=saves, every=every, interpret=interpret
    )
    if states is not None:
        states = states[:, : length // (every * CHUNK), :heads]
    return out[:, :length, :heads], state[:, :heads], states, saved


def _call(
    tokens: list[Array],
    initial_state: Array,
    parameters: Parameters,
    documents: Array | None,
    *,
    saves: bool,
    every: int,
    interpret: bool,
) -> tuple[Array, Array, Array | None, Saved | None]:
    """The kernel on an even number of heads and whole blocks of tokens."""
    *wide, beta = tokens
    batch, length, heads, _ = wide[0].shape
    operand = operand_dtype(*wide)
    # float32 operands fill VMEM with half as many heads
    local = heads_per_step(heads, MAX_HEADS * 2 // operand.itemsize)
    static = Static(
        sequences=batch,
        groups=heads // local,
        heads=local,
        blocks=length // (CHUNK * CHUNKS),
        scale=parameters.scale,
        operand=operand,
        segmented=documents is not None,
        saves=saves,
        every=every,
    )
    if documents is None:
        documents = jnp.zeros((1, 1, 8, WIDTH), jnp.float32)
    arrays = [*(x.reshape(batch, length, -1) for x in wide), beta_by_group(beta, static.groups), documents]
    arrays = in_hbm([*arrays, initial_state.astype(jnp.float32)], interpret=interpret)
    prefix = jnp.asarray(prefix_matrix(parameters.lower_bound, static.operand))
    affine = gate_rows(parameters, static.groups)
    hbm, vmem = pl.BlockSpec(memory_space=pltpu.HBM), pl.BlockSpec(memory_space=pltpu.VMEM)
    out_shape = [pltpu.HBM(arrays[2].shape, wide[2].dtype), pltpu.HBM(initial_state.shape, jnp.float32)]
    if every:
        count = max(length // (every * CHUNK), 1)
        out_shape.append(pltpu.HBM((batch, count, *initial_state.shape[1:]), jnp.float32))
    if saves:
        out_shape += [pltpu.HBM(shape, static.operand) for shape in _saved_shapes(batch, length, heads)]
    out, state, *rest = pl.pallas_call(
        partial(_kernel, static),
        out_shape=out_shape,
        in_specs=[hbm] * 6 + [vmem] * 3 + [hbm],
        out_specs=[hbm] * len(out_shape),
        scratch_shapes=_scratch(static, [x.dtype for x in wide]),
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True, vmem_limit_bytes=VMEM_LIMIT),
        name="kda_forward",
        interpret=interpret,
    )(*arrays[:6], affine, prefix, jnp.asarray(selectors(local)), arrays[6])
    states = rest.pop(0) if every else None
    return out.reshape(wide[2].shape), state, states, Saved(*rest) if saves else None


def _saved_shapes(batch: int, length: int, heads: int) -> list[tuple[int, ...]]:
    """Of `Saved`."""
    chunks, pairs = length // CHUNK, heads // 2
    matrices = (batch, chunks, pairs, CHUNK, WIDTH)
    return [(batch, chunks, heads, WIDTH, WIDTH), (batch, length, heads * WIDTH), matrices, matrices]


def _scratch(static: Static, dtypes: list[jnp.dtype]) -> list[Any]:
    """In the order of `Refs`, without its VMEM inputs, and the semaphores; `dtypes` of q, k, v, gate."""
    heads, pairs, operand = static.heads, static.heads // 2, static.operand
    tall = CHUNKS * CHUNK

    def token(dtype: jnp.dtype) -> Any:
        return pltpu.VMEM((2, tall, heads * WIDTH), dtype)

    def slots(*shape: int, dtype: jnp.dtype = operand) -> Any:
        return pltpu.VMEM((2 * CHUNKS, *shape, WIDTH), dtype)

    q, k, v, gate = dtypes
    scratch = [
        token(q),
        token(k),
        token(gate),
        pltpu.VMEM((2, tall, heads), jnp.float32),  # beta
        pltpu.VMEM((2, CHUNKS, 8, WIDTH), jnp.float32),  # documents
        token(v),
        token(v),  # out
        pltpu.VMEM((heads, WIDTH, WIDTH), jnp.float32),  # state
        slots(pairs, 2 * CHUNK),  # lower, and its corner twice
        slots(pairs, BLOCK, dtype=jnp.dtype(jnp.float32)),  # blocks
        slots(pairs, CHUNK),  # scores
        slots(heads, 2 * CHUNK),  # read
        slots(pairs, 2 * CHUNK),  # write
        slots(heads, dtype=jnp.dtype(jnp.float32)),  # decay
        slots(pairs, CHUNK),  # inverse
        slots(CHUNK, dtype=jnp.dtype(jnp.float32)),  # valid
    ]
    if static.every % CHUNKS:
        scratch.append(pltpu.VMEM((heads, WIDTH, WIDTH), jnp.float32))  # the state in the middle of a block
    if static.saves:
        # A block's part of what `_saved_shapes` describes for one sequence.
        scratch += [pltpu.VMEM((2, *shape[1:]), operand) for shape in _saved_shapes(1, tall, heads)]
    return [*scratch, pltpu.SemaphoreType.DMA((2, 11))]
