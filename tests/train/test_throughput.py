"""What a batch holds, and the rate and MFU that follow from it."""

import numpy as np
import pytest

from k3jax.config import LoraConfig, TrainRun, load_model_config
from k3jax.train.flops import training_flops
from k3jax.train.throughput import Throughput, Work


def test_the_work_in_a_batch():
    work = Work.of(np.array([[0, 0, 0, 1, 1, -1], [0, 1, 2, 2, 2, 2]]))
    assert (work.tokens, work.places) == (11, 12)
    assert work.padding == pytest.approx(1 / 12)
    assert work.keys == pytest.approx((1 + 2 + 3 + 1 + 2 + 1 + 1 + 1 + 2 + 3 + 4) / 11)
    assert Work.of(np.zeros((2, 9), int)).keys == 5.0


def test_the_rate_is_that_of_the_last_steps():
    speed = Throughput(run=TrainRun(), seconds=50.0)
    for step in range(1, 101):
        speed.count(Work(100, 128, 8.0), seconds=50.0 + (step if step <= 50 else 50 + 2 * (step - 50)))
        if step == 50:
            assert (speed.tokens_per_s, speed.seconds_per_step) == (100.0, 1.0)
    assert (speed.tokens_per_s, speed.seconds_per_step) == (50.0, 2.0)
    assert speed.total.padding == pytest.approx(28 / 128)
    assert speed.mfu is None  # nobody knows what this device could do


@pytest.mark.parametrize(("rank", "passes"), [(0, 3), (8, 2)])
def test_mfu_is_the_model_s_operations_over_the_peak(rank, passes):
    run = TrainRun(model=load_model_config("k3_mini"), lora=LoraConfig(rank=rank))
    speed = Throughput(run=run, device_kind="NVIDIA H200", devices=2)
    speed.count(Work(60_000, 65_536, 512.0), seconds=1.0)
    forward = training_flops(run.model, keys=512.0) / 3
    assert speed.mfu == pytest.approx(passes * forward * 60_000 / (2 * 989e12))


def test_a_layer_for_the_token_after_the_next_costs_operations():
    config = load_model_config("k3_mini")
    assert training_flops(config, keys=1.0, mtp=True) > 1.05 * training_flops(config, keys=1.0)
