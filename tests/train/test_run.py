"""Whole runs of train.py in their own processes: kills, signals, mistakes, and what they leave behind."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import yaml

import k3jax
from k3jax.checkpoint.orbax_io import list_steps
from k3jax.config import ConfigError, TrainRun, load_run
from k3jax.data import load_corpus
from k3jax.nn.loss import batch_loss
from k3jax.nn.param import merge_model, split_model
from k3jax.text import Tokenizer
from k3jax.train.loop import train
from k3jax.train.metrics import TIMED, read_metrics
from k3jax.train.report import write_report

STEPS = 40


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, write_recipe):
    every = {"eval_every": 10, "checkpoint_every": 10}
    return write_recipe(
        tmp_path_factory.mktemp("recipe"), steps=STEPS, accumulate=2, stack="loop", remat="none", **every
    )


def command(recipe, *overrides):
    return [sys.executable, "train.py", "--config", str(recipe), *overrides]


def start(recipe, root, run_dir, *overrides):
    arguments = command(recipe, f"run_dir={run_dir}", *overrides)
    return subprocess.Popen(arguments, cwd=root, stderr=subprocess.PIPE, text=True)


def complete(recipe, root, run_dir, *overrides):
    """(exit code, stderr) of a run to its end."""
    process = start(recipe, root, run_dir, *overrides)
    _, stderr = process.communicate()
    return process.returncode, stderr


def held_out_loss(model, run):
    """What a run of this config would report for the model."""
    batches = load_corpus(run.data, Tokenizer.bytes()).eval_batches(run.data, batch_size=2)
    loss = jax.jit(lambda m, b: batch_loss(m, b.tokens, b.targets, b.segment_ids, b.loss_mask, chunk=run.loss_chunk))
    sums = [loss(model, batch) for batch in batches]
    return float(sum(nats for nats, _ in sums) / sum(tokens for _, tokens in sums))


def wait_for_step(process, run_dir, step):
    while process.poll() is None:
        records = read_metrics(run_dir)
        if records and records[-1]["step"] >= step:
            return
        time.sleep(0.002)
    pytest.fail(f"the run ended before step {step}: {process.stderr.read()}")


def wait_for_a_save(process, run_dir):
    """Until a checkpoint is being written: its folder has another name until it is whole."""
    while process.poll() is None:
        if [path for path in (run_dir / "checkpoints").glob("*") if not path.name.isdigit()]:
            return
        time.sleep(0.0005)
    pytest.fail(f"the run ended without a save: {process.stderr.read()}")


def last_step(run_dir):
    records = read_metrics(run_dir)
    return records[-1]["step"] if records else 0


def curve(run_dir):
    return [{key: record[key] for key in record if key not in TIMED} for record in read_metrics(run_dir)]


@pytest.fixture(scope="module")
def whole_run(recipe, root, tmp_path_factory):
    """A run that nothing interrupts."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    code, stderr = complete(recipe, root, run_dir)
    assert code == 0, stderr
    return run_dir


