"""Gradients of all 514 tensors against float64 golden data, for the reference and every form of the stack."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax


@pytest.fixture(scope="module")
def directory(golden: Path) -> Path:
    """The float32 checkpoint with dense experts."""
    return golden / "tiny_dense"


@pytest.fixture(scope="module")
def expected(directory: Path) -> Any:
    """ids, loss, and of each tensor the norm of its gradient and some entries."""
    return np.load(directory / "golden_grads.npz")


def assert_gradients_match(expected: Any, loss: Any, grads: dict[str, Any]) -> None:
    """Loss within 5e-6; norms within 2e-4; entries within 2e-3 of the tensor's rms; exact zeros exactly."""
    assert abs(float(loss) - float(expected["loss"])) < 5e-6
    names = sorted({key.split("|")[0] for key in expected.files if "|" in key})
    assert len(names) == 514
    for name in names:
        gradient, norm = np.asarray(grads[name], np.float64), float(expected[f"{name}|norm"])
        if norm == 0.0:
            assert not gradient.any(), name
            continue
        assert abs(np.linalg.norm(gradient) / norm - 1) < 2e-4, name
        entries = gradient.reshape(-1)[expected[f"{name}|idx"]]
        rms = norm / np.sqrt(gradient.size)
        np.testing.assert_allclose(entries, expected[f"{name}|val"], rtol=0, atol=2e-3 * rms, err_msg=name)


def test_reference_gradients(directory: Path, expected: Any) -> None:
    model = k3jax.load(directory, dtype="float32")
    tensors = k3jax.hf_tensors(model, dense=True)
    loss = jax.jit(jax.value_and_grad(lambda t, ids: k3jax.reference.loss(model.config, t, ids)))
    assert_gradients_match(expected, *loss(tensors, jnp.asarray(expected["ids"])))


@pytest.mark.parametrize(("stack", "remat"), [("scan", "layer"), ("scan", "none"), ("loop", "none")])
def test_stack_gradients(directory: Path, expected: Any, stack: str, remat: str) -> None:
    model = k3jax.load(directory, dtype="float32", stack=stack)
    model.remat = remat
    ids = jnp.asarray(expected["ids"])[None]
    loss, grads = jax.jit(k3jax.value_and_grad(k3jax.next_token_loss))(model, ids)
    assert_gradients_match(expected, loss, k3jax.hf_tensors(grads))
