"""The TPU training and prefill kernels, interpreted: against float64, XLA in the same precision, and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_kernels.grouped_matmul import expert_ffn, grouped_matmul, tpu_matmul, tpu_prefill, tpu_train
from pallas_kernels.mx import (
    decode_layout,
    dequantize,
    fake_quantize_mxfp8,
    mxfp8_dequantize,
    mxfp8_quantize,
    quantize,
)

BETA, LINEAR_BETA = 4.0, 25.0
ROWS, K, N = 300, 256, 384
GROUPS = {
    "uneven, off the tiles": [100, 0, 37, 163],
    "on the tiles": [128, 128, 0, 44],
    "one group has all": [0, 0, 300, 0],
    "rows past the end": [1, 90, 0, 130],
    "no rows at all": [0, 0, 0, 0],
}
EACH_GROUPING = pytest.mark.parametrize("case", GROUPS)


@pytest.fixture(autouse=True, scope="module")
def small_tiles():
    """Several tiles, steps and chunks in small arrays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tpu_matmul, "TILE", 256)
        for name, value in {"WIDTH": 128, "TRANSPOSED": 128, "DEEP": 128, "GRADIENT_TILE": (128, 128)}.items():
            patch.setattr(tpu_train, name, value)
        patch.setattr(tpu_prefill, "STEP", 256)
        patch.setattr(tpu_prefill, "SHORT", (128, 128))
        yield


def one_hot(sizes, rows: int = ROWS) -> np.ndarray:
    expert = np.repeat(np.arange(len(sizes)), sizes)
    hot = np.zeros((rows, len(sizes)))
    hot[np.arange(len(expert)), expert] = 1
    return hot


def float64(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def distance(got, want) -> float:
    """Norm of the error over the norm of what is wanted."""
    return float(np.linalg.norm(float64(got) - want) / max(np.linalg.norm(want), 1e-30))


# ---- float experts


@functools.partial(jax.jit, static_argnames="body")
def matmul_and_gradients(rows, w, cotangent, sizes, *, body):
    out, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, implementation=body), rows, w)
    return out, *pull(cotangent)


def dense(case: str, dtype):
    """Rows, weights and cotangent in `dtype`, poisoned past the last group; sizes; the three results in float64."""
    rng, sizes = np.random.default_rng(0), np.array(GROUPS[case], np.int32)
    exact = [rng.normal(size=shape) for shape in ((ROWS, K), (len(sizes), K, N), (ROWS, N))]
    arrays = [jnp.asarray(a, dtype) for a in exact]
    x, w, g = (float64(a) for a in arrays)
    hot, past = one_hot(sizes), np.arange(ROWS)[:, None] >= sizes.sum()
    wanted = [
        np.einsum("me,mk,ekn->mn", hot, x, w, optimize=True),
        np.einsum("me,mn,ekn->mk", hot, g, w, optimize=True),
        np.einsum("me,mk,mn->ekn", hot, x, g, optimize=True),
    ]
    rows, cotangent = (jnp.where(past, jnp.nan, a) for a in (arrays[0], arrays[2]))
    return (rows, arrays[1], cotangent, sizes), wanted


@EACH_GROUPING
def test_float32_matmul_and_gradients_equal_float64(case):
    arguments, wanted = dense(case, jnp.float32)
    for got, want in zip(matmul_and_gradients(*arguments, body="tpu"), wanted, strict=True):
        assert np.abs(float64(got) - want).max() <= 2e-6 * np.abs(want).max()


@EACH_GROUPING
def test_bfloat16_matmul_and_gradients_are_as_near_to_float64_as_xla(case):
    (rows, w, cotangent, sizes), wanted = dense(case, jnp.bfloat16)
    arguments = rows, w.astype(jnp.float32), cotangent, sizes  # float32 masters, whose gradient nothing rounds
    ours, theirs = (matmul_and_gradients(*arguments, body=body) for body in ("tpu", "reference"))
    for got, other, want, dtype in zip(ours, theirs, wanted, (jnp.bfloat16, jnp.bfloat16, jnp.float32), strict=True):
        assert got.dtype == dtype
        assert distance(got, want) <= 1.1 * distance(other, want)
    assert distance(ours[2], wanted[2]) < 1e-6


