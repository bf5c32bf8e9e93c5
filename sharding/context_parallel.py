"""KDA over rows that are cut into contiguous pieces along a mesh axis, shard 0 holding the first tokens.

What a piece does to the recurrent state is affine per head, S_out = M S_in + C, M = prod (I - beta k k^T) diag(decay).
Each shard measures M and C of its piece, all shards gather them and apply those before their own to the row's initial
state, and then run their piece from the result. The backward pass sends cotangents the other way:
    dS_in = M^T dS_out + sum_t p_t do_t^T,   p_t what token t reads from a state of I before the piece.
The local kernel measures all of this: from a state of zero it ends in C; with values of zero, from a state of I, it
ends in M and outputs the p_t. Documents need no care here: a piece that starts one forgets S_in, so that its M is zero.

The functions are called inside a `shard_map`, with the name of the axis; None is a row in one piece. Gradients of
arguments that are equal on all shards (a_log, dt_bias, conv weights, initial states) are each shard's part of a sum
over the axis.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int, Num

Local = Callable[..., tuple[Array, Array]]


def context_parallel_kda(
    kda: Local,
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    gate: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    *,
    axis: str | None,
    a_log: Float[Array, "H"],
    dt_bias: Float[Array, "H K"],
    initial_state: Float[Array, "B H K V"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Run `kda` on this shard's T tokens of rows that continue over the shards of `axis`.

    `kda` has the signature of `pallas_kernels.kda.kda`, its lower bound already given; the rest are its arguments.
    Segment ids do not decrease along the whole row, -1 is padding. `initial_state` is the row's, equal on all shards,
    as is the returned state after the row's last token. Costs three local runs forward and one backward.
    """
    arrays = {"q": q, "k": k, "v": v, "gate": gate, "beta": beta, "a_log": a_log, "dt_bias": dt_bias}
    if axis is None or jax.lax.axis_size(axis) == 1:
        return kda(**arrays, initial_state=initial_state, segment_ids=segment_ids)
    wide = jnp.promote_types(jnp.float32, q.dtype)
    if initial_state is None:
        initial_state = jnp.zeros((q.shape[0], *q.shape[2:], v.shape[-1]), wide)
    arrays, initial_state, segment_ids = _varying((arrays, initial_state.astype(wide), segment_ids), axis, q)
    output, outgoing = _run(kda, axis, arrays, initial_state, segment_ids)
    return output, _of_shard(jax.lax.axis_size(axis) - 1, outgoing, axis)


