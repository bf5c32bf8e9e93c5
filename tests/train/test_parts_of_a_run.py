"""What a run trains beside the released model, an MTP layer or adapters: in its checkpoints, apart from the model."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import k3jax
from k3jax.checkpoint.orbax_io import OPTIMIZER, WEIGHTS, Checkpoints, find_step, named_leaves, stored_leaves
from k3jax.config import CONFIG_DIR, ConfigError, DataConfig, LoraConfig, TrainRun, load_model_config, load_run
from k3jax.train import lora
from k3jax.train.loop import train
from k3jax.train.lora import load_adapters, merged
from k3jax.train.run_dir import check_run_dir, open_run_dir
from k3jax.train.start import Setting, start_state

SIZES = ["width=32", "dense_width=48", "num_layers=2", "mla_layers=[1]", "attn_res_block=2", "moe.num_experts=4"]


def finished(folder, **options):
    """A run of two steps."""
    (folder / "text").mkdir()
    for n in range(20):
        (folder / "text" / f"{n}.txt").write_text("".join(f"{n} times {k} is {n * k}\n" for k in range(20)))
    run = TrainRun(
        model=load_model_config("k3_tiny", SIZES),
        data=DataConfig(source=str(folder / "text"), seq_len=32, batch_size=2),
        run_dir=str(folder / "run"),
        steps=2,
        eval_every=0,
        stack="loop",
        remat="none",
        **options,
    )
    assert train(run) == 0
    return run


@pytest.fixture(scope="module")
def mtp_run(tmp_path_factory):
    return finished(tmp_path_factory.mktemp("mtp"), mtp_weight=0.3)


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory):
    return finished(tmp_path_factory.mktemp("lora"), lora=LoraConfig(rank=2, alpha=4.0))


def restored(run):
    checkpoints = Checkpoints(Path(run.run_dir), keep=1)
    state = start_state(run, Setting.of(run), checkpoints).state
    checkpoints.close()
    return state


def stored(run, tree):
    return stored_leaves(Path(find_step(run.run_dir).path), tree)


def test_a_checkpoint_keeps_the_mtp_layer_apart_from_the_model(mtp_run):
    assert not [name for name in stored(mtp_run, WEIGHTS) if "mtp" in name]
    assert "mtp.layer.mixer.q_up" in stored(mtp_run, OPTIMIZER)
    assert k3jax.load(mtp_run.run_dir).mtp is None
    state = restored(mtp_run)
    assert int(state.step) == 2
    assert np.any(named_leaves(state.params)["mtp.join"]) and np.any(
        named_leaves(state.router_bias.mtp)["layer.ffn.router.bias"]
    )


def test_an_mtp_layer_can_be_added_to_a_trained_model(mtp_run, tmp_path):
    run = dataclasses.replace(mtp_run, run_dir=str(tmp_path / "next"), init_from=mtp_run.run_dir)
    state = restored(run)
    weights = named_leaves(k3jax.load(mtp_run.run_dir))
    for name, leaf in named_leaves(state.params).items():
        if not name.startswith("mtp."):
            np.testing.assert_array_equal(leaf, weights[name])


def test_a_checkpoint_of_adapters_is_the_merged_model_and_the_adapters(lora_run, root, tmp_path):
    state, served = restored(lora_run), named_leaves(k3jax.load(lora_run.run_dir))
    for name, leaf in named_leaves(merged(state.frozen, state.params)).items():
        np.testing.assert_allclose(served[name], leaf, rtol=1e-6, atol=1e-7, err_msg=name)
    out = tmp_path / "adapters.safetensors"
    command = [sys.executable, "-m", "k3jax.train.lora", lora_run.run_dir, str(out)]
    assert "adapters of" in subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    apart = load_adapters(out)
    assert apart.keys() == state.params.keys()
    for name, adapter in state.params.items():
        assert apart[name].scale == adapter.scale == 2.0
        np.testing.assert_array_equal(apart[name].b.get_value(), adapter.b.get_value())
    assert any(np.any(adapter.b.get_value()) for adapter in apart.values())


def test_a_run_without_adapters_has_none_to_write(mtp_run, root, tmp_path):
    command = [sys.executable, "-m", "k3jax.train.lora", mtp_run.run_dir, str(tmp_path / "x.safetensors")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 2 and "lora.rank = 0" in done.stderr and len(done.stderr.splitlines()) == 1


def test_adapters_that_cannot_be_written_get_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lora, "adapters_of_run", lambda run_dir: {})
    monkeypatch.setattr(sys, "argv", ["lora", "run", str(tmp_path / "missing" / "x.safetensors")])
    assert lora.main() == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["remat=kda_moe,moon"], r"remat = kda_moe,moon: layer, none, or a list .* kda_dense,kda_moe,mla_moe"),
        (["optimizer.qk_clip=0"], r"optimizer.qk_clip = 0.*: must be a number above 0"),
        (["mtp_weight=0.1", "lora.rank=4"], r"mtp_weight = 0.1: adapters"),
        (["z_loss=-1"], r"z_loss = -1"),
        (["stages=[{until: 0.5}, {until: 0.25}]"], r"stages: they end after steps \[550, 275\]"),
        (["stages=[{until: 0.5}]"], r"the last at steps = 1100"),
        (["stages=[{until: 1.0, batch_size: 3, accumulate: 2}]"], r"stages\[0\].batch_size = 3"),
    ],
)
def test_mistakes_in_the_recipe_are_named(root, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_run(TrainRun, root / "configs/train/tiny_cpu.yaml", overrides)


@pytest.mark.parametrize("content", ["", "a: [", "- 1"])
def test_a_damaged_config_in_a_run_is_told_and_left(tmp_path, content):
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(ConfigError, match="is damaged; without it the run continues"):
        check_run_dir(TrainRun(run_dir=str(tmp_path)))
    assert (tmp_path / "config.yaml").read_text() == content


def test_a_stage_is_a_run_with_its_own_rows(root):
    stages = (
        "stages=[{until: 0.5, seq_len: 64, batch_size: 8, accumulate: 2}, {until: 1.0, seq_len: 256, batch_size: 2}]"
    )
    run = load_run(TrainRun, root / "configs/train/tiny_cpu.yaml", [stages])
    assert run.stage_ends == [550, 1100]
    first, second = run.in_stage(0), run.in_stage(1)
    assert (first.data.seq_len, first.data.batch_size, first.accumulate, first.steps) == (64, 8, 2, 1100)
    assert (second.data.seq_len, second.data.batch_size, second.accumulate) == (256, 2, 1)
    assert jax.tree.leaves([first.stages, second.stages]) == []


@pytest.mark.parametrize("path", sorted((CONFIG_DIR / "train").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_is_valid(path):
    assert load_run(TrainRun, path).steps >= 1


def test_a_folder_in_which_another_process_trains_is_refused_and_left(tmp_path):
    run = TrainRun(run_dir=str(tmp_path / "run"))
    with open_run_dir(run, alone=True) as folder:
        kept = (folder / "config.yaml").read_text()
        with pytest.raises(ConfigError, match="another process trains there"), open_run_dir(run, alone=True):
            pass
        with open_run_dir(run, alone=False):  # another process of the same run
            pass
    with open_run_dir(run, alone=True):
        assert (folder / "config.yaml").read_text() == kept
    assert [path.name for path in folder.iterdir()] == ["config.yaml"]
