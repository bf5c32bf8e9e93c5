"""The expert kernels compile at K3's shapes, within their budgets of cycles and bytes."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from benchmarks.cases.case import shape
from benchmarks.cases.grouped_matmul import mlp
from benchmarks.compile_case import compile_for
from benchmarks.static_cycles import environment
from pallas_kernels.grouped_matmul import expert_ffn
from pallas_kernels.mx import MXFP4Array, decode_layout
from tests.aot.marks import NEEDS_TPU_COMPILER, V7X

pytestmark = NEEDS_TPU_COMPILER


@pytest.mark.parametrize(
    ("case", "topology", "budget"),
    [
        ("mxfp4_decode_r2", V7X, 9_800),
        ("mxfp4_decode_r4", V7X, 11_100),
        ("mxfp4_decode_r16", V7X, 12_500),
        ("mxfp4_decode_words_r16", "v6e:2x2", 17_100),
        ("mxfp4_decode_words_r16", "v5p:2x2x1", 19_100),
    ],
)
def test_decode_stays_within_its_cycles_per_expert_and_copies_no_weights(case, topology, budget, row_of):
    row = row_of(case, topology)
    assert row["cycles_per_unit"] <= budget
    assert row["temp_bytes"] < 0.05 * row["hbm_bytes"]


def test_decode_reads_a_layer_of_a_stack_without_copying_it(compile_on):
    layers, experts, width, hidden = 3, 56, 3584, 3072
    outs = [(hidden, width), (hidden, width), (width, hidden)]
    weights = [
        jax.eval_shape(decode_layout, MXFP4Array(*(shape(jnp.uint8, layers, experts, n, k // b) for b in (2, 32))))
        for n, k in outs
    ]

    def decode(x, weights, sizes):
        def layer(x, index):
            own = (w.at_layer(index) for w in weights)
            return expert_ffn(x, *own, sizes, beta=4.0, linear_beta=25.0, implementation="tpu"), None

        return jax.lax.scan(layer, x, jnp.arange(layers))[0]

    compiled = compile_on(decode, shape(jnp.bfloat16, 4, width), weights, shape(jnp.int32, experts))
    assert compiled.memory_analysis().temp_size_in_bytes < 2**21  # 128 rows of words; a layer's weights are a GB


MATRIX_UNIT = {"matmul": 21_504, "mlp_r128": 16_128, "mlp_r512": 64_512}  # cycles at 2 rows a cycle


@pytest.mark.parametrize(
    ("case", "budget"),
    [
        ("mxfp4_decode_r64", 14_000),
        ("gmm_bf16_r512", MATRIX_UNIT["matmul"]),
        ("gmm_bf16_r512_bwd", 1.25 * 2 * MATRIX_UNIT["matmul"]),
        ("mxfp4_prefill_r128", 1.09 * MATRIX_UNIT["mlp_r128"]),
        ("mxfp4_prefill_r512", MATRIX_UNIT["mlp_r512"]),
        ("mxfp4_prefill_r512_mxfp8", 1.1 * MATRIX_UNIT["mlp_r512"]),
    ],
)
def test_many_rows_stay_near_the_matrix_unit(case, budget, row_of):
    row = row_of(case, V7X)
    assert row["cycles_per_unit"] <= budget
    assert row["temp_bytes"] < 0.3 * row["hbm_bytes"]  # rows in the layout's order and the hidden, no weights


@pytest.mark.parametrize(
    ("case", "topology"),
    [
        ("mxfp4_prefill_r128_words", "v6e:2x2"),
        ("mxfp4_prefill_r128_words", "v5p:2x2x1"),
        ("gmm_bf16_r512", "v5p:2x2x1"),
    ],
)
def test_many_rows_compile_for_chips_without_float4(case, topology):
    command = [sys.executable, "-m", "benchmarks.compile_case", case, topology]
    done = subprocess.run(command, env=environment(topology), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize(
    ("topology", "layout", "experts"),
    [
        (V7X, "decode", 7),
        (V7X, "decode", 28),
        ("v6e:2x2", "decode_words", 14),
        ("v5p:2x2x1", "decode_words", 7),
    ],
)
def test_mxfp4_kernels_compile_for_fewer_experts_a_device(topology, layout, experts, tpu7x):
    """K3's 896 experts over 16 devices are 56 each, which the tests above compile for; over 32, 64 or 128, fewer."""
    for rows in (16, 128):  # one for each kind of kernel
        program, shapes, _ = mlp(rows, experts, layout)
        memory = compile_for(topology, program, shapes).memory_analysis()
        assert memory.temp_size_in_bytes < 0.1 * memory.argument_size_in_bytes  # rows, no weights
