"""The device mesh: five named axes that always exist, for one slice or several, and start-up of several processes."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXES = ("data", "fsdp", "expert", "tensor", "context")


class MeshError(ValueError):
    """A mesh that these devices, or this model, cannot form; the message names the numbers and a choice that works."""


@dataclasses.dataclass(frozen=True)
class Slice:
    """A kind of TPU slice: its topology's name for the compiler, devices, and usable memory of a device in bytes."""

    topology: str
    devices: int
    memory: int

    @property
    def chip(self) -> str:
        """The generation, such as "tpu7x"."""
        return self.topology.partition(":")[0]


# Usable memory of a device as the compiler reports it, and devices of a chip.
_MEMORY = {"tpu7x": int(94.74 * 2**30), "v5p": int(95.74 * 2**30), "v6e": int(31.25 * 2**30), "v5e": int(15.75 * 2**30)}
_CORES = {"tpu7x": 2}
# Where a slice has three dims; the others have two.
_SIZES = {
    "tpu7x": ((2, 2, 1), (2, 2, 2), (4, 2, 2), (4, 4, 2), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8), (8, 8, 16)),
    "v5p": ((2, 2, 1), (2, 2, 2), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8), (8, 8, 16), (8, 16, 16)),
    "v6e": ((2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)),
    "v5e": ((2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)),
}
SLICES = {
    f"{chip}:{'x'.join(map(str, size))}": Slice(
        f"{chip}:{'x'.join(map(str, size))}", math.prod(size) * _CORES.get(chip, 1), _MEMORY[chip]
    )
    for chip, sizes in _SIZES.items()
    for size in sizes
}


def find_slice(topology: str) -> Slice:
    """The slice of a topology's name; raises `MeshError` with the nearest name."""
    if topology in SLICES:
        return SLICES[topology]
    near = difflib.get_close_matches(topology, SLICES, n=1, cutoff=0.0)
    raise MeshError(f"topology = {topology}: no such slice; did you mean {near[0]}? known: {', '.join(SLICES)}")


def make_mesh(sizes: Mapping[str, int], devices: Sequence[Any] | None = None, *, slices: int = 1) -> Mesh:
    """A mesh of `devices` (all of them by default) with `sizes` along `AXES`, neighbours on a torus kept together.

    With several `slices` the data axis, a multiple of them, goes across slices over the data-centre network, and every
    other axis stays inside one. Raises `MeshError` where the product is not the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = [sizes.get(axis, 1) for axis in AXES]
    check_sizes(sizes, len(devices))
    if slices > 1:
        if shape[0] % slices:
            raise MeshError(f"mesh.data = {shape[0]}: {slices} slices need a multiple of {slices}")
        parts = [_arrange([shape[0] // slices, *shape[1:]], part) for part in _of_slices(devices, slices)]
        array = np.concatenate(parts)
    else:
        array = _arrange(shape, devices)
    return Mesh(array, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def check_sizes(sizes: Mapping[str, int], devices: int, *, grow: str = "fsdp") -> None:
    """Raise `MeshError` unless the axes' product is the number of devices; the message has a fitting size of `grow`."""
    shape = {axis: sizes.get(axis, 1) for axis in AXES}
    bad = next((axis for axis, size in shape.items() if size < 1), None)
    if bad:
        raise MeshError(f"mesh.{bad} = {shape[bad]}: must be at least 1")
    product = math.prod(shape.values())
    if product != devices:
        others = product // shape[grow]
        fix = f"mesh.{grow}={devices // others}" if devices % others == 0 else f"mesh.{grow}={devices} and 1 elsewhere"
        text = " x ".join(f"{axis} {size}" for axis, size in shape.items() if size > 1) or "1"
        raise MeshError(f"mesh = {text} = {product} devices, but there are {devices}; {fix} would fit")


def slices_of_run() -> int:
    """How many slices this run spans: `K3JAX_SLICES`, 1 by default."""
    return _number("K3JAX_SLICES", "1")


def start_processes() -> None:
    """Join the processes of a pod, or of a plain cluster of CPUs; does nothing for a single process.

    On Cloud TPU and under a cluster scheduler JAX finds the other processes itself. Elsewhere `K3JAX_COORDINATOR`
    (host:port), `K3JAX_PROCESSES` and `K3JAX_PROCESS` say where and who this one is.
    """
    coordinator, hosts = os.environ.get("K3JAX_COORDINATOR"), os.environ.get("TPU_WORKER_HOSTNAMES", "")
    if coordinator:
        processes, process = _number("K3JAX_PROCESSES"), _number("K3JAX_PROCESS")
        jax.distributed.initialize(coordinator, processes, process)
    elif "," in hosts or "MEGASCALE_COORDINATOR_ADDRESS" in os.environ:
        jax.distributed.initialize()


def _number(name: str, default: str = "") -> int:
    value = os.environ.get(name, default)
    if not value.isdecimal():
        raise MeshError(f"{name} = {value!r}: must be a number; K3JAX_COORDINATOR needs K3JAX_PROCESSES, K3JAX_PROCESS")
    return int(value)


def _arrange(shape: Sequence[int], devices: Sequence[Any]) -> np.ndarray:
    """Devices in mesh order; a TPU's by their place on the torus."""
    if devices[0].platform != "tpu":
        return np.array(devices).reshape(shape)
    from jax.experimental import mesh_utils

    return mesh_utils.create_device_mesh(tuple(shape), devices, allow_split_physical_axes=True)


def _of_slices(devices: Sequence[Any], slices: int) -> list[list[Any]]:
    """Devices by slice; processes stand for slices where the platform has none."""
    groups: dict[int, list[Any]] = {}
    for device in devices:
        groups.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    if len(groups) == 1:
        size = len(devices) // slices
        groups = {i: list(devices[i * size : (i + 1) * size]) for i in range(slices)}
    if len(groups) != slices:
        raise MeshError(f"slices = {slices}: the devices come in {len(groups)} slices")
    return [groups[index] for index in sorted(groups)]
