"""Expert MLPs as K3 runs them on one of 16 devices, 56 experts. Unit of work: w1, w3 and w2 of one expert."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.cases.case import Case, Program, shape
from pallas_kernels.grouped_matmul import expert_ffn, grouped_matmul, tpu_train
from pallas_kernels.grouped_matmul.tpu_decode import bodies_for
from pallas_kernels.grouped_matmul.tpu_matmul import SUBTILE, divisor
from pallas_kernels.grouped_matmul.tpu_prefill import STEP
from pallas_kernels.mx import Layout, MXFP4Array, decode_layout

WIDTH, HIDDEN, EXPERTS = 3584, 3072, 56
FEW = 8  # experts of the cases with many rows each


def _mxfp4(*dims: int) -> MXFP4Array:
    """The shapes of a weight [..., out, in] in the checkpoint's layout."""
    *lead, width = dims
    return MXFP4Array(shape(jnp.uint8, *lead, width // 2), shape(jnp.uint8, *lead, width // 32))


def _decode(rows: int, layout: Layout) -> Program:
    """`rows` rows in each of 56 experts, from sorted bf16 rows to weighted bf16 rows."""
    outs = [(HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN)]
    weights = [jax.eval_shape(partial(decode_layout, layout=layout), _mxfp4(EXPERTS, *dims)) for dims in outs]

    def decode(x: Any, w1: Any, w3: Any, w2: Any, sizes: Any, row_weights: Any) -> Any:
        options: dict[str, Any] = {"beta": 4.0, "linear_beta": 25.0, "implementation": "tpu"}
        return expert_ffn(x, w1, w3, w2, sizes, row_weights=row_weights, **options)

    tokens = shape(jnp.bfloat16, rows * EXPERTS, WIDTH)
    return decode, (tokens, *weights, shape(jnp.int32, EXPERTS), shape(jnp.float32, rows * EXPERTS)), ()


def _decode_case(rows: int, layout: Layout = "decode") -> Case:
    """The kernel's traced loops: blocks of an expert in the list of items, then the items of each body."""
    words = layout == "decode_words"
    bodies = bodies_for(rows * EXPERTS, words)
    body = next(i for i, body in enumerate(bodies) if rows <= body.rows and not (words and body.few))
    trips = (1, *(EXPERTS if i == body else 0 for i in range(len(bodies))))
    return Case(f"mxfp4_{layout}_r{rows}", EXPERTS, partial(_decode, rows, layout), trips)


def _prefill(rows: int, layout: Layout, activations: str) -> Program:
    """As `_decode`, with 8 experts. MXFP8 rows were rounded before dispatch, once per token."""
    outs = [(HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN)]
    weights = [jax.eval_shape(partial(decode_layout, layout=layout), _mxfp4(FEW, *dims)) for dims in outs]

    def prefill(x: Any, w1: Any, w3: Any, w2: Any, sizes: Any, row_weights: Any) -> Any:
        options: dict[str, Any] = {"implementation": "tpu", "activations": activations}
        return expert_ffn(x, w1, w3, w2, sizes, beta=4.0, linear_beta=25.0, row_weights=row_weights, **options)

    tokens = shape(jnp.bfloat16, rows * FEW, WIDTH)
    return prefill, (tokens, *weights, shape(jnp.int32, FEW), shape(jnp.float32, rows * FEW)), ()


def _prefill_case(rows: int, layout: Layout = "decode", activations: str = "bf16") -> Case:
    """Traced loops of both kernels: subtiles of the tail; more subtiles where a tile has several; both ways; items."""
    several = () if rows == SUBTILE else (rows // SUBTILE - 1,)
    steps = [columns // divisor(columns, most) for columns, most in ((HIDDEN, STEP // 2), (WIDTH, STEP))]
    trips = [(0, *several, 1, 0, 0, FEW * n) for n in steps]
    name = f"mxfp4_prefill_r{rows}" + "_mxfp8" * (activations != "bf16") + layout.removeprefix("decode")
    return Case(name, FEW, partial(_prefill, rows, layout, activations), (*trips[0], *trips[1]))


def _float_matmul(rows: int) -> Program:
    """One bf16 matmul of w1's shape, `rows` rows in each of 8 experts."""
    shapes = shape(jnp.bfloat16, rows * FEW, WIDTH), shape(jnp.bfloat16, FEW, WIDTH, HIDDEN), shape(jnp.int32, FEW)
    return partial(grouped_matmul, implementation="tpu"), shapes, ()


def _float_gradients(rows: int) -> Program:
    """Both gradients of the same matmul."""

    def gradients(x: Any, w: Any, sizes: Any, g: Any) -> Any:
        return jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, implementation="tpu"), x, w)[1](g)

    _, shapes, _ = _float_matmul(rows)
    return gradients, (*shapes, shape(jnp.bfloat16, rows * FEW, HIDDEN)), ()


# Traced loops: subtiles of the tail, subtiles of an item, steps of all items.
_FORWARD = (0, 512 // SUBTILE, FEW * HIDDEN // tpu_train.WIDTH)
_D_ROWS = (0, 512 // tpu_train.TRANSPOSED, FEW * WIDTH // tpu_train.TRANSPOSED)
_D_WEIGHTS = (512 // tpu_train.DEEP, FEW * 4)

CASES = (
    *(_decode_case(rows) for rows in (1, 2, 4, 16, 64)),
    *(_decode_case(rows, "decode_words") for rows in (2, 16)),  # of v6e and v5p
    *(_prefill_case(rows, activations=a) for a in ("bf16", "mxfp8_hidden") for rows in (128, 512)),
    _prefill_case(128, "decode_words"),
    Case("gmm_bf16_r512", FEW, partial(_float_matmul, 512), _FORWARD),
    Case("gmm_bf16_r512_bwd", FEW, partial(_float_gradients, 512), (*_D_ROWS, *_D_WEIGHTS)),
)
