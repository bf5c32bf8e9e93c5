"""What a registered measurement is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

Program = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Case:
    """One program to compile: `build()` returns the function, its arguments' shapes and the arguments it donates."""

    name: str
    units: int
    build: Callable[[], Program]


def shape(dtype: Any, *dims: int) -> jax.ShapeDtypeStruct:
    """An argument of a program that is compiled but not run."""
    return jax.ShapeDtypeStruct(dims, dtype)
