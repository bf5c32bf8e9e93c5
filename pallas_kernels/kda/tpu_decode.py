"""Fused KDA decode for TPU (Pallas Mosaic): conv, SiLU, norms, gate, recurrence, gated norm of one token per row.

The state of a row is read once and written once in place; its [K, V] tile of a head stays in registers between decay,
prediction, write and read. A loop runs over rows, an inner one over groups of heads; the states of the next group are
on their way in, and those of the last on their way out, while a group computes.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Int

from pallas_kernels.kda.inputs import L2_EPS, Parameters

WIDTH = 128  # of a key and of a value
BUFFERS = 3  # of the states: one arrives, one is worked on, one leaves
GROUP_SIZES = (16, 8)  # heads of one inner step


class Static(NamedTuple):
    """Sizes and numbers that are fixed when the kernel is traced."""

    rows: int
    groups: int
    heads: int
    pool: int
    lower_bound: float
    scale: float
    norm_eps: float


Ref = Any  # of an array in HBM, VMEM or SMEM
Copy = Any  # between them, not yet started


class Refs(NamedTuple):
    """The kernel's arguments in order: inputs, outputs, buffers in VMEM, semaphores."""

    slots: Ref
    x: Ref
    gate: Ref
    beta: Ref
    out_gate: Ref
    taps: Ref
    gate_scale: Ref
    gate_bias: Ref
    norm_weight: Ref
    selectors: Ref
    conv_in: Ref
    state_in: Ref
    out: Ref
    conv: Ref
    state: Ref
    x_buffer: Ref
    gate_buffer: Ref
    beta_buffer: Ref
    out_gate_buffer: Ref
    out_buffer: Ref
    history: Ref
    moved: Ref
    states: Ref
    scalars: Ref
    outputs: Ref
    row_in: Ref
    row_out: Ref
    conv_arrival: Ref
    conv_leaving: Ref
    arrival: Ref
    leaving: Ref


def _valid(static: Static, slot: Array) -> Array:
    return (slot >= 0) & (slot < static.pool)


def _row_copies(refs: Refs, row: Array) -> list[Copy]:
    buffer = row & 1
    pairs = [
        (refs.x, refs.x_buffer),
        (refs.gate, refs.gate_buffer),
        (refs.beta, refs.beta_buffer),
        (refs.out_gate, refs.out_gate_buffer),
    ]
    return [
        pltpu.make_async_copy(source.at[row], target.at[buffer], refs.row_in.at[buffer, i])
        for i, (source, target) in enumerate(pairs)
    ]


def _out_copy(refs: Refs, row: Array) -> Copy:
    return pltpu.make_async_copy(refs.out_buffer.at[row & 1], refs.out.at[row], refs.row_out.at[row & 1])


def _history_copy(refs: Refs, row: Array) -> Copy:
    return pltpu.make_async_copy(refs.conv.at[refs.slots[row]], refs.history.at[row & 1], refs.conv_arrival.at[row & 1])


def _moved_copy(refs: Refs, row: Array) -> Copy:
    return pltpu.make_async_copy(refs.moved.at[row & 1], refs.conv.at[refs.slots[row]], refs.conv_leaving.at[row & 1])


def _state(static: Static, refs: Refs, row: Array, group: Array) -> Ref:
    return refs.state.at[refs.slots[row], pl.ds(group * static.heads, static.heads)]


def _arriving(static: Static, refs: Refs, row: Array, group: Array, buffer: Array) -> Copy:
    source = _state(static, refs, row, group)
    return pltpu.make_async_copy(source, refs.states.at[buffer], refs.arrival.at[buffer])


def _departing(static: Static, refs: Refs, row: Array, group: Array, buffer: Array) -> Copy:
    target = _state(static, refs, row, group)
    return pltpu.make_async_copy(refs.states.at[buffer], target, refs.leaving.at[buffer])


