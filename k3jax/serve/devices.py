"""Serving programs on a mesh: where model, pools and rows lie, and the programs as one `shard_map`.

Rows, slots and pages belong to a share of the batch: a device sees those of its share, numbered from 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from k3jax.config import ConfigError
from k3jax.nn.cache import Pools
from k3jax.nn.placement import on_mesh, place, specs_of
from k3jax.nn.transformer import Transformer
from sharding.local import Placement, placed
from sharding.mesh import MeshError, make_mesh
from sharding.rules import TABLES


@dataclass(frozen=True)
class ServeDevices:
    """A mesh, and the layout of a model on it for one mode: "prefill" or "decode"."""

    mesh: Mesh
    placement: Placement
    model_specs: Transformer

    @classmethod
    def of(cls, sizes: dict[str, int], mode: str, model: Transformer, devices: list[Any] | None = None) -> ServeDevices:
        """For a model of these shapes; raises `ConfigError` where a mesh cannot be."""
        try:
            mesh = make_mesh(sizes, devices)
            placement = place(mesh.shape, TABLES[mode], model)
        except MeshError as error:
            raise ConfigError(str(error)) from error
        return cls(mesh, placement, specs_of(model, placement))

    @property
    def shares(self) -> int:
        """Into how many parts the mesh splits rows, slots and pages."""
        return self.placement.count(self.placement.split["batch"])

    def pool_specs(self, pools: Pools) -> Pools:
        """The layout of the pools: slots and pages by share of the batch, heads and pieces of pages within it."""
        # History has q, k and v of a device's own heads side by side; an extra row of a page is of two tokens.
        dims = {
            "state": (None, "batch", "kda_heads"),
            "history": (None, "batch", None, "kda_heads"),
            "latent": (None, "batch", "page"),
            "extra": (None, "batch", "page"),
            "scale": (None, "batch", None, "page"),
        }
        of = lambda path, _: self.placement.spec_of(*dims[path[-1].name])  # noqa: E731
        return jax.tree_util.tree_map_with_path(of, pools)

    def row_specs(self, rows: Any) -> Any:
        """The layout of what has a row for each sequence; the tokens of a chunk lie along `seq`."""

        def one(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
            is_chunk = getattr(path[-1], "name", "") == "tokens" and leaf.ndim == 2
            return self.placement.spec_of("batch", *(("seq",) if is_chunk else ()))

        return jax.tree_util.tree_map_with_path(one, rows)

    def jit(self, program: Callable[..., Any], pools: Pools, history: Any, rows: Any, *, top: int) -> Any:
        """`program(model, pools, history, rows)` of `serve.programs` with pools and history donated."""
        run = partial(program, top=top)
        if self.mesh.size == 1:
            return jax.jit(run, donate_argnums=(1, 2))

        def local(*args: Any) -> Any:
            with placed(self.placement):
                return run(*args)

        pool_specs, history_specs = self.pool_specs(pools), self.row_specs(history)
        in_specs = (self.model_specs, pool_specs, history_specs, self.row_specs(rows))
        out_specs = (pool_specs, history_specs, self.placement.spec_of("batch"))
        program = jax.shard_map(local, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return jax.jit(program, donate_argnums=(1, 2))

    def blank(self, tree: Any, specs: Any) -> Any:
        """Shapes of a tree with their places."""
        place = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)  # noqa: E731
        return jax.tree.map(place, tree, on_mesh(self.mesh, specs))
