"""Files: what decodes to what, and one clear error for each hostile one."""

import struct
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from k3jax.vision import ImageError, ahead, image_size_of, open_image, prepare
from k3jax.vision.decode import MAX_BYTES

RED, BLUE = (250, 0, 0), (0, 0, 250)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png(
    width: int, height: int, *, bits: int = 8, colour: int = 2, chunks: tuple[tuple[bytes, bytes], ...] = ()
) -> bytes:
    """A PNG file of any header and chunks."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*c) for c in ((b"IHDR", header), *chunks, (b"IEND", b"")))


NOISE = Image.fromarray(np.random.default_rng(1).integers(0, 256, (60, 50, 3), np.uint8))
INDICES = (b"IDAT", zlib.compress(4 * b"\0\0\1\2\3"))  # four rows of a filter byte and four pixels
HALVES = {f"half a {kind}": file_of(NOISE, kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")}
HOSTILE = {
    **{name: (data[: len(data) // 2], "not a complete image") for name, data in HALVES.items()},
    "empty": (b"", "unknown contents"),
    "text": (b"hello", "unknown contents"),
    "vector": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "unknown contents"),
    "header only": (file_of(NOISE)[:40], "not a complete image"),
    "bomb": (png(100_000, 100_000, chunks=((b"IDAT", zlib.compress(b"")),)), "more than 51380224 pixels"),
    "large": (png(9000, 9000, chunks=((b"IDAT", zlib.compress(b"")),)), "9000x9000 = 81000000 pixels"),
    "text bomb": (png(4, 4, chunks=((b"zTXt", b"a\0\0" + zlib.compress(bytes(2**21))),)), "too large"),
    "no width": (png(0, 5, chunks=((b"IDAT", zlib.compress(b"")),)), "image"),
    "no height": (png(5, 0, chunks=((b"IDAT", zlib.compress(b"")),)), "image"),
    "no palette": (png(4, 4, colour=3, chunks=(INDICES,)), "without a palette"),
    "broken pixels": (png(4, 4, colour=3, chunks=((b"PLTE", bytes(12)), (b"IDAT", b"no deflate"))), "not a complete"),
    "too many bytes": (bytes(MAX_BYTES + 1), f"{MAX_BYTES + 1} bytes: at most {MAX_BYTES}"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_gives_one_line(name: str) -> None:
    data, message = HOSTILE[name]
    with pytest.raises(ImageError, match=message) as caught:
        open_image(data)
    assert "\n" not in str(caught.value)


def test_hostile_files_leave_others_unharmed_and_in_order() -> None:
    sources = [data for pair in HOSTILE.values() for data in (pair[0], file_of(NOISE))]
    results = list(ahead(prepare, sources, workers=3))
    assert [source for source, _ in results] == sources
    assert all(isinstance(result.exception(), ImageError) for _, result in results[::2])
    for _, result in results[1::2]:
        assert (result.result().size, result.result().grid) == ((50, 60), (1, 6, 4))


def test_an_index_past_the_end_of_a_palette_is_black() -> None:
    data = png(4, 4, colour=3, chunks=((b"PLTE", bytes((9, 8, 7, 60, 50, 40))), INDICES))
    assert np.asarray(open_image(data))[0, :, :3].tolist() == [[9, 8, 7], [60, 50, 40], [0, 0, 0], [0, 0, 0]]


def test_work_ahead_is_bounded_and_ends_with_its_reader() -> None:
    begun: list[int] = []
    reader = ahead(begun.append, range(1000), workers=2)
    for expected in range(3):
        item, result = next(reader)
        result.result()
        assert item == expected
    reader.close()
    assert len(begun) <= 3 + 2 * 2


def test_the_size_is_that_before_resizing() -> None:
    data = file_of(Image.new("L", (100_000, 1)))
    result = prepare(data)
    assert (result.size, result.grid) == (image_size_of(data), (1, 2, 512)) == ((100_000, 1), (1, 2, 512))


def test_a_missing_file_and_a_wrong_extension(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"\(No such file or directory\)$"):
        open_image(tmp_path / "none.png")
    with pytest.raises(ImageError, match="not a file: a folder, a pipe or a device"):
        open_image(tmp_path)
    path = tmp_path / "picture.jpg"
    path.write_bytes(file_of(NOISE))
    np.testing.assert_array_equal(np.asarray(open_image(path)), np.asarray(NOISE))


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_of_an_animation_the_first_frame(kind: str) -> None:
    frames = [Image.new("RGB", (20, 10), colour) for colour in (RED, BLUE)]
    data = file_of(frames[0], kind, save_all=True, append_images=frames[1:])
    red, _, blue = np.asarray(open_image(data))[5, 10, :3]
    assert red > 200 and blue < 50


def test_a_rotated_image_turns_only_on_request() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned by 90 degrees clockwise
    data = file_of(Image.new("RGB", (20, 10)), "JPEG", exif=exif)
    assert open_image(data).size == (20, 10)
    assert open_image(data, upright=True).size == (10, 20)
