"""AttnRes as K3 runs it, in bf16. Unit of work: one token.

`bank`: eight snapshots with the 24 reads of twelve layers. `read`: one of those, with the sum before and norm after it.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.device_cases.case import DeviceCase, Work, jax_work
from pallas_kernels.attn_res import BankRead, read_bank, read_norm

SNAPSHOTS, READS, WIDTH, EPS = 8, 24, 7168, 1e-5
TOKENS = 4096


def _normal(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def _work(function: Any, *arguments: Array, backward: bool) -> Work:
    """`function` of the arguments; with `backward`, and the gradients of the sum of what it returns."""

    def loss(arguments: tuple[Array, ...]) -> Array:
        return sum(jnp.sum(x.astype(jnp.float32)) for x in function(*arguments))

    def run(carry: tuple[()], *arguments: Array) -> tuple[tuple[()], Any]:
        return carry, jax.value_and_grad(loss)(arguments) if backward else function(*arguments)

    return jax_work(run, (), *arguments)


def bank(tokens: int, *, backward: bool) -> Work:
    """All reads of a block."""
    snapshots, queries = _normal(0, SNAPSHOTS, tokens, WIDTH), _normal(1, READS, WIDTH, dtype=jnp.float32) / 50
    return _work(lambda *x: read_bank(x[0], SNAPSHOTS, x[1], eps=EPS), snapshots, queries, backward=backward)


def read(tokens: int, *, backward: bool) -> Work:
    """Sum, read and norm of one sub-layer."""
    mixed, live, update = (_normal(i, tokens, WIDTH) for i in range(3))
    query, weight = _normal(3, WIDTH, dtype=jnp.float32) / 50, jnp.ones(WIDTH, jnp.bfloat16)
    log_sum_exp = jnp.zeros(tokens)

    def run(mixed: Array, live: Array, update: Array, query: Array, weight: Array) -> tuple[Array, Array]:
        bank = BankRead(mixed, log_sum_exp)
        return read_norm(bank, live, True, query, weight, update=update, eps=EPS, norm_eps=EPS)

    return _work(run, mixed, live, update, query, weight, backward=backward)


CASES = tuple(
    DeviceCase(f"attn_res_{name}_{suffix}_t{TOKENS}", TOKENS, partial(build, TOKENS, backward=suffix == "fwd_bwd"))
    for name, build in (("bank", bank), ("read", read))
    for suffix in ("fwd", "fwd_bwd")
)
