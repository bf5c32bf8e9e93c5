"""Scan, loop and reference are one function, in values and gradients, whatever the numbers of layers."""

import jax
import numpy as np
import pytest

import k3jax
from k3jax.config import ModelConfig
from tests.nn.conftest import make_config
from tests.nn.helpers import random_model, random_tokens, relative

SCAN, LOOP = ("scan", "layer"), ("loop", "none")
CASES = {  # the numbers of layers change what is scanned; the loop is the same code for all, and stands in for the last
    "ends in KDA": (make_config(num_layers=4, mla_layers=(1,), attn_res_block=3), (SCAN,)),
    "MLA first, two dense": (
        make_config(num_layers=6, mla_layers=(0, 3), attn_res_block=4, num_dense_layers=2),
        (SCAN, LOOP),
    ),
    "dense beyond a block": (
        make_config(num_layers=3, mla_layers=(2,), attn_res_block=1, num_dense_layers=2),
        (SCAN,),
    ),
}


@pytest.mark.parametrize(("config", "forms"), CASES.values(), ids=CASES.keys())
def test_scan_loop_and_reference_agree(config: ModelConfig, forms: tuple[tuple[str, str], ...]) -> None:
    model, tokens = random_model(config, stack="scan"), random_tokens(config, 1, 37)
    tensors = k3jax.hf_tensors(model)
    reference = jax.jit(jax.value_and_grad(lambda t: k3jax.reference.loss(config, t, tokens)))
    expected_loss, expected = reference(tensors)
    for stack, remat in forms:
        model.stack, model.remat = stack, remat
        loss, grads = jax.jit(k3jax.value_and_grad(k3jax.next_token_loss))(model, tokens)
        assert abs(float(loss) - float(expected_loss)) < 2e-5
        for name, gradient in k3jax.hf_tensors(grads).items():
            norm = np.linalg.norm(expected[name])
            error = np.linalg.norm(np.asarray(gradient, np.float64) - expected[name])
            assert error <= 1e-3 * norm + 1e-7, f"{stack} {name}: {error} of {norm}"


def test_scan_and_loop_are_the_same_tree(small: ModelConfig) -> None:
    scan, loop = random_model(small, stack="scan"), random_model(small, stack="loop")
    tokens = random_tokens(small, 2, 20)
    for a, b in zip(jax.tree.leaves(scan), jax.tree.leaves(loop), strict=True):
        np.testing.assert_array_equal(a, b)
    assert relative(scan(tokens), loop(tokens)) < 1e-5


def test_a_gradient_exists_for_weights_and_only_for_weights(small: ModelConfig) -> None:
    _, grads = jax.jit(k3jax.value_and_grad(k3jax.next_token_loss))(random_model(small), random_tokens(small, 1, 9))
    assert grads.stacks["kda_moe"].ffn.router.bias.get_value() is None
    assert grads.stacks["kda_moe"].ffn.router.weight.get_value() is not None
