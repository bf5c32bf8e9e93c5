"""A hang is named with its phase and its stacks, again after twice the time, and never without one."""

import threading

import pytest

from k3jax.train.goodput import READ, STEP, Goodput
from k3jax.train.watchdog import STACKS_FILE, Watchdog


class Time:
    now = 0.0

    def __call__(self):
        return self.now


class Reports(list):
    """Lines, and a way to wait for the next."""

    def __init__(self):
        self.came = threading.Event()

    def __call__(self, line):
        self.append(line)
        self.came.set()

    def wait(self):
        assert self.came.wait(20)
        self.came.clear()


@pytest.fixture
def watched(tmp_path):
    goodput, reports = Goodput.of_run(tmp_path, step=0, clock=Time()), Reports()
    with Watchdog(goodput, limit=0.2, run_dir=tmp_path, report=reports):
        yield goodput, reports


def test_a_hang_is_named_with_its_phase_and_stacks(watched, tmp_path):
    goodput, reports = watched
    with goodput.during(READ, "step 7"):
        goodput.clock.now = 0.3
        reports.wait()
        assert reports == [f"hang? in read (step 7) for 0 s; all threads' stacks: {tmp_path / STACKS_FILE}"]
        stacks = (tmp_path / STACKS_FILE).read_text()
        assert "test_a_hang_is_named_with_its_phase_and_stacks" in stacks and "_watch" in stacks
        goodput.clock.now = 0.39  # less than twice the limit
        assert not reports.came.wait(0.1)
        goodput.clock.now = 10.0
        reports.wait()
        assert "for 10 s" in reports[-1] and len(reports) == 2


def test_a_run_that_moves_on_is_left_alone(watched):
    goodput, reports = watched
    for step in range(50):
        with goodput.during(STEP, f"step {step}"):
            goodput.clock.now += 0.15
            threading.Event().wait(0.002)
    assert not reports


def test_a_limit_of_zero_reports_nothing(tmp_path):
    goodput, reports = Goodput.of_run(tmp_path, step=0, clock=Time()), Reports()
    with Watchdog(goodput, limit=0, run_dir=tmp_path, report=reports):
        goodput.clock.now = 1e9
        assert not reports.came.wait(0.05)
