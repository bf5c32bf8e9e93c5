"""Images of chat requests: found in data URLs or an allowed folder, prepared by threads, each encoded once.

The tower is a program of its own, compiled for a few numbers of patches. Its features go into the prompt's prefill
chunks; they are kept on the host, so that an image that many requests show is encoded once.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Float, Int

from k3jax.nn.vision import Vision
from k3jax.serve.fields import RequestError
from k3jax.vision import ImageError, Prepared, image_size_of, pack, prepare
from k3jax.vision.url import decode_data_url, image_urls, is_data_url

if TYPE_CHECKING:
    from k3jax.serve.request import Job

CACHE_BYTES = 2**30  # of features that are kept


@dataclass(frozen=True)
class Found:
    """An image before it is decoded: which one of the messages, its file, the (width, height) of the file's header."""

    number: int
    source: bytes | Path
    size: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Features:
    """What the tower makes of an image; `key` is that of its pixels and grid, below zero as no token id is."""

    key: int
    values: Float[np.ndarray, "N D"]


@dataclass(frozen=True, eq=False)
class PromptImages:
    """The images in a prompt: row i of `values` stands at token `places[i]`.

    `identity` is the prompt with an image's key for each of its tokens: what tells it from prompts with other images.
    """

    places: Int[np.ndarray, "N"]
    values: Float[np.ndarray, "N D"]
    identity: tuple[int, ...]

    @classmethod
    def of(cls, prompt: tuple[int, ...], media_id: int, images: Sequence[Features]) -> PromptImages:
        """Of a prompt in which `media_id` stands for each feature of the images, in order."""
        identity, keys = np.asarray(prompt), [np.full(len(image.values), image.key) for image in images]
        places = np.flatnonzero(identity == media_id)
        identity[places] = np.concatenate(keys)
        return cls(places, np.concatenate([image.values for image in images]), tuple(identity.tolist()))

    def within(self, start: int, stop: int) -> Float[np.ndarray, "n D"] | None:
        """The features of tokens `start` to `stop`; None where there are none."""
        first, last = np.searchsorted(self.places, (start, stop))
        return self.values[first:last] if last > first else None


@dataclass(frozen=True)
class ImageReader:
    """Reads the images of requests; files only below `folder`, if there is one. URLs are never fetched.

    Token `media_id` stands for an image's feature.
    """

    media_id: int
    folder: Path | None = None

    def check(self, prompt: Sequence[int]) -> None:
        """Raise `RequestError` where token ids that a request gives itself stand for images that it has not."""
        if self.media_id in prompt:
            raise RequestError(
                f"prompt holds token {self.media_id}, which stands for an image: images come with chats", param="prompt"
            )

    def find(self, messages: Sequence[Any]) -> list[Found]:
        """The images of a chat's messages in order; only headers are read. Raises `RequestError`."""
        found: list[Found] = []
        try:
            for url in image_urls(messages):
                source = self._source(url)
                found.append(Found(len(found), source, image_size_of(source)))
        except ImageError as error:
            raise _request_error(len(found), error) from error
        return found

    def prepare(self, found: Sequence[Found]) -> tuple[Prepared, ...]:
        """The images' patches. Raises `RequestError`."""
        prepared = []
        for image in found:
            try:
                prepared.append(_as_found(prepare(image.source), image))
            except ImageError as error:
                raise _request_error(image.number, error) from error
        return tuple(prepared)

    def _source(self, url: str) -> bytes | Path:
        scheme, separator, rest = url.partition("://")
        if is_data_url(url):
            return decode_data_url(url)
        if separator and scheme.lower() != "file":
            raise ImageError(f"a {scheme[:20]} URL: nothing is fetched; give a data URL, or a file below image_folder")
        if self.folder is None:
            raise ImageError("a file, but the recipe allows none; set image_folder, or give a data URL")
        return _file_below(self.folder, rest if separator else url)


def _as_found(prepared: Prepared, found: Found) -> Prepared:
    """The image, which must have the size that the prompt was made with; a file may change in between."""
    if prepared.size != found.size:
        sizes = " and then ".join(f"{width}x{height}" for width, height in (found.size, prepared.size))
        raise ImageError(f"an image of {sizes} pixels: it changed while it was read")
    return prepared


def _file_below(folder: Path, name: str) -> Path:
    """A regular file in or under the folder, links followed. Raises `ImageError`, which does not tell the folder."""
    root = folder.resolve()
    try:
        path = (root / name).resolve()
        is_file = path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, names that no file can have
        raise ImageError("no such file in image_folder") from error
    if not path.is_relative_to(root):
        raise ImageError("a file outside image_folder")
    if not is_file:
        raise ImageError("no such file in image_folder")
    return path


def _request_error(index: int, error: ImageError) -> RequestError:
    return RequestError(f"image {index + 1} of the messages: {error}", code="invalid_image", param="messages")


class ImageEncoder:
    """The vision tower on the device; `report` is told what is being compiled.

    Up to `cache_bytes` of features are kept, the least recently used go first.
    """

    def __init__(
        self,
        vision: Vision,
        *,
        cache_bytes: int = CACHE_BYTES,
        report: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._vision, self._left, self._report = vision, cache_bytes, report
        self._programs: dict[int, Callable] = {}  # by patches of a row
        self._kept: OrderedDict[int, Features] = OrderedDict()

    def job(self, job: Job, media_id: int) -> Job:
        """A job whose requests have the features of its images."""
        if not job.images:
            return job
        first = job.requests[0]
        images = PromptImages.of(first.prompt, media_id, [self.encode(image) for image in job.images])
        return replace(job, images=(), requests=tuple(replace(request, images=images) for request in job.requests))

    def encode(self, image: Prepared) -> Features:
        """Features of one image, in the compute dtype."""
        key = _key(image)
        if key not in self._kept:
            self._keep(Features(key, self._run(image)))
        self._kept.move_to_end(key)
        return self._kept[key]

    def _run(self, image: Prepared) -> Float[np.ndarray, "N D"]:
        packed = pack([(image.patches, image.grid)])
        length = packed.patches.shape[1]
        arguments = (self._vision, packed.patches, packed.grids)
        if length not in self._programs:
            self._report(f"compiling the vision tower for {length} patches")
            self._programs[length] = jax.jit(_features).lower(*arguments).compile()
        return packed.split(np.asarray(self._programs[length](*arguments)))[0]

    def _keep(self, features: Features) -> None:
        self._kept[features.key] = features
        self._left -= features.values.nbytes
        while self._left < 0 and len(self._kept) > 1:
            self._left += self._kept.popitem(last=False)[1].values.nbytes


def _features(vision: Vision, patches: jax.Array, grids: jax.Array) -> jax.Array:
    return vision(patches, grids)[0]


def _key(image: Prepared) -> int:
    """Of the pixels as the tower sees them, so of the settings that made them too."""
    digest = hashlib.sha256(repr(image.grid).encode() + image.patches.tobytes()).digest()
    return -1 - int.from_bytes(digest[:7], "big")
