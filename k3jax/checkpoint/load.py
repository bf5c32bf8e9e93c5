"""A model from a checkpoint directory, in the released layout or from Orbax."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.checkpoint import orbax_io
from k3jax.checkpoint.source import LeafReader, open_source
from k3jax.config import ModelConfig
from k3jax.nn.moe import LatentMoE
from k3jax.nn.transformer import Transformer
from pallas_kernels.mx import BLOCK, MXFP4Array


def load(
    path: str | os.PathLike[str],
    dtype: str | None = None,
    stack: str = "scan",
    *,
    shardings: Any = None,
    param_dtype: str | None = None,
) -> Transformer:
    """Load the model at `path`: a directory with config.json and safetensors, or an Orbax run, its checkpoints, a step.

    Weights keep the file's dtype (MXFP4 experts their bytes) unless `param_dtype` names one for all float weights;
    `dtype` sets the compute dtype ("bfloat16", "float32") where it should not be the checkpoint's own. `shardings` is a
    model-shaped tree of `jax.sharding.Sharding`s: each process then reads only what its devices hold. Raises
    `CheckpointError` or `ConfigError` with one line.
    """
    source = open_source(path)
    model = abstract_model(_computing_in(source.config, dtype), stack=stack)
    reader = LeafReader(source)
    placed = orbax_io.named_leaves(shardings) if shardings is not None else {}
    return orbax_io.with_leaves(
        model,
        {
            name: _read_leaf(reader, name, shape.shape, placed.get(name), param_dtype)
            for name, shape in orbax_io.named_leaves(model).items()
        },
    )


def _read_leaf(
    reader: LeafReader, name: str, shape: tuple[int, ...], sharding: jax.sharding.Sharding | None, dtype: str | None
) -> jax.Array:
    def part(index: Any) -> np.ndarray:
        value = reader.read(name, shape, index)
        return value.astype(dtype) if dtype and value.dtype != np.uint8 else value

    if sharding is None:
        return jnp.asarray(part((slice(None),) * len(shape)))
    return jax.make_array_from_callback(shape, sharding, part)


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
