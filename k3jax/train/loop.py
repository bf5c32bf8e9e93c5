"""One training run, from its config to its last checkpoint."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from k3jax.checkpoint.orbax_io import DATA, MODEL, Checkpoints, model_record
from k3jax.config import TrainRun
from k3jax.data import Batch
from k3jax.data.batch import position_of_run
from k3jax.train.goodput import COMPILE, EVALUATE, READ, SAVE, STEP, Goodput
from k3jax.train.metrics import Display, MetricsLog, draw_curve
from k3jax.train.run_dir import check_run_dir, open_run_dir
from k3jax.train.stage import StageData, load_stages
from k3jax.train.start import Setting, start_state, trees_of
from k3jax.train.step import TrainState, make_eval_step, make_train_step, make_warm_up
from k3jax.train.stop import StopSignals, watch_maintenance
from k3jax.train.throughput import Throughput, Work
from k3jax.train.watchdog import Watchdog

DONE, DIVERGED, PREEMPTED = 0, 1, 75  # exit codes of train.py
PROFILE = "xprof"  # folder of a run that holds its traces


def train(run: TrainRun) -> int:
    """Train, or continue what `run.run_dir` holds; returns the exit code. Raises `ConfigError`."""
    began, is_main = time.monotonic(), jax.process_index() == 0
    display = Display(run.steps, quiet=not is_main)

    # ---- what could be wrong is looked at before anything is made --------------------------------------------------
    check_run_dir(run)
    setting = Setting.of(run)
    stages = load_stages(run, setting.devices)
    for stage in stages:
        display.message(f"data: {stage.corpus}")

    with open_run_dir(run, alone=is_main) as run_dir:
        display.keep(run_dir)
        return _train(run, run_dir, setting, stages, display, began)


def _train(
    run: TrainRun, run_dir: Path, setting: Setting, stages: list[StageData], display: Display, began: float
) -> int:
    # ---- the run's state as an earlier process left it, or new ------------------------------------------------------
    checkpoints = Checkpoints(run_dir, keep=run.keep_checkpoints, keep_every=run.keep_every)
    start = start_state(run, setting, checkpoints)
    goodput = Goodput.of_run(run_dir, step=start.step, since=began)
    for stage in stages:
        if stage.holds(start.step):
            stage.batches.seek(start.position)
    display.message(_describe(run, start.state))
    if start.step:
        display.message(f"continuing {run_dir} after step {start.step} of {run.steps}")

    # ---- train -----------------------------------------------------------------------------------------------------
    trainer = Trainer(
        run=run,
        run_dir=run_dir,
        display=display,
        checkpoints=checkpoints,
        metrics=MetricsLog(run_dir, last_step=start.step) if jax.process_index() == 0 else None,
        setting=setting,
        goodput=goodput,
        throughput=Throughput.of_run(run, seconds=goodput.busy),
    )
    if jax.devices()[0].platform == "tpu":
        watch_maintenance()
    with StopSignals() as stop, Watchdog(goodput, limit=run.hang_seconds, run_dir=run_dir, report=display.message):
        try:
            return trainer.loop(stages, start.state, first=start.step, stop=stop)
        finally:
            trainer.close(stages)


class Diverged(Exception):
    """Too many steps in a row had a loss or a gradient that is not finite; the message says what to do."""


@dataclass(kw_only=True)
class Trainer:
    """The loop over steps and what it writes; one object a run."""

    run: TrainRun
    run_dir: Path
    display: Display
    checkpoints: Checkpoints
    metrics: MetricsLog | None
    setting: Setting
    goodput: Goodput
    throughput: Throughput
    skipped: int = 0  # updates left out in a row
    tracing: bool = False
    pending: tuple[int, Any, Work] | None = None  # the step under way, whose metrics are not read yet

    def loop(self, stages: list[StageData], state: TrainState, *, first: int, stop: StopSignals) -> int:
        """Run steps `first` + 1 to the last; the metrics of a step are read when the next one is under way."""
        step, stopped = first, False
        self.display.start(first)
        try:
            for stage in stages:
                if step < stage.last and not stopped:
                    state, step, stopped = self._run_stage(stage, state, step, stop)
        except Diverged as error:
            self.display.message(str(error))
            return DIVERGED
        return self._finish(stopped=stopped and step < self.run.steps, step=step)

    def _run_stage(
        self, stage: StageData, state: TrainState, first: int, stop: StopSignals
    ) -> tuple[TrainState, int, bool]:
        """Steps of one stage: the state, the last step, and whether the run is to stop there."""
        train_step, eval_step = self._compile(stage, state)
        if first == 0 and self.run.router_warmup:
            state = self._warm_up(stage, state)
        for step in range(first + 1, stage.last + 1):
            self.checkpoints.check()
            with self.goodput.during(READ, f"step {step}"):
                batch, work = self._next_batch(stage)
            self._profile(step)
            with self.goodput.during(STEP, f"step {step}"):
                state, metrics = train_step(state, batch)
                self._report_pending()
            self.pending = (step, metrics, work)
            stopped = stop.wanted(step)
            evaluates = stage.evaluates_at(step) and not stopped
            saves = stopped or step == self.run.steps or step % self.run.checkpoint_every == 0
            if evaluates or saves or step == stage.last:  # what follows needs step's own numbers, so wait for them
                self._wait(step)
                self._report_pending(self._evaluate(stage, eval_step, state, step) if evaluates else None)
            if saves and (stopped or not self.skipped):  # states that spoil updates must not push good ones out
                self._save(step, state, stage)
            if stopped:
                break
        return state, step, stopped

    def _compile(self, stage: StageData, state: TrainState) -> tuple[Any, Any]:
        self.display.message("compiling the training step ...")
        began, data = time.monotonic(), stage.run.data
        with self.goodput.during(COMPILE, f"{data.batch_size} rows of {data.seq_len} tokens"):
            rest, devices = self.setting.rest, self.setting.devices
            step = make_train_step(stage.run, self.setting.optimizer, rest)
            step = devices.jit(step, data, (devices.state_specs, PartitionSpec()), donate=True)
            compiled = step.lower(state, devices.batch(data)).compile()
        seconds = time.monotonic() - began
        self.display.message(f"compiled in {seconds:.0f} s; training to step {stage.last} of {self.run.steps}")
        return compiled, devices.jit(make_eval_step(stage.run, rest), data, PartitionSpec())

    def _next_batch(self, stage: StageData) -> tuple[Batch, Work]:
        """The batch of all processes, and the work in it as far as this one's rows tell."""
        rows, size = next(stage.batches), stage.run.data.batch_size
        work = Work.of(np.asarray(rows.segment_ids)).of_more(size / len(rows.tokens))
        return self.setting.devices.put(rows, first=stage.rows.start, batch_size=size), work

    def _warm_up(self, stage: StageData, state: TrainState) -> TrainState:
        """Balance the routers on the first batch, which the first step then trains on."""
        position = stage.batches.position()
        with self.goodput.during(COMPILE, "router warm-up"):
            devices = self.setting.devices
            warm_up = make_warm_up(stage.run, self.setting.rest)
            warm_up = devices.jit(warm_up, stage.run.data, devices.state_specs, donate=True)
            state = jax.block_until_ready(warm_up(state, self._next_batch(stage)[0]))
        stage.batches.seek(position)
        return state

    def _wait(self, step: int) -> None:
        """Wait for the step under way."""
        with self.goodput.during(STEP, f"step {step}"):
            jax.block_until_ready(self.pending and self.pending[1])

    def _report_pending(self, eval_loss: float | None = None) -> None:
        """Read and log the metrics of the step before, which waits for it."""
        if self.pending is None:
            return
        (step, metrics, work), self.pending = self.pending, None
        loss, grad_norm = float(metrics["loss"]), float(metrics["grad_norm"])
        self._count_skipped(step, skipped=bool(metrics["skipped"]), loss=loss, grad_norm=grad_norm)
        self.throughput.count(work, seconds=self.goodput.busy)
        left = (self.run.steps - step) * self.throughput.seconds_per_step
        self.display.update(step, loss=loss, tokens_per_s=self.throughput.tokens_per_s, seconds_left=left)
        if step % self.run.log_every == 0 or step == self.run.steps or eval_loss is not None:
            self._log(step, metrics, work, eval_loss)

    def _count_skipped(self, step: int, *, skipped: bool, loss: float, grad_norm: float) -> None:
        if not skipped:
            self.skipped = 0
            return
        self.skipped += 1
        what, most = f"step {step}: loss {loss}, gradient norm {grad_norm}", self.run.max_skipped
        if self.skipped > most:
            raise Diverged(
                f"{what}; stopped after {self.skipped} such steps in a row, the last checkpoint is kept. "
                f"Lower optimizer.learning_rate (now {self.run.optimizer.learning_rate}) or optimizer.clip_norm"
            )
        self.display.message(f"{what}; the update is left out ({self.skipped} in a row, max_skipped is {most})")

    def _log(self, step: int, metrics: Any, work: Work, eval_loss: float | None) -> None:
        numbers = {name: float(value) for name, value in metrics.items() if np.ndim(value) == 0 and name != "tokens"}
        loss = numbers.pop("loss")  # in full: two runs are compared by it
        record = {"step": step, "loss": loss, **{name: _short(value) for name, value in numbers.items()}}
        record |= {"padding": round(work.padding, 4), "tokens_per_s": round(self.throughput.tokens_per_s, 1)}
        record |= {"goodput": round(self.goodput.share, 4)}
        if (mfu := self.throughput.mfu) is not None:
            record["mfu"] = round(mfu, 4)
        record |= {} if eval_loss is None else {"eval_loss": eval_loss}
        if self.metrics is not None:
            self.metrics.write(record, {name: np.asarray(value) for name, value in metrics.items() if np.ndim(value)})
            self.goodput.write(self.run_dir)
        if eval_loss is not None:
            self.display.message(f"step {step}/{self.run.steps}  held-out loss {eval_loss:.4f}")

    def _evaluate(self, stage: StageData, eval_step: Any, state: TrainState, step: int) -> float:
        """Mean nats per held-out token."""
        with self.goodput.during(EVALUATE, f"step {step}"):
            put = self.setting.devices.put
            batches = (put(rows, first=0, batch_size=len(rows.tokens)) for rows in stage.eval_batches)
            sums = [eval_step(state, batch) for batch in batches]
            return float(sum(nats for nats, _ in sums) / sum(tokens for _, tokens in sums))

    def _save(self, step: int, state: TrainState, stage: StageData) -> None:
        with self.goodput.during(SAVE, f"step {step}"):
            position = position_of_run(stage.batches.position())
            record = {"tokenizer": self.run.data.tokenizer, "position": position}
            model = model_record(dataclasses.replace(self.run.model, quantized_experts=False))  # float32 experts
            trees = trees_of(state, self.setting.rest)
            self.checkpoints.save(step, trees=trees, records={MODEL: model, DATA: record})
            if self.metrics is not None:
                draw_curve(self.run_dir)
        self.goodput.saved(step)

    def _profile(self, step: int) -> None:
        """Begin or end the trace where it is time; steps are traced whole."""
        if step == self.run.profile_step:
            self._wait(step - 1)
            jax.profiler.start_trace(str(self.run_dir / PROFILE))
            self.tracing = True
        elif self.tracing and step == self.run.profile_step + self.run.profile_steps:
            self._end_trace(step - 1)

    def _end_trace(self, step: int) -> None:
        self._wait(step)
        jax.profiler.stop_trace()
        self.tracing = False
        self.display.message(f"steps {self.run.profile_step} to {step} are traced in {self.run_dir / PROFILE}")

    def _finish(self, *, stopped: bool, step: int) -> int:
        if self.tracing:
            self._end_trace(step)
        with self.goodput.during(SAVE, "the last checkpoint"):
            self.checkpoints.wait()
        self.display.stop()
        if self.throughput.total.places:
            self.display.message(f"padding: {self.throughput.total.padding:.1%} of the rows; time: {self.goodput}")
        if stopped:
            self.display.message(f"stopped at step {step}; the same command continues from there")
            return PREEMPTED
        self.display.message(f"done: {self.run.steps} steps, checkpoint and loss curve in {self.run_dir}")
        return DONE

    def close(self, stages: list[StageData]) -> None:
        """Stop what runs beside the loop."""
        self.display.stop()
        for stage in stages:
            stage.batches.close()
        if self.metrics is not None:
            self.metrics.close()
            self.goodput.write(self.run_dir)
        self.checkpoints.close()


def _describe(run: TrainRun, state: TrainState) -> str:
    size = sum(leaf.size for leaf in jax.tree.leaves(state.params if state.frozen is None else state.frozen))
    trained = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    adapters = "" if state.frozen is None else f" and {trained:,} in adapters"
    return f"model: {run.model.name}, {run.model.num_layers} layers, {size:,} parameters{adapters}, {jax.devices()[0]}"


def _short(value: float) -> float:
    """Six digits: enough to compare two runs by eye, few enough to read."""
    return float(f"{value:.6g}")
