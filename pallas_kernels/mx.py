"""OCP Microscaling (MX 1.0): 32 elements share one power-of-two scale; MXFP4 weights as a pytree, MXFP8 activations.

Encoding and decoding are integer arithmetic on float bit patterns. That is exact on every platform, where a float
multiply is not: XLA on a CPU flushes the subnormal results that the smallest scales give.

A scale byte s means 2^(s - 127); 255 is NaN. Where MX leaves a choice: an all-zero block gets s = 0, a scale below
2^-127 is raised to it, values past the largest element saturate, and a block holding NaN or infinity gets s = 255.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from pallas_kernels.mx_layout import SUPERBLOCK, from_decode, to_decode

_log = logging.getLogger("pallas_kernels")

BLOCK = 32
NAN_SCALE = 255
Rule = Literal["floor", "ceil", "even"]
Layout = Literal["checkpoint", "decode", "decode_words"]

# Float32 bit patterns, as int32.
_MAGNITUDE = 0x7FFFFFFF
_SIGN = np.int32(-(2**31))
_FRACTION = 0x007FFFFF
_HIDDEN = 0x00800000  # the leading one that a normal number does not store
_INFINITY = 0x7F800000
_QUIET_NAN = 0x7FC00000


@dataclass(frozen=True)
class _Element:
    """One element format: its bits, exponents of the smallest and largest normal, code of the largest value."""

    bits: int
    fraction_bits: int
    emin: int
    emax: int
    max_code: int


_E2M1 = _Element(bits=4, fraction_bits=1, emin=0, emax=2, max_code=0x7)  # 6
_FP8 = {
    "e4m3": (_Element(bits=8, fraction_bits=3, emin=-6, emax=8, max_code=0x7E), jnp.float8_e4m3fn),  # 448
    "e5m2": (_Element(bits=8, fraction_bits=2, emin=-14, emax=15, max_code=0x7B), jnp.float8_e5m2),  # 57344
}
_E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class MXFP4Array:
    """A weight of logical shape [..., out, in] as E2M1 codes and E8M0 scales, every bit of the checkpoint's.

    In `layout` "checkpoint", `codes` uint8 [..., out, in/2] holds two elements a byte, the low nibble being the even
    one, and `scales` is uint8 [..., out, in/32]; the others are what the TPU decode kernel reads, with a third leaf
    `narrow` int32 [...] (`decode_layout`, `mx_layout.py`). Leaves may be anything that a tree transform puts there
    (tracers, ShapeDtypeStruct, None), so construction checks nothing: use `from_checkpoint`. There is no `dtype`: ask
    `codes` for storage, or `dequantize`.

    With `layer`, an int32 scalar, the leaves have a leading axis of layers and this is one of them (`at_layer`).
    """

    codes: Any
    scales: Any
    layout: Layout = field(default="checkpoint", metadata={"static": True})
    narrow: Any = None
    layer: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape [..., out, in]."""
        *lead, first, second = self.codes.shape[self.layer is not None :]
        return (*lead, first, 2 * second) if self.layout == "checkpoint" else (*lead, second, 2 * first)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @classmethod
    def from_checkpoint(
        cls, weight_packed: UInt8[Array, "*lead out half_in"], weight_scale: UInt8[Array, "*lead out blocks"]
    ) -> MXFP4Array:
        """Wrap the released tensors' bytes unchanged.

        TypeError unless both are uint8; ValueError unless their shapes agree. NaN scales: see `check_scales`.
        """
        for name, leaf in (("weight_packed", weight_packed), ("weight_scale", weight_scale)):
            if leaf.dtype != np.uint8:
                raise TypeError(f"MXFP4 {name} must be uint8, got {leaf.dtype}: nibbles do not survive a conversion")
        packed, scale = tuple(weight_packed.shape), tuple(weight_scale.shape)
        if len(packed) < 2 or packed[:-1] != scale[:-1] or packed[-1] * 2 != scale[-1] * BLOCK:
            raise ValueError(
                f"MXFP4 weight_packed {packed} needs weight_scale (..., out, in/{BLOCK}) for its (..., out, in/2); "
                f"got {scale}"
            )
        return cls(codes=weight_packed, scales=weight_scale)

    def at_layer(self, index: Any) -> MXFP4Array:
        """Layer `index` of stacked weights; in a decode layout nothing is sliced, so that nothing is copied.

        A kernel is given its operands whole: a slice taken for it would be every expert of a layer, written again.
        """
        layer = dataclasses.replace(self, layer=index)
        return layer.sliced() if self.layout == "checkpoint" else layer

    def sliced(self) -> MXFP4Array:
        """The same without `layer`."""
        if self.layer is None:
            return self
        codes, scales, narrow = jax.tree.map(lambda leaf: leaf[self.layer], (self.codes, self.scales, self.narrow))
        return MXFP4Array(codes, scales, self.layout, narrow)

    def to_checkpoint(self) -> tuple[UInt8[Array, "*lead out half_in"], UInt8[Array, "*lead out blocks"]]:
        """Return `(weight_packed, weight_scale)`, byte for byte what `from_checkpoint` was given, from any layout."""
        own = self.sliced()
        if self.layout == "checkpoint":
            return own.codes, own.scales
        return from_decode(own.codes, own.scales, words=self.layout == "decode_words")


