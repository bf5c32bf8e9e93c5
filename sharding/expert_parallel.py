"""Experts spread over the devices of mesh axes; called inside a `shard_map`, with the local computation as an argument.

    gathered   every device sees all tokens and computes its own experts' rows; results are summed
    balanced   rows travel, and every device computes exactly as many, with copies of hot experts (`expert_plan`)

Both have static shapes, drop nothing and never wait for a host. In the balanced form a device with S tokens computes
S k rows whatever the router chose; invalid tokens have none, and the rest are split evenly. Rows are exchanged twice
forward, twice for gradients, and twice more where the layer is computed again; once where `OUTPUT` and `PLAN` are kept.
A choice's weight, one number, goes with its row, so that its gradient comes back from where the expert's output is and
no output has to be sent again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, Float, Int32

from sharding.expert_plan import Copies, Leg, balance, copies, routes
from sharding.expert_rows import FEW, exchange, order_by_expert, ragged, spread, spread_weights, together

Axes = tuple[str, ...]
Weights = Any  # a pytree whose leaves have a leading axis of experts
# (rows [M, L], weights of G experts, group_sizes [G], row_weights [M]) -> each row's output times its weight [M, L].
# Rows past the last group may hold NaN; they give 0, and reach no gradient.
Compute = Callable[[Array, Weights, Array, Array], Array]
Form = Literal["gathered", "balanced"]

# Names for a checkpoint policy: where rows go, some bytes each; the rows that a device received, S k of the latent's
# width; and, for the caller to name, what it makes of `route`'s result: where that is not kept, a recomputation sends
# all outputs back a second time.
PLAN, ROWS, OUTPUT = "expert_plan", "expert_rows", "expert_output"


def route(
    latent: Float[Array, "S l"],
    experts: Int32[Array, "S k"],
    weights: Float[Array, "S k"],
    valid: Bool[Array, " S"] | None,
    expert_weights: Weights,
    compute: Compute,
    *,
    count: int,
    axes: Axes,
    form: Form,
    token_axes: Axes | None = None,
    latent_axes: Axes = (),
    buffer_bytes: int = 2**28,
) -> Float[Array, "S L"]:
    """Each token's sum over its experts' outputs times its weights, float32 or wider; 0 for tokens that are not valid.

    A token's `experts` are different ones; `expert_weights` are this device's part of `count`, spread over `axes`. Of
    these `token_axes` (by default all) have other tokens along them, and `latent_axes` other parts of the latent: the
    gathered form gives whole latents then, the balanced form parts like those that came. Tokens are routed in as many
    parts as keep the rows of one under `buffer_bytes`; it bounds all temporaries but the rows of all parts, which a
    gradient keeps.
    """
    token_axes = axes if token_axes is None else token_axes
    local = count // jax.lax.axis_size(axes)
    if valid is not None:
        experts, latent = jnp.where(valid[:, None], experts, count), jnp.where(valid[:, None], latent, 0)
    if form == "gathered":
        run = functools.partial(_gathered, axes, token_axes, latent_axes, local, compute)
        copies_of_tokens = jax.lax.axis_size(token_axes) if token_axes else 1
        rows = copies_of_tokens * min(local, experts.shape[1])
        width = latent.shape[1] * (jax.lax.axis_size(latent_axes) if latent_axes else 1)
        row_bytes = rows * width * latent.dtype.itemsize
        return _in_parts(run, (latent, experts, weights), expert_weights, row_bytes, buffer_bytes)
    others = tuple(axis for axis in axes if axis not in token_axes)
    tokens = latent.shape[0]
    latent, experts, weights = _own_tokens(others, latent_axes, latent, experts, weights, count)
    run = functools.partial(_balanced, axes, local, compute)
    row_bytes = experts.shape[1] * latent.shape[1] * latent.dtype.itemsize
    out = _in_parts(run, (latent, experts, weights), expert_weights, row_bytes, buffer_bytes)
    return _back_to(others, latent_axes, out, tokens)


def _in_parts(
    run: Callable[..., Array], tokens: tuple[Array, ...], expert_weights: Weights, token_bytes: int, limit: int
) -> Array:
    """Run on all tokens, or on one part after another where their rows would take more bytes than `limit`."""
    count = tokens[0].shape[0]
    parts = next(n for n in range(1, count + 1) if count % n == 0 and (count // n * token_bytes <= limit or n == count))
    if parts == 1:
        return run(*tokens, expert_weights)

    # The gradient of a part finds its rows and computes what is between; each part has copies of its own hot experts.
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(PLAN, ROWS))
    def part(tokens: tuple[Array, ...]) -> Array:
        return run(*tokens, expert_weights)

    out = jax.lax.map(part, jax.tree.map(lambda x: x.reshape(parts, -1, x.shape[-1]), tokens))
    return out.reshape(count, -1)


def load_of(experts: Int32[Array, "S k"], valid: Bool[Array, " S"] | None, count: int) -> Int32[Array, " E"]:
    """How many of these tokens chose each of `count` experts."""
    chosen = experts if valid is None else jnp.where(valid[:, None], experts, count)
    return jnp.sum(chosen.reshape(-1, 1) == jnp.arange(count), axis=0, dtype=jnp.int32)


# ---------------------------------------------------------------------------------------------------------------------
# Gathered
# ---------------------------------------------------------------------------------------------------------------------


def _gathered(
    axes: Axes,
    token_axes: Axes,
    latent_axes: Axes,
    local: int,
    compute: Compute,
    latent: Array,
    experts: Array,
    weights: Array,
    own: Weights,
) -> Array:
    latent, experts, weights = _all_tokens(token_axes, latent_axes, latent, experts, weights)
    ids = experts - jax.lax.axis_index(axes) * local
    ids = jnp.where((ids >= 0) & (ids < local), ids, local)
    most = latent.shape[0] * min(local, experts.shape[1])
    usual = -(-4 * experts.size // jax.lax.axis_size(axes))

    def computed(rows: int) -> Array:
        order = order_by_expert(ids, local, rows)
        return together(compute(spread(latent, order), own, order.sizes, spread_weights(weights, order)), order)

    if latent.shape[0] <= FEW and usual < most:
        few = jnp.sum(ids < local) <= usual  # four times the mean; kernels want to know how few rows come
        whole = jax.lax.cond(few, lambda: computed(usual), lambda: computed(most))
    else:
        whole = computed(most)
    if latent_axes:  # whole, as the norm that follows would have to sum over parts once more
        return _share(jax.lax.psum(whole, axes), token_axes)
    kept = jax.lax.psum_scatter(whole, token_axes, tiled=True) if token_axes else whole
    rest = tuple(axis for axis in axes if axis not in token_axes)
    return jax.lax.psum(kept, rest) if rest else kept


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _all_tokens(
    token_axes: Axes, latent_axes: Axes, latent: Array, experts: Array, weights: Array
) -> tuple[Array, Array, Array]:
    """All tokens' whole latents, choices and weights, as bits side by side in one collective."""
    axes, parts = (*token_axes, *latent_axes), (latent, experts, weights)
    if not axes:
        return parts
    bits = [jax.lax.bitcast_convert_type(x, jnp.uint16).reshape(x.shape[0], -1) for x in parts]
    gathered = jax.lax.all_gather(jnp.concatenate(bits, axis=1), axes, tiled=True)
    found, first = [], 0
    for x, packed in zip(parts, bits, strict=True):
        piece = gathered[:, first : first + packed.shape[1]]
        piece = piece if x.dtype.itemsize == 2 else piece.reshape(-1, x.shape[1], x.dtype.itemsize // 2)
        found.append(_joined(jax.lax.bitcast_convert_type(piece, x.dtype), token_axes, latent_axes))
        first += packed.shape[1]
    return found[0], found[1][:, : experts.shape[1]], found[2][:, : weights.shape[1]]


def _all_tokens_backward(
    token_axes: Axes, latent_axes: Axes, _: None, g: tuple[Array, Array, Array]
) -> tuple[Array, None, Array]:
    axes = (*token_axes, *latent_axes)
    if not axes:
        return g[0], None, g[2]
    wide = jnp.promote_types(jnp.float32, g[0].dtype)
    parts = _split(g[0].astype(wide), token_axes, latent_axes)
    latent = jax.lax.psum_scatter(parts, axes, tiled=True).astype(g[0].dtype)
    return latent, None, jax.lax.psum_scatter(g[2], token_axes, tiled=True) if token_axes else g[2]


_all_tokens.defvjp(lambda t, l, *tokens: (_all_tokens(t, l, *tokens), None), _all_tokens_backward)


def _joined(x: Array, token_axes: Axes, latent_axes: Axes) -> Array:
    """[T * W * S, w], devices before tokens, as [T * S, W * w]."""
    if not latent_axes:
        return x
    tall = jax.lax.axis_size(token_axes) if token_axes else 1
    x = x.reshape(tall, jax.lax.axis_size(latent_axes), -1, x.shape[1])
    return jnp.swapaxes(x, 1, 2).reshape(tall * x.shape[2], -1)


def _split(x: Array, token_axes: Axes, latent_axes: Axes) -> Array:
    """Undo `_joined`."""
    if not latent_axes:
        return x
    tall, wide = jax.lax.axis_size(token_axes) if token_axes else 1, jax.lax.axis_size(latent_axes)
    x = jnp.swapaxes(x.reshape(tall, x.shape[0] // tall, wide, -1), 1, 2)
    return x.reshape(-1, x.shape[-1])


# ---------------------------------------------------------------------------------------------------------------------
# Balanced
# ---------------------------------------------------------------------------------------------------------------------


def _own_tokens(
    others: Axes, latent_axes: Axes, latent: Array, experts: Array, weights: Array, count: int
) -> tuple[Array, Array, Array]:
    """This device's share of tokens that are the same along the axes `others`, with the whole latent."""
    size = jax.lax.axis_size(others) if others else 1
    rows = ((0, -latent.shape[0] % size), (0, 0))
    latent, weights = jnp.pad(latent, rows), jnp.pad(weights, rows)
    experts = jnp.pad(experts, rows, constant_values=count)
    if latent_axes == others:
        latent = jax.lax.all_to_all(latent, others, 0, 1, tiled=True) if others else latent
        return latent, _share(experts, others), _share(weights, others)
    latent = jax.lax.all_gather(latent, latent_axes, axis=1, tiled=True) if latent_axes else latent
    return _share(latent, others), _share(experts, others), _share(weights, others)


def _back_to(others: Axes, latent_axes: Axes, out: Array, tokens: int) -> Array:
    """All tokens of the devices along `others`, with this device's part of the latent."""
    if latent_axes == others:
        return (jax.lax.all_to_all(out, others, 1, 0, tiled=True) if others else out)[:tokens]
    out = jax.lax.all_gather(out, others, tiled=True)[:tokens] if others else out
    return _share(out.T, latent_axes).T


def _share(x: Array, axes: Axes) -> Array:
    """The rows of this device, where those along `axes` take equal parts."""
    if not axes:
        return x
    size = x.shape[0] // jax.lax.axis_size(axes)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * size, size)


def _balanced(
    axes: Axes, local: int, compute: Compute, latent: Array, experts: Array, weights: Array, own: Weights
) -> Array:
    rank = jax.lax.axis_index(axes)
    order = order_by_expert(experts, local * jax.lax.axis_size(axes), experts.size)
    counts = jax.lax.all_gather(order.sizes, axes)
    plan = balance(jnp.sum(counts, axis=0).reshape(-1, local).sum(axis=1))
    known = (order, routes(counts, plan, rank), copies(counts, plan))
    order, (source, target, group_sizes), needed = checkpoint_name(known, PLAN)
    there = functools.partial(exchange, axes, experts.size, away=source, home=target)
    rows = checkpoint_name(there(spread(latent, order)), ROWS)
    row_weights = checkpoint_name(there(spread_weights(weights, order)), PLAN)
    out = compute(rows, with_copies(own, needed, axes), group_sizes, row_weights)
    return together(exchange(axes, experts.size, out, target, source), order)


def with_copies(own: Weights, needed: Copies, axes: Axes) -> Weights:
    """This device's G experts followed by copies of its donor's, [2G, ...]: those needed, 0 for the others.

    Gradients of copies are added to the donor's, in float32 or wider, one recipient of each donor at a time.
    """

    def one(leaf: Array) -> Array:
        send = _with_copies if jnp.issubdtype(leaf.dtype, jnp.floating) else _with_copies.fun
        return send(axes, leaf, needed)

    return jax.tree.map(one, own)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_copies(axes: Axes, own: Array, needed: Copies) -> Array:
    local = own.shape[0]
    out, back = _legs(needed, jnp.ones(needed.donor.shape, bool), jax.lax.axis_index(axes))
    return ragged(own, jnp.concatenate([own, jnp.zeros_like(own)]), out._replace(there=out.there + local), back, axes)


def _with_copies_backward(axes: Axes, needed: Copies, g: Array) -> tuple[Array, None]:
    local, rank = g.shape[0] // 2, jax.lax.axis_index(axes)
    wide, of_copies = jnp.promote_types(jnp.float32, g.dtype), g[local:]

    def add(turn: Array, own: Array) -> Array:
        out, back = _legs(needed, needed.turn == turn, rank)
        returned = ragged(of_copies, jnp.zeros_like(own), back, out, axes)
        return (own.astype(wide) + returned.astype(wide)).astype(own.dtype)

    turns = jnp.max(jnp.where(needed.number > 0, needed.turn + 1, 0))
    return jax.lax.fori_loop(0, turns, add, g[:local]), None


_with_copies.defvjp(lambda axes, own, needed: (_with_copies(axes, own, needed), needed), _with_copies_backward)


def _legs(needed: Copies, now: Array, rank: Array) -> tuple[Leg, Leg]:
    """What a rank sends as a donor and what it receives, for the recipients that are served `now`."""
    count, ranks = jnp.where(now, needed.number, 0), jnp.arange(needed.donor.shape[0])
    out = Leg(needed.first, needed.first, jnp.where(needed.donor == rank, count, 0))
    first = jnp.full_like(needed.first, needed.first[rank])
    return out, Leg(first, first, jnp.where(ranks == needed.donor[rank], count[rank], 0))


# ---------------------------------------------------------------------------------------------------------------------
# Choice
# ---------------------------------------------------------------------------------------------------------------------


class Rates(NamedTuple):
    """What one device does in a second: floating-point operations, bytes of its memory, bytes sent to all others."""

    flops: float
    memory: float
    network: float


# Half a chip. The last is an estimate: 600 GB/s a chip and direction, three hops on average among 4 x 4 x 4 chips.
TPU7X = Rates(1.15e15, 3.69e12, 1e11)


class Choice(NamedTuple):
    """A form, and one line that says why."""

    form: Form
    reason: str


def choose(
    *,
    tokens: int,
    top_k: int,
    latent: int,
    hidden: int,
    experts: int,
    devices: int,
    element_bytes: float = 2,
    weight_bytes: float = 2,
    rates: Rates = TPU7X,
    skew: float = 1.5,
) -> Choice:
    """Pick the form that takes less time forward, for so many tokens on each of `devices` and elements of such bytes.

    `skew` is the busiest device's load over the mean where nothing balances. Sending, and the longer of computing and
    reading weights, are added up as if they did not overlap; a balanced device is taken to need two experts' copies.
    """
    local, rows, expert = experts / devices, tokens * top_k, 3 * latent * hidden
    others = (devices - 1) / devices

    def seconds(rows: float, copies: float, sent: float) -> float:
        weights = expert * weight_bytes
        compute = max(2 * rows * expert / rates.flops, min(local + copies, rows) * weights / rates.memory)
        return compute + (sent + copies * weights) / rates.network

    gathered = seconds(skew * rows, 0, others * devices * tokens * latent * (element_bytes + 4))
    balanced = seconds(rows, min(local, 2), others * 2 * rows * latent * element_bytes)
    form: Form = "balanced" if balanced < gathered else "gathered"
    return Choice(
        form,
        f"{form}: {tokens} tokens a device, top {top_k} of {experts} experts over {devices} devices: "
        f"{1e3 * gathered:.3g} ms gathered, {1e3 * balanced:.3g} ms balanced",
    )
