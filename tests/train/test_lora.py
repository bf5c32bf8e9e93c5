"""Adapters: they alone are trained, change nothing at first, and can be merged or kept apart."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.checkpoint.orbax_io import named_leaves
from k3jax.config import DataConfig, LoraConfig, TrainRun, load_model_config
from k3jax.data import Batch
from k3jax.nn.param import split_model
from k3jax.nn.transformer import Transformer
from k3jax.train.lora import load_adapters, make_adapters, merged, save_adapters
from k3jax.train.optimizer import make_optimizer
from k3jax.train.step import init_state, make_eval_step, make_train_step, model_of

SIZES = ["width=32", "dense_width=48", "num_layers=3", "mla_layers=[2]", "attn_res_block=2", "moe.num_experts=4"]
MODEL = load_model_config("k3_tiny", SIZES)
LORA = LoraConfig(rank=2, alpha=8.0)
RUN = TrainRun(
    model=MODEL, data=DataConfig(batch_size=2, seq_len=16), loss_chunk=32, stack="loop", remat="none", lora=LORA
)
ADAPTED = {"q", "k", "v", "out", "out_gate", "decay_up", "decay_down", "q_up", "k_up", "v_up", "q_down", "kv_down"}
ADAPTED |= {"down", "up", "gate"}  # of dense and shared feed-forward, and of the experts' latent space


@pytest.fixture(scope="module")
def model():
    return jax.jit(lambda: Transformer(MODEL, jax.random.key(0), stack="loop", remat="none"))()


@pytest.fixture(scope="module")
def batch():
    tokens = jax.random.randint(jax.random.key(1), (2, 17), 0, 256)
    ones = jnp.ones((2, 16), bool)
    return Batch(
        tokens=tokens[:, :-1], targets=tokens[:, 1:], segment_ids=jnp.zeros((2, 16), jnp.int32), loss_mask=ones
    )


@pytest.fixture(scope="module")
def adapters(model):
    return make_adapters(split_model(model)[0], LORA, jax.random.key(2))


@pytest.fixture(scope="module")
def trained(model, batch, adapters):
    """(state, losses) after a few steps."""
    config = dataclasses.replace(RUN.optimizer, learning_rate=2e-2, warmup_fraction=0.0)
    optimizer, rest = make_optimizer(config, adapters, steps=12), split_model(model)[2]
    state, losses = init_state(model, optimizer, adapters=adapters), []
    step = jax.jit(make_train_step(RUN, optimizer, rest))
    for _ in range(6):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


def test_attention_and_shared_weights_are_adapted_and_experts_are_not(model, adapters):
    names = {name.rsplit(".", 1)[-1] for name in adapters}
    assert names == ADAPTED
    assert not [name for name in adapters if ".ffn.w" in name or "router" in name or "embed" in name or "head" in name]
    adapter = adapters["stacks.mla_moe.mixer.q_up"]
    lead, rank_in, heads, width = named_leaves(model)["stacks.mla_moe.mixer.q_up"].shape
    assert adapter.a.get_value().shape == (lead, rank_in, 2)
    assert adapter.b.get_value().shape == (lead, 2, heads * width)
    assert adapter.scale == 4.0


def test_new_adapters_change_nothing(model, adapters):
    params = split_model(model)[0]
    for name, leaf in named_leaves(merged(params, adapters)).items():
        np.testing.assert_array_equal(leaf, named_leaves(params)[name])


def test_only_the_adapters_learn(model, trained):
    state, losses = trained
    assert losses[-1] < losses[0] - 0.05, losses
    for name, leaf in named_leaves(state.frozen).items():
        np.testing.assert_array_equal(leaf, named_leaves(model)[name])
    assert all(np.any(adapter.b.get_value()) for adapter in state.params.values())


def test_the_merged_model_is_what_was_trained(model, batch, trained):
    state, rest = trained[0], split_model(model)[2]
    weights = named_leaves(model_of(state, rest))
    adapter, name = state.params["stacks.kda_moe.mixer.out"], "stacks.kda_moe.mixer.out"
    product = np.asarray(adapter.a.get_value(), np.float64) @ np.asarray(adapter.b.get_value(), np.float64)
    expected = named_leaves(model)[name] + 4.0 * product.reshape(weights[name].shape)
    np.testing.assert_allclose(weights[name], expected, rtol=1e-5, atol=1e-6)
    nats, tokens = jax.jit(make_eval_step(RUN, rest))(state, batch)
    logits = model_of(state, rest)(batch.tokens)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch.targets[..., None], axis=-1)
    assert float(nats / tokens) == pytest.approx(-float(jnp.mean(picked)), rel=1e-5)


def test_adapters_apart_come_back_from_their_file(trained, tmp_path):
    adapters = trained[0].params
    save_adapters(tmp_path / "adapters.safetensors", adapters)
    loaded = load_adapters(tmp_path / "adapters.safetensors")
    assert loaded.keys() == adapters.keys()
    for name, adapter in adapters.items():
        assert loaded[name].scale == adapter.scale
        np.testing.assert_array_equal(loaded[name].a.get_value(), adapter.a.get_value())
        np.testing.assert_array_equal(loaded[name].b.get_value(), adapter.b.get_value())
