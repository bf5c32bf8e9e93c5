"""K3's vision tower (MoonViT-V2) and projector: from packed patches to features in the text model's width.

A row holds the patches of any number of items (an image, or up to four frames of a video) one after the other, in the
released order: frame, row, column; then padding. The grids [t, h, w] of the items say it all: positions, segments and
tokens are computed from them, so one compiled program serves every mix of sizes (spec vision-and-chat 1.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from k3jax.config import ModelConfig, VisionConfig
from k3jax.nn.norm import RMSNorm
from k3jax.nn.param import cast, island, normal, project
from pallas_kernels.mla import attention
from sharding.local import index_of, joined

MERGE = 2  # patches of a token's side
SIDE = 512  # patches of an item's side at most
THETA = 10_000.0  # of the rotary positions and of the time term

Turns = tuple[Float[Array, "B P 1 K/2"], Float[Array, "B P 1 K/2"]]  # cosine and sine of the rotary angles


@dataclass(frozen=True)
class Places:
    """Where each cell of a row lies: its item (`segment`, -1 for padding), frame, row and column, its item's sizes."""

    item: Int[Array, "B P"]  # `segment` with padding in the last item, to index with
    segment: Int[Array, "B P"]
    frame: Int[Array, "B P"]
    row: Int[Array, "B P"]
    column: Int[Array, "B P"]
    frames: Int[Array, "B P"]  # sizes are 1 for padding
    height: Int[Array, "B P"]
    width: Int[Array, "B P"]


def locate(grids: Int[Array, "B G 3"], length: int) -> Places:
    """Places of the `length` cells of each row that holds items of `grids` (t, h, w) one after the other."""
    sizes = jnp.prod(grids, axis=-1)
    ends = jnp.cumsum(sizes, axis=-1)
    cells = jnp.arange(length)
    item = jnp.sum(cells[None, :, None] >= ends[:, None, :], axis=-1)  # items that end before a cell
    valid = item < grids.shape[1]
    item = jnp.minimum(item, grids.shape[1] - 1)
    frames, height, width = jnp.unstack(jnp.where(valid[..., None], _rows(grids, item), 1), axis=-1)
    local = jnp.where(valid, cells - _rows(ends - sizes, item), 0)
    frame, within = local // (height * width), local % (height * width)
    row, column = within // width, within % width
    return Places(item, jnp.where(valid, item, -1), frame, row, column, frames, height, width)


class VisionBlock(nnx.Module):
    """A pre-norm block: full attention within an item, then a two-layer MLP with tanh-approximated GELU."""

    def __init__(self, config: VisionConfig, key: PRNGKeyArray, *, dtype: Any):
        keys = jax.random.split(key, 4)
        d, f, h, k = config.width, config.mlp_width, config.num_heads, config.head_dim
        heads = ("vit_heads", "vit_head_dim")
        self.norm0 = RMSNorm(d, eps=config.norm_eps, axis="vit", dtype=dtype)
        self.qkv = normal(keys[0], (d, 3, h, k), ("vit", "vit_qkv", *heads), std=d**-0.5, dtype=dtype)
        self.out = normal(keys[1], (h, k, d), (*heads, "vit"), std=(h * k) ** -0.5, dtype=dtype)
        self.norm1 = RMSNorm(d, eps=config.norm_eps, axis="vit", dtype=dtype)
        self.up = normal(keys[2], (d, f), ("vit", "vit_mlp"), std=d**-0.5, dtype=dtype)
        self.down = normal(keys[3], (f, d), ("vit_mlp", "vit"), std=f**-0.5, dtype=dtype)

    def __call__(self, x: Float[Array, "B P D"], turns: Turns, segment_ids: Int[Array, "B P"]) -> Float[Array, "B P D"]:
        q, k, v = jnp.unstack(project(self.norm0(x), self.qkv), axis=2)
        attended = attend(rotate(q, turns), rotate(k, turns), v, segment_ids)
        x = x + project(attended, self.out, dims=2)
        return x + project(_gelu(project(self.norm1(x), self.up), approximate=True), self.down)