def context_parallel_short_conv(
    short_conv: Local,
    x: Float[Array, "B T C"],
    weights: Float[Array, "C W"],
    *,
    axis: str | None,
    initial_state: Float[Array, "B W-1 C"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T C"], Float[Array, "B W-1 C"]]:
    """Run `short_conv` on this shard's T tokens after the W - 1 inputs before them, which the neighbour sends.

    `short_conv` is `pallas_kernels.short_conv.short_conv` or one like it; arguments and the returned state as in
    `context_parallel_kda`, padding at the end of a row only. Raises ValueError where T < W - 1.
    """
    length, history = x.shape[1], weights.shape[1] - 1
    size = 1 if axis is None else jax.lax.axis_size(axis)
    if axis is None or size == 1:
        return short_conv(x, weights, initial_state=initial_state, segment_ids=segment_ids)
    if length < history:
        raise ValueError(f"a shard of {length} tokens is too short for {history + 1} taps: it needs {history} or more")
    if initial_state is None:
        initial_state = jnp.zeros((x.shape[0], history, x.shape[2]), x.dtype)
    x, weights, initial_state, segment_ids = _varying((x, weights, initial_state, segment_ids), axis, x)
    before, last = _from_the_left(x[:, length - history :], axis), size - 1
    if segment_ids is not None:
        ids, first = _from_the_left(segment_ids[:, length - history :], axis), segment_ids[:, :1]
        before = jnp.where(((ids == first) & (first >= 0))[..., None], before, 0)  # padding may hold NaN
        last = jax.lax.pmax(jnp.where(first[:, 0] >= 0, jax.lax.axis_index(axis), 0), axis)
    before = jnp.where(jax.lax.axis_index(axis) == 0, initial_state.astype(x.dtype), before)
    y, state = short_conv(x, weights, initial_state=before, segment_ids=segment_ids)
    return y, _of_shard(last, state, axis)


# ---------------------------------------------------------------------------------------------------------------------
# A run with the exchange of states before it, and of their cotangents before its backward pass
# ---------------------------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """What one shard's tokens do to a state: S -> transition S + addition."""

    transition: Float[Array, "B H K K"]
    addition: Float[Array, "B H K V"]


class Measured(NamedTuple):
    """What a shard knows about its own piece besides `Piece.addition`, and about the order of all."""

    transition: Float[Array, "B H K K"]
    reads: Float[Array, "B T H K"]
    continues: Bool[Array, "N B"]  # whether the state that reaches shard n belongs to its first document


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _run(
    kda: Local, axis: str, arrays: dict[str, Array], initial_state: Array, segment_ids: Array | None
) -> tuple[Array, Array]:
    """The outputs of this shard's tokens and the state after them."""
    incoming, _ = _exchange(kda, axis, arrays, initial_state, segment_ids)
    return kda(**arrays, initial_state=incoming, segment_ids=segment_ids)


def _run_fwd(
    kda: Local, axis: str, arrays: dict[str, Array], initial_state: Array, segment_ids: Array | None
) -> tuple[tuple[Array, Array], tuple[Any, Measured]]:
    incoming, measured = _exchange(kda, axis, arrays, initial_state, segment_ids)

    def local(arrays: dict[str, Array], incoming: Array) -> tuple[Array, Array]:
        return kda(**arrays, initial_state=incoming, segment_ids=segment_ids)

    results, pull = jax.vjp(local, arrays, incoming)
    return results, (pull, measured)


def _run_bwd(
    kda: Local, axis: str, saved: tuple[Any, Measured], cotangents: tuple[Array, Array]
) -> tuple[dict[str, Array], Array, None]:
    (pull, measured), (doutput, doutgoing) = saved, cotangents
    pulled = jnp.swapaxes(measured.transition, -1, -2)
    # The cotangent of S_in by way of what this shard returns; later shards' by way of S_out comes on top.
    own = _dot(pulled, doutgoing) + jnp.einsum(
        "bthk,bthv->bhkv",
        measured.reads,
        doutput,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=doutgoing.dtype,
    )
    nothing = jnp.zeros_like(own)
    after = jnp.roll(measured.continues, -1, axis=0)
    from_later, dinitial = _compose(axis, Piece(pulled, own), nothing, after, reverse=True)
    darrays, _ = pull((doutput, doutgoing + from_later))
    # Every shard has the whole gradient of the initial state; one may return it.
    return darrays, jnp.where(jax.lax.axis_index(axis) == 0, dinitial, 0), None


_run.defvjp(_run_fwd, _run_bwd)


def _exchange(
    kda: Local, axis: str, arrays: dict[str, Array], initial_state: Array, segment_ids: Array | None
) -> tuple[Array, Measured]:
    """The state that this shard starts from."""
    batch, _, heads, width = arrays["k"].shape
    one = jnp.broadcast_to(jnp.eye(width, dtype=initial_state.dtype), (batch, heads, width, width))
    constants = one, jnp.zeros_like(initial_state), jnp.zeros(arrays["k"].shape, arrays["v"].dtype)
    one, zero, no_values = _varying(constants, axis, arrays["k"])
    reads, transition = kda(**(arrays | {"v": no_values}), initial_state=one, segment_ids=segment_ids)
    _, addition = kda(**arrays, initial_state=zero, segment_ids=segment_ids)
    continues = _continues(axis, segment_ids, batch)
    incoming, _ = _compose(axis, Piece(transition, addition), initial_state, continues)
    return incoming, Measured(transition, reads, continues)


def _compose(
    axis: str, piece: Piece, state: Float[Array, "B H K V"], continues: Bool[Array, "N B"], *, reverse: bool = False
) -> tuple[Float[Array, "B H K V"], Float[Array, "B H K V"]]:
    """Take a state through the pieces of all shards; returns what reaches this shard's and what leaves the last."""
    index = jax.lax.axis_index(axis)

    def through(states: tuple[Array, Array], inputs: tuple[Array, Piece, Array]) -> tuple[tuple[Array, Array], None]:
        (state, mine), (shard, piece, continues) = states, inputs
        state = jnp.where(continues[:, None, None, None], state, 0)
        return (_dot(piece.transition, state) + piece.addition, jnp.where(shard == index, state, mine)), None

    pieces = jax.lax.all_gather(piece, axis)
    shards = jnp.arange(continues.shape[0])
    (leaving, mine), _ = jax.lax.scan(through, (state, state), (shards, pieces, continues), reverse=reverse)
    return mine, leaving


def _continues(axis: str, segment_ids: Int[Array, "B T"] | None, batch: int) -> Bool[Array, "N B"]:
    """Whether each shard's first document is the one that the tokens before it end with; padding lets states pass."""
    if segment_ids is None:
        return jnp.ones((jax.lax.axis_size(axis), batch), bool)
    none = jnp.iinfo(segment_ids.dtype).max
    first = jnp.min(jnp.where(segment_ids >= 0, segment_ids, none), axis=1)
    first, last = jax.lax.all_gather((first, jnp.max(segment_ids, axis=1)), axis)
    before = jnp.pad(jax.lax.cummax(last), ((1, 0), (0, 0)), constant_values=-1)[:-1]
    return (first == none) | (before < 0) | (first == before)


# ---------------------------------------------------------------------------------------------------------------------
# Small parts
# ---------------------------------------------------------------------------------------------------------------------


def _dot(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _varying(tree: Any, axis: str, like: Array) -> Any:
    """The same values, said to differ between shards of `axis` and wherever `like` does (for `check_vma`)."""
    axes = jax.typeof(like).manual_axis_type.varying | {axis}

    def one(x: Array) -> Array:
        missing = tuple(sorted(axes - jax.typeof(x).manual_axis_type.varying))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(one, tree)


def _of_shard(shard: int | Int[Array, "B"], x: Num[Array, "B ..."], axis: str) -> Num[Array, "B ..."]:
    """The value that one shard has, on all shards; exact, as the others add zeros."""
    own = jnp.broadcast_to(jax.lax.axis_index(axis) == shard, x.shape[:1])
    return jax.lax.psum(jnp.where(own.reshape(-1, *(1,) * (x.ndim - 1)), x, 0), axis)


def _from_the_left(x: Array, axis: str) -> Array:
    """What the shard before this one has; zeros on shard 0."""
    return jax.lax.ppermute(x, axis, [(i, i + 1) for i in range(jax.lax.axis_size(axis) - 1)])
