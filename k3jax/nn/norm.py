"""RMS normalisation with a direct weight (spec text-model 2.0)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from k3jax.nn.param import cast, constant, island
from sharding.local import own_part, size_of, total


def rms_normalise(x: Float[Array, "*b D"], *, eps: float, axis: str = "") -> Float[Array, "*b D"]:
    """x over its root mean square along the last dim, computed and returned in a float32 island.

    `axis` is the last dim's logical axis, where a mesh may have split it.
    """
    x = x.astype(island(x.dtype))
    mean = total(jnp.mean(x * x, axis=-1, keepdims=True), axis) / size_of(axis)
    return x * jax.lax.rsqrt(mean + eps)


class RMSNorm(nnx.Module):
    """weight * round(x / rms(x)), rounded to the compute dtype before the weight as the released model does.

    Where a mesh splits the last dim, a part gives its part; so does the whole, whose mean square needs no sum.
    """

    def __init__(self, width: int, *, eps: float, axis: str = "embed", dtype: Any):
        self.weight = constant(1.0, (width,), (axis,), dtype=dtype)
        self.eps = eps

    def __call__(self, x: Float[Array, "*b D"]) -> Float[Array, "*b d"]:
        weight, axis = cast(self.weight, x.dtype), self.weight.axes[0]
        is_part = x.shape[-1] == weight.shape[-1]
        normed = rms_normalise(x, eps=self.eps, axis=axis if is_part else "").astype(x.dtype)
        return weight * (normed if is_part else own_part(normed, axis, dim=-1))
