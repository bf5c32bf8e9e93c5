"""Programs compiled for a TPU topology on a machine without a TPU, and what the compiler says of them."""

from __future__ import annotations

import importlib
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from k3jax.config import ConfigError

# libtpu asks the network what machine this is unless it is told; it compiles for any topology all the same.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "tpu7x-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_PLATFORMS": "cpu",
}
_COLLECTIVE = re.compile(
    r"stablehlo\.(all_gather|all_reduce|reduce_scatter|all_to_all|collective_permute)\"?\(|@(ragged_all_to_all)\("
)


def topology_devices(topology: str) -> list[Any]:
    """The devices of a TPU topology, to compile for; raises `ConfigError` without libtpu."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        importlib.import_module("libtpu")
    except ImportError as error:
        raise ConfigError("--compile needs the TPU compiler: pip install 'k3jax[aot]'") from error
    from jax.experimental import topologies

    return list(topologies.get_topology_desc(topology_name=topology, platform="tpu").devices)


def compile_program(lower: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """The compiled program, and the record of it: bytes of one device, seconds, collectives in the lowered program.

    A collective inside a loop is counted once, whatever its trips.
    """
    from pallas_kernels.dispatch import compiling_for

    began = time.monotonic()
    with compiling_for("tpu"):
        lowered = lower()
    lowering = time.monotonic() - began
    compiled = lowered.compile()
    compiling = time.monotonic() - began - lowering
    memory, text = compiled.memory_analysis(), lowered.as_text()
    return compiled, {
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "peak_bytes": memory.peak_memory_in_bytes,
        "lower_s": round(lowering, 1),
        "compile_s": round(compiling, 1),
        "collectives": _collectives(text),
        "stablehlo_lines": text.count("\n"),
    }


def _collectives(text: str) -> dict[str, int]:
    """Calls in a lowered program by name."""
    found = Counter((one or other).replace("_", "-") for one, other in _COLLECTIVE.findall(text))
    return dict(sorted(found.items()))
