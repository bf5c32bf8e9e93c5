"""`serve.py` from the paths to the exit code: checkpoint, tokenizer, engine, batch."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from k3jax.checkpoint.load import load
from k3jax.checkpoint.orbax_io import DATA, DamagedError, find_step, read_record
from k3jax.checkpoint.safetensors_dir import CheckpointError
from k3jax.config import ConfigError, MeshShape, ModelConfig, ServeRun
from k3jax.nn.transformer import Transformer
from k3jax.serve.batch import EXIT_PREEMPTED, Batch, StopSignal, check_input, make_progress, show
from k3jax.serve.engine import Engine
from k3jax.serve.manifest import Manifest
from k3jax.serve.request import Limits
from k3jax.serve.results import OutputFile
from k3jax.text import Tokenizer
from k3jax.text.tokenizer import RANK_FILE
from pallas_kernels.mx import MXFP4Array, serving_layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paths:
    """Where a batch comes from and goes to; `tokenizer` is empty (see `load_tokenizer`), "bytes" or a directory."""

    checkpoint: Path
    input: Path
    output: Path
    tokenizer: str = ""


def serve(run: ServeRun, paths: Paths, *, show_answers: bool = False) -> int:
    """Answer a batch file; returns 0, or 75 where a signal stopped it. Raises `ConfigError` where it cannot go on."""
    check_recipe(run)
    lines = check_input(paths.input)
    if paths.output.exists() and os.path.samefile(paths.input, paths.output):
        raise ConfigError(f"--output {paths.output}: is the input file")
    console = Console(stderr=True)
    with StopSignal() as stopping, OutputFile(paths.output) as output:
        tokenizer = load_tokenizer(paths.checkpoint, paths.tokenizer)
        model = load_model(paths.checkpoint, run.dtype)
        check_fit(run, model.config, tokenizer)
        manifest = Manifest.of(run, paths.checkpoint, model.config.name, tokenizer)
        output.keep(manifest.with_requests(lines))
        engine = Engine(
            model,
            slots=run.slots,
            max_context=run.max_context,
            prefill_chunk=run.prefill_chunk,
            max_top_logprobs=run.max_top_logprobs,
            report=lambda message: console.print(message, style="dim"),
        )
        limits = Limits(
            max_context=run.max_context,
            default_max_tokens=run.default_max_tokens,
            max_top_logprobs=run.max_top_logprobs,
        )
        name = model.config.name
        batch = Batch(engine=engine, tokenizer=tokenizer, limits=limits, model_name=name, stopping=stopping)
        with make_progress(console) as progress:
            summary = batch.run(paths.input, output, progress)
    console.print(f"{paths.output}: {summary}", highlight=False)
    if show_answers:
        show(paths.input, paths.output, Console(), tokenizer=tokenizer)
    return EXIT_PREEMPTED if summary.interrupted else 0


def load_model(checkpoint: Path, dtype: str) -> Transformer:
    """`k3jax.load`, computing in `dtype` unless that is empty, with experts as the device's kernels read them.

    Raises `ConfigError`.
    """
    try:
        model = load(checkpoint, dtype=dtype or None)
    except CheckpointError as error:
        raise ConfigError(f"--checkpoint {error}") from error
    kind = jax.devices()[0].device_kind

    def laid_out(leaf: Any) -> Any:
        return serving_layout(leaf, kind, "routed experts") if isinstance(leaf, MXFP4Array) else leaf

    return jax.tree.map(laid_out, model, is_leaf=lambda leaf: isinstance(leaf, MXFP4Array))


def load_tokenizer(checkpoint: Path, name: str = "") -> Tokenizer:
    """The tokenizer that `name` says ("bytes" or a directory), else the checkpoint's own.

    A checkpoint's own is its tokenizer files, else the one that its training run recorded. Raises `ConfigError` where
    there is neither: a guess would give other ids.
    """
    if name:
        return Tokenizer.load(name)
    if not checkpoint.exists():
        raise ConfigError(f"--checkpoint {checkpoint}: no such directory")
    if (checkpoint / RANK_FILE).exists():
        return Tokenizer.from_dir(checkpoint)
    step = find_step(checkpoint)
    if step is None:
        raise ConfigError(f"--checkpoint {checkpoint}: no {RANK_FILE} in it and not a training run; say --tokenizer")
    try:
        return Tokenizer.load(read_record(step, DATA)["tokenizer"])
    except DamagedError as error:
        raise ConfigError(f"--checkpoint {error}; say --tokenizer") from error


def check_recipe(run: ServeRun) -> None:
    """Raise `ConfigError` where a number of the recipe is out of range."""
    lowest = {"slots": 1, "max_context": 2, "prefill_chunk": 1, "default_max_tokens": 1, "max_top_logprobs": 0}
    for key, low in lowest.items():
        if getattr(run, key) < low:
            raise ConfigError(f"{key} = {getattr(run, key)}: must be at least {low}")
    if run.mesh != MeshShape():
        raise ConfigError(f"mesh = {dataclasses.asdict(run.mesh)}: serving runs on one device; every axis must be 1")


def check_fit(run: ServeRun, config: ModelConfig, tokenizer: Tokenizer) -> None:
    """Raise `ConfigError` where the recipe, the model and the tokenizer do not fit together."""
    if run.max_context > config.max_context:
        raise ConfigError(f"max_context = {run.max_context}: the model's is {config.max_context}")
    if run.max_top_logprobs > config.vocab_size:
        raise ConfigError(f"max_top_logprobs = {run.max_top_logprobs}: the vocabulary has {config.vocab_size}")
    if tokenizer.vocab_size != config.vocab_size:
        raise ConfigError(f"the tokenizer has {tokenizer.vocab_size} ids, but the model {config.vocab_size}")
