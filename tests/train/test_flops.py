"""Operations of a token: K3's by hand, any model's from its weights, and what grows with the context."""

import jax
import pytest

from k3jax.checkpoint.orbax_io import named_leaves
from k3jax.config import load_model_config
from k3jax.nn.param import split_model
from k3jax.nn.transformer import Transformer
from k3jax.train.flops import forward_flops, mean_keys, peak_flops, training_flops


def test_k3_by_hand():
    # Millions of multiplications of one token in one layer, from the shapes in the released config.
    kda = 7168 * 12288 * 5 + 7168 * 128 + 128 * 12288 + 7168 * 96 + 3 * 12288 * 4 + 3 * 96 * 128 * 128
    mla = 7168 * 1536 + 1536 * 18432 + 7168 * 576 + 512 * 24576 + 2 * 7168 * 12288 + 4096.5 * 96 * (192 + 128)
    moe = 7168 * 896 + 2 * 7168 * 3584 + 16 * 3 * 3584 * 3072 + 3 * 7168 * 6144
    by_hand = 2 * (69 * kda + 24 * mla + 92 * moe + 3 * 7168 * 33792 + 7168 * 163840)
    assert by_hand == pytest.approx(2.16e11, rel=0.01)
    counted = forward_flops(load_model_config("k3"), keys=mean_keys(8192))
    assert sum(counted.values()) == pytest.approx(by_hand, rel=1e-3)  # the rest is Attention Residuals
    assert training_flops(load_model_config("k3"), keys=4096.5) == pytest.approx(3 * by_hand, rel=1e-3)


@pytest.mark.parametrize("name", ["k3", "k3_mini", "k3_tiny"])
def test_a_weight_is_used_once_a_token_and_an_expert_by_its_share(name):
    config = load_model_config(name)
    model = jax.eval_shape(lambda: Transformer(config, jax.random.key(0)))
    products = 0.0
    for leaf, weight in named_leaves(split_model(model)[0]).items():
        part = leaf.rpartition(".")[2]
        if leaf == "embed" or "norm" in leaf or part in ("query", "a_log", "dt_bias"):
            continue  # looked up, or elementwise
        products += weight.size * (config.moe.top_k / config.moe.num_experts if part in ("w1", "w2", "w3") else 1)
    counted = forward_flops(config, keys=100.0)
    beside = sum(counted.pop(part) for part in ("kda_state", "mla_attention", "attn_res"))
    assert sum(counted.values()) == pytest.approx(2 * products, rel=1e-9)
    assert 0 < beside < 0.25 * sum(counted.values())


def test_only_attention_grows_with_the_context():
    config = load_model_config("k3")
    near, far = (forward_flops(config, keys=keys) for keys in (1000.0, 3000.0))
    assert {part for part in near if near[part] != far[part]} == {"mla_attention"}
    assert far["mla_attention"] == 3 * near["mla_attention"]
    absorbed = forward_flops(config, keys=1000.0, attention="absorbed")
    assert absorbed["mla_attention"] / near["mla_attention"] == pytest.approx((512 + 64 + 512) / (192 + 128))
    with pytest.raises(ValueError, match="attention = folded: one of expanded, absorbed"):
        forward_flops(config, keys=1.0, attention="folded")


def test_sources_of_attention_residuals():
    config = load_model_config("k3_tiny")  # five layers in blocks of two: 1, 1, 2, 2, 3 snapshots
    reads = [1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4]  # mixer and FFN of each layer, then the one before the head
    assert forward_flops(config, keys=1.0)["attn_res"] == 4 * 128 * sum(reads)


def test_peak_of_known_devices():
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("TPU v5 lite") < peak_flops("TPU v5p")
    assert peak_flops("cpu") is None