class VisionTower(nnx.Module):
    """MoonViT-V2 up to the merge: patches to one vector for each 2 x 2 patches, averaged over an item's frames."""

    def __init__(self, config: VisionConfig, key: PRNGKeyArray, *, init_std: float, dtype: Any):
        self.config = config
        patch_key, grid_key, block_key = jax.random.split(key, 3)
        patch, d, grid = (3, config.patch, config.patch), config.width, (config.grid_rows, config.grid_columns)
        patch_axes = ("channels", "patch_rows", "patch_columns", "vit")
        self.patch = normal(patch_key, (*patch, d), patch_axes, std=math.prod(patch) ** -0.5, dtype=dtype)
        grid_axes = ("grid_rows", "grid_columns", "vit")
        self.grid = normal(grid_key, (*grid, d), grid_axes, std=init_std, dtype=dtype)
        self.blocks = jax.vmap(lambda key: VisionBlock(config, key, dtype=dtype))(
            jax.random.split(block_key, config.num_blocks)
        )
        self.final_norm = RMSNorm(d, eps=config.norm_eps, axis="vit", dtype=dtype)

    def __call__(
        self, patches: Float[Array, "B P 3 S S"], grids: Int[Array, "B G 3"]
    ) -> tuple[Float[Array, "B P/4 M"], Bool[Array, "B P/4"]]:
        """Merged vectors of the items' tokens, one item after the other, and which of them exist; the rest is zero.

        The dtype of `patches` is that of the computation.
        """
        places = locate(grids, patches.shape[1])
        x = self._embed(patches, places)
        turns = rotary_turns(places, self.config.head_dim, dtype=island(x.dtype))

        def step(x: Array, block: VisionBlock) -> tuple[Array, None]:
            return block(x, turns, places.segment), None

        x, _ = jax.lax.scan(jax.checkpoint(step, prevent_cse=False), x, self.blocks)
        return merge(self.final_norm(x), grids, max_frames=self.config.max_frames)

    def _embed(self, patches: Array, places: Places) -> Array:
        """Patches and positions; padding is zero whatever it held, in values and in gradients."""
        valid = places.segment[..., None] >= 0
        x = project(jnp.where(valid[..., None, None], patches, 0), self.patch, dims=3)
        positions = resample(cast(self.grid, island(x.dtype)), places)
        times = jnp.asarray(time_table(self.config.max_frames, self.config.width), positions.dtype)
        positions = positions + jnp.where(places.frames[..., None] > 1, times[places.frame], 0)  # no term in an image
        return x + jnp.where(valid, positions, 0).astype(x.dtype)


class Projector(nnx.Module):
    """norm(W2 gelu(W1 m)) with the exact GELU: from the tower's merged vectors to the text model's width."""

    def __init__(self, config: VisionConfig, width: int, key: PRNGKeyArray, *, dtype: Any):
        keys = jax.random.split(key)
        m = config.merged_width
        self.up = normal(keys[0], (m, m), ("merged", "merged_mlp"), std=m**-0.5, dtype=dtype)
        self.down = normal(keys[1], (m, width), ("merged_mlp", "embed"), std=m**-0.5, dtype=dtype)
        self.norm = RMSNorm(width, eps=config.projector_eps, dtype=dtype)

    def __call__(self, x: Float[Array, "*b M"]) -> Float[Array, "*b D"]:
        return self.norm(project(_gelu(project(x, self.up), approximate=False), self.down))


class Vision(nnx.Module):
    """Tower and projector of a model: from packed patches to the features that stand at its texts' media positions."""

    def __init__(self, config: ModelConfig, key: PRNGKeyArray, *, dtype: Any):
        assert config.vision is not None
        tower_key, projector_key = jax.random.split(key)
        self.dtype = config.dtype  # of the computation
        self.tower = VisionTower(config.vision, tower_key, init_std=config.init_std, dtype=dtype)
        self.projector = Projector(config.vision, config.width, projector_key, dtype=dtype)

    def __call__(
        self, patches: Float[Array, "B P 3 S S"], grids: Int[Array, "B G 3"]
    ) -> tuple[Float[Array, "B P/4 D"], Bool[Array, "B P/4"]]:
        """Features of each row's items, one item after the other, and which of them exist; the rest is zero.

        `grids` are (t, h, w) in patches: 1 <= t <= max_frames, h and w even, t h w summed within a row at most P; an
        item of zeros is none. They are traced: who packs the rows checks them (`pack_rows`, `k3jax.vision.pack`).
        """
        merged, valid = self.tower(patches.astype(self.dtype), grids)
        return jnp.where(valid[..., None], self.projector(merged), 0), valid


