"""The public names of k3jax.quant."""

import numpy as np

from k3jax.quant import mxfp8
from k3jax.quant.mxfp4 import MXFP4Array, dequantize, quantize


def test_mxfp4_and_mxfp8_are_reachable_under_their_public_names():
    w = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    packed = quantize(w, rule="floor")
    assert isinstance(packed, MXFP4Array)
    # One step of E2M1 is at most a quarter of the block's largest magnitude, so rounding moves by at most an eighth,
    # and "floor" clips at most another eighth more.
    largest = np.abs(w).reshape(4, 2, 32).max(axis=-1).repeat(32, axis=-1)
    assert (np.abs(dequantize(packed) - w) <= largest / 4).all()
    elements, scales = mxfp8.quantize(w, rule="ceil", elements="e4m3")
    assert (np.abs(mxfp8.dequantize(elements, scales) - w) <= largest / 16).all()
