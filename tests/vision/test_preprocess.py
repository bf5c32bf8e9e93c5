"""Pixels of every kind of image become patches: against golden values, and by hand where a value is known."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from k3jax.vision import ImageError, preprocess
from k3jax.vision.image import image_size


def pixels_of(image: Image.Image) -> np.ndarray:
    """Preprocessed pixels as a picture again, [height, width, 3] in [-1, 1], padding included."""
    patches, (_, rows, columns) = preprocess(image)
    return patches.reshape(rows, columns, 3, 14, 14).transpose(0, 3, 1, 4, 2).reshape(rows * 14, columns * 14, 3)


def levels_of(image: Image.Image) -> np.ndarray:
    """Preprocessed pixels as levels of 0 to 255, without padding."""
    width, height = image_size(*image.size).resized
    return np.rint((pixels_of(image)[:height, :width] + 1) * 127.5).astype(int)


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).integers(0, 256, shape, np.uint8)


@pytest.mark.parametrize("name", ["rgb_small", "rgb_grid", "alpha", "palette", "gray"])
def test_golden_grids_and_pixels(golden: Path, name: str) -> None:
    folder = golden / "tiny_vision"
    expected = json.loads((folder / "preprocess.json").read_text())[name]
    patches, grid = preprocess(Image.open(folder / "images" / f"{name}.png"))
    assert list(grid) == expected["grid"] and len(patches) == 4 * expected["n"] and patches.dtype == np.float32
    wide = patches.astype(np.float64)
    assert [wide.mean(), np.abs(wide).mean()] == pytest.approx([expected["mean"], expected["abs"]], abs=1e-5)
    np.testing.assert_allclose(patches[0, :, 0, 0], expected["first"], atol=1e-5)
    np.testing.assert_allclose(patches[-1, :, -1, -1], expected["last"], atol=1e-5)


def test_patches_run_row_by_row_and_padding_is_black() -> None:
    picture = noise(40, 60, 3)
    patches, grid = preprocess(Image.fromarray(picture))
    assert grid == (1, 4, 6)
    np.testing.assert_allclose(patches[6 * 1 + 3], picture[14:28, 42:56].transpose(2, 0, 1) / 127.5 - 1, atol=1e-6)
    pixels = pixels_of(Image.fromarray(picture))
    np.testing.assert_allclose(pixels[:40, :60], picture / 127.5 - 1, atol=1e-6)
    assert np.all(pixels[40:] == -1) and np.all(pixels[:, 60:] == -1)


def test_a_size_is_padded_up_never_to_the_nearest() -> None:
    assert preprocess(Image.new("RGB", (448, 449)))[1] == (1, 34, 32)


def test_downscaling_is_antialiased_bicubic() -> None:
    image = Image.fromarray(noise(20, 14_336, 3))
    assert image_size(*image.size).resized == (7168, 10)
    exact = separable_bicubic(separable_bicubic(np.asarray(image, np.float64), 7168, axis=1), 10, axis=0)
    assert np.abs(levels_of(image) - np.clip(exact, 0, 255)).max() <= 2  # two roundings, and clipping between them


def separable_bicubic(x: np.ndarray, size: int, *, axis: int) -> np.ndarray:
    """Keys' kernel (a = -0.5), widened by the factor of a reduction, rounded and clipped to levels."""
    x = np.moveaxis(x, axis, 0)
    scale = len(x) / size
    out = np.empty((size, *x.shape[1:]))
    for i in range(size):
        centre = (i + 0.5) * scale
        taps = np.arange(max(0, round(centre - 2 * scale)), min(len(x), round(centre + 2 * scale)))
        t = np.abs((taps + 0.5 - centre) / scale)
        weights = np.where(t < 1, 1.5 * t**3 - 2.5 * t**2 + 1, np.where(t < 2, -0.5 * t**3 + 2.5 * t**2 - 4 * t + 2, 0))
        out[i] = np.tensordot(weights / weights.sum(), x[taps], axes=1)
    return np.moveaxis(np.clip(np.rint(out), 0, 255), 0, axis)