def insert_features(
    x: Float[Array, "B T D"], media: Bool[Array, "B T"], features: Float[Array, "B N D"]
) -> Float[Array, "B T D"]:
    """`x` with a row's features, in their order, at its `media` positions; `N` at least as many as a row has."""
    counts = joined(jnp.sum(media, axis=1, keepdims=True), "seq", dim=1)  # in each part of a row
    before = jnp.sum(jnp.where(jnp.arange(counts.shape[1]) < index_of("seq"), counts, 0), axis=1, keepdims=True)
    index = jnp.maximum(before + jnp.cumsum(media, axis=1) - 1, 0)
    return jnp.where(media[..., None], _rows(features, index).astype(x.dtype), x)


def pack_rows(
    config: ModelConfig,
    tokens: Int[np.ndarray, "B T"],
    pixels: Float[np.ndarray, "n 3 S S"],
    grids: Int[np.ndarray, "i 3"],
) -> tuple[Float[np.ndarray, "B P 3 S S"], Int[np.ndarray, "B G 3"]]:
    """Items, one after the other, in the rows whose texts have places for them: where a token is `config.media_id`.

    P and G are rounded up, so that few programs are compiled. Raises ValueError, with both numbers, for a model without
    a tower, a grid that it does not take, patches that are not those of the grids, and places not those of the items.
    """
    if config.vision is None:
        raise ValueError(f"pixels of shape {pixels.shape}, but the model {config.name} has no vision tower")
    grids = np.asarray(grids).reshape(-1, 3)
    for grid in grids.tolist():
        _check_grid(grid, config.vision.max_frames)
    sizes, counts = np.prod(grids, axis=1), grids[:, 1] * grids[:, 2] // MERGE**2
    patch, total = config.vision.patch, int(np.sum(sizes))
    if pixels.shape != (total, 3, patch, patch):
        raise ValueError(f"pixels of shape {pixels.shape}: grids {grids.tolist()} need {(total, 3, patch, patch)}")
    places, name = _places_of(config, tokens)
    if np.sum(places) != np.sum(counts):
        raise ValueError(f"the tokens have {np.sum(places)} places {name}, but the images {np.sum(counts)} features")
    ends = np.searchsorted(np.cumsum(counts), np.cumsum(places), side="right").tolist()  # items before each row's end
    rows = list(zip([0, *ends[:-1]], ends, strict=True))
    for row, (first, last) in enumerate(rows):
        if places[row] != (found := np.sum(counts[first:last])):
            raise ValueError(f"row {row} has {places[row]} places {name}, but its whole images {found} features")
    loads = [int(np.sum(sizes[first:last])) for first, last in rows]
    patches = np.zeros((len(rows), _rounded(max(loads), MERGE**2), *pixels.shape[1:]), pixels.dtype)
    listed = np.zeros((len(rows), _rounded(max(last - first for first, last in rows), 1), 3), np.int32)
    starts = np.cumsum([0, *loads])
    for row, (first, last) in enumerate(rows):
        patches[row, : loads[row]] = pixels[starts[row] : starts[row + 1]]
        listed[row, : last - first] = grids[first:last]
    return patches, listed


def check_no_places(config: ModelConfig, tokens: Int[np.ndarray, "B T"]) -> None:
    """Raise ValueError where tokens without images have places for features."""
    places, name = _places_of(config, tokens)
    if np.any(places):
        raise ValueError(f"the tokens have {np.sum(places)} places {name}, but no images: give pixels= and grids=")


def _places_of(config: ModelConfig, tokens: np.ndarray) -> tuple[np.ndarray, str]:
    """How many features each row has a place for, and what a place is called."""
    return np.sum(tokens == config.media_id, axis=1), f"<|media_pad|> (id {config.media_id})"


def _check_grid(grid: Sequence[int], max_frames: int) -> None:
    frames, height, width = grid
    if not 1 <= frames <= max_frames:
        raise ValueError(f"a grid of {frames} frames: 1 to {max_frames}")
    if any(side % MERGE or not MERGE <= side <= SIDE for side in (height, width)):
        raise ValueError(f"a grid of {height}x{width} patches: even sides of {MERGE} to {SIDE}")


