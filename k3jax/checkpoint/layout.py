"""How a tensor on disk becomes the arrays of the model, and back: one line such as
`"(kda_heads head_dim) embed -> embed kda_heads head_dim"`.

Left are the axes on disk, right the axes in the model. Parentheses flatten axes into one, `1` is an axis of size one
that the model drops, `a+b` is an axis whose parts follow each other, `a/2` is an axis of half the size of `a`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np

Sizes = Mapping[str, int]  # axis name -> size


@dataclass(frozen=True)
class Layout:
    """One disk <-> model rule; arrays may have further leading dims (layers, experts), NumPy in gives NumPy out."""

    rule: str

    @cached_property
    def _disk(self) -> list[list[str]]:
        """Axes on disk, each the list of axes that it flattens."""
        left = self.rule.split(" -> ")[0]
        return [(inner or plain).split() for inner, plain in re.findall(r"\(([^)]*)\)|(\S+)", left)]

    @cached_property
    def axes(self) -> list[str]:
        """Axes on disk, unflattened, without those of size one."""
        return [axis for group in self._disk for axis in group if axis != "1"]

    @cached_property
    def _model(self) -> list[str]:
        return self.rule.split(" -> ")[1].split()

    @cached_property
    def _sum_axis(self) -> int:
        """Position, from the end, of the model axis that splits into parts."""
        return next(i for i, axis in enumerate(self._model) if "+" in axis) - len(self._model)

    def disk_shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Shape of the tensor on disk."""
        return tuple(math.prod(_size(axis, sizes) for axis in group) for group in self._disk)

    @cached_property
    def order(self) -> list[int]:
        """For each of `axes`, its position in the model's array."""
        return [self._model.index(axis) for axis in self.axes]

    def flat_shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Shape on disk with its flattened axes apart and those of size one dropped: the sizes of `axes`."""
        return tuple(_size(axis, sizes) for axis in self.axes)

    def model_shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Shape in the model, before it is split into parts."""
        return tuple(_size(axis, sizes) for axis in self._model)

    def to_model(self, tensor: Any, sizes: Sizes) -> Any:
        """Disk layout [..., *disk_shape] -> model layout [..., *model_shape]."""
        lead = tensor.shape[: tensor.ndim - len(self._disk)]
        flat = tensor.reshape(*lead, *(_size(axis, sizes) for axis in self.axes))
        return flat.transpose(_order(len(lead), [self.axes.index(axis) for axis in self._model]))

    def to_disk(self, array: Any, sizes: Sizes) -> Any:
        """Model layout [..., *model_shape] -> disk layout [..., *disk_shape]."""
        lead = array.shape[: array.ndim - len(self._model)]
        flat = array.transpose(_order(len(lead), [self._model.index(axis) for axis in self.axes]))
        return flat.reshape(*lead, *self.disk_shape(sizes))

    def split(self, array: Any, sizes: Sizes) -> list[Any]:
        """The parts of an array in model layout along its `a+b` axis."""
        bounds = np.cumsum(self.part_sizes(sizes))[:-1]
        return list(np.split(array, bounds, axis=self._sum_axis))

    def join(self, parts: Sequence[Any], sizes: Sizes) -> Any:
        """Undo `split`; a part that is None is filled with zeros."""
        like = next(part for part in parts if part is not None)
        xp = np if isinstance(like, np.ndarray) else jnp
        filled = []
        for part, size in zip(parts, self.part_sizes(sizes), strict=True):
            shape = list(like.shape)
            shape[self._sum_axis] = size
            filled.append(xp.zeros(shape, like.dtype) if part is None else part)
        return xp.concatenate(filled, axis=self._sum_axis)

    def part_sizes(self, sizes: Sizes) -> list[int]:
        """Sizes of the parts of the `a+b` axis."""
        return [sizes[name] for name in self._model[self._sum_axis].split("+")]


def _size(axis: str, sizes: Sizes) -> int:
    if axis == "1":
        return 1
    name, _, divisor = axis.partition("/")
    return sum(sizes[part] for part in name.split("+")) // int(divisor or 1)


def _order(lead: int, axes: list[int]) -> list[int]:
    return [*range(lead), *(lead + axis for axis in axes)]
