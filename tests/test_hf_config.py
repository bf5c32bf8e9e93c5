"""The released config.json: read, written back unchanged, and anything that is not K3 refused by name."""

import copy
import dataclasses
import json

import pytest

from k3jax.config import ConfigError, ModelConfig, VisionConfig

FULL_ATTENTION = [*range(4, 93, 4), 93]  # 1-based


@pytest.fixture
def release() -> dict:
    """The released file's keys and values, with the generic ones that are not architecture."""
    noise = {"top_k": 50, "top_p": 1.0, "max_length": 20, "num_beams": 1, "temperature": 1.0, "prefix": None}
    text = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "vocab_size": 163840,
        "hidden_size": 7168,
        "num_hidden_layers": 93,
        "intermediate_size": 33792,
        "num_attention_heads": 96,
        "num_key_value_heads": 96,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "rms_norm_eps": 1e-5,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 12,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_shared_experts": 2,
        "moe_intermediate_size": 3072,
        "routed_expert_hidden_size": 3584,
        "latent_moe_use_norm": True,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": 1048576,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "bos_token_id": 163584,
        "eos_token_id": 163586,
        "pad_token_id": 163839,
        "dtype": "bfloat16",
        "use_cache": True,
        "transformers_version": "4.56.2",
        "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
        **noise,
        "linear_attn_config": {
            "num_heads": 96,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
            "full_attn_layers": FULL_ATTENTION,
            "kda_layers": [layer for layer in range(1, 94) if layer not in FULL_ATTENTION],
        },
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "input_activations": None,
                    "output_activations": None,
                    "weights": {
                        "num_bits": 4,
                        "type": "float",
                        "symmetric": True,
                        "strategy": "group",
                        "group_size": 32,
                        "scale_dtype": "torch.uint8",
                        "zp_dtype": None,
                        "dynamic": False,
                        "observer": "minmax",
                    },
                }
            },
            "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*lm_head.*"],
        },
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "auto_map": {"AutoConfig": "configuration_kimi_k3.KimiK3Config"},
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        "bos_token_id": 163584,
        "eos_token_id": 163586,
        "pad_token_id": 163839,
        "media_placeholder_token_id": 163605,
        "image_placeholder": "<|kimi_image_placeholder|>",
        "ignore_index": -100,
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": {"patch_size": 14, "vt_num_hidden_layers": 27, "merge_kernel_size": [2, 2]},
    }


def plain(config: ModelConfig) -> ModelConfig:
    """The config without what it keeps only to write the file back."""
    return dataclasses.replace(config, name="", vision_json="", extra_json="")


def change(config: dict, path: str, value: object) -> dict:
    """A copy of `config` with the key at a dotted path set, or removed for `...`."""
    changed = copy.deepcopy(config)
    *parents, key = path.split(".")
    section = changed
    for parent in parents:
        section = section[parent]
    if value is ...:
        del section[key]
    else:
        section[key] = value
    return changed


