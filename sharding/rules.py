"""Which logical axes are split over which mesh axes, one table for each way to run the model.

`split` holds in the computation: each device works on its part of those axes, of weights and of activations.
`stored` is where else a weight lies in parts between its uses, when it is gathered: a dim takes the first mesh axis of
its list that is free and divides it, and when all dims have chosen, what is left goes to who lists it later.
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
        "embed": ("expert",),
        "expert_latent": ("fsdp",),
        "expert_scores": ("fsdp",),
        "kda_heads": ("fsdp",),
        "kv_rank": ("expert", "fsdp"),
        "latent": ("fsdp",),
        "low_rank": ("expert", "fsdp"),
        "mla_heads": ("fsdp",),
        "mlp": ("fsdp",),
        "q_rank": ("expert", "fsdp"),
        "vocab": ("fsdp",),
        # the vision tower and its projector
        "vit": ("expert", "fsdp"),
        "vit_mlp": ("fsdp",),
        "merged": ("expert", "fsdp"),
        "merged_mlp": ("fsdp",),
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
