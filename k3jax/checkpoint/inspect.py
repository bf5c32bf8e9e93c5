"""What a checkpoint holds, family by family, from headers alone."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from k3jax.checkpoint.names import (
    TABLE,
    VISION,
    VISION_FAMILIES,
    Family,
    active_parameters,
    tensor_specs,
)
from k3jax.checkpoint.safetensors_dir import DTYPES
from k3jax.checkpoint.source import Source, open_source
from k3jax.config import ModelConfig
from pallas_kernels.mx import BLOCK

_RELEASED_DTYPES = {"weight": "BF16", "float32": "F32", "uint8": "U8"}


@dataclass(frozen=True)
class Row:
    """All tensors of one family, in the released layout."""

    family: Family
    count: int
    shape: tuple[int, ...]
    dtype: str
    parameters: int
    active: int  # parameters that one token uses

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self.count * math.prod(self.shape) * np.dtype(DTYPES[self.dtype]).itemsize


@dataclass(frozen=True)
class Summary:
    """A checkpoint's families."""

    config: ModelConfig
    rows: list[Row]


def inspect_directory(path: str | os.PathLike[str]) -> Summary:
    """Summary of a directory in the released layout or from Orbax; `CheckpointError` or `ConfigError` as in `load`."""
    return summarise(open_source(path))


def summarise(source: Source) -> Summary:
    """Summary of an open checkpoint."""
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    tensors = ((e.family, e.tensor_shape, names[source.dtype(e)], e.experts or 1) for e in source.entries)
    return Summary(source.config, _rows(source.config, tensors))


def inspect_config(config: ModelConfig) -> Summary:
    """Summary of the released-layout checkpoint that a model of this config would have."""
    dtypes = _RELEASED_DTYPES
    specs = ((s.family, s.shape, dtypes[s.family.dtype], 1) for s in tensor_specs(config))
    return Summary(config, _rows(config, specs))


def _rows(config: ModelConfig, tensors: Iterable[tuple[Family, tuple[int, ...], str, int]]) -> list[Row]:
    """The table of (family, shape, dtype, how many)."""
    counts: Counter[tuple[Family, tuple[int, ...], str]] = Counter()
    for family, shape, dtype, count in tensors:
        counts[_in_table(family), shape, dtype] += count
    order = {family: i for i, family in enumerate(TABLE)}
    rows = []
    for (family, shape, dtype), count in sorted(counts.items(), key=lambda item: order.get(item[0][0], len(TABLE))):
        parameters = family.parameters(count * math.prod(shape))
        rows.append(Row(family, count, shape, dtype, parameters, active_parameters(config, family, parameters)))
    return rows


def _in_table(family: Family) -> Family:
    """The table's family of a vision tensor that was carried by its name alone."""
    if family.where != VISION:
        return family
    name = re.sub(r"\.blocks\.\d+\.", ".blocks.{b}.", family.name)
    return next((known for known in VISION_FAMILIES if known.name == name), family)


def show(summary: Summary, console: Console) -> None:
    """Print the families as a table, then the totals and the model's features."""
    table = Table("family", "in", "tensors", "shape", "dtype", "bytes", "parameters")
    for column in table.columns:
        column.no_wrap = True
    for column in table.columns[2:]:
        column.justify = "right"
    for row in summary.rows:
        shape = " x ".join(map(str, row.shape))
        numbers = (f"{row.nbytes:,}", f"{row.parameters:,}")
        table.add_row(row.family.name, row.family.where, f"{row.count:,}", shape, row.dtype, *numbers)
    console.print(table)
    for label, text in features(summary):
        console.print(f"{label:<14}{text}", highlight=False, soft_wrap=True)


def features(summary: Summary) -> list[tuple[str, str]]:
    """(label, text) of the totals and of what the model has."""
    config, rows, moe = summary.config, summary.rows, summary.config.moe
    kinds = [config.layer_kind(layer) for layer in range(config.num_layers)]
    count = {part: sum(part in kind.split("_") for kind in kinds) for part in ("kda", "mla", "dense", "moe")}
    last = config.num_layers - (config.num_snapshots - 1) * config.attn_res_block
    families = len({row.family.name for row in rows})
    lines = [
        ("model", config.name),
        ("tensors", f"{sum(row.count for row in rows):,} in {families} families"),
        ("bytes", f"{sum(row.nbytes for row in rows):,}"),
        ("parameters", f"{sum(row.parameters for row in rows):,}, active {sum(row.active for row in rows):,}"),
        ("quantisation", f"MXFP4 experts, blocks of {BLOCK}" if config.quantized_experts else "none"),
        ("layers", f"{len(kinds)}: {count['kda']} KDA, {count['mla']} MLA; {count['dense']} dense, {count['moe']} MoE"),
        ("experts", f"{moe.num_experts}, {moe.top_k} active, {moe.num_shared} shared; latent width {moe.latent_width}"),
        ("AttnRes", f"{config.num_snapshots} blocks of {config.attn_res_block} layers, {last} in the last"),
        ("context", f"{config.max_context:,} tokens, vocabulary {config.vocab_size:,}"),
    ]
    vision = [row for row in rows if row.family.where == VISION]
    if vision:
        size = f"{sum(row.count for row in vision)} tensors, {sum(row.parameters for row in vision):,} parameters"
        lines.append(("vision", size))
    return lines
