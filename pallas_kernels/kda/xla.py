"""KDA in chunks (WY form) in plain XLA: the inside of all chunks at once, and one scan for the state.

With G the running sum of the log decays inside a chunk, K and Q normalised and Q scaled:
    L = strict_lower(beta_i sum_c k_ic k_jc exp(G_ic - G_jc));  T = (I + L)^-1 diag(beta)
    R = T V - T (exp(G) * K) S;   O = (exp(G) * Q) S + lower(sum_c q_ic k_jc exp(G_ic - G_jc)) R
    S' = exp(G_end) * S + (exp(G_end - G) * K)^T R
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from pallas_kernels.kda.inputs import Parameters, Segments, compute_dtype, l2_normalise, log_decay

CHUNK = 32  # rows of a step of the scan over states
STRIP = 16  # rows that are solved together; they share their middle row as the reference of their exponents
MIDDLE = STRIP // 2
LARGEST_EXPONENT = 64.0  # leaves 1e-10 for the size of a cotangent before float32 flushes its product to zero


class Static(NamedTuple):
    """What is fixed when the body is traced; strips are joined in pairs `doublings` times."""

    lower_bound: float
    scale: float
    doublings: int


class Tokens(NamedTuple):
    """The inputs cut into N strips of C = 16 rows."""

    q: Float[Array, "N B H C K"]
    k: Float[Array, "N B H C K"]
    v: Float[Array, "N B H C V"]
    gate: Float[Array, "N B H C K"]
    beta: Float[Array, "N B H C"]


class Inputs(NamedTuple):
    """Everything that the inside of a chunk depends on and that differentiates."""

    tokens: Tokens
    a_log: Float[Array, "H"]
    dt_bias: Float[Array, "H K"]


class Rows(NamedTuple):
    """Padding and documents of all strips; `before` is the document that the incoming state belongs to."""

    valid: Bool[Array, "N B 1 C"]
    document: Int[Array, "N B 1 C"]
    before: Int[Array, "N B 1 1"]


class Chunks(NamedTuple):
    """What C rows do to a state: R = update - read S;  O = query S + scores R;  S' = decay * S + write^T R."""

    read: Float[Array, "N B H C K"]
    update: Float[Array, "N B H C V"]
    write: Float[Array, "N B H C K"]
    decay: Float[Array, "N B H K"]
    query: Float[Array, "N B H C K"]
    scores: Float[Array, "N B H C C"]


def _dot(a: Array, b: Array) -> Array:
    # TF32 or bf16 passes would undo the care taken below.
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _t(x: Array) -> Array:
    return jnp.swapaxes(x, -1, -2)


# ---------------------------------------------------------------------------------------------------------------------
# Triangular inverse
# ---------------------------------------------------------------------------------------------------------------------


@jax.custom_vjp
def unit_lower_inverse(lower: Float[Array, "*batch n n"]) -> Float[Array, "*batch n n"]:
    """(I + lower)^-1 of small strictly lower triangular matrices, row by row: X_i = e_i - lower_i X.

    Substitution is stable where powers of `lower` would cancel (keys alike, slow decay).
    """
    n = lower.shape[-1]
    rows = jnp.moveaxis(lower, -2, 0)

    def row(i: Array, x: Array) -> Array:
        return x.at[i].add(-jnp.einsum("...j,j...k->...k", rows[i], x, precision=jax.lax.Precision.HIGHEST))

    eye = jnp.eye(n, dtype=lower.dtype).reshape(n, *(1,) * (lower.ndim - 2), n)
    return jnp.moveaxis(jax.lax.fori_loop(1, n, row, jnp.broadcast_to(eye, rows.shape)), 0, -2)


def _unit_lower_inverse_fwd(lower: Array) -> tuple[Array, Array]:
    x = unit_lower_inverse(lower)
    return x, x


def _unit_lower_inverse_bwd(x: Array, dx: Array) -> tuple[Array]:
    return (jnp.tril(-_dot(_dot(_t(x), dx), _t(x)), -1),)


unit_lower_inverse.defvjp(_unit_lower_inverse_fwd, _unit_lower_inverse_bwd)


