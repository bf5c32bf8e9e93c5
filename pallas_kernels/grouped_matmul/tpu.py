"""The TPU bodies: which Pallas kernel runs a call is a matter of static shapes, dtypes and layouts.

    float experts                                  tpu_train, forward and backward
    MXFP4 in a decode layout, few rows each        tpu_decode, the whole MLP in one kernel, no gradient
    MXFP4 in a decode layout otherwise             tpu_prefill, and one product alone; gradients by the blocked body

"Few" is M / E <= DECODE_ROWS: rows that an expert has on average where all of them are touched.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.grouped_matmul import tpu_decode, tpu_prefill, tpu_train
from pallas_kernels.grouped_matmul.common import Experts
from pallas_kernels.grouped_matmul.tpu_matmul import by_platform
from pallas_kernels.mx import MXFP4Array

DECODE_ROWS = 64


def grouped_matmul(rows: Array, experts: Any, group_sizes: Array, *, precision: jax.lax.PrecisionLike) -> Array:
    """See `pallas_kernels.grouped_matmul.grouped_matmul`."""
    if problem := why_not_matmul(rows, experts):
        raise NotImplementedError(f"grouped_matmul's tpu body: {problem}; use implementation='blocked'")
    if isinstance(experts, MXFP4Array):
        return tpu_prefill.grouped_matmul(rows, experts, group_sizes)
    return tpu_train.grouped_matmul(rows, experts, group_sizes, precision=precision)


def expert_ffn(
    rows: Array,
    w1: Any,
    w3: Any,
    w2: Any,
    group_sizes: Array,
    row_weights: Array | None,
    *,
    beta: float,
    linear_beta: float,
    quantize_hidden: bool,
    precision: jax.lax.PrecisionLike,
) -> Array:
    """See `pallas_kernels.grouped_matmul.expert_ffn`; raises NotImplementedError for what no kernel does."""
    if problem := why_not(rows, w1, w3, w2, quantize_hidden):
        raise NotImplementedError(f"expert_ffn's tpu body: {problem}; use implementation='blocked'")
    if not isinstance(w1, MXFP4Array):
        return tpu_train.expert_ffn(
            rows,
            w1,
            w3,
            w2,
            group_sizes,
            row_weights,
            beta=beta,
            linear_beta=linear_beta,
            quantize_hidden=quantize_hidden,
            precision=precision,
        )
    if why_not_decode(rows, w1, w3, w2, quantize_hidden) is None:
        return _decode((beta, linear_beta), rows, (w1, w3, w2), group_sizes, row_weights)
    static = tpu_prefill.Static(beta, linear_beta, quantize_hidden)
    return tpu_prefill.expert_ffn(static, rows, (w1, w3, w2), group_sizes, row_weights)


def why_not_matmul(rows: Array, experts: Experts) -> str | None:
    """What keeps `grouped_matmul` from its kernels, in words; None where nothing does."""
    if isinstance(experts, MXFP4Array):
        return _why_not_layout({"experts": experts}) or tpu_prefill.why_not_matmul(rows, experts)
    return tpu_train.why_not(rows, experts)


def why_not(rows: Array, w1: Any, w3: Any, w2: Any, quantize_hidden: bool) -> str | None:
    """What keeps `expert_ffn` from every kernel, in words; None where one takes it."""
    if not isinstance(w1, MXFP4Array):
        return tpu_train.why_not(rows, w1) or tpu_train.why_not(rows, w2)
    return why_not_decode(rows, w1, w3, w2, quantize_hidden) and why_not_prefill(rows, w1, w3, w2)


def why_not_prefill(rows: Array, w1: Any, w3: Any, w2: Any) -> str | None:
    """What keeps the prefill kernels from a call, in words; None where nothing does."""
    return _why_not_layout({"w1": w1, "w3": w3, "w2": w2}) or tpu_prefill.why_not(rows, w1)


def why_not_decode(rows: Array, w1: Experts, w3: Experts, w2: Experts, quantize_hidden: bool) -> str | None:
    """What keeps the decode kernel from a call, in words; None where nothing does."""
    if problem := _why_not_layout({"w1": w1, "w3": w3, "w2": w2}):
        return problem
    if rows.dtype != jnp.bfloat16 or quantize_hidden:
        kind = "mxfp8" if quantize_hidden else rows.dtype
        return f"its kernel for MXFP4 experts reads bfloat16 rows, not {kind}"
    if rows.shape[0] > DECODE_ROWS * w1.shape[0]:
        return f"{rows.shape[0]} rows are more than {DECODE_ROWS} for each of {w1.shape[0]} experts"
    return tpu_decode.why_not_widths(*w2.shape[1:])


def _layout(weight: Experts) -> str:
    return weight.layout if isinstance(weight, MXFP4Array) else "float"


def _why_not_layout(weights: dict[str, Experts]) -> str | None:
    """All must be in the layout of the first, and that a decode layout."""
    layout = "decode_words" if _layout(next(iter(weights.values()))) == "decode_words" else "decode"
    for name, weight in weights.items():
        if _layout(weight) != layout:
            return f"{name} is not MXFP4 in the {layout} layout (pallas_kernels.mx.decode_layout, once at load)"
    return None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _decode(
    static: tuple[float, float],
    rows: Array,
    weights: tuple[Any, Any, Any],
    group_sizes: Array,
    row_weights: Array | None,
) -> Array:
    beta, linear_beta = static
    row_weights = jnp.ones(rows.shape[0]) if row_weights is None else row_weights
    run = partial(tpu_decode.expert_ffn, beta=beta, linear_beta=linear_beta)
    return by_platform(run, rows, *weights, group_sizes, row_weights.astype(jnp.float32))


def _no_gradient(*_: Any) -> Any:
    raise NotImplementedError("expert_ffn's decode kernel has no gradient; use implementation='blocked'")


_decode.defvjp(_no_gradient, _no_gradient)
