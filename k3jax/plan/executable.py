"""Compiled programs kept in files: the executable's own bytes, and a description that needs no TPU to read.

No pickle: what a program is called with is described in JSON, and the bytes are for the runtime alone. They are native
code all the same, so load only what you saved yourself. A client that only compiles, for a topology that is not there,
cannot load them ("must be constructed with a Client"): that takes the devices.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from k3jax.config import ConfigError


def save_executable(compiled: Any, place: Path, record: dict[str, Any]) -> None:
    """Write the folder `place`, as a whole or not at all: the executable and its arguments, results and memory."""
    partial = place.with_name(f".{place.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    executable = compiled.runtime_executable()
    (partial / "executable.bin").write_bytes(executable.serialize())
    mesh = next(sharding.mesh for sharding in jax.tree.leaves(compiled.input_shardings))
    description = {
        "made_by": _maker(mesh.devices.flat[0]),
        "mesh": dict(mesh.shape),
        "device_ids": [device.id for device in mesh.devices.flat],
        "arguments": _described(compiled.in_avals, compiled.input_shardings),
        "results": _described(compiled.out_info, compiled.output_shardings),
        **record,
    }
    (partial / "description.json").write_text(json.dumps(description, indent=1) + "\n")
    partial.rename(place)


def load_executable(place: Path, devices: Sequence[Any] | None = None) -> LoadedExecutable:
    """A program that `save_executable` wrote, on these devices (all by default), without compiling.

    Raises `ConfigError` where the folder is no such program, or was made by another jax, runtime or kind of device, or
    for devices that are not here. The bytes are native code: give it no folder that you would not run.
    """
    devices = list(jax.devices() if devices is None else devices)
    try:
        description = json.loads((place / "description.json").read_text())
        code = (place / "executable.bin").read_bytes()
        made_by, ids = description["made_by"], description["device_ids"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{place}: no saved program ({type(error).__name__}: {error})") from error
    for name, here in _maker(devices[0]).items():
        if made_by.get(name) != here:
            raise ConfigError(f"{place}: made by {name} {made_by.get(name)!r}, here is {here!r}; compile it again")
    present = {device.id: device for device in devices}
    missing = [number for number in ids if number not in present]
    if missing:
        raise ConfigError(
            f"{place}: made for {len(ids)} devices; device {missing[0]} is not among these {len(present)}"
        )
    array = np.array([present[number] for number in ids]).reshape(list(description["mesh"].values()))
    mesh = Mesh(array, tuple(description["mesh"]), axis_types=(AxisType.Auto,) * array.ndim)
    executable = devices[0].client.deserialize_executable(code, list(array.flat))
    return LoadedExecutable(executable, mesh, description)


@dataclass(frozen=True)
class LoadedExecutable:
    """A program from a file; `description` is what lies beside it."""

    executable: Any
    mesh: Mesh
    description: dict[str, Any]

    def __call__(self, *arguments: Any) -> dict[str, jax.Array]:
        """Run it on trees of arrays like those it was compiled for; donated arrays are gone afterwards.

        Arrays go to their places if they are not there. Returns the results by name, in the order of their tree's
        leaves. Raises ValueError for an argument of another name, shape or dtype.
        """
        given, wanted = jax.tree_util.tree_leaves_with_path((arguments, {})), self.description["arguments"]
        if len(given) != len(wanted):
            raise ValueError(f"{len(given)} arrays for a program of {len(wanted)} arguments")
        placed = [
            self._placed(jax.tree_util.keystr(path), x, as_) for (path, x), as_ in zip(given, wanted, strict=True)
        ]
        out = self.executable.execute_sharded([x for x in placed if x is not None])
        parts = out.disassemble_into_single_device_arrays()
        return {
            result["name"]: jax.make_array_from_single_device_arrays(
                tuple(result["shape"]), self._sharding(result["axes"]), shards
            )
            for result, shards in zip(self.description["results"], parts, strict=True)
        }

    def _placed(self, name: str, x: jax.Array, wanted: dict[str, Any]) -> jax.Array | None:
        """The array where the program looks for it; None where the program has no use for it."""
        found = {"name": name, "shape": list(x.shape), "dtype": str(x.dtype)}
        different = next((key for key in found if found[key] != wanted[key]), None)
        if different is not None:
            raise ValueError(f"argument {wanted['name']}: {different} {found[different]}, needs {wanted[different]}")
        return None if wanted["axes"] is None else jax.device_put(x, self._sharding(wanted["axes"]))

    def _sharding(self, axes: list[Any]) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*(tuple(a) if isinstance(a, list) else a for a in axes)))


def _maker(device: Any) -> dict[str, str]:
    """What must be the same where a program is loaded."""
    return {"jax": jax.__version__, "device": device.device_kind, "runtime": device.client.platform_version}


def _described(shapes: Any, shardings: Any) -> list[dict[str, Any]]:
    """Every array of a tree by its place in it, whole shape, dtype and the mesh axes that each dim is spread over.

    `axes` is null for an argument that the program does not use.
    """
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    structure: Any = jax.tree.structure(shapes)
    places = structure.flatten_up_to(shardings)  # None also stands where a tree has no node
    return [
        {
            "name": jax.tree_util.keystr(path),
            "shape": list(x.shape),
            "dtype": str(x.dtype),
            "axes": None if sharding is None else list(sharding.spec),
        }
        for (path, x), sharding in zip(leaves, places, strict=True)
    ]
