"""K3's vision tower (MoonViT-V2) and projector: from packed patches to features in the text model's width.

A row holds the patches of any number of items (an image, or up to four frames of a video) one after the other, in the
released order: frame, row, column; then padding. The grids [t, h, w] of the items say it all: positions, segments and
tokens are computed from them, so one compiled program serves every mix of sizes (spec vision-and-chat 1.2).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from k3jax.config import ConfigError
from k3jax.nn.norm import RMSNorm
from k3jax.nn.param import island, matmul_precision, normal, project

MERGE = 2  # patches of a token's side
THETA = 10_000.0  # of the rotary positions and of the time term
FLOAT32_EPS, BFLOAT16_EPS = 2.0**-23, 2.0**-7  # the two readings of a norm built without an epsilon (spec 1.2 item 5)
SCORES = 2**26  # attention scores that exist at one time: 256 MiB

Turns = tuple[Float[Array, "B P 1 K/2"], Float[Array, "B P 1 K/2"]]  # cosine and sine of the rotary angles

_FIELDS = {
    "patch_size": "patch",
    "init_pos_emb_height": "grid_rows",
    "init_pos_emb_width": "grid_columns",
    "init_pos_emb_time": "max_frames",
    "vt_hidden_size": "width",
    "vt_intermediate_size": "mlp_width",
    "vt_num_hidden_layers": "num_blocks",
    "vt_num_attention_heads": "num_heads",
    "text_hidden_size": "text_width",
    "projector_ln_eps": "projector_eps",
}
_MECHANISMS: dict[str, Any] = {
    "model_type": "moonvit3d",
    "pos_emb_type": "divided_fixed",
    "pos_emb_interpolation_mode": "bilinear",
    "norm_type": "rmsnorm",
    "mlp_type": "mlp2",
    "activation_func": "gelu_pytorch_tanh",
    "attn_bias": False,
    "linear_bias": False,
    "patch_embed_proj_bias": False,
    "merge_kernel_size": [MERGE, MERGE],
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmergerv2",
    "projector_hidden_act": "gelu",
}


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Everything that fixes tower and projector. The defaults are the released Kimi K3."""

    patch: int = 14
    grid_rows: int = 64  # of the learned position grid
    grid_columns: int = 64
    max_frames: int = 4  # of one video item
    width: int = 1024
    mlp_width: int = 4096
    num_blocks: int = 27
    num_heads: int = 12
    head_dim: int = 128  # heads * head_dim is wider than the residual stream
    text_width: int = 7168
    norm_eps: float = FLOAT32_EPS  # of the tower's norms; the release names none, BFLOAT16_EPS is the other reading
    projector_eps: float = 1e-5
    init_std: float = 0.02  # of the learned position grid
    dtype: str = "bfloat16"  # of the computation; float32 islands stay float32

    @property
    def merged_width(self) -> int:
        """Numbers that the projector reads for a token."""
        return MERGE**2 * self.width

    @classmethod
    def from_json(cls, text: str, **changes: Any) -> VisionConfig:
        """Read a released `vision_config` (JSON, as `ModelConfig.vision_json` keeps it); `changes` override fields.

        Raises `ConfigError` naming the key, its value and what K3 supports.
        """
        released = json.loads(text)
        missing = [key for key in (*_FIELDS, *_MECHANISMS, "qkv_hidden_size", "mm_hidden_size") if key not in released]
        if missing:
            raise ConfigError(f"vision_config: {missing[0]} is missing")
        for key, supported in (_MECHANISMS | {"mm_hidden_size": released["vt_hidden_size"]}).items():
            if released[key] != supported:
                raise ConfigError(f"vision_config.{key} = {released[key]!r}: K3's tower has {supported!r}")
        inner, heads = released["qkv_hidden_size"], released["vt_num_attention_heads"]
        if inner % (4 * heads):  # rotary positions turn pairs of lanes, by column and by row in turn
            raise ConfigError(f"vision_config.qkv_hidden_size = {inner}: not a multiple of 4 x {heads} heads")
        fields = {field: released[key] for key, field in _FIELDS.items()}
        return cls(**{**fields, "head_dim": inner // heads, **changes})


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

    def __init__(self, config: VisionConfig, key: PRNGKeyArray, *, dtype: Any):
        self.config = config
        patch_key, grid_key, block_key = jax.random.split(key, 3)
        patch, d, grid = (3, config.patch, config.patch), config.width, (config.grid_rows, config.grid_columns)
        patch_axes = ("channels", "patch_rows", "patch_columns", "vit")
        self.patch = normal(patch_key, (*patch, d), patch_axes, std=math.prod(patch) ** -0.5, dtype=dtype)
        grid_axes = ("grid_rows", "grid_columns", "vit")
        self.grid = normal(grid_key, (*grid, d), grid_axes, std=config.init_std, dtype=dtype)
        self.blocks = jax.vmap(lambda key: VisionBlock(config, key, dtype=dtype))(
            jax.random.split(block_key, config.num_blocks)
        )
        self.final_norm = RMSNorm(d, eps=config.norm_eps, axis="vit", dtype=dtype)

    def __call__(
        self, patches: Float[Array, "B P 3 S S"], grids: Int[Array, "B G 3"]
    ) -> tuple[Float[Array, "B P/4 M"], Bool[Array, "B P/4"]]:
        """Merged vectors of the items' tokens, one item after the other, and which of them exist; the rest is zero."""
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
        patches = jnp.where(valid[..., None, None], patches, 0).astype(self.config.dtype)
        x = project(patches, self.patch, dims=3)
        positions = resample(self.grid.get_value().astype(island(x.dtype)), places)
        times = jnp.asarray(time_table(self.config.max_frames, self.config.width), positions.dtype)
        positions = positions + jnp.where(places.frames[..., None] > 1, times[places.frame], 0)  # no term in an image
        return x + jnp.where(valid, positions, 0).astype(x.dtype)


class Projector(nnx.Module):
    """norm(W2 gelu(W1 m)) with the exact GELU: from the tower's merged vectors to the text model's width."""

    def __init__(self, config: VisionConfig, key: PRNGKeyArray, *, dtype: Any):
        keys = jax.random.split(key)
        m, d = config.merged_width, config.text_width
        self.up = normal(keys[0], (m, m), ("merged", "merged_mlp"), std=m**-0.5, dtype=dtype)
        self.down = normal(keys[1], (m, d), ("merged_mlp", "embed"), std=m**-0.5, dtype=dtype)
        self.norm = RMSNorm(d, eps=config.projector_eps, dtype=dtype)

    def __call__(self, x: Float[Array, "*b M"]) -> Float[Array, "*b D"]:
        return self.norm(project(_gelu(project(x, self.up), approximate=False), self.down))


class Vision(nnx.Module):
    """Tower and projector: from packed patches to the features that stand at the media positions of a text."""

    def __init__(self, config: VisionConfig, key: PRNGKeyArray, *, param_dtype: Any = "float32"):
        tower_key, projector_key = jax.random.split(key)
        dtype = jnp.dtype(param_dtype)
        self.config = config
        self.tower = VisionTower(config, tower_key, dtype=dtype)
        self.projector = Projector(config, projector_key, dtype=dtype)

    def __call__(
        self, patches: Float[Array, "B P 3 S S"], grids: Int[Array, "B G 3"]
    ) -> tuple[Float[Array, "B P/4 D"], Bool[Array, "B P/4"]]:
        """Features of each row's items, one item after the other, and which of them exist; the rest is zero.

        `grids` are (t, h, w) in patches: 1 <= t <= max_frames, h and w even, t h w summed within a row at most P; an
        item of zeros is none. They are traced, so whoever packs the rows checks them (`k3jax.vision.pack`).
        """
        merged, valid = self.tower(patches, grids)
        return jnp.where(valid[..., None], self.projector(merged), 0), valid


def attend(
    q: Float[Array, "B P H K"], k: Float[Array, "B P H K"], v: Float[Array, "B P H K"], segment_ids: Int[Array, "B P"]
) -> Float[Array, "B P H K"]:
    """Full attention among the patches of one segment, for so many queries at a time as `SCORES` allows."""
    batch, length, heads, width = q.shape
    dtype, precision, wide = q.dtype, matmul_precision(q.dtype), island(q.dtype)
    # The gradients of keys and values are sums over all groups of queries: wide out here, they add up in float32.
    k, v = k.astype(wide), v.astype(wide)

    def of_query(query: tuple[Array, Array]) -> Array:
        q, segment = query
        seen = segment_ids == segment[:, None]
        scores = jnp.einsum("bhk,bphk->bhp", q, k.astype(dtype), precision=precision, preferred_element_type=wide)
        weights = jax.nn.softmax(jnp.where(seen[:, None], scores * width**-0.5, -jnp.inf))
        return jnp.einsum("bhp,bphk->bhk", weights.astype(dtype), v.astype(dtype), precision=precision)

    queries = (jnp.moveaxis(q, 1, 0), segment_ids.T)
    group = min(length, max(8, SCORES // (batch * heads * length) // 8 * 8))  # whole sublanes of a TPU
    kept = jax.checkpoint(of_query, prevent_cse=False)  # scores are computed again in the backward pass
    return jnp.moveaxis(jax.lax.map(kept, queries, batch_size=group), 0, 1)


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


# --- The released checkpoint ------------------------------------------------------------------------------------------

# released name -> (leaf, number of the leaf's leading dims that are inputs; 0: the same on disk)
_BLOCK, _BLOCKS = "vision_tower.encoder.blocks.{}.", "tower.blocks."
_RELEASED = {
    "vision_tower.patch_embed.proj.weight": ("tower.patch", 3),
    "vision_tower.patch_embed.pos_emb.weight": ("tower.grid", 0),
    _BLOCK + "norm0.weight": (_BLOCKS + "norm0.weight", 0),
    _BLOCK + "norm1.weight": (_BLOCKS + "norm1.weight", 0),
    _BLOCK + "wqkv.weight": (_BLOCKS + "qkv", 1),
    _BLOCK + "wo.weight": (_BLOCKS + "out", 2),
    _BLOCK + "mlp.fc0.weight": (_BLOCKS + "up", 1),
    _BLOCK + "mlp.fc1.weight": (_BLOCKS + "down", 1),
    "vision_tower.encoder.final_layernorm.weight": ("tower.final_norm.weight", 0),
    "mm_projector.proj.0.weight": ("projector.up", 1),
    "mm_projector.proj.2.weight": ("projector.down", 1),
    "mm_projector.post_norm.weight": ("projector.norm.weight", 0),
}


@dataclass(frozen=True)
class _Layout:
    """A weight of `shape` in the model, its inputs first, and the same on disk, outputs first and flattened."""

    shape: tuple[int, ...]
    inputs: int

    @property
    def disk(self) -> tuple[int, ...]:
        inputs, outputs = self.shape[: self.inputs], self.shape[self.inputs :]
        if not inputs:
            return outputs
        # Only the convolution keeps its inputs apart: channels, rows, columns.
        return (math.prod(outputs), *(inputs if self.inputs == 3 else (math.prod(inputs),)))

    def read(self, tensor: np.ndarray) -> np.ndarray:
        if not self.inputs:
            return tensor
        return tensor.reshape(tensor.shape[0], -1).T.reshape(self.shape)

    def write(self, weight: np.ndarray) -> np.ndarray:
        if not self.inputs:
            return weight
        return np.ascontiguousarray(weight.reshape(math.prod(self.shape[: self.inputs]), -1).T).reshape(self.disk)


def read_vision(config: VisionConfig, tensors: Mapping[str, np.ndarray]) -> Vision:
    """Tower and projector from the released tensors, by their released names and in their own dtype.

    Raises ValueError naming a tensor that is missing or has another shape than `config` says.
    """
    model = jax.eval_shape(lambda: Vision(config, jax.random.key(0)))
    for name, (path, inputs) in _RELEASED.items():
        owner, leaf = _leaf(model, path)
        variable = getattr(owner, leaf)
        if "{}" not in name:
            weight = _read(tensors, name, _Layout(variable.shape, inputs))
        else:
            layout = _Layout(variable.shape[1:], inputs)
            weight = np.stack([_read(tensors, name.format(i), layout) for i in range(config.num_blocks)])
        setattr(owner, leaf, variable.replace(jnp.asarray(weight)))
    return model


def released_vision(model: Vision) -> Iterator[tuple[str, np.ndarray]]:
    """The released tensors of tower and projector, one (name, array) at a time, bit for bit what `read_vision` read."""
    for name, (path, inputs) in _RELEASED.items():
        weight = np.asarray(getattr(*_leaf(model, path)).get_value())
        if "{}" not in name:
            yield name, _Layout(weight.shape, inputs).write(weight)
        else:
            yield from ((name.format(i), _Layout(w.shape, inputs).write(w)) for i, w in enumerate(weight))


def _leaf(model: Vision, path: str) -> tuple[nnx.Module, str]:
    *parents, leaf = path.split(".")
    return functools.reduce(getattr, parents, model), leaf


def _read(tensors: Mapping[str, np.ndarray], name: str, layout: _Layout) -> np.ndarray:
    if name not in tensors:
        raise ValueError(f"{name} is missing from the checkpoint")
    tensor = tensors[name]
    if tensor.shape != layout.disk:
        raise ValueError(f"{name} has shape {tensor.shape}, the vision config says {layout.disk}")
    return layout.read(tensor)
