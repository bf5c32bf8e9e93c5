"""Loading: every tensor lands where the released model has it, keeps its bytes, and what does not fit is named."""

import dataclasses
import json
import os
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import k3jax
from k3jax.checkpoint.load import abstract_model, load
from k3jax.checkpoint.names import PREFIX
from k3jax.checkpoint.orbax_io import Checkpoints, model_record, named_leaves
from k3jax.checkpoint.safetensors_dir import CheckpointError, SafetensorsDir
from k3jax.config import ConfigError, ModelConfig
from pallas_kernels.mx import MXFP4Array, dequantize

LAYER = PREFIX + "model.layers."
A_LOG = LAYER + "1.self_attn.A_log"
SCALE = LAYER + "1.block_sparse_moe.experts.2.w1.weight_scale"
PACKED = LAYER + "1.block_sparse_moe.experts.2.w1.weight_packed"


def leaves(model) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in named_leaves(model).items()}


def same(a, b) -> None:
    a, b = leaves(a), leaves(b)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert a[name].tobytes() == b[name].tobytes(), name


@pytest.mark.parametrize("folder", ["tiny_bf16", "tiny_fp32", "tiny_dense", "tiny_vision"])
def test_golden_checkpoints_come_back_byte_for_byte(golden, folder):
    stored = SafetensorsDir.open(golden / folder).tensors
    tensors = k3jax.hf_tensors(k3jax.load(golden / folder))
    assert tensors.keys() == stored.keys()
    for name, tensor in tensors.items():
        expected = stored[name].read()
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape), name
        assert np.asarray(tensor).tobytes() == expected.tobytes(), name


def test_tensors_land_where_the_forward_pass_expects_them(tensors, make):
    model = load(make(tensors))
    kda, mla = model.stacks["kda_moe"], model.stacks["mla_moe"]  # layers 1, 3 and 2, 4

    def of(layer, name):
        return tensors[f"{LAYER}{layer}.{name}"]

    def check(value, expected):
        np.testing.assert_array_equal(np.asarray(value), expected)

    head, dim = 2, 5
    check(model.lm_head.get_value()[:, 7], tensors[PREFIX + "lm_head.weight"][7])
    check(kda.mixer.k.get_value()[1][:, head, dim], of(3, "self_attn.k_proj.weight")[head * 8 + dim])
    check(kda.mixer.v_conv.get_value()[0][head, dim], of(1, "self_attn.v_conv1d.weight")[head * 8 + dim, 0])
    check(kda.mixer.decay_up.get_value()[0][:, head, dim], of(1, "self_attn.f_b_proj.weight")[head * 8 + dim])
    check(kda.mixer.dt_bias.get_value()[1][head, dim], of(3, "self_attn.dt_bias")[head * 8 + dim])
    check(kda.mixer.a_log.get_value()[1], of(3, "self_attn.A_log")[:3])
    check(kda.mixer.out.get_value()[1][head, dim], of(3, "self_attn.o_proj.weight")[:, head * 8 + dim])
    up = of(4, "self_attn.kv_b_proj.weight").reshape(2, 6 + 5, 10)  # per head: keys, then values
    check(mla.mixer.k_up.get_value()[1], up[:, :6].transpose(2, 0, 1))
    check(mla.mixer.v_up.get_value()[1], up[:, 6:].transpose(2, 0, 1))
    check(mla.ffn_mix.query.get_value()[0], of(2, "mlp_res_proj.weight")[0])
    check(mla.mixer_mix.norm.get_value()[0], of(2, "self_attention_res_norm.weight"))
    check(mla.ffn_norm.weight.get_value()[1], of(4, "post_attention_layernorm.weight"))
    check(kda.ffn.down.get_value()[1], of(3, "block_sparse_moe.routed_expert_down_proj.weight").T)
    for name in ("w1", "w2", "w3"):
        weight = getattr(kda.ffn, name).get_value()
        check(weight.codes[1, 2], of(3, f"block_sparse_moe.experts.2.{name}.weight_packed"))
        check(weight.scales[1, 2], of(3, f"block_sparse_moe.experts.2.{name}.weight_scale"))


def test_float_experts_are_stacked_input_first(small, randomise, make):
    config = dataclasses.replace(small, quantized_experts=False)
    tensors = randomise(config)
    model = load(make(tensors, config))
    for name in ("w1", "w2", "w3"):
        expected = tensors[f"{LAYER}4.block_sparse_moe.experts.1.{name}.weight"].T
        np.testing.assert_array_equal(getattr(model.stacks["mla_moe"].ffn, name).get_value()[1, 1], expected)


def test_correction_biases_survive_in_every_layer(tensors, make):
    model = load(make(tensors))
    for kind, layers in (("kda_moe", (1, 3)), ("mla_moe", (2, 4))):
        expected = [tensors[f"{LAYER}{n}.block_sparse_moe.gate.e_score_correction_bias"] for n in layers]
        np.testing.assert_array_equal(model.stacks[kind].ffn.router.bias.get_value(), expected)
        assert np.all(np.asarray(expected) != 0)