@EACH_GROUPING
def test_rows_past_the_last_group_and_weights_of_empty_groups_get_zeros(case):
    arguments, _ = dense(case, jnp.float32)
    out, d_rows, d_weights = map(np.asarray, matmul_and_gradients(*arguments, body="tpu"))
    used = sum(GROUPS[case])
    assert (out[used:] == 0).all()
    assert (d_rows[used:] == 0).all()
    assert (d_weights[np.array(GROUPS[case]) == 0] == 0).all()


def test_one_expert_is_the_dense_matmul():
    rng = np.random.default_rng(1)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((48, 128), (1, 128, 128)))
    got = jax.jit(functools.partial(grouped_matmul, implementation="tpu"))(x, w, jnp.array([48]))
    np.testing.assert_allclose(got, float64(x) @ float64(w[0]), atol=1e-4)


def test_the_mlp_and_its_gradients_equal_the_reference():
    rng, sizes = np.random.default_rng(2), jnp.array(GROUPS["rows past the end"])
    shapes = (ROWS, K), (4, K, N), (4, K, N), (4, N, K), (ROWS,)
    arrays = [jnp.asarray(rng.normal(size=s) / (s[-2] ** 0.5 if len(s) == 3 else 1), jnp.float32) for s in shapes]
    cotangent = jnp.asarray(rng.normal(size=(ROWS, K)), jnp.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def run(body, *arrays):
        def ffn(rows, w1, w3, w2, row_weights):
            options = {"row_weights": row_weights, "implementation": body}
            return expert_ffn(rows, w1, w3, w2, sizes, beta=BETA, linear_beta=LINEAR_BETA, **options)

        out, pull = jax.vjp(ffn, *arrays)
        return out, *pull(cotangent)

    for got, want in zip(run("tpu", *arrays), run("reference", *arrays), strict=True):
        assert distance(got, float64(want)) < 1e-5


# ---- MXFP4 experts


L, F = 256, 512


@functools.cache
def mxfp4_experts():
    """w1, w3, w2 in the checkpoint's layout; expert 2's scales span more than e5m2 can take."""
    rng = np.random.default_rng(3)
    weights = []
    for out, depth in ((F, L), (F, L), (L, F)):
        w = rng.normal(size=(4, out, depth)).astype(np.float32) * depth**-0.5
        w[2] *= np.repeat(np.exp2(rng.integers(-16, 4, (out, depth // 32))), 32, axis=1)
        w[2, :, :32] = 0  # blocks of zeros, whose scale byte is 0
        weights.append(quantize(w))
    return weights


@functools.partial(jax.jit, static_argnames=("body", "activations"))
def mlp(rows, weights, row_weights, sizes, *, body, activations):
    return expert_ffn(
        rows,
        *weights,
        sizes,
        beta=BETA,
        linear_beta=LINEAR_BETA,
        row_weights=row_weights,
        activations=activations,
        implementation=body,
    )


def exact_mlp(rows, hot, row_weights, activations: str, experts=slice(None)):
    """Float64 on exactly decoded weights."""
    w1, w3, w2 = (dequantize(w, "float64")[experts] for w in mxfp4_experts())
    gate, up = (np.einsum("me,ml,efl->mf", hot, rows, w, optimize=True) for w in (w1, w3))
    hidden = BETA * np.tanh(gate / BETA) / (1 + np.exp(-gate)) * LINEAR_BETA * np.tanh(up / LINEAR_BETA)
    if activations == "mxfp8":
        hidden = mxfp8_dequantize(*mxfp8_quantize(hidden), "float64")
    return np.einsum("me,mf,elf->ml", hot, hidden, w2, optimize=True) * row_weights[:, None]


@pytest.mark.parametrize("activations", ["bf16", "mxfp8"])
@EACH_GROUPING
def test_mxfp4_mlp_is_as_near_to_float64_as_xla_on_dequantised_weights(case, activations):
    rng, sizes = np.random.default_rng(4), np.array(GROUPS[case], np.int32)
    used = sizes.sum()
    rows, row_weights = jnp.asarray(rng.normal(size=(ROWS, L)), jnp.bfloat16), rng.uniform(0.1, 1, ROWS)
    read = fake_quantize_mxfp8(rows) if activations == "mxfp8" else rows
    want = exact_mlp(float64(read), one_hot(sizes), row_weights, activations)
    rows, row_weights = rows.at[used:].set(jnp.nan), jnp.asarray(row_weights, jnp.float32).at[used:].set(jnp.nan)

    packed = [jax.tree.map(jnp.asarray, decode_layout(w)) for w in mxfp4_experts()]
    assert [int(n) for n in packed[0].narrow] == [1, 1, 0, 1]  # both ways of expanding are taken
    got = mlp(rows, packed, row_weights, sizes, body="tpu", activations=activations)
    twin = [jnp.swapaxes(jnp.asarray(dequantize(w), jnp.bfloat16), 1, 2) for w in mxfp4_experts()]
    other = mlp(rows, twin, row_weights, sizes, body="reference", activations=activations)

    assert got.dtype == jnp.bfloat16
    assert (np.asarray(got[used:], np.float32) == 0).all()
    for expert, hot in enumerate(one_hot(sizes).T.astype(bool)):
        if hot.any():
            ours, theirs = distance(got[hot], want[hot]), distance(other[hot], want[hot])
            assert ours <= 1.1 * theirs, (expert, ours, theirs)


@pytest.mark.parametrize("layout", ["decode", "decode_words"])
def test_several_subtiles_of_a_tile_share_one_expansion_of_a_layer_of_a_stack(layout):
    rng, sizes, two = np.random.default_rng(7), np.array([170, 100]), slice(1, 3)  # a narrow expert and a wide one
    rows, row_weights = jnp.asarray(rng.normal(size=(ROWS, L)), jnp.bfloat16), rng.uniform(0.1, 1, ROWS)
    want = exact_mlp(float64(rows), one_hot(sizes), row_weights, "bf16", two)
    packed = [decode_layout(w, layout) for w in mxfp4_experts()]
    stacks = [jax.tree.map(lambda leaf: jnp.stack([0 * leaf[two], leaf[two]]), w) for w in packed]
    packed = [w.at_layer(jnp.int32(1)) for w in stacks]
    got = mlp(rows, packed, jnp.asarray(row_weights, jnp.float32), sizes, body="tpu", activations="bf16")
    for hot in one_hot(sizes).T.astype(bool):
        assert distance(got[hot], want[hot]) < 2**-8
    assert (np.asarray(got[270:], np.float32) == 0).all()


def test_mxfp4_mlp_gives_rows_and_their_weights_the_gradients_of_xla():
    rng, sizes = np.random.default_rng(5), jnp.array(GROUPS["rows past the end"])
    rows, cotangent = (jnp.asarray(rng.normal(size=(ROWS, L)), jnp.bfloat16) for _ in range(2))
    row_weights = jnp.asarray(rng.uniform(0.1, 1, ROWS), jnp.float32)
    packed = [jax.tree.map(jnp.asarray, decode_layout(w)) for w in mxfp4_experts()]
    results = []
    for body in ("tpu", "reference"):
        run = functools.partial(mlp, body=body, activations="bf16")
        _, pull = jax.vjp(lambda x, s, run=run: run(x, packed, s, sizes), rows, row_weights)
        results.append(pull(cotangent))
    for got, want in zip(*results, strict=True):
        assert distance(got, float64(want)) < 0.01


def test_rounding_to_mxfp8_in_the_kernel_is_the_encoder_s():
    rng = np.random.default_rng(6)
    x = rng.normal(size=(64, 256)) * np.exp2(rng.integers(-30, 30, (64, 8)).repeat(32, axis=1))
    x[0, :32], x[1, :32], x[2, 0] = 0, 448 * 2.0**5, 3e38
    x[3, :64] = np.exp2(-np.arange(64.0))  # down to elements that are subnormal
    x = jnp.asarray(x, jnp.bfloat16)

    def kernel(x, out):
        out[...] = tpu_prefill._rounded(x[...])

    got = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)
    np.testing.assert_array_equal(float64(got), float64(fake_quantize_mxfp8(x)))


# ---- which body runs


def traced(rows_dtype, weights) -> str:
    rows = jax.ShapeDtypeStruct((2048, L), rows_dtype)
    run = functools.partial(expert_ffn, beta=BETA, linear_beta=LINEAR_BETA)
    return str(jax.make_jaxpr(run)(rows, *weights, jax.ShapeDtypeStruct((4,), jnp.int32)))


def float_weights(width: int):
    return [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((4, L, width), (4, L, width), (4, width, L))]


def test_on_a_tpu_bfloat16_takes_the_kernels_where_they_fit(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert "pallas_call" in traced(jnp.bfloat16, float_weights(384))
    assert "pallas_call" in traced(jnp.bfloat16, [decode_layout(w) for w in mxfp4_experts()])
    assert "pallas_call" not in traced(jnp.float32, float_weights(384))
    assert "pallas_call" not in traced(jnp.bfloat16, float_weights(96))
    assert "pallas_call" not in traced(jnp.bfloat16, mxfp4_experts())  # the checkpoint's layout


@pytest.mark.parametrize(
    ("rows", "weights", "message"),
    [
        (jnp.bfloat16, (4, 96, 128), "widths that 128 divides, not 96 and 128"),
        (jnp.float16, (4, 128, 128), "bfloat16 or float32, not in float16"),
        (jnp.bfloat16, (4, 65536, 7168), r"65536 x 7168 need \d+ bytes"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused(rows, weights, message):
    shapes = jax.ShapeDtypeStruct((512, weights[1]), rows), jax.ShapeDtypeStruct(weights, jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(
            functools.partial(grouped_matmul, implementation="tpu"), *shapes, jax.ShapeDtypeStruct((4,), jnp.int32)
        )


@pytest.mark.parametrize("body", ["tpu", "blocked"])
def test_tokens_rounded_before_dispatch_are_not_rounded_again(body):
    rng, sizes = np.random.default_rng(8), jnp.array(GROUPS["rows past the end"])
    rows, row_weights = jnp.asarray(rng.normal(size=(ROWS, L)), jnp.bfloat16), jnp.ones(ROWS)
    packed = [jax.tree.map(jnp.asarray, decode_layout(w)) for w in mxfp4_experts()]
    each_row = mlp(rows, packed, row_weights, sizes, body=body, activations="mxfp8")
    before = mlp(fake_quantize_mxfp8(rows), packed, row_weights, sizes, body=body, activations="mxfp8_hidden")
    unrounded = mlp(rows, packed, row_weights, sizes, body=body, activations="mxfp8_hidden")
    np.testing.assert_array_equal(float64(each_row), float64(before))
    assert distance(unrounded, float64(before)) > 0.01


@jax.jit
def product_and_gradient(rows, w, sizes):
    out, pull = jax.vjp(lambda rows: grouped_matmul(rows, w, sizes, implementation="tpu"), rows)
    return out, *pull(jnp.ones_like(out))


def test_one_product_with_mxfp4_experts_and_its_gradient_are_near_float64():
    sizes, w = np.array(GROUPS["rows past the end"], np.int32), mxfp4_experts()[0]
    used, hot, exact = sizes.sum(), one_hot(sizes), dequantize(w, "float64")
    rows = jnp.asarray(np.random.default_rng(9).normal(size=(ROWS, L)), jnp.bfloat16)
    stack = jax.tree.map(lambda leaf: jnp.stack([0 * leaf, leaf]), decode_layout(w))
    got, gradient = product_and_gradient(rows.at[used:].set(jnp.nan), stack.at_layer(jnp.int32(1)), jnp.asarray(sizes))
    want = np.einsum("me,mk,enk->mn", hot, float64(rows), exact, optimize=True)
    assert distance(got, want) < 2**-8
    assert distance(gradient, np.einsum("me,enk->mk", hot, exact, optimize=True)) < 2**-7
    assert (np.asarray(got[used:], np.float32) == 0).all()
