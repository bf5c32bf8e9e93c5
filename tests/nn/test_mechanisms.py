"""One property of each K3 mechanism that a plausible mistake would break."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config import ModelConfig
from k3jax.nn import mla
from k3jax.nn.attn_res import Mix, Residual
from k3jax.nn.cache import Cache
from k3jax.nn.loss import batch_loss, next_token_loss
from k3jax.nn.mla import MLA
from k3jax.nn.moe import LatentMoE, Router
from k3jax.nn.param import Param
from k3jax.nn.transformer import Output, Transformer
from tests.nn.helpers import random_model, random_tokens, relative


def test_a_correction_bias_changes_the_choice_and_never_the_weights(small: ModelConfig) -> None:
    router = Router(small, jax.random.key(0), dtype=jnp.float32)
    x = jax.random.normal(jax.random.key(1), (1, 9, small.width))
    plain = router(x).experts
    router.bias = router.bias.replace(jnp.array([0.0, 0.0, 10.0, 0.0]))
    choice = router(x)
    experts, weights = choice.experts, choice.weights
    assert (experts == 2).any(axis=-1).all()
    assert not (plain == 2).any(axis=-1).all()
    scores = jax.nn.sigmoid(x @ router.weight.get_value())
    chosen = jnp.take_along_axis(scores, experts, axis=-1)
    np.testing.assert_allclose(weights, chosen / chosen.sum(-1, keepdims=True), rtol=1e-6)


def test_close_scores_are_told_apart_in_bfloat16(small: ModelConfig) -> None:
    config = dataclasses.replace(small, dtype="bfloat16")
    router = Router(config, jax.random.key(0), dtype=jnp.bfloat16)
    column = jnp.ones((small.width, 1), jnp.bfloat16)
    router.weight = router.weight.replace(jnp.tile(column, 4))
    router.bias = router.bias.replace(jnp.array([0.0, 3e-6, 1e-6, 2e-6]))  # far below a bfloat16 step at 0.9
    experts = router(jnp.full((1, 1, small.width), 0.1, jnp.bfloat16)).experts
    assert sorted(experts[0, 0].tolist()) == [1, 3]


def test_invalid_tokens_do_not_touch_what_the_others_get(small: ModelConfig) -> None:
    moe = LatentMoE(small, jax.random.key(0), dtype=jnp.float32)
    x = jax.random.normal(jax.random.key(1), (1, 11, small.width))
    expected, _ = moe(x)
    valid = jnp.arange(11)[None] < 7
    out, _ = moe(jnp.where(valid[..., None], x, jnp.nan), valid=valid)
    np.testing.assert_allclose(out[:, :7], expected[:, :7], rtol=1e-5, atol=1e-6)


def test_a_mix_reads_the_same_before_and_after_a_seal(small: ModelConfig) -> None:
    mix = Mix(small.width, eps=1e-5, dtype=jnp.float32)
    mix.query = mix.query.replace(jax.random.normal(jax.random.key(0), (small.width,)))
    x, y = jax.random.normal(jax.random.key(1), (2, 1, 3, small.width))
    residual = dataclasses.replace(Residual.start(x, 3).seal(), live=y, has_live=True)
    np.testing.assert_allclose(mix.of(residual), mix.of(residual.seal()), rtol=1e-5, atol=1e-6)


def test_a_mix_normalises_keys_and_not_values(small: ModelConfig) -> None:
    mix = Mix(small.width, eps=1e-5, dtype=jnp.float32)
    x, y = jax.random.normal(jax.random.key(1), (2, 1, 3, small.width))
    residual = dataclasses.replace(Residual.start(x, 2).seal(), live=1000.0 * y, has_live=True)
    np.testing.assert_allclose(mix.of(residual), (x + 1000.0 * y) / 2, rtol=1e-5, atol=1e-4)  # a zero query: the mean


def test_mla_decodes_in_the_latent_as_it_trains(small: ModelConfig) -> None:
    mla = MLA(small, jax.random.key(0), dtype=jnp.float32)
    x = jax.random.normal(jax.random.key(1), (2, 9, small.width))
    expected, _, _ = mla(x)
    view, outputs = Cache.zeros(small, batch=2, max_len=9).read(True, 0), []
    for t in range(9):
        y, view, _ = mla(x[:, t : t + 1], cache=dataclasses.replace(view, length=jnp.full(2, t)))
        outputs.append(y)
    assert relative(jnp.concatenate(outputs, axis=1), expected) < 1e-5
    _, chunk, _ = mla(x, cache=Cache.zeros(small, batch=2, max_len=9).read(True, 0))
    np.testing.assert_allclose(view.pages.latent, chunk.pages.latent, rtol=1e-5, atol=1e-6)


class Head:
    """What the loss needs of a model: hidden states, here a table of them, and a head."""

    def __init__(self, config: ModelConfig):
        self.table, weight = jax.random.normal(jax.random.key(0), (2, config.vocab_size, config.width))
        self.lm_head = Param(weight.T, axes=("embed", "vocab"))

    def hidden(self, tokens: jax.Array, **_: Any) -> Output:
        return Output(self.table[tokens], None, None, None)

    def logits(self, hidden: jax.Array) -> jax.Array:
        return hidden @ self.lm_head.get_value()


@pytest.mark.parametrize("chunk", [1, 7, 16, 100])
def test_loss_does_not_depend_on_the_vocabulary_chunk(small: ModelConfig, chunk: int) -> None:
    head, tokens = Head(small), random_tokens(small, 2, 12)
    log_probs = jax.nn.log_softmax(head.logits(head.table[tokens[:, :-1]]))
    expected = -jnp.mean(jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1))
    np.testing.assert_allclose(next_token_loss(head, tokens, chunk=chunk), expected, rtol=1e-5)


def test_loss_counts_only_masked_in_tokens(small: ModelConfig) -> None:
    head, tokens = Head(small), random_tokens(small, 1, 12)
    mask = jnp.arange(11)[None] < 4
    total, count = batch_loss(head, tokens[:, :-1], tokens[:, 1:], None, mask, chunk=8)
    assert float(count) == 4
    np.testing.assert_allclose(total / count, next_token_loss(head, tokens[:, :5]), rtol=1e-5)


def test_the_published_initialisation(small: ModelConfig) -> None:
    kda = jax.jit(lambda key: Transformer(small, key))(jax.random.key(0)).stacks["kda_moe"]
    assert not kda.mixer_mix.query.get_value().any()
    assert not kda.mixer.a_log.get_value().any()
    dt = jax.nn.softplus(kda.mixer.dt_bias.get_value())
    assert 1e-3 * 0.99 < dt.min() < dt.max() < 0.1 * 1.01


def test_bfloat16_keeps_its_float32_islands(small: ModelConfig) -> None:
    config = dataclasses.replace(small, dtype="bfloat16")
    model = jax.jit(lambda key: Transformer(config, key, param_dtype="bfloat16"))(jax.random.key(0))
    kda = model.stacks["kda_moe"].mixer
    for weight in (kda.q_conv, kda.a_log, kda.dt_bias, kda.out_norm, model.stacks["kda_moe"].ffn.router.bias):
        assert weight.dtype == jnp.float32
    assert kda.q.dtype == jnp.bfloat16
    assert model(random_tokens(small, 1, 5)).dtype == jnp.float32


def test_training_keeps_the_output_of_attention_in_float32(small: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded to bfloat16 it would bias the gradient of the scores."""
    config, kept, attention = dataclasses.replace(small, dtype="bfloat16"), [], mla.attention

    def recorded(*operands: Any, **options: Any) -> Any:
        out = attention(*operands, **options)
        kept.append((operands[0].dtype, out.output.dtype))
        return out

    monkeypatch.setattr(mla, "attention", recorded)
    jax.eval_shape(lambda: Transformer(config, jax.random.key(0))(jnp.zeros((1, 5), jnp.int32)))
    assert set(kept) == {(jnp.dtype("bfloat16"), jnp.dtype("float32"))}


def test_generation_refuses_what_does_not_fit(small: ModelConfig) -> None:
    model = random_model(small)
    with pytest.raises(ValueError, match=r"1000.*max_context is 512"):
        model.generate(random_tokens(small, 1, 10), max_new_tokens=990)
    with pytest.raises(ValueError, match="key"):
        model.generate(random_tokens(small, 1, 4), max_new_tokens=2, temperature=1.0)
    assert model.generate(random_tokens(small, 2, 4), max_new_tokens=0).shape == (2, 0)


def test_sampling_follows_its_key(small: ModelConfig) -> None:
    model, tokens = random_model(small), random_tokens(small, 2, 4)
    one, again, other = (
        model.generate(tokens, max_new_tokens=6, temperature=1.0, key=jax.random.key(seed)) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(one, again)
    assert (one != other).any()