def _convolve(static: Static, refs: Refs, row: Array, group: Array, dtype: jnp.dtype) -> list[Array]:
    """q, k and v of one group after conv and SiLU, [heads, 128] each; the history moves on by one token."""
    buffer, heads = row & 1, pl.ds(group * static.heads, static.heads)
    taps = refs.taps.shape[0]
    parts = []
    for part in range(3):
        x = refs.x_buffer[buffer, part, heads]
        window = [refs.history[buffer, t, part, heads] for t in range(taps - 1)]
        for t, entry in enumerate([*window[1:], x.astype(refs.moved.dtype)]):
            refs.moved[buffer, t, part, heads] = entry
        window.append(x)
        sums = sum(entry.astype(jnp.float32) * refs.taps[t, part, heads] for t, entry in enumerate(window))
        parts.append((sums * jax.nn.sigmoid(sums)).astype(dtype).astype(jnp.float32))
    return parts


def _terms(x: Array) -> Array:
    """Float32 rows as three stacks of bf16 rows that sum to them (to 2^-24)."""
    terms = []
    for _ in range(3):
        terms.append(x.astype(jnp.bfloat16))
        x = x - terms[-1].astype(jnp.float32)
    return jnp.concatenate(terms, axis=0)


def _column(row: Array) -> Array:
    """[1, n] -> [n, 1]."""
    n = row.shape[1]
    i, j = (jax.lax.broadcasted_iota(jnp.int32, (n, n), axis) for axis in (0, 1))
    return jnp.sum(jnp.where(i == j, row, 0.0), axis=1, keepdims=True)


