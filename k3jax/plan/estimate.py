"""A mode of a run on a mesh as numbers of one device: bytes held, operations, bytes read and bytes sent.

Weights, optimizer state and caches are exact, from shapes and layouts. Activations, buffers and traffic are estimates,
each in its own function with the sum it stands for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import PartitionSpec

from k3jax.nn.param import is_variable
from k3jax.plan.chips import Chip
from sharding.local import Placement


@dataclass
class Estimate:
    """Of one device and one step. `axis_bytes` are bytes sent along each mesh axis."""

    held: dict[str, float]
    flops: float
    hbm_bytes: float
    arguments: float = 0.0  # bytes of the program's arguments, exact but for padding
    results: float = 0.0  # bytes of its results, likewise
    axis_bytes: dict[str, float] = field(default_factory=dict)
    tokens: float = 0.0  # of all devices in one step

    def send(self, axes: Iterable[str], count: int, result_bytes: float, times: float = 1.0) -> None:
        """Add a gather, or a scatter of sums, whose whole is `result_bytes`, over `count` devices along `axes`."""
        if count > 1:
            name = "+".join(axes)
            self.axis_bytes[name] = self.axis_bytes.get(name, 0.0) + times * result_bytes * (count - 1) / count

    @property
    def bytes(self) -> float:
        """All that is held at once."""
        return sum(self.held.values())

    def seconds(self, chip: Chip) -> dict[str, float]:
        """The roofline's terms: each alone would take so long."""
        return {
            "compute": self.flops / chip.flops,
            "memory": self.hbm_bytes / chip.memory,
            "network": sum(self.axis_bytes.values()) / chip.network,
        }


def local_bytes(tree: Any, specs: Any, placement: Placement) -> int:
    """Bytes of one device's part of a tree of arrays or shapes, laid out by `specs`."""
    is_spec = lambda node: isinstance(node, PartitionSpec)  # noqa: E731
    leaves, layouts = jax.tree.leaves(tree), jax.tree.leaves(specs, is_leaf=is_spec)
    return sum(
        leaf.size * leaf.dtype.itemsize // _parts(spec, placement) for leaf, spec in zip(leaves, layouts, strict=True)
    )


def _parts(spec: PartitionSpec, placement: Placement) -> int:
    names = (part if isinstance(part, tuple) else (part,) for part in spec if part)
    return math.prod(placement.count(axes) for axes in names)


@dataclass(frozen=True)
class Weight:
    """One kind of weight: how many elements the computation's part has, and how it is gathered to it."""

    axes: tuple[str, ...]
    elements: int
    gathers: tuple[tuple[str, ...], ...]  # mesh axes, in the order of gathering


def weights_of(params: Any, placement: Placement) -> Iterator[Weight]:
    """The weights of a tree of variables as a device computes with them, all layers of a stack together."""
    for variable in jax.tree.leaves(params, is_leaf=is_variable):
        if not is_variable(variable) or variable.get_value() is None:
            continue
        for leaf in jax.tree.leaves(variable.get_value()):
            split = math.prod(placement.count(placement.split.get(name, ())) for name in variable.axes)
            gathers = tuple(axes for axes in placement.kept[variable.axes] if axes)
            yield Weight(variable.axes, leaf.size // split, gathers)
