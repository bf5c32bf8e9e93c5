"""Typed configuration: the model, a training run, a serving run, and how YAML files and `key=value` become them.

Recipes are sparse YAML over the dataclasses below (OmegaConf structured configs). An unknown key or a value of the
wrong type is a `ConfigError` of one line that names the key, the place and the nearest valid name. The mapping from and
to a released `config.json` is `k3jax.hf_config`.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import omegaconf
import yaml
from omegaconf import OmegaConf

CONFIG_DIR = Path(__file__).resolve().parent.parent / "configs"
COMPUTE_DTYPES = ("bfloat16", "float32", "float64")


class ConfigError(ValueError):
    """A mistake in a config file, an override or a checkpoint's config.json; the message is one complete line."""


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
    vision_json: str = ""  # the released `vision_config`, verbatim JSON; empty for a text-only model
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
        _require(self.num_layers >= 1, f"num_layers = {self.num_layers}: must be at least 1")
        for key in _SIZES:
            _require(_at(self, key) >= 1, f"{key} = {_at(self, key)}: must be at least 1")
        _require(self.init_std >= 0, f"init_std = {self.init_std}: must not be negative")
        bad = [layer for layer in self.mla_layers if not 0 <= layer < self.num_layers]
        _require(not bad, f"mla_layers names layer {bad[:1]}, but num_layers = {self.num_layers}")
        _require(len(set(self.mla_layers)) == len(self.mla_layers), "mla_layers names a layer twice")
        _require(self.attn_res_block >= 1, f"attn_res_block = {self.attn_res_block}: must be at least 1")
        _require(
            0 <= self.num_dense_layers <= self.num_layers,
            f"num_dense_layers = {self.num_dense_layers}: must lie in 0..num_layers = {self.num_layers}",
        )
        moe = self.moe
        _require(1 <= moe.top_k <= moe.num_experts, f"moe.top_k = {moe.top_k}: num_experts is {moe.num_experts}")
        _require(
            -10.0 <= self.kda.gate_lower_bound < 0.0, f"kda.gate_lower_bound = {self.kda.gate_lower_bound}: in [-10, 0)"
        )
        _require(
            self.kda.a_log_length >= self.kda.num_heads,
            f"kda.a_log_length = {self.kda.a_log_length}: at least kda.num_heads = {self.kda.num_heads}",
        )
        _require(self.dtype in COMPUTE_DTYPES, f"dtype = {self.dtype}: one of {', '.join(COMPUTE_DTYPES)}")
        known = ("bf16", "mxfp8")
        _require(moe.activations in known, f"moe.activations = {moe.activations}: one of {', '.join(known)}")
        if self.quantized_experts or moe.activations == "mxfp8":
            for key, size in (("latent_width", moe.latent_width), ("expert_width", moe.expert_width)):
                _require(size % 32 == 0, f"moe.{key} = {size}: MXFP4 and MXFP8 need a multiple of 32")
        return self

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

    source: str = "python_stdlib"  # "python_stdlib", or a folder, file or glob of text / .jsonl files
    text_key: str = "text"  # field of a .jsonl line that holds the text; a line with `messages` is a chat
    tokenizer: str = "bytes"  # "bytes", or a directory with tiktoken.model and tokenizer_config.json
    seq_len: int = 256
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
    schedule: str = "cosine"  # "cosine" or "linear", after the warm-up
    warmup_fraction: float = 0.01
    weight_decay: float = 0.1
    adam_learning_rate: float = 0.0  # peak for AdamW leaves; 0 takes learning_rate
    adam_b1: float = 0.9
    adam_b2: float = 0.95
    muon_momentum: float = 0.95
    muon_steps: int = 5  # Newton-Schulz iterations
    clip_norm: float = 1.0


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
    remat: str = "layer"  # "layer" recomputes each layer in the backward pass, "none" keeps everything
    loss_chunk: int = 512  # tokens whose logits exist at one time
    log_every: int = 10
    eval_every: int = 200
    checkpoint_every: int = 200
    keep_checkpoints: int = 2
    init_from: str = ""  # HF or Orbax directory whose weights start the run; empty: random weights


@dataclass(kw_only=True)
class ServeRun:
    """A batch-inference run: `serve.py --config FILE --checkpoint DIR --input IN --output OUT`."""

    slots: int = 8  # sequences decoded together
    max_context: int = 1024  # prompt and completion tokens of one sequence
    prefill_chunk: int = 128  # tokens of one prefill step
    default_max_tokens: int = 16  # where a completion names none; a chat gets the rest of the context
    max_top_logprobs: int = 5
    dtype: str = ""  # compute dtype; empty keeps the checkpoint's
    mesh: MeshShape = field(default_factory=MeshShape)


Run = TypeVar("Run", TrainRun, ServeRun, ModelConfig)


