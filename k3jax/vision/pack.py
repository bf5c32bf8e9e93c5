"""Images and video chunks of any sizes in rows of a few fixed lengths, as the vision tower takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from k3jax.vision.image import MERGE, PATCH, SIDE_LIMIT, Grid, Patches

MAX_FRAMES = 4  # of one video chunk
# Patches of a row, so that few programs are compiled; the last holds the largest image, which padding lifts to 67,268.
BUCKETS = (64, 256, *(1024 * n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 66)))


@dataclass(frozen=True)
class Packed:
    """Rows of items one after the other, and where each item's tokens lie, in the order the items were given."""

    patches: Float[np.ndarray, "B P 3 14 14"]
    grids: Int[np.ndarray, "B G 3"]  # (t, h, w) of each row's items; zeros where a row has fewer
    spans: tuple[tuple[int, int, int], ...]  # (row, first token, tokens)

    def split(self, features: Any) -> list[Any]:
        """From features [B, P/4, D], those of each item, [tokens, D]."""
        return [features[row, first : first + count] for row, first, count in self.spans]


def pack(items: Sequence[tuple[Patches, Grid]], *, rows: int = 1) -> Packed:
    """Put each item into the row that is emptiest so far; fewer items than rows leave rows empty.

    Rows are as long as the next bucket, their lists of grids as the next power of two. Raises ValueError for an item
    whose grid is none that the tower takes, and for rows longer than the last bucket: use more rows.
    """
    loads = [0] * rows
    grids: list[list[Grid]] = [[] for _ in range(rows)]
    starts: list[tuple[int, int]] = []
    for patches, grid in items:
        _check(patches, grid)
        row = loads.index(min(loads))
        starts.append((row, loads[row]))
        grids[row].append(grid)
        loads[row] += len(patches)
    packed = np.zeros((rows, _bucket(max(loads)), 3, PATCH, PATCH), np.float32)
    listed = np.zeros((rows, 1 << max(0, max(map(len, grids)) - 1).bit_length(), 3), np.int32)
    for (patches, _), (row, start) in zip(items, starts, strict=True):
        packed[row, start : start + len(patches)] = patches
    for row, row_grids in enumerate(grids):
        listed[row, : len(row_grids)] = np.reshape(row_grids, (-1, 3))
    return Packed(packed, listed, _spans([grid for _, grid in items], [row for row, _ in starts], rows))


def _spans(grids: list[Grid], rows: list[int], num_rows: int) -> tuple[tuple[int, int, int], ...]:
    """Tokens follow each other in a row as their items do; the frames of an item share theirs."""
    spans, ends = [], [0] * num_rows
    for (_, height, width), row in zip(grids, rows, strict=True):
        count = height * width // MERGE**2
        spans.append((row, ends[row], count))
        ends[row] += count
    return tuple(spans)


def _bucket(length: int) -> int:
    if length > BUCKETS[-1]:
        raise ValueError(f"{length} patches in a row: at most {BUCKETS[-1]}, use more rows or fewer images")
    return next(bucket for bucket in BUCKETS if bucket >= length)


def _check(patches: Patches, grid: Grid) -> None:
    frames, height, width = grid
    if not 1 <= frames <= MAX_FRAMES:
        raise ValueError(f"a grid of {frames} frames: 1 to {MAX_FRAMES}")
    for side in (height, width):
        if side % MERGE or not MERGE <= side <= SIDE_LIMIT:
            raise ValueError(f"a grid of {height}x{width} patches: even sides of {MERGE} to {SIDE_LIMIT}")
    if patches.shape != (frames * height * width, 3, PATCH, PATCH):
        raise ValueError(f"patches of shape {patches.shape} for a grid of {frames}x{height}x{width}")
