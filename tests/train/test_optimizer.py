"""Which weight gets which update, and how large updates are."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
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
    head_rms,
    learning_rate,
    make_optimizer,
    matrix_spec,
    muon_directions,
    newton_schulz,
)
from sharding.local import Placement, placed
from sharding.rules import TRAIN

TOWER = [f"vision.{key}=8" for key in ("grid_rows", "grid_columns", "width", "mlp_width", "head_dim")]
TOWER += ["vision.num_blocks=2", "vision.num_heads=2", "vision.patch=4"]
SIZES = ["width=32", "num_layers=4", "mla_layers=[3]", "kda.head_dim=16", "moe.expert_width=24", "moe.latent_width=16"]
CONFIG = load_model_config("k3_tiny", SIZES + TOWER)


@pytest.fixture(scope="module")
def params():
    shapes = split_model(jax.eval_shape(lambda: Transformer(CONFIG, jax.random.key(0))))[0]
    return jax.tree.map(lambda leaf: np.random.default_rng(0).standard_normal(leaf.shape, np.float32), shapes)


@pytest.fixture(scope="module")
def update(params):
    """`update(grads, params)`: one update at rate 1 (0.5 for AdamW) from a new state, compiled once."""
    config = OptimizerConfig(
        learning_rate=1.0, adam_learning_rate=0.5, min_lr_ratio=1.0, weight_decay=0.25, clip_norm=1
    )
    optimizer = make_optimizer(config, params, steps=10)
    compiled = jax.jit(optimizer.update)
    return lambda grads, params: compiled(grads, optimizer.init(params), params, 0)


def random_like(params, seed=1):
    """Gradients whose size differs a hundredfold between layers of a stack."""
    random, (leaves, tree) = np.random.default_rng(seed), jax.tree.flatten(params)
    scales = [10.0 ** random.uniform(-1, 1, (leaf.shape[0], *[1] * (leaf.ndim - 1))) for leaf in leaves]
    return tree.unflatten(
        [np.float32(scale * random.standard_normal(leaf.shape)) for scale, leaf in zip(scales, leaves, strict=True)]
    )


@pytest.fixture(scope="module")
def done(params, update):
    """The update by random gradients of weights that are zero, which have nothing to decay."""
    return update(random_like(params), jax.tree.map(np.zeros_like, params))


@pytest.fixture(scope="module")
def moved(done):
    """What it adds to each weight."""
    return named_leaves(done.params)


def axes_by_name(params):
    variables = [v for v in jax.tree.leaves(params, is_leaf=is_variable) if v.get_value() is not None]
    return {name: variable.axes for name, variable in zip(named_leaves(params), variables, strict=True)}


def test_every_weight_of_the_model_is_in_a_table(params):
    groups = {group_of(axes) for axes in axes_by_name(params).values()}
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


def test_adam_weights_move_by_their_learning_rate_against_the_gradient(params, moved, done):
    grads, norm = named_leaves(random_like(params)), done.metrics["grad_norm"]
    for name in ("embed", "lm_head", "final_norm.weight", "stacks.kda_moe.mixer.a_log", "stacks.kda_moe.mixer.beta"):
        clipped = grads[name] / norm
        np.testing.assert_allclose(moved[name], -0.5 * clipped / (np.abs(clipped) + 1e-8), atol=1e-3)


def test_weight_decay_spares_vectors_taps_and_decay_parameters(params, update):
    old = named_leaves(params)
    new = named_leaves(update(jax.tree.map(np.zeros_like, params), params).params)
    decayed = {name for name in old if not np.array_equal(old[name], new[name])}
    assert {"embed", "lm_head", "stacks.kda_moe.mixer.beta", "stacks.kda_moe.ffn.w2", "vision.tower.grid"} <= decayed
    spared = ("norm", "query", "conv", "a_log", "dt_bias")
    assert not [name for name in decayed if any(part in name for part in spared)]
    np.testing.assert_allclose(new["lm_head"], (1 - 0.5 * 0.25) * old["lm_head"], rtol=1e-6)
    np.testing.assert_allclose(new["stacks.kda_moe.ffn.w2"], 0.75 * old["stacks.kda_moe.ffn.w2"], rtol=1e-6)


def test_gradients_are_clipped_together_and_the_norm_is_reported_before(params, done):
    total = np.sqrt(sum(float(jnp.sum(g**2)) for g in jax.tree.leaves(random_like(params))))
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


def test_the_size_of_every_head_s_update_is_reported(params, moved, done):
    axes, metrics = axes_by_name(params), done.metrics
    specs = {name: matrix_spec(axes[name], moved[name].shape) for name in moved if group_of(axes[name]) == "muon"}
    sizes = {
        name: np.sqrt(np.mean(np.square(moved[name]), axis=spec.inputs + spec.outputs))
        for name, spec in specs.items()
        if spec.per_head
    }
    assert sizes["stacks.kda_moe.mixer.q"].shape == (2, 2)  # layers and heads
    for name, expected in sizes.items():
        np.testing.assert_allclose(metrics[f"head_update_rms/{name}"], expected, rtol=1e-3)
    every = np.concatenate([np.ravel(size) for size in sizes.values()])
    ends = [float(metrics[f"head_update_rms/{end}"]) for end in ("min", "max")]
    assert 0.1 < ends[0] <= ends[1] < 0.25
    np.testing.assert_allclose(ends, (every.min(), every.max()), rtol=1e-3)
    for group in ("muon", "adam", "adam_decayed"):
        assert float(metrics[f"update_norm/{group}"]) > 0 and float(metrics[f"grad_norm/{group}"]) > 0


# ---- on a pod --------------------------------------------------------------------------------------------------------


def collectives(jaxpr):
    """(name, bytes of one device's results) of every collective in a program, loops or not."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in ("all_to_all", "all_gather", "psum", "pmax", "reduce_scatter", "ppermute", "psum_invariant"):
            yield name, sum(math.prod(out.aval.shape) * out.aval.dtype.itemsize for out in equation.outvars)
        for value in equation.params.values():
            for inner in jax.tree.leaves(value, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from collectives(inner)


@pytest.fixture(scope="module")
def k3():
    """(optimizer, mesh sizes, weights) of the full K3 on 1,024 devices."""
    config = load_model_config("k3")
    params = split_model(jax.eval_shape(lambda: Transformer(config, jax.random.key(0), param_dtype="float32")))[0]
    return make_optimizer(OptimizerConfig(), params, steps=10, dtype=config.dtype), {"fsdp": 8, "expert": 128}, params


KDA_HEAD, MLA_HEAD = (68 * 96, 7168, 128), (24 * 96, 7168, 128)
K3 = {  # weight -> how many matrices, of how many inputs and outputs; by the shapes of the release
    "kda_moe.mixer": {
        **dict.fromkeys(("q", "k", "v", "out_gate"), KDA_HEAD),
        "decay_down": (68, 7168, 128),
        "decay_up": (68 * 96, 128, 128),
        "out": (68, 96 * 128, 7168),
    },
    "mla_moe.mixer": {
        "q_down": (24, 7168, 1536),
        "q_up": (24 * 96, 1536, 128 + 64),
        "kv_down": (24, 7168, 512 + 64),
        **dict.fromkeys(("k_up", "v_up"), (24 * 96, 512, 128)),
        "out_gate": MLA_HEAD,
        "out": (24, 96 * 128, 7168),
    },
    "mla_moe.ffn": {
        "router.weight": (24, 7168, 896),
        "down": (24, 7168, 3584),
        **dict.fromkeys(("w1", "w3"), (24 * 896, 3584, 3072)),
        "w2": (24 * 896, 3072, 3584),
        "up": (24, 3584, 7168),
        **dict.fromkeys(("shared.gate", "shared.up"), (24, 7168, 6144)),
        "shared.down": (24, 6144, 7168),
    },
    "kda_dense.ffn": {**dict.fromkeys(("gate", "up"), (1, 7168, 33792)), "down": (1, 33792, 7168)},
}


@pytest.mark.parametrize("part", list(K3))
def test_the_matrices_of_k3(k3, part):
    optimizer, prefix = k3[0], f"stacks.{part}."
    of_part = {name.removeprefix(prefix): spec for name, spec in optimizer.specs.items() if name.startswith(prefix)}
    count = lambda spec: math.prod(spec.shape[d] for d in spec.batch)  # noqa: E731
    assert {name: (count(spec), *spec.sizes) for name, spec in of_part.items()} == K3[part]


def test_what_adamw_has_of_k3(k3):
    groups = {name: group for name, group in k3[0].groups.items() if not name.startswith("vision.")}
    assert {"embed", "lm_head", "stacks.kda_moe.mixer.beta"} <= {n for n, g in groups.items() if g == "adam_decayed"}
    last = {name.rpartition(".")[2] for name, group in groups.items() if group == "adam"}
    assert last == {"query", "norm", "weight", "q_conv", "k_conv", "v_conv", "a_log", "dt_bias", "out_norm"}


@pytest.fixture(scope="module")
def collectives_of_k3(k3):
    """(placement, collectives) of the part of an update that the devices trade weights for."""
    optimizer, sizes, params = k3
    named = named_leaves(params)
    placement = Placement.of(sizes, TRAIN, [(optimizer.axes[name], leaf.shape) for name, leaf in named.items()])
    specs = {name: placement.spec(spec.axes, len(spec.shape)) for name, spec in optimizer.specs.items()}
    axis_types = (jax.sharding.AxisType.Auto,) * len(placement.sizes)
    mesh = jax.sharding.AbstractMesh(tuple(placement.sizes.values()), tuple(placement.sizes), axis_types=axis_types)
    momenta = {name: jax.ShapeDtypeStruct(spec.shape, np.float32) for name, spec in optimizer.specs.items()}

    def directions(momenta):
        with placed(placement):
            found = muon_directions(momenta, optimizer.specs, steps=5, dtype=optimizer.dtype)
            return found, head_rms(found, optimizer.specs)

    out_specs = (specs, PartitionSpec())
    mapped = jax.shard_map(directions, mesh=mesh, in_specs=(specs,), out_specs=out_specs, check_vma=False)
    return placement, list(collectives(jax.make_jaxpr(mapped)(momenta).jaxpr))


def test_two_all_to_alls_carry_a_weight_of_k3_on_a_pod(k3, collectives_of_k3):
    """One to whole matrices and one back, of momenta in the dtype of the iterations; nothing large is gathered."""
    optimizer, (placement, found) = k3[0], collectives_of_k3
    sent = [size for name, size in found if name == "all_to_all"]
    assert 0 < len(sent) < 1.2 * len(optimizer.specs)  # small weights of one shape travel together
    assert max(size for name, size in found if name != "all_to_all") < 2**17
    parts = {axes: placement.count(placement.parts(axes)) for axes in optimizer.axes.values()}
    own = sum(2 * math.prod(spec.shape) / parts[spec.axes] for spec in optimizer.specs.values())
    # 14.1 GB a device: each part once there and once back, and zeros beside matrices of fewer layers than devices.
    assert 2 * own <= sum(sent) < 1.35 * 2 * own


# ---- experts ---------------------------------------------------------------------------------------------------------


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
    config = load_model_config("k3_tiny", [*SIZES, "num_layers=2", "mla_layers=[1]"])
    model = jax.jit(lambda: Transformer(config, jax.random.key(0), stack="loop", remat="none"))()
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
