"""Quantisation-aware training: the forward pass sees the experts as they will be served, the optimizer float masters.

K3 trains so from SFT on (training 7.1): routed experts' w1, w2, w3 in MXFP4 along their input axis, and what they read
in MXFP8 (`ModelConfig.moe.activations`); all else stays as it is. The release does not say how its scales were chosen;
"floor" is OCP MX 1.0's rule, and training, export and `quantize` share it.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
from flax import nnx
from jaxtyping import Array, Float

from pallas_kernels.mx import MXFP4Array, Rule, dequantize, quantize

Model = TypeVar("Model", bound=nnx.Module)
RULE: Rule = "floor"
# [.., E, in, out]
EXPERT_WEIGHTS = {("experts", "expert_latent", "expert_mlp"), ("experts", "expert_mlp", "expert_latent")}


def fake_quantize(weight: Float[Array, "*lead in_ out"], rule: Rule = RULE) -> Float[Array, "*lead in_ out"]:
    """Round a weight through MXFP4, blocks of 32 along `in_`, keeping its layout and dtype."""
    return dequantize(quantize(weight.swapaxes(-1, -2), rule), weight.dtype).swapaxes(-1, -2)


def fake_quantize_experts(params: Model, rule: Rule = RULE) -> Model:
    """`params` with routed experts' weights rounded through MXFP4 and every other leaf as it is.

    The gradient at these values, applied to the unrounded masters, is the straight-through estimate: rounding counts as
    the identity, and all micro-batches of a step share one rounding.
    """
    return _map_experts(lambda weight: fake_quantize(weight, rule), params)


def quantize_experts(model: Model, rule: Rule = RULE) -> Model:
    """`model` with routed experts' float weights replaced by MXFP4 leaves, as they are exported and served."""
    return _map_experts(lambda weight: quantize(weight.swapaxes(-1, -2), rule), model)


def _map_experts(fn: Any, model: Model) -> Model:
    def one(variable: nnx.Variable) -> nnx.Variable:
        value = variable.get_value()
        if getattr(variable, "axes", None) not in EXPERT_WEIGHTS or value is None or isinstance(value, MXFP4Array):
            return variable
        return variable.replace(fn(value))

    return jax.tree.map(one, model, is_leaf=lambda node: isinstance(node, nnx.Variable))