def load_model_config(name: str | os.PathLike[str], overrides: Sequence[str] = ()) -> ModelConfig:
    """Read `configs/models/NAME.yaml`, a YAML file, or a directory with a released config.json."""
    return _build(ModelConfig, _model_mapping(name), overrides, str(name)).validate()


def load_run(cls: type[Run], path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Run:
    """Build a `TrainRun` or `ServeRun` from a YAML recipe and `key=value` overrides; `ConfigError` on any mistake."""
    run = _build(cls, _read_yaml(Path(path)), overrides, str(path))
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
_LOWEST |= {"eval_every": 0, "data.eval_rows": 0, "data.workers": 0, "data.shuffle_seed": 0}


def _at(config: Any, key: str) -> Any:
    """The value at a dotted key."""
    for part in key.split("."):
        config = getattr(config, part)
    return config


def _validate_train(run: TrainRun) -> None:
    for key, value, valid in (
        ("stack", run.stack, ("scan", "loop")),
        ("remat", run.remat, ("layer", "none")),
        ("optimizer.schedule", run.optimizer.schedule, ("cosine", "linear")),
    ):
        _require(value in valid, f"{key} = {value}: one of {', '.join(valid)}")
    for key, low in _LOWEST.items():
        value = _at(run, key)
        _require(value >= low, f"{key} = {value}: must be at least {low}")
    for key in ("optimizer.learning_rate", "optimizer.clip_norm"):
        _require(0 < _at(run, key) < float("inf"), f"{key} = {_at(run, key)}: must be a number above 0")
    for key in ("optimizer.min_lr_ratio", "optimizer.warmup_fraction", "data.eval_fraction"):
        _require(0 <= _at(run, key) <= 1, f"{key} = {_at(run, key)}: must lie in [0, 1]")
    _require(0 <= run.seed < 2**63, f"seed = {run.seed}: must lie in [0, 2^63)")
    _require(
        run.data.batch_size % run.accumulate == 0,
        f"data.batch_size = {run.data.batch_size} is not a multiple of accumulate = {run.accumulate}",
    )


def _build(cls: type[Run], mapping: dict[str, Any], overrides: Sequence[str], place: str) -> Run:
    schema = OmegaConf.structured(cls)
    recipe = _resolve_model(mapping, place)
    merged = _merge(schema, OmegaConf.create(recipe), place)
    for override in overrides:
        _require("=" in override, f"override {override!r}: write key=value")
        key, _, text = override.partition("=")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"override {override!r}: the value is not valid YAML") from error
        node: Any = value
        for part in reversed(key.strip().split(".")):
            node = {part: node}
        merged = _merge(merged, OmegaConf.create(_resolve_model(node, "command line")), "command line")
    return OmegaConf.to_object(merged)  # type: ignore[return-value]


def _resolve_model(mapping: dict[str, Any], place: str) -> dict[str, Any]:
    """Replace `model: NAME` by that model's own mapping, so that `model.key=value` can refine it."""
    if isinstance(mapping.get("model"), str):
        return {**mapping, "model": _model_mapping(mapping["model"])}
    if isinstance(mapping.get("model"), dict) and "base" in mapping["model"]:
        rest = {key: value for key, value in mapping["model"].items() if key != "base"}
        base = OmegaConf.merge(_model_mapping(mapping["model"]["base"]), rest)
        return {**mapping, "model": OmegaConf.to_container(base)}
    return mapping


def _model_mapping(name: str | os.PathLike[str]) -> dict[str, Any]:
    path = Path(name)
    if path.is_dir():
        return dataclasses.asdict(ModelConfig.from_hf(path))
    if path.suffix in (".yaml", ".yml"):
        return _read_yaml(path)
    named = CONFIG_DIR / "models" / f"{name}.yaml"
    if not named.exists():
        known = sorted(p.stem for p in (CONFIG_DIR / "models").glob("*.yaml"))
        raise ConfigError(f"model = {name}: no such model{_nearest(str(name), known)}; known: {', '.join(known)}")
    return _read_yaml(named)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"config {path}: no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path}: cannot be read ({error})") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise ConfigError(f"config {path}{where}: not valid YAML") from error
    _require(content is None or isinstance(content, dict), f"config {path}: must be a mapping of keys to values")
    return content or {}


def _merge(base: Any, update: Any, place: str) -> Any:
    try:
        return OmegaConf.merge(base, update)
    except (omegaconf.errors.ConfigKeyError, omegaconf.errors.ConfigAttributeError) as error:
        full = str(error.full_key or error.key)
        parent, _, key = full.rpartition(".")
        node = OmegaConf.select(base, parent) if parent else base
        known = [str(k) for k in node] if OmegaConf.is_dict(node) else []
        raise ConfigError(f"{place}: unknown key {full}{_nearest(key, known)}") from error
    except omegaconf.errors.OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{place}: {error.full_key}: {reason}") from error


def _nearest(name: str, known: Sequence[str]) -> str:
    match = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {match[0]}?" if match else (f"; valid keys: {', '.join(known)}" if known else "")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
