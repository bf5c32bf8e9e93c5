"""The synthetic tasks are what they say, and the simpler layers are KDA without a part."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.recall import POP, PUSH, STACKS, TASKS, VOCABULARY, WORDS, NoDeltaKDA, ScalarGateKDA
from k3jax.config import load_model_config
from k3jax.nn.kda import KDA

CONFIG = load_model_config("k3_tiny", ["width=32", "kda.num_heads=2", "kda.head_dim=16"])


@pytest.mark.parametrize("task", list(TASKS))
@pytest.mark.parametrize("length", [32, 64])
def test_sequences_have_their_length_and_something_to_predict(task, length):
    tokens, asked = TASKS[task](np.random.default_rng(0), 3, length)
    assert tokens.shape == asked.shape == (3, length)
    assert tokens.min() >= 0 and tokens.max() < VOCABULARY
    assert asked.any(axis=1).all() and not asked[:, 0].any()


def test_a_palindrome_comes_back():
    tokens, asked = TASKS["palindrome"](np.random.default_rng(0), 2, 32)
    count = asked.sum(axis=1)[0]
    assert count == 15
    np.testing.assert_array_equal(tokens[:, :count], tokens[:, -count:][:, ::-1])


def test_every_question_has_an_answer_that_was_told():
    tokens, asked = TASKS["mqar"](np.random.default_rng(0), 2, 64)
    for row, mask in zip(tokens, asked, strict=True):
        told = dict(zip(row[:32:2], row[1:32:2], strict=True))
        assert len(told) == 16
        assert all(told[row[at - 1]] == row[at] for at in np.flatnonzero(mask))


def test_a_pop_gives_what_was_pushed_last():
    tokens, asked = TASKS["stack"](np.random.default_rng(0), 2, 256)
    for row, mask in zip(tokens, asked, strict=True):
        stacks = {number: [] for number in range(STACKS)}
        for operation, word, is_pop in zip(row[::2], row[1::2], mask[1::2], strict=True):
            assert word < WORDS
            if is_pop:
                assert operation >= POP and stacks[operation - POP].pop() == word
            else:
                assert PUSH <= operation < POP
                stacks[operation - PUSH].append(word)


def of_kind(kind, *, equal_gates):
    """A mixer of a kind with the weights of one KDA, whose channels may all ask for the same decay."""
    mixer = jax.jit(lambda: kind(CONFIG, jax.random.key(0), dtype=jnp.float32))()
    if equal_gates:
        up, bias = mixer.decay_up.get_value(), mixer.dt_bias.get_value()
        mixer.decay_up = mixer.decay_up.replace(jnp.broadcast_to(up[..., :1], up.shape))
        mixer.dt_bias = mixer.dt_bias.replace(jnp.broadcast_to(bias[:, :1], bias.shape))
    return mixer


def test_a_scalar_gate_is_kda_whose_channels_agree():
    x = jax.random.normal(jax.random.key(1), (2, 20, 32))
    run = jax.jit(lambda mixer: mixer(x)[0])
    kda, scalar = (run(of_kind(kind, equal_gates=True)) for kind in (KDA, ScalarGateKDA))
    np.testing.assert_allclose(scalar, kda, rtol=1e-4, atol=1e-5)
    kda, scalar = (run(of_kind(kind, equal_gates=False)) for kind in (KDA, ScalarGateKDA))
    assert np.abs(kda - scalar).max() > 1e-3


def test_without_the_delta_rule_values_only_add_up():
    """Against the recurrence S_t = decay S_(t-1) + beta k v^T, token by token."""
    mixer, steps = of_kind(NoDeltaKDA, equal_gates=False), 12
    random = np.random.default_rng(0)
    q, k, v, gate = (random.standard_normal((1, steps, 2, 16)).astype(np.float32) for _ in range(4))
    beta = random.random((1, steps, 2)).astype(np.float32)
    mixer._heads = lambda _: [q, k, v]  # past the convolution
    qkv = jnp.zeros((1, steps, 96))
    taps = jnp.zeros((96, 4))
    out, _, _ = mixer._sequence(qkv, taps, jnp.asarray(gate), jnp.asarray(beta), None, None, None)
    unit = lambda x: x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)  # noqa: E731
    dt, state = np.asarray(mixer.dt_bias.get_value()).mean(-1, keepdims=True), np.zeros((2, 16, 16))
    for t in range(steps):
        decay = (-5 / (1 + np.exp(-(gate[0, t] + dt)))).mean(-1)
        state = np.exp(decay)[:, None, None] * state
        state += beta[0, t, :, None, None] * unit(k[0, t])[:, :, None] * v[0, t][:, None, :]
        expected = np.einsum("hk,hkv->hv", unit(q[0, t]), state) / 4
        np.testing.assert_allclose(out[0, t], expected, rtol=1e-4, atol=1e-5)
