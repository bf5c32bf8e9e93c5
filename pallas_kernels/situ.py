"""SiTU-GLU, the activation of every MLP in K3."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def situ_glu(
    gate: Float[Array, "... F"], up: Float[Array, "... F"], *, beta: float, linear_beta: float
) -> Float[Array, "... F"]:
    """Return `beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta)`, both [..., F], in gate's dtype.

    The sigmoid sees the uncapped gate. Computed in float32 (float64 stays float64); the backward pass keeps gate and up
    and computes the rest again: Kimi K3 report, section 2.3.2.
    """
    return _situ_glu(beta, linear_beta, gate, up)


def _factors(beta: float, linear_beta: float, gate: Array, up: Array) -> tuple[Array, Array, Array]:
    """tanh(gate/beta), sigmoid(gate) and tanh(up/linear_beta) in the compute dtype."""
    compute = jnp.promote_types(gate.dtype, jnp.float32)
    gate, up = gate.astype(compute), up.astype(compute)
    return jnp.tanh(gate / beta), jax.nn.sigmoid(gate), jnp.tanh(up / linear_beta)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _situ_glu(beta: float, linear_beta: float, gate: Array, up: Array) -> Array:
    capped, open_, linear = _factors(beta, linear_beta, gate, up)
    return (beta * capped * open_ * (linear_beta * linear)).astype(gate.dtype)


def _situ_glu_fwd(beta: float, linear_beta: float, gate: Array, up: Array) -> tuple[Array, tuple[Array, Array]]:
    return _situ_glu(beta, linear_beta, gate, up), (gate, up)


def _situ_glu_bwd(beta: float, linear_beta: float, saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    gate, up = saved
    capped, open_, linear = _factors(beta, linear_beta, gate, up)
    # d/dgate of beta tanh(gate/beta) sigmoid(gate), and d/dup of linear_beta tanh(up/linear_beta).
    slope = (1 - capped * capped) * open_ + beta * capped * open_ * (1 - open_)
    d_gate = g * slope * (linear_beta * linear)
    d_up = g * (beta * capped * open_) * (1 - linear * linear)
    return d_gate.astype(gate.dtype), d_up.astype(up.dtype)


_situ_glu.defvjp(_situ_glu_fwd, _situ_glu_bwd)