# ---------------------------------------------------------------------------------------------------------------------
# Inside a chunk
# ---------------------------------------------------------------------------------------------------------------------


def _signed_sums(dtype: np.dtype) -> np.ndarray:
    """[STRIP, STRIP] matrix M with (M g)_i = G_i - G_MIDDLE, summed directly so that nothing large cancels."""
    i, t = np.arange(STRIP)[:, None], np.arange(STRIP)
    return ((t > MIDDLE) & (t <= i)).astype(dtype) - ((t > i) & (t <= MIDDLE)).astype(dtype)


def _prepare(static: Static, rows: Rows | None, inputs: Inputs) -> tuple[Array, Array, Array, Array, Array]:
    """Normalised q and k, v, log decays and beta in the compute dtype, with padding made harmless."""
    dtype = compute_dtype(inputs.tokens.q)
    q, k, v, gate, beta = (x.astype(dtype) for x in inputs.tokens)
    a_log, dt_bias = inputs.a_log.astype(dtype)[:, None, None], inputs.dt_bias.astype(dtype)[:, None]
    if rows is not None:
        q, k, v, gate = (jnp.where(rows.valid[..., None], x, 0) for x in (q, k, v, gate))
        beta = jnp.where(rows.valid, beta, 0)
    g = log_decay(gate, a_log, dt_bias, static.lower_bound)
    if rows is not None:
        g = jnp.where(rows.valid[..., None], g, 0)
    return l2_normalise(q) * static.scale, l2_normalise(k), v, g, beta


def _intra(static: Static, rows: Rows | None, inputs: Inputs) -> Chunks:
    """The WY form of every strip.

    exp(G_i - G_j) is up_i * down_j. Sixteen rows keep both within exp(+-40) at a bound of -5; 32 rows would reach
    exp(+-80), where float32 flushes small cotangents to zero and the gate's gradient is lost when gates saturate.
    """
    q, k, v, g, beta = _prepare(static, rows, inputs)
    centred = _dot(jnp.broadcast_to(_signed_sums(g.dtype), (*g.shape[:-1], STRIP)), g)
    up, down = jnp.exp(centred), jnp.exp(-centred)
    to_middle = jnp.exp(g[..., :1, :] - centred[..., :1, :])  # exp(G_MIDDLE)
    to_end = up[..., -1:, :]  # exp(G_end - G_MIDDLE)
    k_up, q_up, k_down = k * up, q * up, k * down
    strict = np.tri(STRIP, k=-1, dtype=bool)
    if rows is not None:
        strict = strict & (rows.document[..., :, None] == rows.document[..., None, :])
    lower = beta[..., None] * jnp.where(strict, _dot(k_up, _t(k_down)), 0)
    solve = unit_lower_inverse(lower) * beta[..., None, :]
    # The diagonal apart: its two exponentials cancel, and so do its parts of the gate's gradient, but only on paper.
    diagonal = jnp.eye(STRIP, dtype=q.dtype) * jnp.sum(q * k, axis=-1)[..., None]
    scores = jnp.where(strict, _dot(q_up, _t(k_down)), diagonal)
    read, query, write = k_up * to_middle, q_up * to_middle, k_down * to_end
    decay = (to_middle * to_end)[..., 0, :]
    if rows is not None:
        read, query, write, decay = _cut_documents(rows, read, query, write, decay)
    return Chunks(_dot(solve, read), _dot(solve, v), write, decay, query, scores)


def _cut_documents(rows: Rows, read: Array, query: Array, write: Array, decay: Array) -> tuple[Array, ...]:
    """Only rows of the incoming document see the incoming state; only rows of the last document leave anything."""
    after = rows.document[..., -1:]
    first, last = (rows.document == rows.before)[..., None], (rows.document == after)[..., None]
    return (
        jnp.where(first, read, 0),
        jnp.where(first, query, 0),
        jnp.where(last, write, 0),
        jnp.where(after == rows.before, decay, 0),
    )


