"""Quantisation-aware training sees what serving computes, and trains unrounded masters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from k3jax.config import DataConfig, TrainRun, load_model_config
from k3jax.data import Batch
from k3jax.nn.loss import batch_loss
from k3jax.nn.param import is_variable, split_model
from k3jax.nn.transformer import Transformer
from k3jax.quant.qat import EXPERT_WEIGHTS, fake_quantize, fake_quantize_experts, quantize_experts
from k3jax.train.optimizer import make_optimizer
from k3jax.train.step import accumulated_gradient, init_state, make_eval_step, make_train_step
from pallas_kernels.mx import MXFP4Array, dequantize, quantize

SIZES = ["width=32", "dense_width=48", "num_layers=2", "mla_layers=[1]", "attn_res_block=2", "moe.num_experts=4"]
MODEL = load_model_config("k3_tiny", [*SIZES, "moe.activations=mxfp8"])
RUN = TrainRun(model=MODEL, data=DataConfig(batch_size=2, seq_len=16), qat=True, loss_chunk=32, stack="loop")


@pytest.fixture(scope="module")
def model():
    return jax.jit(lambda: Transformer(MODEL, jax.random.key(0), stack="loop", remat="none"))()


@pytest.fixture(scope="module")
def batch():
    tokens = jax.random.randint(jax.random.key(1), (2, 17), 0, 256)
    ones = jnp.ones((2, 16), bool)
    return Batch(tokens=tokens[:, :-1], targets=tokens[:, 1:], segment_ids=jnp.zeros((2, 16), int), loss_mask=ones)


def leaves(model):
    return [leaf for leaf in jax.tree.leaves(model, is_leaf=is_variable) if leaf.get_value() is not None]


def test_rounding_is_that_of_the_exported_bytes_along_the_input_axis():
    weight = jax.random.normal(jax.random.key(0), (3, 64, 48), jnp.float32)
    exported = jax.jit(quantize)(weight.swapaxes(-1, -2))
    assert exported.shape == (3, 48, 64)
    np.testing.assert_array_equal(jax.jit(fake_quantize)(weight), jax.jit(dequantize)(exported).swapaxes(-1, -2))
    assert fake_quantize(weight.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_only_routed_experts_are_rounded(model):
    for before, after in zip(leaves(model), leaves(jax.jit(fake_quantize_experts)(model)), strict=True):
        same = np.array_equal(before.get_value(), after.get_value())
        assert same != (before.axes in EXPERT_WEIGHTS)
    packed = [leaf for leaf in leaves(jax.jit(quantize_experts)(model)) if isinstance(leaf.get_value(), MXFP4Array)]
    assert len(packed) == 3  # w1, w3, w2 of the one layer with experts


def test_the_forward_pass_equals_the_exported_model(model, batch):
    params, _, rest = split_model(model)
    optimizer = make_optimizer(RUN.optimizer, params, steps=10)
    nats, _ = jax.jit(make_eval_step(RUN, rest))(init_state(model, optimizer), batch)
    served, _ = jax.jit(
        lambda m: batch_loss(m, batch.tokens, batch.targets, batch.segment_ids, batch.loss_mask, chunk=32)
    )(jax.jit(quantize_experts)(model))
    assert float(nats) == pytest.approx(float(served), rel=1e-6)
    plain, _ = jax.jit(make_eval_step(dataclasses.replace(RUN, qat=False), rest))(init_state(model, optimizer), batch)
    assert float(plain) != pytest.approx(float(served), rel=1e-6)


def test_gradients_at_the_rounded_weights_update_the_masters(model, batch):
    params, _, rest = split_model(model)
    optimizer = make_optimizer(RUN.optimizer, params, steps=10)
    before = init_state(model, optimizer)
    after, metrics = jax.jit(make_train_step(RUN, optimizer, rest))(before, batch)
    seen, grads = jax.jit(lambda state: accumulated_gradient(state, batch, RUN, rest))(before)
    nats, tokens = seen.sums["nats"], seen.sums["tokens"]
    assert float(metrics["loss"]) == pytest.approx(float(nats / tokens), rel=1e-6)
    assert float(metrics["grad_norm"]) == pytest.approx(float(optax.tree.norm(grads) / tokens), rel=1e-4)
    for old, new in zip(leaves(before.params), leaves(after.params), strict=True):
        if old.axes in EXPERT_WEIGHTS:  # a small step away from the unrounded weights, not from the rounded ones
            moved = jnp.abs(new.get_value() - old.get_value())
            rounding = jnp.abs(fake_quantize(old.get_value()) - old.get_value())
            assert 0 < float(moved.mean()) < 0.5 * float(rounding.mean())
