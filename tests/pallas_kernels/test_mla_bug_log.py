"""Faults that other implementations of latent attention and Attention Residuals had, each with a test of its kind."""

from pathlib import Path

import pytest

# The test of the kind, and where the fault was reported.
KNOWN = {
    "pallas_kernels/test_mla.py": {
        "test_paged_decode_equals_float64_and_changes_only_the_new_tokens": "sglang#36880, #38997, flashinfer#5042: "
        "padding index -1 wraps to another request's slot",
        "test_a_page_that_does_not_exist_gives_nan_and_touches_nothing": "tpu-inference#2366: ids outside are clipped",
        "test_padding_may_hold_nan": "maxtext#3699, transformers#48205: padded rows enter the gradient (0 * inf)",
    },
    "pallas_kernels/test_mla_tpu.py": {
        "test_paged_decode_equals_float64_and_changes_only_the_new_tokens": "sglang#36880, in the kernel",
        "test_a_page_that_does_not_exist_gives_nan_and_touches_nothing": "tpu-inference#2366, in the kernel",
    },
    "pallas_kernels/test_attn_res.py": {
        "test_the_key_norm_is_folded_into_the_query_in_float32": "vllm-ascend#13315: scores drift, norm then product",
    },
    "aot/test_attn_res_kernels.py": {
        "test_reads_stay_within_their_cycles_and_make_no_copies": "vllm-ascend#13452: the sources joined in float32",
    },
}


@pytest.mark.parametrize(("file", "test"), [(file, test) for file, tests in KNOWN.items() for test in tests])
def test_every_known_fault_has_a_test(file, test):
    assert f"def {test}(" in (Path(__file__).parents[1] / file).read_text(encoding="utf-8")
