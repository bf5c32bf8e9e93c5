"""Block Attention Residuals in two phases: the bank is read once for a whole block, the live sum joins at each read.

A read mixes the sources of a token over depth (K3: up to eight snapshots and the live sum): scores are
query . rms_normalise(source), weights their softmax, values the raw sources. The queries are weights, known before the
block runs, so phase one (`read_bank`) serves every read of an AttnRes block in one pass over the sealed snapshots, and
phase two (`read`) merges what it saw with the live sum by an online softmax: exact (AttnRes report, section 4).
`read_norm` is phase two as a sub-layer needs it, with the sum before it and the norm after it.

Bodies: "reference" (all sources at once), "xla" and "tpu". Everything inside is float32, and the backward passes start
from the inputs again.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attn_res import reference, tpu, tpu_read, xla
from pallas_kernels.dispatch import BY_PLATFORM, resolve

__all__ = ["BankRead", "read", "read_bank", "read_norm"]

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
    body = resolve("attn_res.read_bank", implementation, bodies, by_platform=_by_platform(tpu.supports(snapshots)))
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


def read_norm(
    bank: BankRead,
    live: Float[Array, "*tokens D"],
    has_live: bool | Bool[Array, ""],
    query: Float[Array, " D"],
    weight: Float[Array, " D"],
    *,
    update: Float[Array, "*tokens D"] | None = None,
    eps: float,
    norm_eps: float,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "*tokens D"], Float[Array, "*tokens D"]]:
    """live + update (the sum; without an update live itself), and the RMS norm of a read of it.

    The read as `read` gives it, but unrounded; then weight * (its norm rounded to live's dtype, which the weight has).
    `eps` is that of the read's key norm, `norm_eps` the following norm's. Use the sum that is returned from here on, so
    that its cotangent and the read's meet in one pass. All but `has_live` differentiate.
    """
    bodies: dict[str, Callable[..., tuple[Array, Array]]] = {
        "reference": reference.read_norm,
        "xla": xla.read_norm,
        "tpu": tpu_read.read_norm,
    }
    platforms = _by_platform(tpu_read.supports(live))
    body = resolve("attn_res.read_norm", implementation, bodies, by_platform=platforms)
    return body(
        *bank, live, update, jnp.asarray(has_live), query, weight.astype(live.dtype), eps=eps, norm_eps=norm_eps
    )


def _by_platform(fits: bool) -> dict[str, str]:
    """The TPU kernels are for widths that fill lanes; else the portable body runs there."""
    return {**BY_PLATFORM, "tpu": "tpu" if fits else "xla"}
