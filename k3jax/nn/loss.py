"""Next-token cross-entropy that never holds the logits of all tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

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
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sum of nats over the tokens in `loss_mask` and their number; `chunk` tokens have logits at one time."""
    hidden = model.hidden(tokens, segment_ids=segment_ids).hidden
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
    flat, labels, mask = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1), loss_mask.reshape(-1)
    size = min(chunk, labels.shape[0])
    pad = -labels.shape[0] % size
    pieces = (
        jnp.pad(flat, ((0, pad), (0, 0))).reshape(-1, size, flat.shape[-1]),
        jnp.pad(labels, (0, pad)).reshape(-1, size),
        jnp.pad(mask, (0, pad)).reshape(-1, size),
    )

    def piece_loss(piece: tuple[Array, Array, Array]) -> Float[Array, ""]:
        hidden, labels, mask = piece
        logits = model.logits(hidden)
        # Compare and sum instead of indexing: the gradient of an index is a scatter.
        picked = jnp.sum(jnp.where(jnp.arange(logits.shape[-1]) == labels[:, None], logits, 0.0), axis=-1)
        return jnp.sum(jnp.where(mask, jax.nn.logsumexp(logits, axis=-1) - picked, 0.0))

    if labels.shape[0] <= chunk:
        total = piece_loss(jax.tree.map(lambda x: x[0], pieces))
    else:
        total = jnp.sum(jax.lax.map(jax.checkpoint(piece_loss), pieces))
    return total, jnp.sum(mask.astype(jnp.float32))
