"""SiTU-GLU feed-forward network: dense layers and the shared expert (spec text-model 2.5)."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from k3jax.config import ModelConfig
from k3jax.nn.param import normal, partial_product, project
from pallas_kernels.situ import situ_glu
from sharding.local import total


class FFN(nnx.Module):
    """down(SiTU(gate x, up x)) of inner width `mlp_width`."""

    def __init__(self, config: ModelConfig, mlp_width: int, key: PRNGKeyArray, *, dtype: Any):
        keys = jax.random.split(key, 3)
        d, f = config.width, mlp_width
        self.gate = normal(keys[0], (d, f), ("embed", "mlp"), std=d**-0.5, dtype=dtype)
        self.up = normal(keys[1], (d, f), ("embed", "mlp"), std=d**-0.5, dtype=dtype)
        self.down = normal(keys[2], (f, d), ("mlp", "embed"), std=f**-0.5, dtype=dtype)
        self.beta, self.linear_beta = config.situ_beta, config.situ_linear_beta

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return total(self.partial(x), "mlp")

    def partial(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The output of the inner units that this device has."""
        gate, up = project(x, self.gate), project(x, self.up)
        hidden = situ_glu(gate, up, beta=self.beta, linear_beta=self.linear_beta)
        return partial_product(hidden, self.down)
