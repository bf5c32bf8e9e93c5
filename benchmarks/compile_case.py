"""Compiles one registered case for a TPU topology; run as a subprocess of `static_cycles`, which sets the environment.

usage: python -m benchmarks.compile_case CASE TOPOLOGY; prints one JSON object.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from benchmarks.cases import cases_of


def compile_for(
    topology: str, fn: Callable[..., Any], shapes: tuple[Any, ...], *, donate: tuple[int, ...] = ()
) -> jax.stages.Compiled:
    """Compile `fn` for one device of a TPU topology that need not exist."""
    device = topologies.get_topology_desc(topology_name=topology, platform="tpu").devices[0]
    sharding = SingleDeviceSharding(device)
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)
    return jax.jit(fn, donate_argnums=donate).trace(*placed).lower(lowering_platforms=("tpu",)).compile()


def main(name: str, topology: str) -> None:
    """Compile the case and print its traffic and temporaries in bytes."""
    _, (case,) = cases_of(name)
    fn, shapes, donate = case.build()
    compiled = compile_for(topology, fn, shapes, donate=donate)
    memory: Any = compiled.memory_analysis()
    traffic = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((shapes, compiled.out_info)))
    print(json.dumps({"hbm_bytes": traffic, "temp_bytes": memory.temp_size_in_bytes}))


if __name__ == "__main__":
    main(*sys.argv[1:])
