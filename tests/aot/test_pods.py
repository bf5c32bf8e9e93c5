"""The whole model compiles for pods: the programs of `train.py` and `serve.py`, 93 layers and 2.78 T weights.

`python -m benchmarks.pods` compiles them for more slices.
"""

import json

import pytest

from k3jax.plan.plan import make_plan
from tests.aot.marks import NEEDS_TPU_COMPILER

pytestmark = [*NEEDS_TPU_COMPILER, pytest.mark.timeout(2400)]

GIB = 2**30
SERVE, PREFILL = "configs/serve/k3_tpu7x.yaml", "configs/serve/k3_tpu7x_prefill.yaml"
TRAIN = "configs/train/k3_tpu7x.yaml"


@pytest.mark.parametrize(
    ("config", "topology", "mode", "most"),
    [
        pytest.param(SERVE, "tpu7x:4x4x4", "decode", 20, id="decode of 128 sequences on 64 chips"),
        pytest.param(PREFILL, "tpu7x:4x4x4", "prefill", 35, id="prefill of 128k tokens of a million on 64 chips"),
        pytest.param(TRAIN, "tpu7x:8x8x8", "train", 70, id="a training step of 8,192 tokens a device on 512 chips"),
    ],
)
def test_the_whole_model_fits_and_the_plan_knew(config: str, topology: str, mode: str, most: float, tmp_path):
    save = tmp_path if mode == "decode" else None
    record = make_plan(config, (), topology=topology, modes=(mode,), compile_too=True, save=save)["modes"][mode]
    compiled = record["compiled"]
    print(f"\n{mode} on {topology}: {compiled}")

    assert compiled["argument_bytes"] == pytest.approx(record["argument_bytes"], rel=0.01)
    assert compiled["output_bytes"] == pytest.approx(record["output_bytes"], rel=0.01)
    assert compiled["alias_bytes"] > 0.98 * compiled["output_bytes"]  # state and pools are updated in place
    assert compiled["peak_bytes"] < most * GIB
    assert record["total_bytes"] == pytest.approx(compiled["peak_bytes"], rel=0.1)
    if save is not None:
        _check_saved(save / mode)


def _check_saved(folder) -> None:  # type: ignore[no-untyped-def]
    """The executable lies beside a description of what it is called with."""
    description = json.loads((folder / "description.json").read_text())
    codes = next(a for a in description["arguments"] if a["name"].endswith(".kda_moe.ffn.w1.value.codes"))
    assert (codes["shape"][:2], codes["dtype"], codes["axes"]) == ([68, 896], "uint8", [None, ["expert", "tensor"]])
    assert (folder / "executable.bin").stat().st_size > 2**20
    assert (description["made_by"]["device"], sorted(description["device_ids"])) == ("TPU7x", [*range(128)])
    assert description["peak_bytes"] > 0