def test_prefix_and_sharding_do_not_matter(tensors, make):
    model = load(make(tensors))
    bare = {name.removeprefix(PREFIX): value for name, value in tensors.items()}
    assert bare.keys() & tensors.keys() == set()
    same(model, load(make(bare)))
    directory = make(tensors, shards=0)
    (directory / "model.safetensors.index.json").unlink()
    same(model, load(directory))


def test_a_bare_text_config_loads_the_same_model(tensors, make):
    directory = make(tensors)
    model = load(directory)
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text())["text_config"]))
    same(model, load(directory))


def test_weights_keep_their_dtype_and_dtype_sets_the_computation(tensors, make):
    model = load(make(tensors), dtype="float32")
    dtypes = {name: leaf.dtype for name, leaf in leaves(model).items()}
    assert dtypes["stacks.kda_moe.mixer.q"] == ml_dtypes.bfloat16
    assert dtypes["stacks.kda_moe.mixer.q_conv"] == dtypes["stacks.kda_moe.ffn.router.bias"] == np.float32
    assert dtypes["stacks.kda_moe.ffn.w1.codes"] == np.uint8
    assert model.config.dtype == "float32"
    assert load(make(tensors)).config.dtype == "bfloat16"


def test_a_copy_cast_to_bfloat16_as_a_whole_loads(tensors, make):
    cast = {name: t.astype(ml_dtypes.bfloat16) if t.dtype == np.float32 else t for name, t in tensors.items()}
    dtypes = {name: leaf.dtype for name, leaf in leaves(load(make(cast))).items()}
    assert dtypes["stacks.kda_moe.mixer.a_log"] == dtypes["stacks.kda_moe.ffn.router.bias"] == ml_dtypes.bfloat16


def test_an_unknown_compute_dtype_is_refused(tensors, make):
    with pytest.raises(ConfigError, match="dtype = int8: one of bfloat16, float32"):
        load(make(tensors), dtype="int8")


def test_vision_tensors_that_no_config_describes_are_left_out(tensors, make):
    vision = {
        name: np.ones(3, np.float32) for name in ("vision_tower.patch_embed.proj.weight", "mm_projector.proj.0.weight")
    }
    same(load(make(tensors)), load(make(tensors | vision)))


def test_the_stored_length_of_a_log_comes_from_the_tensors(tensors, make):
    longer = {n: np.pad(v, (0, 3)) if n.endswith("A_log") else v for n, v in tensors.items()}
    model = load(make(longer))
    assert model.config.kda.a_log_length == 11
    assert k3jax.hf_tensors(model)[A_LOG].shape == (11,)
    exact = {n: v[:3] if n.endswith("A_log") else v for n, v in tensors.items()}
    same(model, load(make(exact)))


@pytest.mark.parametrize("value", [1e-30, -0.0, float("nan")])
def test_an_a_log_tail_that_is_not_zero_is_refused(tensors, make, value):
    tensors[A_LOG][5] = value
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.A_log: entries past the 3 heads must be 0, got"):
        load(make(tensors))


def test_nibbles_and_scales_decode_as_published(tensors, make):
    tensors[PACKED][0, :4], tensors[SCALE][0, 0] = (22, 185, 206, 35), 121
    tensors[PACKED][1, :1], tensors[SCALE][1, 0] = 0x21, 127  # low nibble first; 127 is a scale of one
    tensors[PACKED][2, :1], tensors[SCALE][2, 0] = 0x22, 0
    experts = load(make(tensors)).stacks["kda_moe"].ffn.w1.get_value()
    rows = np.asarray(dequantize(MXFP4Array(experts.codes[0, 2], experts.scales[0, 2])))
    published = [0.0625, 0.0078125, -0.0078125, -0.0234375, -0.0625, -0.03125, 0.0234375, 0.015625]
    assert rows[0, :8].tolist() == published
    assert rows[1, :2].tolist() == [0.5, 1.0]
    assert rows[2, :2].tolist() == [2.0**-127] * 2


def test_a_nan_scale_is_refused_by_name(tensors, make):
    tensors[SCALE][[3, 60], 0] = 255
    with pytest.raises(CheckpointError, match=r"experts\.2\.w1\.weight_scale: 2 scale bytes are 255"):
        load(make(tensors))


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.4.mlp_res_proj.weight", SCALE.removeprefix(PREFIX)])
def test_a_missing_tensor_is_named(tensors, make, name):
    del tensors[PREFIX + name]
    with pytest.raises(CheckpointError, match=f"1 tensors are missing \\(first: {PREFIX}{name}\\)"):
        load(make(tensors))


