"""Floating-point operations of K3, part by part, from the config alone.

What a token needs of the model's matrix products, a multiplication and its addition counted as two; norms, activations
and softmax are left out. So it is the numerator of MFU: what an implementation computes beyond it (a second forward
pass, tiles outside the causal triangle, the inside of KDA's chunks, padding) earns nothing.
"""

from __future__ import annotations

from k3jax.config import ModelConfig

TRAINING = 3  # forward passes' worth: the backward pass computes two products for each of the forward pass,
FROZEN = 2  # and one where the weight itself has no gradient
ATTENTION_FORMS = ("expanded", "absorbed")

# Dense bfloat16 operations a second of one JAX device, by the beginning of its `device_kind` (the makers' data sheets).
# The first that fits counts. A chip of tpu7x is two devices.
PEAK = {
    "TPU7x": 2307e12 / 2,
    "TPU v6 lite": 918e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v4": 275e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H100": 989e12,
}


def forward_flops(config: ModelConfig, *, keys: float, attention: str = "expanded") -> dict[str, float]:
    """Operations of one token's forward pass, over all layers: {part: operations}.

    `keys` is how many tokens a token sees on average, itself included: (T + 1) / 2 in documents of T tokens. Attention
    is "expanded" (training and prefill) or "absorbed" (decode, keys and values are the latents).
    """
    if attention not in ATTENTION_FORMS:
        raise ValueError(f"attention = {attention}: one of {', '.join(ATTENTION_FORMS)}")
    kinds = [config.layer_kind(layer) for layer in range(config.num_layers)]
    counts = {name: sum(name in kind for kind in kinds) for name in ("kda", "mla", "dense", "moe")}
    layer = _kda(config) | _mla(config, keys, attention) | _feed_forward(config)
    total = {part: counts[part.partition("_")[0]] * flops for part, flops in layer.items()}
    total["attn_res"] = _attn_res(config)
    total["head"] = 2.0 * config.width * config.vocab_size
    return total


def training_flops(config: ModelConfig, *, keys: float, mtp: bool = False, frozen: bool = False) -> float:
    """Operations that one token of training needs: forward and backward, nothing computed twice.

    `mtp`: with the layer of multi-token prediction; `frozen`: the weights get no gradients (adapters are left out).
    """
    forward = sum(forward_flops(config, keys=keys).values()) + (_mtp(config, keys) if mtp else 0.0)
    return (FROZEN if frozen else TRAINING) * forward


def mean_keys(length: int) -> float:
    """`keys` of documents of `length` tokens."""
    return (length + 1) / 2


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 operations a second of a device; None where the table does not know it."""
    return next((peak for kind, peak in PEAK.items() if device_kind.startswith(kind)), None)


def _kda(config: ModelConfig) -> dict[str, float]:
    c, d = config.kda, config.width
    inner = c.num_heads * c.head_dim
    return {
        "kda_projections": 2.0 * (5 * d * inner + d * c.head_dim + c.head_dim * inner + d * c.num_heads),
        "kda_conv": 2.0 * 3 * inner * c.conv_width,
        "kda_state": 2.0 * 3 * inner * c.head_dim,  # k^T S, the update k u^T, q^T S
    }


def _mla(config: ModelConfig, keys: float, attention: str) -> dict[str, float]:
    c, d, h = config.mla, config.width, config.mla.num_heads
    projections = d * c.q_rank + c.q_rank * h * (c.nope_dim + c.extra_dim) + d * (c.kv_rank + c.extra_dim)
    projections += c.kv_rank * h * (c.nope_dim + c.v_dim) + 2 * d * h * c.v_dim
    widths = c.nope_dim + c.extra_dim + c.v_dim  # of a key and a value
    if attention == "absorbed":
        widths = c.kv_rank + c.extra_dim + c.kv_rank
    return {"mla_projections": 2.0 * projections, "mla_attention": 2.0 * keys * h * widths}


def _feed_forward(config: ModelConfig) -> dict[str, float]:
    c, d = config.moe, config.width
    return {
        "dense_ffn": 2.0 * 3 * d * config.dense_width,
        "moe_router": 2.0 * d * c.num_experts,
        "moe_latent": 2.0 * 2 * d * c.latent_width,
        "moe_experts": 2.0 * 3 * c.top_k * c.latent_width * c.expert_width,
        "moe_shared": 2.0 * 3 * d * c.shared_width,
    }


def _mtp(config: ModelConfig, keys: float) -> float:
    """One more MLA layer, what joins its two inputs, and the head once more."""
    parts = _mla(config, keys, "expanded") | _feed_forward(config)
    layer = sum(flops for part, flops in parts.items() if not part.startswith("dense"))
    return layer + 2.0 * config.width * (2 * config.width + config.vocab_size)


def _attn_res(config: ModelConfig) -> float:
    """Two reads a layer and one before the head: a score and a weighted sum for each source."""
    block = config.attn_res_block
    # The live sum is a source too, except to a block's first read.
    sources = sum(2 * (layer // block + 2) - (layer % block == 0) for layer in range(config.num_layers))
    return 2.0 * 2 * config.width * (sources + config.num_snapshots + 1)
