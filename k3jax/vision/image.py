"""From the pixels of an image to the patches of K3's vision tower (spec, section 2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

PATCH = 14  # pixels of a patch's side
MERGE = 2  # patches of a token's side
PATCH_LIMIT = 65_536  # patches of one image, before padding
SIDE_LIMIT = 512  # patches of one side


@dataclass(frozen=True, kw_only=True)
class ImageSize:
    """What becomes of an image's size: pixels as (width, height), the grid of patches as (rows, columns)."""

    resized: tuple[int, int]
    padded: tuple[int, int]
    grid: tuple[int, int]
    num_tokens: int


def image_size(width: int, height: int) -> ImageSize:
    """The sizes of a `width` x `height` image through resizing, padding and merging.

    It is shrunk, never enlarged, to `PATCH_LIMIT` whole patches and `SIDE_LIMIT` patches a side, in float64, and then
    padded up to whole tokens; padding can lift it over the limit by a few hundred patches. Raises ValueError for a size
    that is not positive.
    """
    if width < 1 or height < 1:
        raise ValueError(f"an image of {width}x{height} pixels: both sides must be at least 1")
    patches = max(1, width // PATCH) * max(1, height // PATCH)
    longest = SIDE_LIMIT * PATCH
    scale = min(1.0, math.sqrt(PATCH_LIMIT / patches), longest / width, longest / height)
    resized = (_scaled(width, scale), _scaled(height, scale))
    padded = (_padded(resized[0]), _padded(resized[1]))
    grid = (padded[1] // PATCH, padded[0] // PATCH)
    return ImageSize(resized=resized, padded=padded, grid=grid, num_tokens=grid[0] * grid[1] // MERGE**2)


def image_token_count(width: int, height: int) -> int:
    """Tokens that a `width` x `height` image takes in a prompt. Raises ValueError for a size that is not positive."""
    return image_size(width, height).num_tokens


def _scaled(side: int, scale: float) -> int:
    return min(max(1, math.floor(side * scale)), SIDE_LIMIT * PATCH)


def _padded(side: int) -> int:
    return -(-side // (PATCH * MERGE)) * PATCH * MERGE
