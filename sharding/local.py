"""What the maths says about a mesh: small collectives named by logical axes, the identity on one device.

A whole program runs inside one fully manual `shard_map`, so that layers see their device's part of every array. They
contract, normalise and look up as if alone, and say here which logical axes a sum ran over. A `Placement`, ambient
while the program is traced, knows over which mesh axes those are split:

    with placed(placement):                      identity without a placement
        w = whole(w, ("embed", "mlp"))           a weight's parts that are only stored apart, gathered
        y = total(x @ w, "mlp")                  partial products of a contracted axis, summed

Gradients are taken inside the program. Every device differentiates its own share of the loss, shares that add up to
the loss over all devices, so a gather's transpose sums gradients where the weight is stored, and a sum's transpose sums
cotangents. What remains is `total_of_copies`: the sum over mesh axes that hold a weight in equal copies.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Shaped

from sharding.mesh import AXES, MeshError
from sharding.rules import SMALL, SMALL_PART, Rules

Names = tuple[str, ...]  # of logical axes, one for each dim of an unstacked weight
Parts = tuple[Names, ...]  # mesh axes of each dim


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where each logical axis and each kind of weight lies on a mesh of `sizes` devices along each axis."""

    sizes: Mapping[str, int]
    split: Mapping[str, Names]  # logical axis -> mesh axes of the computation, those of size 1 left out
    kept: Mapping[Names, Parts]  # weight -> mesh axes over which each dim is stored besides

    @classmethod
    def of(cls, sizes: Mapping[str, int], rules: Rules, weights: Iterable[tuple[Names, tuple[int, ...]]]) -> Placement:
        """The placement of `weights`, each its logical axes and its global shape (stacked dims first).

        Raises `MeshError` where an axis of the computation does not divide a weight's dim.
        """
        live = {axis: sizes.get(axis, 1) for axis in AXES}
        split = {name: tuple(a for a in axes if live[a] > 1) for name, axes in rules.split.items()}
        shapes: dict[Names, list[tuple[int, ...]]] = {}
        for names, shape in weights:
            shapes.setdefault(names, []).append(shape[len(shape) - len(names) :])
        for names, all_of_them in shapes.items():
            _check_divides(names, all_of_them, split, live)
        kept = {names: _kept(names, found, split, rules, live) for names, found in shapes.items()}
        return cls(sizes=live, split=split, kept=kept)

    def spec(self, names: Names, ndim: int) -> PartitionSpec:
        """How a weight of `ndim` dims, stacked dims first, lies on the mesh."""
        return PartitionSpec(*[None] * (ndim - len(names)), *(part or None for part in self.of_dims(names)))

    def of_dims(self, names: Names) -> Parts:
        """The mesh axes over which each dim of a weight lies in parts."""
        return tuple((*self.split.get(name, ()), *kept) for name, kept in zip(names, self.kept[names], strict=True))

    def parts(self, names: Names) -> Names:
        """All of them."""
        return tuple(axis for axes in self.of_dims(names) for axis in axes)

    def spec_of(self, *names: str | None) -> PartitionSpec:
        """How an activation with these logical axes (None: whole) lies on the mesh."""
        return PartitionSpec(*(self.split.get(name or "", ()) or None for name in names))

    def copies(self, names: Names) -> Names:
        """The mesh axes along which devices hold equal parts of a weight."""
        parts = self.parts(names)
        return tuple(axis for axis, size in self.sizes.items() if size > 1 and axis not in parts)

    def count(self, axes: Iterable[str]) -> int:
        """How many devices lie along `axes`."""
        return math.prod(self.sizes[axis] for axis in axes)


_AMBIENT: ContextVar[Placement | None] = ContextVar("placement", default=None)


@contextmanager
def placed(placement: Placement | None) -> Iterator[None]:
    """Trace what is inside for `placement`; None is one device."""
    token = _AMBIENT.set(placement)
    try:
        yield
    finally:
        _AMBIENT.reset(token)


def axes_of(*names: str) -> Names:
    """The mesh axes over which the computation splits logical axes; none on one device."""
    placement = _AMBIENT.get()
    return () if placement is None else tuple(a for name in names for a in placement.split.get(name, ()))


def axis_of(name: str) -> str | None:
    """The one mesh axis that splits a logical axis; None on one device. Raises ValueError where there are more."""
    axes = axes_of(name)
    if len(axes) > 1:
        raise ValueError(f"{name} is split over {axes}; what asks can work with one mesh axis")
    return axes[0] if axes else None


def size_of(*names: str) -> int:
    """Into how many parts the computation splits logical axes."""
    placement = _AMBIENT.get()
    return 1 if placement is None else placement.count(axes_of(*names))


def index_of(*names: str) -> Any:
    """Which part this device has: 0 on one device, else a traced int32."""
    axes = axes_of(*names)
    return jax.lax.axis_index(axes) if axes else 0


