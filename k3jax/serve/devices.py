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

from k3jax.nn.cache import Pools
from k3jax.nn.placement import lay_out, on_devices, specs_of, with_places
from k3jax.nn.transformer import Transformer
from sharding.local import Placement
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
        mesh, placement = lay_out(sizes, TABLES[mode], model, devices)
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
        pool_specs, history_specs = self.pool_specs(pools), self.row_specs(history)
        return on_devices(
            partial(program, top=top),
            self.mesh,
            self.placement,
            in_specs=(self.model_specs, pool_specs, history_specs, self.row_specs(rows)),
            out_specs=(pool_specs, history_specs, self.placement.spec_of("batch")),
            donate=(1, 2),
        )

    def blank(self, tree: Any, specs: Any) -> Any:
        """Shapes of a tree with their places."""
        return with_places(tree, self.mesh, specs)
