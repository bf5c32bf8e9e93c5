"""Fused KDA backward for TPU (Pallas Mosaic): all gradients in one kernel that walks the chunks from the last.

In the forward's notation (top of `tpu_forward.py`; A = lower(q1 k2^T), T the inverse, kw = k2 exp2(G_end), D the decay
of the chunk) and with dS' the gradient of the state after the chunk:
    dX = A^T dO + kw dS';  dV = Y = T^T dX;  dS = D dS' + q1^T dO - k1^T Y
    dA = lower(dO X^T);  dL = -strict_lower(Y X^T);  dkw = X dS'^T
    dq1 = dO S^T + dA k2;  dk1 = -Y S^T + dL k2;  dk2 = dA^T q1 + dL^T k1
    dG = q1 dq1 + k1 dk1 - k2 dk2 - kw dkw;  the end of the chunk also gets D rowsum(S dS') + sum_j kw dkw
The gate's gradient sums dG from the end. S, X, A and T come from the forward kernel (`tpu_forward.Saved`).
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
    ROWS,
    STRIP,
    VMEM_LIMIT,
    WIDTH,
    BlockCopies,
    Copy,
    Index,
    Position,
    Ref,
    Stage,
    beta_by_group,
    block_diagonal,
    documents_of,
    dot,
    emit,
    gate_rows,
    heads_per_step,
    in_hbm,
    lane_of,
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
from pallas_kernels.kda.tpu_forward import Saved

MAX_HEADS = 8  # of one step: sixteen head-chunks are work enough, and their scratch leaves half of VMEM
YIELDS = (13, 11, 14, 13)  # of the four stages
DECAY = ROWS.index("end1")
UNIT = 4  # row of the gate's constants; the row before it holds its inverse


class Static(NamedTuple):
    """What is fixed when the kernel is traced. `operand`: dtype of the matrix unit's operands; `heads` of one step."""

    sequences: int
    groups: int
    heads: int
    blocks: int
    scale: float
    operand: jnp.dtype
    segmented: bool


class Inputs(NamedTuple):
    """Of stage A."""

    q: Ref
    k: Ref
    gate: Ref
    beta: Ref
    documents: Ref


class Cotangents(NamedTuple):
    """Of stages B and C: dO and what the forward saved."""

    dout: Ref
    states: Ref
    values: Ref
    scores: Ref
    inverse: Ref


class Gradients(NamedTuple):
    """Of the tokens."""

    dq: Ref
    dk: Ref
    dv: Ref
    dgate: Ref
    dbeta: Ref


class Constants(NamedTuple):
    """The gate's rows of all groups, and the matrices of both running sums."""

    gate: Ref
    prefix: Ref
    suffix: Ref


class Carried(NamedTuple):
    """From chunk to chunk: the state's gradient [heads, V, K]; sums of dgate and of dgate times x [heads, 16, K]."""

    dstate: Ref
    sums: Ref


class Scratch(NamedTuple):
    """From stage A to the others by slot and head: float32 [64, 128] up to `factors`, then operands; masks by slot."""

    query: Ref
    key: Ref
    up: Ref
    down: Ref
    key_down: Ref
    slope: Ref
    argument: Ref
    query_norm: Ref
    key_norm: Ref
    beta: Ref
    factors: Ref
    keys: Ref
    across: Ref
    right: Ref
    right_across: Ref
    read: Ref
    write: Ref
    masks: Ref


class Passed(NamedTuple):
    """Between the later stages: Y of a pair; by slot and head dkw and the end's part of dG; what C leaves to D by head.

    `dquery` and `dkey` are gradients as far as queries and keys read, `dweight` that of beta times the keys that are
    read, over their decay; all without the diagonal of the scores, whose gradient is `diagonal`.
    """

    dvalues: Ref
    dwrite: Ref
    end: Ref
    dquery: Ref
    dkey: Ref
    dweight: Ref
    diagonal: Ref


class Refs(NamedTuple):
    """Everything in VMEM; the first three are double buffers, of which the stages see one."""

    inputs: Inputs
    cotangents: Cotangents
    gradients: Gradients
    constants: Constants
    carried: Carried
    scratch: Scratch
    passed: Passed


def suffix_matrix(operand: jnp.dtype) -> np.ndarray:
    """Sums from every row to the last, of rows given as one float32 or two bf16 terms."""
    sums = np.triu(np.ones((CHUNK, CHUNK)))
    return sums.astype(np.float32) if operand == jnp.float32 else np.concatenate([sums, sums], 1).astype(jnp.bfloat16)


