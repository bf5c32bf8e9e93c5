"""A small K3 whose widths all differ, and checkpoints of it written without the code under test."""

import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save_file

from k3jax.checkpoint.importer import import_checkpoint
from k3jax.checkpoint.names import PREFIX, tensor_specs
from k3jax.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig
from tests.checkpoint.samples import VISION

Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="session")
def small() -> ModelConfig:
    """Five layers: KDA dense, KDA, MLA, KDA, MLA; three MXFP4 experts."""
    return ModelConfig(
        name="small",
        vocab_size=40,
        width=28,
        num_layers=5,
        dense_width=36,
        mla_layers=(2, 4),
        attn_res_block=2,
        kda=KDAConfig(num_heads=3, head_dim=8, a_log_length=8),
        mla=MLAConfig(num_heads=2, q_rank=12, kv_rank=10, nope_dim=6, extra_dim=4, v_dim=5),
        moe=MoEConfig(num_experts=3, top_k=2, num_shared=1, expert_width=64, latent_width=32),
    )


def random_tensors(
    config: ModelConfig, *, weight_dtype: str = "bfloat16", prefix: str = PREFIX, seed: int = 0
) -> Tensors:
    """Random tensors of a whole checkpoint; scale bytes near 127, A_log with its zero tail."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for spec in tensor_specs(config, weight_dtype=weight_dtype):
        if spec.dtype == "uint8":
            low, high = (120, 131) if spec.name.endswith("scale") else (0, 256)
            value = rng.integers(low, high, spec.shape, np.uint8)
        else:
            dtype = ml_dtypes.bfloat16 if spec.dtype == "bfloat16" else np.dtype(spec.dtype)
            value = rng.standard_normal(spec.shape).astype(dtype)
        if spec.name.endswith("A_log"):
            value[config.kda.num_heads :] = 0
        tensors[prefix + spec.name] = value
    return tensors


def write(directory: Path, config: ModelConfig, tensors: Tensors, *, shards: int = 2) -> Path:
    """A checkpoint directory: config.json, and `shards` files with an index, or a lone file for `shards=0`."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config.to_hf()))
    names = sorted(tensors)
    files = [f"model-{i + 1:05d}-of-{shards:06d}.safetensors" for i in range(shards)] or ["model.safetensors"]
    weight_map = {}
    for i, file in enumerate(files):
        part = names[i :: len(files)]
        save_file({name: tensors[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    if shards:
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


@pytest.fixture
def tensors(small: ModelConfig) -> Tensors:
    """The tensors of one checkpoint of `small`."""
    return random_tensors(small)


@pytest.fixture
def make(tmp_path: Path, small: ModelConfig) -> Callable[..., Path]:
    """make(tensors, config=small, shards=2) writes a checkpoint and returns its directory."""

    def make_checkpoint(
        tensors: Tensors, config: ModelConfig = small, *, shards: int = 2, name: str = "checkpoint"
    ) -> Path:
        return write(tmp_path / name, config, tensors, shards=shards)

    return make_checkpoint


@pytest.fixture
def randomise() -> Callable[..., Tensors]:
    """`random_tensors`, for tests that need other tensors than `tensors`."""
    return random_tensors


@pytest.fixture
def imported(tensors, make, tmp_path) -> Path:
    """An import of the small checkpoint, with a few vision tensors."""
    import_checkpoint(make(tensors | VISION), tmp_path / "orbax", workers=2, console=Console(quiet=True))
    return tmp_path / "orbax"