# --- Transparency -----------------------------------------------------------------------------------------------------


def test_a_transparent_image_is_a_chessboard() -> None:
    levels = levels_of(Image.new("RGBA", (20, 17), (10, 20, 30, 0)))
    assert (
        levels[0, 0].tolist() == levels[7, 7].tolist() == levels[8, 8].tolist() == levels[16, 0].tolist() == [255] * 3
    )
    assert levels[0, 8].tolist() == levels[8, 7].tolist() == levels[15, 16].tolist() == [180] * 3


def test_blending_truncates() -> None:
    image = Image.new("RGBA", (16, 8), (10, 101, 200, 100))
    # 100/255 of the colour and 155/255 of 255 or 180: 158.9, 194.6, 233.4 and 113.3, 149.0, 187.8
    levels = levels_of(image)
    assert levels[0, 0].tolist() == [158, 194, 233]
    assert levels[0, 8].tolist() == [113, 149, 187]


def test_the_chessboard_has_its_size_after_resizing() -> None:
    levels = levels_of(Image.new("RGBA", (14_336, 40), (0, 0, 0, 0)))
    assert levels.shape == (20, 7168, 3)
    assert levels[0, 7, 0] == 255 and levels[0, 8, 0] == 180


@pytest.mark.parametrize("mode", ["LA", "RGBA", "La", "RGBa"])
def test_every_kind_of_alpha_is_seen(mode: str) -> None:
    image = Image.new(mode.upper(), (16, 8), (90, 0) if mode.startswith("L") else (90, 90, 90, 0))
    assert levels_of(image.convert(mode))[0, ::8].tolist() == [[255] * 3, [180] * 3]


@pytest.mark.parametrize(("mode", "key"), [("RGB", (9, 8, 7)), ("L", 50), ("P", 1)])
def test_a_transparent_colour_is_transparent(mode: str, key: object) -> None:
    image = Image.new(mode, (16, 8), key)
    if mode == "P":
        image.putpalette(bytes(range(6)))
    assert levels_of(image)[0, ::8].tolist() != [[255] * 3, [180] * 3]
    image.info["transparency"] = key
    assert levels_of(image)[0, ::8].tolist() == [[255] * 3, [180] * 3]


# --- Kinds of pixels --------------------------------------------------------------------------------------------------


def test_gray_and_black_and_white_are_three_alike_channels() -> None:
    gray = Image.fromarray(noise(20, 30))
    np.testing.assert_array_equal(levels_of(gray), np.asarray(gray)[..., None] * np.ones(3, int))
    bits = gray.convert("1")
    np.testing.assert_array_equal(levels_of(bits), 255 * np.asarray(bits)[..., None] * np.ones(3, int))


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_gray_of_16_bits_is_scaled_to_8(dtype: type) -> None:
    values = np.asarray([[0, 257, 128, 129, 65_535, 40_000]], dtype)
    assert levels_of(Image.fromarray(values))[0, :, 1].tolist() == [0, 1, 0, 1, 255, 156]


def test_cmyk_is_converted() -> None:
    assert levels_of(Image.new("CMYK", (5, 5), (255, 0, 0, 0)))[0, 0].tolist() == [0, 255, 255]


def test_a_palette_is_looked_up_before_resizing() -> None:
    image = Image.fromarray(noise(20, 14_336, 3)).quantize(16)
    np.testing.assert_array_equal(levels_of(image), levels_of(image.convert("RGB")))


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (Image.new("F", (4, 4)), "floating-point pixels"),
        (Image.fromarray(np.asarray([[70_000]], np.int32)), "from 70000 to 70000"),
        (Image.new("P", (4, 4)), "without a palette"),
        (Image.new("RGB", (0, 7)), "0x7 pixels: both sides"),
        (Image.new("1", (7169, 7168)), "7169x7168 = 51387392 pixels: at most 51380224"),
    ],
)
def test_unusable_pixels_are_refused(image: Image.Image, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        preprocess(image)
