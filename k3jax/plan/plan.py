"""A recipe and a slice to a plan: a JSON-like record of every mode."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from k3jax.config import ConfigError, ServeRun, TrainRun, load_any_run
from k3jax.plan.chips import chip_of
from k3jax.plan.compiled import compile_program, topology_devices
from k3jax.plan.estimate import Estimate
from k3jax.plan.report import needed_bytes
from k3jax.plan.serve import ServeProgram
from k3jax.plan.train import TrainProgram
from sharding.mesh import Slice, check_sizes, find_slice

Plan = dict[str, Any]


class Program(Protocol):
    """A mode of a run on a mesh: what it takes, and the program to compile."""

    def estimate(self) -> Estimate:
        """Numbers of one device."""

    def lower(self) -> Any:
        """The program, lowered for TPUs."""


class PlannedDevice:
    """Stands for a device that only a layout needs."""

    platform, process_index = "plan", 0

    def __init__(self, number: int):
        self.id = number


def make_plan(
    config: str,
    overrides: Sequence[str],
    *,
    topology: str,
    modes: Sequence[str] = (),
    compile_too: bool = False,
    save: Path | None = None,
) -> Plan:
    """The plan of a recipe's modes (by default all that it has); raises `ConfigError` and `MeshError`."""
    run, slice_ = load_any_run(config, overrides), find_slice(topology)
    known = ("train",) if isinstance(run, TrainRun) else ("prefill", "decode")
    wrong = next((mode for mode in modes if mode not in known), None)
    if wrong is not None:
        raise ConfigError(f"--mode {wrong}: {config} is a recipe for {' and '.join(known)}")
    taken = next((save / mode for mode in modes or known if save and (save / mode).exists()), None)
    if taken is not None:
        raise ConfigError(f"--save {save}: {taken} exists already")
    check_sizes(dataclasses.asdict(run.mesh), slice_.devices, grow="fsdp" if isinstance(run, TrainRun) else "data")
    devices = topology_devices(topology) if compile_too else [PlannedDevice(n) for n in range(slice_.devices)]
    records = {}
    for mode in modes or known:
        program = _program(run, mode, devices, slice_)
        records[mode] = _record(program.estimate(), slice_)
        if compile_too:
            records[mode]["compiled"] = _compiled(program, save and save / mode)
    fits = all(needed_bytes(record) <= slice_.memory for record in records.values())
    plan = {"config": config, "topology": topology, "devices": slice_.devices, "memory": slice_.memory}
    return {**plan, "mesh": _sizes(run), "fits": fits, "modes": records}


def _program(run: TrainRun | ServeRun, mode: str, devices: list[Any], slice_: Slice) -> Program:
    if isinstance(run, TrainRun):
        return TrainProgram.of(run, devices)
    return ServeProgram.of(run, mode, devices, slice_.chip)


def _record(estimate: Estimate, slice_: Slice) -> Plan:
    terms = estimate.seconds(chip_of(slice_))
    limit = max(terms, key=lambda term: terms[term])
    return {
        "per_device_bytes": {kind: round(size) for kind, size in estimate.held.items()},
        "total_bytes": round(estimate.bytes),
        "argument_bytes": round(estimate.arguments),
        "output_bytes": round(estimate.results),
        "flops": estimate.flops,
        "hbm_bytes": round(estimate.hbm_bytes),
        "axis_bytes": {axis: round(size) for axis, size in estimate.axis_bytes.items()},
        "seconds": terms,
        "roofline_s": terms[limit],
        "limit": limit,
        "tokens": estimate.tokens,
        "tokens_per_s": estimate.tokens / terms[limit],
    }


def _compiled(program: Program, place: Path | None) -> Plan:
    compiled, record = compile_program(program.lower)
    if place is not None:
        from k3jax.plan.executable import save_executable

        save_executable(compiled, place, record)
    return record


def _sizes(run: TrainRun | ServeRun) -> dict[str, int]:
    return {axis: size for axis, size in dataclasses.asdict(run.mesh).items() if size > 1}
