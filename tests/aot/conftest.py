"""Compiles for TPU topologies on a machine without a TPU; skips where libtpu is not installed."""

import importlib.util
import time
from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax.sharding import SingleDeviceSharding

from benchmarks.cases import cases_of
from benchmarks.cases.case import traced_on
from benchmarks.static_cycles import measure
from k3jax.plan.compiled import topology_devices

GIB = 2**30


@pytest.fixture(scope="session")
def tpu7x() -> SingleDeviceSharding:
    """The sharding of an array that lies on one device (half a chip) of a tpu7x topology."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed (make aot installs it)")
    return SingleDeviceSharding(topology_devices("tpu7x:2x2x1")[0])


@pytest.fixture
def compile_on(tpu7x: SingleDeviceSharding, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`compile_on(fn, *shapes, donate=())`: the program compiled for one device; prints its memory and compile time."""

    (device,) = tpu7x.device_set

    def compile_(fn: Callable[..., Any], *shapes: Any, donate: tuple[int, ...] = ()) -> Any:
        placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=tpu7x), shapes)
        start = time.perf_counter()
        with traced_on(device):
            lowered = jax.jit(fn, donate_argnums=donate).trace(*placed).lower(lowering_platforms=("tpu",))
        compiled = lowered.compile()
        memory = compiled.memory_analysis()
        print(
            f"\n{request.node.name}: arguments {memory.argument_size_in_bytes / GIB:.2f} GiB, "
            f"temporaries {memory.temp_size_in_bytes / GIB:.2f} GiB, "
            f"output {memory.output_size_in_bytes / GIB:.2f} GiB, of which "
            f"{memory.alias_size_in_bytes / GIB:.2f} GiB reuse arguments; {time.perf_counter() - start:.0f} s"
        )
        return compiled

    return compile_


@pytest.fixture
def row_of() -> Callable[[str, str], dict[str, Any]]:
    """`row_of(case, topology)`: the measured row of one registered case, printed."""

    def row(name: str, topology: str) -> dict[str, Any]:
        kernel, (case,) = cases_of(name)
        row = measure(kernel, case, topology)
        print(f"\n{name} on {topology}: {row['cycles']:,} cycles, {row['cycles_per_unit']:.2f} per unit")
        return row

    return row