def _rounded(size: int, least: int) -> int:
    """The next of least * 1, 2, 3, 4, 6, 8, 12, 16, ..."""
    units = max(1, -(-size // least))
    power = 1 << (units - 1).bit_length()
    return least * (3 * power // 4 if units <= 3 * power // 4 and power >= 4 else power)


def attend(
    q: Float[Array, "B P H K"], k: Float[Array, "B P H K"], v: Float[Array, "B P H K"], segment_ids: Int[Array, "B P"]
) -> Float[Array, "B P H K"]:
    """Full attention among the patches of one item; 0 for padding. No body keeps a matrix of scores in memory."""
    # Queries that come after all keys: the causal mask of the text's attention hides nothing, and segments remain.
    return attention(q, k, v, segment_ids=segment_ids, q_offset=q.shape[1]).output


def rotary_turns(places: Places, head_dim: int, *, dtype: Any) -> Turns:
    """Cosine and sine for each pair of lanes: pair 2i turns by column * f_i and pair 2i + 1 by row * f_i."""
    frequencies = jnp.asarray(THETA ** (-4 * np.arange(head_dim // 4) / head_dim), dtype)
    places_xy = jnp.stack([places.column, places.row], axis=-1)
    angles = places_xy[..., None, :] * frequencies[:, None]
    angles = angles.reshape(*places.row.shape, 1, head_dim // 2)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Float[Array, "B P H K"], turns: Turns) -> Float[Array, "B P H K"]:
    """Turn the pairs of adjacent lanes, in the dtype of `turns`; the result has x's."""
    cosine, sine = turns
    a, b = jnp.unstack(x.astype(cosine.dtype).reshape(*x.shape[:-1], -1, 2), axis=-1)
    turned = jnp.stack([a * cosine - b * sine, a * sine + b * cosine], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)


def resample(grid: Float[Array, "R C D"], places: Places) -> Float[Array, "B P D"]:
    """The grid at each patch's place, bilinear between half-pixel centres without antialiasing."""
    rows, columns, _ = grid.shape
    top, bottom, down = _neighbours(places.row, places.height, rows, grid.dtype)
    left, right, across = _neighbours(places.column, places.width, columns, grid.dtype)
    above = grid[top, left] * (1 - across) + grid[top, right] * across
    below = grid[bottom, left] * (1 - across) + grid[bottom, right] * across
    return above * (1 - down) + below * down


def _neighbours(index: Array, size: Array, source: int, dtype: Any) -> tuple[Array, Array, Array]:
    """The two source cells around cell `index` of `size`, and the share [..., 1] of the second."""
    place = jnp.clip((index.astype(dtype) + 0.5) * source / size - 0.5, 0, source - 1)
    first = jnp.floor(place).astype(jnp.int32)
    return first, jnp.minimum(first + 1, source - 1), (place - first)[..., None]


def time_table(frames: int, width: int) -> Float[np.ndarray, "T D"]:
    """[sin(t w) | cos(t w)], w_k = theta^(-2k / width): fixed, and in no checkpoint."""
    angles = np.outer(np.arange(frames), THETA ** (-2 * np.arange(width // 2) / width))
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


def merge(
    x: Float[Array, "B P D"], grids: Int[Array, "B G 3"], *, max_frames: int
) -> tuple[Float[Array, "B P/4 M"], Bool[Array, "B P/4"]]:
    """For each token its 2 x 2 patches side by side (row by row), averaged over its item's frames; zero where none."""
    frames, height, width = jnp.unstack(grids, axis=-1)
    in_tokens = jnp.stack([jnp.minimum(frames, 1), height // MERGE, width // MERGE], axis=-1)
    tokens = locate(in_tokens, x.shape[1] // MERGE**2)
    sizes = jnp.prod(grids, axis=-1)
    start = _rows(jnp.cumsum(sizes, axis=-1) - sizes, tokens.item)
    line = MERGE * tokens.width  # patches
    corner = start + MERGE * (tokens.row * line + tokens.column)
    patches = jnp.stack([corner, corner + 1, corner + line, corner + line + 1], axis=-1)
    valid, count = tokens.segment >= 0, jnp.maximum(_rows(frames, tokens.item), 1)
    total = jnp.zeros((*patches.shape, x.shape[-1]), island(x.dtype))
    for frame in range(max_frames):
        seen = (valid & (frame < count))[..., None]
        index = jnp.where(seen, patches + (frame * MERGE * tokens.height * line)[..., None], 0)
        total = total + jnp.where(seen[..., None], _rows(x, index), 0)
    mean = (total / count[..., None, None]).astype(x.dtype)
    return mean.reshape(*valid.shape, -1), valid


def _gelu(x: Array, *, approximate: bool) -> Array:
    return jax.nn.gelu(x.astype(island(x.dtype)), approximate=approximate).astype(x.dtype)


def _rows(values: Array, index: Array) -> Array:
    """values[b, index[b]] for each row b."""
    return jax.vmap(lambda values, index: values[index])(values, index)
