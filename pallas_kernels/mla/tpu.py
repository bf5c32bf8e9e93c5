"""The TPU bodies: the Pallas kernels in programs for a TPU, their interpretation elsewhere (slow, for tests)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from pallas_kernels.mla import tpu_attention, tpu_decode
from pallas_kernels.mla.pages import Pages
from pallas_kernels.mla.partial import Attended, Mask, merge
from pallas_kernels.mla.reference import expand
from pallas_kernels.mla.tpu_attention import BLOCK, LANES, as_ids
from pallas_kernels.mla.xla import key_tiles, where_seen

KEYS = 4096  # of a cache that are expanded at one time

Saved = tuple[Array, Array, Array, Mask, Array, Array]


def takes(dtype: Any, width: int, value: int) -> bool:
    """Whether the attention kernels take such queries: bfloat16, lanes filled by halves (keys) and whole (values)."""
    return dtype == jnp.bfloat16 and width % (LANES // 2) == 0 and value % LANES == 0


def _check(op: str, q: Array, value: int) -> None:
    if not takes(q.dtype, q.shape[-1], value):
        raise NotImplementedError(
            f"{op}'s tpu body is for bfloat16, keys of a multiple of {LANES // 2} and values of a multiple of {LANES}, "
            f"not {q.dtype}, {q.shape[-1]} and {value}"
        )


def _block(length: int) -> int:
    return min(BLOCK, -(-length // LANES) * LANES)


def _pad(x: Array, rest: int, fill: int = 0) -> Array:
    """`rest` more tokens (axis 1)."""
    return jnp.pad(x, [(0, 0), (0, rest)] + [(0, 0)] * (x.ndim - 2), constant_values=fill) if rest else x


def attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H V"],
    mask: Mask,
    scale: float,
    dtype: jnp.dtype,
) -> Attended:
    """As `reference.attention`; raises NotImplementedError for what the kernels do not take."""
    _check("attention", q, v.shape[-1])
    length = q.shape[1]
    block = _block(max(length, k.shape[1]))
    mask = mask.pad(q, k, block)
    q, k, v = (_pad(x, -x.shape[1] % block).swapaxes(1, 2) for x in (q, k, v))
    output, log_sum_exp, max_logit = _attention(scale, block, dtype, q, k, v, mask)
    return Attended(output.swapaxes(1, 2)[:, :length], log_sum_exp.swapaxes(1, 2)[:, :length], max_logit)


def _no_segment(ids: Array) -> Array:
    """Padding (-1) as -2, on one of two sides: so it equals nothing there."""
    return jnp.where(ids < 0, -2, ids)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attention(
    scale: float, block: int, dtype: jnp.dtype, q: Array, k: Array, v: Array, mask: Mask
) -> tuple[Array, Array, Array]:
    def run(q: Array, k: Array, v: Array, mask: Mask, *, interpret: bool) -> tuple[Array, Array, Array]:
        ids = None if mask.ids is None else as_ids(_no_segment(mask.ids[0]), mask.ids[1])
        options: Any = {"block": block, "offset": mask.start, "dtype": dtype, "interpret": interpret}
        return tpu_attention.forward(q, k, v, ids, scale, **options)

    return _by_platform(run, q, k, v, mask)


def _forward(
    scale: float, block: int, dtype: jnp.dtype, q: Array, k: Array, v: Array, mask: Mask
) -> tuple[tuple[Array, Array, Array], Saved]:
    output, log_sum_exp, max_logit = _attention(scale, block, dtype, q, k, v, mask)
    return (output, log_sum_exp, max_logit), (q, k, v, mask, output, log_sum_exp)


def _backward(
    scale: float, block: int, _dtype: jnp.dtype, saved: Saved, cotangents: tuple[Array, Array, Array]
) -> tuple[Array, Array, Array, None]:
    q, k, v, mask, output, log_sum_exp = saved
    d_output, d_log_sum_exp = cotangents[0].astype(q.dtype), cotangents[1]
    correction = jnp.sum(d_output.astype(jnp.float32) * output.astype(jnp.float32), axis=-1) - d_log_sum_exp

    def run(q: Array, k: Array, v: Array, mask: Mask, *rows: Array, interpret: bool) -> Any:
        ids = None if mask.ids is None else as_ids(mask.ids[1], _no_segment(mask.ids[0]))
        options: Any = {"block": block, "offset": mask.start, "interpret": interpret}
        return tpu_attention.backward(q, k, v, ids, *rows, scale=scale, **options)

    gradients = _by_platform(run, q, k, v, mask, log_sum_exp, correction, d_output)
    return (*gradients, None)


_attention.defvjp(_forward, _backward)


def chunk_attention(
    q: Float[Array, "B T H K"],
    latents: Array | Pages,
    k_up: Float[Array, "R H N"],
    v_up: Float[Array, "R H V"],
    positions: Int[Array, "B T"],
    key_positions: Int[Array, "B S"] | None,
    page_table: Int[Array, "B P"] | None,
    scale: float,
) -> Attended:
    """As `reference.chunk_attention`: expand some keys, attend to them, merge; and so on up to the last position."""
    _check("chunk_attention", q, v_up.shape[-1])
    batch, length, heads, _ = q.shape
    block = _block(length)
    rest = -length % block
    q = _pad(q, rest).swapaxes(1, 2)
    count, size, fetch = key_tiles(latents, page_table, key_positions, batch, KEYS, q.dtype)
    unused = -size % block

    def run(q: Array, k: Array, v: Array, where: Array, at: Array, *, interpret: bool) -> tuple[Array, Array, Array]:
        ids = as_ids(at, jnp.where(where < 0, jnp.iinfo(jnp.int32).max, where))
        options: Any = {"block": block, "offset": None, "dtype": jnp.float32, "interpret": interpret}
        return tpu_attention.forward(q, k, v, ids, scale, **options)

    def keys(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        tokens, where = fetch(number)
        k, v = (_pad(x, unused).swapaxes(1, 2) for x in expand(tokens, k_up, v_up))
        output, log_sum_exp, top = _by_platform(run, q, k, v, _pad(where, unused, -1), at)
        both = merge(jnp.stack([carry[0], output]), jnp.stack([carry[1], log_sum_exp]))
        return (*both, jnp.maximum(carry[2], top))

    at = _pad(positions, rest, -1)
    tiles: Array | int = count
    if key_positions is None:  # keys lie in order: the tiles after the last query's position hold nothing to see
        tiles = jnp.minimum(count, (jnp.max(positions) + size) // size)
    else:
        keys = where_seen(keys, fetch, positions)
    shape = (batch, heads, q.shape[2])
    nothing = -jnp.inf
    empty = jnp.zeros((*shape, v_up.shape[-1])), jnp.full(shape, nothing), jnp.full((batch, heads), nothing)
    output, log_sum_exp, max_logit = lax.fori_loop(0, tiles, keys, empty)
    output, log_sum_exp = (x.swapaxes(1, 2)[:, :length] for x in (output, log_sum_exp))
    return Attended(output.astype(q.dtype), log_sum_exp, max_logit)


def paged_decode(
    q: Float[Array, "S H C"],
    new: Float[Array, "S C"],
    pages: Pages,
    page_table: Int[Array, "S P"],
    lengths: Int[Array, "S"],
    scale: float,
) -> tuple[Float[Array, "S H R"], Float[Array, "S H"], Pages]:
    """As `reference.paged_decode`; raises NotImplementedError for what the kernel does not take."""
    tpu_decode.check(pages, q.dtype, page_table.shape[1])

    def run(*arrays: Any, interpret: bool) -> tuple[Array, Array, Pages]:
        q, new, pages, page_table, lengths = arrays
        return tpu_decode.paged_decode(q, new, pages, page_table, lengths, scale, interpret=interpret)

    rows = tpu_decode.ENTRIES // page_table.shape[1]
    parts = []
    for span in (slice(at, at + rows) for at in range(0, len(q), rows)):
        *part, pages = _by_platform(run, q[span], new[span], pages, page_table[span], lengths[span])
        parts.append(part)
    output, log_sum_exp = (jnp.concatenate(x) for x in zip(*parts, strict=True))
    return output, log_sum_exp, pages


def _by_platform(run: Callable[..., Any], *args: Any) -> Any:
    """`run` by the platform that the program is lowered for, which need not be the one it is traced on."""
    return lax.platform_dependent(*args, tpu=partial(run, interpret=False), default=partial(run, interpret=True))
