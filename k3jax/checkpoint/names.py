"""The one table between the released checkpoint's tensors and the model's leaves (spec text-model 3).

Import, export, `hf_tensors`, inspection and conversion all derive from `TABLE`: one row says a family's name on disk,
the leaves it fills, the change of layout, and its dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from k3jax.checkpoint.layout import Layout, Sizes
from k3jax.config import ModelConfig, VisionConfig
from k3jax.nn.plan import Depth
from pallas_kernels.mx import BLOCK

PREFIX = "language_model."  # of every text tensor in the released checkpoint
VISION_PREFIXES = ("vision_tower.", "mm_projector.")
PAD = ""  # in place of a leaf: zeros on disk that the model does not hold
VISION = "vision"  # `where` of the families of tower and projector
WEIGHT, FLOAT32, UINT8 = "weight", "float32", "uint8"  # WEIGHT: the checkpoint's own dtype, bfloat16 in the release


@dataclass(frozen=True)
class Family:
    """Tensors of one name, one for each layer (or expert of a layer) that has them.

    `where` is "model", "vision", or the part of a layer: "layer" (all), "kda", "mla", "dense", "moe"; `{e}` in `name`
    is the expert, `{b}` the block of the vision tower. `leaves` are paths below the model, the layer or the tower's
    block; several leaves split the layout's `a+b` axis.
    """

    where: str
    name: str
    leaves: tuple[str, ...]
    layout: Layout
    dtype: str = WEIGHT

    @property
    def prefix(self) -> str:
        """What the released checkpoint puts before `name` and the layer."""
        return "" if self.where == VISION else PREFIX

    @property
    def per_expert(self) -> bool:
        """Whether there is one tensor for each routed expert."""
        return "{e}" in self.name

    @property
    def per_block(self) -> bool:
        """Whether there is one tensor for each block of the vision tower."""
        return "{b}" in self.name

    def at(self, layer: int) -> str:
        """Name on disk in a layer or a block of the tower, without prefix, `{e}` in place of the expert."""
        return self.name.replace("{b}", str(layer)) if self.per_block else f"model.layers.{layer}.{self.name}"

    def parameters(self, elements: int) -> int:
        """Weights that a tensor of `elements` stored elements holds: two in a packed byte, none in a scale."""
        if self.name.endswith(".weight_scale"):
            return 0
        return 2 * elements if self.name.endswith(".weight_packed") else elements


def _row(where: str, name: str, leaves: str, layout: str, dtype: str = WEIGHT) -> Family:
    return Family(where, name, tuple(PAD if leaf == "0" else leaf for leaf in leaves.split()), Layout(layout), dtype)


_HEADS = "(kda_heads head_dim) embed -> embed kda_heads head_dim"
_TAPS = "(kda_heads head_dim) 1 conv -> kda_heads head_dim conv"
_READ, _WRITE = "{0} embed -> embed {0}", "embed {0} -> {0} embed"  # of the residual stream

FAMILIES = (
    _row("model", "model.embed_tokens.weight", "embed", "vocab embed -> vocab embed"),
    _row("model", "lm_head.weight", "lm_head", "vocab embed -> embed vocab"),
    _row("model", "model.norm.weight", "final_norm.weight", "embed -> embed"),
    _row("model", "model.output_attn_res_norm.weight", "out_mix.norm", "embed -> embed"),
    _row("model", "model.output_attn_res_proj.weight", "out_mix.query", "1 embed -> embed"),
    # every layer
    _row("layer", "input_layernorm.weight", "mixer_norm.weight", "embed -> embed"),
    _row("layer", "post_attention_layernorm.weight", "ffn_norm.weight", "embed -> embed"),
    _row("layer", "self_attention_res_norm.weight", "mixer_mix.norm", "embed -> embed"),
    _row("layer", "self_attention_res_proj.weight", "mixer_mix.query", "1 embed -> embed"),
    _row("layer", "mlp_res_norm.weight", "ffn_mix.norm", "embed -> embed"),
    _row("layer", "mlp_res_proj.weight", "ffn_mix.query", "1 embed -> embed"),
    # KDA; the output gate is full rank, the forget gate (f_a, f_b) is not
    _row("kda", "self_attn.q_proj.weight", "mixer.q", _HEADS),
    _row("kda", "self_attn.k_proj.weight", "mixer.k", _HEADS),
    _row("kda", "self_attn.v_proj.weight", "mixer.v", _HEADS),
    _row("kda", "self_attn.q_conv1d.weight", "mixer.q_conv", _TAPS, FLOAT32),
    _row("kda", "self_attn.k_conv1d.weight", "mixer.k_conv", _TAPS, FLOAT32),
    _row("kda", "self_attn.v_conv1d.weight", "mixer.v_conv", _TAPS, FLOAT32),
    _row("kda", "self_attn.f_a_proj.weight", "mixer.decay_down", _READ.format("low_rank")),
    _row("kda", "self_attn.f_b_proj.weight", "mixer.decay_up", _HEADS.replace("embed", "low_rank")),
    _row("kda", "self_attn.b_proj.weight", "mixer.beta", _READ.format("kda_heads")),
    _row("kda", "self_attn.A_log", "mixer.a_log 0", "kda_heads+a_log_pad -> kda_heads+a_log_pad", FLOAT32),
    _row("kda", "self_attn.dt_bias", "mixer.dt_bias", "(kda_heads head_dim) -> kda_heads head_dim", FLOAT32),
    _row("kda", "self_attn.o_norm.weight", "mixer.out_norm", "head_dim -> head_dim", FLOAT32),
    _row("kda", "self_attn.g_proj.weight", "mixer.out_gate", _HEADS),
    _row("kda", "self_attn.o_proj.weight", "mixer.out", "embed (kda_heads head_dim) -> kda_heads head_dim embed"),
    # MLA
    _row("mla", "self_attn.q_a_proj.weight", "mixer.q_down", _READ.format("q_rank")),
    _row("mla", "self_attn.q_a_layernorm.weight", "mixer.q_norm.weight", "q_rank -> q_rank"),
    _row("mla", "self_attn.q_b_proj.weight", "mixer.q_up",
         "(mla_heads nope_dim+extra_dim) q_rank -> q_rank mla_heads nope_dim+extra_dim"),
    _row("mla", "self_attn.kv_a_proj_with_mqa.weight", "mixer.kv_down", _READ.format("kv_rank+extra_dim")),
    _row("mla", "self_attn.kv_a_layernorm.weight", "mixer.kv_norm.weight", "kv_rank -> kv_rank"),
    _row("mla", "self_attn.kv_b_proj.weight", "mixer.k_up mixer.v_up",
         "(mla_heads nope_dim+v_dim) kv_rank -> kv_rank mla_heads nope_dim+v_dim"),
    _row("mla", "self_attn.g_proj.weight", "mixer.out_gate", "(mla_heads v_dim) embed -> embed mla_heads v_dim"),
    _row("mla", "self_attn.o_proj.weight", "mixer.out", "embed (mla_heads v_dim) -> mla_heads v_dim embed"),
    # dense FFN
    _row("dense", "mlp.gate_proj.weight", "ffn.gate", _READ.format("dense_mlp")),
    _row("dense", "mlp.up_proj.weight", "ffn.up", _READ.format("dense_mlp")),
    _row("dense", "mlp.down_proj.weight", "ffn.down", _WRITE.format("dense_mlp")),
    # LatentMoE
    _row("moe", "block_sparse_moe.gate.weight", "ffn.router.weight", _READ.format("experts")),
    _row("moe", "block_sparse_moe.gate.e_score_correction_bias", "ffn.router.bias", "experts -> experts", FLOAT32),
    _row("moe", "block_sparse_moe.routed_expert_down_proj.weight", "ffn.down", _READ.format("latent")),
    _row("moe", "block_sparse_moe.routed_expert_norm.weight", "ffn.norm.weight", "latent -> latent"),
    _row("moe", "block_sparse_moe.routed_expert_up_proj.weight", "ffn.up", _WRITE.format("latent")),
    _row("moe", "block_sparse_moe.shared_experts.gate_proj.weight", "ffn.shared.gate", _READ.format("shared_mlp")),
    _row("moe", "block_sparse_moe.shared_experts.up_proj.weight", "ffn.shared.up", _READ.format("shared_mlp")),
    _row("moe", "block_sparse_moe.shared_experts.down_proj.weight", "ffn.shared.down", _WRITE.format("shared_mlp")),
)  # fmt: skip

_EXPERT = "block_sparse_moe.experts.{{e}}.{0}"
_EXPERT_AXES = {"w1": ("expert_mlp", "latent"), "w3": ("expert_mlp", "latent"), "w2": ("latent", "expert_mlp")}

# w1 is the gate, w3 the up and w2 the down projection, [out, in] on disk; a float weight is [in, out] in the model.
FLOAT_EXPERTS = tuple(
    _row("moe", _EXPERT.format(w) + ".weight", f"ffn.{w}", f"{out} {in_} -> {in_} {out}")
    for w, (out, in_) in _EXPERT_AXES.items()
)
# MXFP4 keeps the checkpoint's bytes and order: [out, in/2] bytes of two weights, [out, in/32] scales.
MXFP4_EXPERTS = tuple(
    _row("moe", _EXPERT.format(w) + suffix, f"ffn.{w}.{part}", f"{out} {in_}/{n} -> {out} {in_}/{n}", UINT8)
    for w, (out, in_) in _EXPERT_AXES.items()
    for suffix, part, n in ((".weight_packed", "codes", 2), (".weight_scale", "scales", BLOCK))
)
_BLOCK = "vision_tower.encoder.blocks.{{b}}.{0}.weight"
BLOCKS = "vision.tower.blocks."  # the model's leaves of the tower's blocks, stacked

# Vision tower and projector (spec vision-and-chat 1.3)
VISION_FAMILIES = (
    _row(VISION, "vision_tower.patch_embed.proj.weight", "vision.tower.patch",
         "vit channels patch_rows patch_columns -> channels patch_rows patch_columns vit"),
    _row(VISION, "vision_tower.patch_embed.pos_emb.weight", "vision.tower.grid",
         "grid_rows grid_columns vit -> grid_rows grid_columns vit"),
    _row(VISION, _BLOCK.format("norm0"), "norm0.weight", "vit -> vit"),
    _row(VISION, _BLOCK.format("norm1"), "norm1.weight", "vit -> vit"),
    _row(VISION, _BLOCK.format("wqkv"), "qkv",
         "(vit_qkv vit_heads vit_head_dim) vit -> vit vit_qkv vit_heads vit_head_dim"),
    _row(VISION, _BLOCK.format("wo"), "out", "vit (vit_heads vit_head_dim) -> vit_heads vit_head_dim vit"),
    _row(VISION, _BLOCK.format("mlp.fc0"), "up", "vit_mlp vit -> vit vit_mlp"),
    _row(VISION, _BLOCK.format("mlp.fc1"), "down", "vit vit_mlp -> vit_mlp vit"),
    _row(VISION, "vision_tower.encoder.final_layernorm.weight", "vision.tower.final_norm.weight", "vit -> vit"),
    _row(VISION, "mm_projector.proj.0.weight", "vision.projector.up", "merged_mlp merged -> merged merged_mlp"),
    _row(VISION, "mm_projector.proj.2.weight", "vision.projector.down", "embed merged_mlp -> merged_mlp embed"),
    _row(VISION, "mm_projector.post_norm.weight", "vision.projector.norm.weight", "embed -> embed"),
)  # fmt: skip
TABLE = FAMILIES + FLOAT_EXPERTS + MXFP4_EXPERTS + VISION_FAMILIES


@dataclass(frozen=True)
class Placement:
    """A family in one stack: its leaves are stacked over `layers` (in depth order) and, within, over experts.

    `stack` is the path of the stack's leaves, with a dot at its end; empty for a tensor of the whole model.
    """

    family: Family
    stack: str
    layers: tuple[int, ...]
    experts: int | None

    @property
    def leaves(self) -> tuple[str, ...]:
        """Full paths of the model's leaves, PAD where zeros are."""
        return _below(self.stack, self.family.leaves)

    @property
    def lead(self) -> tuple[int, ...]:
        """Leading dims of the leaves: layers, then experts."""
        layers = (len(self.layers),) if self.stack else ()
        return layers if self.experts is None else (*layers, self.experts)

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name on disk without prefix, index into the leading dims) of every tensor."""
        if not self.stack:
            yield self.family.name, ()
            return
        for i, layer in enumerate(self.layers):
            name = self.family.at(layer)
            if self.experts is None:
                yield name, (i,)
            else:
                head, tail = name.split("{e}")
                for e in range(self.experts):
                    yield f"{head}{e}{tail}", (i, e)


@dataclass(frozen=True, eq=False)
class Entry:
    """The tensors of one family in one layer, and the arrays of an Orbax tree that hold them.

    Its block is an array [experts, *axes] or [*axes] in the order of the disk: `axes` are the layout's, flattened ones
    apart. Its arrays hold the same, one for each part of an `a+b` axis, in the model's order of axes.
    """

    family: Family
    name: str  # on disk without prefix, `{e}` in place of the expert
    arrays: tuple[str, ...]  # in an Orbax tree with one array per layer and matrix; PAD where zeros are
    stacked: tuple[str, ...]  # the model's leaves, where an Orbax tree holds these instead
    row: tuple[int, ...]  # this layer in `stacked`
    experts: int | None
    sizes: Sizes

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Of the block."""
        lead = () if self.experts is None else (self.experts,)
        return (*lead, *self.family.layout.flat_shape(self.sizes))

    @cached_property
    def tensor_shape(self) -> tuple[int, ...]:
        """Of each tensor on disk."""
        return self.family.layout.disk_shape(self.sizes)

    @cached_property
    def axes(self) -> list[str]:
        """Names of the block's axes."""
        lead = [] if self.experts is None else ["experts"]
        return lead + self.family.layout.axes

    @cached_property
    def order(self) -> list[int]:
        """For each axis of the block, its position in the arrays."""
        lead = 0 if self.experts is None else 1
        return [*range(lead), *(lead + axis for axis in self.family.layout.order)]

    @cached_property
    def row_elements(self) -> int:
        """Elements in one step along the block's first axis, which the bytes on disk follow."""
        return math.prod(self.shape[1:])

    @property
    def split_axis(self) -> int | None:
        """The block's axis that several arrays share; None where one array holds the block."""
        if len(self.arrays) == 1:
            return None
        return next(i for i, axis in enumerate(self.axes) if "+" in axis)

    def rows(self, start: int, stop: int) -> slice:
        """What each array holds of the block's rows `start` to `stop`; all, where arrays take turns along the rows."""
        return slice(None) if self.split_axis == 0 else slice(start, stop)

    def part_sizes(self) -> list[int]:
        """Along `split_axis`, the size of each array."""
        return self.family.layout.part_sizes(self.sizes)

    def tensor(self, expert: int = 0) -> str:
        """Name on disk of an expert's tensor, or of the only one, without prefix."""
        return self.name if self.experts is None else self.name.replace("{e}", str(expert))