def selectors(heads: int) -> np.ndarray:
    """[heads, 6 heads, 256]: times the transposed terms of q and k, head h's q and k as columns over 128 lanes each."""
    head, row, lane = np.ogrid[:heads, : 6 * heads, : 2 * WIDTH]
    return (row % (2 * heads) == head + heads * (lane // WIDTH)).astype(jnp.bfloat16)


def _recurrence(static: Static, refs: Refs, parts: list[Array], row: Array, group: Array, buffer: Array) -> None:
    """The step of one group of heads: states in place, outputs of the heads into `outputs`.

    Key-channel vectors are needed as columns over all lanes: the matrix unit copies q and k exactly, as three terms
    each, and the lanes' unit the decay; neither could do all three in time.
    """
    heads = pl.ds(group * static.heads, static.heads)
    q, k, v = parts
    q = q * (jax.lax.rsqrt(jnp.sum(q * q, axis=1, keepdims=True) + L2_EPS) * static.scale)
    k = k * jax.lax.rsqrt(jnp.sum(k * k, axis=1, keepdims=True) + L2_EPS)
    gate = refs.gate_buffer[row & 1, heads].astype(jnp.float32)
    decay = jnp.exp(static.lower_bound * jax.nn.sigmoid(refs.gate_scale[heads] * gate + refs.gate_bias[heads]))
    beta = jnp.broadcast_to(_column(refs.beta_buffer[row & 1, pl.ds(group, 1)]), v.shape)
    refs.scalars[0] = v * beta
    refs.scalars[1] = beta
    refs.scalars[2] = jnp.broadcast_to(jnp.sum(q * k, axis=1, keepdims=True), v.shape)
    decays = decay.T
    columns = _terms(jnp.concatenate([q, k], axis=0)).T
    for h in range(static.heads):
        both = jnp.dot(columns, refs.selectors[h], preferred_element_type=jnp.float32)
        q_h, k_h = both[:, :WIDTH], both[:, WIDTH:]
        state = refs.states[buffer, h] * decays[:, h : h + 1]
        predicted = jnp.sum(state * k_h, axis=0, keepdims=True)
        read = jnp.sum(state * q_h, axis=0, keepdims=True)
        error = refs.scalars[0, h : h + 1] - refs.scalars[1, h : h + 1] * predicted
        refs.states[buffer, h] = state + k_h * error
        refs.outputs[h : h + 1] = read + refs.scalars[2, h : h + 1] * error


def _gated_norm(static: Static, refs: Refs, row: Array, group: Array, dtype: jnp.dtype) -> None:
    """RMS norm, weight, sigmoid gate; rows without a slot output 0, slots that the pool does not have NaN."""
    heads = pl.ds(group * static.heads, static.heads)
    o = refs.outputs[...].astype(dtype).astype(jnp.float32)
    o = o * jax.lax.rsqrt(jnp.mean(o * o, axis=1, keepdims=True) + static.norm_eps) * refs.norm_weight[...]
    o = o * jax.nn.sigmoid(refs.out_gate_buffer[row & 1, heads].astype(jnp.float32))
    slot = refs.slots[row]
    missing = jnp.where(slot == -1, 0.0, jnp.nan)
    refs.out_buffer[row & 1, heads] = jnp.where(_valid(static, slot), o, missing).astype(refs.out_buffer.dtype)


def _kernel(static: Static, dtype: jnp.dtype, *args: Ref) -> None:
    refs = Refs(*args)
    last_row, last_group = static.rows - 1, static.groups - 1

    def fetch_row(row: Array) -> None:
        for copy in _row_copies(refs, row):
            copy.start()

        @pl.when(_valid(static, refs.slots[row]))
        def _() -> None:
            _history_copy(refs, row).start()

    def group_step(row: Array, group: Array, buffer: Array) -> Array:
        """One group of one row; returns the buffer of the next."""
        valid = _valid(static, refs.slots[row])
        upcoming = jnp.where(buffer == BUFFERS - 1, 0, buffer + 1)
        end = group == last_group
        next_row, next_group = jnp.where(end, row + 1, row), jnp.where(end, 0, group + 1)

        # The buffer that the next states go to was left BUFFERS - 1 groups ago; its copy out must be over.
        earlier_row, earlier_group = _before(static, row, group, BUFFERS - 1)

        @pl.when((earlier_row >= 0) & _valid(static, refs.slots[jnp.maximum(earlier_row, 0)]))
        def _() -> None:
            _departing(static, refs, earlier_row, earlier_group, upcoming).wait()

        @pl.when((next_row <= last_row) & _valid(static, refs.slots[jnp.minimum(next_row, last_row)]))
        def _() -> None:
            _arriving(static, refs, next_row, next_group, upcoming).start()

        parts = _convolve(static, refs, row, group, dtype)

        @pl.when(valid)
        def _() -> None:
            _arriving(static, refs, row, group, buffer).wait()

        _recurrence(static, refs, parts, row, group, buffer)

        @pl.when(valid)
        def _() -> None:
            _departing(static, refs, row, group, buffer).start()

        _gated_norm(static, refs, row, group, dtype)
        return upcoming

    def row_step(row: Array, buffer: Array) -> Array:
        valid = _valid(static, refs.slots[row])
        for copy in _row_copies(refs, row):
            copy.wait()

        @pl.when(valid)
        def _() -> None:
            _history_copy(refs, row).wait()

        @pl.when(row < last_row)
        def _() -> None:
            fetch_row(row + 1)

        @pl.when(row >= 2)
        def _() -> None:
            _out_copy(refs, row - 2).wait()

        @pl.when((row >= 2) & _valid(static, refs.slots[jnp.maximum(row - 2, 0)]))
        def _() -> None:
            _moved_copy(refs, row - 2).wait()

        buffer = jax.lax.fori_loop(0, static.groups, lambda g, buffer: group_step(row, g, buffer), buffer)
        _out_copy(refs, row).start()

        @pl.when(valid)
        def _() -> None:
            _moved_copy(refs, row).start()

        return buffer

    first = jnp.int32(0)
    fetch_row(first)

    @pl.when(_valid(static, refs.slots[first]))
    def _() -> None:
        _arriving(static, refs, first, first, first).start()

    buffer = jax.lax.fori_loop(0, static.rows, row_step, first)
    for age in range(1, BUFFERS):
        row, group = _before(static, jnp.int32(static.rows), first, age)

        @pl.when((row >= 0) & _valid(static, refs.slots[jnp.maximum(row, 0)]))
        def _(row: Array = row, group: Array = group, age: int = age) -> None:
            _departing(static, refs, row, group, (buffer + BUFFERS - age) % BUFFERS).wait()

    for last in range(max(static.rows - 2, 0), static.rows):
        _out_copy(refs, jnp.int32(last)).wait()

        @pl.when(_valid(static, refs.slots[last]))
        def _(last: int = last) -> None:
            _moved_copy(refs, jnp.int32(last)).wait()


def _before(static: Static, row: Array, group: Array, age: int) -> tuple[Array, Array]:
    """The row and group `age` groups ago; the row is negative before the first."""
    for _ in range(age):
        start = group == 0
        row, group = jnp.where(start, row - 1, row), jnp.where(start, static.groups - 1, group - 1)
    return row, group


def step(
    qkv: Float[Array, "S C"],
    gate: Float[Array, "S H K"],
    beta: Float[Array, "S H"],
    out_gate: Float[Array, "S H V"],
    conv_pool: Float[Array, "N W-1 C"],
    state_pool: Float[Array, "N H K V"],
    slots: Int[Array, "S"],
    parameters: Parameters,
    conv_weights: Float[Array, "C W"],
    norm_weight: Float[Array, "V"],
    norm_eps: float,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "S H V"], Float[Array, "N W-1 C"], Float[Array, "N H K V"]]:
    """As `decode.step`, in one kernel."""
    rows, heads, _ = gate.shape
    pool, _, key, value = state_pool.shape
    taps = conv_weights.shape[-1]
    if (key, value) != (WIDTH, WIDTH):
        raise NotImplementedError(f"kda_decode_step's tpu body needs K = V = {WIDTH}, not K={key} and V={value}")
    local = next((size for size in GROUP_SIZES if heads % size == 0), heads)
    static = Static(rows, heads // local, local, pool, parameters.lower_bound, parameters.scale, norm_eps)
    wide = jnp.float32
    scale = jnp.broadcast_to(jnp.exp(parameters.a_log.astype(wide))[:, None], (heads, WIDTH))
    hbm, vmem = pl.BlockSpec(memory_space=pltpu.HBM), pl.BlockSpec(memory_space=pltpu.VMEM)
    window = (taps - 1, 3, heads, WIDTH)
    beta = beta.astype(wide).reshape(rows, static.groups, local)
    in_hbm = [qkv.reshape(rows, 3, heads, WIDTH), gate, beta, out_gate]
    pools = [conv_pool.reshape(pool, *window), state_pool]
    if not interpret:
        # Not the pools: the constraint would cost a copy of them.
        in_hbm = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in in_hbm]
    out, conv, state = pl.pallas_call(
        partial(_kernel, static, qkv.dtype),
        out_shape=(
            pltpu.HBM((rows, heads, WIDTH), qkv.dtype),
            pltpu.HBM(pools[0].shape, conv_pool.dtype),
            pltpu.HBM(state_pool.shape, state_pool.dtype),
        ),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), *[hbm] * 4, *[vmem] * 5, hbm, hbm],
        out_specs=(hbm, hbm, hbm),
        input_output_aliases={10: 1, 11: 2},
        scratch_shapes=[
            pltpu.VMEM((2, 3, heads, WIDTH), qkv.dtype),
            pltpu.VMEM((2, heads, WIDTH), gate.dtype),
            pltpu.VMEM((2, static.groups, local), wide),
            pltpu.VMEM((2, heads, WIDTH), out_gate.dtype),
            pltpu.VMEM((2, heads, WIDTH), qkv.dtype),
            pltpu.VMEM((2, *window), conv_pool.dtype),
            pltpu.VMEM((2, *window), conv_pool.dtype),
            pltpu.VMEM((BUFFERS, local, WIDTH, WIDTH), wide),
            pltpu.VMEM((3, local, WIDTH), wide),
            pltpu.VMEM((local, WIDTH), wide),
            pltpu.SemaphoreType.DMA((2, 4)),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA((BUFFERS,)),
            pltpu.SemaphoreType.DMA((BUFFERS,)),
        ],
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),
        name="kda_decode_step",
        interpret=interpret,
    )(
        slots,
        *in_hbm,
        jnp.moveaxis(conv_weights.astype(wide).reshape(3, heads, WIDTH, taps), -1, 0),
        scale,
        scale * parameters.dt_bias.astype(wide),
        norm_weight.astype(wide)[None],
        jnp.asarray(selectors(local)),
        *pools,
    )
    return out, conv.reshape(conv_pool.shape), state
