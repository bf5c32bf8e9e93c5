"""Sampling: what may be drawn, how often, and that a row's draw is its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.serve.sampler import (
    History,
    Sampled,
    Sampling,
    SamplingRows,
    _filtered,
    all_allowed,
    row_keys,
    sample,
    token_bits,
)

RNG = np.random.default_rng(0)
LOGITS = np.log(np.asarray([0.4, 0.3, 0.15, 0.1, 0.05], np.float32)) + 3.0
_sample = jax.jit(sample, static_argnames="top")
_begin = jax.jit(History.begin)
_add = jax.jit(History.add)


def draw(
    logits: np.ndarray,
    samplings: list[Sampling],
    positions: list[int] | None = None,
    history: History | None = None,
    allowed: np.ndarray | None = None,
) -> Sampled:
    batch, vocab = logits.shape
    position = jnp.asarray(positions or [0] * batch, jnp.int32)
    history = history or History.zeros(slots=batch, vocab=vocab)
    allowed = all_allowed(batch, vocab) if allowed is None else allowed
    return jax.device_get(_sample(jnp.asarray(logits), SamplingRows.of(samplings), history, allowed, position, top=3))


def histories(prompts: list[list[int]], generated: list[list[int]], vocab: int) -> History:
    """Fed as an engine does: the prompt, then one token at a time; rows at different lengths."""
    slots = np.arange(len(prompts))
    history = History.zeros(slots=len(prompts), vocab=vocab)
    history = _begin(history, slots, np.stack([token_bits(prompt, vocab) for prompt in prompts]))
    for step in range(max(map(len, generated))):
        tokens = np.asarray([row[step] if step < len(row) else 0 for row in generated], np.int32)
        history = _add(history, tokens, np.where([step < len(row) for row in generated], slots, -1))
    return history


def frequencies(sampling: dict, count: int = 4000) -> np.ndarray:
    drawn = draw(np.tile(LOGITS, (count, 1)), [Sampling(seed=seed, **sampling) for seed in range(count)]).token
    return np.bincount(drawn, minlength=len(LOGITS)) / count


def test_temperature_zero_takes_the_first_of_the_likeliest() -> None:
    logits = np.asarray([[0, 5, 5, 1], [-3, -9, -8, -1]], np.float32)
    assert draw(logits, [Sampling(temperature=0.0)] * 2).token.tolist() == [1, 3]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, [0.4, 0.3, 0.15, 0.1, 0.05]),
        ({"temperature": 0.5}, [0.5614, 0.3158, 0.0789, 0.0351, 0.0088]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0, 0]),
        ({"top_k": 1, "temperature": 2.0}, [1, 0, 0, 0, 0]),
        ({"top_p": 0.6}, [4 / 7, 3 / 7, 0, 0, 0]),
        ({"top_p": 0.75}, [0.4 / 0.85, 0.3 / 0.85, 0.15 / 0.85, 0, 0]),
        ({"top_p": 1e-9}, [1, 0, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.8}, [4 / 7, 3 / 7, 0, 0, 0]),  # of the 0.85 that top_k leaves, 0.7 is above 0.8 * 0.85
        ({"top_k": 100}, [0.4, 0.3, 0.15, 0.1, 0.05]),
        ({"min_p": 0.3}, [0.4 / 0.85, 0.3 / 0.85, 0.15 / 0.85, 0, 0]),
        ({"min_p": 1.0}, [1, 0, 0, 0, 0]),
        ({"min_p": 0.5, "temperature": 2.0}, [0.3358, 0.2908, 0.2056, 0.1679, 0.0]),
        ({"min_p": 0.3, "top_p": 0.8}, [4 / 7, 3 / 7, 0, 0, 0]),  # of what min_p leaves, as with top_k
        ({"logit_bias": ((0, -100.0), (4, float(np.log(8))))}, [0, 0.3 / 0.95, 0.15 / 0.95, 0.1 / 0.95, 0.4 / 0.95]),
    ],
)
def test_draws_follow_the_filtered_distribution(sampling: dict, expected: list[float]) -> None:
    found = frequencies(sampling)
    np.testing.assert_allclose(found, expected, atol=0.03)
    assert not found[np.asarray(expected) == 0].any()


@pytest.mark.parametrize("step", [0.0, 1.0], ids=["all different", "many equal"])
@pytest.mark.parametrize("top_k", [0, 1, 7, 400])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
def test_filters_keep_what_a_sort_would_keep(top_p: float, top_k: int, step: float) -> None:
    logits = np.random.default_rng(1).normal(0, 2, (6, 300)).astype(np.float32)
    logits = np.round(logits / step) * step if step else logits  # zeros of either sign among them
    logits[:, ::4] = -np.inf
    rows = SamplingRows.of([Sampling(temperature=1.0, top_p=top_p, top_k=top_k)] * 6)
    found = np.isfinite(_filtered(jnp.asarray(logits), rows))
    for row, kept in zip(logits.astype(np.float64), found, strict=True):
        order = np.lexsort((np.arange(300), -row))[: top_k or 300]
        weights = np.exp(row[order] - row[order].max())
        before = np.cumsum(weights) - weights
        expected = order[(before < top_p * weights.sum()) & (weights > 0)]
        assert set(np.flatnonzero(kept)) == set(expected)


def test_a_row_draws_the_same_whatever_the_other_rows_do() -> None:
    logits = RNG.normal(size=(4, 64)).astype(np.float32)
    mine = Sampling(temperature=1.3, seed=7)
    mates = [
        Sampling(temperature=0.0, logit_bias=((3, 5.0),)),
        Sampling(temperature=0.9, top_p=0.5, min_p=0.1, presence_penalty=1.0, seed=1),
        Sampling(top_k=2, repetition_penalty=1.2, seed=7),
    ]
    alone = draw(logits, [mine, *[Sampling(temperature=0.0)] * 3], [5, 0, 0, 0]).token[0]
    among = draw(logits, [mine, *mates], [5, 9, 2, 5]).token[0]
    moved = draw(logits[[1, 2, 0, 3]], [*mates[:2], mine, mates[2]], [9, 2, 5, 5]).token[2]
    assert alone == among == moved


def test_keys_depend_on_seed_choice_and_position_only() -> None:
    seeds = [0, 1, -1, 2**32, 2**32 + 1, 2**63 - 1, -(2**63)]
    rows = SamplingRows.of([Sampling(seed=seed, choice=choice) for seed in seeds for choice in range(2)])
    keys = {
        tuple(jax.random.key_data(row_keys(rows, jnp.full(14, position)))[i].tolist())
        for position in range(3)
        for i in range(14)
    }
    assert len(keys) == 3 * 2 * len(seeds)
    expected = jax.random.fold_in(jax.random.fold_in(jax.random.key(1), 1), 2)
    assert (row_keys(rows, jnp.full(14, 2))[3] == expected).all()


PENALTIES = [
    Sampling(temperature=0.0),
    Sampling(temperature=0.0, presence_penalty=0.5),
    Sampling(temperature=0.0, frequency_penalty=0.5),
    Sampling(temperature=0.0, repetition_penalty=2.0),
    Sampling(temperature=0.0, repetition_penalty=0.5, frequency_penalty=-0.3, presence_penalty=0.2),
    Sampling(temperature=0.0, repetition_penalty=2.0, logit_bias=((2, 9.0), (9, -1.0))),
]


def penalised(logits: np.ndarray, sampling: Sampling, prompt: list[int], generated: list[int]) -> np.ndarray:
    """The definition, token by token, in float64."""
    out = logits.astype(np.float64)
    for token, value in sampling.logit_bias:
        out[token] += value
    for token in {*prompt, *generated}:
        out[token] *= 1 / sampling.repetition_penalty if out[token] > 0 else sampling.repetition_penalty
    for token in set(generated):
        out[token] -= sampling.frequency_penalty * generated.count(token) + sampling.presence_penalty
    return out


def test_penalties_and_bias_follow_their_definition() -> None:
    vocab, count = 12, 12
    for trial in range(count):
        rng = np.random.default_rng(trial)
        logits = rng.normal(size=(len(PENALTIES), vocab)).astype(np.float32) * 2
        prompts = [rng.integers(0, vocab, rng.integers(1, 8)).tolist() for _ in PENALTIES]
        generated = [rng.integers(0, vocab, rng.integers(0, 8)).tolist() for _ in PENALTIES]
        drawn = draw(logits, PENALTIES, history=histories(prompts, generated, vocab)).token.tolist()
        for row, sampling in enumerate(PENALTIES):
            expected = penalised(logits[row], sampling, prompts[row], generated[row])
            assert expected[drawn[row]] > expected.max() - 1e-5, (trial, sampling)


def test_penalties_change_no_reported_logprob() -> None:
    logits = RNG.normal(size=(6, 12)).astype(np.float32)
    history = histories([[0]] * 6, [[0, 0, 1]] * 6, 12)
    out = draw(logits, [Sampling(temperature=0.0, presence_penalty=2.0, logit_bias=((3, 50.0),))] * 6, history=history)
    assert out.token.tolist() == [3] * 6
    np.testing.assert_allclose(out.logprobs.chosen, jax.nn.log_softmax(logits)[:, 3], atol=1e-6)


def test_a_history_counts_each_row_by_itself() -> None:
    history = jax.device_get(histories([[1, 2], [3], [4, 4], [], [], []], [[1], [], [0, 0], [], [], []], 12))
    seen = np.unpackbits(history.prompt.view(np.uint8), axis=1, bitorder="little")
    assert [np.flatnonzero(row).tolist() for row in seen] == [[1, 2], [3], [4], [], [], []]
    assert np.argwhere(history.generated).tolist() == [[0, 1], [2, 0]]
    assert (history.generated[0, 1], history.generated[2, 0]) == (1, 2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_drawn_and_other_rows_draw_as_ever(temperature: float) -> None:
    logits = RNG.normal(size=(4, 64)).astype(np.float32)
    samplings = [Sampling(temperature=temperature, seed=seed) for seed in range(4)]
    free = draw(logits, samplings).token
    for row, tokens in ((0, [63]), (2, [5, 31, 32])):
        allowed = all_allowed(4, 64)
        allowed[row] = 0
        for token in tokens:
            allowed[row, token // 32] |= np.uint32(1 << (token % 32))
        drawn = draw(logits, samplings, allowed=allowed).token
        assert drawn[row] in tokens
        assert np.delete(drawn, row).tolist() == np.delete(free, row).tolist()


def test_too_many_biases_are_refused_by_number() -> None:
    with pytest.raises(ValueError, match="logit_bias has 301 entries: at most 300"):
        SamplingRows.of([Sampling(logit_bias=tuple((token, 1.0) for token in range(301)))])


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e-4])
def test_a_very_low_temperature_is_greedy_and_finite(temperature: float) -> None:
    logits = np.asarray([[80.0, 90.0, -90.0, 89.9]], np.float32)
    assert draw(logits, [Sampling(temperature=temperature)]).token.tolist() == [1]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_are_flagged_row_by_row(bad: float) -> None:
    logits = RNG.normal(size=(3, 16)).astype(np.float32)
    clean = draw(logits, [Sampling(seed=3)] * 3)
    logits[1, 5] = bad
    poisoned = draw(logits, [Sampling(seed=3)] * 3)
    assert poisoned.finite.tolist() == [True, False, True]
    assert poisoned.token[[0, 2]].tolist() == clean.token[[0, 2]].tolist()


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    out = draw(LOGITS[None] * 1.0, [Sampling(temperature=0.3, top_k=1)])
    np.testing.assert_allclose(out.logprobs.chosen, [np.log(0.4)], atol=1e-6)
    assert out.logprobs.top_ids.tolist() == [[0, 1, 2]]
    np.testing.assert_allclose(out.logprobs.top, np.log([[0.4, 0.3, 0.15]]), atol=1e-6)
