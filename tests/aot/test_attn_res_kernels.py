"""The kernels of Attention Residuals compile for the TPUs we name, within their cycles and without copies."""

import json
import subprocess
import sys

import pytest

from benchmarks.static_cycles import environment
from tests.aot.marks import NEEDS_TPU_COMPILER, V7X

pytestmark = NEEDS_TPU_COMPILER


@pytest.mark.parametrize(
    ("case", "budget"),
    [
        ("attn_res_bank_t1024", 375),
        ("attn_res_bank_bwd_t1024", 810),
        ("attn_res_read_t1024", 54),
        ("attn_res_read_bwd_t1024", 102),
    ],
)
def test_reads_stay_within_their_cycles_and_make_no_copies(case, budget, row_of):
    """Also vllm-ascend#13452: no part of the sources exists a second time, whatever the number of tokens."""
    row = row_of(case, V7X)
    assert row["cycles_per_unit"] <= budget
    assert row["temp_bytes"] < 0.02 * row["hbm_bytes"]


@pytest.mark.parametrize("topology", ["v6e:2x2", "v5p:2x2x1"])
@pytest.mark.parametrize("case", ["attn_res_bank_bwd_t1024", "attn_res_read_bwd_t1024"])
def test_attn_res_compiles_for_other_chips(case, topology):
    command = [sys.executable, "-m", "benchmarks.compile_case", case, topology]
    done = subprocess.run(command, env=environment(topology), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    sizes = json.loads(done.stdout.splitlines()[-1])
    assert sizes["temp_bytes"] < 0.02 * sizes["hbm_bytes"]
