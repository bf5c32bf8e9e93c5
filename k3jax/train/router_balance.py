"""Quantile Balancing: each step the router bias becomes the one that would have spread its tokens evenly.

A token chooses an expert where score + bias exceeds the token's cutoff, the best biased score that it does not choose;
cutoff - score is the bias that the expert would have needed. An expert gets its fair share of m tokens, q = m k / n, at
the q-th smallest of its required biases (report 2.3.3, eq. 14). The quantile is read from a histogram (appendix D):
counts add over micro-batches and devices, so it is a quantile of the whole step, exact up to the width of a bin.

    counts = count_router(view)                        in the forward pass of every micro-batch, for every MoE layer
    counts added over micro-batches and devices        the step's one reduction
    bias = balanced_bias(counts.histogram, bias, k)    once a step; the next step routes by it
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from k3jax.nn.moe import RouterView
from k3jax.nn.transformer import Transformer

HIGH, LOW = 8, 128  # a bin's number is high * LOW + low; LOW fills the lanes of a matrix unit
BINS = HIGH * LOW
CHUNK = 256  # tokens whose one-hots exist at one time
ROUTER_METRICS = ("max_load", "dead_experts", "bias_range", "dropped")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RouterCounts:
    """What a step learns about routers, over its valid tokens: counts, which add up exactly in any order."""

    histogram: Int[Array, "*layers E bins"]  # of required biases
    load: Int[Array, "*layers E"]  # rows that each expert computed


def balance_step(scores: Float[Array, "m n"], bias: Float[Array, " n"], k: int) -> Float[Array, " n"]:
    """The bias that follows `bias` when tokens with these `scores` (of a sigmoid, in 0..1) chose k of n experts each.

    Raises `ValueError` where k >= n: then every expert is chosen and there is no cutoff.
    """
    if k >= bias.shape[-1]:
        raise ValueError(f"k = {k}: balancing needs fewer chosen experts than the {bias.shape[-1]} there are")
    cutoffs = jax.lax.top_k(scores + bias, k + 1)[0][:, k]
    return balanced_bias(required_bias_histogram(scores, cutoffs, bias), bias, k)


def count_router(view: RouterView) -> RouterCounts:
    """The counts of one MoE layer and micro-batch."""
    tokens = view.cutoff.size
    valid = None if view.valid is None else view.valid.reshape(tokens)
    scores = view.scores.reshape(tokens, -1)
    histogram = required_bias_histogram(scores, view.cutoff.reshape(tokens), view.bias, valid)
    return RouterCounts(histogram=histogram, load=view.load)


def required_bias_histogram(
    scores: Float[Array, "m n"],
    cutoffs: Float[Array, " m"],
    bias: Float[Array, " n"],
    valid: Bool[Array, " m"] | None = None,
) -> Int[Array, "n bins"]:
    """How often each expert's required bias, cutoff - score, falls into each bin; only `valid` tokens count.

    A bin's count is a sum of products of two one-hots, so a matrix unit adds them up; a scatter would run serially on a
    TPU. Zeros and ones are exact in every format a matrix unit multiplies in, and chunks stay below 2^24.
    """
    first, width = _edges(bias)
    required = cutoffs[:, None].astype(jnp.float32) - scores.astype(jnp.float32)
    bins = jnp.clip(jnp.floor((required - first) / width), 0, BINS - 1).astype(jnp.int32)
    bins = bins if valid is None else jnp.where(valid[:, None], bins, BINS)  # its high part matches none
    size = min(CHUNK, bins.shape[0])
    chunks = jnp.pad(bins, ((0, -bins.shape[0] % size), (0, 0)), constant_values=BINS).reshape(-1, size, bins.shape[1])

    def add(total: Array, bins: Array) -> tuple[Array, None]:
        high = (bins[..., None] // LOW == jnp.arange(HIGH)).astype(jnp.float32)
        low = (bins[..., None] % LOW == jnp.arange(LOW)).astype(jnp.float32)
        return total + jnp.einsum("tnh,tnl->nhl", high, low, precision="default").astype(jnp.int32), None

    total, _ = jax.lax.scan(add, jnp.zeros((bins.shape[1], HIGH, LOW), jnp.int32), chunks)
    return total.reshape(-1, BINS)


def balanced_bias(
    histogram: Int[Array, "*layers n bins"], bias: Float[Array, "*layers n"], k: int
) -> Float[Array, "*layers n"]:
    """The next bias, of mean zero, from a whole step's histogram; `bias` is the one that the step routed by.

    A step without a valid token keeps the bias.
    """
    first, width = _edges(bias)
    tokens, experts = jnp.sum(histogram, axis=-1), histogram.shape[-2]
    # q = tokens * k / experts as whole + part, in integers that do not overflow.
    whole = tokens // experts * k + tokens % experts * k // experts
    part = (tokens % experts * k % experts).astype(jnp.float32) / experts
    rank = whole + (part > 0)
    up_to = jnp.cumsum(histogram, axis=-1)
    chosen = jnp.sum(up_to < rank[..., None], axis=-1, keepdims=True)
    inside = jnp.take_along_axis(histogram, chosen, axis=-1)[..., 0]
    before = jnp.take_along_axis(up_to, chosen, axis=-1)[..., 0] - inside
    fraction = jnp.clip(((whole - before).astype(jnp.float32) + part) / jnp.maximum(inside, 1), 0.0, 1.0)
    new = first + (chosen[..., 0].astype(jnp.float32) + fraction) * width
    return jnp.where(tokens > 0, new - jnp.mean(new, axis=-1, keepdims=True), bias)


def rebalance(router_bias: Transformer, counts: dict[str, RouterCounts], k: int) -> Transformer:
    """The next step's biases of the whole model; `router_bias` and the result are parts of `split_model`."""
    balanced = jax.tree.map(lambda bias: bias, router_bias)
    for kind, seen in counts.items():
        router = balanced.layers(kind).ffn.router
        router.bias = router.bias.replace(balanced_bias(seen.histogram, router.bias.get_value(), k))
    return balanced