def refused(config: object) -> str:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_hf(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_release_is_the_default_model(release):
    config = ModelConfig.from_hf(release)
    assert plain(config) == plain(ModelConfig())
    assert config.moe.top_k == 16  # not the sampling default top_k = 50
    assert json.loads(config.vision_json) == release["vision_config"]


def test_what_was_read_is_written_back(release):
    assert ModelConfig.from_hf(release).to_hf() == release


@pytest.mark.parametrize("folder", ["tiny_bf16", "tiny_fp32", "tiny_dense", "tiny_vision"])
def test_golden_configs_are_written_back(golden, folder):
    source = json.loads((golden / folder / "config.json").read_text())
    config = ModelConfig.from_hf(golden / folder)
    assert config.to_hf() == source
    assert config == ModelConfig.from_hf(golden / folder / "config.json")
    assert (config.name, config.mla_layers, config.kda.a_log_length) == (folder, (3, 7, 8), 32)
    assert config.quantized_experts == (folder != "tiny_dense")


def test_a_bare_text_config_is_read_and_written_back(release):
    text = release["text_config"]
    config = ModelConfig.from_hf(text)
    assert dataclasses.replace(plain(config), media_id=163605) == plain(ModelConfig())
    assert config.media_id == -1
    assert config.to_hf() == text


def test_a_config_of_our_own_is_written_in_the_released_shape(release):
    config = dataclasses.replace(ModelConfig(), num_layers=8, mla_layers=(3, 6, 7), quantized_experts=False)
    written = config.to_hf()
    assert plain(ModelConfig.from_hf(written)) == plain(config)
    assert written["text_config"]["linear_attn_config"]["full_attn_layers"] == [4, 7, 8]
    assert "quantization_config" not in written["text_config"]


def test_the_default_model_is_written_as_the_release_has_it(release):
    written = ModelConfig().to_hf()
    text, released = written.pop("text_config"), release.pop("text_config")
    assert written.items() <= release.items()
    quantization, expected = text.pop("quantization_config"), released.pop("quantization_config")
    assert text.items() <= released.items()
    assert {key: quantization[key] for key in ("quant_method", "format")}.items() <= expected.items()
    group, expected = (q["config_groups"]["group_0"]["weights"] for q in (quantization, expected))
    assert group.items() <= expected.items()


def test_changed_numbers_are_written_everywhere(release):
    config = dataclasses.replace(ModelConfig.from_hf(release), eos_id=5, width=640, quantized_experts=False)
    config = dataclasses.replace(config, mla=dataclasses.replace(config.mla, num_heads=8))
    written = config.to_hf()
    text = written["text_config"]
    assert written["eos_token_id"] == text["eos_token_id"] == 5
    assert text["num_attention_heads"] == text["num_key_value_heads"] == 8
    assert text["hidden_size"] == 640
    assert text["id2label"] == release["text_config"]["id2label"]
    assert "quantization_config" not in text


TOWER = VisionConfig(width=64, num_blocks=3, num_heads=2, head_dim=48, norm_eps=2.0**-7)


def test_a_tower_of_our_own_is_written_in_the_released_shape(release):
    config = dataclasses.replace(ModelConfig(), vision=TOWER)
    written = config.to_hf()
    assert plain(ModelConfig.from_hf(written)) == plain(config)
    vision = written["vision_config"]
    assert (vision["qkv_hidden_size"], vision["mm_hidden_size"], vision["text_hidden_size"]) == (96, 64, 7168)
    assert (vision["model_type"], vision["merge_kernel_size"], vision["norm_eps"]) == ("moonvit3d", [2, 2], 2.0**-7)


def test_a_tower_is_read_as_its_file_says_and_other_keys_are_kept(golden):
    source = json.loads((golden / "tiny_vision" / "config.json").read_text())
    source["vision_config"]["_attn_implementation"] = "flash_attention_2"
    config = ModelConfig.from_hf(source)
    sizes = {"grid_rows": 8, "grid_columns": 8, "width": 64, "mlp_width": 176, "num_blocks": 3}
    assert config.vision == VisionConfig(**sizes, num_heads=3, head_dim=24)
    assert config.to_hf() == source
    changed = dataclasses.replace(config, vision=dataclasses.replace(config.vision, norm_eps=2.0**-7)).to_hf()
    assert changed["vision_config"] == source["vision_config"] | {"norm_eps": 2.0**-7}


def test_a_vision_config_without_all_numbers_describes_no_tower(release):
    assert ModelConfig.from_hf(release).vision is None


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("norm_type", "layernorm", "norm_type = 'layernorm': only 'rmsnorm'"),
        ("attn_bias", True, "attn_bias = True: only False"),
        ("pos_emb_interpolation_mode", "bicubic", "pos_emb_interpolation_mode = 'bicubic': only 'bilinear'"),
        ("mm_hidden_size", 9, "mm_hidden_size = 9: only 64"),
        ("text_hidden_size", 9, "text_hidden_size = 9: only 7168"),
        ("qkv_hidden_size", 98, "qkv_hidden_size = 98: must be a multiple of 4 x 2 heads"),
    ],
)
def test_another_tower_is_refused_by_name(key, value, message):
    written = dataclasses.replace(ModelConfig(), vision=TOWER).to_hf()
    assert f"vision_config.{message}" in refused(change(written, f"vision_config.{key}", value))