def test_a_run_learns_and_leaves_its_records(whole_run):
    records = read_metrics(whole_run)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert {"step", "loss", "tokens_per_s", "lr", "grad_norm"} <= set(records[0])
    assert [record["step"] for record in records if "eval_loss" in record] == [10, 20, 30, 40]
    assert records[0]["loss"] == pytest.approx(np.log(512), abs=0.3)
    assert records[-1]["eval_loss"] < records[9]["eval_loss"] < 4.5
    assert list_steps(whole_run / "checkpoints") == [30, 40]
    assert yaml.safe_load((whole_run / "config.yaml").read_text())["model"]["width"] == 32
    assert (whole_run / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_killed_in_a_step_and_in_a_save_continues_bit_for_bit(recipe, root, whole_run, tmp_path):
    run_dir = tmp_path / "run"
    for wait in (
        lambda process: wait_for_step(process, run_dir, 15),
        lambda process: wait_for_a_save(process, run_dir),
    ):
        process = start(recipe, root, run_dir)
        wait(process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert list_steps(run_dir / "checkpoints")
        assert read_metrics(run_dir)[-1]["step"] < STEPS
    code, stderr = complete(recipe, root, run_dir)
    assert code == 0, stderr
    assert "after step" in stderr
    assert curve(run_dir) == curve(whole_run)
    goodput = json.loads((run_dir / "goodput.json").read_text())
    assert goodput["processes"] == 3 and goodput["seconds"]["lost"] > 0


@pytest.mark.soak
def test_a_run_killed_at_twenty_random_moments_continues_bit_for_bit(recipe, root, tmp_path):
    options = ("steps=600", "checkpoint_every=10", "eval_every=100")
    code, stderr = complete(recipe, root, tmp_path / "whole", *options)
    assert code == 0, stderr
    run_dir, random, in_saves, steps = tmp_path / "run", np.random.default_rng(0), 0, []
    for kill in range(20):
        process = start(recipe, root, run_dir, *options)
        if kill % 5 == 4:  # while it starts, as a rule
            time.sleep(random.uniform(0, 15))
        else:  # in a step, or in a save
            wait_for_step(process, run_dir, last_step(run_dir) + random.integers(5, 35))
            if kill % 2:
                wait_for_a_save(process, run_dir)
            time.sleep(random.exponential(0.02))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        in_saves += any(not path.name.isdigit() for path in (run_dir / "checkpoints").glob("*"))
        steps.append(last_step(run_dir))
    code, stderr = complete(recipe, root, run_dir, *options)
    assert code == 0, stderr
    assert curve(run_dir) == curve(tmp_path / "whole")
    print(f"killed after steps {steps}, {in_saves} times during a save; {(run_dir / 'goodput.json').read_text()}")


def test_a_stopped_run_saves_says_75_and_continues(recipe, root, whole_run, tmp_path):
    process = start(recipe, root, tmp_path / "run")
    wait_for_step(process, tmp_path / "run", 5)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate()
    assert process.returncode == 75, stderr
    stopped = list_steps(tmp_path / "run" / "checkpoints")[-1]
    assert read_metrics(tmp_path / "run")[-1]["step"] == stopped < STEPS
    code, stderr = complete(recipe, root, tmp_path / "run")
    assert code == 0 and f"after step {stopped} of" in stderr
    expected = [{k: r[k] for k in ("step", "loss", "grad_norm")} for r in read_metrics(whole_run)]
    assert [{k: r[k] for k in ("step", "loss", "grad_norm")} for r in read_metrics(tmp_path / "run")] == expected


def test_a_finished_run_started_again_does_nothing(recipe, root, whole_run):
    before = curve(whole_run)
    code, stderr = complete(recipe, root, whole_run)
    assert code == 0 and "compiling" not in stderr
    assert curve(whole_run) == before


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(recipe, root, tmp_path):
    options = ("optimizer.learning_rate=1.0e+30", "optimizer.warmup_fraction=0.4", "checkpoint_every=1")
    code, stderr = complete(recipe, root, tmp_path / "run", *options)
    assert code == 1
    assert "stopped after 6 such steps in a row, the last checkpoint is kept" in stderr
    assert stderr.count("the update is left out") == 5
    records = read_metrics(tmp_path / "run")
    good = [record["step"] for record in records if not record["skipped"]]
    assert [record["step"] for record in records if record["skipped"]] == [good[-1] + n for n in range(1, 6)]
    assert max(list_steps(tmp_path / "run" / "checkpoints"), default=0) == good[-1]


def test_the_checkpoint_is_a_model(whole_run):
    model = k3jax.load(whole_run, stack="loop")
    text = np.frombuffer(b"7 times 3 is 21\n7 times 4 is 28\n", np.uint8).astype(np.int32)[None]
    assert float(jax.jit(k3jax.next_token_loss)(model, text)) < 4.0
    assert (model.config.width, model.config.quantized_experts) == (32, False)


def test_a_report_is_one_page_with_everything_in_it(whole_run):
    page = write_report(whole_run).read_text()
    for title in ("Loss", "Gradient norm", "Expert load", "Speed", "Time", "Attention Residuals", "Config"):
        assert title in page
    assert page.count("<svg") == page.count("</svg>") >= 11
    assert "40 of 40" in page and "data.batch_size" in page and "held-out loss 1." in page
    assert not re.search(
        r"<script|<link|src=|@import|https?://(?!www.w3.org|matplotlib.org|purl.org|creativecommons)", page
    )


def test_a_report_of_no_run_is_refused(root, tmp_path):
    command = [sys.executable, "-m", "k3jax.train.report", str(tmp_path)]
    done = subprocess.run(command, cwd=root, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, f"report: {tmp_path} holds no run: config.yaml is missing\n")


def test_a_report_of_a_damaged_run_is_refused(root, tmp_path):
    (tmp_path / "config.yaml").write_text("a: [")
    command = [sys.executable, "-m", "k3jax.train.report", str(tmp_path)]
    done = subprocess.run(command, cwd=root, check=False, capture_output=True, text=True)
    assert done.returncode == 2 and "config.yaml is damaged" in done.stderr and done.stderr.count("\n") == 1


def test_stages_warm_up_and_a_trace_in_a_run_that_continues_inside_a_stage(recipe, tmp_path):
    stages = "stages=[{until: 0.5, seq_len: 16, batch_size: 4, accumulate: 1}, {seq_len: 32, batch_size: 2}]"
    small = ["model.num_layers=2", "model.mla_layers=[1]", "steps=6", "checkpoint_every=1", "eval_every=0"]
    options = [*small, stages, "router_warmup=1", "keep_checkpoints=9", "profile_step=5", "profile_steps=9"]
    run = load_run(TrainRun, recipe, [f"run_dir={tmp_path}", *options])
    assert train(run) == 0
    whole = curve(tmp_path)
    assert [record["step"] for record in whole] == list(range(1, 7))
    assert list((tmp_path / "xprof").rglob("*.xplane.pb"))
    for step in (5, 6):
        shutil.rmtree(tmp_path / "checkpoints" / str(step))
    assert train(run) == 0
    assert curve(tmp_path) == whole


def test_weights_start_another_run(recipe, whole_run, tmp_path):
    last = read_metrics(whole_run)[-1]["eval_loss"]
    options = ["steps=1", "eval_every=1", "optimizer.learning_rate=1e-9"]
    run = load_run(TrainRun, recipe, [f"run_dir={tmp_path}", f"init_from={whole_run}", *options])
    assert train(run) == 0
    # The one step also balances the router, whatever the rate: look at the weights with the bias they came with.
    params, moved, rest = split_model(k3jax.load(tmp_path))
    _, bias, _ = split_model(k3jax.load(whole_run))
    assert any(not np.array_equal(*pair) for pair in zip(jax.tree.leaves(moved), jax.tree.leaves(bias), strict=True))
    assert held_out_loss(merge_model(params, bias, rest), run) == pytest.approx(last, rel=1e-4)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.learning_rate=0.5", "optimizer.learning_rate = 0.5: the run in .* began with 0.01"),
        ("model.moe.top_k=1", "model.moe.top_k = 1: the run in .* began with 2"),
        ("data.seq_len=64", "data.seq_len = 64: the run in .* began with 32"),
    ],
)
def test_another_config_in_the_same_run_dir_is_refused_by_name(recipe, whole_run, override, message):
    with pytest.raises(ConfigError, match=message):
        train(load_run(TrainRun, recipe, [f"run_dir={whole_run}", override]))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.vocab_size=300", "model.vocab_size = 300: the tokenizer has 512 ids"),
        ("data.source=nowhere/*.txt", "data.source = nowhere/\\*.txt: no such file"),
        ("mesh.data=2", "mesh = data 2 = 2 devices, but there are 1"),
        ("data.eval_rows=1", "data.eval_rows = 1"),
        ("data.tokenizer=nowhere", "data.tokenizer = nowhere: "),
    ],
)
def test_mistakes_are_refused_before_anything_is_made(recipe, tmp_path, override, message):
    with pytest.raises(ConfigError, match=message):
        train(load_run(TrainRun, recipe, [f"run_dir={tmp_path / 'run'}", override]))
    assert not (tmp_path / "run").exists()