def total(x: Any, *names: str) -> Any:
    """Partial sums over logical axes, added up; of every array of a tree."""
    return total_over(x, axes_of(*names))


def largest(x: Array, *names: str) -> Array:
    """The maximum of partial maxima over logical axes; no gradient passes."""
    axes, x = axes_of(*names), jax.lax.stop_gradient(x)
    return jax.lax.pmax(x, axes) if axes else x


def joined(x: Shaped[Array, "..."], name: str, *, dim: int) -> Shaped[Array, "..."]:
    """All parts of a split logical axis side by side along `dim`."""
    return joined_over(x, axes_of(name), dim=dim)


def own_part(x: Shaped[Array, "..."], name: str, *, dim: int) -> Shaped[Array, "..."]:
    """This device's part along `dim` of what runs over a whole logical axis."""
    size = x.shape[dim] // size_of(name)
    return jax.lax.dynamic_slice_in_dim(x, index_of(name) * size, size, axis=dim) if axes_of(name) else x


def whole(weight: Shaped[Array, "..."], names: Names) -> Shaped[Array, "..."]:
    """A weight as the computation sees it: the parts that are only stored apart, gathered.

    Its gradient is summed in float32 or wider where each part is stored.
    """
    return _gathered(weight, names, [[size] for size in weight.shape])


def whole_matrix(weight: Shaped[Array, "..."], names: Names, *, rows: int) -> Shaped[Array, "R C"]:
    """`whole` as a matrix of the first `rows` dims by the others, and gathered as one: its tiles are not those of three
    dims, and a TPU would copy it.
    """
    matrix = _gathered(weight, names, [[*weight.shape[:rows]], [*weight.shape[rows:]]])
    return matrix.reshape(math.prod(whole_shape(weight.shape, names)[:rows]), -1)


def whole_shape(shape: tuple[int, ...], names: Names) -> tuple[int, ...]:
    """Of a weight as the computation sees it, from that of what is stored here."""
    return tuple(size * count_of(axes) for size, axes in zip(shape, _kept_axes(names, len(shape)), strict=True))


def _kept_axes(names: Names, ndim: int) -> Parts:
    """The mesh axes over which each dim of a weight is stored besides, stacked dims first."""
    placement = _AMBIENT.get()
    kept = ((),) * len(names) if placement is None else placement.kept.get(names, ((),) * len(names))
    return *((),) * (ndim - len(names)), *kept


class _Turn(NamedTuple):
    """One collective: the parts of this shape, joined along `dim` over a mesh axis."""

    shape: tuple[int, ...]
    dim: int
    axis: str


def _gathered(weight: Array, names: Names, sides: list[list[int]]) -> Array:
    """`weight` of the sizes `sides`, its parts joined axis by axis; dims of a side are merged once they are whole.

    The last dim is the first to be joined: parts side by side along the first one need no copy, and most of the bytes
    come with it. One collective for two axes would be a sum of parts and zeros, as XLA for TPU has no other for them.
    """
    turns: list[_Turn] = []
    places = [(side, place) for side, sizes in enumerate(sides) for place in range(len(sizes))]
    for (side, place), axes in reversed([*zip(places, _kept_axes(names, weight.ndim), strict=True)]):
        for axis in reversed(axes):
            sides[side][place:] = [math.prod(sides[side][place:])]
            dim = sum(map(len, sides[:side])) + place
            turns.append(_Turn(tuple(size for sizes in sides for size in sizes), dim, axis))
            sides[side][place] *= count_of((axis,))
    return _join(tuple(turns), weight) if turns else weight


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _join(turns: tuple[_Turn, ...], weight: Array) -> Array:
    for shape, dim, axis in turns:
        weight = jax.lax.all_gather(weight.reshape(shape), axis, axis=dim, tiled=True)
    return weight


def _join_forward(turns: tuple[_Turn, ...], weight: Array) -> tuple[Array, tuple[int, ...]]:
    return _join(turns, weight), weight.shape


def _join_backward(turns: tuple[_Turn, ...], own: tuple[int, ...], gradient: Array) -> tuple[Array]:
    dtype, gradient = gradient.dtype, gradient.astype(jnp.promote_types(jnp.float32, gradient.dtype))
    for shape, dim, axis in reversed(turns):
        joined = [size * count_of((axis,)) if place == dim else size for place, size in enumerate(shape)]
        gradient = jax.lax.psum_scatter(gradient.reshape(joined), axis, scatter_dimension=dim, tiled=True)
    return (gradient.reshape(own).astype(dtype),)


_join.defvjp(_join_forward, _join_backward)


def total_of_copies(gradient: Shaped[Array, "..."], names: Names) -> Shaped[Array, "..."]:
    """The gradient of a weight from what each device that holds an equal copy of its part found."""
    placement = _AMBIENT.get()
    return gradient if placement is None else total_over(gradient, placement.copies(names))


