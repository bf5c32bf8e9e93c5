"""One training run, from its config to its last checkpoint."""

from __future__ import annotations

import dataclasses
import math
import signal
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml

import k3jax
from k3jax.checkpoint.orbax_io import (
    CHECKPOINTS,
    DATA,
    MODEL,
    OPTIMIZER,
    WEIGHTS,
    Checkpoints,
    list_steps,
    model_record,
    named_leaves,
    with_leaves,
)
from k3jax.checkpoint.safetensors_dir import CheckpointError
from k3jax.config import ConfigError, ModelConfig, TrainRun, to_yaml
from k3jax.data import Batch, BatchIterator, Corpus, load_corpus
from k3jax.nn.param import Param, is_trainable, is_variable, split_model
from k3jax.nn.transformer import Transformer
from k3jax.text import Tokenizer
from k3jax.train.metrics import Display, MetricsLog, draw_curve
from k3jax.train.optimizer import Optimizer, make_optimizer
from k3jax.train.router_balance import ROUTER_METRICS
from k3jax.train.step import TrainState, init_state, make_eval_step, make_train_step, model_of

DONE, DIVERGED, PREEMPTED = 0, 1, 75  # exit codes of train.py
CONFIG_FILE = "config.yaml"
# What may change when a run is continued: none of these touches the order of the data or the size of an update.
MAY_CHANGE = {"run_dir", "log_every", "eval_every", "checkpoint_every", "keep_checkpoints", "init_from"}
MAY_CHANGE |= {"stack", "remat", "loss_chunk", "mesh", "data.workers", "data.eval_rows"}


def train(run: TrainRun) -> int:
    """Train, or continue what `run.run_dir` holds; returns the exit code. Raises `ConfigError`."""
    display = Display(run.steps)

    # ---- where it writes -------------------------------------------------------------------------------------------
    _check_devices(run)
    run_dir = _open_run_dir(run)
    checkpoints = Checkpoints(run_dir, keep=run.keep_checkpoints)

    # ---- data ------------------------------------------------------------------------------------------------------
    try:
        tokenizer = Tokenizer.load(run.data.tokenizer)
    except ConfigError as error:
        raise ConfigError(f"data.tokenizer = {run.data.tokenizer}: {error}") from error
    if tokenizer.vocab_size > run.model.vocab_size:
        raise ConfigError(f"model.vocab_size = {run.model.vocab_size}: the tokenizer has {tokenizer.vocab_size} ids")
    corpus = load_corpus(run.data, tokenizer)
    batches = BatchIterator(corpus.train, run.data, host=jax.process_index(), hosts=jax.process_count())
    eval_batches = corpus.eval_batches(run.data, batch_size=_micro_rows(run)) if run.eval_every else []
    display.message(f"data: {_describe(corpus)}")

    # ---- model and optimizer, as an earlier process left them or new -------------------------------------------------
    skeleton = jax.eval_shape(lambda: _random_model(run))
    params, _, rest = split_model(skeleton)
    optimizer = make_optimizer(run.optimizer, params, steps=run.steps)
    state, first = _restore(checkpoints, skeleton, optimizer, batches)
    if state is None:
        state = init_state(_initial_model(run), optimizer)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    display.message(f"model: {run.model.name}, {run.model.num_layers} layers, {size:,} parameters, {jax.devices()[0]}")
    if first:
        display.message(f"continuing {run_dir} after step {first} of {run.steps}")
    (run_dir / CONFIG_FILE).write_text(to_yaml(run))

    # ---- train -----------------------------------------------------------------------------------------------------
    trainer = Trainer(
        run=run,
        run_dir=run_dir,
        display=display,
        checkpoints=checkpoints,
        metrics=MetricsLog(run_dir, last_step=first),
        batches=batches,
        eval_batches=eval_batches,
        optimizer=optimizer,
        rest=rest,
    )
    with _stop_signals() as stop:
        try:
            return trainer.loop(state, first=first, stop=stop)
        finally:
            display.stop()
            trainer.metrics.close()
            checkpoints.close()


