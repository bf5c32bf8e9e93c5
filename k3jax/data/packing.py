"""Texts cut to the length of a row, and rows packed from them by best fit; no text is ever cut to fill a gap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grain
import numpy as np
from grain.experimental import BestFitPackIterDataset, FlatMapTransform
from jaxtyping import Bool, Int

from k3jax.data.images import Picture, pixels_of

PADDING_SEGMENT = -1
OPEN_ROWS = 64  # rows that a packer fills at the same time, and then gives out in a shuffled order
OPEN_TOKENS = 2**20  # and no more tokens than these, but at least
OPEN_PATCHES = 2**16  # nor more patches of images
FEWEST_OPEN = 8
IMAGES = ("patches", "grids")  # of a row, where it holds images


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A text's ids, its end token included; `trained` says which of them are to be predicted (None: all)."""

    ids: Int[np.ndarray, " n"]
    trained: Bool[np.ndarray, " n"] | None = None
    pictures: tuple[Picture, ...] = ()  # whose tokens are among them


@dataclass(frozen=True, kw_only=True)
class ImageRoom:
    """What a row holds of images: `patches` of them all, and `images`; none where both are 0."""

    patches: int = 0
    images: int = 0


@dataclass(frozen=True)
class Pieces(FlatMapTransform):
    """Cuts a text into pieces of at most `seq_len` tokens with their targets, so that each target appears once.

    The target of a token is the one after it; a text's first token is nobody's target, its last has none and is left
    out. A piece without a token to be trained on is dropped.
    """

    seq_len: int
    room: ImageRoom = ImageRoom()

    def flat_map(self, element: Encoded) -> list[dict[str, np.ndarray]]:
        tokens, targets = element.ids[:-1], element.ids[1:]
        counts = np.ones(len(targets), np.bool_) if element.trained is None else element.trained[1:]
        cuts = [slice(start, start + self.seq_len) for start in range(0, len(tokens), self.seq_len)]
        images: dict[str, np.ndarray] = {}
        if self.room.images:  # a text with images is one piece (`check_pictures`)
            images = dict(zip(IMAGES, pixels_of(element.pictures), strict=True))
        return [
            {"tokens": tokens[cut].astype(np.int32), "targets": targets[cut].astype(np.int32), "loss_mask": counts[cut]}
            | images
            for cut in cuts
            if counts[cut].any()
        ]


def pack(texts: grain.IterDataset, *, seq_len: int, seed: int, room: ImageRoom = ImageRoom()) -> grain.IterDataset:
    """Rows of `seq_len` tokens from a stream of `Encoded` texts.

    A row has `tokens`, `targets`, `loss_mask` and `segment_ids`, which count its pieces from 0; a gap at its end has
    segment -1. With `room` for images it also has the `patches` of its pieces' images, one after the other, and their
    `grids`; both end in zeros. Each piece goes where it leaves the smallest gap among the open rows; when one fits
    nowhere, all of them are given out.
    """
    lengths = dict.fromkeys(("tokens", "targets", "loss_mask"), seq_len)
    lengths |= dict(zip(IMAGES, (room.patches, room.images), strict=True)) if room.images else {}
    most = min(OPEN_ROWS, OPEN_TOKENS // seq_len, OPEN_PATCHES // max(1, room.patches))
    return BestFitPackIterDataset(
        grain.experimental.FlatMapIterDataset(texts, Pieces(seq_len, room)),
        length_struct=lengths,
        meta_features=[name for name in lengths if name != "tokens"],
        num_packing_bins=max(FEWEST_OPEN, most),
        seed=seed,
    ).map(_row)


def check_pictures(text: Encoded, *, seq_len: int, room: ImageRoom) -> None:
    """Raise ValueError, with both numbers, where no row holds a text with its images."""
    patches = sum(picture.num_patches for picture in text.pictures)
    needs = {"seq_len": (len(text.ids) - 1, seq_len, "tokens"), "row_patches": (patches, room.patches, "patches")}
    needs["row_images"] = (len(text.pictures), room.images, "images")
    for key, (needed, held, what) in needs.items():
        if text.pictures and needed > held:
            raise ValueError(f"a chat with {needed} {what}, but data.{key} = {held}, and images are not cut")


def _row(packed: dict[str, Any]) -> dict[str, np.ndarray]:
    row = {name: packed[name] for name in ("tokens", "targets", "loss_mask", *IMAGES) if name in packed}
    return row | {"segment_ids": packed["tokens_segment_ids"] - 1}  # grain counts from 1, with 0 for a gap
