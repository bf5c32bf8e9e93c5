"""KDA's backward pass on Hopper: the states' cotangents in a Mosaic GPU kernel, the inside of the chunks in XLA.

Nothing but the inputs is kept from the forward pass. Its kernels run again, and the recurrence also stores the state
that every chunk starts from and its R; a third kernel runs through the chunks backwards:
    dR = scores^T dO + write dS';  dS = decay * dS' + query^T dO - read^T dR
What is left are products for all chunks at once, and the xla body's derivative of a chunk's parts in float32.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float

from pallas_kernels.kda import xla
from pallas_kernels.kda.gpu_forward import (
    BF16,
    CHUNK,
    F32,
    HALF,
    MATRIX,
    ROWS,
    STAGES,
    WIDTH,
    Parts,
    by_head,
    columns_of,
    down,
    fetch,
    intra,
    load,
    multiply,
    recurrence,
    split_warp_groups,
    tokens_of,
    transposed,
)
from pallas_kernels.kda.inputs import Parameters, Segments


class Stages(NamedTuple):
    """Shared memory: parts and output cotangents of the next chunks, and per half of the value columns what follows."""

    read: Any
    write: Any
    decay: Any
    query: Any
    scores: Any
    doutput: Any
    dstate: Any
    residual: Any
    full: Any
    free: Any


def _reverse(*refs: Any, **stages: Any) -> None:
    """All chunks of one head, the last first."""
    parts, (doutput, dfinal, *results), s = Parts(*refs[:6]), refs[6:], Stages(**stages)
    chunks = parts.read.shape[1]

    def copies(at: tuple[Array, ...]) -> list[tuple[Any, Any]]:
        batch, n, head = at
        rows = pl.ds(n * CHUNK, CHUNK)
        halves = [(doutput.at[batch, rows, head, columns_of(x)], s.doutput.at[:, x]) for x in range(2)]
        names = ("read", "write", "decay", "query", "scores")
        return [*((getattr(parts, name).at[at], getattr(s, name)) for name in names), *halves]

    split_warp_groups(
        lambda at: fetch(chunks, copies, s, at, lambda step: chunks - 1 - step),
        lambda at, group: _go_back(chunks, dfinal, results, s, at, group),
    )


def _go_back(chunks: int, dfinal: Any, results: Any, s: Stages, at: tuple[Array, Array], group: Array) -> None:
    batch, head = at
    columns = columns_of(group)
    dinitial, dafter, negative = results
    state_tile, residual_tile = s.dstate.at[group], s.residual.at[group]

    def products(n: Array, slot: Array, dresidual: Any, added: Any) -> Array:
        doutput = s.doutput.at[slot, group]
        multiply(dresidual, transposed(s.scores.at[slot]), doutput)
        multiply(dresidual, s.write.at[slot], state_tile)
        multiply(added, transposed(s.query.at[slot]), doutput)
        residual_tile[...] = (-dresidual[...]).astype(BF16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(state_tile, dafter.at[batch, n, head, :, columns])
        plgpu.copy_smem_to_gmem(residual_tile, negative.at[batch, n, head, :, columns])
        multiply(added, transposed(s.read.at[slot]), residual_tile)
        return added[...]

    def chunk(step: Array, dstate: Array) -> Array:
        slot = lax.rem(step, STAGES)
        plgpu.barrier_wait(s.full.at[slot])
        accumulators = plgpu.ACC((CHUNK, HALF), F32), plgpu.ACC((WIDTH, HALF), F32)
        added = pl.run_scoped(partial(products, chunks - 1 - step, slot), *accumulators)
        dstate = dstate * down(load(s.decay.at[slot], ROWS), dstate) + added
        plgpu.barrier_arrive(s.free.at[slot])
        plgpu.wait_smem_to_gmem(0)  # the tiles are free
        state_tile[...] = dstate.astype(BF16)
        plgpu.commit_smem()
        return dstate

    dstate = load(dfinal.at[batch, head, :, columns], MATRIX)
    state_tile[...] = dstate.astype(BF16)
    plgpu.commit_smem()
    dinitial[batch, head, :, columns] = lax.fori_loop(0, chunks, chunk, dstate)


def reverse(parts: Parts, doutput: Float[Array, "B T H V"], dfinal: Float[Array, "B H K V"]) -> tuple[Array, ...]:
    """The first state's cotangent, and for every chunk, in bf16, that of its last state [B, N, H, K, V] and -dR."""
    batch, _, heads = parts.read.shape[:3]
    shared = partial(plgpu.SMEM, dtype=BF16)
    wide = shared((STAGES, CHUNK, WIDTH))
    stages = Stages(
        read=wide,
        write=wide,
        decay=plgpu.SMEM((STAGES, WIDTH), F32),
        query=wide,
        scores=shared((STAGES, CHUNK, CHUNK)),
        doutput=shared((STAGES, 2, CHUNK, HALF)),
        dstate=shared((2, WIDTH, HALF)),
        residual=shared((2, CHUNK, HALF)),
        full=plgpu.Barrier(num_arrivals=7, num_barriers=STAGES),
        free=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
    )
    saved = [jax.ShapeDtypeStruct((*parts.read.shape[:3], rows, WIDTH), BF16) for rows in (WIDTH, CHUNK)]
    out_type = (jax.ShapeDtypeStruct(dfinal.shape, F32), *saved)
    return by_head(_reverse, "kda_reverse", (batch, heads), out_type, stages)(*parts, doutput, dfinal)


def backward(
    arrays: tuple[Array, ...],
    lower_bound: float,
    scale: float,
    segments: Segments | None,
    doutput: Float[Array, "B T H V"],
    dfinal: Float[Array, "B H K V"],
) -> tuple[Array, ...]:
    """Cotangents of `arrays`: q, k, v, gate, beta, the initial state, a_log and dt_bias."""
    q, k, v, gate, beta, initial, a_log, dt_bias = arrays
    parts = intra(
        tokens_of(q, k, v, gate, beta, Parameters(a_log, dt_bias, lower_bound, scale), segments), lower_bound, scale
    )
    _, _, before, residual = recurrence(parts, initial.astype(F32), save=True)
    doutput = jnp.pad(doutput.astype(BF16), ((0, 0), (0, -q.shape[1] % CHUNK), (0, 0), (0, 0)))
    dinitial, after, negative = reverse(parts, doutput, dfinal)

    def inside(q: Array, k: Array, v: Array, gate: Array, beta: Array, a_log: Array, dt_bias: Array) -> xla.Chunks:
        parameters = Parameters(a_log, dt_bias, lower_bound, scale)
        return xla.chunks_of(q, k, v, gate, beta, parameters, segments, chunk=CHUNK)

    _, pull = jax.vjp(inside, q, k, v, gate, beta, a_log, dt_bias)
    doutput = doutput.reshape(q.shape[0], -1, CHUNK, *v.shape[2:])
    product = partial(jnp.einsum, preferred_element_type=F32)
    *dtokens, da_log, ddt_bias = pull(
        xla.Chunks(
            read=product("bnhcv,bnhkv->nbhck", negative, before),
            update=-jnp.swapaxes(negative, 0, 1).astype(F32),
            write=product("bnhcv,bnhkv->nbhck", residual, after),
            decay=jnp.swapaxes(jnp.sum(before.astype(F32) * after.astype(F32), axis=-1), 0, 1),
            query=product("bnchv,bnhkv->nbhck", doutput, before),
            scores=product("bnchv,bnhdv->nbhcd", doutput, residual),
        )
    )
    return *dtokens, dinitial.astype(initial.dtype), da_log, ddt_bias
