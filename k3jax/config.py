"""Typed configuration: the model, a training run, a serving run, and how YAML files and `key=value` become them.

Recipes are sparse YAML over the dataclasses below (OmegaConf structured configs). An unknown key or a value of the
wrong type is a `ConfigError` of one line that names the key, the place and the nearest valid name. The mapping from and
to a released `config.json` is `k3jax.hf_config`.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf

from k3jax.recipe import ConfigError, merge, read_yaml, require

CONFIG_DIR = Path(__file__).resolve().parent.parent / "configs"
COMPUTE_DTYPES = ("bfloat16", "float32", "float64")


@dataclass(unsafe_hash=True, kw_only=True)
class KDAConfig:
    """Kimi Delta Attention: widths of one KDA mixer."""

    num_heads: int = 96
    head_dim: int = 128  # K and V
    conv_width: int = 4  # taps of the short convolution
    gate_lower_bound: float = -5.0  # log-decay lies in (gate_lower_bound, 0)
    a_log_length: int = 128  # entries of the stored A_log; those past num_heads are zero


@dataclass(unsafe_hash=True, kw_only=True)
class MLAConfig:
    """Gated multi-head latent attention without rotary positions."""

    num_heads: int = 96
    q_rank: int = 1536
    kv_rank: int = 512
    nope_dim: int = 128  # per-head query and key dims that come from the latent
    extra_dim: int = 64  # unrotated dims whose key is shared by all heads ("rope" dims of the released config)
    v_dim: int = 128
    latent_norm_eps: float = 1e-6  # of the two low-rank norms


@dataclass(unsafe_hash=True, kw_only=True)
class MoEConfig:
    """Stable LatentMoE: routed experts that work in a latent space, and one fused shared expert."""

    num_experts: int = 896
    top_k: int = 16
    num_shared: int = 2
    expert_width: int = 3072
    latent_width: int = 3584
    scaling_factor: float = 1.0
    activations: str = "bf16"  # what expert matmuls read: "bf16" (the compute dtype) or "mxfp8"

    @property
    def shared_width(self) -> int:
        """Inner width of the fused shared expert."""
        return self.num_shared * self.expert_width


@dataclass(unsafe_hash=True, kw_only=True)
class VisionConfig:
    """Vision tower (MoonViT-V2) and projector."""

    patch: int = 14  # pixels of a patch's side
    grid_rows: int = 64  # of the learned position grid
    grid_columns: int = 64
    max_frames: int = 4  # of one video item
    width: int = 1024
    mlp_width: int = 4096
    num_blocks: int = 27
    num_heads: int = 12
    head_dim: int = 128  # heads * head_dim is wider than the residual stream
    norm_eps: float = 2.0**-23  # of the tower's norms; the release names none, 2^-7 is the other reading of that
    projector_eps: float = 1e-5

    @property
    def merged_width(self) -> int:
        """Numbers that the projector reads for a token: 2 x 2 patches."""
        return 4 * self.width


@dataclass(unsafe_hash=True, kw_only=True)
class ModelConfig:
    """Everything that fixes the model's function. The defaults are the released Kimi K3."""

    name: str = "k3"
    vocab_size: int = 163840
    width: int = 7168
    num_layers: int = 93
    num_dense_layers: int = 1  # the first layers have a dense FFN, all others a LatentMoE
    dense_width: int = 33792
    mla_layers: tuple[int, ...] = (*range(3, 92, 4), 92)  # 0-based; every other layer is KDA
    attn_res_block: int = 12  # layers per Attention Residuals block
    norm_eps: float = 1e-5
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0
    init_std: float = 0.02
    max_context: int = 1048576
    bos_id: int = 163584
    eos_id: int = 163586
    pad_id: int = 163839
    media_id: int = 163605
    quantized_experts: bool = True  # the checkpoint holds routed experts in MXFP4
    dtype: str = "bfloat16"  # of the computation; float32 islands stay float32
    kda: KDAConfig = field(default_factory=KDAConfig)
    mla: MLAConfig = field(default_factory=MLAConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    vision: VisionConfig | None = None  # none in a text-only model
    vision_json: str = ""  # the released `vision_config` that was read, verbatim JSON
    extra_json: str = ""  # keys of the released config.json that do not change the text model, verbatim JSON

    def __post_init__(self) -> None:
        self.mla_layers = tuple(self.mla_layers)

    @property
    def num_snapshots(self) -> int:
        """Number of Attention Residuals snapshots when the last layer has run."""
        return -(-self.num_layers // self.attn_res_block)

    def is_mla(self, layer: int) -> bool:
        """Whether 0-based `layer` mixes tokens with MLA rather than KDA."""
        return layer in self.mla_layers

    def layer_kind(self, layer: int) -> str:
        """`"kda_dense"`, `"kda_moe"`, `"mla_dense"` or `"mla_moe"`."""
        ffn = "dense" if layer < self.num_dense_layers else "moe"
        return f"{'mla' if self.is_mla(layer) else 'kda'}_{ffn}"

    def validate(self) -> ModelConfig:
        """Return self; raise `ConfigError` where the numbers do not describe a K3-shaped model."""
        require(self.num_layers >= 1, f"num_layers = {self.num_layers}: must be at least 1")
        for key in _SIZES:
            require(_at(self, key) >= 1, f"{key} = {_at(self, key)}: must be at least 1")
        require(self.init_std >= 0, f"init_std = {self.init_std}: must not be negative")
        bad = [layer for layer in self.mla_layers if not 0 <= layer < self.num_layers]
        require(not bad, f"mla_layers names layer {bad[:1]}, but num_layers = {self.num_layers}")
        require(len(set(self.mla_layers)) == len(self.mla_layers), "mla_layers names a layer twice")
        require(self.attn_res_block >= 1, f"attn_res_block = {self.attn_res_block}: must be at least 1")
        require(
            0 <= self.num_dense_layers <= self.num_layers,
            f"num_dense_layers = {self.num_dense_layers}: must lie in 0..num_layers = {self.num_layers}",
        )
        moe = self.moe
        require(1 <= moe.top_k <= moe.num_experts, f"moe.top_k = {moe.top_k}: num_experts is {moe.num_experts}")
        require(
            -10.0 <= self.kda.gate_lower_bound < 0.0, f"kda.gate_lower_bound = {self.kda.gate_lower_bound}: in [-10, 0)"
        )
        require(
            self.kda.a_log_length >= self.kda.num_heads,
            f"kda.a_log_length = {self.kda.a_log_length}: at least kda.num_heads = {self.kda.num_heads}",
        )
        require(self.dtype in COMPUTE_DTYPES, f"dtype = {self.dtype}: one of {', '.join(COMPUTE_DTYPES)}")
        known = ("bf16", "mxfp8")
        require(moe.activations in known, f"moe.activations = {moe.activations}: one of {', '.join(known)}")
        if self.quantized_experts or moe.activations == "mxfp8":
            for key, size in (("latent_width", moe.latent_width), ("expert_width", moe.expert_width)):
                require(size % 32 == 0, f"moe.{key} = {size}: MXFP4 and MXFP8 need a multiple of 32")
        if self.vision is not None:
            self._validate_vision(self.vision)
        return self

    def _validate_vision(self, vision: VisionConfig) -> None:
        for key, size in dataclasses.asdict(vision).items():
            low = 1 if isinstance(size, int) else 0
            require(size >= low, f"vision.{key} = {size}: must be at least {low}")
        for key, size, multiple in (("head_dim", vision.head_dim, 4), ("width", vision.width, 2)):
            require(size % multiple == 0, f"vision.{key} = {size}: positions need a multiple of {multiple}")
        require(
            0 <= self.media_id < self.vocab_size,
            f"media_id = {self.media_id}: images need one below vocab_size = {self.vocab_size}",
        )

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | os.PathLike[str]) -> ModelConfig:
        """Read a released `config.json` (its path, its directory, or the parsed mapping)."""
        from k3jax.hf_config import model_config_from_hf

        return model_config_from_hf(source)

    def to_hf(self) -> dict[str, Any]:
        """Return the released `config.json`'s mapping for this model."""
        from k3jax.hf_config import model_config_to_hf

        return model_config_to_hf(self)


# Sizes of a model, all of them at least 1.
_SIZES: tuple[str, ...] = (
    "vocab_size",
    "width",
    "dense_width",
    "max_context",
    "kda.num_heads",
    "kda.head_dim",
    "kda.conv_width",
)
_SIZES += tuple(f"mla.{key}" for key in ("num_heads", "q_rank", "kv_rank", "nope_dim", "extra_dim", "v_dim"))
_SIZES += tuple(f"moe.{key}" for key in ("num_experts", "num_shared", "expert_width", "latent_width"))


@dataclass(kw_only=True)
class MeshShape:
    """Devices along each mesh axis; the product must be the number of devices."""

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    tensor: int = 1
    context: int = 1


@dataclass(kw_only=True)
class DataConfig:
    """What a run reads and how it becomes rows of tokens."""

    source: str = "python_stdlib"  # that, or a folder, file or glob of text, .jsonl, .parquet or .array_record files
    mixture: dict[str, float] = field(default_factory=dict)  # several sources with their shares of the documents
    text_key: str = "text"  # field or column that holds the text; a .jsonl line with `messages` is a chat
    tokenizer: str = "bytes"  # "bytes", or a directory with tiktoken.model and tokenizer_config.json
    seq_len: int = 256
    row_images: int = 0  # images that a row holds at most; 0 for texts alone
    row_patches: int = 0  # patches of all of them
    batch_size: int = 4  # rows of an optimizer step, over all hosts and micro-batches
    eval_fraction: float = 0.03  # of the files, by a hash of the file's path
    eval_rows: int = 64  # rows of one evaluation
    shuffle_seed: int = 0
    workers: int = 0  # threads that read ahead; 0 reads in the main thread


@dataclass(kw_only=True)
class OptimizerConfig:
    """Muon for matrices, AdamW for the rest, one learning-rate schedule."""

    learning_rate: float = 2e-3
    min_lr_ratio: float = 0.1  # final learning rate over the peak
    schedule: str = "cosine"  # after the warm-up: "cosine", "linear", or "wsd" (constant, then a line down)
    warmup_fraction: float = 0.01
    decay_fraction: float = 0.2  # of the steps, at the end of "wsd"
    weight_decay: float = 0.1
    adam_learning_rate: float = 0.0  # peak for AdamW leaves; 0 takes learning_rate
    adam_b1: float = 0.9
    adam_b2: float = 0.95
    muon_momentum: float = 0.95
    muon_steps: int = 5  # Newton-Schulz iterations
    clip_norm: float = 1.0
    qk_clip: float = 100.0  # largest attention score that a head of MLA may reach before QK-Clip shrinks its weights


@dataclass(kw_only=True)
class Stage:
    """A part of a run with its own length of context; it replaces the fields of these names."""

    until: float = 1.0  # share of the run's steps at its end
    seq_len: int = 256
    batch_size: int = 4
    accumulate: int = 1


@dataclass(kw_only=True)
class LoraConfig:
    """Low-rank adapters on attention and shared weights, trained in place of the model."""

    rank: int = 0  # 0: train the model itself
    alpha: float = 16.0  # an adapter's product is scaled by alpha / rank


@dataclass(kw_only=True)
class TrainRun:
    """A training run: `train.py --config FILE`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    mesh: MeshShape = field(default_factory=MeshShape)
    run_dir: str = "runs/train"
    seed: int = 0
    steps: int = 1000
    accumulate: int = 1  # micro-batches of an optimizer step
    stack: str = "scan"  # "scan" or "loop"
    qat: bool = False  # quantisation-aware: the forward pass rounds routed experts to MXFP4 and their inputs to MXFP8
    remat: str = "layer"  # what the backward pass recomputes: "layer" (all), "none", or kinds: "kda_moe,mla_moe"
    loss_chunk: int = 512  # tokens whose logits exist at one time
    stages: list[Stage] = field(default_factory=list)  # lengths of context one after the other; none: one stage
    router_warmup: int = 0  # passes over the first batch that only balance the routers, before the first step
    z_loss: float = 0.0  # weight of the mean squared log normaliser of the logits
    mtp_weight: float = 0.0  # of the loss of multi-token prediction; 0: no such layer
    lora: LoraConfig = field(default_factory=LoraConfig)
    log_every: int = 10
    eval_every: int = 200
    checkpoint_every: int = 200
    keep_checkpoints: int = 2  # the newest ones
    keep_every: int = 0  # and for good those of every so many steps; 0: none
    max_skipped: int = 5  # updates in a row left out because loss or gradient is not finite, before the run gives up
    hang_seconds: int = 600  # that a phase of the run may take before it is called a hang; 0: never
    profile_step: int = 0  # first step of an xprof trace in run_dir/xprof; 0: none
    profile_steps: int = 3
    init_from: str = ""  # HF or Orbax directory whose weights start the run; empty: random weights

    @property
    def stage_ends(self) -> list[int]:
        """The last step of each stage."""
        return [round(stage.until * self.steps) for stage in self.stages] or [self.steps]

    def in_stage(self, index: int) -> TrainRun:
        """The run as it is in one of its stages: a run of the same steps without stages."""
        if not self.stages:
            return self
        stage = self.stages[index]
        data = dataclasses.replace(self.data, seq_len=stage.seq_len, batch_size=stage.batch_size)
        return dataclasses.replace(self, data=data, accumulate=stage.accumulate, stages=[])


@dataclass(kw_only=True)
class ServeRun:
    """A batch-inference run: `serve.py --config FILE --checkpoint DIR --input IN --output OUT`."""

    slots: int = 8  # sequences decoded together
    max_context: int = 1024  # prompt and completion tokens of one sequence
    prefill_chunk: int = 128  # tokens of a prompt that one prefill step reads
    prefill_rows: int = 1  # prompts that one prefill step reads
    cache_tokens: int = 0  # of MLA cache, of all sequences and kept prompts together; 0: what all slots can fill
    score_prompts: bool = False  # answer `echo` with log-probabilities of the prompt's tokens
    latents: str = ""  # "fp8" keeps the MLA cache in float8_e4m3fn; empty: in the compute dtype
    snapshot_mib: int = 256  # for KDA states of prompts that have been read (the prefix cache); 0 keeps none
    snapshot_every: int = 4096  # tokens of a prompt between two of them; also at its end, and where prompts part
    default_max_tokens: int = 16  # where a completion names none; a chat gets the rest of the context
    max_top_logprobs: int = 5
    dtype: str = ""  # compute dtype; empty keeps the checkpoint's
    image_folder: str = ""  # chats may name image files below it; empty allows data URLs alone
    plan_model: str = "k3"  # model of configs/models that `k3jax.plan` plans for; serving takes the checkpoint's
    mesh: MeshShape = field(default_factory=MeshShape)


Run = TypeVar("Run", TrainRun, ServeRun, ModelConfig)


def load_model_config(name: str | os.PathLike[str], overrides: Sequence[str] = ()) -> ModelConfig:
    """Read `configs/models/NAME.yaml`, a YAML file, or a directory with a released config.json."""
    return _build(ModelConfig, _model_mapping(name), overrides, str(name)).validate()


def load_any_run(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> TrainRun | ServeRun:
    """A recipe of either kind, told apart by its keys."""
    serving = {field.name for field in dataclasses.fields(ServeRun)} - {"mesh"}
    if serving & read_yaml(Path(path)).keys():
        return load_run(ServeRun, path, overrides)
    return load_run(TrainRun, path, overrides)


def load_run(cls: type[Run], path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Run:
    """Build a `TrainRun` or `ServeRun` from a YAML recipe and `key=value` overrides; `ConfigError` on any mistake."""
    run = _build(cls, read_yaml(Path(path)), overrides, str(path))
    if isinstance(run, TrainRun):
        if run.qat:
            run.model.moe.activations = "mxfp8"
        run.model.validate()
        _validate_train(run)
    return run


def to_yaml(config: Any) -> str:
    """The resolved config as YAML, as saved with every run."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


# The smallest sensible value of each count in a training run.
_LOWEST = dict.fromkeys(("steps", "accumulate", "log_every", "checkpoint_every", "keep_checkpoints", "loss_chunk"), 1)
_LOWEST |= {"data.batch_size": 1, "data.seq_len": 1, "optimizer.muon_steps": 1}
_LOWEST |= {"keep_every": 0, "max_skipped": 0, "hang_seconds": 0, "profile_step": 0, "profile_steps": 1}
_LOWEST |= {"eval_every": 0, "data.eval_rows": 0, "data.workers": 0, "data.shuffle_seed": 0}
_LOWEST |= {"router_warmup": 0, "lora.rank": 0, "data.row_images": 0, "data.row_patches": 0}


def _at(config: Any, key: str) -> Any:
    """The value at a dotted key."""
    for part in key.split("."):
        config = getattr(config, part)
    return config


def _validate_train(run: TrainRun) -> None:
    for key, value, valid in (
        ("stack", run.stack, ("scan", "loop")),
        ("optimizer.schedule", run.optimizer.schedule, ("cosine", "linear", "wsd")),
    ):
        require(value in valid, f"{key} = {value}: one of {', '.join(valid)}")
    for key, low in _LOWEST.items():
        value = _at(run, key)
        require(low <= value, f"{key} = {value}: must be at least {low}")
        require(value < 2**31, f"{key} = {value}: must be below 2^31")
    kinds = sorted({run.model.layer_kind(layer) for layer in range(run.model.num_layers)})
    known = run.remat in ("layer", "none") or set(run.remat.split(",")) <= set(kinds)
    require(known, f"remat = {run.remat}: layer, none, or a list of this model's kinds of layers: {','.join(kinds)}")
    for key in ("optimizer.learning_rate", "optimizer.clip_norm", "optimizer.qk_clip"):
        require(0 < _at(run, key) < float("inf"), f"{key} = {_at(run, key)}: must be a number above 0")
    alone = not (run.lora.rank and run.mtp_weight)
    require(alone, f"mtp_weight = {run.mtp_weight}: adapters (lora.rank) do not train its layer; leave one at 0")
    for key in ("z_loss", "mtp_weight", "lora.alpha", "optimizer.weight_decay", "optimizer.adam_learning_rate"):
        require(0 <= _at(run, key) < float("inf"), f"{key} = {_at(run, key)}: must be 0 or a number above it")
    shares = ("min_lr_ratio", "warmup_fraction", "decay_fraction")
    for key in (*(f"optimizer.{name}" for name in shares), "data.eval_fraction"):
        require(0 <= _at(run, key) <= 1, f"{key} = {_at(run, key)}: must lie in [0, 1]")
    for key in ("adam_b1", "adam_b2", "muon_momentum"):
        value = _at(run.optimizer, key)
        require(0 <= value < 1, f"optimizer.{key} = {value}: must lie in [0, 1)")
    for source, weight in run.data.mixture.items():
        require(0 < weight < float("inf"), f"data.mixture: {source} has weight {weight}, it must be a number above 0")
    require(0 <= run.seed < 2**63, f"seed = {run.seed}: must lie in [0, 2^63)")
    images, patches = run.data.row_images, run.data.row_patches
    require(
        patches % 4 == 0 and 4 * images <= patches,
        f"data.row_patches = {patches}: a multiple of 4, and at least 4 for each of data.row_images = {images}",
    )
    require(not images or run.model.vision is not None, f"data.row_images = {images}: the model has no vision part")
    patch = run.model.vision.patch if run.model.vision else 14
    require(not images or patch == 14, f"model.vision.patch = {patch}: images are prepared in patches of 14")
    _validate_stages(run)
    require(
        run.data.batch_size % run.accumulate == 0,
        f"data.batch_size = {run.data.batch_size} is not a multiple of accumulate = {run.accumulate}",
    )


def _validate_stages(run: TrainRun) -> None:
    for index, stage in enumerate(run.stages):
        require(0 < stage.until <= 1, f"stages[{index}].until = {stage.until}: must lie in (0, 1]")
    ends = [0, *run.stage_ends]
    rising = all(a < b for a, b in itertools.pairwise(ends))
    require(
        rising and ends[-1] == run.steps,
        f"stages: they end after steps {ends[1:]}; each must end after the one before, the last at steps = {run.steps} "
        "(until: 1.0)",
    )
    for index, stage in enumerate(run.stages):
        for key in ("seq_len", "batch_size", "accumulate"):
            require(getattr(stage, key) >= 1, f"stages[{index}].{key} = {getattr(stage, key)}: must be at least 1")
        require(
            stage.batch_size % stage.accumulate == 0,
            f"stages[{index}].batch_size = {stage.batch_size} is not a multiple of accumulate = {stage.accumulate}",
        )


def _build(cls: type[Run], mapping: dict[str, Any], overrides: Sequence[str], place: str) -> Run:
    schema = OmegaConf.structured(cls)
    recipe = _resolve_model(mapping, place)
    merged = merge(schema, OmegaConf.create(recipe), place)
    for override in overrides:
        key, _, text = override.partition("=")
        require("=" in override and all(key.split(".")), f"override {override!r}: write key=value")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"override {override!r}: the value is not valid YAML") from error
        node: Any = value
        for part in reversed(key.strip().split(".")):
            node = {part: node}
        merged = merge(merged, OmegaConf.create(_resolve_model(node, "command line")), "command line")
    return OmegaConf.to_object(merged)  # type: ignore[return-value]


