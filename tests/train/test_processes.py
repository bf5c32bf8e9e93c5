"""train.py in several processes, as on the hosts of a pod, is train.py in one."""

import os
import shutil
import socket
import subprocess
import sys

import pytest

from k3jax.train.metrics import read_metrics

STEPS, LIMIT = 4, 400


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, write_recipe):
    return write_recipe(tmp_path_factory.mktemp("recipe"), steps=STEPS, eval_every=STEPS, checkpoint_every=2)


def run(root, recipe, run_dir, *overrides, processes: int = 1) -> list[dict]:
    """The metrics of a run by so many processes."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "train.py", "--config", str(recipe), f"run_dir={run_dir}", *overrides]
    started = []
    for number in range(processes):
        env = dict(os.environ)
        if processes > 1:
            env |= {"K3JAX_COORDINATOR": f"localhost:{port}"}
            env |= {"K3JAX_PROCESSES": str(processes), "K3JAX_PROCESS": str(number)}
        started.append(subprocess.Popen(command, cwd=root, env=env, stderr=subprocess.PIPE, text=True))
    try:
        for process in started:
            _, error = process.communicate(timeout=LIMIT)
            assert process.returncode == 0, error[-3000:]
    finally:
        for process in started:
            process.kill()
    return read_metrics(run_dir)


@pytest.fixture(scope="module")
def alone(root, recipe, tmp_path_factory):
    return run(root, recipe, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def pair(root, recipe, tmp_path_factory):
    """The folder and the metrics of a run by two processes."""
    folder = tmp_path_factory.mktemp("pair")
    return folder, run(root, recipe, folder, "mesh.fsdp=2", processes=2)


def test_two_processes_together_train_as_one_does(alone, pair):
    check_same(pair[1], alone)


@pytest.mark.soak
def test_four_processes_together_train_as_one_does(root, recipe, alone, tmp_path):
    check_same(run(root, recipe, tmp_path / "run", "mesh.fsdp=2", "mesh.expert=2", processes=4), alone)


def check_same(together: list[dict], alone: list[dict]) -> None:
    assert [line["step"] for line in together] == [line["step"] for line in alone]
    for ours, theirs in zip(together, alone, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-5)  # after several steps of rounding
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=3e-3)
    assert together[0]["grad_norm"] == pytest.approx(alone[0]["grad_norm"], rel=3e-4)
    assert together[0]["loss"] == pytest.approx(alone[0]["loss"], rel=2e-6)
    assert together[-1]["eval_loss"] == pytest.approx(alone[-1]["eval_loss"], rel=1e-4)


def test_what_two_processes_saved_one_continues(root, recipe, alone, pair, tmp_path):
    shutil.copytree(pair[0], tmp_path / "run")
    os.rename(tmp_path / f"run/checkpoints/{STEPS}", tmp_path / "later")  # as if it had been stopped before
    again = run(root, recipe, tmp_path / "run")
    assert again[-1]["step"] == STEPS
    assert again[-1]["loss"] == pytest.approx(alone[-1]["loss"], rel=2e-5)
