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


def test_a_run_in_stages_is_planned_at_its_largest(tmp_path):
    stages = "stages=[{until: 0.5, seq_len: 8192, batch_size: 1024}, {until: 1.0, seq_len: 262144, batch_size: 1024}]"
    code, record = plan(tmp_path, "--config", TRAIN, "--topology", "tpu7x:8x8x8", stages)
    assert (code, record["fits"], record["modes"]["train"]["tokens"]) == (1, False, 1024 * 262144)


def test_a_small_model_is_planned_too(tmp_path):
    where = (
        "--config",
        "configs/serve/tiny_cpu.yaml",
        "--topology",
        "v6e:2x2",
        "plan_model=k3_tiny",
        "mesh.data=4",
        "prefill_rows=4",
    )
    code, record = plan(tmp_path, *where)
    assert (code, set(record["modes"])) == (0, {"prefill", "decode"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--config", TRAIN, "--topology", "tpu7x:9x9x9"), "topology = tpu7x:9x9x9: no such slice; did you mean"),
        (("--config", TRAIN, "--topology", "tpu7x:4x4x4"), "= 1024 devices, but there are 128; mesh.fsdp=1 would fit"),
        (("--config", SERVE, "--topology", "tpu7x:4x4x4", "--mode", "train"), "is a recipe for prefill and decode"),
        (("--config", SERVE, "--topology", "tpu7x:4x4x4", "--mode", "sing"), "one of train, prefill, decode"),
        (("--config", SERVE, "--topology", "tpu7x:4x4x4", "slots=126"), "slots = 126: in prefill the mesh shares rows"),
        (("--config", SERVE, "--topology", "tpu7x:4x4x4", "mesh.tensor=128", "mesh.expert=1"), "not divide the 96"),
        (("--config", SERVE, "--topology", "tpu7x:4x4x4", "mesh.tensor=64", "mesh.expert=2"), "that does is 32"),
        (("--config", SERVE, "--topology", "tpu7x:4x4x4", "mesh.tensor=16"), "mesh.data=2 would fit"),
        (("--config", SERVE, "--topology", "tpu7x:4x4x4", "latents=fp4"), "latents = 'fp4': must be one of"),
        (("--config", SERVE, "--topology", "tpu7x:4x4x4", "slots=-8"), "slots = -8: must be at least 1"),
        (("--config", SERVE, "--topology", "tpu7x:4x4x4", "mesh.fsdp=4", "mesh.expert=1"), "serving has no use for"),
        (("--config", SERVE, "--topology", "tpu7x:4x4x4", "--json", "no/such.json"), "--json no/such.json: a file"),
        (
            ("--config", SERVE, "--topology", "tpu7x:4x4x4", "--json", "/proc/plan.json"),
            "--json /proc/plan.json: cannot be written",
        ),
        (("--config", SERVE, "--topology", "tpu7x:4x4x4", "--mode", ""), "one of train, prefill, decode"),
        (("--config", TRAIN, "--topology", "tpu7x:8x8x8", "data.batch_size=1000"), "data.batch_size = 1000:"),
        (("--config", TRAIN, "--topology", "tpu7x:8x8x8", "remat=none"), "remat = none: plans are made for"),
        (("--config", TRAIN, "--topology", "tpu7x:8x8x8", "lora.rank=8"), "lora.rank = 8: plans are made for"),
        (
            ("--config", TRAIN, "--topology", "tpu7x:8x8x8", "mesh.expert=64", "mesh.context=2", "data.seq_len=8191"),
            "data.seq_len = 8191: mesh.context = 2 must divide it",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(capsys, arguments, message):
    assert main(list(arguments)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
