"""MXFP4 experts on an NVIDIA GPU, against float64 and the portable body; interpreted where there is no such GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_matmul as package
from pallas_kernels.dispatch import on_hopper
from pallas_kernels.grouped_matmul import expert_ffn, grouped_matmul
from pallas_kernels.grouped_matmul.gpu import block_rows
from pallas_kernels.mx import MXFP4Array, decode_layout, dequantize, quantize

E, L, F, ROWS = 3, 256, 256, 80
SIZES = {"uneven": [50, 7, 23], "empty groups": [0, 80, 0], "rows past the end": [9, 0, 40], "no rows": [0, 0, 0]}


def weights(seed: int) -> MXFP4Array:
    return quantize(jnp.asarray(np.random.default_rng(seed).normal(size=(E, L, F)) * L**-0.5, jnp.float32))


@jax.jit
def both_bodies(rows, sizes):
    """Of the MLP: result and gradients of rows and row weights, by the kernel and by the blocked body."""
    w1, w3, w2 = map(weights, range(3))

    def run(body):
        def mlp(rows, row_weights):
            options = {"row_weights": row_weights, "implementation": body, "activations": "mxfp8_hidden"}
            return expert_ffn(rows, w1, w3, w2, sizes, beta=4.0, linear_beta=25.0, **options)

        out, pull = jax.vjp(mlp, rows, jnp.linspace(0.5, 1, ROWS))
        return out, *pull(jnp.ones_like(out))

    return run("gpu"), run("blocked")


@pytest.mark.parametrize("case", SIZES)
def test_the_mlp_and_its_gradients_are_those_of_the_blocked_body(case):
    used = sum(SIZES[case])
    rows = jax.random.normal(jax.random.key(0), (ROWS, L), jnp.bfloat16).at[used:].set(jnp.nan)
    ours, theirs = both_bodies(rows, jnp.array(SIZES[case], jnp.int32))
    for got, want in zip(ours, theirs, strict=True):
        got, want = np.float64(got), np.float64(want)
        assert (got[used:] == 0).all()
        assert np.linalg.norm(got - want) <= 0.01 * np.linalg.norm(want)


def test_products_are_as_near_to_float64_as_bfloat16_allows():
    sizes, w = np.array([30, 0, 50], np.int32), weights(0)
    rows = jax.random.normal(jax.random.key(0), (ROWS, L), jnp.bfloat16)
    expert = np.repeat(np.arange(E), sizes)
    want = np.einsum("mk,mnk->mn", np.float64(rows), np.float64(dequantize(w))[expert])
    got = np.float64(grouped_matmul(rows, w, jnp.asarray(sizes), implementation="gpu"))
    assert np.abs(got - want).max() <= 2.0**-8 * np.abs(want).max()


def test_every_code_with_every_scale_is_decoded_exactly():
    """Interpreted, subnormals count as zero, so that the smallest scales prove nothing; on a GPU they are there."""
    first = 0 if on_hopper() else 2
    codes = np.tile(np.arange(256, dtype=np.uint8).reshape(2, 1, 128), (1, 256, 1))
    scales = np.tile(np.arange(256, dtype=np.uint8)[None, :, None], (2, 1, 8))
    w = MXFP4Array(jnp.asarray(codes), jnp.asarray(scales))
    rows = jnp.tile(jnp.eye(L, dtype=jnp.bfloat16), (2, 1))
    got = grouped_matmul(rows, w, jnp.full(2, L, jnp.int32), implementation="gpu").reshape(2, L, 256).swapaxes(1, 2)
    want = dequantize(MXFP4Array(codes, scales), "float64")
    assert (np.float64(got)[:, first:253] == want[:, first:253]).all()
    assert np.isnan(np.float64(got)[:, 255]).all()


def test_blocks_hold_a_mean_group_within_what_the_kernel_takes():
    assert [block_rows(rows, 56) for rows in (1, 56, 16 * 56, 17 * 56, 4096 * 56)] == [16, 16, 16, 32, 128]


@pytest.mark.parametrize(
    ("rows", "experts", "message"),
    [
        (jnp.zeros((4, L)), weights(0), "reads bfloat16 rows, not float32"),
        (jnp.zeros((4, L), jnp.bfloat16), decode_layout(weights(0)), "MXFP4 experts in the checkpoint's layout"),
        (jnp.zeros((4, L), jnp.bfloat16), jnp.zeros((E, L, F)), "MXFP4 experts in the checkpoint's layout"),
        (
            jnp.zeros((4, 128), jnp.bfloat16),
            quantize(jnp.zeros((E, 96, 128))),
            "in 64s and inputs in 128s, not 96 x 128",
        ),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(rows, experts, message):
    with pytest.raises(NotImplementedError, match=message):
        grouped_matmul(rows, experts, jnp.zeros(E, jnp.int32), implementation="gpu")


def test_a_hopper_gpu_takes_it_by_default_for_bfloat16_rows(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(package, "on_hopper", lambda: True)
    body = package._body("grouped_matmul", None, False, True)
    assert body is package.gpu.grouped_matmul
    assert package._body("grouped_matmul", None, False, False) is package.blocked.grouped_matmul
    monkeypatch.setattr(package, "on_hopper", lambda: False)
    assert package._body("grouped_matmul", None, False, True) is package.blocked.grouped_matmul
