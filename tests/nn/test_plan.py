"""StackPlan: where each layer runs in the scan."""

import numpy as np
import pytest

from k3jax.config import ModelConfig
from k3jax.nn.plan import EMPTY, Depth, StackPlan
from tests.nn.conftest import make_config

CONFIGS = [
    ModelConfig(),
    make_config(),
    make_config(num_layers=9, mla_layers=(3, 7, 8), attn_res_block=4),
    make_config(num_layers=7, mla_layers=(6,), attn_res_block=3),
    make_config(num_layers=6, mla_layers=(0, 1, 4), attn_res_block=6),
    make_config(num_layers=8, mla_layers=(), attn_res_block=5, num_dense_layers=2),
    make_config(num_layers=5, mla_layers=(0, 1, 2, 3, 4), attn_res_block=2, num_dense_layers=0),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.name}-{c.num_layers}")
def test_every_layer_has_one_place_in_depth_order(config: ModelConfig) -> None:
    plan = StackPlan.of(config)
    assert plan is not None
    order = list(plan.prefix)
    for block in range(len(plan.kda)):
        for unit in range(plan.kda.shape[1]):
            order += [*plan.kda[block, unit], plan.mla[block, unit]]
    assert [layer for layer in order if layer != EMPTY] == list(range(config.num_layers))
    assert not {*plan.kda[plan.kda != EMPTY]} & {*config.mla_layers}
    assert {*plan.mla[plan.mla != EMPTY]} <= {*config.mla_layers}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.name}-{c.num_layers}")
def test_seals_stand_where_a_block_begins(config: ModelConfig) -> None:
    plan = StackPlan.of(config)
    assert plan is not None
    for block, seals in enumerate(plan.seals):
        layers = [*plan.kda[block].ravel(), *plan.mla[block].ravel()]
        first = min(layer for layer in layers if layer != EMPTY)
        assert seals == (first % config.attn_res_block == 0)


def test_the_released_model_has_three_bodies_and_four_empty_slots() -> None:
    plan = StackPlan.of(ModelConfig())
    assert plan is not None
    assert plan.prefix == (0,)
    assert plan.kda.shape == (8, 3, 3)
    assert plan.mla.shape == (8, 3)
    assert np.sum(plan.kda == EMPTY) == 4
    assert np.sum(plan.mla == EMPTY) == 0
    assert plan.mla[-1].tolist() == [87, 91, 92]
    assert plan.seals.tolist() == [False, *[True] * 7]


def test_dense_layers_beyond_the_first_block_leave_the_scan() -> None:
    assert StackPlan.of(make_config(num_dense_layers=3)) is None
    assert StackPlan.of(make_config(num_layers=1, mla_layers=())) is None


def test_depth_counts_layers_of_a_kind_and_of_a_mixer() -> None:
    depth = Depth(make_config())
    assert depth.layers_of == {"kda_dense": [0], "kda_moe": [1, 3], "mla_moe": [2, 4]}
    assert depth.in_stack.tolist() == [0, 0, 0, 1, 1]
    assert depth.in_cache.tolist() == [0, 1, 0, 2, 1]
