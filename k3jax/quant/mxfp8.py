"""MXFP8 activations: float8 elements, one power-of-two scale per 32 along the last axis."""

from pallas_kernels.mx import fake_quantize_mxfp8 as fake_quantize
from pallas_kernels.mx import mxfp8_dequantize as dequantize
from pallas_kernels.mx import mxfp8_quantize as quantize

__all__ = ["dequantize", "fake_quantize", "quantize"]
