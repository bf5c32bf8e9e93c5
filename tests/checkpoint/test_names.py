"""The name table against the released checkpoint's published families, sizes and totals."""

import dataclasses
import math
import re

import jax
import numpy as np
import pytest

from k3jax.checkpoint.layout import Layout
from k3jax.checkpoint.load import abstract_model
from k3jax.checkpoint.names import PAD, VISION, active_parameters, axis_sizes, placements, tensor_specs
from k3jax.checkpoint.orbax_io import named_leaves
from k3jax.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig, VisionConfig, load_model_config

# count, dtype, shape, name below `language_model.` or `language_model.model.layers.{l}.`
RELEASED = """
1 bfloat16 163840x7168 model.embed_tokens.weight
1 bfloat16 163840x7168 lm_head.weight
1 bfloat16 7168 model.norm.weight
1 bfloat16 7168 model.output_attn_res_norm.weight
1 bfloat16 1x7168 model.output_attn_res_proj.weight
93 bfloat16 7168 input_layernorm.weight
93 bfloat16 7168 post_attention_layernorm.weight
93 bfloat16 7168 self_attention_res_norm.weight
93 bfloat16 7168 mlp_res_norm.weight
93 bfloat16 1x7168 self_attention_res_proj.weight
93 bfloat16 1x7168 mlp_res_proj.weight
93 bfloat16 12288x7168 self_attn.g_proj.weight
93 bfloat16 7168x12288 self_attn.o_proj.weight
69 bfloat16 12288x7168 self_attn.q_proj.weight
69 bfloat16 12288x7168 self_attn.k_proj.weight
69 bfloat16 12288x7168 self_attn.v_proj.weight
69 float32 12288x1x4 self_attn.q_conv1d.weight
69 float32 12288x1x4 self_attn.k_conv1d.weight
69 float32 12288x1x4 self_attn.v_conv1d.weight
69 bfloat16 128x7168 self_attn.f_a_proj.weight
69 bfloat16 12288x128 self_attn.f_b_proj.weight
69 bfloat16 96x7168 self_attn.b_proj.weight
69 float32 128 self_attn.A_log
69 float32 12288 self_attn.dt_bias
69 float32 128 self_attn.o_norm.weight
24 bfloat16 1536x7168 self_attn.q_a_proj.weight
24 bfloat16 1536 self_attn.q_a_layernorm.weight
24 bfloat16 18432x1536 self_attn.q_b_proj.weight
24 bfloat16 576x7168 self_attn.kv_a_proj_with_mqa.weight
24 bfloat16 512 self_attn.kv_a_layernorm.weight
24 bfloat16 24576x512 self_attn.kv_b_proj.weight
1 bfloat16 33792x7168 mlp.gate_proj.weight
1 bfloat16 33792x7168 mlp.up_proj.weight
1 bfloat16 7168x33792 mlp.down_proj.weight
92 bfloat16 896x7168 block_sparse_moe.gate.weight
92 float32 896 block_sparse_moe.gate.e_score_correction_bias
92 bfloat16 3584x7168 block_sparse_moe.routed_expert_down_proj.weight
92 bfloat16 3584 block_sparse_moe.routed_expert_norm.weight
92 bfloat16 7168x3584 block_sparse_moe.routed_expert_up_proj.weight
92 bfloat16 6144x7168 block_sparse_moe.shared_experts.gate_proj.weight
92 bfloat16 6144x7168 block_sparse_moe.shared_experts.up_proj.weight
92 bfloat16 7168x6144 block_sparse_moe.shared_experts.down_proj.weight
82432 uint8 3072x1792 block_sparse_moe.experts.#.w1.weight_packed
82432 uint8 3072x1792 block_sparse_moe.experts.#.w3.weight_packed
82432 uint8 3072x112 block_sparse_moe.experts.#.w1.weight_scale
82432 uint8 3072x112 block_sparse_moe.experts.#.w3.weight_scale
82432 uint8 3584x1536 block_sparse_moe.experts.#.w2.weight_packed
82432 uint8 3584x96 block_sparse_moe.experts.#.w2.weight_scale
"""
# the same of tower and projector, below no prefix
RELEASED_VISION = """
1 bfloat16 1024x3x14x14 vision_tower.patch_embed.proj.weight
1 bfloat16 64x64x1024 vision_tower.patch_embed.pos_emb.weight
27 bfloat16 1024 vision_tower.encoder.blocks.#.norm0.weight
27 bfloat16 1024 vision_tower.encoder.blocks.#.norm1.weight
27 bfloat16 4608x1024 vision_tower.encoder.blocks.#.wqkv.weight
27 bfloat16 1024x1536 vision_tower.encoder.blocks.#.wo.weight
27 bfloat16 4096x1024 vision_tower.encoder.blocks.#.mlp.fc0.weight
27 bfloat16 1024x4096 vision_tower.encoder.blocks.#.mlp.fc1.weight
1 bfloat16 1024 vision_tower.encoder.final_layernorm.weight
1 bfloat16 4096x4096 mm_projector.proj.0.weight
1 bfloat16 7168x4096 mm_projector.proj.2.weight
1 bfloat16 7168 mm_projector.post_norm.weight
"""
MLA_LAYERS = {*range(3, 92, 4), 92}  # 0-based


