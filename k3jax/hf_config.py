"""A released `config.json` <-> `ModelConfig` (spec text-model 1).

Keys that set the model's numbers are in the tables below. Keys that only name a mechanism must name K3's; anything else
is refused by name. All further keys are kept verbatim, so that writing back what was read gives the same mapping.
`rope_theta` and `rope_scaling` are among those: K3 rotates nothing (`mla_use_nope`), yet some writers invent them.
`text_config.top_k` is too: it is a sampling default; the router's is `num_experts_per_token`.
"""

from __future__ import annotations

import copy
import json
import os
from collections import Counter
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

from k3jax.config import ConfigError, KDAConfig, MLAConfig, ModelConfig, MoEConfig, VisionConfig
from k3jax.recipe import require

Json = dict[str, Any]

# key of text_config -> field of ModelConfig
_TEXT = {
    "vocab_size": "vocab_size",
    "hidden_size": "width",
    "num_hidden_layers": "num_layers",
    "first_k_dense_replace": "num_dense_layers",
    "intermediate_size": "dense_width",
    "attn_res_block_size": "attn_res_block",
    "rms_norm_eps": "norm_eps",
    "activation_situ_beta": "situ_beta",
    "activation_situ_linear_beta": "situ_linear_beta",
    "initializer_range": "init_std",
    "max_position_embeddings": "max_context",
    "bos_token_id": "bos_id",
    "eos_token_id": "eos_id",
    "num_attention_heads": "mla.num_heads",
    "q_lora_rank": "mla.q_rank",
    "kv_lora_rank": "mla.kv_rank",
    "qk_nope_head_dim": "mla.nope_dim",
    "qk_rope_head_dim": "mla.extra_dim",
    "v_head_dim": "mla.v_dim",
    "num_experts": "moe.num_experts",
    "num_experts_per_token": "moe.top_k",
    "num_shared_experts": "moe.num_shared",
    "moe_intermediate_size": "moe.expert_width",
    "routed_expert_hidden_size": "moe.latent_width",
    "routed_scaling_factor": "moe.scaling_factor",
}
# key of text_config.linear_attn_config -> field
_LINEAR = {
    "num_heads": "kda.num_heads",
    "head_dim": "kda.head_dim",
    "short_conv_kernel_size": "kda.conv_width",
    "gate_lower_bound": "kda.gate_lower_bound",
}
# key of vision_config -> field of VisionConfig
_VISION = {
    "patch_size": "patch",
    "init_pos_emb_height": "grid_rows",
    "init_pos_emb_width": "grid_columns",
    "init_pos_emb_time": "max_frames",
    "vt_hidden_size": "width",
    "vt_intermediate_size": "mlp_width",
    "vt_num_hidden_layers": "num_blocks",
    "vt_num_attention_heads": "num_heads",
    "projector_ln_eps": "projector_eps",
}
_NORM_EPS = "norm_eps"  # of the tower; no released file has it
_VISION_MECHANISMS: dict[str, Any] = {
    "model_type": "moonvit3d",
    "pos_emb_type": "divided_fixed",
    "pos_emb_interpolation_mode": "bilinear",
    "norm_type": "rmsnorm",
    "mlp_type": "mlp2",
    "activation_func": "gelu_pytorch_tanh",
    "attn_bias": False,
    "linear_bias": False,
    "patch_embed_proj_bias": False,
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmergerv2",
    "projector_hidden_act": "gelu",
}
_FLOATS = {
    "norm_eps",
    "projector_eps",
    "situ_beta",
    "situ_linear_beta",
    "init_std",
    "moe.scaling_factor",
    "kda.gate_lower_bound",
}
# Token ids: at both levels of the released file. The last two may be null or absent, which is -1 in ModelConfig.
_IDS = {
    "bos_token_id": "bos_id",
    "eos_token_id": "eos_id",
    "pad_token_id": "pad_id",
    "media_placeholder_token_id": "media_id",
}