def entries(config: ModelConfig) -> list[Entry]:
    """The model's entries, layer by layer; then those of no layer, and tower and projector."""
    sizes, found = axis_sizes(config), []
    for placement in placements(config):
        family, is_vision = placement.family, placement.family.where == VISION
        stem = BLOCKS if is_vision else "layers."
        for row, layer in enumerate(placement.layers):
            arrays = _below(f"{stem}{layer}.", family.leaves)
            entry = Entry(family, family.at(layer), arrays, placement.leaves, (row,), placement.experts, sizes)
            found.append((config.num_layers + 1 if is_vision else layer, entry))
        if not placement.stack:
            entry = Entry(family, family.name, family.leaves, placement.leaves, (), None, sizes)
            found.append((config.num_layers + is_vision, entry))
    return [entry for _, entry in sorted(found, key=lambda item: item[0])]


def carried_entry(name: str, shape: tuple[int, ...]) -> Entry:
    """A tensor of a tower or projector that the config does not describe, kept as it is under its released name."""
    axes = [f"d{i}" for i in range(len(shape))]
    layout = Layout(f"{' '.join(axes)} -> {' '.join(axes)}")
    return Entry(
        Family(VISION, name, (name,), layout), name, (name,), (name,), (), None, dict(zip(axes, shape, strict=True))
    )


