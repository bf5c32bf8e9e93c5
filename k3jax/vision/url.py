"""Where a chat's image parts say that their images are."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from k3jax.vision.decode import ImageError


def image_urls(messages: Sequence[Any]) -> Iterator[str]:
    """The URL of each image part of a chat's messages, in order; raises `ImageError` for a part without one."""
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping) and part.get("type") in ("image", "image_url"):
                yield _url(part.get("image_url", part.get("image")))


def _url(value: Any) -> str:
    url = value.get("url") if isinstance(value, Mapping) else value
    if not isinstance(url, str) or not url:
        raise ImageError('an image part without a URL: write {"type": "image_url", "image_url": {"url": ...}}')
    return url


def is_data_url(url: str) -> bool:
    """Whether the image is in the URL itself."""
    return url[:5].lower() == "data:"


def decode_data_url(url: str) -> bytes:
    """The bytes of a `data:` URL in base64; raises `ImageError`."""
    head, comma, text = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise ImageError("a data URL must begin with data:image/...;base64,")
    try:
        return base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error) as error:
        raise ImageError(f"a data URL that is not base64 ({error})") from error
