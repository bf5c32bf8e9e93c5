"""A model from a checkpoint directory, in the released layout or from Orbax."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import jax
import jax.numpy as jnp

from k3jax.checkpoint import orbax_io
from k3jax.checkpoint.hf_import import HFCheckpoint
from k3jax.checkpoint.safetensors_dir import CheckpointError, SafetensorsDir
from k3jax.config import ModelConfig
from k3jax.nn.moe import LatentMoE
from k3jax.nn.transformer import Transformer
from pallas_kernels.mx import BLOCK, MXFP4Array


def load(path: str | os.PathLike[str], dtype: str | None = None, stack: str = "scan") -> Transformer:
    """Load the model at `path`: a directory with config.json and safetensors, or an Orbax run, its checkpoints, a step.

    Weights keep the file's dtype (MXFP4 experts their bytes); `dtype` sets the compute dtype ("bfloat16", "float32")
    where it should not be the checkpoint's own. Raises `CheckpointError` or `ConfigError` with one line.
    """
    path = Path(path)
    if SafetensorsDir.present(path):
        checkpoint = HFCheckpoint.open(path)
        model = abstract_model(_computing_in(checkpoint.config, dtype), stack=stack)
        return orbax_io.with_leaves(model, {name: jnp.asarray(leaf) for name, leaf in checkpoint.leaves()})
    step = find_step(path)
    try:
        model = abstract_model(_computing_in(orbax_io.read_model_config(step), dtype), stack=stack)
        return orbax_io.restore_tree(step, orbax_io.WEIGHTS, model, keep_dtype=True)
    except orbax_io.DamagedError as error:
        raise CheckpointError(str(error)) from error


def find_step(path: Path) -> Path:
    """The newest Orbax step of a run, its `checkpoints`, or a step; `CheckpointError` where there is none."""
    step = orbax_io.find_step(path)
    if step is None:
        what = "holds neither model.safetensors (with or without an index) nor Orbax checkpoints"
        raise CheckpointError(f"{path}: {what if path.is_dir() else 'no such directory'}")
    return step


def abstract_model(config: ModelConfig, *, stack: str = "scan") -> Transformer:
    """The model with shapes in place of arrays; MXFP4 expert leaves where `config.quantized_experts`."""
    model = jax.eval_shape(lambda key: Transformer(config, key, stack=stack), jax.random.key(0))
    if not config.quantized_experts:
        return model
    for layer in model.stacks.values():
        if isinstance(layer.ffn, LatentMoE):
            for name in ("w1", "w3", "w2"):
                weight = getattr(layer.ffn, name)
                setattr(layer.ffn, name, weight.replace(_mxfp4_shapes(weight.get_value())))
    return model


def _mxfp4_shapes(weight: jax.ShapeDtypeStruct) -> MXFP4Array:
    """The MXFP4 leaf for a float weight [..., in, out]: its logical shape is [..., out, in]."""
    *lead, in_, out = weight.shape
    codes, scales = (jax.ShapeDtypeStruct((*lead, out, in_ // n), jnp.uint8) for n in (2, BLOCK))
    return MXFP4Array(codes, scales)


def _computing_in(config: ModelConfig, dtype: str | None) -> ModelConfig:
    return (dataclasses.replace(config, dtype=dtype) if dtype else config).validate()
