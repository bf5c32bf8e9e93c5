"""What a checkpoint holds, family by family, from headers alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from k3jax.checkpoint import orbax_io
from k3jax.checkpoint.hf_import import HFCheckpoint
from k3jax.checkpoint.load import find_step
from k3jax.checkpoint.names import TABLE, VISION_PREFIXES, Family, Placement, active_parameters, axis_sizes, placements
from k3jax.checkpoint.safetensors_dir import DTYPES, CheckpointError, SafetensorsDir
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
    """A checkpoint's families, and what is beside the text model."""

    config: ModelConfig
    rows: list[Row]
    vision_tensors: int = 0
    vision_bytes: int = 0


def inspect_directory(path: Path) -> Summary:
    """Summary of a directory in the released layout or from Orbax; `CheckpointError` or `ConfigError` as in `load`."""
    if SafetensorsDir.present(path):
        checkpoint = HFCheckpoint.open(path)
        rows = _rows(checkpoint.config, lambda placement: checkpoint.stored(next(placement.tensors())[0]).dtype)
        vision = [t for name, t in checkpoint.files.tensors.items() if name.startswith(VISION_PREFIXES)]
        return Summary(checkpoint.config, rows, len(vision), sum(tensor.nbytes for tensor in vision))
    step = find_step(path)
    try:
        config, leaves = orbax_io.read_model_config(step), orbax_io.stored_leaves(step, orbax_io.WEIGHTS)
    except orbax_io.DamagedError as error:
        raise CheckpointError(str(error)) from error
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}

    def dtype_of(placement: Placement) -> str:
        if placement.leaves[0] not in leaves:
            raise CheckpointError(f"{step}: holds no {placement.leaves[0]}, which its config implies")
        return names[np.dtype(leaves[placement.leaves[0]].dtype)]

    return Summary(config, _rows(config, dtype_of))


def inspect_config(config: ModelConfig) -> Summary:
    """Summary of the released-layout checkpoint that a model of this config would have."""
    return Summary(config, _rows(config, lambda placement: _RELEASED_DTYPES[placement.family.dtype]))


def _rows(config: ModelConfig, dtype_of: Callable[[Placement], str]) -> list[Row]:
    sizes = axis_sizes(config)
    counts: dict[tuple[Family, str], int] = {}
    for placement in placements(config):
        key = (placement.family, dtype_of(placement))
        counts[key] = counts.get(key, 0) + math.prod(placement.lead)
    rows = []
    for (family, dtype), count in sorted(counts.items(), key=lambda item: TABLE.index(item[0][0])):
        shape = family.layout.disk_shape(sizes)
        parameters = family.parameters(count * math.prod(shape))
        rows.append(Row(family, count, shape, dtype, parameters, active_parameters(config, family, parameters)))
    return rows


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
    if summary.vision_tensors:
        lines.append(("vision", f"{summary.vision_tensors} tensors, {summary.vision_bytes:,} bytes, not in the table"))
    return lines
