"""Which logical axes are split over which mesh axes, one table for each way to run the model.

`split` holds in the computation: each device works on its part of those axes, of weights and of activations.
`stored` is where else a weight lies in parts between its uses, when it is gathered: each dim in turn takes the first
mesh axis of its list that is free and divides it, then once more of what is left, until the parts are small enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Rules:
    """A table: {logical axis: mesh axes}, for the computation and for storage only."""

    split: Mapping[str, tuple[str, ...]]
    stored: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


# Kinds of weight that stay whole, as those of one axis do: small, so that a gather would cost more than it frees.
SMALL = {("kda_heads", "head_dim"), ("kda_heads", "head_dim", "conv")}
SMALL_PART = 2**17  # elements of a part that is not cut again: more parts would save nothing and take longer to join

# Every device has its own tokens; heads and inner widths may be split over `tensor`, tokens of a row over `context`.
TRAIN = Rules(
    split={
        "batch": ("data", "fsdp", "expert"),
        "seq": ("context",),
        "experts": ("expert",),
        "expert_mlp": ("tensor",),
        "mlp": ("tensor",),
        "kda_heads": ("tensor",),
        "mla_heads": ("tensor",),
        "vocab": ("tensor",),
    },
    stored={
        "embed": ("expert", "fsdp"),
        "expert_latent": ("fsdp",),
        "expert_mlp": ("fsdp",),
        "expert_scores": ("fsdp",),
        # of the output projections, whose last dim must stay whole: gathering it would turn the matrix around
        "head_dim": ("expert",),
        "kda_heads": ("fsdp",),
        "kv_rank": ("expert", "fsdp"),
        "latent": ("expert", "fsdp"),
        "low_rank": ("expert", "fsdp"),
        "mla_heads": ("fsdp",),
        "mlp": ("expert", "fsdp"),
        "q_rank": ("expert", "fsdp"),
        "v_dim": ("expert",),
        "vocab": ("expert", "fsdp"),
        # the vision tower and its projector
        "vit": ("expert", "fsdp"),
        "vit_mlp": ("expert", "fsdp"),
        "merged": ("expert", "fsdp"),
        "merged_mlp": ("expert", "fsdp"),
    },
)

# Serving: weights never move; each replica of the model along `data` has one home for every expert, and every page of
# latents lies in pieces on the devices that share its sequence. A program for a few tokens of many sequences, and one
# for the chunks of long prompts, which lie along `context`; both see the same pools.
DECODE = Rules(
    split={
        "batch": ("data", "expert"),
        "experts": ("expert", "context", "tensor"),
        "kda_heads": ("tensor",),
        "latent": ("tensor",),
        "mla_heads": ("tensor",),
        "mlp": ("tensor",),
        "page": ("context", "tensor"),
        "vocab": ("tensor",),
    },
)
PREFILL = Rules(split={**DECODE.split, "seq": ("context",)})
TABLES = {"train": TRAIN, "prefill": PREFILL, "decode": DECODE}
