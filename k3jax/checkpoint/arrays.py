"""Arrays of an Orbax tree through TensorStore: created, read and merged piece by piece, in Orbax's layout.

A tree is a folder with an OCDBT database (`manifest.ocdbt`, `d/`) of zarr arrays and `_METADATA`, which names them.
Each unit of an import fills a database of its own in `ocdbt.process_UNIT`, as each process does where Orbax saves, and
`merge` makes the tree's database refer to all of them. `_METADATA` comes last: a tree without it is not complete.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import tensorstore as ts

from k3jax.checkpoint.folder import Folder
from k3jax.checkpoint.names import PAD, Entry

METADATA = "_METADATA"
_UNIT = "ocdbt.process_{}/"
_CHUNK_BYTES = 2 << 20  # of a chunk, at least, where the tensor has as many
_CUTS = 8  # along a matrix's second axis: a mesh axis of this size reads exactly its bytes
_WITHIN_HEAD = {"head_dim", "nope_dim", "extra_dim", "nope_dim+extra_dim", "nope_dim+v_dim", "v_dim", "conv"}


Opened = list[ts.TensorStore | None]  # an entry's arrays, seen in the block's order of axes; None for PAD


class DamagedError(Exception):
    """A checkpoint's files are missing or unreadable."""


@dataclass(frozen=True)
class ArrayTree:
    """A complete Orbax tree, opened array by array."""

    folder: Folder

    @cached_property
    def _metadata(self) -> Mapping[str, Any]:
        try:
            metadata = json.loads(self.folder.read(METADATA))
            if not metadata["use_ocdbt"]:
                raise DamagedError(f"{self.folder}: not an OCDBT tree, which is all that k3jax writes")
            return metadata
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedError(f"{self.folder}: its metadata is missing or damaged") from error

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of its arrays."""
        keys = (value["key_metadata"] for value in self._metadata["tree_metadata"].values())
        return frozenset(".".join(part["key"] for part in key) for key in keys)

    @cached_property
    def _context(self) -> ts.Context:
        return ts.Context({"file_io_mode": {"mode": "memmap"}})  # a third of the time of copying into fresh memory

    def open(self, name: str) -> ts.TensorStore:
        """The array of this name; raises `DamagedError`."""
        driver = "zarr3" if self._metadata["use_zarr3"] else "zarr"
        kvstore = {"driver": "ocdbt", "base": self.folder.url, "path": f"{name}/"}
        try:
            return ts.open({"driver": driver, "kvstore": kvstore}, open=True, read=True, context=self._context).result()
        except ValueError as error:
            raise DamagedError(f"{self.folder}: {name}: {str(error).splitlines()[0]}") from error


def read_into(out: np.ndarray, array: ts.TensorStore, name: str) -> None:
    """Copy a (part of an) array into `out`; raises `DamagedError` naming it."""
    try:
        ts.array(out).write(array).result()
    except (ValueError, OSError) as error:
        raise DamagedError(f"{name}: {str(error).splitlines()[0]}") from error


def create(
    folder: Folder, unit: int, entry: Entry, dtype: np.dtype, context: ts.Context, transaction: ts.Transaction | None
) -> Opened:
    """New arrays for an entry in the database of `unit`."""
    base = folder.url + _UNIT.format(unit)
    parts = [entry.shape] if entry.split_axis is None else _part_shapes(entry)
    arrays: Opened = []
    for name, shape in zip(entry.arrays, parts, strict=True):
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"},
            "metadata": _zarr(entry, shape, dtype),
            "store_data_equal_to_fill_value": True,  # else a chunk of zeros could not be told from a lost one
        }
        if name == PAD:
            arrays.append(None)
        else:
            opened = ts.open(spec, create=True, context=context, transaction=transaction).result()
            arrays.append(opened.transpose(entry.order))
    return arrays


def _part_shapes(entry: Entry) -> list[tuple[int, ...]]:
    axis, shape = entry.split_axis, entry.shape
    assert axis is not None
    return [(*shape[:axis], size, *shape[axis + 1 :]) for size in entry.part_sizes()]


def _zarr(entry: Entry, shape: tuple[int, ...], dtype: np.dtype) -> dict[str, Any]:
    """Metadata of an array: logically in the model's order of axes, its bytes in the released order, uncompressed."""
    inverse = np.argsort(entry.order).tolist()
    chunk = chunk_shape(entry.axes, shape, dtype.itemsize)
    codecs: list[dict[str, Any]] = [
        {"name": "bytes", **({"configuration": {"endian": "little"}} if dtype.itemsize > 1 else {})}
    ]
    if inverse != sorted(inverse):
        codecs.insert(0, {"name": "transpose", "configuration": {"order": entry.order}})
    return {
        "shape": [shape[axis] for axis in inverse],
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [chunk[axis] for axis in inverse]}},
        "data_type": dtype.name,
        "codecs": codecs,
        "fill_value": 0,
    }


def chunk_rows(array: ts.TensorStore) -> int:
    """Rows of a chunk along the first axis."""
    shape: Any = array.chunk_layout.write_chunk.shape
    return int(shape[0])


def chunk_shape(axes: list[str], shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Chunks of a block: whole experts; else a matrix's second sharded axis in up to 8, and rows to make up 2 MiB."""
    chunk = list(shape)
    if axes[0] != "experts":
        wide = [i for i in range(1, len(axes)) if axes[i] not in _WITHIN_HEAD]
        if wide and math.prod(shape) * itemsize > _CUTS * _CHUNK_BYTES:
            axis = max(wide, key=lambda i: shape[i])
            chunk[axis] //= math.gcd(_CUTS, shape[axis])
    row = math.prod(chunk[1:]) * itemsize
    chunk[0] = next((n for n in _divisors(shape[0]) if n * row >= _CHUNK_BYTES), shape[0])
    return tuple(chunk)


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def clear_unit(folder: Folder, unit: int) -> None:
    """Remove what an interrupted import left of a unit."""
    folder.delete(_UNIT.format(unit))


def merge(folder: Folder, units: Iterable[int]) -> None:
    """Make the tree's database refer to the arrays of all units; repeating it changes nothing."""
    context = ts.Context()
    tree = ts.KvStore.open({"driver": "ocdbt", "base": folder.url}, context=context).result()
    transaction = ts.Transaction(atomic=True)
    copies = []
    for unit in units:
        base = folder.url + _UNIT.format(unit)
        part = ts.KvStore.open({"driver": "ocdbt", "base": base}, context=context).result()
        copies.append(part.experimental_copy_range_to(tree.with_transaction(transaction)))
    for copy in copies:
        copy.result()
    transaction.commit_async().result()


def write_metadata(folder: Folder, names: Iterable[str]) -> None:
    """Complete a tree: `_METADATA` as Orbax writes it for a flat dict of arrays."""
    value = {"value_type": "jax.Array", "skip_deserialize": False}
    tree = {str((name,)): {"key_metadata": [{"key": name, "key_type": 2}], "value_metadata": value} for name in names}
    flags = {"use_ocdbt": True, "use_zarr3": True, "store_array_data_equal_to_fill_value": True}
    folder.write(METADATA, json.dumps({"tree_metadata": tree, **flags, "custom_metadata": None}).encode())
