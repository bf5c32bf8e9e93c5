"""Next-token cross-entropy that never holds the logits of all tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from k3jax.nn.param import cast, island, matmul_precision
from sharding.local import index_of, largest, total

if TYPE_CHECKING:
    from k3jax.nn.transformer import Transformer


def next_token_loss(model: Transformer, tokens: Int[Array, "B T"], *, chunk: int = 512) -> Float[Array, ""]:
    """Mean cross-entropy in nats of tokens 1..T-1 given those before them."""
    mask = jnp.ones(tokens[:, 1:].shape, bool)
    total, count = batch_loss(model, tokens[:, :-1], tokens[:, 1:], None, mask, chunk=chunk)
    return total / count


def batch_loss(
    model: Transformer,
    tokens: Int[Array, "B T"],
    targets: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None,
    loss_mask: Bool[Array, "B T"],
    *,
    chunk: int,
    features: Float[Array, "B N D"] | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sum of nats over the tokens in `loss_mask` and their number; `chunk` tokens have logits at one time.

    `features` are those of the images in the rows (`Transformer.hidden`).
    """
    hidden = model.hidden(tokens, segment_ids=segment_ids, features=features).hidden
    return head_loss(model, hidden, targets, loss_mask, chunk=chunk)


def head_loss(
    model: Transformer,
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    loss_mask: Bool[Array, "B T"],
    *,
    chunk: int,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The same from the hidden states that the head reads."""
    sums = head_sums(model, hidden, targets, loss_mask, chunk=chunk)
    return sums.nats, sums.tokens


class HeadSums(NamedTuple):
    """Sums over the tokens in the loss mask: their nats, the squares of their log normalisers, and their number."""

    nats: Float[Array, ""]
    squares: Float[Array, ""]  # of logsumexp(logits), what a z-loss weighs
    tokens: Float[Array, ""]


def head_sums(
    model: Transformer,
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    loss_mask: Bool[Array, "B T"],
    *,
    chunk: int,
) -> HeadSums:
    """As `head_loss`, with what a z-loss needs."""
    hidden, head = _head_first(hidden, model.lm_head.get_value())
    head = cast(model.lm_head.replace(head), hidden.dtype)
    flat, labels, mask = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1), loss_mask.reshape(-1)
    size = min(chunk, labels.shape[0])
    pad = -labels.shape[0] % size
    pieces = (
        jnp.pad(flat, ((0, pad), (0, 0))).reshape(-1, size, flat.shape[-1]),
        jnp.pad(labels, (0, pad)).reshape(-1, size),
        jnp.pad(mask, (0, pad)).reshape(-1, size),
    )

    sums = _piece_sums(head, *(x[0] for x in pieces)) if labels.shape[0] <= chunk else _sums_of_pieces(head, *pieces)
    return HeadSums(sums[0], sums[1], jnp.sum(mask.astype(jnp.float32)))


def _piece_sums(
    head: Float[Array, "D V"], hidden: Float[Array, "T D"], labels: Int[Array, " T"], mask: Bool[Array, " T"]
) -> Float[Array, " 2"]:
    """Nats and squares of log normalisers of some tokens."""
    logits = head_logits(hidden, head)
    # Compare and sum instead of indexing: the gradient of an index is a scatter.
    ids = jnp.arange(logits.shape[-1]) + index_of("vocab") * logits.shape[-1]
    picked = jnp.sum(jnp.where(ids == labels[:, None], logits, 0.0), axis=-1)
    normaliser = _logsumexp(logits)
    both = jnp.stack([normaliser - total(picked, "vocab"), jnp.square(normaliser)])
    return jnp.sum(jnp.where(mask, both, 0.0), axis=-1)


@jax.custom_vjp
def _sums_of_pieces(
    head: Float[Array, "D V"],
    hidden: Float[Array, "n T D"],
    labels: Int[Array, "n T"],
    mask: Bool[Array, "n T"],
) -> Float[Array, " 2"]:
    """`_piece_sums` of one piece after the other; its gradient has the logits of one piece at a time too.

    The head's gradient is summed over pieces in float32: in bfloat16 the later ones would be lost beside the sum.
    """
    return jnp.sum(jax.lax.map(lambda piece: _piece_sums(head, *piece), (hidden, labels, mask)), axis=0)


def _sums_forward(*arguments: Array) -> tuple[Array, tuple[Array, ...]]:
    return _sums_of_pieces(*arguments), arguments


def _sums_backward(saved: tuple[Array, ...], gradient: Float[Array, " 2"]) -> tuple[Array, Array, None, None]:
    head, *pieces = saved

    def add(total: Array, piece: list[Array]) -> tuple[Array, Array]:
        hidden, labels, mask = piece
        _, pull = jax.vjp(lambda head, hidden: _piece_sums(head, hidden, labels, mask), head, hidden)
        of_head, of_hidden = pull(gradient)
        return total + of_head.astype(total.dtype), of_hidden

    of_head, of_hidden = jax.lax.scan(add, jnp.zeros(head.shape, island(head.dtype)), pieces)
    return of_head.astype(head.dtype), of_hidden, None, None


_sums_of_pieces.defvjp(_sums_forward, _sums_backward)


@jax.custom_vjp
def _head_first(hidden: Array, head: Array) -> tuple[Array, Array]:
    """The same; the head's gradient, as large as any, is summed and stored before that of the layers begins."""
    return hidden, head


_head_first.defvjp(lambda *x: (x, None), lambda _, gradients: jax.lax.optimization_barrier(gradients))


def head_logits(hidden: Float[Array, "*b D"], head: Float[Array, "D V"]) -> Float[Array, "*b V"]:
    """Logits of the tokens whose columns of the head are at hand, in float32."""
    precision = matmul_precision(hidden.dtype)
    return jnp.matmul(hidden, head, precision=precision, preferred_element_type=island(hidden.dtype))


def _logsumexp(logits: Float[Array, "T V"]) -> Float[Array, " T"]:
    """Over the whole vocabulary, of which a device may have a part."""
    top = largest(jnp.max(logits, axis=-1, keepdims=True), "vocab")
    return jnp.log(total(jnp.sum(jnp.exp(logits - top), axis=-1), "vocab")) + top[..., 0]
