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
from k3jax.train import optimizer as module
from k3jax.train.optimizer import (
    MATRICES,
    clip_queries_and_keys,
    group_of,
    learning_rate,
    make_optimizer,
    matrix_spec,
    muon_directions,
    newton_schulz,
)

TOWER = [f"vision.{key}=8" for key in ("grid_rows", "grid_columns", "width", "mlp_width", "head_dim")]
TOWER += ["vision.num_blocks=2", "vision.num_heads=2", "vision.patch=4"]
SIZES = ["width=32", "num_layers=4", "mla_layers=[3]", "kda.head_dim=16", "moe.expert_width=24", "moe.latent_width=16"]
CONFIG = load_model_config("k3_tiny", SIZES + TOWER)


@pytest.fixture(scope="module")
def params():
    shapes = split_model(jax.eval_shape(lambda: Transformer(CONFIG, jax.random.key(0))))[0]
    return jax.tree.map(lambda leaf: np.random.default_rng(0).standard_normal(leaf.shape, np.float32), shapes)


def updated(params, grads, **options):
    """(old, new) weights by name after one update at learning rate 1, without decay or clipping unless given."""
    plain = {"learning_rate": 1.0, "weight_decay": 0.0, "clip_norm": 1e9, "min_lr_ratio": 1.0}
    config = OptimizerConfig(**plain | options)
    optimizer = make_optimizer(config, params, steps=10)
    done = jax.jit(optimizer.update)(grads, optimizer.init(params), params, 0)
    return named_leaves(params), named_leaves(done.params), done.metrics


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
    np.testing.assert_array_equal(spec.from_matrices(matrices, shape), weight)


def test_the_first_update_is_that_of_optax():
    shapes = {"a": (2, 12, 3, 8), "b": (2, 8, 12)}
    weights = {name: jax.random.normal(jax.random.key(0), shape) for name, shape in shapes.items()}
    axes = {"a": ("embed", "kda_heads", "head_dim"), "b": ("mlp", "embed")}
    specs = {name: matrix_spec(axes[name], w.shape) for name, w in weights.items()}
    numbers = {"a": MuonDimensionNumbers((1,), (3,)), "b": MuonDimensionNumbers((1,), (2,))}
    theirs = muon(-1.0, consistent_rms=0.2, muon_weight_dimension_numbers=lambda _: numbers)
    expected, _ = theirs.update(weights, theirs.init(weights), weights)
    # Nesterov's momentum of a first gradient is a multiple of it, which normalising takes away.
    updates = muon_directions(weights, specs, steps=5, dtype="float32")
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
        ("vision.tower.blocks.qkv", lambda w: w.transpose(0, 2, 3, 1, 4)),  # of each of q, k, v, a matrix a head
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
    assert {"embed", "lm_head", "stacks.kda_moe.mixer.beta", "stacks.kda_moe.ffn.w2", "vision.tower.grid"} <= decayed
    spared = ("norm", "query", "conv", "a_log", "dt_bias")
    assert not [name for name in decayed if any(part in name for part in spared)]
    np.testing.assert_allclose(new["lm_head"], 0.75 * old["lm_head"], rtol=1e-6)


def test_gradients_are_clipped_together_and_the_norm_is_reported_before(params):
    grads = random_like(params)
    total = np.sqrt(sum(float(jnp.sum(g**2)) for g in jax.tree.leaves(grads)))
    optimizer = make_optimizer(OptimizerConfig(clip_norm=1.0), params, steps=10)
    done = jax.jit(optimizer.update)(grads, optimizer.init(params), params, 0)
    assert float(done.metrics["grad_norm"]) == pytest.approx(total, rel=1e-5)
    momenta = list(done.opt_state["momentum"].values())
    moments = [leaf / 0.1 for leaf in done.opt_state["adam"].mu.values()]  # (1 - b1) times
    clipped = np.sqrt(sum(float(jnp.sum(m**2)) for m in momenta + moments))
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


def test_wsd_is_constant_until_its_decay():
    config = OptimizerConfig(warmup_fraction=0.1, min_lr_ratio=0.1, schedule="wsd", decay_fraction=0.2)
    rate = learning_rate(config, steps=100, peak=2.0)
    values = [float(rate(step)) for step in range(101)]
    np.testing.assert_allclose(values[:10], np.arange(1, 11) * 0.2, rtol=1e-6)
    np.testing.assert_allclose(values[10:81], 2.0, rtol=1e-6)
    np.testing.assert_allclose(values[80:], np.linspace(2.0, 0.2, 21), rtol=1e-5)


# ---- heads and experts ---------------------------------------------------------------------------------------------

HEADS = ("embed", "kda_heads", "head_dim")


def head_sizes(table):
    """Root mean square of each head's update where one head's gradients are 10 times the others', and one's a tenth."""
    scale = jnp.array([10, 1, 1, 1, 1, 1, 1, 0.1])[None, :, None]
    momentum = {"q": scale * jax.random.normal(jax.random.key(0), (768, 8, 64))}
    spec = {"q": matrix_spec(HEADS, (768, 8, 64), table)}
    return np.sqrt(np.mean(np.square(muon_directions(momentum, spec, steps=5, dtype="float32")["q"]), axis=(0, 2)))


