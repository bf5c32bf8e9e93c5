"""Pallas kernels compile for every TPU we name, within their budget of cycles; a known loop proves the count."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.static_cycles import environment, read_schedules
from tests.aot.marks import NEEDS_TPU_COMPILER, V7X

pytestmark = NEEDS_TPU_COMPILER

TOPOLOGIES = (V7X, "v6e:2x2", "v5p:2x2x1", "v5e:2x2")

KNOWN_LOOP = """
import jax, jax.numpy as jnp
from jax.experimental import pallas as pl
from benchmarks.compile_case import compile_for

def body(x, o):
    o[...] = jax.lax.fori_loop(0, {trips}, lambda i, x: jnp.exp(x) * 0.5, x[...])

def fn(x):
    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="known_loop")(x)

compile_for({topology!r}, fn, (jax.ShapeDtypeStruct((8, 128), jnp.float32),))
"""


def cycles_of_known_loop(folder: Path, topology: str, trips: int) -> int:
    code = KNOWN_LOOP.format(trips=trips, topology=topology)
    folder.mkdir()
    subprocess.run([sys.executable, "-c", code], env=environment(topology, folder), check=True)
    schedules = read_schedules(folder, topology)
    assert [loop.trips for schedule in schedules for loop in schedule.loops] == [trips]
    return sum(schedule.cycles for schedule in schedules)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_cycles_grow_with_the_trips_of_a_real_loop(topology, tmp_path):
    few, many = (cycles_of_known_loop(tmp_path / str(trips), topology, trips) for trips in (37, 137))
    body, rest = divmod(many - few, 100)
    assert rest == 0
    assert 5 < body < 50  # an exponential and a multiplication, nothing to overlap


@pytest.mark.parametrize("topology", TOPOLOGIES[1:])
@pytest.mark.parametrize("case", ["kda_fwd_bwd_h8_t4096", "kda_decode_b256_h96"])
def test_kda_compiles_for_other_chips(case, topology, row_of):
    assert row_of(case, topology)["cycles"] > 0


@pytest.mark.parametrize(
    ("case", "budget"),
    [
        ("kda_fwd_h8_t4096", 3.6),
        ("kda_fwd_h16_t4096", 3.3),
        ("kda_fwd_h96_t4096", 3.3),
        ("kda_fwd_bwd_h8_t4096", 10.0),
        ("kda_decode_b256_h96", 78),
    ],
)
def test_kda_stays_within_its_cycles_per_head_and_token(case, budget, row_of):
    row = row_of(case, V7X)
    assert row["cycles_per_unit"] <= budget
    assert all(0 <= used <= 1 for used in row["utilisation"].values())


def test_kda_moves_little_more_than_its_inputs_and_outputs(row_of):
    forward, decode = row_of("kda_fwd_h8_t4096", V7X), row_of("kda_decode_b256_h96", V7X)
    assert forward["temp_bytes"] < 0.15 * forward["hbm_bytes"]  # no layout copies
    states = 2 * 256 * 96 * 128 * 128 * 4
    assert decode["hbm_bytes"] < 1.1 * states
    assert decode["temp_bytes"] < 0.01 * states  # in place
