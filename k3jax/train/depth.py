"""How the reads of Attention Residuals mix depth: the share of each source in each layer's read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from k3jax.nn.embed import embed_tokens
from k3jax.nn.norm import rms_normalise
from k3jax.nn.plan import Depth
from k3jax.nn.transformer import Transformer


@jax.jit
def depth_shares(model: Transformer, tokens: Int[Array, "B T"]) -> Float[Array, "reads sources"]:
    """Mean shares over all tokens of each layer's first read, and in the last row of the read before the head.

    Columns are the snapshots (the embedding first) and, last, the live sum; what a read does not see has share 0. The
    second read of a layer is not shown: its live sum exists inside the layer only.
    """
    config, depth = model.config, Depth(model.config)
    out = model.hidden(tokens, collect=True)
    assert out.trace is not None
    size, sums = config.attn_res_block, out.trace.sums
    embedding = embed_tokens(model.embed, tokens, sums.dtype)
    snapshots = [embedding, *(sums[end - 1] for end in range(size, config.num_layers, size))]
    rows = []
    for layer in range(config.num_layers):
        query = model.layers(config.layer_kind(layer)).mixer_mix.folded(sums.dtype)[int(depth.in_stack[layer])]
        live = sums[layer - 1] if layer % size else None
        rows.append(_shares(query, snapshots, layer // size + 1, live, config.norm_eps))
    rows.append(_shares(model.out_mix.folded(sums.dtype), snapshots, len(snapshots), sums[-1], config.norm_eps))
    return jnp.stack(rows)


def _shares(
    query: Array, snapshots: list[Array], count: int, live: Array | None, eps: float
) -> Float[Array, " sources"]:
    """Mean softmax over the first `count` snapshots and the live sum, in the columns of all of them."""
    sources = [*snapshots[:count], *([] if live is None else [live])]
    scores = jnp.stack([rms_normalise(source, eps=eps) @ query for source in sources])
    shares = jnp.mean(jax.nn.softmax(scores, axis=0), axis=tuple(range(1, scores.ndim)))
    blank = jnp.zeros(len(snapshots) + 1, shares.dtype).at[:count].set(shares[:count])
    return blank if live is None else blank.at[-1].set(shares[-1])
