"""The vision tower and projector, against golden features and against a second, slow version in numpy."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import k3jax
from k3jax.config import ModelConfig, VisionConfig
from k3jax.nn import vision
from k3jax.nn.transformer import Transformer
from k3jax.nn.vision import Vision, pack_rows
from k3jax.vision import preprocess
from pallas_kernels.dispatch import compiling_for
from tests.nn.conftest import make_config
from tests.nn.helpers import random_model, relative

IMAGES = ("rgb_small", "rgb_grid", "alpha", "palette", "gray")
LENGTH = 160  # patches of a row in every test here: the five images take 136
TOWER = VisionConfig(
    patch=4, grid_rows=6, grid_columns=5, width=16, mlp_width=28, num_blocks=2, num_heads=3, head_dim=8
)  # fmt: skip
SMALL = make_config(num_layers=2, mla_layers=(1,), vision=TOWER, media_id=7)


@pytest.fixture(scope="module")
def expected(golden: Path) -> Any:
    """Golden features."""
    return np.load(golden / "tiny_vision" / "golden_vision.npz")


@jax.jit
def encode(model: Vision, patches: Any, grids: Any) -> Any:
    return model(patches, grids)


def row_of(*items: tuple[Any, Any], length: int = LENGTH, slots: int = 6, filler: float = np.nan) -> tuple[Any, Any]:
    """One row of items, padded with what must never show, and its grids."""
    patches = np.full((length, *items[0][0].shape[1:]), filler, np.float32)
    packed = np.concatenate([item for item, _ in items])
    patches[: len(packed)] = packed
    grids = np.zeros((slots, 3), np.int32)
    grids[: len(items)] = [grid for _, grid in items]
    return patches, grids


def features_of(model: Vision, patches: Any, grids: Any) -> list[np.ndarray]:
    """Features of each row's items, without padding."""
    features, valid = encode(model, jnp.asarray(patches), jnp.asarray(grids))
    return [np.asarray(row)[np.asarray(seen)] for row, seen in zip(features, valid, strict=True)]


def with_eps(model: Transformer, eps: float) -> Vision:
    """Tower and projector as if the model's config named this epsilon for the tower's norms."""
    config = dataclasses.replace(model.config, vision=dataclasses.replace(model.config.vision, norm_eps=eps))
    other = jax.eval_shape(lambda: Vision(config, jax.random.key(0), dtype=jnp.dtype("float32")))
    return jax.tree.unflatten(jax.tree.structure(other), jax.tree.leaves(model.vision))


def golden_pictures(golden: Path) -> list[tuple[Any, Any]]:
    return [preprocess(Image.open(golden / "tiny_vision" / "images" / f"{name}.png")) for name in IMAGES]


@pytest.mark.parametrize(("eps", "suffix"), [(2.0**-23, ""), (2.0**-7, "_eps7")])
def test_golden_images_and_video_in_two_rows(golden: Path, expected: Any, eps: float, suffix: str) -> None:
    model = with_eps(k3jax.load(golden / "tiny_vision", dtype="float32"), eps)
    images = golden_pictures(golden)
    np.testing.assert_array_equal([grid for _, grid in images], expected["grids"])
    rows = [row_of(*images), row_of((expected["video_patches"], (4, 4, 6)))]
    of_images, of_video = features_of(model, *map(np.stack, zip(*rows, strict=True)))
    assert relative(of_images, expected["features" + suffix]) < 1e-4
    assert relative(of_video, expected["video_features" + suffix]) < 1e-4


def test_golden_logits_of_text_with_images(golden: Path, expected: Any) -> None:
    model = k3jax.load(golden / "tiny_vision", dtype="float32")
    pixels, grids = zip(*golden_pictures(golden), strict=True)
    logits = model(expected["ids"][None], pixels=np.concatenate(pixels), grids=np.asarray(grids))
    assert relative(logits[0], expected["logits"]) < 1e-4