def test_rope_keys_change_nothing(release):
    with_rope = change(release, "text_config.rope_scaling", {"rope_type": "yarn", "factor": 32.0})
    assert plain(ModelConfig.from_hf(with_rope)) == plain(ModelConfig.from_hf(release))
    assert ModelConfig.from_hf(with_rope).to_hf() == with_rope


def test_keys_whose_released_default_is_k3s_may_be_absent(release):
    implied = (
        "moe_renormalize",
        "topk_method",
        "topk_group",
        "moe_layer_freq",
        "num_key_value_heads",
        "tie_word_embeddings",
    )
    for key in implied:
        release = change(release, f"text_config.{key}", ...)
    assert plain(ModelConfig.from_hf(release)) == plain(ModelConfig())
    assert ModelConfig.from_hf(release).to_hf() == release


@pytest.mark.parametrize("value", [None, ...])
def test_pad_and_media_ids_may_be_absent(release, value):
    for path in ("pad_token_id", "text_config.pad_token_id", "media_placeholder_token_id"):
        release = change(release, path, value)
    config = ModelConfig.from_hf(release)
    assert (config.pad_id, config.media_id) == (-1, -1)
    assert config.to_hf() == release


def test_a_pad_id_at_the_top_level_alone_is_read(release):
    release = change(release, "text_config.pad_token_id", ...)
    assert ModelConfig.from_hf(release).pad_id == 163839
    assert ModelConfig.from_hf(release).to_hf() == release


def test_quantization_may_stand_at_the_top_level(release):
    release["quantization_config"] = release["text_config"].pop("quantization_config")
    assert ModelConfig.from_hf(release).quantized_experts
    assert ModelConfig.from_hf(release).to_hf() == release


def test_fewer_heads_than_head_dim_pad_a_log_to_head_dim(release):
    assert ModelConfig.from_hf(release).kda.a_log_length == 128
    assert ModelConfig.from_hf(change(release, "text_config.linear_attn_config.num_heads", 160)).kda.a_log_length == 160


LINEAR = "text_config.linear_attn_config"
WEIGHTS = "text_config.quantization_config.config_groups.group_0.weights"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("text_config.hidden_act", "silu", "hidden_act = 'silu': only 'situ' is supported"),
        ("text_config.hidden_act", ..., "hidden_act = None: only 'situ'"),
        ("text_config.moe_router_activation_func", "softmax", "moe_router_activation_func = 'softmax': only 'sigmoid'"),
        ("text_config.moe_renormalize", False, "moe_renormalize = False: only True"),
        ("text_config.topk_method", "greedy", "topk_method = 'greedy': only 'noaux_tc'"),
        ("text_config.num_expert_group", 8, "num_expert_group = 8: only 1"),
        ("text_config.topk_group", 4, "topk_group = 4: only 1"),
        ("text_config.moe_layer_freq", 2, "moe_layer_freq = 2: only 1"),
        ("text_config.latent_moe_use_norm", False, "latent_moe_use_norm = False: only True"),
        ("text_config.latent_moe_use_norm", ..., "latent_moe_use_norm = None: only True"),
        ("text_config.mla_use_nope", False, "mla_use_nope = False: only True"),
        ("text_config.mla_use_output_gate", ..., "mla_use_output_gate = None: only True"),
        ("text_config.num_nextn_predict_layers", 1, "num_nextn_predict_layers = 1: only 0"),
        ("text_config.tie_word_embeddings", True, "tie_word_embeddings = True: only False"),
        ("tie_word_embeddings", True, "tie_word_embeddings = True: only False"),
        ("text_config.num_key_value_heads", 8, "num_key_value_heads = 8: must equal num_attention_heads = 96"),
        (f"{LINEAR}.use_full_rank_gate", False, "linear_attn_config.use_full_rank_gate = False: only True"),
        (f"{LINEAR}.use_full_rank_gate", ..., "linear_attn_config.use_full_rank_gate = None: only True"),
        ("text_config.quantization_config.format", "nvfp4-pack-quantized", "quantization_config.format = 'nvfp4"),
        ("text_config.quantization_config.quant_method", "fp8", "quantization_config.quant_method = 'fp8'"),
        (f"{WEIGHTS}.group_size", 16, "group_0.weights.group_size = 16: only 32"),
        (f"{WEIGHTS}.num_bits", 8, "group_0.weights.num_bits = 8: only 4"),
        ("eos_token_id", 7, "eos_token_id = 7 at the top level, 163586 in text_config"),
    ],
)
def test_another_mechanism_is_refused_by_name(release, path, value, message):
    assert message in refused(change(release, path, value))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("text_config.vocab_size", "config.json lacks vocab_size"),
        ("text_config.activation_situ_beta", "lacks activation_situ_beta (the cap of SiTU's gate)"),
        ("text_config.activation_situ_linear_beta", "lacks activation_situ_linear_beta (the cap of"),
        ("text_config.q_lora_rank", "lacks q_lora_rank (K3's queries are low rank)"),
        (f"{LINEAR}.gate_lower_bound", "gate_lower_bound (K3's bounded forget gate; a softplus gate is not supported)"),
        (f"{LINEAR}.kda_layers", "lacks linear_attn_config.kda_layers"),
        (LINEAR, "linear_attn_config = None: K3 needs a mapping here"),
    ],
)
@pytest.mark.parametrize("value", [None, ...])
def test_a_missing_key_is_named(release, path, message, value):
    assert message in refused(change(release, path, value))