# What names a mechanism must name K3's. These are refused when absent too: the released classes' defaults differ.
_STATED = {"hidden_act": "situ", "mla_use_nope": True, "mla_use_output_gate": True, "latent_moe_use_norm": True}
# These may be absent: the released classes' defaults are K3's.
_IMPLIED = {
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "topk_method": "noaux_tc",
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
}
_MEANING = {
    "activation_situ_beta": "the cap of SiTU's gate",
    "activation_situ_linear_beta": "the cap of SiTU's linear input",
    "gate_lower_bound": "K3's bounded forget gate; a softplus gate is not supported",
    "q_lora_rank": "K3's queries are low rank",
}
_QUANTIZATION = {
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
                "dynamic": False,
            },
        }
    },
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
}


def model_config_from_hf(source: Mapping[str, Any] | str | os.PathLike[str]) -> ModelConfig:
    """Read a released config.json: the parsed mapping, the file, or its directory; also a bare text config.

    Raises `ConfigError` naming the key, its value and what K3 supports.
    """
    name, top = _read(source)
    text = _mapping(top, "text_config") if "text_config" in top else top
    linear = _mapping(text, "linear_attn_config")
    _check_present(text, linear)
    _check_mechanisms(top, text, linear)
    values: Json = {field: _number(text, key, field) for key, field in _TEXT.items()}
    values |= {field: _number(linear, key, field) for key, field in _LINEAR.items()}
    values |= {_IDS[key]: _optional_id(top, text, key) for key in ("pad_token_id", "media_placeholder_token_id")}
    values["mla_layers"] = _mla_layers(linear, values["num_layers"])
    heads, head_dim = values["kda.num_heads"], values["kda.head_dim"]
    values["kda.a_log_length"] = max(heads, head_dim)  # the release pads to head_dim; the tensors decide at load time
    values |= {"name": name, "dtype": _dtype(top, text), "quantized_experts": _is_quantized(top, text)}
    values["vision_json"] = json.dumps(top["vision_config"]) if top.get("vision_config") is not None else ""
    values["extra_json"] = json.dumps(_rest(top))
    return _assemble(values, _vision(top, text["hidden_size"])).validate()


def model_config_to_hf(config: ModelConfig) -> Json:
    """The released config.json's mapping; keys that `model_config_from_hf` kept verbatim come back unchanged."""
    top: Json = json.loads(config.extra_json) if config.extra_json else _released_shape(config)
    text = top.get("text_config", top)
    text |= {key: _get(config, field) for key, field in _TEXT.items()}
    text["linear_attn_config"] |= {
        **{key: _get(config, field) for key, field in _LINEAR.items()},
        "full_attn_layers": [layer + 1 for layer in range(config.num_layers) if config.is_mla(layer)],
        "kda_layers": [layer + 1 for layer in range(config.num_layers) if not config.is_mla(layer)],
    }
    if "num_key_value_heads" in text:
        text["num_key_value_heads"] = config.mla.num_heads
    _write_ids(config, top, text)
    _write_quantization(config, top, text)
    if config.vision_json or config.vision is not None:
        top["vision_config"] = _released_vision(config)
    return top


def _read(source: Mapping[str, Any] | str | os.PathLike[str]) -> tuple[str, Json]:
    """(name of the model, parsed file)."""
    if isinstance(source, Mapping):
        return str(source.get("model_type", "k3")), copy.deepcopy(dict(source))
    file = Path(source)
    file = file / "config.json" if file.is_dir() else file
    try:
        top = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{file}: no such file") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: not readable as JSON ({error})") from error
    require(isinstance(top, dict), f"{file}: must be a JSON object")
    return file.resolve().parent.name, top


def _mapping(parent: Json, key: str) -> Json:
    value = parent.get(key)
    if not isinstance(value, dict):
        raise ConfigError(f"config.json: {key} = {value!r}: K3 needs a mapping here")
    return value


def _check_present(text: Json, linear: Json) -> None:
    lists = ("full_attn_layers", "kda_layers")
    missing = [key for key in _TEXT if text.get(key) is None]
    missing += [f"linear_attn_config.{key}" for key in (*_LINEAR, *lists) if linear.get(key) is None]
    meanings = (_MEANING.get(key.split(".")[-1]) for key in missing)
    named = ", ".join(f"{key} ({meaning})" if meaning else key for key, meaning in zip(missing, meanings, strict=True))
    require(not missing, f"config.json lacks {named}")


