"""MXFP4 weights: E2M1 elements, two a byte, one power-of-two scale per 32 inputs."""

from pallas_kernels.mx import MXFP4Array, check_scales, dequantize, quantize

__all__ = ["MXFP4Array", "check_scales", "dequantize", "quantize"]
