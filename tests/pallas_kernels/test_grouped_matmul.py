"""Grouped matmul and the expert MLP, every body against a dense float64 oracle; routing rows and their gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import (
    combine_rows,
    expert_ffn,
    gather_rows,
    grouped_matmul,
    sort_by_expert,
)
from pallas_kernels.mx import dequantize, mxfp8_dequantize, mxfp8_quantize, quantize
from pallas_kernels.situ import situ_glu

BODIES = ["reference", "xla", "blocked"]
EACH_BODY = pytest.mark.parametrize("body", BODIES)
BETA, LINEAR_BETA = 4.0, 25.0
L, F = 32, 64
GROUPS = {
    "uneven": [3, 17, 1, 19],
    "empty groups": [0, 25, 0, 15],
    "one group has all": [0, 0, 40, 0],
    "two rows": [1, 0, 0, 1],
    "rows past the end": [9, 0, 14, 6],
    "no rows at all": [0, 0, 0, 0],
}
ROWS = {"two rows": 2}  # 40 otherwise
EACH_GROUPING = pytest.mark.parametrize("case", GROUPS)


def make(case: str, seed: int = 0):
    """Float64 rows [M, L], w1, w3, w2, row weights [M], the output's cotangent [M, L]; group sizes [4]."""
    rng = np.random.default_rng(seed)
    rows, experts = ROWS.get(case, 40), len(GROUPS[case])
    shapes = [(rows, L), (experts, L, F), (experts, L, F), (experts, F, L)]
    arrays = [rng.normal(size=shape) / shape[-2] ** (0.5 * (len(shape) == 3)) for shape in shapes]
    return [*arrays, rng.uniform(0.1, 1, rows), rng.normal(size=(rows, L))], np.array(GROUPS[case], np.int32)


def single(arrays, dtype=np.float32):
    return [jnp.asarray(a, dtype) for a in arrays]


def one_hot(sizes, rows: int) -> np.ndarray:
    """[M, E]: which expert each row belongs to; zero past the last group."""
    expert = np.repeat(np.arange(len(sizes)), sizes)
    hot = np.zeros((rows, len(sizes)))
    hot[np.arange(len(expert)), expert] = 1
    return hot


def dense_ffn(hot, rows, w1, w3, w2, row_weights):
    gate, up = (jnp.einsum("me,ml,elf->mf", hot, rows, w) for w in (w1, w3))
    capped = BETA * jnp.tanh(gate / BETA) * (1 / (1 + jnp.exp(-gate))) * LINEAR_BETA * jnp.tanh(up / LINEAR_BETA)
    return jnp.einsum("me,mf,efl->ml", hot, capped, w2) * row_weights[:, None]


@jax.jit
def _dense_ffn_and_gradients(hot, *arguments_and_cotangent):
    *arguments, cotangent = arguments_and_cotangent
    out, pull = jax.vjp(functools.partial(dense_ffn, hot), *arguments)
    return out, pull(cotangent)


def dense_ffn_and_gradients(*arrays):
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, _dense_ffn_and_gradients(*arrays))


@functools.cache
def oracle(case: str):
    """Float64 output and gradients of the dense MLP."""
    arrays, sizes = make(case)
    return dense_ffn_and_gradients(one_hot(sizes, len(arrays[0])), *arrays)


@functools.partial(jax.jit, static_argnames=("body", "activations"))
def ffn_and_gradients(rows, w1, w3, w2, row_weights, cotangent, sizes, *, body, activations="bf16"):
    def run(rows, w1, w3, w2, row_weights):
        return expert_ffn(
            rows,
            w1,
            w3,
            w2,
            sizes,
            beta=BETA,
            linear_beta=LINEAR_BETA,
            row_weights=row_weights,
            activations=activations,
            implementation=body,
        )

    out, pull = jax.vjp(run, rows, w1, w3, w2, row_weights)
    return out, pull(cotangent)