def _pair(chunks: Chunks) -> Chunks:
    """Every two neighbours as one chunk of twice the rows: the second reads the state that the first leaves."""
    a, b = Chunks(*(x[0::2] for x in chunks)), Chunks(*(x[1::2] for x in chunks))
    decay = a.decay[..., None, :]
    through = _dot(b.read, _t(a.write))
    corner = _dot(b.query, _t(a.write))

    def rows(first: Array, second: Array) -> Array:
        return jnp.concatenate([first, second], axis=-2)

    return Chunks(
        read=rows(a.read, b.read * decay - _dot(through, a.read)),
        update=rows(a.update, b.update - _dot(through, a.update)),
        write=rows(a.write * b.decay[..., None, :], b.write),
        decay=a.decay * b.decay,
        query=rows(a.query, b.query * decay),
        scores=rows(
            jnp.concatenate([a.scores, jnp.zeros_like(corner)], axis=-1),
            jnp.concatenate([corner, b.scores], axis=-1),
        ),
    )


def _chunks(static: Static, rows: Rows | None, inputs: Inputs) -> Chunks:
    chunks = _intra(static, rows, inputs)
    for _ in range(static.doublings):
        chunks = _pair(chunks)
    return chunks


# ---------------------------------------------------------------------------------------------------------------------
# From chunk to chunk
# ---------------------------------------------------------------------------------------------------------------------


class Saved(NamedTuple):
    """What the forward pass leaves to the backward pass besides its inputs."""

    before: Float[Array, "N B H K V"]  # the state that every chunk starts from
    residual: Float[Array, "N B H C V"]  # R of the module's docstring