# ---------------------------------------------------------------------------------------------------------------------
# The four stages of one chunk of two heads; `yield` marks where the work of other heads may be put between
# ---------------------------------------------------------------------------------------------------------------------


def _inner(x: Array, y: Array) -> Array:
    return jnp.sum(x * y, axis=1, keepdims=True)


def _eighth(x: Array) -> Array:
    """[8 n, 128] -> [8, 128], the sum of its registers."""
    return jnp.sum(x.reshape(-1, 8, WIDTH), axis=0)


def _recompute(static: Static, refs: Refs, chunk: int, pair: int) -> Stage:
    """Stage A: the forward's operands once more, from the inputs."""
    operand, scratch, slot = static.operand, refs.scratch, chunk
    rows, heads = slice(chunk * CHUNK, (chunk + 1) * CHUNK), (2 * pair, 2 * pair + 1)
    documents = documents_of(refs.inputs.documents[0, chunk]) if static.segmented else None
    valid = None if documents is None else documents.valid

    def load(ref: Ref, h: int) -> Array:
        x = ref[0, rows, h * WIDTH : (h + 1) * WIDTH].astype(jnp.float32)
        return x if valid is None else jnp.where(valid, x, 0.0)

    if documents is not None and pair == 0:
        masks = [documents.valid, documents.first, documents.last, documents.row == documents.lane]
        for i, mask in enumerate(masks):
            scratch.masks[slot, i] = jnp.broadcast_to(mask.astype(jnp.float32), (CHUNK, WIDTH))
    squashed = []
    for h in heads:
        slope, bias, derivative, _, unit = jnp.split(refs.constants.gate[:, h * WIDTH : (h + 1) * WIDTH], 5)
        z = load(refs.inputs.gate, h)
        scratch.argument[slot, h] = z * slope + bias
        y = squash(z, slope, bias, valid, operand)
        scratch.slope[slot, h] = y * (2.0 - y) * (derivative * unit)
        squashed.append(y)
        yield
    sums = dot(refs.constants.prefix[...], stack_terms(jnp.concatenate(squashed, axis=1), operand))
    yield
    for i, h in enumerate(heads):
        own = sums[:, i * WIDTH : (i + 1) * WIDTH]
        up, down = jnp.exp2(own[:CHUNK]), jnp.exp2(-own[:CHUNK])
        factors = jnp.exp2(own[CHUNK : CHUNK + 8])
        factor = dict(zip(ROWS, jnp.split(factors, 8), strict=False))
        scratch.up[slot, h], scratch.down[slot, h] = up, down
        yield
        if documents is not None:
            decay = jax.lax.broadcasted_iota(jnp.int32, (8, WIDTH), 0) == DECAY
            factors = jnp.where(decay, factors * documents.same, factors)
        scratch.factors[slot, h] = factors
        q, k = load(refs.inputs.q, h), load(refs.inputs.k, h)
        query_norm = jax.lax.rsqrt(_inner(q, q) + L2_EPS)
        key_norm = jax.lax.rsqrt(_inner(k, k) + L2_EPS)
        q, k = q * query_norm, k * key_norm
        scratch.query[slot, h], scratch.key[slot, h] = q, k
        unit = refs.constants.gate[UNIT : UNIT + 1, :WIDTH]
        scratch.query_norm[slot, h] = query_norm * unit
        scratch.key_norm[slot, h] = key_norm * unit
        yield
        beta = refs.inputs.beta[0, rows, h : h + 1]
        beta = jnp.broadcast_to(beta if valid is None else jnp.where(valid, beta, 0.0), (CHUNK, WIDTH))
        scratch.beta[slot, h] = beta
        q1, k1 = (q * up).astype(operand), (k * up).astype(operand)
        key_down = k * down
        key_down = key_down * beta
        scratch.key_down[slot, h] = key_down
        k2 = key_down.astype(operand)
        scratch.keys[slot, h] = k2
        yield
        # Through the first strip's end, as the forward does.
        to_strip = [strip_rows(factor[name], operand) for name in ("end0-ref0", "ref1-end0")]
        scratch.across[slot, h] = k2[:STRIP] * to_strip[0] * to_strip[1]
        right = [q1[:STRIP], q1[STRIP:], k1[:STRIP], k1[STRIP:]]
        scratch.right[slot, h] = jnp.concatenate(right, axis=0)
        right[1::2] = [x * to_strip[1] * to_strip[0] for x in right[1::2]]
        scratch.right_across[slot, h] = jnp.concatenate(right, axis=0)
        yield
        names = ("ref0", "ref1")
        query_reference, key_reference = (
            jnp.concatenate([strip_rows(factor[name] * sign, operand) for name in names], axis=0)
            for sign in (static.scale, -1.0)
        )
        write = jnp.concatenate(
            [key_down[:STRIP] * factor["end1-ref0"], key_down[STRIP:] * factor["end1-ref1"]], axis=0
        )
        if documents is not None:
            first = jnp.broadcast_to(documents.first, (CHUNK, WIDTH)).astype(operand)
            query_reference, key_reference = query_reference * first, key_reference * first
            write = write * documents.last
        scratch.read[slot, h, :CHUNK] = q1 * query_reference
        scratch.read[slot, h, CHUNK:] = k1 * key_reference
        scratch.write[slot, h] = write.astype(operand)
        yield


