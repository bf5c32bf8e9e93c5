"""The vision tower and projector, against golden features and against a second, slow version in numpy."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open

from k3jax.config import ConfigError, ModelConfig
from k3jax.nn import vision
from k3jax.nn.vision import BFLOAT16_EPS, FLOAT32_EPS, Vision, VisionConfig, read_vision, released_vision
from k3jax.vision import preprocess
from tests.nn.helpers import relative

IMAGES = ("rgb_small", "rgb_grid", "alpha", "palette", "gray")
LENGTH = 160  # patches of a row in every test here: the five images take 136
SMALL = VisionConfig(
    patch=4, grid_rows=6, grid_columns=5, width=16, mlp_width=28, num_blocks=2, num_heads=3, head_dim=8, text_width=20,
    init_std=1.0, dtype="float32",
)  # fmt: skip


@pytest.fixture(scope="module")
def tensors(golden: Path) -> dict[str, np.ndarray]:
    """Vision tensors of the golden checkpoint."""
    found = {}
    for file in sorted((golden / "tiny_vision").glob("*.safetensors")):
        with safe_open(file, framework="flax") as shard:
            names = [name for name in shard.keys() if name.startswith(("vision_tower", "mm_projector"))]  # noqa: SIM118
            found |= {name: np.asarray(shard.get_tensor(name)) for name in names}
    return found


@pytest.fixture(scope="module")
def vision_json(golden: Path) -> str:
    """The golden checkpoint's `vision_config`."""
    return ModelConfig.from_hf(golden / "tiny_vision").vision_json


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


@pytest.mark.parametrize(("eps", "suffix"), [(FLOAT32_EPS, ""), (BFLOAT16_EPS, "_eps7")])
def test_golden_images_and_video_in_two_rows(
    golden: Path, tensors: Any, vision_json: str, expected: Any, eps: float, suffix: str
) -> None:
    model = read_vision(VisionConfig.from_json(vision_json, dtype="float32", norm_eps=eps), tensors)
    images = [preprocess(Image.open(golden / "tiny_vision" / "images" / f"{name}.png")) for name in IMAGES]
    np.testing.assert_array_equal([grid for _, grid in images], expected["grids"])
    rows = [row_of(*images), row_of((expected["video_patches"], (4, 4, 6)))]
    of_images, of_video = features_of(model, *map(np.stack, zip(*rows, strict=True)))
    assert relative(of_images, expected["features" + suffix]) < 1e-4
    assert relative(of_video, expected["video_features" + suffix]) < 1e-4


def test_the_released_tensors_survive_the_model_bit_for_bit(tensors: Any, vision_json: str) -> None:
    written = dict(released_vision(read_vision(VisionConfig.from_json(vision_json), tensors)))
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert written[name].dtype == tensor.dtype and written[name].shape == tensor.shape
        assert written[name].tobytes() == tensor.tobytes(), name


def test_full_size_tensors_and_parameters() -> None:
    model = jax.eval_shape(lambda: Vision(VisionConfig(), jax.random.key(0)))
    blocks = model.tower.blocks
    leaves, stacked = jax.tree.leaves(model), jax.tree.leaves(blocks)
    assert sum(leaf.size for leaf in leaves) == 447_358_976
    assert len(leaves) - len(stacked) + 27 * len(stacked) == 168
    assert blocks.qkv.shape == (27, 1024, 3, 12, 128) and blocks.out.shape == (27, 12, 128, 1024)


def test_a_missing_or_misshapen_tensor_is_named(tensors: Any, vision_json: str) -> None:
    config, name = VisionConfig.from_json(vision_json), "vision_tower.encoder.blocks.1.wo.weight"
    with pytest.raises(ValueError, match=f"{name} is missing"):
        read_vision(config, {key: tensor for key, tensor in tensors.items() if key != name})
    with pytest.raises(ValueError, match=rf"{name} has shape \(72, 64\), .* \(64, 72\)"):
        read_vision(config, {**tensors, name: tensors[name].T})


@pytest.mark.parametrize(
    ("key", "value"),
    [("norm_type", "layernorm"), ("attn_bias", True), ("pos_emb_interpolation_mode", "bicubic"), ("mm_hidden_size", 9)],
)
def test_another_tower_is_refused_by_name(vision_json: str, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"vision_config\.{key} = {value!r}"):
        VisionConfig.from_json(json.dumps({**json.loads(vision_json), key: value}))


