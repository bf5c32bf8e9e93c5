"""Small K3-shaped configs whose widths all differ, so that a swapped dim cannot pass."""

from typing import Any

import pytest

from k3jax.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig


def make_config(**changes: Any) -> ModelConfig:
    """Five layers: KDA dense | KDA, MLA | KDA, MLA in AttnRes blocks of two, four experts, float32."""
    fields: dict[str, Any] = {
        "name": "small",
        "vocab_size": 61,
        "width": 28,
        "num_layers": 5,
        "dense_width": 36,
        "mla_layers": (2, 4),
        "attn_res_block": 2,
        "max_context": 512,
        "init_std": 0.3,
        "quantized_experts": False,
        "dtype": "float32",
        "kda": KDAConfig(num_heads=3, head_dim=8, a_log_length=8),
        "mla": MLAConfig(num_heads=2, q_rank=12, kv_rank=10, nope_dim=6, extra_dim=4, v_dim=5),
        "moe": MoEConfig(num_experts=4, top_k=2, num_shared=1, expert_width=20, latent_width=16),
    }
    return ModelConfig(**{**fields, **changes}).validate()


@pytest.fixture(scope="session")
def small() -> ModelConfig:
    """See `make_config`."""
    return make_config()