def total_of_parts(x: Shaped[Array, ""], names: Names) -> Shaped[Array, ""]:
    """A sum over a weight's entries from the sums over the parts."""
    placement = _AMBIENT.get()
    return x if placement is None else total_over(x, placement.parts(names))


def copies_of(*names: str) -> int:
    """How many devices do the same work, those along mesh axes that split none of the logical axes."""
    placement = _AMBIENT.get()
    return 1 if placement is None else math.prod(placement.sizes.values()) // size_of(*names)


def total_of(parts: Mapping[str, Array]) -> Array:
    """The sum of arrays of one shape, each by the logical axis that its own partial sums ran over; one sum for those
    that are split alike.
    """
    alike: dict[Names, Array] = {}
    for name, x in parts.items():
        axes = axes_of(name)
        alike[axes] = alike[axes] + x if axes in alike else x
    return functools.reduce(jnp.add, (total_over(x, axes) for axes, x in alike.items()))


def total_over(x: Any, axes: Names) -> Any:
    """Partial sums over mesh axes, added up."""
    return jax.lax.psum(x, axes) if axes else x


def joined_over(x: Shaped[Array, "..."], axes: Names, *, dim: int) -> Shaped[Array, "..."]:
    """The parts along mesh axes side by side along `dim`."""
    return jax.lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


def largest_anywhere(x: Shaped[Array, ""]) -> Shaped[Array, ""]:
    """The maximum over all devices."""
    placement = _AMBIENT.get()
    axes = () if placement is None else tuple(axis for axis, size in placement.sizes.items() if size > 1)
    return jax.lax.pmax(x, axes) if axes else x


def stored_part(x: Shaped[Array, "..."], names: Names, name: str, *, dim: int) -> Shaped[Array, "..."]:
    """Of `x`, which runs along `dim` over the computation's part of a weight's axis `name`, what is stored here."""
    placement = _AMBIENT.get()
    axes = () if placement is None else placement.kept[names][names.index(name)]
    if not axes:
        return x
    size = x.shape[dim] // placement.count(axes)  # type: ignore[union-attr]
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * size, size, axis=dim)


def count_of(axes: Names) -> int:
    """How many devices lie along mesh axes."""
    placement = _AMBIENT.get()
    return 1 if placement is None else placement.count(axes)


def exchange(x: Shaped[Array, "n ..."], axes: Names) -> Shaped[Array, "m ..."]:
    """Of parts of all n to all parts of n / devices, one device's after the other: an all-to-all. n is padded."""
    x = jnp.pad(x, ((0, -x.shape[0] % count_of(axes)), *[(0, 0)] * (x.ndim - 1)))
    x = jax.lax.optimization_barrier(x)  # XLA for CPU gives the zeros another layout than the rest, and fails
    return jax.lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)


def exchange_back(x: Shaped[Array, "m ..."], axes: Names, *, n: int) -> Shaped[Array, "n ..."]:
    """Undo `exchange` of n."""
    return jax.lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)[:n]


def parts_of(names: Names) -> Parts:
    """The mesh axes over which each dim of a weight lies in parts."""
    placement = _AMBIENT.get()
    return ((),) * len(names) if placement is None else placement.of_dims(names)


def _check_divides(
    names: Names, shapes: list[tuple[int, ...]], split: Mapping[str, Names], sizes: Mapping[str, int]
) -> None:
    for dim, name in enumerate(names):
        parts = math.prod(sizes[axis] for axis in split.get(name, ()))
        bad = next((shape[dim] for shape in shapes if shape[dim] % parts), None)
        if bad is not None:
            axes = " x ".join(f"{axis} {sizes[axis]}" for axis in split[name])
            devices = math.prod(sizes.values())
            best = max(n for n in range(1, min(bad, parts) + 1) if bad % n == 0 and devices % n == 0)
            raise MeshError(f"mesh: {axes} does not divide the {bad} of {name}; the nearest size that does is {best}")


def _kept(
    names: Names, shapes: list[tuple[int, ...]], split: Mapping[str, Names], rules: Rules, sizes: Mapping[str, int]
) -> Parts:
    """Storage axes of each dim, as `sharding.rules` has them chosen."""
    kept: list[Names] = [()] * len(names)
    if len(names) == 1 or names in SMALL:
        return tuple(kept)
    taken = {axis for name in names for axis in split.get(name, ())}
    part = max(map(math.prod, shapes)) // math.prod(sizes[axis] for axis in taken)
    for dim, name in [*enumerate(names)] * 2:
        if any(kept) and part <= SMALL_PART:
            break
        parts = math.prod(sizes[a] for a in (*split.get(name, ()), *kept[dim]))
        free = (axis for axis in rules.stored.get(name, ()) if axis not in taken and sizes[axis] > 1)
        axis = next((axis for axis in free if all(shape[dim] % (parts * sizes[axis]) == 0 for shape in shapes)), None)
        if axis is not None:
            kept[dim] = (*kept[dim], axis)
            taken.add(axis)
            part //= sizes[axis]
    return tuple(kept)
