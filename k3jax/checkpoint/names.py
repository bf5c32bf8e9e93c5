"""The one table between the released checkpoint's tensors and the model's leaves (spec text-model 3).

Import, export, `hf_tensors`, inspection and conversion all derive from `TABLE`: one row says a family's name on disk,
the leaves it fills, the change of layout, and its dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from k3jax.checkpoint.layout import Layout, Sizes
from k3jax.config import ModelConfig
from k3jax.nn.plan import Depth
from pallas_kernels.mx import BLOCK

PREFIX = "language_model."  # of every text tensor in the released checkpoint
VISION_PREFIXES = ("vision_tower.", "mm_projector.")
PAD = ""  # in place of a leaf: zeros on disk that the model does not hold
WEIGHT, FLOAT32, UINT8 = "weight", "float32", "uint8"  # WEIGHT: the checkpoint's own dtype, bfloat16 in the release


@dataclass(frozen=True)
class Family:
    """Tensors of one name, one for each layer (or expert of a layer) that has them.

    `where` is "model" or the part of a layer: "layer" (all), "kda", "mla", "dense", "moe"; `{e}` in `name` is the
    expert. `leaves` are paths below the model or the layer; several leaves split the layout's `a+b` axis.
    """

    where: str
    name: str
    leaves: tuple[str, ...]
    layout: Layout
    dtype: str = WEIGHT

    @property
    def per_expert(self) -> bool:
        """Whether there is one tensor for each routed expert."""
        return "{e}" in self.name

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
TABLE = FAMILIES + FLOAT_EXPERTS + MXFP4_EXPERTS


@dataclass(frozen=True)
class Placement:
    """A family in one stack of layers: its leaves are stacked over `layers` (in depth order) and, within, experts."""

    family: Family
    kind: str | None  # of the layers; None for a tensor of the whole model
    layers: tuple[int, ...]
    experts: int | None

    @property
    def leaves(self) -> tuple[str, ...]:
        """Full paths of the model's leaves, PAD where zeros are."""
        prefix = f"stacks.{self.kind}." if self.kind else ""
        return tuple(leaf and prefix + leaf for leaf in self.family.leaves)

    @property
    def lead(self) -> tuple[int, ...]:
        """Leading dims of the leaves: layers, then experts."""
        layers = (len(self.layers),) if self.kind else ()
        return layers if self.experts is None else (*layers, self.experts)

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name on disk without prefix, index into the leading dims) of every tensor."""
        if self.kind is None:
            yield self.family.name, ()
            return
        for i, layer in enumerate(self.layers):
            name = f"model.layers.{layer}.{self.family.name}"
            if self.experts is None:
                yield name, (i,)
            else:
                head, tail = name.split("{e}")
                for e in range(self.experts):
                    yield f"{head}{e}{tail}", (i, e)


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
    placed = [Placement(family, None, (), None) for family in families if family.where == "model"]
    for kind, layers in Depth(config).layers_of.items():
        parts = ("layer", *kind.split("_"))
        for family in families:
            if family.where in parts:
                experts = config.moe.num_experts if family.per_expert else None
                placed.append(Placement(family, kind, tuple(layers), experts))
    return placed


def tensor_specs(config: ModelConfig, *, weight_dtype: str = "bfloat16") -> Iterator[TensorSpec]:
    """Every text tensor of `config`'s checkpoint as it lies on disk."""
    sizes = axis_sizes(config)
    for placement in placements(config):
        family = placement.family
        shape = family.layout.disk_shape(sizes)
        dtype = weight_dtype if family.dtype == WEIGHT else family.dtype
        for name, _ in placement.tensors():
            yield TensorSpec(name, shape, dtype, family)


def active_parameters(config: ModelConfig, family: Family, parameters: int) -> int:
    """Of `parameters` in a family, those that one token uses: none of the embedding, top_k of the routed experts."""
    if family.name == "model.embed_tokens.weight":
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
    }
