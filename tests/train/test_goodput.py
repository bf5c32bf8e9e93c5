"""The clock of a run: every second is in one phase, and what a kill undid is lost."""

import itertools
import json

import pytest

from k3jax.train.goodput import COMPILE, GOODPUT_FILE, LOST, READ, SAVE, START, STEP, Goodput


class Time:
    """A clock that only moves when told to."""

    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def time():
    return Time()


def spend(goodput, phase, seconds):
    with goodput.during(phase):
        goodput.clock.now += seconds


def test_every_second_is_in_one_phase(time, tmp_path):
    goodput = Goodput.of_run(tmp_path, step=0, clock=time)
    time.now += 2
    spend(goodput, COMPILE, 5)
    with goodput.during(STEP):
        time.now += 1
        spend(goodput, SAVE, 10)
        time.now += 2
    goodput.write(tmp_path)
    seconds = json.loads((tmp_path / GOODPUT_FILE).read_text())["seconds"]
    assert {phase: s for phase, s in seconds.items() if s} == {START: 2, COMPILE: 5, STEP: 3, SAVE: 10}
    assert goodput.share == pytest.approx(3 / 20)
    assert str(goodput) == "start 10%, compile 25%, step 15%, save 50%"


@pytest.mark.parametrize(("resumes_at", "kept"), [(0, 0), (10, 4), (20, 9)])
def test_steps_that_a_kill_undid_are_lost(time, tmp_path, resumes_at, kept):
    goodput = Goodput.of_run(tmp_path, step=0, clock=time)
    for step, seconds in ((10, 4), (20, 5), (30, 7)):
        spend(goodput, STEP, seconds)
        if step < 30:
            goodput.saved(step)
    goodput.write(tmp_path)  # killed here; a checkpoint that was begun may not be found again
    again = Goodput.of_run(tmp_path, step=resumes_at, clock=time)
    assert (again.seconds[STEP], again.seconds[LOST]) == (kept, 16 - kept)
    assert again.processes == 2
    spend(again, STEP, 1)
    again.write(tmp_path)
    third = Goodput.of_run(tmp_path, step=resumes_at, clock=time)
    assert (third.seconds[STEP], third.seconds[LOST]) == (kept, 17 - kept)


def test_the_phase_that_goes_on_is_known_with_its_beginning(time, tmp_path):
    goodput = Goodput.of_run(tmp_path, step=0, clock=time)
    time.now += 3
    with goodput.during(READ, "step 7"):
        assert (goodput.phase, goodput.detail, goodput.since) == (READ, "step 7", 103.0)
    assert (goodput.phase, goodput.since) == (START, 103.0)


def test_few_marks_are_kept(time, tmp_path):
    goodput = Goodput.of_run(tmp_path, step=0, clock=time)
    for step in itertools.islice(itertools.count(10, 10), 50):
        spend(goodput, STEP, 1)
        goodput.saved(step)
    assert list(goodput.at_step)[-1] == 500 and len(goodput.at_step) == 10
