"""Where and how a served model's weights lie."""

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.config import load_model_config
from k3jax.nn.param import is_variable
from k3jax.nn.transformer import Transformer
from k3jax.serve.devices import lay_out_heads


def test_weights_of_heads_lie_with_their_inputs_innermost_and_give_the_same_logits():
    model = Transformer(load_model_config("k3_tiny"), jax.random.key(0))
    laid_out = lay_out_heads(model, jax.device_put)

    orders = {}
    for before, after in zip(*(jax.tree.leaves(m, is_leaf=is_variable) for m in (model, laid_out)), strict=True):
        np.testing.assert_array_equal(before.get_value(), after.get_value())
        orders[before.axes] = after.get_value().format.layout.major_to_minor
    assert orders["embed", "kda_heads", "head_dim"] == orders["kv_rank", "mla_heads", "v_dim"] == (0, 2, 3, 1)
    assert orders["mla_heads", "v_dim", "embed"] == (0, 1, 2, 3)
    assert orders["kda_heads", "head_dim", "conv"] == (0, 1, 2, 3)

    tokens = jnp.arange(20)[None]
    run = jax.jit(lambda model: model(tokens))  # compiled for each of the two
    np.testing.assert_allclose(run(laid_out), run(model), rtol=0, atol=1e-4)
