"""Tables of rules against the models they are for, up to the full K3 on a pod; nothing is allocated."""

import math

import jax
import pytest

from k3jax.config import load_model_config
from k3jax.nn.param import is_variable
from k3jax.nn.placement import place
from k3jax.nn.transformer import Transformer
from sharding.local import Placement
from sharding.mesh import AXES, SLICES, MeshError, find_slice, make_mesh
from sharding.rules import SMALL, SMALL_PART, TABLES

ACTIVATIONS = {"batch", "seq", "page"}
POD = {"fsdp": 8, "expert": 128}


def weights(name: str) -> list:
    config = load_model_config(name)
    model = jax.eval_shape(lambda: Transformer(config, jax.random.key(0)))
    return [v for v in jax.tree.leaves(model, is_leaf=is_variable) if is_variable(v)]


@pytest.mark.parametrize("mode", TABLES)
def test_tables_name_only_axes_that_exist(mode):
    known = {axis for name in ("k3", "k3_tiny_vision") for variable in weights(name) for axis in variable.axes}
    rules = TABLES[mode]
    assert set(rules.split) | set(rules.stored) <= known | ACTIVATIONS
    assert {axis for axes in (*rules.split.values(), *rules.stored.values()) for axis in axes} <= set(AXES)


@pytest.mark.parametrize("mode", TABLES)
def test_no_array_has_a_mesh_axis_twice(mode):
    sizes = dict.fromkeys(AXES, 2)
    variables = weights("k3")
    placement = place(sizes, TABLES[mode], variables)
    for variable in variables:
        parts = [axis for axes in placement.of_dims(variable.axes) for axis in axes]
        assert len(parts) == len(set(parts)), variable.axes
    rows = [axis for name in ("batch", "seq") for axis in placement.split.get(name, ())]
    for heads in ("kda_heads", "mla_heads", "vocab", "mlp"):
        both = [*rows, *placement.split.get(heads, ())]
        assert len(both) == len(set(both)), heads


def test_on_a_pod_every_large_weight_of_k3_is_stored_once():
    variables = weights("k3")
    placement = place(POD, TABLES["train"], variables)
    elements = 0
    for variable in variables:
        parts = math.prod(placement.sizes[axis] for axis in placement.parts(variable.axes))
        elements += variable.get_value().size // parts
        of_a_layer = math.prod(variable.get_value().shape[-len(variable.axes) :])
        if len(variable.axes) > 1 and variable.axes not in SMALL:
            assert parts == 1024 or of_a_layer // parts <= SMALL_PART, variable.axes
    assert elements < 1.01 * sum(variable.get_value().size for variable in variables) / 1024


def test_a_matrix_of_k3_in_parts_both_ways_is_joined_by_rows_last():
    """The turn that brings most bytes needs no copy then; the turn before it joins columns by whole halves of tiles."""
    variables = weights("k3")
    placement = place(POD, TABLES["train"], variables)
    both = 0
    for variable in variables:
        rows, *_, columns = placement.kept[variable.axes] if len(variable.axes) == 2 else ((), ())
        if rows and columns:
            both += 1
            assert (rows, columns) == (("expert",), ("fsdp",)), variable.axes
            assert variable.get_value().shape[-1] // POD["fsdp"] % 64 == 0, variable.axes
    assert both > 8


def test_each_dim_in_turn_takes_the_first_axis_that_is_free_and_divides_it():
    rules = TABLES["train"]
    shapes = [
        (("embed", "latent"), (2048, 1536)),
        (("latent", "embed"), (1536, 2048)),
        (("q_rank", "mla_heads", "qk_dim"), (1536, 6, 192)),
        (("embed", "q_rank"), (512, 1536)),
        (("vit", "vit_qkv", "vit_heads", "head_dim"), (2048, 3, 16, 64)),
    ]
    kept = Placement.of({"fsdp": 4, "expert": 8}, rules, shapes).kept
    assert kept["embed", "latent"] == (("expert",), ("fsdp",))
    assert kept["latent", "embed"] == (("expert",), ("fsdp",))
    assert kept["q_rank", "mla_heads", "qk_dim"] == (("expert", "fsdp"), (), ())  # 4 does not divide 6 heads
    assert kept["embed", "q_rank"] == (("expert",), ())  # small enough
    assert kept["vit", "vit_qkv", "vit_heads", "head_dim"] == (("expert", "fsdp"), (), (), ())


def test_presets_are_slices_with_a_known_memory():
    assert find_slice("tpu7x:8x8x8").devices == 1024
    assert find_slice("v5p:8x8x16").devices == 1024
    assert find_slice("v6e:16x16").devices == 256
    assert all(slice_.memory > 2**33 for slice_ in SLICES.values())


def test_a_slice_that_does_not_exist_names_the_nearest():
    with pytest.raises(MeshError, match=r"topology = tpu7x:8x8x9: no such slice; did you mean tpu7x:8x8x8\?"):
        find_slice("tpu7x:8x8x9")


def test_slices_differ_along_data_alone():
    mesh = make_mesh({"data": 4, "fsdp": 2}, slices=2)
    first, second = set(mesh.devices[:2].flat), set(mesh.devices[2:].flat)
    assert first == set(jax.devices()[:4])
    assert second == set(jax.devices()[4:])
    with pytest.raises(MeshError, match=r"mesh\.data = 1: 2 slices need a multiple of 2"):
        make_mesh({"fsdp": 8}, slices=2)
