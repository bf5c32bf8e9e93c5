"""Experts over the devices of a mesh, in every form and layout of tokens, against the same experts on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from sharding import expert_parallel, expert_rows
from sharding.expert_parallel import choose, load_of, route

EXPERTS, TOP_K, LATENT, HIDDEN, TOKENS = 16, 3, 8, 12, 192
FORMS = ("balanced", "gathered")
ROUTINGS = ("uniform", "skewed", "one-choice-for-all")


def expert_mlp(rows, weights, group_sizes, row_weights):
    """Rows past the last group give 0 and are not looked at, as in `expert_ffn`."""
    ends = jnp.cumsum(group_sizes)
    expert = jnp.sum(jnp.arange(rows.shape[0])[:, None] >= ends, axis=1)
    used, expert = expert < ends.shape[0], jnp.minimum(expert, ends.shape[0] - 1)
    rows, row_weights = jnp.where(used[:, None], rows, 0), jnp.where(used, row_weights, 0)
    hidden = jnp.tanh(jnp.einsum("ml,mlf->mf", rows, weights["in"][expert]))
    return jnp.einsum("mf,mfl->ml", hidden, weights["out"][expert]) * row_weights[:, None]


def on_one_device(latent, choice_weights, expert_weights, experts, valid):
    def slot(expert, weight):
        one = jax.tree.map(lambda leaf: leaf[expert], expert_weights)
        return weight[:, None] * jnp.einsum(
            "mf,mfl->ml", jnp.tanh(jnp.einsum("ml,mlf->mf", latent, one["in"])), one["out"]
        )

    out = sum(slot(experts[:, j], choice_weights[:, j]) for j in range(TOP_K))
    return jnp.where(valid[:, None], out, 0)


def choices(routing, rng):
    """Of every token, TOP_K different experts: evenly, a few hot ones, or the same for all."""
    if routing == "one-choice-for-all":
        return np.tile(np.int32([5, 6, 11]), (TOKENS, 1))
    hot = np.ones(EXPERTS) if routing == "uniform" else rng.dirichlet(np.full(EXPERTS, 0.1)) + 1e-9
    return np.int32([rng.choice(EXPERTS, TOP_K, replace=False, p=hot / hot.sum()) for _ in range(TOKENS)])


def arguments(routing, dtype=np.float64):
    rng = np.random.default_rng(0)
    valid = rng.uniform(size=TOKENS) > 0.2
    weights = {"in": rng.normal(size=(EXPERTS, LATENT, HIDDEN)), "out": rng.normal(size=(EXPERTS, HIDDEN, LATENT))}
    floats = rng.normal(size=(TOKENS, LATENT)), rng.uniform(size=(TOKENS, TOP_K)), weights
    cotangent = rng.normal(size=(TOKENS, LATENT))
    return *jax.tree.map(lambda x: jnp.asarray(x, dtype), floats), choices(routing, rng), valid, cotangent


def value_and_gradients(fn, latent, choice_weights, expert_weights, experts, valid, cotangent):
    def loss(latent, choice_weights, expert_weights):
        out = fn(latent, choice_weights, expert_weights, experts, valid)
        return jnp.sum(out * cotangent), out

    (_, out), gradients = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(
        latent, choice_weights, expert_weights
    )
    return out, *gradients


@jax.jit
def expected_of(*case):
    return value_and_gradients(on_one_device, *case)


def on_mesh(sizes, tokens, *, compute=expert_mlp, **options):
    """Value and gradients by `route` on a mesh, tokens and the parts of their latents split over some of its axes."""
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    rows, widths = P(tokens), P(tokens, options.get("latent_axes", ()) or None)
    found = rows if options["form"] == "gathered" else widths
    experts = P(options["axes"])
    others = tuple(axis for axis in sizes if axis not in options["axes"])
    copies = tuple(axis for axis in sizes if axis not in tokens)

    def routed(latent, choice_weights, expert_weights, experts, valid):
        return route(latent, experts, choice_weights, valid, expert_weights, compute, count=EXPERTS, **options)

    def program(*arrays):
        out, d_latent, d_weights, d_experts = value_and_gradients(routed, *arrays)
        sums = jax.lax.psum(d_experts, others) if others else d_experts
        shared = tuple(axis for axis in copies if axis not in options.get("latent_axes", ()))
        d_latent = jax.lax.psum(d_latent, shared) if shared else d_latent
        return out, d_latent, jax.lax.psum(d_weights, copies) if copies else d_weights, sums

    in_specs = widths, rows, experts, rows, rows, found
    mapped = jax.shard_map(
        program, mesh=mesh, in_specs=in_specs, out_specs=(found, widths, rows, experts), check_vma=False
    )
    return jax.jit(mapped)


def poisoned(latent, choice_weights, expert_weights, experts, valid, cotangent):
    """The latents of invalid tokens hold NaN."""
    return jnp.where(valid[:, None], latent, jnp.nan), choice_weights, expert_weights, experts, valid, cotangent


def assert_close(found, expected, tolerance=1e-9):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def by_gathers(monkeypatch):
    """Rows move as they do for many tokens."""
    monkeypatch.setattr(expert_rows, "FEW", 0)
    monkeypatch.setattr(expert_parallel, "FEW", 0)


@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients_are_those_of_one_device(form, by_gathers):
    run = on_mesh({"expert": 8}, ("expert",), axes=("expert",), form=form)
    for routing in ROUTINGS:
        case = arguments(routing)
        assert_close(run(*poisoned(*case)), expected_of(*case))


@pytest.mark.parametrize(
    ("form", "sizes", "tokens", "options"),
    [
        ("balanced", {"data": 4, "expert": 2}, ("data", "expert"), {"axes": ("expert",)}),
        ("gathered", {"data": 4, "expert": 2}, ("data", "expert"), {"axes": ("expert",)}),
        ("balanced", {"a": 2, "b": 4}, ("a", "b"), {"axes": ("a", "b")}),
        ("balanced", {"a": 2, "b": 4}, ("a",), {"axes": ("a", "b"), "token_axes": ("a",)}),
        ("balanced", {"a": 2, "b": 4}, ("a",), {"axes": ("a", "b"), "token_axes": ("a",), "latent_axes": ("b",)}),
        ("gathered", {"a": 2, "b": 4}, ("a",), {"axes": ("a", "b"), "token_axes": ("a",), "latent_axes": ("b",)}),
        ("balanced", {"a": 2, "b": 4}, (), {"axes": ("a", "b"), "token_axes": (), "latent_axes": ("a",)}),
        ("gathered", {"a": 2, "b": 4}, (), {"axes": ("a", "b"), "token_axes": (), "latent_axes": ("a",)}),
    ],
)
def test_tokens_may_lie_any_way_over_the_experts_axes(form, sizes, tokens, options):
    case = arguments("skewed")
    copies = np.prod([size for axis, size in sizes.items() if axis not in tokens])
    parts = np.prod([sizes[axis] for axis in options.get("latent_axes", ()) if form == "balanced"])
    out, *gradients = on_mesh(sizes, tokens, form=form, **options)(*poisoned(*case))
    gradients = jax.tree.map(lambda g: g * parts / copies, gradients)  # so often is a token's loss counted
    assert_close((out, *gradients), expected_of(*case))


@pytest.mark.parametrize("form", FORMS)
def test_parts_of_the_tokens_one_after_another_give_the_same_in_smaller_buffers(form):
    case, limit, buffers = arguments("skewed"), 8 * TOP_K * LATENT * 8, []

    def watched(rows, *others):
        buffers.append(rows.size * rows.dtype.itemsize)
        return expert_mlp(rows, *others)

    options = {"axes": ("expert",), "form": form, "compute": watched}
    expected = on_mesh({"expert": 8}, ("expert",), **options)(*case)
    assert min(buffers) > limit
    buffers.clear()
    assert_close(on_mesh({"expert": 8}, ("expert",), **options, buffer_bytes=limit)(*poisoned(*case)), expected)
    assert max(buffers) <= limit


def test_every_device_computes_as_many_rows_as_it_has_choices():
    seen = []

    def counted(rows, weights, group_sizes, row_weights):
        assert rows.shape[0] == TOKENS // 8 * TOP_K
        jax.debug.callback(lambda sizes: seen.append(int(sizes.sum())), group_sizes)
        return expert_mlp(rows, weights, group_sizes, row_weights)

    mesh = jax.make_mesh((8,), ("expert",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(
        lambda *a: route(*a[:3], None, a[3], counted, count=EXPERTS, axes=("expert",), form="balanced"),
        mesh=mesh,
        in_specs=P("expert"),
        out_specs=P("expert"),
        check_vma=False,
    )
    run = jax.jit(mapped)
    for routing in ROUTINGS:
        latent, weights, experts, ids, _, _ = arguments(routing)
        jax.block_until_ready(run(latent, ids, weights, experts))
        jax.effects_barrier()
    assert seen == [TOKENS // 8 * TOP_K] * 8 * len(ROUTINGS)


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_latents_lose_no_more_than_their_own_rounding(form):
    expected = expected_of(*arguments("skewed"))[0]
    out = on_mesh({"expert": 8}, ("expert",), axes=("expert",), form=form)(*arguments("skewed", jnp.bfloat16))[0]
    assert out.dtype == jnp.float32
    assert np.linalg.norm(out - expected) < 2e-2 * np.linalg.norm(expected)


def test_loads_count_valid_tokens_only():
    ids, valid = np.int32([[0, 2], [2, 3], [1, 2]]), np.array([True, False, True])
    assert load_of(ids, None, 4).tolist() == [1, 1, 3, 1]
    assert load_of(ids, valid, 4).tolist() == [1, 1, 2, 0]


def test_many_rows_are_balanced_and_few_tokens_gathered():
    k3 = {"top_k": 16, "latent": 3584, "hidden": 3072, "experts": 896}
    train, decode = choose(tokens=8192, devices=128, **k3), choose(tokens=1, devices=128, **k3)
    assert (train.form, decode.form) == ("balanced", "gathered")
    assert train.reason.startswith("balanced: 8192 tokens a device, top 16 of 896 experts over 128 devices: ")
