"""Expert MLPs as K3 runs them on one of 16 devices: 56 experts in MXFP4. Unit of work: w1, w3 and w2 of one expert.

The peer is XLA's batched matmul in bf16 on the dequantised weights, four times the bytes, with equal groups. A wrong
result is not timed.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.device_cases.case import DeviceCase, Work, jax_work
from pallas_kernels.grouped_matmul import expert_ffn
from pallas_kernels.mx import MXFP4Array, dequantize
from pallas_kernels.situ import situ_glu

WIDTH, HIDDEN, EXPERTS = 3584, 3072, 56
MAX_ERROR = 0.02  # bfloat16 rounding of the hidden and the output gives 0.004
SITU: dict[str, Any] = {"beta": 4.0, "linear_beta": 25.0}


def _weight(seed: int, out: int, width: int) -> MXFP4Array:
    codes = jax.random.bits(jax.random.key(seed), (EXPERTS, out, width // 2), jnp.uint8)
    return MXFP4Array(codes, jnp.full((EXPERTS, out, width // 32), 118, jnp.uint8))


def _rows(rows: int) -> Array:
    return jax.random.normal(jax.random.key(0), (rows * EXPERTS, WIDTH), jnp.bfloat16)


def ours(rows: int) -> Work:
    """`rows` rows for each expert, MXFP4 weights."""
    weights = [_weight(1, HIDDEN, WIDTH), _weight(2, HIDDEN, WIDTH), _weight(3, WIDTH, HIDDEN)]
    sizes = jnp.full(EXPERTS, rows, jnp.int32)

    def run(carry: tuple[()], x: Array, w1: Any, w3: Any, w2: Any, sizes: Array) -> tuple[tuple[()], Array]:
        return carry, expert_ffn(x, w1, w3, w2, sizes, **SITU)

    check_first_expert(jax.jit(run)((), _rows(rows), *weights, sizes)[1][:rows], _rows(rows)[:rows], weights)
    return jax_work(run, (), _rows(rows), *weights, sizes)


def check_first_expert(outputs: Array, rows: Array, weights: list[MXFP4Array]) -> None:
    """Raise RuntimeError unless outputs [m, L] are those of the first expert: a wrong layout would be as fast."""
    w1, w3, w2 = (np.asarray(dequantize(jax.tree.map(lambda leaf: leaf[0], w))) for w in weights)
    x = np.asarray(rows, np.float32)
    want = np.asarray(situ_glu(x @ w1.T, x @ w3.T, **SITU)) @ w2.T
    error = np.linalg.norm(np.asarray(outputs, np.float32) - want) / np.linalg.norm(want)
    if not error < MAX_ERROR:
        raise RuntimeError(f"expert_ffn is off by {error:.1e} of its result, more than {MAX_ERROR}: nothing is timed")


def dense(rows: int) -> Work:
    """The same MLPs in bf16, every expert's rows side by side."""
    shapes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    weights = [0.02 * jax.random.normal(jax.random.key(i), (EXPERTS, *s), jnp.bfloat16) for i, s in enumerate(shapes)]

    def run(carry: tuple[()], x: Array, w1: Array, w3: Array, w2: Array) -> tuple[tuple[()], Array]:
        x = x.reshape(EXPERTS, rows, WIDTH)
        return carry, situ_glu(x @ w1, x @ w3, **SITU) @ w2

    return jax_work(run, (), _rows(rows), *weights)


CASES = tuple(
    DeviceCase(f"mxfp4_{phase}_r{rows}", EXPERTS, partial(ours, rows), {"jax": partial(dense, rows)})
    for phase, rows in (("decode", 2), ("decode", 16), ("prefill", 128), ("prefill", 512))
)