def router_metrics(counts: dict[str, RouterCounts], router_bias: Transformer, k: int) -> dict[str, Float[Array, ""]]:
    """Of the worst layer: maximum over mean load, and the range of the new biases; over all layers: experts without
    a row, and chosen (token, expert) pairs that no expert computed (`dropped`, 0 as long as routing is right).
    """
    if not counts:
        return {}
    loads = jnp.concatenate([seen.load.reshape(-1, seen.load.shape[-1]) for seen in counts.values()])
    tokens = jnp.concatenate([jnp.sum(seen.histogram[..., 0, :], axis=-1).reshape(-1) for seen in counts.values()])
    ranges = [jnp.max(jnp.ptp(bias, axis=-1)) for bias in jax.tree.leaves(router_bias)]
    mean = jnp.maximum(tokens * k, 1) / loads.shape[-1]
    values = (
        jnp.max(jnp.max(loads, axis=-1) / mean),
        jnp.sum(loads == 0).astype(jnp.float32),
        jnp.max(jnp.stack(ranges)),
        jnp.sum(tokens * k - jnp.sum(loads, axis=-1)).astype(jnp.float32),
    )
    return dict(zip(ROUTER_METRICS, values, strict=True))


def _edges(bias: Float[Array, "*layers n"]) -> tuple[Float[Array, "*layers 1"], Float[Array, "*layers 1"]]:
    """(start of the first bin, width of a bin): every cutoff lies in min(bias)..max(bias) + 1, every score in 0..1."""
    least, most = jnp.min(bias, axis=-1, keepdims=True), jnp.max(bias, axis=-1, keepdims=True)
    return least - 1.0, (most - least + 2.0) / BINS