def test_full_size_tensors_and_parameters() -> None:
    config = ModelConfig(vision=VisionConfig())
    model = jax.eval_shape(lambda: Vision(config, jax.random.key(0), dtype=jnp.bfloat16))
    blocks = model.tower.blocks
    leaves, stacked = jax.tree.leaves(model), jax.tree.leaves(blocks)
    assert sum(leaf.size for leaf in leaves) == 447_358_976
    assert len(leaves) - len(stacked) + 27 * len(stacked) == 168
    assert blocks.qkv.shape == (27, 1024, 3, 12, 128) and blocks.out.shape == (27, 12, 128, 1024)


def test_norm_epsilon_at_small_inputs() -> None:
    x = 0.05 * jnp.ones((1, 1024))
    for eps, value in ((VisionConfig.norm_eps, 1.0), (2.0**-7, 0.49)):
        norm = vision.RMSNorm(1024, eps=eps, dtype=jnp.dtype("float32"))
        assert float(norm(x)[0, 0]) == pytest.approx(value, abs=5e-3)


# --- Against a slow version -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole() -> Transformer:
    """A small model with a tower, in which all widths differ."""
    return random_model(SMALL, seed=3)


@pytest.fixture(scope="module")
def model(whole: Transformer) -> Vision:
    """Its tower and projector."""
    return whole.vision


def random_item(grid: tuple[int, int, int], seed: int) -> tuple[np.ndarray, tuple[int, int, int]]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((int(np.prod(grid)), 3, TOWER.patch, TOWER.patch)), grid


