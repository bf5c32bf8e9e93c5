"""`python -m k3jax.checkpoint inspect`: what it prints, that it reads headers only, and how it fails."""

import subprocess
import sys

import numpy as np
import pytest

from k3jax.checkpoint.__main__ import main
from k3jax.checkpoint.load import load
from k3jax.checkpoint.orbax_io import Checkpoints, model_record
from k3jax.checkpoint.safetensors_dir import StoredTensor


def printed(capsys) -> tuple[list[list[str]], dict[str, str]]:
    """(cells of the table, {label: text} of the lines below it)."""
    lines = capsys.readouterr().out.splitlines()
    table = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    totals = {label: text.strip() for label, _, text in (line.partition(" ") for line in lines if line[:1].isalpha())}
    return table, totals


def test_the_released_model_has_its_published_totals(capsys):
    assert main(["inspect", "--config", "k3"]) == 0
    table, totals = printed(capsys)
    assert totals["tensors"] == "497,052 in 48 families"
    assert totals["parameters"] == "2,779,484,478,208, active 104,189,614,848"
    assert totals["bytes"] == "1,559,965,606,912"
    assert totals["layers"] == "93: 69 KDA, 24 MLA; 1 dense, 92 MoE"
    assert totals["AttnRes"] == "8 blocks of 12 layers, 9 in the last"
    assert totals["quantisation"] == "MXFP4 experts, blocks of 32"
    assert ["self_attn.A_log", "kda", "69", "128", "F32", "35,328", "8,832"] in table


def test_a_checkpoint_is_described_without_reading_a_tensor(tensors, make, capsys, monkeypatch):
    vision = {"vision_tower.encoder.blocks.7.wo.weight": np.ones(3, np.float32)}
    directory = make(tensors | vision)
    monkeypatch.setattr(StoredTensor, "read_into", None)
    monkeypatch.setattr(StoredTensor, "view", None)
    assert main(["inspect", str(directory)]) == 0
    table, totals = printed(capsys)
    assert totals["tensors"] == f"{len(tensors) + 1:,} in 49 families"
    assert totals["bytes"] == f"{sum(tensor.nbytes for tensor in tensors.values()) + 12:,}"
    assert totals["vision"] == "1 tensors, 3 parameters"
    assert ["vision_tower.encoder.blocks.{b}.wo.weight", "vision", "1", "3", "F32", "12", "3"] in table
    row = ["block_sparse_moe.experts.{e}.w2.weight_packed", "moe", "12", "32 x 32", "U8", "12,288", "24,576"]
    assert row in table


def test_an_orbax_checkpoint_is_described_alike(tensors, make, tmp_path, capsys):
    directory = make(tensors)
    model = load(directory)
    checkpoints = Checkpoints(tmp_path / "run", keep=1)
    checkpoints.save(1, trees={"weights": model}, records={"model": model_record(model.config)})
    checkpoints.close()
    main(["inspect", str(directory)])
    from_safetensors = printed(capsys)
    assert main(["inspect", str(tmp_path / "run")]) == 0
    assert printed(capsys)[0] == from_safetensors[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "nowhere"], "error: nowhere: no such directory\n"),
        (["inspect", "--config", "k4"], "error: model = k4: no such model; did you mean k3?"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export", "a", "b", "--shard-size", "5 parsecs"], "--shard-size 5 parsecs: expected a size such as 5GB"),
        (["export", "a", "gs://b/c"], "a: no such directory"),
        (["import", "a", "b", "--host", "4/4"], "--host 4/4: expected INDEX/COUNT"),
        (["import", "a", "b"], "a: holds neither model.safetensors.index.json nor model.safetensors"),
    ],
)
def test_a_mistake_in_a_conversion_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_no_workers_is_a_mistake(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["verify", "a", "--workers", "0"])
    assert stopped.value.code == 2
    assert "--workers: 0: expected a number from 1 on" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_one_line_and_exit_code_2(tensors, make, root):
    directory = make(tensors)
    (directory / "model-00002-of-000002.safetensors").unlink()
    command = [sys.executable, "-m", "k3jax.checkpoint", "inspect", str(directory)]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr.startswith("error: ")
    assert run.stderr.count("\n") == 1
