"""Long rows of KDA compile for TPUs: on one device, and cut into pieces over the devices of a slice."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.cases.case import shape
from pallas_kernels.kda import kda
from sharding.context_parallel import context_parallel_kda

pytestmark = [pytest.mark.aot, pytest.mark.timeout(900)]

HEADS, WIDTH, LENGTH = 8, 128, 131_072
TOKENS = shape(jnp.bfloat16, 1, LENGTH, HEADS * WIDTH)
BETA, STATE = shape(jnp.float32, 1, LENGTH, HEADS), shape(jnp.float32, 1, HEADS, WIDTH, WIDTH)
PARAMETERS = shape(jnp.float32, HEADS), shape(jnp.float32, HEADS, WIDTH)

local = functools.partial(kda, lower_bound=-5.0, implementation="tpu")


def split_heads(q, k, v, gate, beta, a_log, dt_bias):
    tokens = {"q": q, "k": k, "v": v, "gate": gate}
    tokens = {name: x.reshape(*x.shape[:2], HEADS, WIDTH) for name, x in tokens.items()}
    return tokens | {"beta": beta, "a_log": a_log, "dt_bias": dt_bias}


def join_heads(output):
    return output.reshape(*output.shape[:2], HEADS * WIDTH)


def test_kda_of_a_long_row_compiles_with_few_temporaries(compile_on):
    def forward(state, *arrays):
        output, state = local(**split_heads(*arrays), initial_state=state)
        return join_heads(output), state

    compiled = compile_on(forward, STATE, *[TOKENS] * 4, BETA, *PARAMETERS)
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 0.1 * (memory.argument_size_in_bytes + memory.output_size_in_bytes)


def test_a_row_over_eight_devices_exchanges_states_and_no_tokens(tpu7x):
    devices = topologies.get_topology_desc(topology_name="tpu7x:2x2x1", platform="tpu").devices
    mesh = Mesh(np.array(devices), ("context",), axis_types=(AxisType.Auto,))
    rows = P(None, "context")

    def piece(ids, state, *arrays):
        arguments = split_heads(*arrays) | {"initial_state": state, "segment_ids": ids}
        output, state = context_parallel_kda(local, **arguments, axis="context")
        return join_heads(output), state

    specs = rows, P(), *[rows] * 5, P(), P()
    program = jax.shard_map(piece, mesh=mesh, in_specs=specs, out_specs=(rows, P()), check_vma=False)
    arguments = shape(jnp.int32, 1, LENGTH), STATE, *[TOKENS] * 4, BETA, *PARAMETERS
    placed = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for x, spec in zip(arguments, specs, strict=True)
    ]
    lowered = jax.jit(program).trace(*placed).lower(lowering_platforms=("tpu",))
    gathered = re.findall(r"stablehlo.all_gather.* -> (tensor<\S+>)", lowered.as_text())
    states, ids = ["tensor<8x1x8x128x128xf32>"] * 2, ["tensor<8x1xi32>"] * 2
    assert sorted(gathered) == sorted(states + ids)  # M and C; the first and the last segment id
    memory = lowered.compile().memory_analysis()
    print(f"\ntemporaries {memory.temp_size_in_bytes / 2**20:.0f} MiB of a device")
