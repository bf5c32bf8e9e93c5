"""Block Attention Residuals in two phases: the bank is read once for a whole block, the live sum joins at each read.

A read mixes the sources of a token over depth (K3: up to eight snapshots and the live sum): scores are
query . rms_normalise(source), weights their softmax, values the raw sources. The queries are weights, known before the
block runs, so phase one (`read_bank`) serves every read of an AttnRes block in one pass over the sealed snapshots, and
phase two (`read`) merges what it saw with the live sum by an online softmax: exact (AttnRes report, section 4).

Bodies: "reference" (all sources at once), "xla" and "tpu". Everything inside is float32, and the backward passes start
from the inputs again.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attn_res import reference, tpu, xla
from pallas_kernels.dispatch import BY_PLATFORM, resolve

__all__ = ["BankRead", "read", "read_bank"]

Implementation = Literal["reference", "xla", "tpu"]


class BankRead(NamedTuple):
    """What one or more reads see of the sealed snapshots: their mix, and the log of the sum of its exponentials."""

    mixed: Float[Array, "*reads_and_tokens D"]  # in the snapshots' dtype
    log_sum_exp: Float[Array, "*reads_and_tokens"]  # float32; -inf where nothing is sealed


def read_bank(
    snapshots: Float[Array, "N *tokens D"],
    count: int | Int[Array, ""],
    queries: Float[Array, "R D"],
    *,
    eps: float,
    implementation: Implementation | None = None,
) -> BankRead:
    """Phase one: R reads of the first `count` of N snapshots.

    `queries` are float32 with the key norm's weight folded in (query * weight). Returns shapes [R, *tokens, D] and
    [R, *tokens].
    """
    bodies = {"reference": reference.read_bank, "xla": xla.read_bank, "tpu": tpu.read_bank}
    fits = tpu.supports(snapshots)
    platforms = {**BY_PLATFORM, "tpu": "tpu"} if fits else BY_PLATFORM
    body = resolve("attn_res.read_bank", implementation, bodies, by_platform=platforms)
    return BankRead(*body(snapshots, jnp.asarray(count, jnp.int32), queries, eps=eps))


def read(
    bank: BankRead,
    live: Float[Array, "*tokens D"],
    has_live: bool | Bool[Array, ""],
    query: Float[Array, " D"],
    *,
    eps: float,
    implementation: Implementation | None = None,
) -> Float[Array, "*tokens D"]:
    """Phase two: the read of `bank` (one read) and of the live sum [*tokens, D] where `has_live`, in live's dtype."""
    body = resolve("attn_res.read", implementation, {"reference": reference.read, "xla": xla.read})
    return body(*bank, live, jnp.asarray(has_live), query, eps=eps)