def test_an_unexpected_tensor_is_named_beside_a_missing_one(tensors, make):
    tensors[PREFIX + "head.weight"] = tensors.pop(PREFIX + "lm_head.weight")
    with pytest.raises(
        CheckpointError, match=r"missing \(first: \S+lm_head.weight\) and 1 tensors are unexpected \(first: \S+head"
    ):
        load(make(tensors))


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(tensors, make):
    name = LAYER + "0.self_attn.b_proj.weight"
    tensors[name] = np.ascontiguousarray(tensors[name].T)
    with pytest.raises(
        CheckpointError, match=r"0\.self_attn\.b_proj\.weight: shape \(28, 3\); config\.json implies \(3, 28\)"
    ):
        load(make(tensors))


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        (PACKED, np.float32, "dtype F32; expected U8"),
        (SCALE, np.int8, "dtype I8; expected U8"),
        (A_LOG, np.int32, "dtype I32; expected BF16 or F32 or F16"),
        (LAYER + "3.self_attn.q_proj.weight", np.int32, "dtype I32; expected BF16 or F32"),
        (LAYER + "3.self_attn.q_proj.weight", np.float32, "dtype F32; in other layers BF16"),
    ],
)
def test_an_unexpected_dtype_is_named(tensors, make, name, dtype, expected):
    tensors[name] = tensors[name].astype(dtype)
    with pytest.raises(CheckpointError, match=f"{name}: {expected}"):
        load(make(tensors))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 41}, r"embed_tokens\.weight: shape \(40, 28\); config\.json implies \(41, 28\)"),
        ({"num_layers": 4, "mla_layers": (2,)}, r"are unexpected \(first: \S+model\.layers\.4\."),
        (
            {"mla_layers": (1, 4)},
            r"against its config\.json .* missing \(first: \S+layers\.1\.self_attn\.kv_a_layernorm",
        ),
        ({"num_dense_layers": 2}, r"missing \(first: \S+layers\.1\.mlp\.down_proj"),
    ],
)
def test_a_config_that_does_not_describe_the_tensors_is_refused(tensors, small, make, change, message):
    directory = make(tensors)
    (directory / "config.json").write_text(json.dumps(dataclasses.replace(small, **change).to_hf()))
    with pytest.raises(CheckpointError, match=message):
        load(directory)


def test_the_tensors_say_whether_experts_are_quantised(tensors, small, make):
    directory = make(tensors)
    (directory / "config.json").write_text(json.dumps(dataclasses.replace(small, quantized_experts=False).to_hf()))
    assert load(directory).config.quantized_experts


def test_places_without_a_checkpoint_are_named(tmp_path):
    with pytest.raises(CheckpointError, match="absent: no such directory"):
        load(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="holds neither model"):
        load(tmp_path)


def test_a_directory_without_config_is_refused(tensors, make):
    directory = make(tensors)
    (directory / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        load(directory)


def test_files_are_closed_after_loading(tensors, make):
    directory = make(tensors)
    model = load(directory)
    opened = [os.path.realpath(f"/proc/self/fd/{descriptor}") for descriptor in os.listdir("/proc/self/fd")]
    assert [file for file in opened if str(directory) in file] == []
    assert str(directory) not in Path("/proc/self/maps").read_text()
    assert model.config.num_layers == 5


def test_loading_holds_the_model_and_one_tensor(small, randomise, make):
    config = dataclasses.replace(small, vocab_size=4000, width=200, dense_width=500)
    directory = make(randomise(config, weight_dtype="float32"), config)
    size = SafetensorsDir.open(directory).total_bytes
    load(directory)  # what imports and compilations keep
    tracemalloc.start()
    model = load(directory)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.2 * size + 3 * 4000 * 200 * 4
    assert model.config.width == 200


def test_896_experts_and_more_have_a_model():
    moe = dataclasses.replace(ModelConfig().moe, num_experts=1024)
    shapes = named_leaves(abstract_model(dataclasses.replace(ModelConfig(), moe=moe)))
    assert shapes["stacks.kda_moe.ffn.w1.codes"].shape == (68, 1024, 3072, 1792)


@pytest.mark.parametrize("inside", ["", "checkpoints", "checkpoints/7"])
def test_an_orbax_checkpoint_gives_the_same_model(tensors, make, tmp_path, inside):
    model = load(make(tensors), stack="loop")
    checkpoints = Checkpoints(tmp_path / "run", keep=1)
    checkpoints.save(7, trees={"weights": model}, records={"model": model_record(model.config)})
    checkpoints.close()
    loaded = load(tmp_path / "run" / inside, dtype="float32")
    same(model, loaded)
    assert (loaded.config.dtype, loaded.stack) == ("float32", "scan")
    assert dataclasses.replace(loaded.config, dtype="bfloat16") == model.config


def test_a_damaged_orbax_checkpoint_is_one_line(tensors, make, tmp_path):
    model = load(make(tensors))
    checkpoints = Checkpoints(tmp_path / "run", keep=1)
    checkpoints.save(7, trees={"weights": model}, records={"model": model_record(model.config)})
    checkpoints.close()
    for file in (tmp_path / "run/checkpoints/7/weights").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"checkpoints/7/weights") as caught:
        load(tmp_path / "run")
    assert "\n" not in str(caught.value)
