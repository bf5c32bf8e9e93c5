"""The model against golden data computed in float64 by independent implementations.

A float32 forward pass written from the equations differs from them by 5e-6; 1e-4 leaves room for another order of
sums, and any wrong constant shows above it.
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax.nn.cache import Cache
from k3jax.nn.generate import extend_hidden
from k3jax.nn.transformer import Transformer
from tests.nn.helpers import relative

NAMES = ("tiny_fp32", "tiny_bf16")


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest, golden: Path) -> tuple[Path, Any]:
    """A checkpoint directory and what a forward pass must give."""
    directory = golden / request.param
    return directory, np.load(directory / "golden.npz")


@jax.jit
def traced_forward(model: Transformer, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    out = model.hidden(tokens, collect=True)
    return model.logits(out.hidden), out.trace.sums, out.trace.experts


def assert_matches(expected: Any, logits: Any, hidden: Any, routes: Any) -> None:
    assert relative(logits, expected["logits"]) < 1e-4
    for layer, (actual, wanted) in enumerate(zip(hidden, expected["hidden"], strict=True)):
        assert relative(actual, wanted) < 1e-4, f"after layer {layer}"
    np.testing.assert_array_equal(np.sort(routes, axis=-1), expected["routes"])


def test_reference_matches(case: tuple[Path, Any]) -> None:
    directory, expected = case
    model = k3jax.load(directory, dtype="float32")
    tensors = k3jax.hf_tensors(model, dense=True)
    forward = jax.jit(lambda tensors, ids: k3jax.reference.forward(model.config, tensors, ids))
    assert_matches(expected, *forward(tensors, jnp.asarray(expected["ids"])))


@pytest.mark.parametrize("stack", ["scan", "loop"])
def test_stack_matches(case: tuple[Path, Any], stack: str) -> None:
    directory, expected = case
    model = k3jax.load(directory, dtype="float32", stack=stack)
    logits, hidden, routes = traced_forward(model, jnp.asarray(expected["ids"])[None])
    assert_matches(expected, logits[0], hidden[:, 0], routes[:, 0])


@pytest.mark.parametrize(("name", "stack"), [("tiny_fp32", "scan"), ("tiny_bf16", "scan"), ("tiny_fp32", "loop")])
def test_greedy_tokens_match(golden: Path, name: str, stack: str) -> None:
    greedy = json.loads((golden / name / "greedy.json").read_text())
    model = k3jax.load(golden / name, dtype="float32", stack=stack)
    out = model.generate(jnp.asarray([greedy["prompt"]]), max_new_tokens=len(greedy["greedy"]))
    assert out[0].tolist() == greedy["greedy"]


@pytest.mark.parametrize("pieces", [(150,), (61, 89), (1, 40, 2, 63, 3, 37, 4)], ids=["1", "2", "7 uneven"])
def test_prefill_in_pieces_matches(case: tuple[Path, Any], pieces: tuple[int, ...]) -> None:
    directory, expected = case
    model = k3jax.load(directory, dtype="float32")
    assert relative(extend_by(model, expected["ids"], pieces, chunk=150), expected["logits"]) < 1e-4


def test_prefill_that_reads_the_bank_unit_by_unit_matches(
    case: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("k3jax.nn.blocks.READS_AT_ONCE", 0)  # as chunks of many thousand tokens do
    directory, expected = case
    model = k3jax.load(directory, dtype="float32")
    assert relative(extend_by(model, expected["ids"], (75, 75), chunk=75), expected["logits"]) < 1e-4


def test_token_by_token_matches(case: tuple[Path, Any]) -> None:
    directory, expected = case
    model = k3jax.load(directory, dtype="float32")
    assert relative(extend_by(model, expected["ids"], (1,) * 150, chunk=1), expected["logits"]) < 1e-4


@jax.jit
def extend_logits(model: Transformer, tokens: jax.Array, cache: Cache, num_valid: jax.Array) -> tuple[jax.Array, Cache]:
    hidden, cache = extend_hidden(model, tokens, cache, num_valid)
    return model.logits(hidden), cache


def extend_by(model: Transformer, ids: np.ndarray, pieces: tuple[int, ...], *, chunk: int) -> np.ndarray:
    """Logits of all tokens, fed in pieces that are padded to `chunk`."""
    cache, start, logits = Cache.zeros(model.config, batch=1, max_len=len(ids)), 0, []
    for piece in pieces:
        tokens = np.zeros((1, chunk), np.int32)
        tokens[0, :piece] = ids[start : start + piece]
        out, cache = extend_logits(model, jnp.asarray(tokens), cache, jnp.array([piece]))
        logits.append(np.asarray(out[0, :piece]))
        start += piece
    assert start == len(ids) == int(cache.length[0])
    return np.concatenate(logits)