def _cotangent(static: Static, refs: Refs, chunk: int, h: int) -> Array:
    """dO of a chunk and head in units of `_unit_rows`; what stands in padding is ignored."""
    dout = refs.cotangents.dout[0, chunk * CHUNK : (chunk + 1) * CHUNK, h * WIDTH : (h + 1) * WIDTH]
    if static.segmented:
        dout = jnp.where(refs.scratch.masks[chunk, 0] > 0, dout.astype(jnp.float32), 0.0)
    size = strip_rows(refs.constants.gate[UNIT - 1 : UNIT, :WIDTH], static.operand)
    return dout.astype(static.operand) * jnp.concatenate([size, size], axis=0)


def _retreat(static: Static, refs: Refs, chunk: int, pair: int) -> Stage:
    """Stage B: the gradients of the values and of the state before the chunk."""
    operand, scratch, slot = static.operand, refs.scratch, chunk
    rows, heads = slice(chunk * CHUNK, (chunk + 1) * CHUNK), (2 * pair, 2 * pair + 1)
    scores = block_diagonal(refs.cotangents.scores[0, chunk, pair]).T
    inverse = block_diagonal(refs.cotangents.inverse[0, chunk, pair]).T
    yield
    dout = [_cotangent(static, refs, chunk, h) for h in heads]
    from_output = dot(scores, jnp.concatenate(dout, axis=0))
    yield
    dsolved = []
    for i, h in enumerate(heads):
        dstate = refs.carried.dstate[h].astype(operand)
        dsolved.append(from_output[i * CHUNK : (i + 1) * CHUNK] + dot(scratch.write[slot, h], dstate, transpose_b=True))
        yield
        values = refs.cotangents.values[0, rows, h * WIDTH : (h + 1) * WIDTH]
        refs.passed.dwrite[slot, h] = dot(values, dstate)
        state = refs.cotangents.states[0, chunk, h].T
        share = state * dstate
        for _ in range(2):  # halves of packed registers: the sum is of bf16 products anyway
            share = share[: len(share) // 2] + share[len(share) // 2 :]
        refs.passed.end[slot, h] = _eighth(share.astype(jnp.float32)) * scratch.factors[slot, h, DECAY : DECAY + 1]
        yield
    dvalues = dot(inverse, jnp.concatenate(dsolved, axis=0).astype(operand)).astype(operand)
    refs.passed.dvalues[pair] = dvalues
    yield
    for i, h in enumerate(heads):
        own = dvalues[i * CHUNK : (i + 1) * CHUNK]
        unit = strip_rows(refs.constants.gate[UNIT : UNIT + 1, :WIDTH], operand)
        dv = own * jnp.concatenate([unit, unit], axis=0)
        refs.gradients.dv[0, rows, h * WIDTH : (h + 1) * WIDTH] = dv.astype(refs.gradients.dv.dtype)
        change = dot(jnp.concatenate([dout[i], own], axis=0).T, scratch.read[slot, h])
        yield
        decay = scratch.factors[slot, h, DECAY : DECAY + 1]
        refs.carried.dstate[h] = refs.carried.dstate[h] * decay + change
        yield


def _differentiate(static: Static, refs: Refs, chunk: int, pair: int) -> Stage:
    """Stage C: the products behind the gradients of queries and keys."""
    operand, scratch, passed, slot = static.operand, refs.scratch, refs.passed, chunk
    rows, heads = slice(chunk * CHUNK, (chunk + 1) * CHUNK), (2 * pair, 2 * pair + 1)
    values = [refs.cotangents.values[0, rows, h * WIDTH : (h + 1) * WIDTH] for h in heads]
    row, lane = jax.lax.broadcasted_iota(jnp.int32, (CHUNK, WIDTH), 0), lane_of(CHUNK)
    left, below = lane < CHUNK, (lane & (CHUNK - 1)) < row
    if static.segmented:
        below = below & (scratch.masks[slot, 3] > 0)
    products = []
    for i, h in enumerate(heads):
        dvalues = passed.dvalues[pair, i * CHUNK : (i + 1) * CHUNK]
        stream = jnp.concatenate([_cotangent(static, refs, chunk, h), dvalues], axis=0)
        weights = jnp.concatenate([refs.cotangents.states[0, chunk, h], *values], axis=0)
        products.append(dot(stream, weights, transpose_b=True))
        yield
    dscores = jnp.where(left, products[0][:CHUNK, WIDTH:], products[1][:CHUNK, WIDTH:]) * static.scale
    dlower = jnp.where(left, products[0][CHUNK:, WIDTH:], products[1][CHUNK:, WIDTH:])
    for i, h in enumerate(heads):
        diagonal = jnp.sum(jnp.where(lane == row + i * CHUNK, dscores, 0.0), axis=1, keepdims=True)
        passed.diagonal[h] = jnp.broadcast_to(diagonal, (CHUNK, WIDTH))
    dscores = jnp.where(below, dscores, 0.0).astype(operand)
    dlower = jnp.where(below, -dlower, 0.0).astype(operand)
    yield
    turned = jnp.concatenate([dscores, dlower], axis=0).T
    yield
    reading = []
    zero = jnp.zeros((CHUNK, WIDTH), operand)
    keys = [scratch.keys[slot, h] for h in heads]
    for strip in range(2):
        part = slice(strip * STRIP, (strip + 1) * STRIP)
        if strip == 1:
            keys = [jnp.concatenate([scratch.across[slot, h], x[STRIP:]], 0) for h, x in zip(heads, keys, strict=True)]
        both = [jnp.concatenate([keys[0], zero], axis=1), jnp.concatenate([zero, keys[1]], axis=1)]
        stream = jnp.concatenate([dscores[part], dlower[part]], axis=0)
        reading.append(dot(stream, jnp.concatenate(both, axis=0)))
        yield
    for i, h in enumerate(heads):
        own, lanes = turned[i * CHUNK : (i + 1) * CHUNK], slice(i * WIDTH, (i + 1) * WIDTH)
        writing = [dot(own[:STRIP], scratch.right_across[slot, h]), dot(own[STRIP:], scratch.right[slot, h])]
        yield
        from_state = products[i][:, :WIDTH]
        if static.segmented:
            first = scratch.masks[slot, 1]
            from_state = from_state * jnp.concatenate([first, first], axis=0)
        factor = dict(zip(ROWS, jnp.split(scratch.factors[slot, h], 8), strict=False))
        for side, (target, sign) in enumerate(((passed.dquery, static.scale), (passed.dkey, -1.0))):
            for strip, inside in enumerate(reading):
                part = slice(strip * STRIP, (strip + 1) * STRIP)
                state = from_state[side * CHUNK :][part] * (factor[f"ref{strip}"] * sign)
                target[h, part] = (inside[side * STRIP : (side + 1) * STRIP, lanes] + state) * scratch.up[slot, h, part]
            yield
        passed.dweight[h] = jnp.concatenate(writing, axis=0)
        yield


def _finish(static: Static, refs: Refs, chunk: int, pair: int) -> Stage:
    """Stage D: the gradients of queries, keys, gate and beta from those products."""
    operand, scratch, passed, slot = static.operand, refs.scratch, refs.passed, chunk
    rows, heads = slice(chunk * CHUNK, (chunk + 1) * CHUNK), (2 * pair, 2 * pair + 1)
    terms = []
    for h in heads:
        factor = dict(zip(ROWS, jnp.split(scratch.factors[slot, h], 8), strict=False))
        dwrite = passed.dwrite[slot, h]
        if static.segmented:
            dwrite = dwrite * scratch.masks[slot, 2]
        end = jnp.concatenate([dwrite[:STRIP] * factor["end1-ref0"], dwrite[STRIP:] * factor["end1-ref1"]], axis=0)
        dweight, key_down = passed.dweight[h] + end, scratch.key_down[slot, h]
        from_end = jnp.sum(passed.end[slot, h] + _eighth(key_down * end), axis=0, keepdims=True)
        yield
        query, key, dq, dk = scratch.query[slot, h], scratch.key[slot, h], passed.dquery[h], passed.dkey[h]
        rising = key * dk
        dlog = query * dq + rising - key_down * dweight
        last = jax.lax.broadcasted_iota(jnp.int32, (8, WIDTH), 0) == 7
        terms.append(jnp.concatenate([dlog[:-8], dlog[-8:] + jnp.where(last, from_end, 0.0)], axis=0))
        yield
        # The diagonal of the scores holds no decay: its parts of dG cancel, but only on paper.
        beta, diagonal = scratch.beta[slot, h], passed.diagonal[h]
        dweight = dweight * scratch.down[slot, h] + diagonal * query
        dbeta = _inner(key, dweight)
        refs.gradients.dbeta[0, rows, h : h + 1] = (dbeta * refs.constants.gate[UNIT : UNIT + 1, :WIDTH])[:, :1]
        dk = dk + beta * dweight
        dq = dq + diagonal * beta * key
        yield
        dq = (dq - query * _inner(query, dq)) * scratch.query_norm[slot, h]
        refs.gradients.dq[0, rows, h * WIDTH : (h + 1) * WIDTH] = dq.astype(refs.gradients.dq.dtype)
        yield
        along = jnp.sum(rising, axis=1, keepdims=True) + beta * dbeta
        dk = (dk - key * along) * scratch.key_norm[slot, h]
        refs.gradients.dk[0, rows, h * WIDTH : (h + 1) * WIDTH] = dk.astype(refs.gradients.dk.dtype)
        yield
    dlog = jnp.concatenate(terms, axis=1)
    if operand != jnp.float32:
        high = dlog.astype(operand)
        dlog = jnp.concatenate([high, (dlog - high.astype(jnp.float32)).astype(operand)], axis=0)
    summed = dot(refs.constants.suffix[...], dlog)
    yield
    for i, h in enumerate(heads):
        dgate = summed[:, i * WIDTH : (i + 1) * WIDTH] * scratch.slope[slot, h]
        refs.gradients.dgate[0, rows, h * WIDTH : (h + 1) * WIDTH] = dgate.astype(refs.gradients.dgate.dtype)
        refs.carried.sums[h, :8] += _eighth(dgate)
        refs.carried.sums[h, 8:] += _eighth(dgate * scratch.argument[slot, h])
        yield


# ---------------------------------------------------------------------------------------------------------------------
# The loop over all blocks of all sequences and groups of heads, with its own pipeline of copies
# ---------------------------------------------------------------------------------------------------------------------


class Hbm(NamedTuple):
    """The arrays in HBM; `dfinal` and `dinitial` are the state's gradients as [B, H, V, K]."""

    inputs: Inputs
    cotangents: Cotangents
    dfinal: Ref
    gradients: Gradients
    dinitial: Ref
    sums: Ref


class Copies(BlockCopies):
    """The kernel's copies, by the stages that they serve."""

    def inputs(self, at: Position, buffer: Index) -> list[Copy]:
        """What stage A needs."""
        q, k, gate, beta, documents = self.hbm.inputs
        sources = [*(self._wide(x, at) for x in (q, k, gate)), self._narrow(beta, at)]
        if self.static.segmented:
            sources.append(documents.at[at.batch, self._chunks(at)])
        return self._make([(x, y.at[buffer]) for x, y in zip(sources, self.refs.inputs, strict=False)], buffer, 0)

    def cotangents(self, at: Position, buffer: Index) -> list[Copy]:
        """What stages B and C need."""
        dout, states, values, scores, inverse = self.hbm.cotangents
        sources = [self._wide(dout, at), states.at[at.batch, self._chunks(at), self.heads(at)], self._wide(values, at)]
        sources += [x.at[at.batch, self._chunks(at), self.heads(at, per=2)] for x in (scores, inverse)]
        return self._make([(x, y.at[buffer]) for x, y in zip(sources, self.refs.cotangents, strict=True)], buffer, 5)

    def gradients(self, at: Position, buffer: Index) -> list[Copy]:
        """What stages B and C yield."""
        *wide, narrow = self.hbm.gradients
        targets = [*(self._wide(x, at) for x in wide), self._narrow(narrow, at)]
        return self._make([(x.at[buffer], y) for x, y in zip(self.refs.gradients, targets, strict=True)], buffer, 10)


def _preceding(static: Static, at: Position) -> Position:
    """The block to work on after a traced position: the one before it in the sequence."""
    last = at.block == 0
    group = jnp.where(last, at.group + 1, at.group)
    batch = jnp.where(group == static.groups, at.batch + 1, at.batch)
    block = jnp.where(last, static.blocks - 1, at.block - 1)
    return Position(batch, jnp.where(group == static.groups, 0, group), block)


def _compute(static: Static, refs: Refs, group: Index, here: Index, half: int, wanted: str) -> None:
    """Half a step: D of one chunk, B and C of the chunk before it and A of the one before that.

    The first half takes A of the later chunk of block i, B and C of the earlier and D of the later chunk of block
    i - 1; the second half A of the earlier, B and C of the later chunk of block i, D of the earlier one of block i - 1.
    D of a chunk is over before A writes where it read.
    """
    there = 1 - here
    behind = (there, here)[half]

    def view(part: Any, buffer: Index) -> Any:
        return type(part)(*(ref.at[pl.ds(buffer, 1)] for ref in part))

    constants = refs.constants._replace(gate=refs.constants.gate.at[group])
    refs = refs._replace(inputs=view(refs.inputs, here), cotangents=view(refs.cotangents, behind), constants=constants)
    early, late = (refs._replace(gradients=view(refs.gradients, buffer)) for buffer in (behind, there))
    stages = {
        "A": (_recompute, early, CHUNKS - 1 - half),
        "B": (_retreat, early, half),
        "C": (_differentiate, early, half),
        "D": (_finish, late, CHUNKS - 1 - half),
    }
    work = []
    for window, yields, (name, (stage, own, chunk)) in zip(
        windows_for("backward", static.heads)[half], YIELDS, stages.items(), strict=True
    ):
        if name in wanted:
            work.append((window, yields, [stage(static, own, chunk, pair) for pair in range(static.heads // 2)]))
    emit(work)


def _take(args: list[Ref], *parts: Any) -> list[Any]:
    """The next arguments as the given named tuples."""
    return [part(*(args.pop(0) for _ in part._fields)) for part in parts]


def _kernel(static: Static, *refs_in_order: Ref) -> None:
    args = list(refs_in_order)
    inputs, cotangents, constants = _take(args, Inputs, Cotangents, Constants)
    dfinal, (gradients,) = args.pop(0), _take(args, Gradients)
    hbm = Hbm(inputs, cotangents, dfinal, gradients, dinitial=args.pop(0), sums=args.pop(0))
    parts = [*_take(args, Inputs, Cotangents, Gradients), constants, *_take(args, Carried, Scratch, Passed)]
    refs = Refs._make(parts)
    (semaphores,) = args
    copies = Copies(static, hbm, refs, semaphores)
    count = static.sequences * static.groups * static.blocks

    def first_half(i: Index, current: Position, previous: Position, wanted: str) -> None:
        """Finishes the recurrence of block i - 1 and begins block i."""
        _compute(static, refs, current.group, i & 1, 0, wanted)

        @pl.when((previous.block == 0) & (i > 0))
        def _() -> None:
            pltpu.sync_copy(refs.carried.dstate, hbm.dinitial.at[previous.batch, copies.heads(previous)])

    def second_half(i: Index, current: Position, previous: Position, wanted: str) -> None:
        """Finishes block i - 1; needs of block i what the recurrence reads."""
        here, there = i & 1, 1 - (i & 1)

        @pl.when(i + 1 < count)
        def _() -> None:
            start(copies.cotangents(_preceding(static, current), there))

        if "B" in wanted:
            wait(copies.cotangents(current, here))

            @pl.when(current.block == static.blocks - 1)
            def _() -> None:
                pltpu.sync_copy(hbm.dfinal.at[current.batch, copies.heads(current)], refs.carried.dstate)

            @pl.when(i >= 2)
            def _() -> None:
                wait(copies.gradients(current, here))

        _compute(static, refs, current.group, here, 1, wanted)
        if "D" in wanted:
            start(copies.gradients(previous, there))

            @pl.when(previous.block == 0)
            def _() -> None:
                pltpu.sync_copy(refs.carried.sums, hbm.sums.at[previous.batch, copies.heads(previous)])
                refs.carried.sums[...] = jnp.zeros(refs.carried.sums.shape, jnp.float32)

    def begin(i: Index, current: Position, upcoming: Position) -> None:
        here, there = i & 1, 1 - (i & 1)
        wait(copies.inputs(current, here))

        @pl.when(i + 1 < count)
        def _() -> None:
            start(copies.inputs(upcoming, there))

    def step(i: Array, carry: tuple[Position, Position]) -> tuple[Position, Position]:
        previous, current = carry
        upcoming = _preceding(static, current)
        begin(i, current, upcoming)
        first_half(i, current, previous, "ABCD")
        second_half(i, current, previous, "ABCD")
        return current, upcoming

    refs.carried.sums[...] = jnp.zeros(refs.carried.sums.shape, jnp.float32)
    first = jax.tree.map(jnp.int32, Position(0, 0, static.blocks - 1))
    second = _preceding(static, first)
    start(copies.inputs(first, 0))
    start(copies.cotangents(first, 0))
    begin(0, first, second)
    first_half(0, first, first, "A")
    second_half(0, first, first, "ABC")
    last, _ = jax.lax.fori_loop(1, count, step, (first, second))
    first_half(count, last, last, "BCD")
    second_half(count, last, last, "D")
    for block in range(max(count - 2, 0), count):
        wait(copies.gradients(first, block & 1))


# ---------------------------------------------------------------------------------------------------------------------
# From arrays to the kernel
# ---------------------------------------------------------------------------------------------------------------------


class Results(NamedTuple):
    """The gradients of `tpu_forward.forward`'s arguments."""

    q: Float[Array, "B T H K"]
    k: Float[Array, "B T H K"]
    v: Float[Array, "B T H V"]
    gate: Float[Array, "B T H K"]
    beta: Float[Array, "B T H"]
    initial_state: Float[Array, "B H K V"]
    a_log: Float[Array, "H"]
    dt_bias: Float[Array, "H K"]


def backward(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    gate: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    parameters: Parameters,
    segments: Segments | None,
    saved: Saved,
    dout: Float[Array, "B T H V"],
    dfinal: Float[Array, "B H K V"],
    *,
    interpret: bool = False,
) -> Results:
    """All gradients in one kernel, from the forward's inputs, what it saved and the results' gradients."""
    length, heads = beta.shape[1:]
    tokens, padded, documents = prepare([q, k, gate, beta, dout], parameters, segments)
    dfinal = dfinal.astype(jnp.float32)
    unit = _unit(dout, dfinal)
    dfinal = jnp.swapaxes(pad(dfinal / unit, {1: heads % 2}), 2, 3)
    gradients, dinitial, sums = _call(tokens, dfinal, saved, padded, documents, unit, interpret=interpret)
    dq, dk, dv, dgate, dbeta = (x[:, :length, :heads] for x in gradients)
    dbias, along = (jnp.sum(x, axis=(0, 2)) for x in jnp.split(sums[:, :heads], 2, axis=2))
    # d(argument) / d(a_log) is the argument, of which the kernel has the half, over the rate that dgate contains
    rate = jnp.exp(parameters.a_log.astype(jnp.float32))
    da_log = jnp.sum(along, axis=1) * 2 / rate
    dstate = jnp.swapaxes(dinitial[:, :heads], 2, 3) * unit
    return Results(dq, dk, dv, dgate, dbeta, dstate, da_log, dbias)


def _unit(dout: Array, dfinal: Array) -> Float[Array, ""]:
    """The power of two of which the largest gradient that comes in is four to eight; the kernel computes in such units.

    Otherwise the factors exp2(+-112) of strongly decaying strips would flush gradients as small as a loss's mean gives.
    """
    size = jnp.maximum(jnp.max(jnp.abs(dout)).astype(jnp.float32), jnp.max(jnp.abs(dfinal)))
    exponent = jnp.where(jnp.isfinite(size), jnp.clip(jnp.frexp(size)[1], -100, 100), 0)
    return jax.lax.bitcast_convert_type((exponent - 3 + 127) << 23, jnp.float32)


def _call(
    tokens: list[Array],
    dfinal: Array,
    saved: Saved,
    parameters: Parameters,
    documents: Array | None,
    unit: Array,
    *,
    interpret: bool,
) -> tuple[Gradients, Array, Array]:
    """The kernel on an even number of heads and whole blocks of tokens."""
    q, k, gate, beta, dout = tokens
    batch, length, heads, _ = q.shape
    # float32 operands fill VMEM with half as many heads
    local = heads_per_step(heads, MAX_HEADS * 2 // saved.values.dtype.itemsize)
    static = Static(
        sequences=batch,
        groups=heads // local,
        heads=local,
        blocks=length // (CHUNK * CHUNKS),
        scale=parameters.scale,
        operand=saved.values.dtype,
        segmented=documents is not None,
    )
    if documents is None:
        documents = jnp.zeros((1, 1, 8, WIDTH), jnp.float32)
    q, k, gate, dout = (x.reshape(batch, length, -1) for x in (q, k, gate, dout))
    arrays = [q, k, gate, beta_by_group(beta, static.groups), documents, dout, *saved]
    *arrays, dfinal = in_hbm([*arrays, dfinal], interpret=interpret)
    gate_constants = gate_rows(parameters, static.groups)
    units = jnp.stack([1 / unit, unit])[:, None]
    units = jnp.broadcast_to(units, (static.groups, 2, gate_constants.shape[2]))
    constants = [jnp.concatenate([gate_constants, units], axis=1)]
    constants += [
        jnp.asarray(f) for f in (prefix_matrix(parameters.lower_bound, static.operand), suffix_matrix(static.operand))
    ]
    hbm, vmem = pl.BlockSpec(memory_space=pltpu.HBM), pl.BlockSpec(memory_space=pltpu.VMEM)
    out_shape = [pltpu.HBM(x.shape, x.dtype) for x in (q, k, dout, gate, arrays[3], dfinal)]
    out_shape.append(pltpu.HBM((batch, heads, 16, WIDTH), jnp.float32))
    *gradients, dinitial, sums = pl.pallas_call(
        partial(_kernel, static),
        out_shape=out_shape,
        in_specs=[hbm] * len(arrays) + [vmem] * 3 + [hbm],
        out_specs=[hbm] * len(out_shape),
        scratch_shapes=_scratch_shapes(static, [x.dtype for x in (q, k, gate, dout)]),
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True, vmem_limit_bytes=VMEM_LIMIT),
        name="kda_backward",
        interpret=interpret,
    )(*arrays, *constants, dfinal)
    wide: Any = [x.reshape(batch, length, heads, WIDTH) for x in gradients[:4]]
    dbeta = jnp.moveaxis(gradients[4], 1, 2).reshape(batch, length, heads)
    return Gradients._make([*wide, dbeta]), dinitial, sums


def _scratch_shapes(static: Static, dtypes: list[jnp.dtype]) -> list[Any]:
    """In the order of `_kernel`'s parts, and the semaphores; `dtypes` of q, k, gate and dO."""
    heads, pairs, operand, f32 = static.heads, static.heads // 2, static.operand, jnp.dtype(jnp.float32)
    tall = CHUNKS * CHUNK
    q, k, gate, dout = (pltpu.VMEM((2, tall, heads * WIDTH), dtype) for dtype in dtypes)
    beta = pltpu.VMEM((2, tall, heads), f32)
    matrices = pltpu.VMEM((2, CHUNKS, pairs, CHUNK, WIDTH), operand)

    def slots(*shape: int, dtype: jnp.dtype = operand) -> Any:
        return pltpu.VMEM((CHUNKS, heads, *shape, WIDTH), dtype)

    inputs = Inputs(q, k, gate, beta, pltpu.VMEM((2, CHUNKS, 8, WIDTH), f32))
    states = pltpu.VMEM((2, CHUNKS, heads, WIDTH, WIDTH), operand)
    values = pltpu.VMEM((2, tall, heads * WIDTH), operand)
    return [
        *inputs,
        *Cotangents(dout, states, values, matrices, matrices),
        *Gradients(q, k, dout, gate, beta),
        *Carried(pltpu.VMEM((heads, WIDTH, WIDTH), f32), pltpu.VMEM((heads, 16, WIDTH), f32)),
        *[slots(CHUNK, dtype=f32)] * 10,  # query to beta
        slots(8, dtype=f32),  # factors
        slots(CHUNK),  # keys
        slots(STRIP),  # across
        *[slots(2 * CHUNK)] * 3,  # right, right_across, read
        slots(CHUNK),  # write
        pltpu.VMEM((CHUNKS, 4, CHUNK, WIDTH), f32),  # masks
        pltpu.VMEM((pairs, 2 * CHUNK, WIDTH), operand),  # dvalues
        slots(CHUNK, dtype=f32),  # dwrite
        slots(8, dtype=f32),  # end
        *[pltpu.VMEM((heads, CHUNK, WIDTH), f32)] * 4,  # dquery to diagonal
        pltpu.SemaphoreType.DMA((2, 15)),
    ]