@functools.partial(jax.jit, static_argnames="body")
def mxfp4_ffn_and_gradients(rows, packed, row_weights, cotangent, sizes, *, body):
    def run(rows, row_weights):
        return expert_ffn(
            rows, *packed, sizes, beta=BETA, linear_beta=LINEAR_BETA, row_weights=row_weights, implementation=body
        )

    out, pull = jax.vjp(run, rows, row_weights)
    return out, *pull(cotangent)


@functools.partial(jax.jit, static_argnames="body")
def matmul_and_gradients(rows, w1, cotangent, sizes, *, body):
    out, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, implementation=body), rows, w1)
    return out, *pull(cotangent)


def assert_close(got, want, tolerance: float) -> None:
    """Largest error within `tolerance` of the largest wanted magnitude; exact where everything wanted is zero."""
    got = np.asarray(got, np.float64)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


# ---- the expert MLP


@EACH_BODY
@EACH_GROUPING
def test_expert_ffn_and_its_gradients_equal_dense_float64(case, body):
    arrays, sizes = make(case)
    out, gradients = ffn_and_gradients(*single(arrays), sizes, body=body)
    want, want_gradients = oracle(case)
    assert_close(out, want, 2e-6)
    for got, wanted in zip(gradients, want_gradients, strict=True):
        assert_close(got, wanted, 5e-6)


@EACH_BODY
def test_nan_in_rows_past_the_last_group_reaches_nothing(body):
    arrays, sizes = make("rows past the end")
    used = sizes.sum()
    for array in (arrays[0], arrays[4], arrays[5]):  # rows, their weights and the output's cotangent
        array[used:] = np.nan
    out, gradients = ffn_and_gradients(*single(arrays), sizes, body=body)
    want, want_gradients = oracle("rows past the end")
    assert_close(out, want, 2e-6)
    for got, wanted in zip(gradients, want_gradients, strict=True):
        assert_close(got, wanted, 5e-6)
    for array in (out, gradients[0], gradients[4]):
        assert (np.asarray(array)[used:] == 0).all()


@EACH_BODY
def test_bfloat16_stays_within_its_rounding(body):
    arrays, sizes = make("uneven")
    out, gradients = ffn_and_gradients(*single(arrays, jnp.bfloat16), sizes, body=body)
    want, want_gradients = oracle("uneven")
    assert out.dtype == jnp.bfloat16
    assert_close(out, want, 0.02)
    for got, wanted in zip(gradients, want_gradients, strict=True):
        assert got.dtype == jnp.bfloat16
        assert_close(got, wanted, 0.02)


@EACH_BODY
def test_float64_stays_float64(body):
    arrays, sizes = make("uneven")
    with jax.enable_x64(True):
        out, gradients = ffn_and_gradients(*(jnp.asarray(a) for a in arrays), sizes, body=body)
        want, want_gradients = oracle("uneven")
        for got, wanted in zip((out, *gradients), (want, *want_gradients), strict=True):
            assert got.dtype == jnp.float64
            assert_close(got, wanted, 1e-13)


@EACH_BODY
@EACH_GROUPING
def test_mxfp4_experts_equal_their_dequantised_twins(case, body):
    (rows, *weights, row_weights, cotangent), sizes = make(case)
    packed = [quantize(np.swapaxes(w, 1, 2).astype(np.float32)) for w in weights]
    dense = [np.swapaxes(dequantize(w, "float64"), 1, 2) for w in packed]
    packed = jax.tree.map(jnp.asarray, packed)
    out, d_rows, d_row_weights = mxfp4_ffn_and_gradients(
        *single([rows]), packed, *single([row_weights, cotangent]), sizes, body=body
    )
    want, gradients = dense_ffn_and_gradients(one_hot(sizes, len(rows)), rows, *dense, row_weights, cotangent)
    assert_close(out, want, 2e-6)
    assert_close(d_rows, gradients[0], 5e-6)
    assert_close(d_row_weights, gradients[4], 5e-6)


