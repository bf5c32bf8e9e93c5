"""The TPU decode kernel for MXFP4 experts, interpreted, against float64 on exactly decoded weights; its layout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul import expert_ffn, tpu, tpu_decode
from pallas_kernels.grouped_matmul.tpu_codes import in_layout
from pallas_kernels.mx import MXFP4Array, decode_layout, decodes_exactly, dequantize, layout_for, serving_layout

BETA, LINEAR_BETA = 4.0, 25.0
EACH_LAYOUT = pytest.mark.parametrize("layout", ["decode", "decode_words"])
L, F, EXPERTS, ROWS = 512, 768, 6, 72  # one tile of 512 columns in w2, three of 256 in w1 and w3
SIZES = {
    "every body": [1, 2, 0, 4, 13, 52],
    "more than one block": [0, 0, 0, 0, 72, 0],
    "rows past the end": [3, 0, 17, 0, 0, 1],
    "one row": [0, 0, 0, 1, 0, 0],
    "nothing": [0, 0, 0, 0, 0, 0],
}


def random_bytes(out: int, in_: int, scales: tuple[int, int], lead=(EXPERTS,), seed: int = 0) -> MXFP4Array:
    rng = np.random.default_rng((seed, out, in_))
    packed = rng.integers(0, 256, (*lead, out, in_ // 2), dtype=np.uint8)
    return MXFP4Array.from_checkpoint(packed, rng.integers(*scales, (*lead, out, in_ // 32), dtype=np.uint8))


@functools.cache
def experts(wide: int | None = None) -> tuple[MXFP4Array, MXFP4Array, MXFP4Array]:
    """w1, w3, w2 with K3's scales, 110 to 123; one column of one expert may span more than exponents can take."""
    w1, w3, w2 = (random_bytes(*shape, (110, 124), seed=i) for i, shape in enumerate([(F, L), (F, L), (L, F)]))
    if wide is not None:
        w3.scales[wide, 5, 3] = 109
        w3.scales[wide, 5, 4] = 123
    return w1, w3, w2


def rows_and_weights(sizes) -> tuple[np.ndarray, np.ndarray]:
    """Rows [M, L], bf16 values in float64, and their weights; NaN past the last group."""
    rng = np.random.default_rng(1)
    rows = np.float64(jnp.asarray(rng.normal(size=(ROWS, L)), jnp.bfloat16))
    weights = np.float64(rng.uniform(0.1, 1, ROWS).astype(np.float32))
    rows[sum(sizes) :] = weights[sum(sizes) :] = np.nan
    return rows, weights


def dense(rows, weights, packed, sizes) -> np.ndarray:
    """The MLP in float64."""
    w1, w3, w2 = (np.swapaxes(dequantize(w, "float64"), 1, 2) for w in packed)
    out, start = np.zeros((len(rows), L)), 0
    for expert, size in enumerate(sizes):
        own = slice(start, start + size)
        gate, up = rows[own] @ w1[expert], rows[own] @ w3[expert]
        hidden = BETA * np.tanh(gate / BETA) / (1 + np.exp(-gate)) * LINEAR_BETA * np.tanh(up / LINEAR_BETA)
        out[own] = hidden @ w2[expert] * weights[own, None]
        start += size
    return out


@functools.partial(jax.jit, static_argnames="body")
def run(rows, packed, sizes, weights, *, body):
    options = {"beta": BETA, "linear_beta": LINEAR_BETA, "row_weights": weights, "implementation": body}
    return expert_ffn(rows, *packed, sizes, **options)


def outputs(sizes, packed, body):
    rows, weights = rows_and_weights(sizes)
    arrays = jnp.asarray(rows, jnp.bfloat16), jax.tree.map(jnp.asarray, packed), np.int32(sizes), jnp.float32(weights)
    return np.float64(run(*arrays, body=body)), dense(rows, weights, packed_in_checkpoint(packed), sizes)


def packed_in_checkpoint(packed):
    return [MXFP4Array.from_checkpoint(*w.to_checkpoint()) for w in packed]