def test_norm_epsilon_at_small_inputs() -> None:
    x = 0.05 * jnp.ones((1, 1024))
    for eps, value in ((FLOAT32_EPS, 1.0), (BFLOAT16_EPS, 0.49)):
        norm = vision.RMSNorm(1024, eps=eps, dtype=jnp.dtype("float32"))
        assert float(norm(x)[0, 0]) == pytest.approx(value, abs=5e-3)


# --- Against a slow version -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Vision:
    """A small tower whose widths all differ."""
    return jax.jit(lambda: Vision(SMALL, jax.random.key(3)))()


def random_item(grid: tuple[int, int, int], seed: int) -> tuple[np.ndarray, tuple[int, int, int]]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((int(np.prod(grid)), 3, SMALL.patch, SMALL.patch)), grid


def slow_features(model: Vision, patches: np.ndarray, grid: tuple[int, int, int]) -> np.ndarray:
    """One item, in float64, one patch, head and block at a time where that is how the equations read."""
    weights = {name: np.asarray(tensor, np.float64) for name, tensor in released_vision(model)}
    config, (t, h, w) = model.config, grid

    def norm(x: np.ndarray, name: str, eps: float) -> np.ndarray:
        return weights[name] * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)

    x = patches.reshape(len(patches), -1) @ weights["vision_tower.patch_embed.proj.weight"].reshape(config.width, -1).T
    cells = [(frame, row, column) for frame in range(t) for row in range(h) for column in range(w)]
    table = weights["vision_tower.patch_embed.pos_emb.weight"]
    omega = 10_000.0 ** (-np.arange(config.width // 2) / (config.width // 2))
    for i, (frame, row, column) in enumerate(cells):
        x[i] += np.einsum("r,c,rcd->d", tent(row, h, len(table)), tent(column, w, table.shape[1]), table)
        if t > 1:
            x[i] += np.concatenate([np.sin(frame * omega), np.cos(frame * omega)])
    turns = np.stack([turn(row, column, config.head_dim) for _, row, column in cells])
    for b in range(config.num_blocks):
        prefix = f"vision_tower.encoder.blocks.{b}."
        qkv = norm(x, prefix + "norm0.weight", config.norm_eps) @ weights[prefix + "wqkv.weight"].T
        q, k, v = np.moveaxis(qkv.reshape(len(x), 3, config.num_heads, config.head_dim), 1, 0)
        q, k = (np.einsum("pij,phj->phi", turns, y) for y in (q, k))
        scores = np.exp(np.einsum("phk,qhk->hpq", q, k) * config.head_dim**-0.5)
        out = np.einsum("hpq,qhk->phk", scores / scores.sum(-1, keepdims=True), v).reshape(len(x), -1)
        x = x + out @ weights[prefix + "wo.weight"].T
        hidden = norm(x, prefix + "norm1.weight", config.norm_eps) @ weights[prefix + "mlp.fc0.weight"].T
        hidden = hidden / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)))
        x = x + hidden @ weights[prefix + "mlp.fc1.weight"].T
    x = norm(x, "vision_tower.encoder.final_layernorm.weight", config.norm_eps)
    x = x.reshape(t, h // 2, 2, w // 2, 2, -1).mean(axis=0).swapaxes(1, 2).reshape(h * w // 4, -1)
    hidden = x @ weights["mm_projector.proj.0.weight"].T
    hidden = hidden * np.asarray(jax.scipy.stats.norm.cdf(hidden))
    return norm(hidden @ weights["mm_projector.proj.2.weight"].T, "mm_projector.post_norm.weight", config.projector_eps)


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


def test_queries_in_groups_change_nothing(model: Vision, monkeypatch: pytest.MonkeyPatch) -> None:
    patches, grids = row_of(*items(), filler=0.0)
    whole, _ = jax.jit(model.__call__)(patches[None], grids[None])
    monkeypatch.setattr(vision, "SCORES", 50 * 3 * LENGTH)  # 48 queries at a time: the last group is smaller
    grouped, _ = jax.jit(lambda: model(patches[None], grids[None]))()
    np.testing.assert_allclose(grouped, whole, atol=2e-5)


def test_an_empty_row_gives_nothing_and_finite_gradients(model: Vision) -> None:
    empty = np.full((LENGTH, 3, SMALL.patch, SMALL.patch), np.nan, np.float32), np.zeros((6, 3), np.int32)
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
