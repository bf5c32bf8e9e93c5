"""Kimi Delta Attention: a gated delta rule with a decay for every key channel.

Per head, with state S [K, V] (Kimi Linear, arXiv:2510.26692; the bounded gate is K3's):
    g_t = lower_bound * sigmoid(exp(a_log) * (gate_t + dt_bias))
    S'  = diag(exp(g_t)) S_{t-1};  e_t = v_t - S'^T k_t;  S_t = S' + k_t (beta_t e_t)^T;  o_t = S_t^T q_t
with q = scale * l2(q), k = l2(k).
"""

from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels.dispatch import BY_PLATFORM, on_hopper, resolve
from pallas_kernels.kda import decode, gpu, reference, tpu, xla
from pallas_kernels.kda.inputs import Parameters, compute_dtype, segments_of

__all__ = ["kda", "kda_decode", "kda_decode_step"]


def kda(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    gate: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    *,
    a_log: Float[Array, "H"],
    dt_bias: Float[Array, "H K"],
    lower_bound: float,
    scale: float | None = None,
    initial_state: Float[Array, "B H K V"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    states_every: int | None = None,
    precision: Literal["high"] | None = None,
    implementation: str | None = None,
) -> tuple[Array, ...]:
    """Run KDA over whole sequences; returns the outputs in v's dtype and the float32 state after the last token.

    The outputs are [B, T, H, V], the state is [B, H, K, V]. With `states_every`, a multiple of 64, a third result
    [B, T // states_every, H, K, V] holds the running state after every so many tokens of the row. A kernel rounds its
    operands to bfloat16 where the inputs are; `precision` "high" keeps them in float32 inside.

    `gate` is raw; `beta` has been through its sigmoid; q and k are L2-normalised here (eps 1e-6 on the sum); `scale`
    multiplies q, K**-0.5 by default. `segment_ids`: non-decreasing, a new id starts from a zero state, -1 is padding
    (no update, output 0, its contents ignored); `initial_state` feeds the first segment only.
    Raises ValueError on shapes that do not fit, NotImplementedError for a body that does not exist.
    """
    batch, length, heads, width = _check_rank("q", q, 4)
    _check_shapes(
        {"k": (k, q.shape), "gate": (gate, q.shape), "beta": (beta, q.shape[:3]), "v": (v, (*q.shape[:3], v.shape[-1]))}
    )
    if precision is not None:
        if precision != "high":
            raise ValueError(f"precision={precision!r} is unknown; use None or 'high'")
        options: dict[str, Any] = {"a_log": a_log, "dt_bias": dt_bias, "lower_bound": lower_bound, "scale": scale}
        options |= {"initial_state": initial_state, "segment_ids": segment_ids, "states_every": states_every}
        wide_q, wide_k, wide_v, wide_gate = (x.astype(compute_dtype(x)) for x in (q, k, v, gate))
        o, *states = kda(wide_q, wide_k, wide_v, wide_gate, beta, **options, implementation=implementation)
        return o.astype(v.dtype), *states
    state_shape = (batch, heads, width, v.shape[-1])
    parameters = _parameters(a_log, dt_bias, lower_bound, scale, heads, width)
    if initial_state is None:
        initial_state = jnp.zeros(state_shape, compute_dtype(q))
    _check_shapes({"initial_state": (initial_state, state_shape)})
    segments = None
    if segment_ids is not None:
        _check_shapes({"segment_ids": (segment_ids, (batch, length))})
        segments = segments_of(segment_ids)
    arguments = (q, k, v, gate, beta, initial_state, parameters, segments)
    by_platform = _by_platform(width, v.shape[-1])
    bodies: dict[str, Callable[..., Any]]
    if states_every is None:
        bodies = {"reference": reference.forward, "xla": xla.forward, "tpu": tpu.forward, "gpu": gpu.forward}
        return resolve("kda", implementation, bodies, by_platform=by_platform)(*arguments)
    if states_every <= 0 or states_every % 64:
        raise ValueError(f"states_every={states_every} must be a positive multiple of 64")
    bodies = {"reference": reference.forward_with_states, "xla": xla.forward_with_states, "tpu": tpu.forward}
    by_platform = {platform: "xla" if name == "gpu" else name for platform, name in by_platform.items()}
    body = resolve("kda", implementation, bodies, by_platform=by_platform)
    return body(*arguments, states_every=states_every)


def kda_decode(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    gate: Float[Array, "B H K"],
    beta: Float[Array, "B H"],
    state: Float[Array, "B H K V"],
    *,
    a_log: Float[Array, "H"],
    dt_bias: Float[Array, "H K"],
    lower_bound: float,
    scale: float | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B H V"], Float[Array, "B H K V"]]:
    """Advance every sequence by one token; arguments, dtypes and errors as in `kda`, without the T axis."""
    batch, heads, width = _check_rank("q", q, 3)
    _check_shapes(
        {
            "k": (k, q.shape),
            "gate": (gate, q.shape),
            "beta": (beta, q.shape[:2]),
            "v": (v, (*q.shape[:2], v.shape[-1])),
            "state": (state, (batch, heads, width, v.shape[-1])),
        }
    )
    parameters = _parameters(a_log, dt_bias, lower_bound, scale, heads, width)
    # One token leaves nothing to do in chunks: two bodies are the same step, and a TPU has none of its own.
    bodies = {"reference": reference.step, "xla": reference.step, "gpu": gpu.step}
    by_platform = _by_platform(width, v.shape[-1]) | {"tpu": "xla"}
    body = resolve("kda_decode", implementation, bodies, by_platform=by_platform)
    state, output = body(state.astype(compute_dtype(state)), q, k, v, gate, beta, parameters)
    return output.astype(v.dtype), state


def kda_decode_step(
    qkv: Float[Array, "S C"],
    gate: Float[Array, "S H K"],
    beta: Float[Array, "S H"],
    out_gate: Float[Array, "S H V"],
    conv_pool: Float[Array, "N W-1 C"],
    state_pool: Float[Array, "N H K V"],
    slots: Int[Array, "S"],
    *,
    conv_weights: Float[Array, "C W"],
    a_log: Float[Array, "H"],
    dt_bias: Float[Array, "H K"],
    norm_weight: Float[Array, "V"],
    lower_bound: float,
    scale: float | None = None,
    norm_eps: float = 1e-5,
    implementation: str | None = None,
) -> tuple[Float[Array, "S H V"], Float[Array, "N W-1 C"], Float[Array, "N H K V"]]:
    """Serve one token per row: conv with SiLU, KDA step, RMS norm per head times sigmoid(out_gate); one kernel on TPU.

    `qkv` holds q, k and v side by side (C = 2 H K + H V channels, before the conv), `conv_pool` a slot's last W - 1 of
    them; both pools are updated in place where they are donated. Row s uses `slots[s]`, each slot at most once. -1 is
    padding: output 0, nothing changes; a slot that the pool does not have changes nothing either and outputs NaN.
    C may be split into two axes (3 H, K) in all three arrays; on a TPU, `conv_pool` of that form is not copied.
    Raises ValueError on shapes that do not fit, NotImplementedError for a body that does not exist.
    """
    rows, heads, width = _check_rank("gate", gate, 3)
    pool, value = _check_rank("state_pool", state_pool, 4)[0], state_pool.shape[3]
    taps = conv_weights.shape[-1]
    channels = heads * (2 * width + value)
    shapes = {
        "qkv": (qkv, (rows, *_split_like(qkv, 1, channels))),
        "beta": (beta, (rows, heads)),
        "out_gate": (out_gate, (rows, heads, value)),
        "conv_pool": (conv_pool, (pool, taps - 1, *_split_like(conv_pool, 2, channels))),
        "state_pool": (state_pool, (pool, heads, width, value)),
        "slots": (slots, (rows,)),
        "conv_weights": (conv_weights, (*_split_like(conv_weights, 0, channels, 1), taps)),
        "norm_weight": (norm_weight, (value,)),
    }
    _check_shapes(shapes, "gate and state_pool")
    parameters = _parameters(a_log, dt_bias, lower_bound, scale, heads, width)
    bodies = {"reference": decode.step, "xla": decode.step, "tpu": tpu.decode_step, "gpu": gpu.decode_step}
    body = resolve("kda_decode_step", implementation, bodies, by_platform=_by_platform(width, value))
    rest = parameters, conv_weights, norm_weight, norm_eps
    return body(qkv, gate, beta, out_gate, conv_pool, state_pool, slots, *rest)


def _split_like(x: Array, before: int, channels: int, after: int = 0) -> tuple[int, ...]:
    """The channel axes that `x` should have: one, or the two that it has if they make `channels`."""
    axes = x.shape[before : x.ndim - after]
    return axes if len(axes) == 2 and axes[0] * axes[1] == channels else (channels,)


def _by_platform(width: int, value: int) -> dict[str, str]:
    """The TPU and GPU kernels are for heads of 128, the GPU's for Hopper; everything else runs the portable body."""
    fits = (width, value) == (tpu.WIDTH, tpu.WIDTH)
    gpu_body = "gpu" if fits and on_hopper() else "xla"
    return {**BY_PLATFORM, "tpu": "tpu" if fits else "xla", "gpu": gpu_body}


def _parameters(
    a_log: Array, dt_bias: Array, lower_bound: float, scale: float | None, heads: int, width: int
) -> Parameters:
    _check_shapes({"a_log": (a_log, (heads,)), "dt_bias": (dt_bias, (heads, width))})
    if lower_bound >= 0:
        raise ValueError(f"lower_bound={lower_bound} must be negative: it is the lowest log decay of one token")
    return Parameters(a_log, dt_bias, lower_bound, width**-0.5 if scale is None else scale)


def _check_rank(name: str, x: Array, rank: int) -> tuple[int, ...]:
    if x.ndim != rank:
        raise ValueError(f"{name} has shape {x.shape}: {x.ndim} axes where {rank} are needed")
    return x.shape


def _check_shapes(arguments: dict[str, tuple[Array, tuple[int, ...]]], source: str = "q and v") -> None:
    for name, (x, shape) in arguments.items():
        if x.shape != shape:
            raise ValueError(f"{name} has shape {x.shape}; {source} ask for {shape}")
