"""Faults that other MXFP4 implementations had in public, each with a test here or elsewhere that fails on its kind."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.device_cases.grouped_matmul import check_first_expert
from pallas_kernels.grouped_matmul import expert_ffn
from pallas_kernels.mx import MXFP4Array, decode_layout, dequantize, quantize

# The test of the kind, and where the fault was reported.
KNOWN = {
    "test_mx.py": {
        "test_the_low_nibble_is_the_even_element_and_the_bias_is_127": "compressed-tensors#538: bias 125; "
        "imp#567: split instead of linear nibble order",
        "test_real_bytes_of_the_release": "compressed-tensors#538, imp#567, on released bytes",
        "test_the_last_of_896_experts_decodes_like_the_scalar_oracle": "b12x#116: groups of 16 for groups of 32",
        "test_every_code_with_every_scale_decodes_like_the_scalar_oracle": "colibri#819: scale codes 0 and 255",
        "test_a_nan_scale_is_reported_with_the_tensor_and_its_place": "colibri#819: 255 is NaN and refused at load",
        "test_bytes_that_went_through_another_dtype_are_refused": "tpu-inference: packed integers as float32",
        "test_shapes_that_disagree_are_refused_with_both": "b12x#116: scales of groups of 16",
    },
    "test_expert_decode_tpu.py": {
        "test_few_rows_decode_every_code_with_every_scale_exactly": "colibri#819, in the decode kernel",
        "test_many_rows_decode_every_code_with_every_exponent_exactly": "colibri#819, in its other body",
        "test_scales_that_a_device_would_get_wrong_keep_the_checkpoint_layout": "colibri#819: 0 and 255 on a device",
        "test_the_decode_layout_gives_every_byte_back": "imp#567: nibbles of the kernel's layouts",
        "test_the_decode_layout_puts_four_blocks_side_by_side": "imp#567, b12x#116: place and scale of each nibble",
    },
    "test_grouped_matmul_gpu.py": {
        "test_every_code_with_every_scale_is_decoded_exactly": "colibri#819, in the GPU kernel",
    },
    "test_grouped_matmul.py": {
        "test_nan_in_rows_past_the_last_group_reaches_nothing": "maxtext#3699: padded rows enter the gradient",
    },
    "test_mx_bug_log.py": {
        "test_codes_in_another_nibble_order_are_not_timed": "vllm#52190: throughput of garbage",
        "test_the_last_of_896_experts_is_the_one_that_the_kernel_reads": "b12x#116, in the kernels",
    },
}


@pytest.mark.parametrize(("file", "test"), [(file, test) for file, tests in KNOWN.items() for test in tests])
def test_every_known_fault_has_a_test(file, test):
    assert f"def {test}(" in Path(__file__).with_name(file).read_text(encoding="utf-8")


def swapped_nibbles(weight: MXFP4Array) -> MXFP4Array:
    return MXFP4Array((weight.codes << 4) | (weight.codes >> 4), weight.scales)


def test_codes_in_another_nibble_order_are_not_timed():
    rng = np.random.default_rng(0)
    shapes = (1, 32, 64), (1, 32, 64), (1, 64, 32)
    weights = [quantize(jnp.asarray(rng.normal(size=s) / 8, jnp.float32)) for s in shapes]
    rows = jnp.asarray(rng.normal(size=(4, 64)), jnp.bfloat16)

    def outputs(weights):
        return expert_ffn(rows, *weights, jnp.array([4]), beta=4.0, linear_beta=25.0)

    check_first_expert(outputs(weights), rows, weights)
    with pytest.raises(RuntimeError, match="nothing is timed"):
        check_first_expert(outputs([swapped_nibbles(w) for w in weights]), rows, weights)


def test_the_last_of_896_experts_is_the_one_that_the_kernel_reads():
    width, used = 256, [0, 511, 895]
    few = [quantize(np.random.default_rng(i).normal(size=(3, width, width)).astype(np.float32)) for i in range(3)]
    every = [jax.tree.map(lambda leaf: spread_out(leaf, used), w) for w in few]
    rows = jnp.asarray(np.random.default_rng(3).normal(size=(3, width)), jnp.bfloat16)
    sizes = jnp.zeros(896, jnp.int32).at[jnp.array(used)].set(1)
    options = {"beta": 4.0, "linear_beta": 25.0}
    packed = [jax.tree.map(jnp.asarray, decode_layout(w)) for w in every]
    got = expert_ffn(rows, *packed, sizes, implementation="tpu", **options)
    dense = [jnp.asarray(dequantize(w), jnp.bfloat16).swapaxes(1, 2) for w in few]
    want = expert_ffn(rows, *dense, jnp.ones(3, jnp.int32), implementation="reference", **options)
    np.testing.assert_allclose(np.float32(got), np.float32(want), rtol=0.02, atol=0.02 * float(jnp.abs(want).max()))


def spread_out(leaf, experts):
    """The three given experts in places of 896, zeros elsewhere."""
    out = np.zeros((896, *leaf.shape[1:]), leaf.dtype)
    out[experts] = leaf
    return out