def _below(prefix: str, leaves: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(leaf and prefix + leaf for leaf in leaves)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a checkpoint: its name without prefix, shape and dtype on disk, and its family."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    family: Family


def placements(config: ModelConfig) -> list[Placement]:
    """Every family in every stack of `config`; MXFP4 experts where `config.quantized_experts`."""
    families = (*FAMILIES, *(MXFP4_EXPERTS if config.quantized_experts else FLOAT_EXPERTS))
    placed = [Placement(family, "", (), None) for family in families if family.where == "model"]
    for kind, layers in Depth(config).layers_of.items():
        parts = ("layer", *kind.split("_"))
        for family in families:
            if family.where in parts:
                experts = config.moe.num_experts if family.per_expert else None
                placed.append(Placement(family, f"stacks.{kind}.", tuple(layers), experts))
    if config.vision is not None:
        blocks = tuple(range(config.vision.num_blocks))
        placed += [
            Placement(family, BLOCKS, blocks, None) if family.per_block else Placement(family, "", (), None)
            for family in VISION_FAMILIES
        ]
    return placed


def tensor_specs(config: ModelConfig, *, weight_dtype: str = "bfloat16") -> Iterator[TensorSpec]:
    """Every tensor of `config`'s checkpoint as it lies on disk."""
    sizes = axis_sizes(config)
    for placement in placements(config):
        family = placement.family
        shape = family.layout.disk_shape(sizes)
        dtype = weight_dtype if family.dtype == WEIGHT else family.dtype
        for name, _ in placement.tensors():
            yield TensorSpec(name, shape, dtype, family)


def active_parameters(config: ModelConfig, family: Family, parameters: int) -> int:
    """Of `parameters` in a family, those a text token uses: none of the embedding, top_k of the routed experts."""
    if family.name == "model.embed_tokens.weight" or family.where == VISION:
        return 0
    return parameters * config.moe.top_k // config.moe.num_experts if family.per_expert else parameters


def axis_sizes(config: ModelConfig) -> Sizes:
    """Sizes of the axes that the table's layouts name."""
    kda, mla, moe = config.kda, config.mla, config.moe
    return {
        "vocab": config.vocab_size,
        "embed": config.width,
        "dense_mlp": config.dense_width,
        "kda_heads": kda.num_heads,
        "head_dim": kda.head_dim,
        "low_rank": kda.head_dim,
        "conv": kda.conv_width,
        "a_log_pad": kda.a_log_length - kda.num_heads,
        "mla_heads": mla.num_heads,
        "q_rank": mla.q_rank,
        "kv_rank": mla.kv_rank,
        "nope_dim": mla.nope_dim,
        "extra_dim": mla.extra_dim,
        "v_dim": mla.v_dim,
        "experts": moe.num_experts,
        "latent": moe.latent_width,
        "expert_mlp": moe.expert_width,
        "shared_mlp": moe.shared_width,
        **({} if config.vision is None else _vision_sizes(config.vision)),
    }


def _vision_sizes(vision: VisionConfig) -> Sizes:
    return {
        "vit": vision.width,
        "vit_qkv": 3,
        "vit_heads": vision.num_heads,
        "vit_head_dim": vision.head_dim,
        "vit_mlp": vision.mlp_width,
        "channels": 3,
        "patch_rows": vision.patch,
        "patch_columns": vision.patch,
        "grid_rows": vision.grid_rows,
        "grid_columns": vision.grid_columns,
        "merged": vision.merged_width,
        "merged_mlp": vision.merged_width,
    }