def test_another_models_spelling_of_top_k_is_no_default(release):
    release["text_config"]["num_experts_per_tok"] = release["text_config"].pop("num_experts_per_token")
    assert "lacks num_experts_per_token" in refused(release)


def test_all_missing_keys_are_named_at_once():
    message = refused({"linear_attn_config": {}, "hidden_size": 8})
    assert all(key in message for key in ("vocab_size", "num_experts_per_token", "linear_attn_config.num_heads"))
    assert "hidden_size" not in message.replace("routed_expert_hidden_size", "")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("text_config.vocab_size", "163840", "vocab_size = '163840': must be an integer >= 1"),
        ("text_config.vocab_size", 1.5, "vocab_size = 1.5: must be an integer"),
        ("text_config.hidden_size", 0, "hidden_size = 0: must be an integer >= 1"),
        ("text_config.num_experts", True, "num_experts = True: must be an integer"),
        ("text_config.rms_norm_eps", "1e-5", "rms_norm_eps = '1e-5': must be a number"),
        ("text_config.eos_token_id", [1, 2], "eos_token_id"),
        ("pad_token_id", "x", "pad_token_id"),
        ("text_config", [], "text_config = []: K3 needs a mapping here"),
        (f"{LINEAR}.gate_lower_bound", 5.0, "gate_lower_bound = 5.0"),
        ("text_config.num_experts_per_token", 897, "top_k = 897"),
        ("text_config.dtype", "float16", "dtype = float16: one of bfloat16"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(release, path, value, message):
    assert message in refused(change(release, path, value))


@pytest.mark.parametrize(
    ("mla", "kda", "message"),
    [
        ([4, 8, 93], [], "layer 1 (1-based) is neither in full_attn_layers nor in kda_layers"),
        (FULL_ATTENTION, [5], "layer 1 (1-based) is neither"),
        ([*FULL_ATTENTION, 5], None, "layer 5 (1-based) is 2 times in full_attn_layers and kda_layers"),
        ([*FULL_ATTENTION, 94], None, "layer 94 (1-based) is in a layer list, but num_hidden_layers = 93"),
        ([0, *FULL_ATTENTION], None, "layer 0 (1-based) is in a layer list"),
        ("4,8", None, "linear_attn_config.full_attn_layers must be a list of layer numbers"),
        ([4.0], None, "linear_attn_config.full_attn_layers must be a list of layer numbers"),
    ],
)
def test_layer_lists_that_do_not_partition_are_refused(release, mla, kda, message):
    linear = release["text_config"]["linear_attn_config"]
    linear["full_attn_layers"] = mla
    linear["kda_layers"] = linear["kda_layers"] if kda is None else kda
    assert message in refused(release)


def test_a_file_that_is_no_config_is_named(tmp_path):
    file = tmp_path / "config.json"
    assert refused(tmp_path) == f"{file}: no such file"
    file.write_text("{")
    assert f"{file}: not readable as JSON" in refused(file)
    file.write_text("[1]")
    assert refused(tmp_path) == f"{file}: must be a JSON object"