def test_an_unwritable_run_dir_is_one_line_and_exit_2(recipe, root, tmp_path):
    (tmp_path / "file").write_text("")
    code, stderr = complete(recipe, root, tmp_path / "file" / "run")
    assert (code, len(stderr.splitlines())) == (2, 1)
    assert "run_dir" in stderr and "cannot be written" in stderr


def test_a_disk_without_room_is_named_and_exit_2_and_the_run_goes_on_where_there_is_room(recipe, root, tmp_path):
    """Files may not grow beyond 100 KiB: those of a checkpoint do."""
    options = (f"run_dir={tmp_path / 'run'}", "steps=3", "checkpoint_every=2", "eval_every=0")
    limited = ["bash", "-c", 'ulimit -f 100; exec "$@"', "-", *command(recipe, *options)]
    done = subprocess.run(limited, cwd=root, check=False, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    message = r"^train.py: run_dir = .*: a checkpoint could not be written \(File too large\)"
    assert re.search(message, done.stderr, re.MULTILINE)  # threads of Orbax may print beside it
    assert list_steps(tmp_path / "run/checkpoints") == []
    again = subprocess.run(command(recipe, *options), cwd=root, check=False, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert list_steps(tmp_path / "run/checkpoints") == [2, 3]


def test_a_typo_is_one_line_and_exit_2(recipe, root, tmp_path):
    code, stderr = complete(recipe, root, tmp_path / "run", "data.seqlen=3")
    assert (code, len(stderr.splitlines())) == (2, 1)
    assert "seqlen; did you mean seq_len" in stderr


def test_help_lists_every_key(root):
    arguments = [sys.executable, "train.py", "--help"]
    text = subprocess.run(arguments, cwd=root, check=True, capture_output=True, text=True).stdout
    assert all(f"{key}:" in text for key in ("learning_rate", "seq_len", "init_from", "checkpoint_every"))
    assert json.dumps(75) in text