@EACH_BODY
def test_mxfp8_activations_round_what_each_stage_reads(body):
    (rows, w1, w3, w2, row_weights, cotangent), sizes = make("uneven")
    out, gradients = ffn_and_gradients(
        *single((rows, w1, w3, w2, row_weights, cotangent)), sizes, body=body, activations="mxfp8"
    )
    hot, rounded = one_hot(sizes, len(rows)), mxfp8_dequantize(*mxfp8_quantize(rows), "float64")
    gate, up = (np.einsum("me,ml,elf->mf", hot, rounded, w) for w in (w1, w3))
    hidden = BETA * np.tanh(gate / BETA) / (1 + np.exp(-gate)) * LINEAR_BETA * np.tanh(up / LINEAR_BETA)
    hidden = mxfp8_dequantize(*mxfp8_quantize(hidden), "float64")
    want = np.einsum("me,mf,efl->ml", hot, hidden, w2) * row_weights[:, None]
    # An element that float32 and float64 round to different sides is one in 2^4 off; there are few.
    assert np.linalg.norm(np.asarray(out) - want) <= 2e-3 * np.linalg.norm(want)
    d_hidden = np.einsum("ml,me,efl->mf", cotangent * row_weights[:, None], hot, w2)
    want_w2 = np.einsum("me,mf,ml->efl", hot, hidden, cotangent * row_weights[:, None])
    assert np.linalg.norm(np.asarray(gradients[3]) - want_w2) <= 2e-3 * np.linalg.norm(want_w2)
    assert np.linalg.norm(np.asarray(gradients[0])) > 0.1 * np.linalg.norm(d_hidden)  # straight through, not zero


def test_the_default_on_a_cpu_is_the_blocked_body():
    (rows, w1, *_), sizes = make("uneven")
    args = (*single([rows, w1]), sizes)
    default = str(jax.make_jaxpr(grouped_matmul)(*args))
    assert default == str(jax.make_jaxpr(functools.partial(grouped_matmul, implementation="blocked"))(*args))
    assert default != str(jax.make_jaxpr(functools.partial(grouped_matmul, implementation="xla"))(*args))


# ---- the plain grouped matmul


@EACH_BODY
@EACH_GROUPING
def test_grouped_matmul_and_its_gradients_equal_dense_float64(case, body):
    (rows, w1, *_), sizes = make(case)
    hot, cotangent = one_hot(sizes, len(rows)), np.random.default_rng(1).normal(size=(len(rows), F))
    rows_in, poisoned = rows.copy(), cotangent.copy()
    rows_in[sizes.sum() :] = poisoned[sizes.sum() :] = np.nan
    out, d_rows, d_w1 = matmul_and_gradients(*single([rows_in, w1, poisoned]), sizes, body=body)
    assert_close(out, np.einsum("me,ml,elf->mf", hot, rows, w1), 2e-6)
    assert_close(d_rows, np.einsum("me,mf,elf->ml", hot, cotangent, w1), 2e-6)
    assert_close(d_w1, np.einsum("me,ml,mf->elf", hot, rows, cotangent), 2e-6)


@EACH_BODY
def test_grouped_matmul_reads_mxfp4_in_checkpoint_layout(body):
    (rows, w1, *_), sizes = make("uneven")
    packed = quantize(np.swapaxes(w1, 1, 2).astype(np.float32))  # [E, out, in]
    run = jax.jit(functools.partial(grouped_matmul, implementation=body))
    got = run(jnp.asarray(rows, jnp.bfloat16), jax.tree.map(jnp.asarray, packed), sizes)
    rounded = np.asarray(jnp.asarray(rows, jnp.bfloat16), np.float64)
    want = np.einsum("me,ml,efl->mf", one_hot(sizes, len(rows)), rounded, dequantize(packed, "float64"))
    assert got.dtype == jnp.bfloat16
    assert_close(got, want, 2**-8)  # only the result is rounded: the weights are exact in bfloat16


