"""`python -m k3jax.plan` on the recipes for pods, without compiling; the programs themselves compile in tests/aot."""

import json

import pytest

from k3jax.plan.__main__ import main

TRAIN, SERVE = "configs/train/k3_tpu7x.yaml", "configs/serve/k3_tpu7x.yaml"


def plan(tmp_path, *arguments: str) -> tuple[int, dict]:
    out = tmp_path / "plan.json"
    code = main([*arguments, "--json", str(out)])
    return code, json.loads(out.read_text())


def test_a_training_plan_counts_every_byte_of_the_state(tmp_path):
    code, record = plan(tmp_path, "--config", TRAIN, "--topology", "tpu7x:8x8x8")
    assert (code, record["fits"], record["devices"]) == (0, True, 1024)
    train = record["modes"]["train"]
    sizes = train["per_device_bytes"]
    # 2.78 T float32 weights, and as much momentum, over 1,024 devices; what is small is held whole.
    assert 2.779e12 * 4 / 1024 < sizes["weights"] < 1.01 * 2.779e12 * 4 / 1024
    assert sizes["weights"] < sizes["optimizer"] < 1.02 * sizes["weights"]
    assert train["flops"] > 3 * 8192 * 2.15e11
    assert {"expert", "fsdp"} <= set(train["axis_bytes"])
    assert train["roofline_s"] == max(train["seconds"].values())


def test_a_serving_plan_has_both_modes(tmp_path, capsys):
    code, record = plan(tmp_path, "--config", SERVE, "--topology", "tpu7x:4x4x4")
    assert code == 0
    assert set(record["modes"]) == {"prefill", "decode"}
    decode = record["modes"]["decode"]
    assert decode["limit"] == "memory"
    # 128 sequences of 32,768 tokens with 576 bfloat16 values in each of 24 layers, over 128 devices.
    assert decode["per_device_bytes"]["mla_cache"] == pytest.approx(32768 * 576 * 2 * 24, rel=0.02)
    assert "GiB" in capsys.readouterr().out


def test_what_does_not_fit_says_both_numbers_and_what_to_change(tmp_path, capsys):
    small = ("mesh.fsdp=1", "data.batch_size=128")
    code, record = plan(tmp_path, "--config", TRAIN, "--topology", "tpu7x:4x4x4", *small)
    assert (code, record["fits"]) == (1, False)
    text = " ".join(capsys.readouterr().out.split())
    assert "does not fit: train needs" in text
    assert "of a device that has 94.7" in text
    assert "more devices along mesh.fsdp or mesh.expert" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--config", TRAIN, "--topology", "tpu7x:9x9x9"), "topology = tpu7x:9x9x9: no such slice; did you mean"),
        (("--config", TRAIN, "--topology", "tpu7x:4x4x4"), "= 1024 devices, but there are 128; mesh.fsdp=1 would fit"),
        (("--config", SERVE, "--topology", "tpu7x:4x4x4", "--mode", "train"), "is a recipe for prefill and decode"),
        (("--config", SERVE, "--topology", "tpu7x:4x4x4", "--mode", "sing"), "one of train, prefill, decode"),
        (("--config", SERVE, "--topology", "tpu7x:4x4x4", "slots=126"), "slots = 126: in prefill the mesh shares rows"),
        (("--config", SERVE, "--topology", "tpu7x:4x4x4", "mesh.tensor=128", "mesh.expert=1"), "not divide the 96"),
        (("--config", TRAIN, "--topology", "tpu7x:8x8x8", "data.batch_size=1000"), "data.batch_size = 1000:"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(capsys, arguments, message):
    assert main(list(arguments)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