def _resolve_model(mapping: dict[str, Any], place: str) -> dict[str, Any]:
    """Replace `model: NAME` by that model's own mapping, so that `model.key=value` can refine it."""
    if isinstance(mapping.get("model"), str):
        return {**mapping, "model": _model_mapping(mapping["model"])}
    if isinstance(mapping.get("model"), dict) and "base" in mapping["model"]:
        rest = {key: value for key, value in mapping["model"].items() if key != "base"}
        base = OmegaConf.merge(_model_mapping(mapping["model"]["base"], "model.base"), rest)
        return {**mapping, "model": OmegaConf.to_container(base)}
    return mapping


def _model_mapping(name: str | os.PathLike[str], key: str = "model") -> dict[str, Any]:
    require(isinstance(name, str | os.PathLike), f"{key} = {name}: must be the name of a model, a file or a folder")
    path = Path(name)
    if path.is_dir():
        return dataclasses.asdict(ModelConfig.from_hf(path))
    if path.suffix in (".yaml", ".yml"):
        return read_yaml(path)
    named = CONFIG_DIR / "models" / f"{name}.yaml"
    if not named.exists():
        known = sorted(p.stem for p in (CONFIG_DIR / "models").glob("*.yaml"))
        near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{key} = {name}: no such model{hint} (known: {', '.join(known)}, or a file or folder)")
    return read_yaml(named)
