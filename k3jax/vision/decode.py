"""From an image file to pixels: what is accepted, what every kind of image means, and bounds against hostile files."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

MAX_BYTES = 32 * 2**20  # of a file
MAX_PIXELS = 7168**2  # of a decoded image
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # told by the contents, whatever the file is called


class ImageError(ValueError):
    """An image that cannot be used; the message is one complete line."""


def open_image(source: bytes | str | os.PathLike[str], *, upright: bool = False) -> Image.Image:
    """Decode an image file, given as its bytes or its path, to RGB or RGBA (see `as_rgb`).

    Of an animation it is the first frame. The orientation that a camera noted (EXIF) is ignored, as nothing says that
    the released model's processor applies it; `upright` applies it. Raises `ImageError` for a file of more than
    `MAX_BYTES`, an image of more than `MAX_PIXELS`, and anything that is no complete image of `FORMATS`.
    """
    with _one_line_errors():
        image = Image.open(BytesIO(_read(source)), formats=FORMATS)
        check_pixels(image)  # before any pixel is decoded
        image.load()
        return as_rgb(ImageOps.exif_transpose(image) if upright else image)


def image_size_of(source: bytes | str | os.PathLike[str]) -> tuple[int, int]:
    """The (width, height) that an image file's header names, without decoding it. Raises `ImageError`."""
    with _one_line_errors():
        image = Image.open(BytesIO(_read(source)), formats=FORMATS)
        check_pixels(image)
        return image.size


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Whatever a decoder raises, as an `ImageError`."""
    try:
        yield
    except ImageError:
        raise
    except Image.DecompressionBombError as error:
        raise ImageError(f"an image of more than {MAX_PIXELS} pixels: make it smaller") from error
    except Exception as error:  # a decoder fed with hostile bytes raises nearly anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, Image.UnidentifiedImageError):
            reason = "unknown contents"
        elif isinstance(error, OSError) and error.strerror:
            reason = error.strerror  # without the path
        raise ImageError(f"not a complete image of {', '.join(FORMATS)} ({reason})") from error


def check_pixels(image: Image.Image) -> None:
    """Raise `ImageError` where the image has no pixel, or more than `MAX_PIXELS`."""
    width, height = image.size
    if width < 1 or height < 1:
        raise ImageError(f"an image of {width}x{height} pixels: both sides must be at least 1")
    if width * height > MAX_PIXELS:
        raise ImageError(f"an image of {width}x{height} = {width * height} pixels: at most {MAX_PIXELS}")


def as_rgb(image: Image.Image) -> Image.Image:
    """The image as RGBA where it has transparency of any kind (or a palette), as RGB where not.

    Gray of 16 bits is scaled to 8 (its transparent value, if any, is ignored); CMYK, YCbCr, LAB and HSV are converted
    without colour profiles; an index past the end of its palette is black. Raises `ImageError` for floating-point
    pixels, which have no white, for integers out of the range of 16 bits, and for indices without any palette.
    """
    if image.mode == "F":
        raise ImageError("an image of floating-point pixels: convert it to 8 or 16 bits")
    if image.mode == "P" and not image.getpalette():
        raise ImageError("an image of palette indices without a palette")
    if image.mode.startswith("I"):
        return _gray_of_16_bits(image).convert("RGB")
    if image.mode == "La":
        image = image.convert("LA")  # the only conversion that Pillow has for premultiplied gray
    if image.mode == "P" or image.has_transparency_data:
        return image if image.mode == "RGBA" else image.convert("RGBA")
    return image if image.mode == "RGB" else image.convert("RGB")


def _gray_of_16_bits(image: Image.Image) -> Image.Image:
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65_535:
        raise ImageError(f"an image of integers from {values.min()} to {values.max()}: at most 16 bits, 0 to 65535")
    return Image.fromarray(((values * 255 + 32_767) // 65_535).astype(np.uint8))


def _read(source: bytes | str | os.PathLike[str]) -> bytes:
    if isinstance(source, bytes):
        size = len(source)
    else:
        status = Path(source).stat()
        if not stat.S_ISREG(status.st_mode):
            raise ImageError("not a file: a folder, a pipe or a device")  # a pipe would be waited for, for ever
        size = status.st_size
    if size > MAX_BYTES:
        raise ImageError(f"an image file of {size} bytes: at most {MAX_BYTES}")
    return source if isinstance(source, bytes) else Path(source).read_bytes()
