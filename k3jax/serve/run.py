"""`serve.py` from the paths to the exit code: checkpoint, tokenizer, engine, batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from k3jax.checkpoint.load import abstract_model, load
from k3jax.checkpoint.orbax_io import DATA, DamagedError, find_step, read_record
from k3jax.checkpoint.safetensors_dir import CheckpointError
from k3jax.checkpoint.source import open_source
from k3jax.config import ConfigError, MeshShape, ModelConfig, ServeRun
from k3jax.nn.placement import on_mesh
from k3jax.nn.transformer import Transformer
from k3jax.serve.batch import EXIT_PREEMPTED, Batch, StopSignal, check_input, make_progress, show
from k3jax.serve.devices import ServeDevices, lay_out_heads
from k3jax.serve.engine import LATENTS, Engine, Sizes, slot_bytes
from k3jax.serve.hosts import from_first, is_first
from k3jax.serve.images import ImageEncoder, ImageReader
from k3jax.serve.jobs import Jobs
from k3jax.serve.manifest import Manifest
from k3jax.serve.request import Limits
from k3jax.serve.results import open_output
from k3jax.serve.scheduler import Scheduler
from k3jax.text import Tokenizer
from k3jax.text.tokenizer import MEDIA_PAD, RANK_FILE
from k3jax.vision.image import PATCH
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
    console = Console(stderr=True, quiet=not is_first())
    with StopSignal() as stopping, open_output(paths.output, input_path=paths.input) as output:
        loaded = Loaded.of(run, paths.checkpoint, paths.tokenizer)
        from_first(lambda: output.keep(loaded.manifest(paths.checkpoint).with_requests(lines)))
        batch = Batch(jobs=loaded.jobs(partial(console.print, style="dim")), stopping=stopping)
        with make_progress(console) as progress:
            summary = batch.run(paths.input, output, progress)
    console.print(f"{paths.output}: {summary}", highlight=False)
    if show_answers and is_first():
        show(paths.input, paths.output, Console(), tokenizer=loaded.tokenizer)
    return EXIT_PREEMPTED if summary.interrupted else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
    """A recipe with its model and tokenizer, which fit together."""

    run: ServeRun
    model: Transformer
    tokenizer: Tokenizer

    @classmethod
    def of(cls, run: ServeRun, checkpoint: Path, tokenizer: str = "") -> Loaded:
        """Load a checkpoint; raises `ConfigError` where it does not fit the recipe, which `check_recipe` has passed."""
        tokens = load_tokenizer(checkpoint, tokenizer)
        model = load_model(checkpoint, run.dtype, None if run.mesh == MeshShape() else dataclasses.asdict(run.mesh))
        check_fit(run, model.config, tokens)
        return cls(run=run, model=model, tokenizer=tokens)

    def manifest(self, checkpoint: Path) -> Manifest:
        """What answers are made with."""
        return Manifest.of(self.run, checkpoint, self.model.config.name, self.tokenizer)

    def jobs(self, report: Callable[[str], None]) -> Jobs:
        """What serves requests, its programs compiled; `report` is told which."""
        run, model = self.run, self.model
        engine = Engine(
            model,
            sizes_on_mesh(run, model.config, ServeDevices.of(dataclasses.asdict(run.mesh), "prefill", model)),
            max_top_logprobs=run.max_top_logprobs,
            latents=run.latents,
            scores=run.score_prompts,
            mesh=dataclasses.asdict(run.mesh),
            report=report,
        )
        limits = Limits(
            max_context=run.max_context,
            default_max_tokens=run.default_max_tokens,
            max_top_logprobs=run.max_top_logprobs,
            score_prompts=run.score_prompts,
        )
        jobs = Jobs(
            scheduler=Scheduler(engine, snapshot_every=run.snapshot_every),
            tokenizer=self.tokenizer,
            limits=limits,
            model_name=model.config.name,
        )
        if model.vision is not None:
            folder = Path(run.image_folder) if run.image_folder else None
            jobs.reader = ImageReader(model.config.media_id, folder)
            jobs.encoder = ImageEncoder(model.vision, report=report)
        return jobs


def load_model(checkpoint: Path, dtype: str, mesh: Mapping[str, int] | None = None) -> Transformer:
    """`k3jax.load`, computing in `dtype` unless that is empty, with weights as the device reads them.

    On a `mesh` each process reads what its devices hold. Raises `ConfigError`.
    """
    try:
        if mesh is None:
            model = load(checkpoint, dtype=dtype or None)
        else:
            shapes = abstract_model(open_source(checkpoint).config)
            devices = ServeDevices.of(dict(mesh), "decode", shapes)
            model = load(checkpoint, dtype=dtype or None, shardings=on_mesh(devices.mesh, devices.model_specs))
    except CheckpointError as error:
        raise ConfigError(f"--checkpoint {error}") from error
    kind = jax.devices()[0].device_kind

    def laid_out(leaf: Any) -> Any:
        return serving_layout(leaf, kind, "routed experts") if isinstance(leaf, MXFP4Array) else leaf

    model = jax.tree.map(laid_out, model, is_leaf=lambda leaf: isinstance(leaf, MXFP4Array))
    return lay_out_heads(model, partial(jax.device_put, donate=True)) if jax.default_backend() == "tpu" else model


def sizes_of(run: ServeRun, config: ModelConfig, *, pieces: int = 1) -> Sizes:
    """The shapes that a recipe asks for. Raises `ConfigError` where snapshots are wanted and none fits.

    `pieces` is the number of devices that hold a piece of every page.
    """
    sizes = Sizes.of(
        config,
        slots=run.slots,
        max_context=run.max_context,
        prefill_chunk=run.prefill_chunk,
        prefill_rows=run.prefill_rows,
        cache_tokens=run.cache_tokens,
        snapshot_bytes=run.snapshot_mib * 2**20,
        pieces=pieces,
    )
    if sizes.page % (2 * pieces):
        raise ConfigError(
            f"prefill_chunk = {run.prefill_chunk}: pages in pieces on {pieces} devices need a multiple of {2 * pieces}"
        )
    if run.snapshot_mib and not run.snapshot_mib * 2**20 // slot_bytes(config):
        least = -(-slot_bytes(config) // 2**20)
        raise ConfigError(f"snapshot_mib = {run.snapshot_mib}: one state takes {least}; 0 keeps none")
    return sizes


def sizes_on_mesh(run: ServeRun, config: ModelConfig, devices: ServeDevices, *, mode: str = "") -> Sizes:
    """The same on a mesh, whose shares of the batch each get their part. Raises `ConfigError`.

    `snapshot_mib` is what each share has, and one sequence fits into each. For one `mode` alone, "prefill" or "decode",
    messages say which, and decode asks nothing of `prefill_rows`.
    """
    shares, where = devices.shares, f"in {mode} " if mode else ""
    shared = ("slots",) if mode == "decode" else ("slots", "prefill_rows")
    for key in shared:
        value = getattr(run, key)
        if value % shares:
            fix = -(-value // shares) * shares
            raise ConfigError(f"{key} = {value}: {where}the mesh shares rows out {shares} ways; {key}={fix} fits")
    parts, pieces = (devices.placement.count(devices.placement.split.get(name, ())) for name in ("seq", "page"))
    if run.prefill_chunk % parts:
        raise ConfigError(f"prefill_chunk = {run.prefill_chunk}: mesh.context = {parts} must divide it")
    each = {key: getattr(run, key) // shares for key in (*shared, "cache_tokens")}
    return sizes_of(dataclasses.replace(run, **each), config, pieces=pieces).times(shares)


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
    lowest = {"slots": 1, "max_context": 2, "prefill_chunk": 2, "prefill_rows": 1, "cache_tokens": 0, "snapshot_mib": 0}
    lowest |= {"snapshot_every": 1, "default_max_tokens": 1, "max_top_logprobs": 0}
    for key, low in lowest.items():
        if getattr(run, key) < low:
            raise ConfigError(f"{key} = {getattr(run, key)}: must be at least {low}")
    if run.prefill_chunk % 2:
        raise ConfigError(f"prefill_chunk = {run.prefill_chunk}: must be even; best is a multiple of 128")
    if run.latents not in LATENTS:
        raise ConfigError(f"latents = {run.latents!r}: must be one of {', '.join(map(repr, LATENTS))}")
    if run.mesh.fsdp > 1:
        raise ConfigError(f"mesh.fsdp = {run.mesh.fsdp}: serving has no use for this axis; it must be 1")


def check_context(run: ServeRun, config: ModelConfig) -> None:
    """Raise `ConfigError` where the recipe's context is longer than the model's."""
    if run.max_context > config.max_context:
        raise ConfigError(f"max_context = {run.max_context}: the model's is {config.max_context}")


def check_fit(run: ServeRun, config: ModelConfig, tokenizer: Tokenizer) -> None:
    """Raise `ConfigError` where the recipe, the model and the tokenizer do not fit together."""
    check_context(run, config)
    if run.max_top_logprobs > config.vocab_size:
        raise ConfigError(f"max_top_logprobs = {run.max_top_logprobs}: the vocabulary has {config.vocab_size}")
    if tokenizer.vocab_size != config.vocab_size:
        raise ConfigError(f"the tokenizer has {tokenizer.vocab_size} ids, but the model {config.vocab_size}")
    if config.vision is None:
        return
    if (pad := tokenizer.special_id(MEDIA_PAD)) != config.media_id:
        raise ConfigError(f"the tokenizer's {MEDIA_PAD} is {pad}, but the model's media_id {config.media_id}")
    if config.vision.patch != PATCH:
        raise ConfigError(f"the model's patches have {config.vision.patch} pixels a side: images are cut into {PATCH}")
