"""A step whose loss or gradient is not finite changes nothing, without the host having to look."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Tree = TypeVar("Tree")


def is_finite(*values: Float[Array, ""]) -> Bool[Array, ""]:
    """Whether all of them are; to be asked of numbers that every device has alike."""
    return jnp.all(jnp.isfinite(jnp.stack(values)))


def keep_unless(good: Bool[Array, ""], new: Tree, old: Tree) -> Tree:
    """`new` where `good`, otherwise `old`, leaf by leaf: a NaN in `new` goes nowhere."""
    return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)