@EACH_BODY
def test_more_experts_than_rows(body):
    rng = np.random.default_rng(5)
    rows, experts = rng.normal(size=(6, L)), rng.normal(size=(896, L, 8))
    sizes = np.bincount([0, 3, 3, 500, 895, 895], minlength=896).astype(np.int32)
    got = jax.jit(functools.partial(grouped_matmul, implementation=body))(*single([rows, experts]), sizes)
    assert_close(got, np.einsum("ml,mln->mn", rows, experts[[0, 3, 3, 500, 895, 895]]), 2e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": np.zeros((40, 48))}, "rows are 48 wide but w1 reads 32"),
        ({"w1": np.zeros((4, 32, 48)), "w3": np.zeros((4, 32, 48))}, r"\(32, 48\).*\(64, 32\)"),
        ({"w3": np.zeros((3, 32, 64))}, "4 group sizes for 3 experts of w3"),
        ({"w2": np.zeros((3, 64, 32))}, "4 group sizes for 3 experts of w2"),
        ({"activations": "fp8"}, "'fp8'.*'bf16' or 'mxfp8'"),
        ({"implementation": "cuda"}, "'cuda' is unknown"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_both_numbers(change, message):
    (rows, w1, w3, w2, *_), sizes = make("uneven")
    arguments = {"rows": rows, "w1": w1, "w3": w3, "w2": w2, "group_sizes": sizes} | change
    with pytest.raises(ValueError, match=message):
        expert_ffn(**arguments, beta=BETA, linear_beta=LINEAR_BETA)


# ---- SiTU


def test_situ_matches_its_formula_and_computes_in_float32():
    gate, up = np.random.default_rng(0).normal(size=(2, 500)) * 30
    want = 4 * np.tanh(gate / 4) / (1 + np.exp(-gate)) * 25 * np.tanh(up / 25)
    situ = functools.partial(situ_glu, beta=4.0, linear_beta=25.0)
    assert_close(situ(*single([gate, up])), want, 1e-6)
    low = situ(*single([gate, up], jnp.bfloat16))
    rounded = [np.asarray(a, np.float64) for a in single([gate, up], jnp.bfloat16)]
    want_low = 4 * np.tanh(rounded[0] / 4) / (1 + np.exp(-rounded[0])) * 25 * np.tanh(rounded[1] / 25)
    assert low.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(low, np.float64), want_low, rtol=2**-8, atol=1e-30)
    with jax.enable_x64(True):
        assert_close(situ(jnp.asarray(gate), jnp.asarray(up)), want, 1e-15)


def test_situ_is_bounded_and_its_sigmoid_sees_the_uncapped_gate():
    situ = functools.partial(situ_glu, beta=4.0, linear_beta=25.0)
    assert float(situ(jnp.float32(1e30), jnp.float32(1e30))) == 100.0
    capped_sigmoid = -4 * 25 / (1 + np.exp(4))  # what a sigmoid of the capped gate would give
    assert abs(float(situ(jnp.float32(-20.0), jnp.float32(1e30)))) < 1e-4 * abs(capped_sigmoid)


# ---- routing


@pytest.mark.parametrize("experts", [1, 8, 32, 33, 896])  # the counting sort up to 32, a comparison sort beyond
@pytest.mark.parametrize("masked", [False, True])
def test_sort_by_expert_is_the_stable_sort(experts, masked):
    rng = np.random.default_rng(experts)
    choice = rng.integers(0, experts, (57, 3)).astype(np.int32)
    valid = rng.random(57) < 0.7 if masked else None
    routing = jax.jit(sort_by_expert, static_argnums=1)(choice, experts, valid)
    keys = (choice if valid is None else np.where(valid[:, None], choice, experts)).reshape(-1)
    order = np.argsort(keys, kind="stable")
    np.testing.assert_array_equal(routing.order, order)
    np.testing.assert_array_equal(np.asarray(routing.inverse)[order], np.arange(len(keys)))
    np.testing.assert_array_equal(routing.group_sizes, np.bincount(keys, minlength=experts + 1)[:experts])
    assert {leaf.dtype for leaf in jax.tree.leaves(routing)} == {jnp.dtype("int32")}


@pytest.mark.parametrize("masked", [False, True])
def test_gather_and_combine_and_their_gradients_equal_the_dense_sum(masked):
    rng = np.random.default_rng(0)
    tokens, k, experts = 23, 2, 5
    choice = np.stack([rng.permutation(experts)[:k] for _ in range(tokens)]).astype(np.int32)
    valid = np.arange(tokens) % 4 != 1 if masked else np.ones(tokens, bool)
    arrays = rng.normal(size=(tokens, L)), rng.normal(size=(experts, L, L)), rng.uniform(size=(tokens, k))
    cotangent = rng.normal(size=(tokens, L))
    routing = sort_by_expert(jnp.asarray(choice), experts, jnp.asarray(valid) if masked else None)

    def routed(x, w, weights):
        rows = grouped_matmul(gather_rows(x, routing, k), w, routing.group_sizes)
        return combine_rows(rows, routing, weights)

    def dense(x, w, weights):
        return jnp.einsum("s,sk,skln,sl->sn", valid.astype(np.float64), weights, w[choice], x)

    out, pull = jax.vjp(jax.jit(routed), *single(arrays))
    gradients = pull(jnp.asarray(cotangent, jnp.float32))
    with jax.enable_x64(True):
        want, pull = jax.vjp(jax.jit(dense), *map(jnp.asarray, arrays))
        wanted = [np.asarray(a) for a in (want, *pull(jnp.asarray(cotangent)))]
    for got, want in zip((out, *gradients), wanted, strict=True):
        assert_close(got, want, 2e-6)


def test_combine_sums_in_float32_and_ignores_rows_of_invalid_tokens():
    choice, valid = jnp.zeros((3, 2), jnp.int32), jnp.array([True, False, True])
    routing = sort_by_expert(choice, 1, valid)
    rows = jnp.full((6, 4), 1.0, jnp.bfloat16).at[4:].set(jnp.nan)
    weights = jnp.array([[1.0, 2.0**-12]] * 3)  # a sum that bfloat16 would round away
    out, pull = jax.vjp(lambda rows, weights: combine_rows(rows, routing, weights), rows, weights)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, np.array([1, 0, 1])[:, None] * np.full((3, 4), 1 + 2.0**-12))
    d_rows, d_weights = pull(jnp.ones((3, 4)))
    assert d_rows.dtype == jnp.bfloat16
    np.testing.assert_array_equal(d_weights, [[4, 4], [0, 0], [4, 4]])


