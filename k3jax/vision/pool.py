"""Decoding and preprocessing by a few threads, so that the device never waits for one large image."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from k3jax.vision.decode import open_image
from k3jax.vision.image import Grid, Patches, preprocess

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Prepared:
    """An image ready for the tower; `size` is (width, height) before any resizing, as the prompt names it."""

    patches: Patches
    grid: Grid
    size: tuple[int, int]


def prepare(source: bytes | str | os.PathLike[str]) -> Prepared:
    """Decode and preprocess an image file; raises `ImageError`."""
    image = open_image(source)
    return Prepared(*preprocess(image), image.size)


def ahead(
    fn: Callable[[Item], Result], items: Iterable[Item], *, workers: int = 4
) -> Iterator[tuple[Item, Future[Result]]]:
    """Each item with the future of `fn(item)`, in order, while threads work on those that follow.

    At most two items a worker are done and not yet taken: a prepared image takes up to 158 MB. Without `workers` an
    item is worked on when it is asked for.
    """
    if not workers:
        for item in items:
            yield item, _done(fn, item)
        return
    pending: deque[tuple[Item, Future[Result]]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for item in items:
                pending.append((item, pool.submit(fn, item)))
                if len(pending) >= 2 * workers:
                    yield pending.popleft()
            while pending:
                yield pending.popleft()
        finally:
            for _, future in pending:
                future.cancel()


def _done(fn: Callable[[Item], Result], item: Item) -> Future[Result]:
    """`fn(item)`, as a thread would leave it."""
    future: Future[Result] = Future()
    try:
        future.set_result(fn(item))
    except Exception as error:  # to be raised where the result is asked for
        future.set_exception(error)
    return future
