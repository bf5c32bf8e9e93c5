"""Block Attention Residuals: every sub-layer reads a learned mix over depth (spec text-model 2.2).

The residual state of a token is a bank of snapshots (sealed sums of earlier blocks of layers) and the live sum of the
current block. A mix is a softmax over these sources: keys are RMS-normalised, values are raw. The bank does not change
within a block, so all reads of a block look at it in one pass (`k3jax.nn.stack`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from k3jax.nn.norm import RMSNorm
from k3jax.nn.param import cast, constant, island
from pallas_kernels.attn_res import BankRead, read, read_bank, read_norm


@dataclass(frozen=True)
class Residual:
    """What flows through depth: `snapshots` [N, B, T, D] (the first `count` are sealed) and the live sum [B, T, D].

    `has_live` is False exactly between a seal and the next layer's mixer, when the live sum is empty (zero). The
    loop stack passes Python values for `count` and `has_live`, the scan passes traced ones.
    """

    snapshots: Float[Array, "N B T D"]
    count: int | Int[Array, ""]
    live: Float[Array, "B T D"]
    has_live: bool | Bool[Array, ""]

    @classmethod
    def start(cls, x: Float[Array, "B T D"], num_snapshots: int) -> Residual:
        """The state before layer 0: an empty bank and the token embedding as the live sum."""
        return cls(jnp.zeros((num_snapshots, *x.shape), x.dtype), 0, x, True)

    def seal(self) -> Residual:
        """Move the live sum into the bank. A mix right after it sees the same sources as one right before it."""
        snapshots = self.snapshots.at[self.count].set(self.live)
        return Residual(snapshots, self.count + 1, jnp.zeros_like(self.live), False)


class Mix(nnx.Module):
    """One read: softmax_j(query . RMSNorm(source_j) * norm) over the sources, applied to the raw sources."""

    def __init__(self, width: int, *, eps: float, dtype: Any):
        self.norm = constant(1.0, (width,), ("embed",), dtype=dtype)
        self.query = constant(0.0, (width,), ("embed",), dtype=dtype)  # zero: a uniform average at the start
        self.eps = eps

    def folded(self, dtype: Any) -> Float[Array, "*lead D"]:
        """The query with the key norm's weight in it, in the float32 island of `dtype`."""
        return cast(self.query, island(dtype)) * cast(self.norm, island(dtype))

    def __call__(
        self,
        bank: BankRead,
        live: Float[Array, "B T D"],
        has_live: bool | Bool[Array, ""],
        norm: RMSNorm,
        *,
        update: Float[Array, "B T D"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
        """The live sum after `update`, and the `norm` of its mix with what this read saw of the bank."""
        query, weight = self.folded(live.dtype), cast(norm.weight, live.dtype)
        options: Any = {"update": update, "eps": self.eps, "norm_eps": norm.eps}
        return read_norm(bank, live, has_live, query, weight, **options)

    def of(self, residual: Residual) -> Float[Array, "B T D"]:
        """The mix itself, of a read that stands alone, outside a block."""
        query = self.folded(residual.live.dtype)
        bank = read_bank(residual.snapshots, residual.count, query[None], eps=self.eps)
        bank = jax.tree.map(lambda x: x[0], bank)
        return read(bank, residual.live, residual.has_live, query, eps=self.eps)