def slow_features(model: Vision, patches: np.ndarray, grid: tuple[int, int, int]) -> np.ndarray:
    """One item, in float64, one patch, head and block at a time where that is how the equations read."""
    tower, projector = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), (model.tower, model.projector))
    config, (t, h, w) = TOWER, grid

    def norm(x: np.ndarray, weight: Any, eps: float = TOWER.norm_eps) -> np.ndarray:
        return weight.get_value() * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)

    def product(x: np.ndarray, weight: Any, *index: int) -> np.ndarray:
        weight = weight.get_value()[*index]
        return np.tensordot(x, weight, axes=[range(1, x.ndim), range(x.ndim - 1)])

    x = product(patches, tower.patch)
    cells = [(frame, row, column) for frame in range(t) for row in range(h) for column in range(w)]
    table = tower.grid.get_value()
    omega = 10_000.0 ** (-np.arange(config.width // 2) / (config.width // 2))
    for i, (frame, row, column) in enumerate(cells):
        x[i] += np.einsum("r,c,rcd->d", tent(row, h, len(table)), tent(column, w, table.shape[1]), table)
        if t > 1:
            x[i] += np.concatenate([np.sin(frame * omega), np.cos(frame * omega)])
    turns = np.stack([turn(row, column, config.head_dim) for _, row, column in cells])
    for b in range(config.num_blocks):
        block = jax.tree.map(lambda leaf, b=b: leaf[b], tower.blocks)
        q, k, v = np.moveaxis(product(norm(x, block.norm0.weight), block.qkv), 1, 0)
        q, k = (np.einsum("pij,phj->phi", turns, y) for y in (q, k))
        scores = np.exp(np.einsum("phk,qhk->hpq", q, k) * config.head_dim**-0.5)
        x = x + product(np.einsum("hpq,qhk->phk", scores / scores.sum(-1, keepdims=True), v), block.out)
        hidden = product(norm(x, block.norm1.weight), block.up)
        hidden = hidden / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)))
        x = x + product(hidden, block.down)
    x = norm(x, tower.final_norm.weight)
    x = x.reshape(t, h // 2, 2, w // 2, 2, -1).mean(axis=0).swapaxes(1, 2).reshape(h * w // 4, -1)
    hidden = product(x, projector.up)
    hidden = hidden * np.asarray(jax.scipy.stats.norm.cdf(hidden))
    return norm(product(hidden, projector.down), projector.norm.weight, config.projector_eps)


def tent(index: int, size: int, source: int) -> np.ndarray:
    """Weights of bilinear resampling, as a tent around the source position."""
    place = np.clip((index + 0.5) * source / size - 0.5, 0, source - 1)
    return np.maximum(0, 1 - np.abs(np.arange(source) - place))


def turn(row: int, column: int, head_dim: int) -> np.ndarray:
    """The rotation of a head as one matrix."""
    matrix = np.zeros((head_dim, head_dim))
    for i in range(head_dim // 4):
        for lane, place in ((4 * i, column), (4 * i + 2, row)):
            angle = place * 10_000.0 ** (-4 * i / head_dim)
            block = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
            matrix[lane : lane + 2, lane : lane + 2] = block
    return matrix


GRIDS = ((1, 2, 4), (3, 4, 2), (1, 8, 6), (4, 2, 4), (1, 2, 2))  # smaller and larger than the 6 x 5 grid


def items() -> Iterator[tuple[np.ndarray, tuple[int, int, int]]]:
    return (random_item(grid, seed) for seed, grid in enumerate(GRIDS))


def test_packed_items_of_any_sizes_match_the_slow_version(model: Vision) -> None:
    patches, grids = row_of(*items())
    (features,) = features_of(model, patches[None], grids[None])
    slow = np.concatenate([slow_features(model, *item) for item in items()])
    assert features.shape == slow.shape
    assert relative(features, slow) < 1e-5


def test_an_item_is_the_same_alone_in_another_row_or_in_other_company(model: Vision) -> None:
    packed = list(items())
    rows = [row_of(*packed), row_of(packed[2]), row_of(packed[2], packed[0], packed[3])]
    together, alone, first = features_of(model, *map(np.stack, zip(*rows, strict=True)))
    np.testing.assert_allclose(together[2 + 2 : 2 + 2 + 12], alone, atol=2e-5)
    np.testing.assert_allclose(first[:12], alone, atol=2e-5)


def test_a_row_of_many_tiles_matches_the_slow_version(model: Vision, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pallas_kernels.mla.xla.TILE", 48)  # items begin and end inside tiles; the last tile is padded
    patches, grids = row_of(*items())
    features, valid = jax.jit(lambda: model(patches[None], grids[None]))()
    slow = np.concatenate([slow_features(model, *item) for item in items()])
    assert relative(np.asarray(features[0])[np.asarray(valid[0])], slow) < 1e-5


def test_the_kernel_for_tpus_sees_all_of_an_item_and_nothing_else() -> None:
    segments = np.repeat([0, 1, -1], [90, 80, 30])
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, len(segments), 2, 128), jnp.bfloat16)
    with compiling_for("tpu"):  # interpreted here
        found = np.asarray(vision.attend(q, k, v, jnp.asarray(segments)[None]))[0]
    wide_q, wide_k, wide_v = (np.asarray(x, np.float64)[0] for x in (q, k, v))
    weights = np.exp(np.einsum("phk,qhk->hpq", wide_q, wide_k) * 128**-0.5)
    weights *= (segments[:, None] == segments) & (segments >= 0)
    expected = np.einsum("hpq,qhk->phk", weights / np.maximum(weights.sum(-1, keepdims=True), 1e-30), wide_v)
    assert relative(found, expected) < 1e-2
    assert not np.any(found[segments < 0])


def test_an_empty_row_gives_nothing_and_finite_gradients(model: Vision) -> None:
    empty = np.full((LENGTH, 3, TOWER.patch, TOWER.patch), np.nan, np.float32), np.zeros((6, 3), np.int32)
    full = row_of(*items())
    rows = [np.stack(pair) for pair in zip(full, empty, strict=True)]
    features, valid = encode(model, *rows)
    assert not np.any(valid[1]) and not np.any(features[1])

    @jax.jit
    @jax.grad
    def gradient(model: Vision) -> Any:
        return jnp.sum(model(*rows)[0] ** 3)

    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(gradient(model))]
    assert all(np.all(np.isfinite(leaf)) and np.any(leaf != 0) for leaf in leaves)