def _check_mechanisms(top: Json, text: Json, linear: Json) -> None:
    for key, supported in _STATED.items():
        _supported(key, text.get(key), supported)
    for key, supported in _IMPLIED.items():
        _supported(key, text.get(key, supported), supported)
    _supported("tie_word_embeddings", top.get("tie_word_embeddings", False), False)
    _supported("linear_attn_config.use_full_rank_gate", linear.get("use_full_rank_gate"), True)
    heads = text["num_attention_heads"]
    if (kv_heads := text.get("num_key_value_heads")) not in (None, heads):
        raise ConfigError(f"config.json: num_key_value_heads = {kv_heads!r}: must equal num_attention_heads = {heads}")
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        outer, inner = top.get(key), text.get(key)
        require(
            outer is None or inner is None or outer == inner,
            f"config.json: {key} = {outer!r} at the top level, {inner!r} in text_config",
        )


def _supported(key: str, value: Any, supported: Any) -> None:
    require(value == supported, f"config.json: {key} = {value!r}: only {supported!r} is supported")


def _number(section: Json, key: str, field: str) -> int | float:
    value = section[key]
    if field in _FLOATS:
        require(_is_number(value, (int, float)), f"config.json: {key} = {value!r}: must be a number")
        return float(value)
    least = 0 if key.endswith("token_id") or key == "first_k_dense_replace" else 1
    require(_is_number(value, int) and value >= least, f"config.json: {key} = {value!r}: must be an integer >= {least}")
    return int(value)


def _is_number(value: Any, types: type | tuple[type, ...]) -> bool:
    return isinstance(value, types) and not isinstance(value, bool)


def _optional_id(top: Json, text: Json, key: str) -> int:
    value = text.get(key) if text.get(key) is not None else top.get(key)
    return -1 if value is None else int(_number({key: value}, key, key))


def _mla_layers(linear: Json, num_layers: int) -> tuple[int, ...]:
    """The 0-based MLA layers; the two 1-based lists must hold every layer exactly once."""
    mla, kda = linear["full_attn_layers"], linear["kda_layers"]
    for key, layers in (("full_attn_layers", mla), ("kda_layers", kda)):
        require(
            isinstance(layers, list) and all(_is_number(layer, int) for layer in layers),
            f"config.json: linear_attn_config.{key} must be a list of layer numbers",
        )
    counts = Counter([*mla, *kda])
    for layer in sorted(counts.keys() | set(range(1, num_layers + 1))):
        where = f"config.json: layer {layer} (1-based) is"
        require(1 <= layer <= num_layers, f"{where} in a layer list, but num_hidden_layers = {num_layers}")
        require(counts[layer] > 0, f"{where} neither in full_attn_layers nor in kda_layers")
        require(counts[layer] == 1, f"{where} {counts[layer]} times in full_attn_layers and kda_layers, must be once")
    return tuple(sorted(layer - 1 for layer in mla))


