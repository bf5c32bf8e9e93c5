"""Wall-clock measurement, on whatever device is present: counting and reporting, and that the registered work runs."""

import json
import time

import jax
import jax.numpy as jnp
import pytest

from benchmarks import device, device_cases
from benchmarks.device_cases import kda, registry
from benchmarks.device_cases.case import DeviceCase, Work, jax_work


def sleeper(duration):
    return Work(lambda: time.sleep(duration), lambda: None)


def missing():
    raise ImportError("no such peer")


def test_seconds_are_those_of_one_call(monkeypatch):
    monkeypatch.setattr(device, "SAMPLES", 3)
    assert 1e-3 <= device.seconds(sleeper(1e-3)) < 3e-3


def test_work_before_the_samples_does_not_count(monkeypatch):
    monkeypatch.setattr(device, "SAMPLES", 3)
    calls = []

    def call():
        calls.append(None)
        time.sleep(0.2 if len(calls) == 1 else 0.001)  # the first call compiles

    assert device.seconds(Work(call, lambda: None)) < 0.1


def test_the_carry_goes_from_call_to_call():
    seen = []

    def run(carry, x):
        jax.debug.callback(lambda value: seen.append(float(value)), carry)
        return carry + x, x

    work = jax_work(run, jnp.zeros(()), jnp.float32(2))
    for _ in range(3):
        work.call()
        work.wait()
    jax.effects_barrier()
    assert seen == [0, 2, 4]


def test_rows_name_the_device_the_unit_and_peers_that_are_not_there(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(device, "SAMPLES", 2)
    case = DeviceCase("tiny", 10, lambda: sleeper(2e-3), {"nobody": missing})
    monkeypatch.setattr(device_cases, "registry", lambda: {"family": (case,)})
    assert device.main(["tiny", "--json", str(tmp_path / "out.json")]) == 0
    ours, peer = json.loads((tmp_path / "out.json").read_text())
    assert (ours["kernel"], ours["case"], ours["body"], ours["units"]) == ("family", "tiny", "k3jax", 10)
    assert ours["ns_per_unit"] == pytest.approx(ours["seconds"] * 1e8)
    assert (peer["body"], peer["seconds"], peer["ns_per_unit"]) == ("nobody", None, None)
    assert "not installed" in capsys.readouterr().out


def test_an_unknown_kernel_is_one_line_and_exit_code_2(capsys):
    assert device.main(["kdaa"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "unknown kernel 'kdaa'; use one of kda" in error


def test_case_names_are_unique():
    names = [case.name for cases in registry().values() for case in cases]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("work", [kda.forward, kda.forward_backward, kda.decode, kda.decode_step])
def test_the_registered_kda_work_runs_and_its_state_moves(work):
    made = work(2, 1)  # two tokens or rows of one head
    for _ in range(2):
        made.call()
    made.wait()