def relative_error(got, want) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@EACH_LAYOUT
@pytest.mark.parametrize(
    ("case", "wide"), [*((case, None) for case in SIZES), ("every body", 5)], ids=[*SIZES, "an expert of wide scales"]
)
def test_decode_is_as_exact_as_a_bf16_matmul_on_dequantised_weights(case, wide, layout):
    sizes, packed = SIZES[case], experts(wide)
    got, want = outputs(sizes, [decode_layout(w, layout) for w in packed], "tpu")
    used = sum(sizes)
    assert (got[used:] == 0).all()
    if used:
        twin, _ = outputs(sizes, packed, "blocked")
        assert relative_error(got[:used], want[:used]) <= 1.1 * relative_error(twin[:used], want[:used])


def test_wide_scales_are_seen_expert_by_expert():
    assert decode_layout(experts()[1]).narrow.tolist() == [1] * EXPERTS
    assert decode_layout(experts(2)[1]).narrow.tolist() == [1, 1, 0, 1, 1, 1]


@pytest.mark.parametrize("body", ["tpu", "blocked"])
def test_a_layer_of_a_stack_is_read_in_place(body):
    other = [random_bytes(*w.shape[1:], (110, 124), seed=7) for w in experts()]
    pairs = [tuple(map(decode_layout, pair)) for pair in zip(other, experts(), strict=True)]
    stacked = [jax.tree.map(lambda *leaves: np.stack(leaves), *pair) for pair in pairs]

    @jax.jit
    def ffn(rows, stacks, index, sizes, weights):
        return run(rows, [stack.at_layer(index) for stack in stacks], sizes, weights, body=body)

    sizes, (rows, weights) = [0, 1, 0, 0, 0, 1], (a[:2] for a in rows_and_weights(SIZES["every body"]))
    got = ffn(jnp.asarray(rows, jnp.bfloat16), stacked, np.int32(1), np.int32(sizes), jnp.float32(weights))
    assert relative_error(np.float64(got), dense(rows, weights, experts(), sizes)) < 0.01
    layer = stacked[0].at_layer(1)
    assert layer.codes is stacked[0].codes
    assert layer.shape == (EXPERTS, F, L)


# ---- products of single weights


