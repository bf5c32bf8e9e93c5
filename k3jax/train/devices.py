"""A training run on its devices: one, or a mesh of them over any number of processes.

On a mesh every program is one `shard_map` over all axes: the function that one device runs is the plain one, with
`sharding.local` telling it what it has a part of (docs/adr).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3jax.checkpoint.orbax_io import named_leaves
from k3jax.config import ConfigError, DataConfig, MeshShape
from k3jax.data import Batch
from k3jax.nn.placement import lay_out, on_devices, on_mesh, specs_by_name, specs_of, with_places
from k3jax.train.step import TrainState
from sharding.local import Placement
from sharding.mesh import slices_of_run
from sharding.rules import TRAIN


@dataclass(frozen=True)
class Devices:
    """The mesh of a run, with the layouts of its state and its batches."""

    mesh: Mesh
    placement: Placement
    state_specs: TrainState

    @classmethod
    def of(cls, shape: MeshShape, state: TrainState, devices: list[Any] | None = None) -> Devices:
        """The devices of a run whose state has these shapes; raises `ConfigError` where a mesh cannot be."""
        mesh, placement = lay_out(dataclasses.asdict(shape), TRAIN, state, devices, slices=slices_of_run())
        return cls(mesh, placement, _state_specs(state, placement))

    def batch_specs(self, batch: Batch) -> Batch:
        """The layout of a batch: places of a row lie along `seq`, its images with every part of the row."""
        texts, images = self.placement.spec_of("batch", "seq"), self.placement.spec_of("batch")
        of = lambda path, _: images if path[0].name in ("patches", "grids") else texts  # noqa: E731
        return jax.tree_util.tree_map_with_path(of, batch)

    def jit(self, step: Callable[..., Any], data: DataConfig, out_specs: Any, *, donate: bool = False) -> Any:
        """`step(state, batch)` to be run on these devices, for the batches of `data`."""
        in_specs, donated = (self.state_specs, self.batch_specs(_shapes(data))), (0,) if donate else ()
        return on_devices(step, self.mesh, self.placement, in_specs=in_specs, out_specs=out_specs, donate=donated)

    def create(self, make: Callable[[], TrainState]) -> TrainState:
        """The state that `make` describes, each device making its own part."""
        return jax.jit(make, out_shardings=on_mesh(self.mesh, self.state_specs))()

    def put_state(self, state: TrainState) -> TrainState:
        """A state that this process has whole, spread over the devices."""
        return jax.device_put(state, on_mesh(self.mesh, self.state_specs))

    def blank(self, state: TrainState) -> TrainState:
        """The shapes of a state with their places."""
        return with_places(state, self.mesh, self.state_specs)

    def placed(self, tree: Any) -> Any:
        """The shapes of a tree of variables with their places."""
        return with_places(tree, self.mesh, specs_of(tree, self.placement))

    def batch(self, data: DataConfig) -> Batch:
        """The shapes of a batch with their places."""
        batch = _shapes(data)
        return with_places(batch, self.mesh, self.batch_specs(batch))

    def check_batch(self, data: DataConfig, *, accumulate: int) -> None:
        """Raise `ConfigError` where devices and micro-batches would not get equal shares of a batch."""
        batch_size, pieces = data.batch_size, self.placement.count(self.placement.split["seq"])
        if data.seq_len % pieces:
            nearest = max(1, round(data.seq_len / pieces)) * pieces
            raise ConfigError(f"data.seq_len = {data.seq_len}: mesh.context = {pieces} must divide it; {nearest} fits")
        parts = self.placement.count(self.placement.split["batch"]) * accumulate
        if batch_size % parts:
            raise ConfigError(
                f"data.batch_size = {batch_size}: the mesh and accumulate = {accumulate} share rows out {parts} ways; "
                f"use a multiple, such as {max(1, round(batch_size / parts)) * parts}"
            )

    def rows(self, batch_size: int) -> range:
        """The rows of a batch that this process's devices read."""
        sharding = NamedSharding(self.mesh, self.placement.spec_of("batch"))
        places = sharding.addressable_devices_indices_map((batch_size,)).values()
        spans = [index[0].indices(batch_size) for index in places if index is not None]
        return range(min(start for start, _, _ in spans), max(stop for _, stop, _ in spans))

    def put(self, batch: Batch, *, first: int, batch_size: int) -> Batch:
        """A batch of `batch_size` rows over all processes, of which this one has those from `first` on."""
        if self.mesh.size == 1:
            return batch

        def one(local: np.ndarray, sharding: NamedSharding) -> jax.Array:
            def part(index: Any) -> np.ndarray:
                start, stop, _ = index[0].indices(batch_size)
                return local[(slice(start - first, stop - first), *index[1:])]

            return jax.make_array_from_callback((batch_size, *local.shape[1:]), sharding, part)

        return jax.tree.map(one, batch, on_mesh(self.mesh, self.batch_specs(batch)))


def _shapes(data: DataConfig) -> Batch:
    images = {"row_images": data.row_images, "row_patches": data.row_patches}
    return Batch.shapes(data.batch_size, data.seq_len, **images)


def _state_specs(state: TrainState, placement: Placement) -> TrainState:
    params = specs_of(state.params, placement)
    whole: Any = PartitionSpec()
    return dataclasses.replace(
        state,
        step=whole,
        params=params,
        opt_state=specs_by_name(state.opt_state, named_leaves(params)),
        router_bias=specs_of(state.router_bias, placement),
        frozen=None if state.frozen is None else specs_of(state.frozen, placement),
    )
