"""KDA as K3 runs it, 96 heads of 128 in bf16 with a float32 state in and out. Unit of work: one head and token.

The peer is flash-linear-attention: `chunk_kda`, and `fused_recurrent_kda` for decode.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.device_cases.case import DeviceCase, Work, jax_work
from pallas_kernels.kda import kda, kda_decode, kda_decode_step

WIDTH = 128
LOWER_BOUND = -5.0
TAPS = 4


def _normal(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def _tokens(*shape: int) -> tuple[Array, ...]:
    """q, k, v, gate and beta of `shape`, heads last."""
    return *(_normal(i, *shape, WIDTH) for i in range(4)), jax.nn.sigmoid(_normal(4, *shape, dtype=jnp.float32))


def _parameters(heads: int) -> dict[str, Array]:
    return {"a_log": jnp.zeros(heads), "dt_bias": jnp.zeros((heads, WIDTH))}


def _state(rows: int, heads: int) -> Array:
    return _normal(5, rows, heads, WIDTH, WIDTH, dtype=jnp.float32)


def forward(length: int, heads: int) -> Work:
    """Prefill of one sequence."""

    def run(state: Array, *tokens: Array) -> tuple[Array, Array]:
        output, state = kda(*tokens, initial_state=state, lower_bound=LOWER_BOUND, **_parameters(heads))
        return state, output

    return jax_work(run, _state(1, heads), *_tokens(1, length, heads))


def forward_backward(length: int, heads: int) -> Work:
    """One sequence with gradients for every argument; the cotangents are those of the outputs' sum."""

    def loss(tokens: tuple[Array, ...], state: Array, parameters: dict[str, Array]) -> Array:
        output, state = kda(*tokens, initial_state=state, lower_bound=LOWER_BOUND, **parameters)
        return jnp.sum(output.astype(jnp.float32)) + jnp.sum(state)

    def run(carry: tuple[()], *arguments: Any) -> tuple[tuple[()], Any]:
        return carry, jax.value_and_grad(loss, argnums=(0, 1, 2))(*arguments)  # the value keeps the forward pass alive

    return jax_work(run, (), _tokens(1, length, heads), _state(1, heads), _parameters(heads))


def decode(rows: int, heads: int) -> Work:
    """One token of every sequence, from normalised inputs on."""

    def run(state: Array, *tokens: Array) -> tuple[Array, Array]:
        output, state = kda_decode(*tokens, state, lower_bound=LOWER_BOUND, **_parameters(heads))
        return state, output

    return jax_work(run, _state(rows, heads), *_tokens(rows, heads))


def decode_step(rows: int, heads: int) -> Work:
    """The serving step of a full pool: conv, KDA and gated norm."""
    channels = 3 * heads, WIDTH

    def run(pools: tuple[Array, Array], *arguments: Array) -> tuple[tuple[Array, ...], Array]:
        qkv, gate, beta, out_gate, slots, taps = arguments
        output, *pools = kda_decode_step(
            *(qkv, gate, beta, out_gate, *pools, slots),
            conv_weights=jnp.moveaxis(taps, 0, -1),
            norm_weight=jnp.ones(WIDTH),
            lower_bound=LOWER_BOUND,
            **_parameters(heads),
        )
        return tuple(pools), output

    _, _, out_gate, gate, beta = _tokens(rows, heads)
    taps, slots = _normal(6, TAPS, *channels, dtype=jnp.float32), jnp.arange(rows, dtype=jnp.int32)
    pools = _normal(7, rows, TAPS - 1, *channels), _state(rows, heads)
    return jax_work(run, pools, _normal(8, rows, *channels), gate, beta, out_gate, slots, taps)


# ---------------------------------------------------------------------------------------------------------------------
# flash-linear-attention
# ---------------------------------------------------------------------------------------------------------------------


def _fla_arguments(rows: int, length: int, heads: int, grad: bool) -> dict[str, Any]:
    import torch

    def normal(*shape: int, dtype: Any = torch.bfloat16) -> Any:
        return torch.randn(shape, device="cuda", dtype=dtype).requires_grad_(grad)

    tokens = {name: normal(rows, length, heads, WIDTH) for name in "qkvg"}
    beta = torch.rand(rows, length, heads, device="cuda").requires_grad_(grad)
    parameters = {"A_log": normal(heads, dtype=torch.float32), "dt_bias": normal(heads * WIDTH, dtype=torch.float32)}
    state = normal(rows, heads, WIDTH, WIDTH, dtype=torch.float32)
    gate = {"use_gate_in_kernel": True, "lower_bound": LOWER_BOUND}
    norm = {"use_qk_l2norm_in_kernel": True}
    return tokens | parameters | gate | norm | {"beta": beta, "initial_state": state, "output_final_state": True}


def fla_forward(length: int, heads: int) -> Work:
    """`chunk_kda` without gradients."""
    import torch
    from fla.ops.kda import chunk_kda

    arguments = _fla_arguments(1, length, heads, grad=False)

    def call() -> None:
        with torch.no_grad():
            chunk_kda(**arguments, safe_gate=True)

    return Work(call, torch.cuda.synchronize)


def fla_forward_backward(length: int, heads: int) -> Work:
    """`chunk_kda` and its gradients."""
    import torch
    from fla.ops.kda import chunk_kda

    arguments = _fla_arguments(1, length, heads, grad=True)
    leaves = [x for x in arguments.values() if isinstance(x, torch.Tensor)]

    def call() -> None:
        output, state = chunk_kda(**arguments, safe_gate=True)
        torch.autograd.grad(output.float().sum() + state.sum(), leaves)

    return Work(call, torch.cuda.synchronize)


def fla_decode(rows: int, heads: int) -> Work:
    """`fused_recurrent_kda` on one token of every sequence."""
    import torch
    from fla.ops.kda import fused_recurrent_kda

    arguments = _fla_arguments(rows, 1, heads, grad=False)

    def call() -> None:
        with torch.no_grad():
            fused_recurrent_kda(**arguments)

    return Work(call, torch.cuda.synchronize)


HEADS = 96
FLA = "fla"


def _case(name: str, tokens: int, ours: Any, fla: Any) -> DeviceCase:
    size = tokens, HEADS
    peers = {} if fla is None else {FLA: partial(fla, *size)}
    return DeviceCase(name, tokens * HEADS, partial(ours, *size), peers)


CASES = (
    *(_case(f"kda_fwd_h96_t{length}", length, forward, fla_forward) for length in (4096, 16384)),
    *(_case(f"kda_decode_b{rows}_h96", rows, decode, fla_decode) for rows in (1, 64, 256)),
    *(_case(f"kda_decode_step_b{rows}_h96", rows, decode_step, None) for rows in (1, 64, 256)),
    *(_case(f"kda_fwd_bwd_h96_t{length}", length, forward_backward, fla_forward_backward) for length in (4096, 16384)),
)
