"""Serving programs on a mesh: where model, pools and rows lie, and the programs as one `shard_map`.

Rows, slots and pages belong to a share of the batch: a device sees those of its share, numbered from 0.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, PartitionSpec

from k3jax.nn.cache import Pools
from k3jax.nn.param import is_variable
from k3jax.nn.placement import lay_out, on_devices, on_mesh, specs_of, with_places
from k3jax.nn.transformer import Transformer
from sharding.local import Placement, joined
from sharding.rules import TABLES


@dataclass(frozen=True)
class ServeDevices:
    """A mesh, and the layout of a model on it for one mode: "prefill" or "decode"."""

    mesh: Mesh
    placement: Placement
    model_specs: Transformer

    @classmethod
    def of(cls, sizes: dict[str, int], mode: str, model: Transformer, devices: list[Any] | None = None) -> ServeDevices:
        """For a model of these shapes; raises `ConfigError` where a mesh cannot be. One process needs not use all."""
        if devices is None and jax.process_count() == 1:
            devices = jax.devices()[: math.prod(sizes.values())]
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
            name = getattr(path[-1] if path else None, "name", "tokens")  # the targets of tokens have none
            is_chunk = name == "tokens" and leaf.ndim == 2
            return self.placement.spec_of("batch", *(("seq",) if is_chunk else ()))

        return jax.tree_util.tree_map_with_path(one, rows)

    def jit(self, program: Callable[..., Any], pools: Pools, history: Any, rows: tuple[Any, ...]) -> Any:
        """`program(model, pools, history, *rows)` of `serve.programs` with pools and history donated.

        Every device gets what was sampled for all rows, so that every process can read it.
        """
        pool_specs, history_specs = self.pool_specs(pools), self.row_specs(history)
        return on_devices(
            partial(_sampled_everywhere, program),
            self.mesh,
            self.placement,
            in_specs=(self.model_specs, pool_specs, history_specs, *self.row_specs(rows)),
            out_specs=(pool_specs, history_specs, PartitionSpec()),
            donate=(1, 2),
            compiler_options=self._compiler_options,
        )

    def jit_pools(self, program: Callable[..., Any], pools: Pools) -> Any:
        """`program(pools, numbers, numbers)` with pools donated and as many numbers for each share of the batch."""
        specs, numbers = self.pool_specs(pools), self.placement.spec_of("batch")
        in_specs = (specs, numbers, numbers)
        return on_devices(program, self.mesh, self.placement, in_specs=in_specs, out_specs=specs, donate=(0,))

    @property
    def _compiler_options(self) -> dict[str, Any] | None:
        """On TPUs: without it, tpu7x's compiler copies all bfloat16 weights to tiles of 16 rows at every call."""
        if self.mesh.devices.flat[0].platform != "tpu":
            return None
        return {"xla_tpu_control_large_2nd_minor_layout_for_x16": False}

    def create(self, make: Callable[[], Any], specs: Any) -> Any:
        """The arrays that `make` describes, each device making its own part."""
        return make() if self.mesh.size == 1 else jax.jit(make, out_shardings=on_mesh(self.mesh, specs))()

    def put(self, tree: Any, specs: Any) -> Any:
        """Arrays of the host, the same in every process, on the devices."""
        if self.mesh.size == 1:
            return jax.device_put(tree)
        one = lambda x, place: jax.make_array_from_callback(x.shape, place, lambda index: x[index])  # noqa: E731
        return jax.tree.map(one, tree, on_mesh(self.mesh, specs))

    def blank_rows(self, rows: Any) -> Any:
        """Shapes of rows with their places; on one device the rows themselves."""
        return rows if self.mesh.size == 1 else self.blank(rows, self.row_specs(rows))

    def blank(self, tree: Any, specs: Any) -> Any:
        """Shapes of a tree with their places."""
        return with_places(tree, self.mesh, specs)


def lay_out_heads(model: Transformer, put: Callable[[Any, Format], Any]) -> Transformer:
    """A model whose weights of heads, [.., inputs, heads, width], lie in a TPU's memory with their inputs innermost.

    That is how products read them: without it the compiler copies every such weight at every call. `put` gives an array
    (or its shape) the format.
    """

    def one(variable: Any) -> Any:
        value, axes = variable.get_value(), variable.axes
        if value is None or len(axes) != 3 or not axes[1].endswith("_heads"):
            return variable
        *stacked, inputs, heads, width = range(value.ndim)
        layout = Layout(major_to_minor=(*stacked, heads, width, inputs))
        return variable.replace(put(value, Format(layout, value.sharding)))

    return jax.tree.map(one, model, is_leaf=is_variable)


def _sampled_everywhere(program: Callable[..., Any], *arguments: Any) -> Any:
    pools, history, sampled = program(*arguments)
    prompt = jax.tree.map(lambda x: joined(x, "seq", dim=1), sampled.prompt)
    sampled = dataclasses.replace(sampled, prompt=prompt)
    return pools, history, jax.tree.map(lambda x: joined(x, "batch", dim=0), sampled)
