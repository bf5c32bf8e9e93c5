"""Sampling: what may be drawn, how often, and that a row's draw is its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.serve.sampler import Sampled, Sampling, SamplingRows, row_keys, sample

RNG = np.random.default_rng(0)
LOGITS = np.log(np.asarray([0.4, 0.3, 0.15, 0.1, 0.05], np.float32)) + 3.0
_sample = jax.jit(sample, static_argnames="top")


def draw(logits: np.ndarray, samplings: list[Sampling], positions: list[int] | None = None) -> Sampled:
    position = jnp.asarray(positions or [0] * len(samplings), jnp.int32)
    return jax.device_get(_sample(jnp.asarray(logits), SamplingRows.of(samplings), position, top=3))


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
    ],
)
def test_draws_follow_the_filtered_distribution(sampling: dict, expected: list[float]) -> None:
    found = frequencies(sampling)
    np.testing.assert_allclose(found, expected, atol=0.03)
    assert not found[np.asarray(expected) == 0].any()


def test_a_row_draws_the_same_whatever_the_other_rows_do() -> None:
    logits = RNG.normal(size=(4, 64)).astype(np.float32)
    mine = Sampling(temperature=1.3, seed=7)
    mates = [Sampling(temperature=0.0), Sampling(temperature=0.9, top_p=0.5, seed=1), Sampling(top_k=2, seed=7)]
    alone = draw(logits, [mine, *[Sampling(temperature=0.0)] * 3], [5, 0, 0, 0]).token[0]
    among = draw(logits, [mine, *mates], [5, 9, 2, 5]).token[0]
    moved = draw(logits[[1, 2, 0, 3]], [*mates[:2], mine, mates[2]], [9, 2, 5, 5]).token[2]
    assert alone == among == moved


def test_keys_depend_on_seed_and_position_only() -> None:
    seeds = [0, 1, -1, 2**32, 2**32 + 1, 2**63 - 1, -(2**63)]
    rows = SamplingRows.of([Sampling(seed=seed) for seed in seeds])
    keys = {
        tuple(jax.random.key_data(row_keys(rows, jnp.full(len(seeds), p)))[i].tolist())
        for p in range(3)
        for i in range(7)
    }
    assert len(keys) == 3 * len(seeds)
    expected = jax.random.fold_in(jax.random.key(1), 2)
    assert (row_keys(rows, jnp.full(len(seeds), 2))[1] == expected).all()


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
