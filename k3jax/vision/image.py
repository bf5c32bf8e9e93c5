"""From the pixels of an image to the patches of K3's vision tower (spec, section 2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from k3jax.vision.decode import as_rgb, check_pixels

PATCH = 14  # pixels of a patch's side
MERGE = 2  # patches of a token's side
PATCH_LIMIT = 65_536  # patches of one image, before padding
SIDE_LIMIT = 512  # patches of one side
SQUARE = 8  # pixels of a side of the chessboard's squares
WHITE, GRAY = 255, 180  # the chessboard; its first square is white

Patches = Float[np.ndarray, "n 3 14 14"]
Grid = tuple[int, int, int]  # frames, rows, columns of patches


@dataclass(frozen=True, kw_only=True)
class ImageSize:
    """What becomes of an image's size: pixels as (width, height), the grid of patches as (rows, columns)."""

    resized: tuple[int, int]
    padded: tuple[int, int]
    grid: tuple[int, int]
    num_tokens: int


def image_size(width: int, height: int, *, limit: int = PATCH_LIMIT) -> ImageSize:
    """The sizes of a `width` x `height` image through resizing, padding and merging.

    It is shrunk, never enlarged, to `limit` whole patches and `SIDE_LIMIT` patches a side, in float64, and then
    padded up to whole tokens; padding can lift it over the limit by a few hundred patches. Raises ValueError for a size
    that is not positive.
    """
    if width < 1 or height < 1:
        raise ValueError(f"an image of {width}x{height} pixels: both sides must be at least 1")
    patches = max(1, width // PATCH) * max(1, height // PATCH)
    longest = SIDE_LIMIT * PATCH
    scale = min(1.0, math.sqrt(limit / patches), longest / width, longest / height)
    resized = (_scaled(width, scale), _scaled(height, scale))
    padded = (_padded(resized[0]), _padded(resized[1]))
    grid = (padded[1] // PATCH, padded[0] // PATCH)
    return ImageSize(resized=resized, padded=padded, grid=grid, num_tokens=grid[0] * grid[1] // MERGE**2)


def image_token_count(width: int, height: int) -> int:
    """Tokens that a `width` x `height` image takes in a prompt. Raises ValueError for a size that is not positive."""
    return image_size(width, height).num_tokens


def preprocess(image: Image.Image, *, limit: int = PATCH_LIMIT) -> tuple[Patches, Grid]:
    """The patches of an image, row by row, each [channel, row, column] in [-1, 1], and their grid (1, rows, columns).

    Any mode that `as_rgb` knows; of an animation, the frame the image is at. It is resized by Pillow's bicubic filter
    (transparent images with premultiplied colours), laid over a chessboard where transparent, and padded with black at
    the right and the bottom. Raises `ImageError` for pixels it cannot use and for more than `MAX_PIXELS` of them.
    """
    check_pixels(image)
    size = image_size(*image.size, limit=limit)
    pixels = over_chessboard(as_rgb(image).resize(size.resized, Image.Resampling.BICUBIC))
    width, height = size.padded
    padded = np.zeros((height, width, 3), np.uint8)
    padded[: pixels.shape[0], : pixels.shape[1]] = pixels
    rows, columns = size.grid
    cells = padded.reshape(rows, PATCH, columns, PATCH, 3).transpose(0, 2, 4, 1, 3)
    patches = np.ascontiguousarray(cells).reshape(rows * columns, 3, PATCH, PATCH).astype(np.float32)
    patches /= 255
    patches -= 0.5
    patches *= 2
    return patches, (1, rows, columns)


def over_chessboard(image: Image.Image) -> UInt8[np.ndarray, "h w 3"]:
    """The pixels of an RGB image, or of an RGBA image over the chessboard: blended in float32, then truncated."""
    pixels = np.asarray(image)
    if image.mode == "RGB":
        return pixels
    rows, columns = (np.arange(side) // SQUARE for side in pixels.shape[:2])
    board = np.where((rows[:, None] + columns) % 2, np.float32(GRAY), np.float32(WHITE))[..., None]
    alpha = pixels[..., 3:].astype(np.float32) / 255
    return (alpha * pixels[..., :3] + (1 - alpha) * board).astype(np.uint8)


def _scaled(side: int, scale: float) -> int:
    return min(max(1, math.floor(side * scale)), SIDE_LIMIT * PATCH)


def _padded(side: int) -> int:
    return -(-side // (PATCH * MERGE)) * PATCH * MERGE
