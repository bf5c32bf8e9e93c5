"""Items of any sizes in rows of few lengths, and their features back in the order they were given."""

import itertools

import numpy as np
import pytest

from k3jax.vision import Packed, pack
from k3jax.vision.image import Grid, Patches, image_size
from k3jax.vision.pack import BUCKETS


def item(number: int, grid: Grid) -> tuple[Patches, Grid]:
    """An item whose every patch says which item and which patch it is."""
    patches = np.zeros((int(np.prod(grid)), 3, 14, 14), np.float32)
    patches[:, 0, 0, 0], patches[:, 1, 0, 0] = number, np.arange(len(patches))
    return patches, grid


def bucket_of(packed: Packed) -> int:
    """The shortest row that holds what the fullest one has."""
    fullest = int(np.prod(packed.grids, axis=-1).sum(axis=-1).max())
    return next(bucket for bucket in BUCKETS if bucket >= fullest)


def as_features(packed: Packed) -> np.ndarray:
    """What a tower would return if a token said which item it belongs to and which of its tokens it is."""
    features = np.full((len(packed.patches), packed.patches.shape[1] // 4, 2), -1)
    for row, grids in enumerate(packed.grids):
        patch = token = 0
        for frames, height, width in grids:
            count = height * width // 4
            features[row, token : token + count, 0] = packed.patches[row, patch, 0, 0, 0] if count else 0
            features[row, token : token + count, 1] = np.arange(count)
            patch, token = patch + frames * height * width, token + count
    return features


@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize(
    "grids", [((1, 16, 16), (1, 32, 16), (1, 4, 4)), ((4, 4, 6), (1, 2, 2), (3, 2, 4)), ((1, 2, 2),)]
)
def test_features_come_back_in_order(grids: tuple[Grid, ...], rows: int) -> None:
    packed = pack([item(number, grid) for number, grid in enumerate(grids)], rows=rows)
    assert packed.patches.shape == (rows, bucket_of(packed), 3, 14, 14)
    for number, (features, grid) in enumerate(zip(packed.split(as_features(packed)), grids, strict=True)):
        assert features[:, 0].tolist() == [number] * (grid[1] * grid[2] // 4)
        assert features[:, 1].tolist() == list(range(len(features)))


def test_rows_take_even_shares() -> None:
    packed = pack([item(i, (1, 16, 16)) for i in range(10)], rows=4)
    assert np.sum(np.prod(packed.grids, axis=-1), axis=-1).tolist() == [768, 768, 512, 512]
    assert packed.grids.shape == (4, 4, 3)


def test_the_largest_image_fits_the_last_bucket() -> None:
    assert 4 * image_size(1861, 7041).num_tokens == 67_268 <= BUCKETS[-1]
    assert all(b <= 1.5 * a or a <= 2048 for a, b in itertools.pairwise(BUCKETS))


@pytest.mark.parametrize(
    ("grid", "message"),
    [((5, 2, 2), "5 frames"), ((0, 2, 2), "0 frames"), ((1, 3, 2), "3x2"), ((1, 514, 2), "514x2"), ((1, 2, 0), "2x0")],
)
def test_a_grid_the_tower_does_not_take_is_refused(grid: Grid, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack([item(0, grid)])


def test_patches_that_do_not_fit_their_grid_or_any_row_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(8, 3, 14, 14\) for a grid of 1x2x2"):
        pack([(item(0, (1, 2, 4))[0], (1, 2, 2))])
    broad = np.broadcast_to(np.float32(0), (256 * 256, 3, 14, 14)), (1, 256, 256)
    with pytest.raises(ValueError, match=f"131072 patches in a row: at most {BUCKETS[-1]}"):
        pack([broad, broad])
