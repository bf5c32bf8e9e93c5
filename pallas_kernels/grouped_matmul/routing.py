"""Rows in expert order and back: a stable sort by expert, and two gathers whose gradients are gathers.

A gather's automatic transpose is a scatter, which XLA runs serially on a CPU and with atomics on a GPU. Here each row
has exactly one (token, slot), so the inverse permutation turns every transpose into a gather.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

# Counting ranks costs S k E, a sort S k log(S k); on two CPU cores they cross at about 40 experts.
_COUNTING_LIMIT = 32


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Routing:
    """A permutation of the S*k (token, slot) pairs into expert order, with the size of every expert's group.

    `order[row]` is the flat index token * k + slot; `inverse[flat]` is its row. Pairs of invalid tokens come last, in
    no group.
    """

    order: Int32[Array, " Sk"]
    inverse: Int32[Array, " Sk"]
    group_sizes: Int32[Array, " E"]


def sort_by_expert(experts: Int32[Array, "S k"], num_experts: int, valid: Bool[Array, " S"] | None = None) -> Routing:
    """Sort the (token, slot) pairs of `experts` [S, k] by expert, stable; tokens that are not `valid` [S] go last."""
    if valid is not None:
        experts = jnp.where(valid[:, None], experts, num_experts)
    flat = experts.reshape(-1).astype(jnp.int32)
    index = jnp.arange(flat.size, dtype=jnp.int32)
    if num_experts <= _COUNTING_LIMIT:
        hot = (flat[:, None] == jnp.arange(num_experts + 1)).astype(jnp.int32)
        seen = jnp.cumsum(hot, axis=0)
        sizes = seen[-1]
        starts = jnp.cumsum(sizes) - sizes
        inverse = jnp.sum(hot * (seen - 1 + starts), axis=1, dtype=jnp.int32)
        order = jnp.zeros_like(index).at[inverse].set(index, unique_indices=True, mode="promise_in_bounds")
    else:
        sizes = jnp.zeros(num_experts + 1, jnp.int32).at[flat].add(1)
        order = jnp.argsort(flat, stable=True).astype(jnp.int32)
        inverse = jnp.zeros_like(index).at[order].set(index, unique_indices=True, mode="promise_in_bounds")
    return Routing(order=order, inverse=inverse, group_sizes=sizes[:num_experts])


def gather_rows(x: Float[Array, "S L"], routing: Routing, k: int) -> Float[Array, "Sk L"]:
    """Return the rows of tokens `x` [S, L] in expert order, [S*k, L]; the gradient sums a token's k rows in float32."""
    return _gather_rows(k, x, routing.order, routing.inverse)


def combine_rows(rows: Float[Array, "Sk L"], routing: Routing, weights: Float[Array, "S k"]) -> Float[Array, "S L"]:
    """Return each token's sum of its k `rows` [S*k, L] times `weights` [S, k]: float32 [S, L]; 0 for invalid tokens."""
    return _combine_rows(rows, weights, routing)


def _float32(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather_rows(k: int, x: Array, order: Array, inverse: Array) -> Array:
    return x[order // k]


def _gather_rows_fwd(k: int, x: Array, order: Array, inverse: Array) -> tuple[Array, Array]:
    return x[order // k], inverse


def _gather_rows_bwd(k: int, inverse: Array, g: Array) -> tuple[Array, None, None]:
    per_slot = g[inverse].reshape(-1, k, g.shape[-1])
    return jnp.sum(_float32(per_slot), axis=1).astype(g.dtype), None, None


_gather_rows.defvjp(_gather_rows_fwd, _gather_rows_bwd)


def _slots(rows: Array, routing: Routing, k: int) -> tuple[Array, Array]:
    """Rows [S*k, L] as float32 [S, k, L] in token order, and which of those [S, k] pairs are in a group."""
    grouped = routing.inverse < jnp.sum(routing.group_sizes)
    return _float32(rows[routing.inverse]).reshape(-1, k, rows.shape[-1]), grouped.reshape(-1, k)


@jax.custom_vjp
def _combine_rows(rows: Array, weights: Array, routing: Routing) -> Array:
    slots, grouped = _slots(rows, routing, weights.shape[1])
    return jnp.sum(jnp.where(grouped[..., None], slots * _float32(weights)[..., None], 0), axis=1)


def _combine_rows_fwd(rows: Array, weights: Array, routing: Routing) -> tuple[Array, tuple[Array, Array, Routing]]:
    return _combine_rows(rows, weights, routing), (rows, weights, routing)


def _combine_rows_bwd(saved: tuple[Array, Array, Routing], g: Array) -> tuple[Array, Array, None]:
    rows, weights, routing = saved
    slots, grouped = _slots(rows, routing, weights.shape[1])
    d_weights = jnp.where(grouped, jnp.sum(slots * g[:, None, :], axis=-1), 0)
    scaled = _float32(weights).reshape(-1)[routing.order, None] * g[routing.order // weights.shape[1]]
    return scaled.astype(rows.dtype), d_weights.astype(weights.dtype), None


_combine_rows.defvjp(_combine_rows_fwd, _combine_rows_bwd)
