"""The model as the released layout's tensors: weights, gradients, dense experts, and whole directories."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.checkpoint.hf_export import ModelSource, hf_tensors, save_hf
from k3jax.checkpoint.load import abstract_model, load
from k3jax.checkpoint.names import PREFIX
from k3jax.checkpoint.orbax_io import named_leaves, with_leaves
from k3jax.checkpoint.safetensors_dir import CheckpointError
from k3jax.nn.param import split_model, value_and_grad

LAYER = PREFIX + "model.layers."
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def test_tensors_come_back_as_they_were_loaded(tensors, make):
    exported = hf_tensors(load(make(tensors)))
    assert exported.keys() == tensors.keys()
    for name, tensor in exported.items():
        assert np.asarray(tensor).tobytes() == tensors[name].tobytes(), name
        assert tensor.dtype == tensors[name].dtype


def test_dense_experts_hold_what_the_codes_mean(tensors, make):
    exported = hf_tensors(load(make(tensors)), dense=True)
    assert not any("weight_packed" in name or "weight_scale" in name for name in exported)
    expert = f"{LAYER}3.block_sparse_moe.experts.1.w2.weight"
    packed, scale, weight = tensors[expert + "_packed"], tensors[expert + "_scale"], exported[expert]
    assert (weight.shape, weight.dtype) == ((32, 64), jnp.float32)
    for row, column in ((0, 0), (0, 1), (31, 33), (7, 63)):
        code = packed[row, column // 2] >> 4 * (column % 2) & 15
        assert float(weight[row, column]) == E2M1[code] * 2.0 ** (int(scale[row, column // 32]) - 127)


def test_a_gradient_tree_gives_only_what_it_holds(tensors, make):
    params, _, _ = split_model(load(make(tensors)))
    gradients = jax.tree.map(jnp.ones_like, params)
    exported = hf_tensors(gradients)
    left_out = {name for name in tensors if "correction_bias" in name or "weight_packed" in name or "scale" in name}
    assert exported.keys() == tensors.keys() - left_out
    np.testing.assert_array_equal(exported[f"{LAYER}1.self_attn.A_log"], [1, 1, 1, 0, 0, 0, 0, 0])
    assert exported[f"{LAYER}2.self_attn.kv_b_proj.weight"].shape == (22, 10)


def test_a_joined_tensor_without_one_half_is_left_out(tensors, make):
    model = load(make(tensors))
    mixer = model.stacks["mla_moe"].mixer
    mixer.k_up = mixer.k_up.replace(None)
    assert tensors.keys() - hf_tensors(model).keys() == {f"{LAYER}{n}.self_attn.kv_b_proj.weight" for n in (2, 4)}


@pytest.mark.parametrize("dense", [False, True])
def test_tracing_gives_the_same_tensors(small, dense):
    config = dataclasses.replace(small, num_layers=3, mla_layers=(2,))
    shapes = abstract_model(config)
    model = with_leaves(shapes, {name: jnp.ones(leaf.shape, leaf.dtype) for name, leaf in named_leaves(shapes).items()})
    traced = jax.eval_shape(lambda model: hf_tensors(model, dense=dense), model)
    assert {n: (t.shape, t.dtype) for n, t in traced.items()} == {
        n: (t.shape, t.dtype) for n, t in hf_tensors(model, dense=dense).items()
    }


def test_tensors_can_be_differentiated(tensors, make):
    def weighted(model):
        return jnp.sum(hf_tensors(model)[f"{LAYER}3.self_attn.A_log"] * jnp.arange(8.0))

    _, gradients = jax.jit(value_and_grad(weighted))(load(make(tensors)))
    a_log = gradients.stacks["kda_moe"].mixer.a_log.get_value()
    np.testing.assert_array_equal(a_log, [[0, 0, 0], [0, 1, 2]])  # layers 1 and 3


def test_a_saved_directory_loads_to_the_same_model(tensors, small, make, tmp_path):
    source = dataclasses.replace(small, vision_json='{"patch_size": 14}')
    model = load(make(tensors, source), dtype="float32")
    save_hf(model, tmp_path / "saved")
    saved = tmp_path / "saved"
    loaded = load(saved)
    exported = hf_tensors(loaded)
    assert all(np.asarray(exported[name]).tobytes() == tensors[name].tobytes() for name in tensors)
    assert len(list(saved.glob("model-*-of-000006.safetensors"))) == 6
    assert sorted(file.name for file in saved.iterdir() if "model-" not in file.name) == [
        "config.json",
        "model.safetensors.index.json",
    ]
    index = json.loads((saved / "model.safetensors.index.json").read_text())
    assert index["weight_map"][f"{LAYER}3.self_attn.A_log"] == "model-00004-of-000006.safetensors"
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    config = json.loads((saved / "config.json").read_text())
    assert "vision_config" not in config  # its tensors are not in the text model
    assert config["dtype"] == "bfloat16"  # the file's dtype, not the computation's


def test_an_interrupted_save_leaves_nothing_that_loads(tensors, make, tmp_path, monkeypatch):
    model = load(make(tensors))
    read, blocks = ModelSource.read, []

    def fail_at_last(self, *arguments):
        blocks.append(arguments)
        if len(blocks) == 120:
            raise OSError("disk full")
        return read(self, *arguments)

    monkeypatch.setattr(ModelSource, "read", fail_at_last)
    with pytest.raises(OSError, match="disk full"):
        save_hf(model, tmp_path / "saved")
    assert list((tmp_path / "saved").glob("model-*.safetensors"))
    with pytest.raises(CheckpointError, match="holds neither"):
        load(tmp_path / "saved")