@dataclass(kw_only=True)
class Trainer:
    """The loop over steps and what it writes; one object a run."""

    run: TrainRun
    run_dir: Path
    display: Display
    checkpoints: Checkpoints
    metrics: MetricsLog
    batches: BatchIterator
    eval_batches: list[Batch]
    optimizer: Optimizer
    rest: Transformer
    clock: Clock = field(default_factory=lambda: Clock())

    def loop(self, state: TrainState, *, first: int, stop: list[int]) -> int:
        """Run steps `first` + 1 to the last; the metrics of a step are read when the next one is under way."""
        if first >= self.run.steps:
            return self._finish(stopped=False, step=first)
        train_step, eval_step = self._compile(state)
        self.display.start(first)
        self.clock.start()
        pending: tuple[int, Any] | None = None
        for step in range(first + 1, self.run.steps + 1):
            self.checkpoints.check()
            state, metrics = train_step(state, next(self.batches))
            if pending and not self._report(*pending):
                return DIVERGED
            pending = (step, metrics)
            last = step == self.run.steps or bool(stop)
            evaluates = bool(self.eval_batches) and (last or step % self.run.eval_every == 0)
            saves = last or step % self.run.checkpoint_every == 0
            if evaluates or saves:  # both need step's own numbers, so wait for them
                with self.clock.paused(state):
                    held_out = self._evaluate(eval_step, state) if evaluates else None
                if not self._report(step, metrics, eval_loss=held_out):
                    return DIVERGED
                pending = None
            if saves:
                with self.clock.paused(state):
                    self._save(step, state)
            if stop:
                break
        return self._finish(stopped=bool(stop) and step < self.run.steps, step=step)

    def _compile(self, state: TrainState) -> tuple[Any, Any]:
        self.display.message("compiling the training step ...")
        began = time.monotonic()
        batch = Batch.shapes(self.run.data.batch_size // jax.process_count(), self.run.data.seq_len)
        step = jax.jit(make_train_step(self.run, self.optimizer, self.rest), donate_argnums=0)
        compiled = step.lower(state, batch).compile()
        self.display.message(f"compiled in {time.monotonic() - began:.0f} s; training {self.run.steps} steps")
        return compiled, jax.jit(make_eval_step(self.run, self.rest))

    def _report(self, step: int, metrics: Any, *, eval_loss: float | None = None) -> bool:
        """Log a step; False where its loss or gradient is not finite."""
        loss, grad_norm, lr, tokens = (float(metrics[key]) for key in ("loss", "grad_norm", "lr", "tokens"))
        rate = self.clock.count(tokens)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self.display.message(
                f"step {step}: loss {loss}, gradient norm {grad_norm}; stopped, the last checkpoint is kept. "
                f"Lower optimizer.learning_rate (now {self.run.optimizer.learning_rate}) or optimizer.clip_norm"
            )
            return False
        left = (self.run.steps - step) * self.clock.seconds_per_step
        self.display.update(step, loss=loss, tokens_per_s=rate, seconds_left=left)
        if step % self.run.log_every == 0 or step == self.run.steps or eval_loss is not None:
            record = {"step": step, "loss": loss, "tokens_per_s": round(rate, 1), "lr": lr, "grad_norm": grad_norm}
            record |= {key: round(float(value), 4) for key, value in metrics.items() if key in ROUTER_METRICS}
            self.metrics.write(record if eval_loss is None else {**record, "eval_loss": eval_loss})
        if eval_loss is not None:
            self.display.message(f"step {step}/{self.run.steps}  held-out loss {eval_loss:.4f}")
        return True

    def _evaluate(self, eval_step: Any, state: TrainState) -> float:
        """Mean nats per held-out token."""
        sums = [eval_step(state, batch) for batch in self.eval_batches]
        return float(sum(nats for nats, _ in sums) / sum(tokens for _, tokens in sums))

    def _save(self, step: int, state: TrainState) -> None:
        record = {"tokenizer": self.run.data.tokenizer, "position": self.batches.position()}
        model = model_record(dataclasses.replace(self.run.model, quantized_experts=False))  # float32 experts
        self.checkpoints.save(step, trees=_trees(state, self.rest), records={MODEL: model, DATA: record})
        draw_curve(self.run_dir)

    def _finish(self, *, stopped: bool, step: int) -> int:
        self.checkpoints.wait()
        self.display.stop()
        if stopped:
            self.display.message(f"stopped at step {step}; the same command continues from there")
            return PREEMPTED
        self.display.message(f"done: {self.run.steps} steps, checkpoint and loss curve in {self.run_dir}")
        return DONE


class Clock:
    """Tokens a second over the last steps, without the time that evaluations and checkpoints take."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, float]] = deque(maxlen=21)  # (seconds of training, tokens so far)
        self._paused = 0.0

    def start(self) -> None:
        """Training begins now."""
        self._marks.append((time.monotonic(), 0.0))

    def count(self, tokens: float) -> float:
        """A step of `tokens` is complete: returns tokens a second."""
        self._marks.append((time.monotonic() - self._paused, self._marks[-1][1] + tokens))
        (began, before), (now, after) = self._marks[0], self._marks[-1]
        return (after - before) / max(now - began, 1e-9)

    @property
    def seconds_per_step(self) -> float:
        """Over the same steps."""
        return (self._marks[-1][0] - self._marks[0][0]) / max(len(self._marks) - 1, 1)

    @contextmanager
    def paused(self, state: TrainState) -> Iterator[None]:
        """Wait for the step under way, then leave out the time of the `with` block."""
        jax.block_until_ready(state)
        began = time.monotonic()
        yield
        self._paused += time.monotonic() - began


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """A list that SIGTERM and SIGINT append to; a second signal acts as usual."""
    caught: list[int] = []
    usual = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def note(number: int, _frame: Any) -> None:
        caught.append(number)
        signal.signal(number, usual[signal.Signals(number)])

    for number in usual:
        signal.signal(number, note)
    try:
        yield caught
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def _check_devices(run: TrainRun) -> None:
    shape = {name: size for name, size in dataclasses.asdict(run.mesh).items() if size != 1}
    if shape:
        raise ConfigError(f"mesh = {shape}: training runs on one device so far; leave every axis at 1")


def _open_run_dir(run: TrainRun) -> Path:
    """Make the run's folder; `ConfigError` where it cannot be written, or holds a run of another config."""
    run_dir = Path(run.run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir):
            pass
    except OSError as error:
        raise ConfigError(f"run_dir = {run_dir}: cannot be written ({error.strerror})") from error
    saved = run_dir / CONFIG_FILE
    if list_steps(run_dir / CHECKPOINTS) and saved.exists():
        _check_same_run(_flat(yaml.safe_load(saved.read_text())), _flat(yaml.safe_load(to_yaml(run))), run_dir)
    return run_dir


def _check_same_run(then: dict[str, Any], now: dict[str, Any], run_dir: Path) -> None:
    for key, value in now.items():
        if key in then and then[key] != value and key not in MAY_CHANGE and key.partition(".")[0] not in MAY_CHANGE:
            raise ConfigError(
                f"{key} = {value}: the run in {run_dir} began with {then[key]}; "
                "continue it with that, or train in another run_dir"
            )


def _flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """{"data.seq_len": 256, ...} of nested mappings."""
    if not isinstance(node, dict):
        return {prefix: node}
    return {k: v for key, child in node.items() for k, v in _flat(child, f"{prefix}.{key}" if prefix else key).items()}


def _random_model(run: TrainRun) -> Transformer:
    return Transformer(run.model, jax.random.key(run.seed), param_dtype="float32", stack=run.stack, remat=run.remat)


def _initial_model(run: TrainRun) -> Transformer:
    """The model at step 0: random, or the weights at `init_from` in float32."""
    if not run.init_from:
        return jax.jit(lambda: _random_model(run))()
    try:
        loaded = k3jax.load(run.init_from)
    except CheckpointError as error:
        raise ConfigError(f"init_from = {error}") from error
    _check_same_model(loaded.config, run)
    if not all(is_trainable(leaf) for leaf in jax.tree.leaves(loaded, is_leaf=is_variable) if isinstance(leaf, Param)):
        raise ConfigError(f"init_from = {run.init_from}: its experts are MXFP4, which cannot be trained as they are")
    weights = {name: leaf.astype(np.float32) for name, leaf in named_leaves(loaded).items()}
    return with_leaves(jax.eval_shape(lambda: _random_model(run)), weights)


def _check_same_model(loaded: ModelConfig, run: TrainRun) -> None:
    free = {"name", "dtype", "max_context", "quantized_experts", "init_std", "vision_json", "extra_json"}
    free |= {"moe.activations"}
    ours, theirs = _flat(dataclasses.asdict(run.model)), _flat(dataclasses.asdict(loaded))
    for key in ours.keys() - free:
        if ours[key] != theirs[key]:
            raise ConfigError(f"model.{key} = {ours[key]}: the model at init_from = {run.init_from} has {theirs[key]}")


def _restore(
    checkpoints: Checkpoints, skeleton: Transformer, optimizer: Optimizer, batches: BatchIterator
) -> tuple[TrainState | None, int]:
    """The state and step of the newest checkpoint, the data sought to the same place; (None, 0) where there is none."""
    blank = jax.eval_shape(lambda model: init_state(model, optimizer), skeleton)
    found = checkpoints.restore(like=_trees(blank, split_model(skeleton)[2]), records=(DATA,))
    if found is None:
        return None, 0
    params, router_bias, _ = split_model(found.trees[WEIGHTS])
    batches.seek(found.records[DATA]["position"])
    return TrainState(params=params, router_bias=router_bias, **found.trees[OPTIMIZER]), found.step


def _trees(state: TrainState, rest: Transformer) -> dict[str, Any]:
    """A state as the trees of a checkpoint: the model by itself, as serving loads it, and what only training needs."""
    return {WEIGHTS: model_of(state, rest), OPTIMIZER: {"step": state.step, "opt_state": state.opt_state}}


def _micro_rows(run: TrainRun) -> int:
    return run.data.batch_size // run.accumulate


def _describe(corpus: Corpus) -> str:
    train, held_out = corpus.train.stream, corpus.held_out.stream
    return (
        f"{len(train.ends):,} documents with {len(train.tokens):,} tokens, "
        f"and {len(held_out.ends):,} with {len(held_out.tokens):,} held out"
    )