def decode_layout(array: MXFP4Array, layout: Layout = "decode") -> MXFP4Array:
    """The same weight in a layout of the TPU decode kernel, 0.54 bytes an element; for NumPy, JAX, abstract leaves.

    "decode" is for TPU7x, "decode_words" for chips without float4: `layout_for` says which. The kernel is exact unless
    `decodes_exactly` says no. ValueError unless 128 divides the input width.
    """
    if array.layout == layout:
        return array
    if layout == "checkpoint":
        return MXFP4Array.from_checkpoint(*array.to_checkpoint())
    codes, scales, narrow = to_decode(*array.to_checkpoint(), words=layout == "decode_words")
    return MXFP4Array(codes, scales, layout, narrow)


def layout_for(device_kind: str) -> Layout:
    """The layout that experts with few rows want on a device (`jax.devices()[0].device_kind`)."""
    if not device_kind.startswith("TPU"):
        return "checkpoint"
    return "decode" if device_kind.startswith("TPU7") else "decode_words"


def serving_layout(array: MXFP4Array, device_kind: str, name: str) -> MXFP4Array:
    """Lay concrete weights out for serving on a device; logs `name` where they must stay as they are."""
    layout = layout_for(device_kind)
    if layout == "checkpoint" or decodes_exactly(array):
        return decode_layout(array, layout)
    _log.warning("%s keeps the checkpoint's layout, which is slow: a TPU would not decode it exactly", name)
    return array


