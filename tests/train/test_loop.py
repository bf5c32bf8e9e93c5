"""The loop's order: a step's metrics are read when the next one is under way; bad steps are counted, not saved."""

from types import SimpleNamespace

import pytest

from k3jax.config import TrainRun
from k3jax.train.goodput import Goodput
from k3jax.train.loop import DIVERGED, DONE, PREEMPTED, Trainer
from k3jax.train.throughput import Throughput, Work


class Number:
    """A device's number: reading it is an event."""

    def __init__(self, value, name, events):
        self.value, self.name, self.events = value, name, events

    def __float__(self):
        self.events.append(self.name)
        return self.value

    def __bool__(self):
        return bool(float(self))


class Loop(Trainer):
    """The real loop with steps that only note that they were dispatched."""

    def _compile(self, stage, state):
        def train_step(state, batch):
            step = state + 1
            self.events.append(f"dispatch {step}")
            names = {"loss": 1.0, "grad_norm": 1.0, "skipped": float(step in self.bad)}
            return step, {name: Number(value, f"read {step}", self.events) for name, value in names.items()}

        return train_step, None

    def _next_batch(self, stage):
        return None, Work(4, 4, 1.0)

    def _save(self, step, state, stage):
        self.events.append(f"save {step}")


def run_loop(tmp_path, *, steps, bad=(), stop_at=None, **options):
    """(exit code, events, each once) of a run whose steps in `bad` are skipped."""
    run = TrainRun(steps=steps, log_every=1000, eval_every=0, checkpoint_every=4, **options)
    messages = []
    display = SimpleNamespace(message=messages.append, start=lambda _: None, update=lambda *_, **__: None)
    display.stop = lambda: None
    trainer = Loop(
        run=run,
        run_dir=tmp_path,
        display=display,
        checkpoints=SimpleNamespace(check=lambda: None, wait=lambda: None),
        metrics=None,
        setting=None,
        goodput=Goodput.of_run(tmp_path, step=0),
        throughput=Throughput(run=run),
    )
    trainer.events, trainer.bad = [], bad
    stage = SimpleNamespace(run=run, first=0, last=steps, eval_batches=[], evaluates_at=lambda _: False)
    code = trainer.loop([stage], 0, first=0, stop=SimpleNamespace(wanted=lambda step: step == stop_at))
    return code, list(dict.fromkeys(trainer.events)), messages


def test_metrics_are_read_after_the_next_step_is_dispatched(tmp_path):
    code, events, _ = run_loop(tmp_path, steps=6)
    assert code == DONE
    expected = [
        "dispatch 1",
        "dispatch 2",
        "read 1",
        "dispatch 3",
        "read 2",
        "dispatch 4",
        "read 3",
        "read 4",
        "save 4",
    ]
    assert events == [*expected, "dispatch 5", "dispatch 6", "read 5", "read 6", "save 6"]


def test_a_stop_saves_at_once(tmp_path):
    code, events, messages = run_loop(tmp_path, steps=20, stop_at=2)
    assert code == PREEMPTED
    assert events == ["dispatch 1", "dispatch 2", "read 1", "read 2", "save 2"]
    assert messages[-1] == "stopped at step 2; the same command continues from there"


def test_skipped_steps_are_named_and_forgotten_when_a_good_one_follows(tmp_path):
    code, events, messages = run_loop(tmp_path, steps=8, bad=(2, 3, 5, 6), max_skipped=2)
    assert code == DONE and "save 4" in events and "save 8" in events
    left_out = [message for message in messages if "left out" in message]
    assert [message[:7] for message in left_out] == ["step 2:", "step 3:", "step 5:", "step 6:"]
    assert left_out[1].endswith("the update is left out (2 in a row, max_skipped is 2)")


@pytest.mark.parametrize("most", [0, 3])
def test_too_many_skipped_steps_in_a_row_end_the_run_with_one_line(tmp_path, most):
    code, events, messages = run_loop(tmp_path, steps=20, bad=range(3, 20), max_skipped=most)
    assert code == DIVERGED
    assert f"dispatch {4 + most}" in events and f"dispatch {5 + most}" not in events
    assert not [event for event in events if event.startswith("save")]  # step 4 was one of them
    assert messages[-1].startswith(f"step {3 + most}: loss 1.0, gradient norm 1.0; stopped after {1 + most} such steps")