def _run(chunks: Chunks, initial: Float[Array, "B H K V"]) -> tuple[Array, Array, Saved]:
    """Outputs, the last state, and what the backward pass needs."""

    def chunk(state: Array, inputs: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        read, update, write, decay = inputs
        residual = update - _dot(read, state)
        return decay[..., None] * state + _dot(_t(write), residual), (state, residual)

    final, saved = jax.lax.scan(chunk, initial, (chunks.read, chunks.update, chunks.write, chunks.decay))
    before, residual = saved
    return _dot(chunks.query, before) + _dot(chunks.scores, residual), final, Saved(before, residual)


def _run_bwd(chunks: Chunks, saved: Saved, doutput: Array, dfinal: Array) -> tuple[Chunks, Array]:
    """The transpose of `_run`: a reversed scan for the states' cotangents, the rest for all chunks at once."""
    before, residual = saved

    def chunk(dstate: Array, inputs: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        read, write, decay, dbefore, dresidual = inputs
        dresidual += _dot(write, dstate)
        return dbefore + decay[..., None] * dstate - _dot(_t(read), dresidual), (dstate, dresidual)

    direct = _dot(_t(chunks.query), doutput), _dot(_t(chunks.scores), doutput)
    xs = (chunks.read, chunks.write, chunks.decay, *direct)
    dinitial, (dafter, dresidual) = jax.lax.scan(chunk, dfinal, xs, reverse=True)
    dchunks = Chunks(
        read=-_dot(dresidual, _t(before)),
        update=dresidual,
        write=_dot(residual, _t(dafter)),
        decay=jnp.sum(before * dafter, -1),
        query=_dot(doutput, _t(before)),
        scores=_dot(doutput, _t(residual)),
    )
    return dchunks, dinitial


Residuals = tuple[Inputs, Rows | None, Saved]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(static: Static, inputs: Inputs, initial: Array, rows: Rows | None) -> tuple[Array, Array]:
    """Outputs [N, B, H, C, V] and the last state; differentiation keeps the inputs, the states and R, nothing else."""
    output, final, _ = _run(_chunks(static, rows, inputs), initial)
    return output, final


def _chunked_fwd(
    static: Static, inputs: Inputs, initial: Array, rows: Rows | None
) -> tuple[tuple[Array, Array], Residuals]:
    output, final, saved = _run(_chunks(static, rows, inputs), initial)
    return (output, final), (inputs, rows, saved)


def _chunked_bwd(static: Static, residuals: Residuals, cotangents: tuple[Array, Array]) -> tuple[Inputs, Array, None]:
    inputs, rows, saved = residuals
    chunks, pull = jax.vjp(partial(_chunks, static, rows), inputs)
    dchunks, dinitial = _run_bwd(chunks, saved, *cotangents)
    (dinputs,) = pull(dchunks)
    return dinputs, dinitial, None


_chunked.defvjp(_chunked_fwd, _chunked_bwd)


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
    chunk: int = CHUNK,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """As `reference.forward`, `chunk` tokens at a time: 16 times a power of two.

    64 halves the steps of the scan and adds matmul work inside the chunk: slower on a CPU at K = 48 and 64.
    """
    static, inputs, rows = _cut_inputs(Tokens(q, k, v, gate, beta), parameters, segments, chunk)
    output, state = _chunked(static, inputs, initial_state.astype(compute_dtype(q)), rows)
    return _uncut(output, v), state


def forward_with_states(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    gate: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    initial_state: Float[Array, "B H K V"],
    parameters: Parameters,
    segments: Segments | None,
    *,
    states_every: int,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"], Float[Array, "B N H K V"]]:
    """As `reference.forward_with_states`; differentiation keeps more than that of `forward`."""
    static, inputs, rows = _cut_inputs(Tokens(q, k, v, gate, beta), parameters, segments, CHUNK)
    output, state, saved = _run(_chunks(static, rows, inputs), initial_state.astype(compute_dtype(q)))
    after, step = jnp.concatenate([saved.before[1:], state[None]]), states_every // CHUNK
    states = after[step - 1 : q.shape[1] // states_every * step : step]
    return _uncut(output, v), state, jnp.moveaxis(states, 0, 1)


def chunks_of(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    gate: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    parameters: Parameters,
    segments: Segments | None,
    *,
    chunk: int,
) -> Chunks:
    """What every `chunk` tokens do to a state, as `forward` has it."""
    static, inputs, rows = _cut_inputs(Tokens(q, k, v, gate, beta), parameters, segments, chunk)
    return _chunks(static, rows, inputs)


def _cut_inputs(
    tokens: Tokens, parameters: Parameters, segments: Segments | None, chunk: int
) -> tuple[Static, Inputs, Rows | None]:
    a_log, dt_bias, lower_bound, scale = parameters
    if -lower_bound * MIDDLE > LARGEST_EXPONENT:
        lowest = -LARGEST_EXPONENT / MIDDLE
        raise NotImplementedError(f"kda's xla body needs lower_bound >= {lowest}, not {lower_bound}: use 'reference'")
    batch, length = tokens.q.shape[:2]
    padding = -length % chunk
    if padding and segments is None:
        segments = Segments(jnp.ones((batch, length), bool), jnp.zeros((batch, length), jnp.int32))
    rows = None if segments is None else _rows(segments, padding)
    static = Static(lower_bound, scale, doublings=(chunk // STRIP).bit_length() - 1)
    return static, Inputs(Tokens(*(_cut(x, padding) for x in tokens)), a_log, dt_bias), rows


def _uncut(output: Float[Array, "N B H C V"], v: Float[Array, "B T H V"]) -> Float[Array, "B T H V"]:
    """Rows in order, in `v`'s length and dtype."""
    output = jnp.transpose(output, (1, 0, 3, 2, 4)).reshape(v.shape[0], -1, *v.shape[2:])
    return output[:, : v.shape[1]].astype(v.dtype)


def _cut(x: Array, padding: int, mode: str = "constant") -> Array:
    """[B, T, H, ...] -> [N, B, H, C, ...]: strips first, for the scan, and rows inside heads, for the matmuls."""
    x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2), mode=mode)
    x = x.reshape(x.shape[0], -1, STRIP, *x.shape[2:])
    return jnp.transpose(x, (1, 0, 3, 2, *range(4, x.ndim)))


def _rows(segments: Segments, padding: int) -> Rows:
    valid = _cut(segments.valid[..., None], padding)
    document = _cut(segments.document[..., None], padding, "edge")
    first = jnp.zeros_like(document[:1, ..., :1])
    return Rows(valid, document, jnp.concatenate([first, document[:-1, ..., -1:]]))
