"""An AttnRes bank as K3 reads it: eight snapshots, the 24 reads of twelve layers. Unit of work: one token."""

from functools import partial

import jax
import jax.numpy as jnp

from benchmarks.cases.case import Case, Program, shape
from pallas_kernels.attn_res import read_bank

SNAPSHOTS, READS, WIDTH, EPS = 8, 24, 7168, 1e-5


def _arguments(tokens: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    snapshots = shape(jnp.bfloat16, SNAPSHOTS, tokens, WIDTH)
    return snapshots, shape(jnp.int32), shape(jnp.float32, READS, WIDTH)


def _forward(tokens: int) -> Program:
    def forward(snapshots, count, queries):  # type: ignore[no-untyped-def]
        return read_bank(snapshots, count, queries, eps=EPS, implementation="tpu")

    return forward, _arguments(tokens), ()


def _backward(tokens: int) -> Program:
    """The backward pass alone: it starts from the inputs."""

    def backward(snapshots, count, queries, d_mixed, d_log_sum_exp):  # type: ignore[no-untyped-def]
        read = partial(read_bank, eps=EPS, implementation="tpu")
        _, vjp = jax.vjp(lambda s, q: tuple(read(s, count, q)), snapshots, queries)
        return vjp((d_mixed, d_log_sum_exp))

    cotangents = shape(jnp.bfloat16, READS, tokens, WIDTH), shape(jnp.float32, READS, tokens)
    return backward, (*_arguments(tokens), *cotangents), ()


CASES = (
    Case("attn_res_bank_t1024", 1024, partial(_forward, 1024)),
    Case("attn_res_bank_bwd_t1024", 1024, partial(_backward, 1024)),
)
