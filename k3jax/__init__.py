"""k3jax: Kimi K3 in JAX and Flax. The public names, loaded on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from k3jax import reference
    from k3jax.checkpoint.hf_export import hf_tensors
    from k3jax.checkpoint.load import load
    from k3jax.config import ConfigError, ModelConfig
    from k3jax.nn.loss import next_token_loss
    from k3jax.nn.param import value_and_grad
    from k3jax.nn.transformer import Transformer

__version__ = "0.1.0"  # read by pyproject.toml

_HOME = {
    "ConfigError": "k3jax.config",
    "ModelConfig": "k3jax.config",
    "Transformer": "k3jax.nn.transformer",
    "hf_tensors": "k3jax.checkpoint.hf_export",
    "load": "k3jax.checkpoint.load",
    "next_token_loss": "k3jax.nn.loss",
    "value_and_grad": "k3jax.nn.param",
}

__all__ = [
    "ConfigError",
    "ModelConfig",
    "Transformer",
    "hf_tensors",
    "load",
    "next_token_loss",
    "reference",
    "value_and_grad",
]


def __getattr__(name: str) -> Any:
    if name == "reference":
        return importlib.import_module("k3jax.reference")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'k3jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
