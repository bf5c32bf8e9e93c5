"""Decoding and preprocessing by a few threads, so that the device never waits for one large image."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from k3jax.vision.decode import ImageError, open_image
from k3jax.vision.image import Grid, Patches, preprocess

Source = bytes | str | os.PathLike[str]


@dataclass(frozen=True)
class Prepared:
    """An image ready for the tower; `size` is (width, height) before any resizing, as the prompt names it."""

    patches: Patches
    grid: Grid
    size: tuple[int, int]


def prepare_images(sources: Iterable[Source], *, workers: int = 4) -> Iterator[Prepared | ImageError]:
    """Each image in the order of `sources`, or the error of one that cannot be used: others are unharmed.

    At most two images a worker are ready and not yet taken: a prepared image takes up to 158 MB.
    """
    pending: deque[Future[Prepared | ImageError]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for source in sources:
            pending.append(pool.submit(_prepare, source))
            if len(pending) >= 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _prepare(source: Source) -> Prepared | ImageError:
    try:
        image = open_image(source)
    except ImageError as error:
        return error
    return Prepared(*preprocess(image), image.size)