# --- In the model -----------------------------------------------------------------------------------------------------

PAD = SMALL.media_id


def text_of(*parts: int | list[int], length: int) -> np.ndarray:
    """Token ids; a number stands for as many media positions."""
    ids = [token for part in parts for token in ([PAD] * part if isinstance(part, int) else part)]
    return np.asarray(ids + [0] * (length - len(ids)))


def pixels_of(*picked: tuple[np.ndarray, Any]) -> dict[str, np.ndarray]:
    return {"pixels": np.concatenate([p for p, _ in picked]), "grids": np.asarray([g for _, g in picked])}


def test_images_of_several_rows_go_where_they_belong(whole: Transformer) -> None:
    first, second, third, *_ = items()  # of 2, 2 and 12 tokens
    rows = [text_of([1], 2, [3], 2, [9], length=24), text_of([4, 5], 12, [6], length=24)]
    together = whole(np.stack(rows), **pixels_of(first, second, third))
    alone = whole(rows[1][None], **pixels_of(third))
    np.testing.assert_allclose(together[1], alone[0], atol=1e-4)  # logits of about 6, other shapes
    swapped = whole(np.stack(rows), **pixels_of(second, first, third))
    np.testing.assert_allclose(swapped[1], together[1], atol=2e-5)
    np.testing.assert_allclose(swapped[0, 0], together[0, 0], atol=2e-5)
    assert relative(swapped[0, 1], together[0, 1]) > 1e-2


def test_generation_sees_the_images(whole: Transformer) -> None:
    tokens = text_of([1], 2, [3], length=4)[None]
    logits = whole(tokens, **pixels_of(next(items())))
    out = whole.generate(tokens, max_new_tokens=1, **pixels_of(next(items())))
    assert int(out[0, 0]) == int(np.argmax(logits[0, -1]))


def test_a_count_that_does_not_fit_is_named_with_both_numbers(whole: Transformer) -> None:
    first, second, third, *_ = items()
    name = r"<\|media_pad\|> \(id 7\)"
    with pytest.raises(ValueError, match=f"have 3 places {name}, but the images 2 features"):
        whole(text_of(3, length=4)[None], **pixels_of(first))
    with pytest.raises(ValueError, match=f"have 3 places {name}, but no images"):
        whole(text_of(3, length=4)[None])
    rows = np.stack([text_of(1, length=4), text_of(3, length=4)])
    with pytest.raises(ValueError, match=f"row 0 has 1 places {name}, but its whole images 0 features"):
        whole(rows, **pixels_of(first, second))
    with pytest.raises(ValueError, match=r"\(8, 3, 4, 4\): grids \[\[1, 8, 6\]\] need \(48, 3, 4, 4\)"):
        whole(rows, pixels=first[0], grids=np.asarray([third[1]]))
    with pytest.raises(ValueError, match="a grid of 5 frames: 1 to 4"):
        pack_rows(SMALL, rows, first[0], np.asarray([[5, 2, 4]]))
    with pytest.raises(ValueError, match="a grid of 3x4 patches: even sides of 2 to 512"):
        pack_rows(SMALL, rows, first[0], np.asarray([[1, 3, 4]]))


def test_a_text_model_refuses_images_and_has_no_leaf_more() -> None:
    config = dataclasses.replace(SMALL, vision=None)
    text = jax.eval_shape(lambda: Transformer(config, jax.random.key(0)))
    with pytest.raises(ValueError, match="the model small has no vision tower"):
        text(text_of(2, length=4)[None], **pixels_of(next(items())))
    with_tower = jax.eval_shape(lambda: Transformer(SMALL, jax.random.key(0)))
    assert len(jax.tree.leaves(with_tower)) - len(jax.tree.leaves(with_tower.vision)) == len(jax.tree.leaves(text))
