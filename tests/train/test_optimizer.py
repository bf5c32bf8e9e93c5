"""Which weight gets which update, and how large updates are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optax.contrib import MuonDimensionNumbers, muon

from k3jax.checkpoint.orbax_io import named_leaves
from k3jax.config import OptimizerConfig, load_model_config
from k3jax.nn.param import is_variable, split_model
from k3jax.nn.transformer import Transformer
from k3jax.train.optimizer import MATRICES, group_of, learning_rate, make_optimizer, matrix_spec, orthogonalize

SIZES = ["width=32", "num_layers=4", "mla_layers=[3]", "kda.head_dim=16", "moe.expert_width=24", "moe.latent_width=16"]
CONFIG = load_model_config("k3_tiny", SIZES)


@pytest.fixture(scope="module")
def params():
    shapes = split_model(jax.eval_shape(lambda: Transformer(CONFIG, jax.random.key(0))))[0]
    return jax.tree.map(lambda leaf: np.random.default_rng(0).standard_normal(leaf.shape, np.float32), shapes)


def updated(params, grads, **options):
    """(old, new) weights by name after one update at learning rate 1, without decay or clipping unless given."""
    plain = {"learning_rate": 1.0, "weight_decay": 0.0, "clip_norm": 1e9, "min_lr_ratio": 1.0}
    config = OptimizerConfig(**plain | options)
    optimizer = make_optimizer(config, params, steps=10)
    new, _, norm = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
    return named_leaves(params), named_leaves(new), norm


def random_like(params, seed=1):
    """Gradients whose size differs a hundredfold between layers of a stack."""
    random, (leaves, tree) = np.random.default_rng(seed), jax.tree.flatten(params)
    scales = [10.0 ** random.uniform(-1, 1, (leaf.shape[0], *[1] * (leaf.ndim - 1))) for leaf in leaves]
    return tree.unflatten(
        [np.float32(scale * random.standard_normal(leaf.shape)) for scale, leaf in zip(scales, leaves, strict=True)]
    )


@pytest.fixture(scope="module")
def moved(params):
    """What one update at rate 1 (0.5 for AdamW) adds to each weight."""
    old, new, _ = updated(params, random_like(params), adam_learning_rate=0.5)
    return {name: new[name] - old[name] for name in old}


def test_every_weight_of_the_model_is_in_a_table(params):
    variables = [v for v in jax.tree.leaves(params, is_leaf=is_variable) if v.get_value() is not None]
    groups = {group_of(variable.axes) for variable in variables}
    assert groups == {"muon", "adam_decayed", "adam"}


def test_unknown_axes_are_refused_by_name():
    with pytest.raises(ValueError, match=r"\('embed', 'moon'\)"):
        group_of(("embed", "moon"))


def test_stacked_dims_and_heads_are_batch():
    spec = matrix_spec(("embed", "kda_heads", "head_dim"), (7, 32, 2, 16))
    assert (spec.batch, spec.inputs, spec.outputs, spec.sizes) == ((0, 2), (1,), (3,), (32, 16))
    whole = matrix_spec(("kda_heads", "head_dim", "embed"), (2, 16, 24))
    assert (whole.batch, whole.sizes) == ((), (32, 24))


@pytest.mark.parametrize("axes", list(MATRICES))
def test_matrices_go_back_where_they_came_from(axes):
    shape = (3, *range(4, 4 + len(axes)))
    weight = np.arange(np.prod(shape)).reshape(shape)
    spec = matrix_spec(axes, shape)
    matrices = spec.to_matrices(weight)
    assert matrices.shape[1:] == tuple(sorted(spec.sizes))
    np.testing.assert_array_equal(spec.from_matrices(matrices), weight)


def test_the_first_update_is_that_of_optax():
    shapes = {"a": (2, 12, 3, 8), "b": (2, 8, 12)}
    weights = {name: jax.random.normal(jax.random.key(0), shape) for name, shape in shapes.items()}
    axes = {"a": ("embed", "kda_heads", "head_dim"), "b": ("mlp", "embed")}
    ours = orthogonalize({name: matrix_spec(axes[name], w.shape) for name, w in weights.items()}, steps=5)
    numbers = {"a": MuonDimensionNumbers((1,), (3,)), "b": MuonDimensionNumbers((1,), (2,))}
    theirs = muon(-1.0, consistent_rms=0.2, muon_weight_dimension_numbers=lambda _: numbers)
    expected, _ = theirs.update(weights, theirs.init(weights), weights)
    updates, _ = ours.update(weights, ours.init(weights))
    for name in weights:
        np.testing.assert_allclose(updates[name], expected[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "to_matrices"),
    [
        ("stacks.kda_moe.mixer.q", lambda w: w.transpose(0, 2, 1, 3)),  # a matrix a layer and head
        ("stacks.mla_moe.mixer.k_up", lambda w: w.transpose(0, 2, 1, 3)),
        ("stacks.kda_moe.mixer.out", lambda w: w.reshape(w.shape[0], -1, w.shape[-1])),  # heads together
        ("stacks.kda_moe.ffn.w1", lambda w: w),  # a matrix a layer and expert
        ("stacks.kda_moe.ffn.shared.down", lambda w: w),
    ],
)
def test_every_matrix_of_a_muon_update_is_nearly_orthogonal(moved, name, to_matrices):
    update = to_matrices(np.asarray(moved[name], np.float64))
    scale = 0.2 * max(update.shape[-2:]) ** 0.5
    singular = np.linalg.svd(update, compute_uv=False) / scale
    assert singular.min() > 0.4 and singular.max() < 1.4


def test_adam_weights_move_by_their_learning_rate_against_the_gradient(params, moved):
    for name in ("embed", "lm_head", "final_norm.weight", "stacks.kda_moe.mixer.a_log", "stacks.kda_moe.mixer.beta"):
        np.testing.assert_allclose(moved[name], -0.5 * np.sign(named_leaves(random_like(params))[name]), atol=1e-3)


def test_weight_decay_spares_vectors_taps_and_decay_parameters(params):
    zeros = jax.tree.map(jnp.zeros_like, params)
    old, new, _ = updated(params, zeros, weight_decay=0.25)
    decayed = {name for name in old if not np.array_equal(old[name], new[name])}
    assert {"embed", "lm_head", "stacks.kda_moe.mixer.beta", "stacks.kda_moe.ffn.w2"} <= decayed
    spared = ("norm", "query", "conv", "a_log", "dt_bias")
    assert not [name for name in decayed if any(part in name for part in spared)]
    np.testing.assert_allclose(new["lm_head"], 0.75 * old["lm_head"], rtol=1e-6)


def test_gradients_are_clipped_together_and_the_norm_is_reported_before(params):
    grads = random_like(params)
    total = np.sqrt(sum(float(jnp.sum(g**2)) for g in jax.tree.leaves(grads)))
    optimizer = make_optimizer(OptimizerConfig(clip_norm=1.0), params, steps=10)
    _, state, norm = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
    assert float(norm) == pytest.approx(total, rel=1e-5)
    traces = [leaf for name, leaf in named_leaves(state).items() if ".trace." in name]
    moments = [leaf / 0.1 for name, leaf in named_leaves(state).items() if ".mu." in name]  # (1 - b1) times
    clipped = np.sqrt(sum(float(jnp.sum(m**2)) for m in traces + moments))
    assert clipped == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_the_rate_rises_then_falls_to_its_floor(schedule):
    config = OptimizerConfig(warmup_fraction=0.1, min_lr_ratio=0.1, schedule=schedule)
    rate = learning_rate(config, steps=100, peak=2.0)
    values = [float(rate(step)) for step in range(101)]
    np.testing.assert_allclose(values[:10], np.arange(1, 11) * 0.2, rtol=1e-6)
    assert np.all(np.diff(values[9:]) <= 0)
    assert values[100] == pytest.approx(0.2)
    assert values[55] == pytest.approx(1.1, rel=1e-5)
