"""Compiles one registered case for a TPU topology; run as a subprocess of `static_cycles`, which sets the environment.

usage: python -m benchmarks.compile_case CASE TOPOLOGY [ADAPTER]; prints one JSON object. With an adapter of
`benchmarks.peers` it compiles the peer's case of that name, under the peers' Python.
"""

import json
import platform
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from benchmarks import peers
from benchmarks.cases import cases_of
from benchmarks.cases.case import Case


def compile_for(
    topology: str, fn: Callable[..., Any], shapes: tuple[Any, ...], *, donate: tuple[int, ...] = ()
) -> jax.stages.Compiled:
    """Compile `fn` for one device of a TPU topology that need not exist."""
    sharding = SingleDeviceSharding(_device(topology))
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)
    return jax.jit(fn, donate_argnums=donate).trace(*placed).lower(lowering_platforms=("tpu",)).compile()


def _device(topology: str) -> Any:
    return topologies.get_topology_desc(topology_name=topology, platform="tpu").devices[0]


def _compile(case: Case, topology: str) -> dict[str, Any]:
    """The program's traffic and temporaries in bytes."""
    fn, shapes, donate = case.build()
    compiled = compile_for(topology, fn, shapes, donate=donate)
    memory: Any = compiled.memory_analysis()
    traffic = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((shapes, compiled.out_info)))
    return {"hbm_bytes": traffic, "temp_bytes": memory.temp_size_in_bytes}


def _compile_peer(name: str, topology: str, adapter: Any) -> dict[str, Any]:
    """The same for a peer's case, with the peer's name and the versions of what made the numbers."""
    versions = {distribution: version(distribution) for distribution in adapter.DISTRIBUTIONS}
    body = " ".join(next(iter(versions.items())))
    (case,) = (case for case in adapter.CASES if case.name == name)
    with adapter.lowering(_device(topology)):
        sizes = _compile(case, topology)
    return {"body": body, **sizes, "versions": {"python": platform.python_version(), **versions}}


def main(name: str, topology: str, adapter: str | None = None) -> None:
    """Compile the case and print what `static_cycles` adds to its row."""
    if adapter is None:
        _, (case,) = cases_of(name)
        print(json.dumps(_compile(case, topology)))
    else:
        print(json.dumps(_compile_peer(name, topology, peers.adapter(adapter))))


if __name__ == "__main__":
    main(*sys.argv[1:])
