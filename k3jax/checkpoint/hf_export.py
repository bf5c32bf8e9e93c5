"""A model in memory as tensors of the released layout, or written out as a directory of them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from k3jax.checkpoint.exporter import export_checkpoint
from k3jax.checkpoint.layout import Sizes
from k3jax.checkpoint.names import PAD, Entry, Placement, axis_sizes, entries, placements
from k3jax.checkpoint.orbax_io import named_leaves
from k3jax.checkpoint.orbax_tree import join_parts
from k3jax.checkpoint.work import default_workers
from k3jax.nn.transformer import Transformer
from pallas_kernels.mx import MXFP4Array, dequantize


def hf_tensors(tree: Transformer, dense: bool = False) -> dict[str, jax.Array]:
    """{checkpoint name: array} of a model-shaped pytree (weights or gradients) in the checkpoint's layout.

    Layers and experts are unstacked, A_log is padded with zeros to the file's length, variables that hold None are left
    out. `dense` turns MXFP4 experts into float32 `experts.{e}.w1.weight`. Traceable: works under jit and grad.
    """
    values = {name: _host(leaf) for name, leaf in named_leaves(tree).items()}
    packed = [name.removesuffix(".codes") for name in values if name.endswith(".codes")]
    if dense:
        values |= {name: _float_weight(values[f"{name}.codes"], values[f"{name}.scales"]) for name in packed}
    config = dataclasses.replace(tree.config, quantized_experts=bool(packed) and not dense)
    sizes = axis_sizes(config)
    tensors: dict[str, jax.Array] = {}
    for placement in placements(config):
        if all(leaf == PAD or leaf in values for leaf in placement.leaves):
            stacked = _on_disk(placement, values, sizes)
            prefix = placement.family.prefix
            tensors |= {prefix + name: jnp.asarray(stacked[index]) for name, index in placement.tensors()}
    return tensors


def _host(array: jax.Array) -> Any:
    """A concrete array on the host, where changes of layout are views and nothing is compiled."""
    return array if isinstance(array, jax.core.Tracer) else np.asarray(array)


def _float_weight(codes: Any, scales: Any) -> Any:
    """An MXFP4 leaf, logically [..., out, in], as the float weight [..., in, out] that the model would hold."""
    return dequantize(MXFP4Array(codes, scales)).swapaxes(-1, -2)


def _on_disk(placement: Placement, values: Mapping[str, Any], sizes: Sizes) -> Any:
    """The family's tensors, stacked, in disk layout."""
    layout = placement.family.layout
    parts = [None if leaf == PAD else values[leaf] for leaf in placement.leaves]
    return layout.to_disk(parts[0] if len(parts) == 1 else layout.join(parts, sizes), sizes)


class ModelSource:
    """A model in memory as something to export."""

    def __init__(self, model: Transformer) -> None:
        self._values = {name: np.asarray(leaf) for name, leaf in named_leaves(model).items()}
        quantized = any(name.endswith(".codes") for name in self._values)
        described = model.config.vision_json if model.config.vision is not None else ""  # no tensors, no description
        self.config = dataclasses.replace(model.config, quantized_experts=quantized, vision_json=described)
        self.entries = entries(self.config)

    def dtype(self, entry: Entry) -> np.dtype:
        """Of an entry's tensors."""
        return self._values[entry.stacked[0]].dtype

    def read(self, entry: Entry, start: int, stop: int, buffer: np.ndarray | None = None) -> np.ndarray:
        """Rows `start` to `stop` of an entry's block; `buffer` is not used."""
        blocks = [
            None if name == PAD else self._values[name][entry.row].transpose(entry.order)[entry.rows(start, stop)]
            for name in entry.stacked
        ]
        return np.ascontiguousarray(join_parts(blocks, entry))

    def fill(self, out: np.ndarray, entry: Entry, part: int, index: tuple[slice, ...]) -> None:
        """Copy into `out` a slice of the entry's array number `part`, in the model's order of axes."""
        out[...] = self._values[entry.stacked[part]][entry.row][index]


def save_hf(model: Transformer, directory: str | os.PathLike[str]) -> None:
    """Write the model as a directory in the released layout: a shard for each layer, one for the rest.

    The model is gathered in host memory. Files appear whole: the index, without which nothing loads, comes last.
    """
    export_checkpoint(ModelSource(model), directory, workers=default_workers(), console=Console(quiet=True))
