"""Images in chats to train on: found and measured when a corpus is loaded, decoded when a row needs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from k3jax.vision import ImageError, image_size_of, open_image, preprocess
from k3jax.vision.image import PATCH, image_size
from k3jax.vision.url import decode_data_url, image_urls, is_data_url


@dataclass(frozen=True)
class Picture:
    """An image of a chat: its file's bytes or its path, and its (width, height) in pixels."""

    source: bytes | Path
    size: tuple[int, int]

    @property
    def num_patches(self) -> int:
        """Patches that the vision tower reads of it."""
        rows, columns = image_size(*self.size).grid
        return rows * columns


def find_pictures(messages: Sequence[Any], folder: Path) -> list[Picture]:
    """The images of a chat's messages in order; paths are relative to `folder`. Raises `ImageError` naming the image.

    Only the headers of files are read.
    """
    return [_measured(url, folder) for url in image_urls(messages)]


def pixels_of(pictures: Sequence[Picture]) -> tuple[Float[np.ndarray, "n 3 14 14"], Int[np.ndarray, "items 3"]]:
    """All patches of some pictures, one picture after the other, and their grids; empty where there is none."""
    done = [preprocess(open_image(picture.source)) for picture in pictures]
    patches = [patches for patches, _ in done] or [np.zeros((0, 3, PATCH, PATCH), np.float32)]
    return np.concatenate(patches), np.asarray([grid for _, grid in done], np.int32).reshape(-1, 3)


def _measured(url: str, folder: Path) -> Picture:
    source = decode_data_url(url) if is_data_url(url) else folder / url
    try:
        return Picture(source, image_size_of(source))
    except ImageError as error:
        name = "a data URL" if isinstance(source, bytes) else url
        raise ImageError(f"{name}: {error}") from error
