"""Attention over a part of the keys, and the exact merge of such parts."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

LOWEST = -1e30  # stands for the maximum of no scores: finite, so that differences of maxima are never NaN


class Attended(NamedTuple):
    """What attention over some of the keys gives; a query that saw none has output 0 and -inf in the rest.

    `log_sum_exp` is of the scaled scores, `max_logit` the largest of them over all queries of a row and head.
    """

    output: Float[Array, "B T H V"]
    log_sum_exp: Float[Array, "B T H"]
    max_logit: Float[Array, "B H"]


class Mask(NamedTuple):
    """What hides keys: query t sees key s where s <= t + offset and both have the same segment id, which is not -1.

    `ids` are the queries' and the keys'; without them there is one segment. No offset is one of zero.
    """

    ids: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None
    offset: Int[Array, ""] | None

    @property
    def start(self) -> int | Int[Array, ""]:
        """The offset; an int where the program knows it."""
        return 0 if self.offset is None else self.offset

    def pad(self, q: Float[Array, "B T H K"], k: Float[Array, "B S H K"], tile: int) -> "Mask":
        """For queries and keys filled up to whole tiles: an added query sees nothing, and nothing sees an added key."""
        ids = self.ids
        if ids is None:
            if q.shape[1] % tile == 0 and k.shape[1] % tile == 0:
                return self
            ids = jnp.zeros(q.shape[:2], jnp.int32), jnp.zeros(k.shape[:2], jnp.int32)
        queries, keys = (jnp.pad(x, ((0, 0), (0, -x.shape[1] % tile)), constant_values=-1) for x in ids)
        return Mask((queries, keys), self.offset)


class Running(NamedTuple):
    """The online softmax's state: weighted sum, sum of weights and maximum so far, float32."""

    values: Float[Array, "*N V"]
    total: Float[Array, "*N"]
    top: Float[Array, "*N"]


def merge(
    outputs: Float[Array, "P *N V"], log_sum_exps: Float[Array, "P *N"]
) -> tuple[Float[Array, "*N V"], Float[Array, "*N"]]:
    """Attention over all keys from that over P disjoint parts of them; exact, in any order and any number of parts.

    A part without keys has a log_sum_exp of -inf; its output does not count, whatever it holds. Differentiable in both.
    """
    wide = jnp.promote_types(jnp.float32, log_sum_exps.dtype)
    log_sum_exps = log_sum_exps.astype(wide)
    empty = log_sum_exps == -jnp.inf
    safe = jnp.where(empty, LOWEST, log_sum_exps)
    top = jnp.max(safe, axis=0)
    weights = jnp.where(empty, 0.0, jnp.exp(safe - top))
    total = jnp.sum(weights, axis=0)
    none = total == 0
    parts = jnp.where(empty[..., None], 0.0, outputs.astype(wide))
    output = jnp.sum(weights[..., None] * parts, axis=0) / jnp.where(none, 1.0, total)[..., None]
    log_sum_exp = jnp.where(none, -jnp.inf, top + jnp.log(jnp.where(none, 1.0, total)))
    return output.astype(outputs.dtype), log_sum_exp


def start(shape: tuple[int, ...], width: int, dtype: jnp.dtype) -> Running:
    """Of no keys."""
    return Running(jnp.zeros((*shape, width), dtype), jnp.zeros(shape, dtype), jnp.full(shape, LOWEST, dtype))


def extend(
    running: Running, scores: Array, visible: Array, values: Array, spec: str, precision: lax.Precision | None
) -> Running:
    """Add keys: `scores` [*N, S], of which only the `visible` count, and their `values` in the einsum `spec`."""
    wide = scores.dtype
    top = jnp.maximum(running.top, jnp.max(scores, axis=-1, where=visible, initial=LOWEST))
    weights = jnp.where(visible, jnp.exp(scores - top[..., None]), 0.0)
    fade = jnp.exp(running.top - top)
    added = jnp.einsum(spec, weights.astype(values.dtype), values, precision=precision, preferred_element_type=wide)
    total = running.total * fade + jnp.sum(weights, axis=-1)
    return Running(running.values * fade[..., None] + added, total, top)


def finish(running: Running) -> tuple[Array, Array]:
    """Output and log_sum_exp."""
    none = running.total == 0
    total = jnp.where(none, 1.0, running.total)
    return running.values / total[..., None], jnp.where(none, -jnp.inf, running.top + jnp.log(total))
