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


def mlp(rows: int, experts: int, layout: Layout = "decode", activations: str = "bf16") -> Program:
    """`rows` rows in each expert, from sorted bf16 rows to weighted ones; MXFP8 rows were rounded before dispatch."""
    outs = [(HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN)]
    weights = [jax.eval_shape(partial(decode_layout, layout=layout), _mxfp4(experts, *dims)) for dims in outs]

    def run(x: Any, w1: Any, w3: Any, w2: Any, sizes: Any, row_weights: Any) -> Any:
        options: dict[str, Any] = {"implementation": "tpu", "activations": activations}
        return expert_ffn(x, w1, w3, w2, sizes, beta=4.0, linear_beta=25.0, row_weights=row_weights, **options)

    tokens = shape(jnp.bfloat16, rows * experts, WIDTH)
    return run, (tokens, *weights, shape(jnp.int32, experts), shape(jnp.float32, rows * experts)), ()


def _decode_case(rows: int, layout: Layout = "decode") -> Case:
    """The kernel's traced loops: blocks of an expert in the list of items, then the items of each body."""
    words = layout == "decode_words"
    bodies = bodies_for(rows * EXPERTS, words)
    body = next(i for i, body in enumerate(bodies) if rows <= body.rows and not (words and body.few))
    trips = (1, *(EXPERTS if i == body else 0 for i in range(len(bodies))))
    return Case(f"mxfp4_{layout}_r{rows}", EXPERTS, partial(mlp, rows, EXPERTS, layout), trips)


def _prefill_case(rows: int, layout: Layout = "decode", activations: str = "bf16", *, narrow: bool = True) -> Case:
    """The trips of both kernels; `narrow`: all experts' scales fit into the exponents of float8."""
    steps = [columns // divisor(columns, most) for columns, most in ((HIDDEN, STEP // 2), (WIDTH, STEP))]
    trips = [trip for n in steps for trip in _expanding(rows, n, narrow)]
    kind = "_mxfp8" * (activations != "bf16") + "_wide" * (not narrow) + layout.removeprefix("decode")
    return Case(f"mxfp4_prefill_r{rows}{kind}", FEW, partial(mlp, rows, FEW, layout, activations), tuple(trips))


def _expanding(rows: int, steps: int, narrow: bool) -> tuple[int, ...]:
    """Traced loops: subtiles of the tail; more subtiles where a tile has several; narrow; subtiles; wide; all steps."""
    subtiles = rows // SUBTILE
    more = () if subtiles == 1 else ((subtiles - 1) * narrow,)
    return (0, *more, int(narrow), subtiles * (not narrow), int(not narrow), FEW * steps)


def _mxfp4_matmul(rows: int) -> Program:
    """One matmul of w1's shape, `rows` rows in each of 8 experts."""
    weight = jax.eval_shape(decode_layout, _mxfp4(FEW, HIDDEN, WIDTH))
    return partial(grouped_matmul, implementation="tpu"), (_tokens(rows), weight, shape(jnp.int32, FEW)), ()


def _tokens(rows: int) -> Any:
    return shape(jnp.bfloat16, rows * FEW, WIDTH)


def _float_matmul(rows: int) -> Program:
    """One bf16 matmul of w1's shape, `rows` rows in each of 8 experts."""
    shapes = _tokens(rows), shape(jnp.bfloat16, FEW, WIDTH, HIDDEN), shape(jnp.int32, FEW)
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
    _prefill_case(128, narrow=False),
    Case("gmm_mxfp4_r512", FEW, partial(_mxfp4_matmul, 512), _expanding(512, 1, narrow=True)),
    Case("gmm_bf16_r512", FEW, partial(_float_matmul, 512), _FORWARD),
    Case("gmm_bf16_r512_bwd", FEW, partial(_float_gradients, 512), (*_D_ROWS, *_D_WEIGHTS)),
)
