"""MLA as K3 runs it, in bf16. Units of work: training, one pair of a query and a key that it sees, in one head; decode,
one cached token.

The peer is cuDNN's attention through `jax.nn`. Its keys and values have one width: the values are padded to 192.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.device_cases.case import DeviceCase, Work, jax_work
from pallas_kernels.mla import Pages, attention, paged_decode

WIDTH, VALUE, RANK, EXTRA = 192, 128, 512, 64
PAGE = 128


def _normal(seed: int, *shape: int) -> Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def _ours(q: Array, k: Array, v: Array) -> Array:
    return attention(q, k, v).output


def _cudnn(q: Array, k: Array, v: Array) -> Array:
    v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, WIDTH - VALUE)))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")[..., :VALUE]


def training(body: Any, length: int, heads: int, *, backward: bool) -> Work:
    """One causal sequence; with `backward`, the gradients of the outputs' sum."""
    tokens = (_normal(i, 1, length, heads, width) for i, width in enumerate((WIDTH, WIDTH, VALUE)))

    def loss(tokens: tuple[Array, ...]) -> Array:
        return jnp.sum(body(*tokens).astype(jnp.float32))

    def run(carry: tuple[()], *tokens: Array) -> tuple[tuple[()], Any]:
        return carry, jax.value_and_grad(loss)(tokens) if backward else body(*tokens)

    return jax_work(run, (), *tokens)


def decode(rows: int, length: int, heads: int) -> Work:
    """One token of every sequence, whose pages are full but for it."""
    count = length // PAGE
    pages = Pages.zeros(rows * count, PAGE, RANK, EXTRA)
    table, lengths = jnp.arange(rows * count, dtype=jnp.int32).reshape(rows, count), jnp.full(rows, length, jnp.int32)

    def run(pages: Pages, q: Array, new: Array) -> tuple[Pages, Array]:
        output, _, pages = paged_decode(q, new, pages, table, lengths, scale=WIDTH**-0.5)
        return pages, output

    return jax_work(run, pages, _normal(0, rows, heads, RANK + EXTRA), _normal(1, rows, RANK + EXTRA))


def _training(length: int, heads: int) -> list[DeviceCase]:
    units = heads * length * (length + 1) // 2
    return [
        DeviceCase(
            f"mla_attention_{name}_h{heads}_t{length}",
            units,
            partial(training, _ours, length, heads, backward=backward),
            {"nvidia-cudnn-cu13": partial(training, _cudnn, length, heads, backward=backward)},
        )
        for name, backward in (("fwd", False), ("fwd_bwd", True))
    ]


CASES = (
    *_training(4096, 96),
    DeviceCase("mla_decode_b128_s4k_h96", 128 * 4096, partial(decode, 128, 4096, 96)),
)