def test_no_gradient_of_the_routed_mlp_holds_a_float_scatter():
    (rows, w1, w3, w2, *_), _ = make("uneven")
    choice = jnp.zeros((20, 2), jnp.int32)

    def loss(x, w1, w3, w2):
        routing = sort_by_expert(choice, 4)
        rows = gather_rows(x, routing, 2)
        out = expert_ffn(rows, w1, w3, w2, routing.group_sizes, beta=BETA, linear_beta=LINEAR_BETA)
        return combine_rows(out, routing, jnp.ones((20, 2))).sum()

    text = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(*single([rows[:20], w1, w3, w2])).as_text()
    assert text.count('"stablehlo.scatter"(') == 1  # of the permutation's int32 indices


@pytest.mark.parametrize("activations", ["bf16", "mxfp8"])
def test_no_rows_give_no_rows(activations):
    up, down = jnp.ones((3, 64, 32)), jnp.ones((3, 32, 64))
    sizes = jnp.zeros(3, jnp.int32)
    out = expert_ffn(jnp.ones((0, 64)), up, up, down, sizes, beta=4.0, linear_beta=25.0, activations=activations)
    assert out.shape == (0, 64)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"row_weights": jnp.ones((2, 1))}, "row_weights has shape \\(2, 1\\) for 2 rows"),
        ({"group_sizes": jnp.ones(1)}, "group_sizes are float32; they must be integers"),
    ],
)
def test_arguments_of_a_wrong_kind_are_named(changed, message):
    up, down = jnp.ones((1, 64, 32)), jnp.ones((1, 32, 64))
    arguments = {"group_sizes": jnp.ones(1, jnp.int32), "beta": 4.0, "linear_beta": 25.0} | changed
    with pytest.raises(ValueError, match=message):
        expert_ffn(jnp.ones((2, 64)), up, up, down, **arguments)