@functools.partial(jax.jit, static_argnames=("body", "words"))
def product(rows, codes, scales, *, body, words):
    """Rows [16, 256] times one weight of the decode layout, as the kernel's `body` computes it."""
    depth, columns = rows.shape[1], codes.shape[1]

    def kernel(x, codes, scales, out, left, exponents):
        for i in range(depth // 128):
            tpu_decode._store_left(body, left, i * 128, i % 2, in_layout(x[:, pl.ds(i * 128, 128)]))
        if body.few:
            out[:8] = tpu_decode._few_product(body, left, codes, scales, depth, words)
        else:
            total, factor = tpu_decode._many_product(body, left, codes, scales, exponents, depth, words, True)
            out[...] = total * factor

    scratch = [pltpu.VMEM((8 * body.rows if body.few else body.rows, depth), jnp.bfloat16)]
    scratch.append(pltpu.VMEM((depth // 128, columns), jnp.uint32))
    out_shape = jax.ShapeDtypeStruct((len(rows), columns), jnp.float32)
    return pl.pallas_call(kernel, out_shape=out_shape, scratch_shapes=scratch, interpret=True)(rows, codes, scales)


def weights_at(elements: list[int], packed: MXFP4Array, body: tpu_decode.Body, layout: str) -> np.ndarray:
    """[len(elements), out]: elements of every column, as products with rows that are one there and zero elsewhere."""
    decode = decode_layout(packed, layout)
    rows = np.zeros((16, packed.shape[-1]), np.float32)
    rows[range(len(elements)), elements] = 1
    return np.asarray(product(rows, decode.codes, decode.scales, body=body, words=layout == "decode_words"))[
        : len(elements)
    ]


def every_code_in_every_place(scales) -> MXFP4Array:
    """[16, 256]: element k of row n has the code (k + n) % 16; scales [16, 8]."""
    codes = (np.arange(256)[None] + np.arange(16)[:, None]) % 16
    return MXFP4Array.from_checkpoint((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8), np.uint8(scales))


@EACH_LAYOUT
def test_few_rows_decode_every_code_with_every_scale_exactly(layout):
    body = tpu_decode.FEW[1]
    for start in range(2, 253, 8):  # an element of each of eight blocks, and 16 codes of it in 16 columns
        packed = every_code_in_every_place(np.broadcast_to(np.minimum(start + np.arange(8), 252), (16, 8)))
        for first in range(0, 8, body.rows):
            elements = [32 * block + (11 * block) % 32 for block in range(first, first + body.rows)]
            np.testing.assert_array_equal(
                weights_at(elements, packed, body, layout), dequantize(packed, "float32").T[elements]
            )


@EACH_LAYOUT
def test_few_rows_take_columns_whose_scales_are_far_apart(layout):
    packed = every_code_in_every_place((np.arange(16)[:, None] * 16 + np.arange(8) * 29) % 251 + 2)
    elements = [100, 255]
    got = weights_at(elements, packed, tpu_decode.FEW[0], layout)
    np.testing.assert_array_equal(got, dequantize(packed, "float32").T[elements])


@EACH_LAYOUT
@pytest.mark.parametrize("smallest", [2, 110, 239])
def test_many_rows_decode_every_code_with_every_exponent_exactly(smallest, layout):
    spans = (np.arange(16)[:, None] + 2 * np.arange(8)) % 14  # 0 to 13, what exponents of e5m2 can take
    packed = every_code_in_every_place(smallest + spans)
    assert decode_layout(packed).narrow == 1
    for first in (0, 32, 100, 240):
        elements = list(range(first, first + 16))
        got = weights_at(elements, packed, tpu_decode.MANY[0], layout)
        np.testing.assert_array_equal(got, dequantize(packed, "float32").T[elements])


# ---- the layout


@EACH_LAYOUT
def test_the_decode_layout_gives_every_byte_back(layout):
    packed = random_bytes(40, 384, (0, 256), lead=(2, 3))  # both zeros, any scale
    decode = decode_layout(packed, layout)
    assert decode.shape == packed.shape == (2, 3, 40, 384)
    for got, want in zip(decode.to_checkpoint(), (packed.codes, packed.scales), strict=True):
        assert got.dtype == np.uint8
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(dequantize(decode), dequantize(packed))
    other = decode_layout(decode, "decode_words" if layout == "decode" else "decode")
    np.testing.assert_array_equal(other.to_checkpoint()[0], packed.codes)


@EACH_LAYOUT
def test_the_decode_layout_is_the_same_in_numpy_and_on_a_device(layout):
    packed = random_bytes(24, 256, (0, 256), lead=(2,))
    lay_out = functools.partial(decode_layout, layout=layout)
    host, device = lay_out(packed), jax.jit(lay_out)(jax.tree.map(jnp.asarray, packed))
    for one, other in zip(jax.tree.leaves(host), jax.tree.leaves(device), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    for one, other in zip(jax.jit(MXFP4Array.to_checkpoint)(device), packed.to_checkpoint(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_decode_layout_puts_four_blocks_side_by_side():
    codes = np.arange(128) // 32 + 4 * (np.arange(128) % 4)  # block + 4 (element % 4)
    packed = MXFP4Array.from_checkpoint(
        (codes[None, ::2] | codes[None, 1::2] << 4).astype(np.uint8), np.uint8([[120, 118, 123, 119]])
    )
    decode = decode_layout(packed)
    assert decode.codes[:4, 0].tolist() == [0x10, 0x32, 0x54, 0x76]  # elements 0 and 1 of blocks 0 to 3
    assert decode.scales[:5, 0].tolist() == [2, 0, 5, 1, 118]


def test_each_chip_has_its_layout():
    kinds = {"TPU7x": "decode", "TPU v6 lite": "decode_words", "TPU v5p": "decode_words", "cpu": "checkpoint"}
    assert {kind: layout_for(kind) for kind in kinds} == kinds


@pytest.mark.parametrize("shape", [(3072, 3584), (3584, 3072)])
def test_the_decode_layout_takes_at_most_nine_sixteenths_of_a_byte(shape):
    out, in_ = shape
    codes, scales = (jax.ShapeDtypeStruct((56, out, in_ // n), jnp.uint8) for n in (2, 32))
    decode = jax.eval_shape(decode_layout, MXFP4Array(codes, scales))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(decode))
    assert size <= 0.5625 * 56 * out * in_


@pytest.mark.parametrize(
    ("scale", "code", "exact"),
    [(110, 7, True), (2, 1, True), (1, 1, False), (0, 1, False), (0, 8, True), (255, 0, False), (254, 7, True)],
)
def test_scales_that_a_device_would_get_wrong_keep_the_checkpoint_layout(scale, code, exact):
    packed = MXFP4Array.from_checkpoint(np.zeros((3, 64), np.uint8), np.full((3, 4), 120, np.uint8))
    packed.codes[1, 20], packed.scales[1, 1] = code << 4, scale
    assert decodes_exactly(packed) == exact
    assert decodes_exactly(jax.tree.map(jnp.asarray, packed)) == exact


def test_serving_lays_out_what_its_device_decodes_exactly(caplog):
    packed, odd = random_bytes(16, 128, (110, 124)), random_bytes(16, 96, (110, 124))
    assert serving_layout(packed, "TPU7x", "w1").layout == "decode"
    assert serving_layout(packed, "TPU v5p", "w1").layout == "decode_words"
    assert serving_layout(packed, "cpu", "w1").layout == "checkpoint"
    assert not caplog.records
    assert serving_layout(odd, "TPU7x", "experts.w1") is odd
    assert "experts.w1 keeps the checkpoint's layout" in caplog.text


def test_a_width_without_superblocks_keeps_the_checkpoint_layout():
    packed = random_bytes(8, 96, (110, 124))
    assert not decodes_exactly(packed)
    with pytest.raises(ValueError, match="128 divides, not 96"):
        decode_layout(packed)


# ---- which body runs


@pytest.mark.parametrize(
    ("rows", "dtype", "quantize", "reason"),
    [
        (384, "bfloat16", False, None),
        (385, "bfloat16", False, "385 rows are more than 64 for each of 6"),
        (ROWS, "float32", False, "bfloat16 rows, not float32"),
        (ROWS, "bfloat16", True, "bfloat16 rows, not mxfp8"),
    ],
)
def test_what_the_decode_kernel_does_not_take_is_named(rows, dtype, quantize, reason):
    weights = [decode_layout(w) for w in experts()]
    problem = tpu.why_not_decode(jnp.zeros((rows, L), dtype), *weights, quantize)
    assert problem is None if reason is None else reason in problem


def test_experts_in_the_checkpoint_layout_are_refused():
    w1, w3, w2 = experts()
    arguments = (
        jnp.zeros((ROWS, L), jnp.bfloat16),
        decode_layout(w1),
        w3,
        decode_layout(w2),
        np.zeros(EXPERTS, np.int32),
    )
    with pytest.raises(NotImplementedError, match="w3 is not MXFP4 in the decode layout"):
        expert_ffn(*arguments, beta=BETA, linear_beta=LINEAR_BETA, implementation="tpu")


def test_a_gradient_is_refused():
    rows, packed = jnp.zeros((2, L), jnp.bfloat16), [decode_layout(w) for w in experts()]
    with pytest.raises(NotImplementedError, match="no gradient"):
        jax.grad(lambda x: run(x, packed, np.zeros(EXPERTS, np.int32), jnp.ones(2), body="tpu").sum())(rows)


def test_widths_that_tiles_do_not_divide_are_refused():
    assert "256 divides, not L=128 and F=768" in tpu_decode.why_not_widths(128, 768)


def test_the_decode_kernel_is_the_default_on_a_tpu_for_few_rows(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    packed = [decode_layout(w) for w in experts()]

    def program(rows: int, weights) -> str:
        x, sizes = jnp.zeros((rows, L), jnp.bfloat16), jnp.zeros(EXPERTS, jnp.int32)
        body = functools.partial(expert_ffn, beta=BETA, linear_beta=LINEAR_BETA)
        return str(jax.make_jaxpr(lambda x, s: body(x, *jax.tree.map(jnp.asarray, weights), s))(x, sizes))

    assert "mxfp4_expert_decode" in program(384, packed)
    assert "mxfp4_expert_decode" not in program(385, packed)
    assert "mxfp4_expert_decode" not in program(384, experts())