@pytest.fixture(scope="module")
def released():
    return list(tensor_specs(load_model_config("k3")))


def families_of(specs) -> dict[str, int]:
    found = {}
    for spec in specs:
        name = re.sub(r"\.(experts|blocks)\.\d+\.", r".\1.#.", re.sub(r"^model\.layers\.\d+\.", "", spec.name))
        shape = "x".join(map(str, spec.shape))
        found[f"{spec.dtype} {shape} {name}"] = found.get(f"{spec.dtype} {shape} {name}", 0) + 1
    return found


def expected_families(text: str) -> dict[str, int]:
    return {line.partition(" ")[2]: int(line.partition(" ")[0]) for line in text.strip().splitlines()}


def test_the_release_expands_to_its_families(released):
    found = families_of(released)
    assert found == expected_families(RELEASED)
    assert len(found) == 48


def test_tower_and_projector_expand_to_their_families():
    specs = [spec for spec in tensor_specs(ModelConfig(vision=VisionConfig())) if spec.family.where == VISION]
    assert families_of(specs) == expected_families(RELEASED_VISION)
    assert (len(specs), sum(math.prod(spec.shape) for spec in specs)) == (168, 447_358_976)
    assert {spec.family.prefix for spec in specs} == {""}


def test_the_release_has_each_name_once(released):
    names = {spec.name for spec in released}
    assert len(names) == len(released) == 497_052
    assert {f"model.layers.92.block_sparse_moe.experts.{e}.w2.weight_scale" for e in (0, 895)} <= names


def test_the_release_has_mla_where_its_index_has(released):
    owners = {int(spec.name.split(".")[2]) for spec in released if "kv_a_proj_with_mqa" in spec.name}
    assert owners == MLA_LAYERS


def test_the_release_sums_to_its_published_sizes(released):
    width = {"bfloat16": 2, "float32": 4, "uint8": 1}
    vision_and_projector = 2 * 447_358_976
    assert sum(math.prod(s.shape) * width[s.dtype] for s in released) == 1_560_860_324_864 - vision_and_projector


def test_the_release_counts_its_published_parameters(released):
    config = load_model_config("k3")
    per_family = {}
    for spec in released:
        per_family[spec.family] = per_family.get(spec.family, 0) + spec.family.parameters(math.prod(spec.shape))
    assert sum(per_family.values()) == 2_779_484_478_208
    assert sum(active_parameters(config, family, n) for family, n in per_family.items()) == 104_189_614_848