def decodes_exactly(array: MXFP4Array) -> bool:
    """Whether the decode kernel can serve `array`, concrete and in the checkpoint's layout; else keep that layout.

    It cannot where 128 does not divide the input width, where a scale is 255, NaN, or where a block that is not all
    zeros has the scale 0 or 1: a device would flush the subnormal values that they give.
    """
    if array.shape[-1] % SUPERBLOCK:
        return False
    xp = _namespace(array.codes)
    small = array.scales < 2
    if not bool(xp.any(small)):
        return not bool(xp.any(array.scales == NAN_SCALE))
    nonzero = xp.any((array.codes.reshape(*array.scales.shape, BLOCK // 2) & 0x77) != 0, axis=-1)
    return not bool(xp.any((array.scales == NAN_SCALE) | (nonzero & small)))


def check_scales(array: MXFP4Array, name: str) -> None:
    """Raise ValueError naming the tensor `name` if a scale byte is 255, NaN in E8M0; needs concrete leaves."""
    bad = np.argwhere(np.asarray(array.to_checkpoint()[1]) == NAN_SCALE)
    if len(bad):
        raise ValueError(f"{name}: {len(bad)} scale bytes are 255 (NaN in E8M0), the first at {tuple(bad[0].tolist())}")


def quantize(w: Float[Array, "*lead out in_"], rule: Rule = "floor") -> MXFP4Array:
    """Quantise `w` [..., out, in], read as float32, to MXFP4 with blocks of 32 along `in`; NumPy in gives NumPy out.

    `rule` picks the scale of a block with largest magnitude m 2^e, 1 <= m < 2: "floor" 2^(e-2) (OCP MX 1.0), "ceil" the
    smallest that does not clip, "even" floor after rounding m to the element's precision. Ties round to even.
    """
    codes, scales = _encode(w, rule, _E2M1)
    low, high = codes[..., 0::2], codes[..., 1::2]
    return MXFP4Array(codes=(low | (high << 4)).astype("uint8"), scales=scales)


def dequantize(x: MXFP4Array, dtype: DTypeLike = "float32") -> Float[Array, "*lead out in_"]:
    """Return the values [..., out, in] of `x` in `dtype`; a block with scale 255 is NaN, NumPy in gives NumPy out.

    Every code with every scale is exact in float32 up to scale 252 and in float64 always (above 252, 4 and 6 may pass
    float32's range and become infinity), on NumPy and on devices alike: subnormal values are built, not multiplied.
    bfloat16 is exact wherever float32 is.
    """
    packed, scales = x.to_checkpoint()
    codes = _interleave(packed & 15, packed >> 4)
    values = _E2M1_VALUES[codes] if isinstance(packed, np.ndarray) else e2m1_bits(codes.astype("int32")).view("float32")
    return _apply_scales(values, scales, dtype)


def mxfp8_quantize(
    x: Float[Array, "*lead n"], rule: Rule = "ceil", elements: Literal["e4m3", "e5m2"] = "e4m3"
) -> tuple[Float[Array, "*lead n"], UInt8[Array, "*lead blocks"]]:
    """Quantise `x` [..., n], read as float32, to MXFP8: (float8 elements [..., n], scale bytes uint8 [..., n/32]).

    Scale rules and rounding as in `quantize`, with the element's own largest value (448 or 57344).
    """
    if elements not in _FP8:
        raise ValueError(f"MXFP8 elements={elements!r} is unknown; use one of {', '.join(_FP8)}")
    element, dtype = _FP8[elements]
    codes, scales = _encode(x, rule, element)
    return codes.view(dtype), scales


def mxfp8_dequantize(
    elements: Float[Array, "*lead n"], scales: UInt8[Array, "*lead blocks"], dtype: DTypeLike = "float32"
) -> Float[Array, "*lead n"]:
    """Return the values [..., n] in `dtype` of float8 `elements` [..., n] with scale bytes [..., n/32].

    Exact, but that values beyond the largest float32 are infinite.
    """
    return _apply_scales(elements.astype("float32"), scales, dtype)


@jax.custom_vjp
def fake_quantize_mxfp8(x: Float[Array, "*lead n"]) -> Float[Array, "*lead n"]:
    """Round `x` [..., n] through MXFP8 (e4m3, ceil) in its own dtype; the gradient passes straight through."""
    return mxfp8_dequantize(*mxfp8_quantize(x), dtype=x.dtype)


fake_quantize_mxfp8.defvjp(lambda x: (fake_quantize_mxfp8(x), None), lambda _, g: (g,))


# Below, arrays are NumPy's or JAX's alike, and `xp` is the module that they belong to.


def _namespace(x: Any) -> Any:
    return np if isinstance(x, np.ndarray) else jnp


def _interleave(even: Any, odd: Any) -> Any:
    """[..., n] and [..., n] -> [..., 2 n], alternating."""
    xp = _namespace(even)
    return xp.stack([even, odd], axis=-1).reshape(*even.shape[:-1], -1)


def _encode(x: Any, rule: Rule, element: _Element) -> tuple[Any, Any]:
    """[..., n] -> (codes uint8 [..., n], scales uint8 [..., n/32])."""
    if x.shape[-1] % BLOCK:
        raise ValueError(f"MX blocks of {BLOCK} do not divide the last axis of {tuple(x.shape)}")
    xp = _namespace(x)
    bits = x.astype("float32").view("int32").reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    scales = _block_scales(xp, (bits & _MAGNITUDE).max(axis=-1), rule, element)
    codes = _element_codes(xp, bits, scales[..., None], element)
    return codes.astype("uint8").reshape(x.shape), scales.astype("uint8")


def _split(xp: Any, magnitude: Any) -> tuple[Any, Any]:
    """Bits of |x| -> (floor(log2 |x|), 23-bit fraction), of subnormals too; zero gets an exponent below every other."""
    subnormal = magnitude < _HIDDEN
    # A subnormal is k 2^-149; the integer k, converted, is a normal number.
    bits = xp.where(subnormal, magnitude.astype("float32").view("int32"), magnitude)
    return (bits >> 23) - 127 - 149 * subnormal.astype("int32"), bits & _FRACTION


def _block_scales(xp: Any, amax: Any, rule: Rule, element: _Element) -> Any:
    """Bits of each block's largest magnitude -> scale byte, as int32."""
    exponent, fraction = _split(xp, amax)
    max_fraction = (element.max_code & ((1 << element.fraction_bits) - 1)) << (23 - element.fraction_bits)
    if rule == "floor":
        carry = 0
    elif rule == "ceil":
        carry = (fraction > max_fraction).astype("int32")
    elif rule == "even":
        carry = (fraction >= (1 << 23) - (1 << (22 - element.fraction_bits))).astype("int32")
    else:
        raise ValueError(f"MX scale rule {rule!r} is unknown; use one of floor, ceil, even")
    scale = xp.clip(exponent + carry - element.emax + 127, 0, 254)
    return xp.where(amax >= _INFINITY, NAN_SCALE, scale)


def _element_codes(xp: Any, bits: Any, scale: Any, element: _Element) -> Any:
    """Float32 bits and scale bytes -> element codes: round to nearest even, saturate; 0 in a NaN block."""
    exponent, fraction = _split(xp, bits & _MAGNITUDE)
    exponent = exponent - (scale - 127)
    significand = fraction | _HIDDEN
    kept = xp.maximum(exponent, element.emin)
    shift = xp.minimum(23 - element.fraction_bits + kept - exponent, 25)
    half = (xp.ones_like(shift) << (shift - 1)) - 1
    rounded = (significand + half + ((significand >> shift) & 1)) >> shift
    # A carry out of the fraction lands in the exponent field, and the hidden bit is the field's first one.
    code = xp.minimum(((kept - element.emin) << element.fraction_bits) + rounded, element.max_code)
    sign = (bits < 0).astype("int32") << (element.bits - 1)
    return xp.where(scale == NAN_SCALE, 0, code | sign)


def e2m1_bits(codes: Array) -> Array:
    """E2M1 codes int32 -> the float32 bits of their values."""
    magnitude = codes & 7
    bits = jnp.where(magnitude >= 2, 252 + magnitude, jnp.where(magnitude == 1, 252, 0)) << 22
    return bits | ((codes >> 3) << 31)


def _apply_scales(values: Any, scales: Any, dtype: DTypeLike) -> Any:
    """Normal float32 values [..., n] times 2^(s - 127), s uint8 [..., n/32], without rounding; NaN where s is 255."""
    exponents = scales.astype("int32")[..., None] - 127
    blocks = values.reshape(*scales.shape, BLOCK)
    if isinstance(values, np.ndarray):
        with np.errstate(over="ignore"):
            scaled = np.ldexp(blocks.astype(np.float64 if np.dtype(dtype) == np.float64 else np.float32), exponents)
            return np.where(exponents == 128, np.nan, scaled).astype(dtype).reshape(values.shape)
    if jnp.dtype(dtype) == jnp.float64:
        scaled = jnp.where(exponents == 128, jnp.nan, jnp.ldexp(blocks.astype(dtype), exponents))
    else:
        scaled = _add_exponents(blocks.view("int32"), exponents).view("float32").astype(dtype)
    return scaled.reshape(values.shape)


def _add_exponents(bits: Array, exponents: Array) -> Array:
    """Float32 bits (normal, zero, infinite or NaN) times 2^exponents, as bits; subnormal results are built exactly."""
    magnitude = bits & _MAGNITUDE
    exponent = (magnitude >> 23) + exponents
    normal = magnitude + (exponents << 23)
    subnormal = ((magnitude & _FRACTION) | _HIDDEN) >> jnp.clip(1 - exponent, 0, 31)
    result = jnp.where(exponent >= 1, jnp.where(exponent >= 255, _INFINITY, normal), subnormal)
    result = jnp.where((magnitude == 0) | (magnitude >= _INFINITY), magnitude, result)
    return jnp.where(exponents == 128, _QUIET_NAN, result | (bits & _SIGN))
