"""The scale rule of a checkpoint is read off its bytes."""

import numpy as np
import pytest

from k3jax.quant.scale_rule import identify_scale_rule
from pallas_kernels.mx import quantize


def weights(kind: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    if kind == "rows of unequal size":
        return rng.normal(size=(256, 1024)) * rng.uniform(0.5, 2, (256, 1))
    return rng.laplace(size=(256, 1024)) if kind == "laplace" else rng.normal(size=(256, 1024))


@pytest.mark.parametrize("rule", ["floor", "ceil", "even"])
@pytest.mark.parametrize("kind", ["normal", "laplace", "rows of unequal size"])
@pytest.mark.parametrize("std", [0.02, 0.023, 0.027, 0.032, 0.037])
def test_the_rule_that_made_the_codes_is_named(rule, kind, std):
    found = identify_scale_rule(*quantize((weights(kind) * std).astype(np.float32), rule).to_checkpoint())
    assert found.rule == rule
    assert found.blocks == 256 * 32
    assert str(found).startswith(rule)


def test_zero_blocks_do_not_count_and_few_blocks_are_refused():
    half_zero = np.random.default_rng(0).normal(size=(64, 1024)).astype(np.float32)
    half_zero[:32] = 0
    assert identify_scale_rule(*quantize(half_zero).to_checkpoint()).blocks == 32 * 32
    with pytest.raises(ValueError, match="512 non-zero blocks: at least 1000"):
        identify_scale_rule(*quantize(half_zero[:48]).to_checkpoint())


def test_codes_of_no_rule_are_unknown():
    codes = np.full((64, 512), 0x11, np.uint8)  # every element one half: a scale eight times too large
    assert identify_scale_rule(codes, np.full((64, 32), 120, np.uint8)).rule is None
