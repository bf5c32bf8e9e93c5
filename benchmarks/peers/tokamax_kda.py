"""tokamax's `kimi_delta_attention`, its Pallas kernels for TPU, with everything inside that ours has inside.

It takes heads first, so its arguments lie that way here: what it then copies for its two kernels is its own choice.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.cases.case import Case, Program, shape, traced_on

DISTRIBUTIONS = ("tokamax", "jax", "libtpu")

WIDTH = 128


@contextlib.contextmanager
def lowering(device: Any) -> Iterator[None]:
    """Tokamax asks for the device it runs on when it is traced."""
    from tokamax import config

    with config.cross_compile(True), traced_on(device):
        yield


def _forward(heads: int, length: int) -> Program:
    """As `benchmarks.cases.kda`: bf16 inputs, raw gate, q and k normalised inside, float32 state in and out."""
    from tokamax.ops import kimi_delta_attention

    def forward(q, k, v, gate, beta, a_log, dt_bias, state):  # type: ignore[no-untyped-def]
        return kimi_delta_attention(
            q,
            k,
            v,
            gate,
            beta,
            a_log=a_log,
            delta_time_bias=dt_bias,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm=True,
            use_gate_in_kernel=True,
            lower_bound=-5.0,
            implementation="mosaic",
        )

    tokens = [shape(jnp.bfloat16, heads, 1, length, WIDTH)] * 4
    parameters = shape(jnp.float32, heads), shape(jnp.float32, heads * WIDTH)
    beta, state = shape(jnp.float32, heads, 1, length), shape(jnp.float32, 1, 1, heads, WIDTH, WIDTH)
    return forward, (*tokens, beta, *parameters, state), ()


def _forward_and_backward(heads: int, length: int) -> Program:
    """The outputs, and the gradients of all arguments for given cotangents."""
    forward, arguments, _ = _forward(heads, length)

    def both(doutput, dstate, *arguments):  # type: ignore[no-untyped-def]
        results, pull = jax.vjp(forward, *arguments)
        return results, pull((doutput, dstate))

    return both, (arguments[2], arguments[-1], *arguments), ()


# With 96 heads XLA copies arguments in loops whose trips the schedule does not show.
CASES = (
    *(Case(f"kda_fwd_h{heads}_t4096", heads * 4096, partial(_forward, heads, 4096)) for heads in (8, 16)),
    Case("kda_fwd_bwd_h8_t4096", 8 * 4096, partial(_forward_and_backward, 8, 4096)),
)
