"""The model as tensors of the released layout, in memory or as a directory."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from k3jax.checkpoint.layout import Sizes
from k3jax.checkpoint.names import PAD, PREFIX, Placement, axis_sizes, placements
from k3jax.checkpoint.orbax_io import named_leaves
from k3jax.checkpoint.safetensors_dir import INDEX
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
            tensors |= {PREFIX + name: jnp.asarray(stacked[index]) for name, index in placement.tensors()}
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


def save_hf(model: Transformer, directory: str | os.PathLike[str]) -> None:
    """Write the text model as a directory in the released layout: a shard for each layer, one for the rest.

    Everything is gathered in host memory. Files appear whole: the index, without which nothing loads, comes last.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: np.asarray(value) for name, value in hf_tensors(model).items()}
    weight_map: dict[str, str] = {}
    for file, names in _shards(tensors, model.config.num_layers):
        with _whole(directory / file) as temporary:
            save_file(
                {name: np.ascontiguousarray(tensors[name]) for name in names}, temporary, metadata={"format": "pt"}
            )
        weight_map |= dict.fromkeys(names, file)
    text_only = dataclasses.replace(model.config, vision_json="")
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    for file, content in (("config.json", text_only.to_hf()), (INDEX, index)):
        with _whole(directory / file) as temporary:
            temporary.write_text(json.dumps(content, indent=2), encoding="utf-8")


def _shards(names: Mapping[str, Any], num_layers: int) -> Iterator[tuple[str, list[str]]]:
    """(file, its tensors): layer l in shard l + 1 and what belongs to no layer in the last, as in the release."""
    parts: dict[int, list[str]] = {shard: [] for shard in range(1, num_layers + 2)}
    for name in names:
        _, in_layer, rest = name.partition("model.layers.")
        parts[int(rest.split(".")[0]) + 1 if in_layer else num_layers + 1].append(name)
    for shard, part in parts.items():
        yield f"model-{shard:05d}-of-{num_layers + 1:06d}.safetensors", part


@contextmanager
def _whole(file: Path) -> Iterator[Path]:
    """A temporary path that becomes `file` when the block ends without an error, and vanishes otherwise."""
    temporary = file.with_name(f".{file.name}.tmp")
    try:
        yield temporary
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
