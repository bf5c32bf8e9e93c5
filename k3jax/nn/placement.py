"""A model on a mesh: where its weights lie, and the layouts of trees of them.

A layout is a `PartitionSpec` for each array. Specs come from the axes that the weights themselves name, so a weight is
declared once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3jax.config import ConfigError
from k3jax.nn.param import is_variable
from pallas_kernels.mx import MXFP4Array
from sharding.local import Placement, placed
from sharding.mesh import MeshError, make_mesh, start_processes
from sharding.rules import Rules

Tree = TypeVar("Tree")


def place(sizes: Mapping[str, int], rules: Rules, *trees: Any) -> Placement:
    """The placement of all variables of trees (arrays or shapes); raises `MeshError` where sizes do not fit."""
    variables = [v for tree in trees for v in jax.tree.leaves(tree, is_leaf=is_variable) if is_variable(v)]
    weights = ((v.axes, v.get_value().shape) for v in variables if v.get_value() is not None)
    return Placement.of(sizes, rules, dict.fromkeys(weights))  # in the trees' order, for the same message every time


def join_processes() -> None:
    """Join the run's other processes, if it has any; raises `ConfigError` where the environment names them badly."""
    try:
        start_processes()
    except MeshError as error:
        raise ConfigError(str(error)) from error


def lay_out(
    sizes: Mapping[str, int], rules: Rules, tree: Any, devices: list[Any] | None, *, slices: int = 1
) -> tuple[Mesh, Placement]:
    """A mesh of devices (by default all) and the placement of a tree on it; raises `ConfigError` where none can be."""
    try:
        mesh = make_mesh(sizes, devices, slices=slices)
        return mesh, place(mesh.shape, rules, tree)
    except MeshError as error:
        raise ConfigError(str(error)) from error


def on_devices(
    program: Callable[..., Any],
    mesh: Mesh,
    placement: Placement,
    *,
    in_specs: tuple[Any, ...],
    out_specs: Any,
    donate: tuple[int, ...],
    compiler_options: dict[str, Any] | None = None,
) -> Any:
    """`program` jitted for the mesh, as one `shard_map` over all axes; for a single device as it is."""
    if mesh.size == 1:
        return jax.jit(program, donate_argnums=donate, compiler_options=compiler_options)

    def local(*args: Any) -> Any:
        with placed(placement):
            return program(*args)

    whole = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(whole, donate_argnums=donate, compiler_options=compiler_options)


def specs_of(tree: Tree, placement: Placement) -> Tree:
    """The layout of a tree of variables, with a variable's spec (or None) in its place."""

    def one(variable: nnx.Variable) -> nnx.Variable:
        value, axes = variable.get_value(), variable.axes
        if isinstance(value, MXFP4Array):  # codes and scales may be laid out in any way behind the expert's number
            spec = PartitionSpec(*[None] * (len(value.shape) - len(axes)), placement.split[axes[0]] or None)
            return variable.replace(jax.tree.map(lambda _: spec, value))
        return variable.replace(None if value is None else placement.spec(axes, value.ndim))

    return jax.tree.map(one, tree, is_leaf=is_variable)


def specs_by_name(tree: Any, named: Mapping[str, PartitionSpec]) -> Any:
    """The layout of a tree with dicts of arrays by a weight's name in it; an array of no weight is whole everywhere."""

    def one(path: tuple[Any, ...], _: Any) -> PartitionSpec:
        keys = (key.key for key in path if isinstance(key, jax.tree_util.DictKey))
        return next((named[key] for key in keys if key in named), PartitionSpec())

    return jax.tree_util.tree_map_with_path(one, tree)


def on_mesh(mesh: Mesh, specs: Any) -> Any:
    """Shardings from a layout."""
    is_spec = lambda node: isinstance(node, PartitionSpec)  # noqa: E731
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)


def with_places(shapes: Tree, mesh: Mesh, specs: Any) -> Tree:
    """The shapes of a tree with their places."""
    place = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)  # noqa: E731
    return jax.tree.map(place, shapes, on_mesh(mesh, specs))
