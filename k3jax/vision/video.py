"""From the frames of a video to chunks for the vision tower, and their place in a prompt.

Sampling, sizes and layout are those of the model before K3, read from other servers of it (spec, section 2.4). The
released K3 takes images alone and nothing says what it makes of a video, so no request leads here: call it yourself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from k3jax.vision.decode import ImageError
from k3jax.vision.image import MERGE, Grid, Patches, preprocess
from k3jax.vision.pack import MAX_FRAMES

FPS = 8.0  # of the frames that are looked at, at most
FRAME_LIMIT = 16_384  # patches of one frame, before padding
VIDEO_LIMIT = 655_360  # patches of all frames together


@dataclass(frozen=True)
class Chunk:
    """Up to four frames that the tower reads together; `timestamp` is when the first of them is shown."""

    patches: Patches
    grid: Grid
    timestamp: str

    @property
    def num_tokens(self) -> int:
        """Tokens in the prompt: as many as one frame takes."""
        _, rows, columns = self.grid
        return rows * columns // MERGE**2


def sampled_frames(total: int, fps: float, *, max_frames: int | None = None) -> list[int]:
    """Which of `total` frames, shown `fps` a second, are looked at: evenly spread, the first and the last among them.

    Raises `ImageError` for a video without frames or speed.
    """
    if total < 1 or not 0 < fps < float("inf"):
        raise ImageError(f"a video of {total} frames, {fps} a second: both must be above 0")
    count = min(max(round(total * min(FPS, fps) / fps), 1), total, max_frames or total)
    return np.round(np.linspace(0, total - 1, count)).astype(int).tolist()


def preprocess_video(frames: Sequence[Image.Image], seconds: Sequence[float]) -> list[Chunk]:
    """The chunks of a video of these frames, each shown at its time. Raises `ImageError` for frames of two sizes."""
    sizes = {frame.size for frame in frames}
    if len(sizes) != 1 or len(frames) != len(seconds):
        raise ImageError(f"a video of {len(frames)} frames of {len(sizes)} sizes at {len(seconds)} times: one size")
    limit = min(FRAME_LIMIT, max(1, round(VIDEO_LIMIT / len(frames))))
    chunks = []
    for first in range(0, len(frames), MAX_FRAMES):
        done = [preprocess(frame, limit=limit) for frame in frames[first : first + MAX_FRAMES]]
        _, rows, columns = done[0][1]
        patches = np.concatenate([patches for patches, _ in done])
        chunks.append(Chunk(patches, (len(done), rows, columns), timestamp(seconds[first])))
    return chunks


def timestamp(seconds: float) -> str:
    """Hours (of a day), minutes, seconds and milliseconds, cut off: 3723.4567 is 01:02:03.456."""
    whole, milliseconds = divmod(int(seconds * 1000), 1000)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours % 24:02}:{minute:02}:{second:02}.{milliseconds:03}"
