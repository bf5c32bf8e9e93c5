"""Grouped matmul: rows sorted by expert times each expert's own weights, and the whole expert MLP on top of it.

Bodies: "reference" (every expert times every row), "xla" (`ragged_dot`), "blocked" (padded blocks, the default: XLA
expands `ragged_dot` to every expert times every row on a GPU and on a TPU), "tpu" (Pallas kernels, `tpu.py`) and "gpu"
(a Pallas kernel for MXFP4 experts). On a TPU the default is "tpu" for bf16 rows where a kernel takes the call: widths
that 128 divides, and experts that are floats or MXFP4 in the decode layout; on a Hopper GPU it is "gpu" for bf16 rows
and MXFP4 experts in the checkpoint's layout.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.dispatch import BY_PLATFORM, on_hopper, resolve
from pallas_kernels.grouped_matmul import blocked, gpu, reference, tpu, xla
from pallas_kernels.grouped_matmul.common import Experts, input_output_widths, sliced
from pallas_kernels.grouped_matmul.routing import Routing, combine_rows, gather_rows, sort_by_expert
from pallas_kernels.mx import fake_quantize_mxfp8

__all__ = ["Routing", "combine_rows", "expert_ffn", "gather_rows", "grouped_matmul", "sort_by_expert"]

Implementation = Literal["reference", "xla", "blocked", "tpu", "gpu"]


def grouped_matmul(
    rows: Float[Array, "M K"],
    experts: Experts,
    group_sizes: Int32[Array, " E"],
    *,
    implementation: Implementation | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "M N"]:
    """Multiply the rows of group e, `rows` [M, K] being sorted by group, by expert e: [M, N] in rows' dtype.

    `experts` is [E, K, N] floats, cast to rows' dtype, or an MXFP4Array of logical shape [E, N, K], which has no
    gradient; products accumulate in float32. Rows past sum(group_sizes) give 0 and may hold NaN, which reaches no
    gradient.
    Raises ValueError if widths or numbers of experts disagree.
    """
    _check("grouped_matmul", rows, group_sizes, {"experts": experts})
    fits_tpu = rows.dtype == jnp.bfloat16 and tpu.why_not_matmul(rows, experts) is None
    body = _body("grouped_matmul", implementation, fits_tpu, gpu.why_not(rows, experts) is None)
    experts = experts if body is tpu.grouped_matmul else sliced(experts)
    return body(rows, experts, group_sizes, precision=precision)


def expert_ffn(
    rows: Float[Array, "M L"],
    w1: Experts,
    w3: Experts,
    w2: Experts,
    group_sizes: Int32[Array, " E"],
    *,
    beta: float,
    linear_beta: float,
    row_weights: Float[Array, " M"] | None = None,
    activations: Literal["bf16", "mxfp8", "mxfp8_hidden"] = "bf16",
    implementation: Implementation | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "M L"]:
    """Run each row through its expert's MLP, w2(situ(w1 row, w3 row)) * row_weight: [M, L] in rows' dtype.

    `w1` and `w3` are [E, L, F] and `w2` [E, F, L] floats, or MXFP4Arrays of logical shapes [E, F, L] and [E, L, F].
    `row_weights` [M], the router's weights, multiply the output in float32. `activations` "bf16" computes in rows' own
    dtype; "mxfp8" rounds to MXFP8 (e4m3, "ceil" scales, straight-through gradient) what the two matmul stages read: the
    rows before w1 and w3, and the hidden after SiTU before w2; "mxfp8_hidden" only the hidden, for rows that were
    rounded before dispatch, once per token. Rows past the last group: as in `grouped_matmul`.
    """
    _check("expert_ffn", rows, group_sizes, {"w1": w1, "w3": w3, "w2": w2})
    width, hidden = input_output_widths(w1)
    if input_output_widths(w3) != (width, hidden) or input_output_widths(w2) != (hidden, width):
        widths = {name: input_output_widths(w) for name, w in (("w1", w1), ("w3", w3), ("w2", w2))}
        raise ValueError(f"expert_ffn: (input, output) widths {widths} do not form one MLP")
    if row_weights is not None and row_weights.shape != rows.shape[:1]:
        raise ValueError(f"expert_ffn: row_weights has shape {row_weights.shape} for {rows.shape[0]} rows")
    if activations not in ("bf16", "mxfp8", "mxfp8_hidden"):
        raise ValueError(f"expert_ffn: activations={activations!r} is unknown; use 'bf16' or 'mxfp8' or 'mxfp8_hidden'")
    rows = fake_quantize_mxfp8(rows) if activations == "mxfp8" else rows
    quantize_hidden = activations != "bf16"
    fits_tpu = rows.dtype == jnp.bfloat16 and tpu.why_not(rows, w1, w3, w2, quantize_hidden) is None
    body = _body("expert_ffn", implementation, fits_tpu, gpu.why_not(rows, w1, w3, w2) is None)
    if body is not tpu.expert_ffn:
        w1, w3, w2 = sliced(w1), sliced(w3), sliced(w2)
    return body(
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


def _body(op: str, implementation: Implementation | None, fits_tpu: bool, fits_gpu: bool) -> Callable[..., Any]:
    bodies = {module.__name__.rpartition(".")[2]: getattr(module, op) for module in (reference, xla, blocked, tpu, gpu)}
    by_platform = dict.fromkeys(BY_PLATFORM, "blocked") | ({"tpu": "tpu"} if fits_tpu else {})
    if fits_gpu and on_hopper():
        by_platform["gpu"] = "gpu"
    return resolve(op, implementation, bodies, by_platform=by_platform)


def _check(op: str, rows: Array, group_sizes: Array, experts: dict[str, Experts]) -> None:
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(f"{op}: group_sizes are {group_sizes.dtype}; they must be integers")
    first, weights = next(iter(experts.items()))
    width, _ = input_output_widths(weights)
    if rows.shape[1] != width:
        raise ValueError(f"{op}: rows are {rows.shape[1]} wide but {first} reads {width}")
    for name, weights in experts.items():
        if group_sizes.shape[0] != weights.shape[0]:
            raise ValueError(f"{op}: {group_sizes.shape[0]} group sizes for {weights.shape[0]} experts of {name}")
