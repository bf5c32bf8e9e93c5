"""Random models and error measures for the tests of k3jax.nn."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.config import ModelConfig
from k3jax.nn.param import RouterBias, is_variable
from k3jax.nn.transformer import Transformer


def random_model(config: ModelConfig, *, seed: int = 0, **kwargs: Any) -> Transformer:
    """A model in which nothing is zero, one or alike: norms, queries, gates and router biases are perturbed too."""
    return jax.jit(lambda: _perturbed(Transformer(config, jax.random.key(seed), **kwargs), seed))()


def _perturbed(model: Transformer, seed: int) -> Transformer:
    variables, treedef = jax.tree.flatten(model, is_leaf=is_variable)
    keys = jax.random.split(jax.random.key(seed + 1), len(variables))

    def perturb(variable: Any, key: jax.Array) -> Any:
        value = variable.get_value()
        scale = 0.05 if isinstance(variable, RouterBias) else 0.2
        return variable.replace(value + scale * jax.random.normal(key, value.shape, value.dtype))

    return treedef.unflatten([perturb(v, k) for v, k in zip(variables, keys, strict=True)])


def random_tokens(config: ModelConfig, *shape: int, seed: int = 2) -> jax.Array:
    """Token ids below the vocabulary's size."""
    return jax.random.randint(jax.random.key(seed), shape, 0, config.vocab_size, jnp.int32)


def relative(actual: Any, expected: Any) -> float:
    """Norm of the difference over the norm of what is expected."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))
