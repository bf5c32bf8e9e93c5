"""Sizes of images through the resize rule, against the golden cases."""

import json
from pathlib import Path

import pytest

from k3jax.vision.image import image_size, image_token_count


def test_golden_sizes(golden: Path) -> None:
    for case in json.loads((golden / "chat" / "image_tokens.json").read_text())["cases"]:
        expected, size = case["expected"], image_size(**case["input"])
        assert (list(size.resized), list(size.padded)) == (expected["resized"], expected["padded"]), case["id"]
        assert size.grid == (expected["grid_h"], expected["grid_w"]), case["id"]
        assert image_token_count(**case["input"]) == expected["n_pads"], case["id"]


@pytest.mark.parametrize(
    ("size", "grid", "tokens"),
    [
        ((1, 1), (2, 2), 1),
        ((29, 28), (2, 4), 2),
        ((224, 224), (16, 16), 64),
        ((640, 480), (36, 46), 414),
        ((1024, 768), (56, 74), 1036),
        ((1920, 1080), (78, 138), 2691),
        ((3584, 3584), (256, 256), 16_384),
        ((4000, 3000), (216, 286), 15_444),
        ((8000, 6000), (222, 296), 16_428),
        ((100, 20_000), (512, 4), 512),
        ((1861, 7041), (502, 134), 16_817),
        ((3597, 3597), (258, 258), 16_641),
    ],
)
def test_sizes_by_hand(size: tuple[int, int], grid: tuple[int, int], tokens: int) -> None:
    assert (image_size(*size).grid, image_token_count(*size)) == (grid, tokens)


@pytest.mark.parametrize(("width", "height"), [(3597, 3597), (7041, 1861), (20_000, 20_000), (1, 100_000), (7169, 9)])
def test_no_size_exceeds_what_the_tower_takes(width: int, height: int) -> None:
    for size in (image_size(width, height), image_size(height, width)):
        assert max(size.grid) <= 512
        assert size.grid[0] % 2 == size.grid[1] % 2 == 0
        assert size.resized[0] * size.resized[1] <= 65_536 * 14 * 14 * 1.01 + 14 * 7168
        assert size.num_tokens <= 16_817


@pytest.mark.parametrize(("width", "height"), [(0, 5), (5, 0), (-1, 5)])
def test_an_empty_image_is_refused(width: int, height: int) -> None:
    with pytest.raises(ValueError, match=f"{width}x{height} pixels"):
        image_token_count(width, height)
