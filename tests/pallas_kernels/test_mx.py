"""MX encode and decode against scalar oracles and golden cases; MXFP4Array as a pytree."""

import bisect
import math
import re
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mx import (
    MXFP4Array,
    check_scales,
    dequantize,
    fake_quantize_mxfp8,
    mxfp8_dequantize,
    mxfp8_quantize,
    quantize,
)

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
RULES = ["floor", "ceil", "even"]
EACH_WAY = pytest.mark.parametrize("to_array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])


def scalar_decode(code: int, scale: int) -> float:
    """One element in Python floats, which hold every product of an E2M1 value and a scale exactly."""
    return math.nan if scale == 255 else math.copysign(E2M1[code & 7], 7.5 - code) * 2.0 ** (scale - 127)


def all_codes_and_scales() -> tuple[np.ndarray, np.ndarray]:
    """Packed bytes [256, 16]: row s holds all 16 codes, once as low and once as high nibble; scale bytes [256, 1]."""
    packed = [code | (15 - code) << 4 for code in range(16)]
    return np.tile(np.array(packed, np.uint8), (256, 1)), np.arange(256, dtype=np.uint8)[:, None]


def random_mxfp4(*shape: int, seed: int = 0) -> MXFP4Array:
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), dtype=np.uint8)
    return MXFP4Array.from_checkpoint(packed, rng.integers(110, 124, (*shape[:-1], shape[-1] // 32), dtype=np.uint8))


def bits(values) -> np.ndarray:
    return np.asarray(values).astype(np.float32).view(np.uint32)


# ---- decoding


@EACH_WAY
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_code_with_every_scale_decodes_like_the_scalar_oracle(to_array, dtype):
    packed, scales = all_codes_and_scales()
    values = dequantize(MXFP4Array.from_checkpoint(to_array(packed), to_array(scales)), dtype)
    want = np.array([[scalar_decode(c, s) for low in range(16) for c in (low, 15 - low)] for s in range(256)])
    with np.errstate(over="ignore"):
        want32 = want.astype(np.float32)
    assert values.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(bits(values)[:255], bits(want32)[:255])  # subnormals and signs of zero included
    assert np.isnan(np.asarray(values, np.float32)[255]).all()
    assert np.isfinite(want32[:253]).all()  # up to scale 252 nothing passes float32's range


def test_float64_holds_every_value_on_host_and_device():
    packed, scales = all_codes_and_scales()
    want = [[scalar_decode(c, s) for low in range(16) for c in (low, 15 - low)] for s in range(255)]
    host = dequantize(MXFP4Array.from_checkpoint(packed, scales), "float64")
    with jax.enable_x64(True):
        device = dequantize(MXFP4Array.from_checkpoint(jnp.asarray(packed), jnp.asarray(scales)), "float64")
        assert device.dtype == jnp.float64
        np.testing.assert_array_equal(np.asarray(device)[:255], want)
    np.testing.assert_array_equal(host[:255], want)


def test_the_low_nibble_is_the_even_element_and_the_bias_is_127():
    packed, scale = np.full((1, 16), 0x21, np.uint8), np.array([[127]], np.uint8)
    values = dequantize(MXFP4Array.from_checkpoint(packed, scale))
    np.testing.assert_array_equal(values[0, :4], [0.5, 1.0, 0.5, 1.0])


def test_real_bytes_of_the_release():
    """The first weights of layer 1, expert 0, w1, and what other implementations decode them to."""
    packed = np.array([[22, 185, 206, 35] + [0] * 12], np.uint8)
    values = dequantize(MXFP4Array.from_checkpoint(packed, np.array([[121]], np.uint8)))
    want = [0.0625, 0.0078125, -0.0078125, -0.0234375, -0.0625, -0.03125, 0.0234375, 0.015625]
    np.testing.assert_array_equal(values[0, :8], want)


def test_the_last_of_896_experts_decodes_like_the_scalar_oracle():
    weight = jax.tree.map(jnp.asarray, random_mxfp4(896, 2, 96))
    codes, scales = np.asarray(weight.codes)[895].tolist(), np.asarray(weight.scales)[895].tolist()
    want = [
        [scalar_decode(codes[o][i // 2] >> 4 * (i % 2) & 15, scales[o][i // 32]) for i in range(96)] for o in range(2)
    ]
    np.testing.assert_array_equal(np.asarray(jax.jit(dequantize)(weight))[895], np.array(want, np.float32))


# ---- encoding


def fp4_encode(w, rule):
    """(codes, scales, values) of blocks [n, 32]."""
    array = quantize(w, rule)
    codes = np.stack if isinstance(w, np.ndarray) else jnp.stack
    return codes([array.codes & 15, array.codes >> 4], axis=-1).reshape(w.shape), array.scales, dequantize(array)


def fp8_encode(w, rule, elements="e4m3"):
    """(codes, scales, values) of blocks [n, 32]."""
    codes, scales = mxfp8_quantize(w, rule, elements)
    return codes.view(np.uint8), scales, mxfp8_dequantize(codes, scales)


def run(encode, to_array, w, *settings):
    """Encode NumPy arrays as they are, and JAX arrays inside jit; NumPy out."""
    if to_array is jnp.asarray:
        encode = jax.jit(encode, static_argnums=range(1, 1 + len(settings)))
    return [np.asarray(out) for out in encode(to_array(w), *settings)]


@EACH_WAY
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["mxfp4", "mxfp8"])
def test_golden_cases(golden, kind, rule, to_array):
    data = np.load(golden / "microscaling" / "cases.npz")
    names = [name for name in data.files if name.removeprefix("w").isdigit()]

    def blocks(suffix, width):
        return np.concatenate([data[name + suffix].reshape(-1, width) for name in names])

    w = blocks("", 32)
    codes, scales, values = run(fp4_encode if kind == "mxfp4" else fp8_encode, to_array, w, rule)
    np.testing.assert_array_equal(codes, blocks(f"_{kind}_{rule}_codes", 32))
    np.testing.assert_array_equal(values.astype(np.float64), blocks(f"_{kind}_{rule}_values", 32))
    zero = np.abs(w).max(axis=1) == 0  # whose scale bytes are free: ours are 0
    np.testing.assert_array_equal(scales, np.where(zero[:, None], 0, blocks(f"_{kind}_{rule}_scales", 1)))


def scalar_block(values: list[float], rule: str, grid: list[float], emax: int, fraction_bits: int) -> tuple[int, list]:
    """(scale byte, values of the elements) of one block in exact rationals, from the words of OCP MX 1.0."""
    largest = max(abs(Fraction(v)) for v in values)
    exponent = math.frexp(float(largest))[1] - 1
    mantissa = largest / Fraction(2) ** exponent
    if rule == "ceil":
        carry = largest > Fraction(grid[-1]) * Fraction(2) ** (exponent - emax)
    else:
        carry = rule == "even" and mantissa >= 2 - Fraction(1, 2 ** (fraction_bits + 1))
    scale = min(max(exponent + carry - emax + 127, 0), 254)
    step = Fraction(2) ** (scale - 127)
    out = []
    for v in values:
        x = min(abs(Fraction(v)) / step, Fraction(grid[-1]))
        # The nearest of the format's values; of two equally near, the one with an even code.
        above = bisect.bisect_left(grid, x)
        code = min({max(above - 1, 0), above}, key=lambda c: (abs(Fraction(grid[c]) - x), c % 2))
        out.append(math.copysign(float(Fraction(grid[code]) * step), v))
    return scale, out


FP8_GRIDS = {
    "e4m3": (np.arange(0x7F, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(float).tolist(), 8, 3),
    "e5m2": (np.arange(0x7C, dtype=np.uint8).view(jnp.float8_e5m2).astype(float).tolist(), 15, 2),
    "e2m1": (E2M1, 2, 1),
}


@EACH_WAY
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("elements", ["e2m1", "e4m3", "e5m2"])
def test_blocks_over_the_whole_float_range_encode_like_the_rational_oracle(elements, rule, to_array):
    rng = np.random.default_rng(3)
    grid, emax, fraction_bits = FP8_GRIDS[elements]
    spread = np.exp2(rng.integers(-149, 127, (24, 1)).astype(float)) * rng.uniform(-2, 2, (24, 32))
    ties = np.array(grid[:-1]) / 2 + np.array(grid[1:]) / 2
    tied = np.resize(np.append(ties, grid[-1]), (math.ceil((len(ties) + 1) / 32), 32))
    tied[:, 0] = grid[-1]  # so that the grid is the block's own
    w = np.concatenate([spread, tied, -tied * 2.0**-40]).astype(np.float32)
    encode, settings = (fp4_encode, (rule,)) if elements == "e2m1" else (fp8_encode, (rule, elements))
    _, scales, values = run(encode, to_array, w, *settings)
    for row in range(len(w)):
        scale, want = scalar_block(w[row].tolist(), rule, grid, emax, fraction_bits)
        assert int(scales[row, 0]) == scale
        np.testing.assert_array_equal(bits(values)[row], bits(np.array(want, np.float32)))


@EACH_WAY
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_value_that_is_not_finite_makes_its_block_nan_and_no_other(to_array, bad):
    w = np.ones((2, 64), np.float32)
    w[1, 40] = bad
    for encode in (fp4_encode, fp8_encode):
        _, scales, values = run(encode, to_array, w, "floor")
        np.testing.assert_array_equal(scales == 255, [[False, False], [False, True]])
        np.testing.assert_array_equal(np.isnan(values), np.repeat([[0, 0], [0, 1]], 32, axis=1))


def test_values_above_the_largest_element_saturate_instead_of_becoming_nan():
    block = np.full((1, 32), 500.0, np.float32)  # floor keeps scale 1, and a bare cast of 500 to e4m3 is NaN
    _, scales, values = run(fp8_encode, jnp.asarray, block, "floor")
    assert scales[0, 0] == 127
    assert (values == 448).all()


@pytest.mark.parametrize("rule", RULES)
def test_quantising_again_changes_no_value(rule):
    w = np.random.default_rng(1).normal(size=(8, 256)).astype(np.float32)
    once = dequantize(quantize(w, rule))
    np.testing.assert_array_equal(dequantize(quantize(once, rule)), once)
    if rule != "ceil":  # ceil may halve a scale and double the codes
        assert quantize(once, rule).codes.tobytes() == quantize(w, rule).codes.tobytes()


def test_fake_quantization_rounds_in_place_and_passes_gradients_through():
    x = jnp.asarray(np.random.default_rng(2).normal(size=(4, 64)), jnp.bfloat16)
    out, gradient = jax.jit(lambda x: (fake_quantize_mxfp8(x), jax.vjp(fake_quantize_mxfp8, x)[1](x)[0]))(x)
    want = mxfp8_dequantize(*mxfp8_quantize(np.asarray(x), rule="ceil", elements="e4m3"))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(out, np.float32), want)  # bfloat16 holds every e4m3 product
    np.testing.assert_array_equal(np.asarray(gradient, np.float32), np.asarray(x, np.float32))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize(np.ones((2, 48), np.float32)), "32.*(2, 48)"),
        (lambda: quantize(np.ones((2, 64), np.float32), "round"), "'round'.*floor, ceil, even"),
        (lambda: mxfp8_quantize(np.ones((2, 64), np.float32), elements="e3m4"), "'e3m4'.*e4m3, e5m2"),
    ],
)
def test_what_cannot_be_encoded_is_refused(call, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        call()


# ---- the pytree


def test_checkpoint_bytes_come_back_unchanged():
    array = random_mxfp4(3, 4, 64)
    array.scales[0, 0, 0] = 255
    packed, scales = MXFP4Array.from_checkpoint(array.codes, array.scales).to_checkpoint()
    assert (packed.tobytes(), scales.tobytes()) == (array.codes.tobytes(), array.scales.tobytes())
    device = jax.jit(lambda a: a)(jax.tree.map(jnp.asarray, array))
    assert [np.asarray(leaf).tobytes() for leaf in device.to_checkpoint()] == [packed.tobytes(), scales.tobytes()]


@pytest.mark.parametrize("which", ["codes", "scales"])
@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.uint16])
def test_bytes_that_went_through_another_dtype_are_refused(which, dtype):
    leaves = {"codes": np.zeros((4, 32), np.uint8), "scales": np.zeros((4, 2), np.uint8)}
    leaves[which] = leaves[which].astype(dtype)
    with pytest.raises(TypeError, match=f"uint8, got {np.dtype(dtype)}"):
        MXFP4Array.from_checkpoint(leaves["codes"], leaves["scales"])


@pytest.mark.parametrize("scale_shape", [(4, 4), (4, 1), (3, 2), (2,), (1, 4, 2)])
def test_shapes_that_disagree_are_refused_with_both(scale_shape):
    with pytest.raises(ValueError, match=rf"{re.escape('(4, 32)')}.*{re.escape(str(scale_shape))}"):
        MXFP4Array.from_checkpoint(np.zeros((4, 32), np.uint8), np.zeros(scale_shape, np.uint8))


def test_a_nan_scale_is_reported_with_the_tensor_and_its_place():
    array = random_mxfp4(4, 64)
    check_scales(array, "layers.1.w1")
    array.scales[2, 1] = 255
    with pytest.raises(ValueError, match=r"layers\.1\.w1: 1 scale bytes are 255 .* \(2, 1\)"):
        check_scales(array, "layers.1.w1")


def test_shape_is_logical_and_abstract_leaves_work():
    array = random_mxfp4(5, 6, 64)
    assert (array.shape, array.ndim) == ((5, 6, 64), 3)
    abstract = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, array))
    assert isinstance(abstract, MXFP4Array)
    assert abstract.shape == (5, 6, 64)
    assert jax.eval_shape(dequantize, abstract).shape == (5, 6, 64)
    assert MXFP4Array.from_checkpoint(abstract.codes, abstract.scales).shape == (5, 6, 64)
    assert jax.tree.map(lambda _: None, array).codes is None
    assert [path[0].name for path, _ in jax.tree_util.tree_leaves_with_path(array)] == ["codes", "scales"]


def test_stacked_arrays_slice_scan_and_vmap():
    layers = [random_mxfp4(6, 64, seed=seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *layers)
    want = np.stack([dequantize(layer) for layer in layers])
    assert stacked.shape == (3, 6, 64)

    @jax.jit
    def three_ways(stacked):
        _, scanned = jax.lax.scan(lambda carry, layer: (carry, dequantize(layer)), None, stacked)
        sliced = [dequantize(jax.tree.map(lambda leaf, i=i: leaf[i], stacked)) for i in range(3)]
        return scanned, jax.vmap(dequantize)(stacked), jnp.stack(sliced)

    for got in three_ways(stacked):
        np.testing.assert_array_equal(np.asarray(got), want)
