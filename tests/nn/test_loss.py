"""Gradients of the loss in chunks: the head's adds up over all of them in float32."""

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.nn.loss import HeadSums, head_sums
from k3jax.nn.param import Param

TOKENS, WIDTH, VOCAB, CHUNK = 4096, 16, 64, 8


class Head:
    """What the loss needs of a model: a head."""

    def __init__(self, weight: jax.Array):
        self.lm_head = Param(weight, axes=("embed", "vocab"))


def gradients(hidden: np.ndarray, weight: np.ndarray, *, chunk: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Of the summed nats and a little of the squared normalisers: by the head and by the hidden states."""
    targets = jnp.arange(TOKENS)[None] % 7
    mask = targets != 3

    def objective(weight: jax.Array, hidden: jax.Array) -> jax.Array:
        sums: HeadSums = head_sums(Head(weight), hidden[None], targets, mask, chunk=chunk)
        return sums.nats + 0.01 * sums.squares

    found = jax.jit(jax.grad(objective, argnums=(0, 1)))(jnp.asarray(weight, dtype), jnp.asarray(hidden, dtype))
    return tuple(np.asarray(x, np.float64) for x in found)


def test_gradients_of_many_chunks_in_bfloat16_are_as_good_as_one_rounding():
    random = np.random.default_rng(0)
    narrow = lambda x: np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)  # noqa: E731
    hidden = narrow(1 + 0.3 * random.standard_normal((TOKENS, WIDTH)))  # what all tokens share adds up in the head
    weight = narrow(0.1 * random.standard_normal((WIDTH, VOCAB)))
    with jax.enable_x64(True):
        whole = gradients(hidden, weight, chunk=TOKENS, dtype="float64")
        pieces = gradients(hidden, weight, chunk=CHUNK, dtype="float64")
    rounded = gradients(hidden, weight, chunk=CHUNK, dtype="bfloat16")
    for exact, same, ours in zip(whole, pieces, rounded, strict=True):
        np.testing.assert_allclose(same, exact, rtol=1e-9, atol=1e-9)
        assert np.linalg.norm(ours - exact) / np.linalg.norm(exact) < 3e-3
