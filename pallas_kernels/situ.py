"""SiTU-GLU, the activation of every MLP in K3."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def situ_glu(
    gate: Float[Array, "... F"], up: Float[Array, "... F"], *, beta: float, linear_beta: float
) -> Float[Array, "... F"]:
    """Return `beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta)`, both [..., F], in gate's dtype.

    The sigmoid sees the uncapped gate. Computed in float32 (float64 stays float64): Kimi K3 report, section 2.3.2.
    """
    compute = jnp.promote_types(gate.dtype, jnp.float32)
    gate_c, up_c = gate.astype(compute), up.astype(compute)
    capped = beta * jnp.tanh(gate_c / beta) * jax.nn.sigmoid(gate_c)
    return (capped * (linear_beta * jnp.tanh(up_c / linear_beta))).astype(gate.dtype)
