"""A scanned program has a few layer bodies however many layers the model has."""

import jax
import jax.numpy as jnp
import pytest

from k3jax.config import ModelConfig
from k3jax.nn.transformer import Transformer


def lowered_lines(config: ModelConfig, stack: str) -> int:
    """Lines of StableHLO of the forward pass; weights are shapes, so nothing is allocated."""
    model = jax.eval_shape(lambda key: Transformer(config, key, stack=stack), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((1, 128), jnp.int32)
    return jax.jit(lambda model, tokens: model(tokens)).lower(model, tokens).as_text().count("\n")


@pytest.fixture(scope="module")
def k3_scanned() -> int:
    return lowered_lines(ModelConfig(), "scan")


def test_k3_scanned_is_a_small_part_of_k3_looped(k3_scanned: int):
    assert k3_scanned < 0.1 * lowered_lines(ModelConfig(), "loop")


def test_more_layers_make_no_longer_program(k3_scanned: int):
    deeper = ModelConfig(num_layers=189, mla_layers=(*range(3, 188, 4), 188))
    assert lowered_lines(deeper, "scan") < 1.02 * k3_scanned