def test_the_model_holds_what_the_release_counts_less_the_padding():
    model = abstract_model(ModelConfig(quantized_experts=False))
    padding = 69 * 32  # of A_log
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model)) == 2_779_484_478_208 - padding


ALL_MLA = ModelConfig(
    vocab_size=11,
    width=13,
    num_layers=3,
    num_dense_layers=2,
    mla_layers=(0, 1, 2),
    kda=KDAConfig(num_heads=2, head_dim=4, a_log_length=4),
    mla=MLAConfig(num_heads=3, q_rank=5, kv_rank=7, nope_dim=2, extra_dim=1, v_dim=6),
    moe=MoEConfig(num_experts=2, top_k=1, expert_width=32, latent_width=64),
)


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("which", ["small", "k3", "all_mla", "k3_vision"])
def test_every_leaf_of_the_model_is_filled_once_with_its_shape(which, quantized, small):
    k3, with_tower = ModelConfig(), ModelConfig(vision=VisionConfig())
    config = {"small": small, "k3": k3, "all_mla": ALL_MLA, "k3_vision": with_tower}[which]
    config = dataclasses.replace(config, quantized_experts=quantized)
    sizes, shapes = axis_sizes(config), []
    for placement in placements(config):
        layout = placement.family.layout
        shape = layout.model_shape(sizes)
        parts = [(placement.leaves[0], shape)]
        if len(placement.leaves) > 1:
            axis = next(i for i, size in enumerate(shape) if size == sum(layout.part_sizes(sizes)))
            parts = [
                (leaf, (*shape[:axis], size, *shape[axis + 1 :]))
                for leaf, size in zip(placement.leaves, layout.part_sizes(sizes), strict=True)
            ]
        shapes += [(leaf, (*placement.lead, *part)) for leaf, part in parts if leaf != PAD]
    assert len(dict(shapes)) == len(shapes)
    assert dict(shapes) == {name: leaf.shape for name, leaf in named_leaves(abstract_model(config)).items()}


SIZES = {"a": 2, "b": 3, "c": 5, "d": 4, "e": 6}


def test_a_layout_flattens_splits_and_transposes():
    layout = Layout("(a b+d) c -> c a b+d")
    disk = np.arange(2 * 7 * 5).reshape(14, 5)
    assert layout.disk_shape(SIZES) == (14, 5)
    first, second = layout.split(layout.to_model(disk, SIZES), SIZES)
    assert first.shape == (5, 2, 3)
    assert second.shape == (5, 2, 4)
    assert first[4, 1, 2] == disk[1 * 7 + 2, 4]  # rows are per head, then the parts one after the other
    assert second[4, 1, 3] == disk[1 * 7 + 3 + 3, 4]
    np.testing.assert_array_equal(layout.to_disk(layout.join([first, second], SIZES), SIZES), disk)


def test_a_layout_drops_unit_axes_and_halves():
    layout = Layout("(a b) 1 e/2 -> a e/2 b")
    disk = np.arange(18).reshape(6, 1, 3)
    ours = layout.to_model(disk, SIZES)
    assert ours.shape == layout.model_shape(SIZES) == (2, 3, 3)
    assert ours[1, 2, 0] == disk[3, 0, 2]
    np.testing.assert_array_equal(layout.to_disk(ours, SIZES), disk)


def test_a_layout_keeps_leading_dims():
    layout = Layout("a b -> b a")
    disk = np.arange(7 * 6).reshape(7, 2, 3)
    np.testing.assert_array_equal(layout.to_model(disk, SIZES), disk.transpose(0, 2, 1))
    np.testing.assert_array_equal(layout.to_disk(disk.transpose(0, 2, 1), SIZES), disk)


def test_a_missing_part_becomes_zeros():
    layout = Layout("b+d -> b+d")
    joined = layout.join([np.ones((2, 3), np.float32), None], SIZES)
    np.testing.assert_array_equal(joined, [[1, 1, 1, 0, 0, 0, 0]] * 2)