def _vision(top: Json, text_width: int) -> VisionConfig | None:
    """The tower's numbers; none where the file has not all of them, as in a text model that was cut out of K3."""
    derived = {"qkv_hidden_size", "mm_hidden_size", "text_hidden_size"}
    released = {} if top.get("vision_config") is None else _mapping(top, "vision_config")
    if not released.keys() >= {*_VISION, *_VISION_MECHANISMS, *derived}:
        return None
    values = {field: _number(released, key, field) for key, field in _VISION.items()}
    widths = {"mm_hidden_size": values["width"], "text_hidden_size": text_width}
    for key, supported in (_VISION_MECHANISMS | widths).items():
        _supported(f"vision_config.{key}", released[key], supported)
    inner, heads = released["qkv_hidden_size"], values["num_heads"]
    require(
        _is_number(inner, int) and inner % (4 * heads) == 0,  # rotary positions turn pairs, by column and row in turn
        f"config.json: vision_config.qkv_hidden_size = {inner!r}: must be a multiple of 4 x {heads} heads",
    )
    if _NORM_EPS in released:
        values["norm_eps"] = _number(released, _NORM_EPS, "norm_eps")
    sizes: dict[str, Any] = {**values, "head_dim": inner // heads}
    return VisionConfig(**sizes)


def _released_vision(config: ModelConfig) -> Json:
    """The file's vision_config: what was read, with the tower's numbers as they are now."""
    found, vision = json.loads(config.vision_json or "{}"), config.vision
    if vision is None:
        return found
    found = (found or dict(_VISION_MECHANISMS)) | {key: getattr(vision, field) for key, field in _VISION.items()}
    found |= {"mm_hidden_size": vision.width, "text_hidden_size": config.width}
    if _NORM_EPS in found or vision.norm_eps != VisionConfig.norm_eps:
        found[_NORM_EPS] = vision.norm_eps
    return found | {"qkv_hidden_size": vision.num_heads * vision.head_dim}


def _dtype(top: Json, text: Json) -> str:
    """The compute dtype: the file's own (`torch_dtype` in older files), bfloat16 where it names none."""
    named = (section.get(key) for section in (text, top) for key in ("dtype", "torch_dtype"))
    return str(next((dtype for dtype in named if dtype), "bfloat16"))


def _is_quantized(top: Json, text: Json) -> bool:
    quantization = text.get("quantization_config") or top.get("quantization_config")
    if not quantization:
        return False
    for key in ("quant_method", "format"):
        _supported(f"quantization_config.{key}", quantization.get(key), _QUANTIZATION[key])
    for name, group in quantization.get("config_groups", {}).items():
        place, weights = f"quantization_config.config_groups.{name}", group.get("weights") or {}
        for key, supported in (("num_bits", 4), ("type", "float"), ("group_size", 32)):
            _supported(f"{place}.weights.{key}", weights.get(key), supported)
    return True


def _rest(top: Json) -> Json:
    """What `model_config_to_hf` cannot derive from the numbers."""
    rest = {key: value for key, value in top.items() if key != "vision_config" or value is None}
    if "text_config" in rest:
        rest["text_config"] = dict(rest["text_config"])
    text = rest.get("text_config", rest)
    for key in _TEXT:
        del text[key]
    derived = {*_LINEAR, "full_attn_layers", "kda_layers"}
    linear = text["linear_attn_config"]
    text["linear_attn_config"] = {key: value for key, value in linear.items() if key not in derived}
    return rest


def _released_shape(config: ModelConfig) -> Json:
    """The keys of a released file that are no numbers of the model."""
    text = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": config.dtype,
        "num_key_value_heads": config.mla.num_heads,
        "use_grouped_topk": True,
        **_STATED,
        **_IMPLIED,
        "linear_attn_config": {"use_full_rank_gate": True},
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": config.dtype,
        "tie_word_embeddings": False,
        **{key: _get(config, field) for key, field in _IDS.items() if _get(config, field) >= 0},
        "text_config": text,
    }


def _write_ids(config: ModelConfig, top: Json, text: Json) -> None:
    """Token ids wherever the file has them; a pad or media id that it lacks goes where the release has it."""
    for key, field in _IDS.items():
        value, home = _get(config, field), top if key == "media_placeholder_token_id" else text
        if value < 0:
            continue
        places = [section for section in (top, text) if section.get(key) is not None] or [home]
        for section in places:
            section[key] = value


def _write_quantization(config: ModelConfig, top: Json, text: Json) -> None:
    if not config.quantized_experts:
        text.pop("quantization_config", None)
        top.pop("quantization_config", None)
    elif not (text.get("quantization_config") or top.get("quantization_config")):
        text["quantization_config"] = copy.deepcopy(_QUANTIZATION)


def _assemble(values: Json, vision: VisionConfig | None) -> ModelConfig:
    """A ModelConfig from {"field": value, "part.field": value}."""
    parts: dict[str, Json] = {"kda": {}, "mla": {}, "moe": {}}
    flat: Json = {}
    for path, value in values.items():
        part, _, field = path.rpartition(".")
        (parts[part] if part else flat)[field] = value
    kda, mla, moe = KDAConfig(**parts["kda"]), MLAConfig(**parts["mla"]), MoEConfig(**parts["moe"])
    return ModelConfig(**flat, kda=kda, mla=mla, moe=moe, vision=vision)


def _get(config: ModelConfig, path: str) -> Any:
    return reduce(getattr, path.split("."), config)
