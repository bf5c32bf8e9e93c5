"""What a registered measurement is."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax

Program = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Case:
    """One program to compile: `build()` returns the function, its arguments' shapes and the arguments it donates.

    `traced_trips`: how often the loops run whose bounds the program computes, in the order in which they end.
    """

    name: str
    units: int
    build: Callable[[], Program]
    traced_trips: tuple[int, ...] = ()


def traced_on(device: Any) -> AbstractContextManager[Any]:
    """What is traced inside may ask what it runs on and hears of `device`, which need not exist."""
    abstract = jax.sharding.AbstractDevice(device_kind=device.device_kind, num_cores=device.num_cores, platform="tpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=abstract))


def shape(dtype: Any, *dims: int) -> jax.ShapeDtypeStruct:
    """An argument of a program that is compiled but not run."""
    return jax.ShapeDtypeStruct(dims, dtype)
