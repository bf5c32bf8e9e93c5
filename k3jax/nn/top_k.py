"""The router's choice out of many experts without a sort, and gradients without a scatter.

On a TPU `jax.lax.top_k` sorts whole rows, and the transpose of `take_along_axis` is a scatter that sorts its indices:
for 8,192 tokens and 896 experts each takes longer to compile than a layer. Rounds of comparisons are exact as well.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

_FEW = 1024  # tokens up to which a sort compiles quickly, and k rounds in a row would take longer to run


def top_k(x: Float[Array, "*b E"], k: int) -> tuple[Float[Array, "*b k"], Int32[Array, "*b k"]]:
    """The k largest of the last dim and their places, ties and all as `jax.lax.top_k`."""
    if x.size <= _FEW * x.shape[-1]:
        values, places = jax.lax.top_k(x, k)
        return values, places.astype(jnp.int32)

    def find(left: Array, _: None) -> tuple[Array, tuple[Array, Array]]:
        place = jnp.argmax(left, axis=-1).astype(jnp.int32)
        return jnp.where(_is_at(left, place), -jnp.inf, left), (jnp.max(left, axis=-1), place)

    values, places = jax.lax.scan(find, x, length=k)[1]
    return jnp.moveaxis(values, 0, -1), jnp.moveaxis(places, 0, -1)


@jax.custom_vjp
def pick(x: Float[Array, "*b E"], places: Int32[Array, "*b k"]) -> Float[Array, "*b k"]:
    """`x` at different places of its last dim."""
    picked = jax.lax.map(lambda place: jnp.sum(jnp.where(_is_at(x, place), x, 0), axis=-1), jnp.moveaxis(places, -1, 0))
    return jnp.moveaxis(picked, 0, -1)


def _pick_backward(saved: tuple[Array, Array], g: Array) -> tuple[Array, None]:
    empty, places = saved

    def add(total: Array, slot: tuple[Array, Array]) -> tuple[Array, None]:
        place, gradient = slot
        return jnp.where(_is_at(total, place), gradient[..., None], total), None

    slots = jnp.moveaxis(places, -1, 0), jnp.moveaxis(g, -1, 0)
    return jax.lax.scan(add, jnp.zeros((*g.shape[:-1], empty.shape[0]), g.dtype), slots)[0], None


pick.defvjp(lambda x, places: (pick(x, places), (jnp.zeros(x.shape[-1:]), places)), _pick_backward)


def _is_at(x: Array, place: Array) -> Array:
    return jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1) == place[..., None]
