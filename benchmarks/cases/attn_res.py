"""AttnRes as K3 runs it. Unit of work: one token.

`bank`: eight snapshots, the 24 reads of twelve layers. `read`: what a sub-layer reads of a bank merged with the live
sum after the mixer's update, and the norm.
"""

from functools import partial

import jax
import jax.numpy as jnp

from benchmarks.cases.case import Case, Program, shape
from pallas_kernels.attn_res import BankRead, read_bank, read_norm

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


def _read(tokens: int) -> Program:
    def read(mixed, log_sum_exp, live, update, query, weight):  # type: ignore[no-untyped-def]
        bank, options = BankRead(mixed, log_sum_exp), {"eps": EPS, "norm_eps": EPS, "implementation": "tpu"}
        return read_norm(bank, live, True, query, weight, update=update, **options)

    wide, row = shape(jnp.bfloat16, tokens, WIDTH), shape(jnp.bfloat16, WIDTH)
    return read, (wide, shape(jnp.float32, tokens), wide, wide, shape(jnp.float32, WIDTH), row), ()


def _read_backward(tokens: int) -> Program:
    """The backward pass alone: it starts from the sum, which is not made again where there is no update."""

    def backward(mixed, log_sum_exp, live, query, weight, *cotangents):  # type: ignore[no-untyped-def]
        options = {"eps": EPS, "norm_eps": EPS, "implementation": "tpu"}
        read = lambda m, lse, x, q, w: read_norm(BankRead(m, lse), x, True, q, w, **options)  # noqa: E731
        _, vjp = jax.vjp(read, mixed, log_sum_exp, live, query, weight)
        return vjp(cotangents)

    wide, row = shape(jnp.bfloat16, tokens, WIDTH), shape(jnp.bfloat16, WIDTH)
    return backward, (wide, shape(jnp.float32, tokens), wide, shape(jnp.float32, WIDTH), row, wide, wide), ()


CASES = (
    Case("attn_res_bank_t1024", 1024, partial(_forward, 1024)),
    Case("attn_res_bank_bwd_t1024", 1024, partial(_backward, 1024)),
    Case("attn_res_read_t1024", 1024, partial(_read, 1024)),
    Case("attn_res_read_bwd_t1024", 1024, partial(_read_backward, 1024)),
)