def test_weak_heads_move_as_far_as_strong_ones():
    """And on whole matrices they do not: the report's reason for Per-Head Muon."""
    per_head = head_sizes(MATRICES)
    assert np.ptp(per_head) / per_head.mean() < 0.02
    whole = head_sizes({HEADS: (("embed",), ("kda_heads", "head_dim"))})
    assert whole.max() / whole.min() > 2


def test_the_sizes_of_head_updates_are_reported(params):
    _, _, metrics = updated(params, random_like(params))
    least, most = (float(metrics[f"head_update_rms/{end}"]) for end in ("min", "max"))
    assert 0.1 < least <= most < 0.25
    for group in ("muon", "adam", "adam_decayed"):
        assert float(metrics[f"update_norm/{group}"]) > 0 and float(metrics[f"grad_norm/{group}"]) > 0


def test_every_expert_is_orthogonalised_alone():
    """marin#3902, spd#978: Muon that flattens or replicates the stack of experts (bug log 82)."""
    stack = jax.random.normal(jax.random.key(0), (2, 5, 24, 16)) * 10.0 ** jnp.arange(-2, 3)[None, :, None, None]
    axes = ("experts", "expert_latent", "expert_mlp")
    together = muon_directions({"w": stack}, {"w": matrix_spec(axes, stack.shape)}, steps=5, dtype="float32")["w"]
    singular = np.linalg.svd(np.asarray(together), compute_uv=False) / (0.2 * 24**0.5)
    assert singular.shape == (2, 5, 16) and singular.min() > 0.4 and singular.max() < 1.4
    alone = muon_directions(
        {"w": stack[1, 3]},
        {"w": matrix_spec(axes[1:], (24, 16), {axes[1:]: (axes[1:2], axes[2:])})},
        steps=5,
        dtype="float32",
    )["w"]
    np.testing.assert_allclose(together[1, 3], alone, atol=2e-4)


def test_bfloat16_iterations_give_the_same_sizes():
    """And directions within a few degrees; float32 and bfloat16 agree on what no rounding decides."""
    matrices = jax.random.normal(jax.random.key(0), (6, 48, 96)) * jnp.logspace(-9, 3, 6)[:, None, None]
    wide, narrow = (
        newton_schulz(matrices, steps=5, dtype=dtype).astype(jnp.float32) for dtype in ("float32", "bfloat16")
    )
    size = lambda x: jnp.sqrt(jnp.mean(x**2, axis=(1, 2)))  # noqa: E731
    np.testing.assert_allclose(size(narrow), size(wide), rtol=0.05)
    cosine = jnp.sum(wide * narrow, axis=(1, 2)) / (
        jnp.linalg.norm(wide, axis=(1, 2)) * jnp.linalg.norm(narrow, axis=(1, 2))
    )
    assert cosine.min() > 0.995


def test_large_weights_in_pieces_give_the_same(monkeypatch):
    weights = {name: jax.random.normal(jax.random.key(n), (6, 16, 4, 8)) for n, name in enumerate("ab")}
    specs = {name: matrix_spec(HEADS, (6, 16, 4, 8)) for name in weights}
    expected = muon_directions(weights, specs, steps=5, dtype="float32")
    monkeypatch.setattr(module, "TOGETHER", 100)
    monkeypatch.setattr(module, "AT_A_TIME", 16 * 8 * 5)  # five matrices, and 24 are divided into pieces of four
    for name, direction in muon_directions(weights, specs, steps=5, dtype="float32").items():
        np.testing.assert_allclose(direction, expected[name], atol=1e-5)


# ---- QK-Clip ---------------------------------------------------------------------------------------------------------


def test_a_head_over_the_limit_scores_the_limit_afterwards():
    model = jax.jit(lambda: Transformer(CONFIG, jax.random.key(0), stack="loop", remat="none"))()
    tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, 256)

    @jax.jit
    def scores(model):
        watched = model.hidden(tokens, watch={"max_logit": lambda logits: jnp.max(logits, axis=0)}).watched
        return {kind: seen["max_logit"] for kind, seen in watched.items()}

    found = scores(model)
    assert set(found) == {"mla_moe"} and found["mla_moe"].shape == (1, CONFIG.mla.num_heads)
    limit = float(jnp.mean(found["mla_moe"]))  # one head is above and one below
    after = scores(clip_queries_and_keys(model, found, limit))["mla_moe"]
    np.testing.assert_allclose(after, np.minimum(found["mla_moe"], limit), rtol=1e-5)


def test_a_head_that_scored_nothing_stays(params):
    nothing = {"mla_moe": jnp.full((1, CONFIG.mla.num_heads), -jnp.inf)}
    same = named_leaves(clip_queries_and_keys(params, nothing, 1.0))
    for name, leaf in named_leaves(params).items():
        np.testing.assert_array_equal(same[name], leaf)
