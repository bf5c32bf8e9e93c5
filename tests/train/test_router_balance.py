"""Quantile Balancing: the bias of the next step spreads this step's tokens evenly, whatever the batch is cut into."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.checkpoint.orbax_io import Checkpoints
from k3jax.config import ConfigError, DataConfig, TrainRun, load_model_config
from k3jax.data import Batch
from k3jax.nn.param import merge_model, split_model
from k3jax.nn.transformer import Transformer
from k3jax.train.optimizer import make_optimizer
from k3jax.train.router_balance import (
    BINS,
    ROUTER_METRICS,
    balance_step,
    balanced_bias,
    required_bias_histogram,
)
from k3jax.train.step import init_state, make_eval_step, make_train_step

# ---- the bias from scores ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=range(3))
def case(golden, request):
    with np.load(golden / "quantile_balancing" / "cases.npz") as cases:
        prefix = f"c{request.param}_"
        return {key.removeprefix(prefix): cases[key] for key in cases.files if key.startswith(prefix)}


def loads(scores, bias, k):
    chosen = jax.lax.top_k(jnp.asarray(scores) + bias, k)[1]
    return np.bincount(np.asarray(chosen).ravel(), minlength=scores.shape[1])


def bin_width(bias):
    return (np.ptp(bias) + 2) / BINS


def cutoffs(scores, bias, k):
    return jax.lax.top_k(scores + bias, k + 1)[0][:, k]


def skewed_scores(key, tokens, experts):
    popularity = jax.random.normal(jax.random.key(7), (experts,))
    return jax.nn.sigmoid(jax.random.normal(key, (tokens, experts)) + popularity)


def test_golden_bias_lies_between_its_order_statistics(case):
    k = int(case["k"])
    bias = balance_step(case["scores"], case["bias"], k)
    assert bias.dtype == jnp.float32
    assert abs(float(jnp.mean(bias))) < 1e-6
    # Up to the one constant that centring takes away.
    width = bin_width(case["bias"])
    least = np.max(case["lower"] - width - bias)
    most = np.min(case["upper"] + width - bias)
    assert least <= most + 1e-6
    np.testing.assert_allclose(cutoffs(case["scores"], case["bias"], k), case["alpha"], rtol=1e-6)


def test_golden_loads_become_even(case):
    k, fair = int(case["k"]), case["scores"].shape[0] * int(case["k"]) / case["scores"].shape[1]
    np.testing.assert_array_equal(loads(case["scores"], case["bias"], k), case["load_before"])
    bias = case["bias"]
    for _ in range(4):
        bias = balance_step(case["scores"], bias, k)
    assert loads(case["scores"], bias, k).max() <= 1.25 * fair < case["load_before"].max()


def test_the_example_of_the_report():
    """Figure 5: 8 tokens, 4 experts, of which each token takes one."""
    rows = "32 12 5 4, 16 31 7 8, 14 21 5 20, 32 14 7 6, 21 12 5 20, 18 31 13 4, 22 10 21 2, 16 8 21 12"
    scores = np.array([row.split() for row in rows.split(",")], np.float32) / 64
    zero = np.zeros(4, np.float32)
    assert loads(scores, zero, 1).tolist() == [4, 3, 1, 0]
    assert loads(scores, balance_step(scores, zero, 1), 1).tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("tokens", "experts", "k"),
    [(4096, 112, 8), pytest.param(16384, 896, 16, marks=pytest.mark.soak)],
)
def test_new_tokens_are_spread_by_the_fourth_step(tokens, experts, k):
    """Each step's tokens are new, and routed by the bias of the step before; the model is skewed to begin with."""
    step, bias, worst = jax.jit(balance_step, static_argnums=2), jnp.zeros(experts), []
    for key in jax.random.split(jax.random.key(0), 4):
        scores = skewed_scores(key, tokens, experts)
        worst.append(loads(scores, bias, k).max() * experts / (tokens * k))
        bias = step(scores, bias, k)
    assert worst[0] > 5
    assert worst[3] <= 1.30, worst


def test_the_histogram_quantile_is_the_exact_one_within_a_bin():
    scores, bias = skewed_scores(jax.random.key(1), 1000, 12), jax.random.normal(jax.random.key(2), (12,)) / 20
    required = np.sort(cutoffs(scores, bias, 5)[:, None] - scores, axis=0)
    rank = 1000 * 5 / 12
    exact = required[int(np.ceil(rank)) - 1]
    difference = balance_step(scores, bias, 5) - (exact - exact.mean())
    assert np.abs(difference).max() <= bin_width(bias)


def test_every_token_is_counted_in_the_bin_of_its_required_bias():
    scores, bias = skewed_scores(jax.random.key(3), 300, 6), jax.random.normal(jax.random.key(4), (6,)) / 10
    edge = cutoffs(scores, bias, 2)
    edges = np.linspace(bias.min() - 1, bias.max() + 1, BINS + 1)
    counted = np.cumsum(required_bias_histogram(scores, edge, bias), axis=1)
    required = np.asarray(edge[:, None] - scores, np.float64)
    for above, upto in ((-1e-5, np.less_equal), (1e-5, np.greater_equal)):  # rounding may move a value at an edge
        exact = np.stack([np.sum(required[:, [e]] < edges[1:] + above, axis=0) for e in range(6)])
        assert upto(exact, counted).all()
    assert (counted[:, -1] == 300).all()


@pytest.mark.parametrize("shards", [2, 8])
def test_summed_shards_are_the_whole_bit_for_bit(shards):
    scores, bias = skewed_scores(jax.random.key(5), 1024, 16), jax.random.normal(jax.random.key(6), (16,)) / 20
    edge = cutoffs(scores, bias, 3)

    def of_shard(scores, edge):
        histogram = jax.lax.psum(required_bias_histogram(scores, edge, bias), "shards")
        return balanced_bias(histogram, bias, 3)

    parts = scores.reshape(shards, -1, 16), edge.reshape(shards, -1)
    for part in jax.vmap(of_shard, axis_name="shards")(*parts):
        np.testing.assert_array_equal(part, balance_step(scores, bias, 3))


def test_invalid_tokens_are_not_counted():
    scores, bias = skewed_scores(jax.random.key(8), 300, 8), jnp.zeros(8)
    edge, valid = cutoffs(scores, bias, 2), jnp.arange(300) % 3 > 0
    polluted = jnp.where(valid[:, None], scores, jnp.nan)
    histogram = required_bias_histogram(polluted, jnp.where(valid, edge, jnp.nan), bias, valid)
    np.testing.assert_array_equal(histogram, required_bias_histogram(scores[valid], edge[valid], bias))
    assert int(histogram.sum()) == 200 * 8


def test_no_valid_token_keeps_the_bias():
    bias = jnp.array([0.5, -0.25, 0.0, 0.125])
    np.testing.assert_array_equal(balanced_bias(jnp.zeros((4, BINS), jnp.int32), bias, 2), bias)


def test_choosing_every_expert_is_refused():
    with pytest.raises(ValueError, match="k = 4: balancing needs fewer chosen experts than the 4"):
        balance_step(jnp.zeros((3, 4)), jnp.zeros(4), 4)


# ---- in the training step ------------------------------------------------------------------------------------------

SIZES = ["width=32", "dense_width=48", "num_layers=4", "mla_layers=[2]", "attn_res_block=2", "moe.num_experts=8"]
MODEL = load_model_config("k3_tiny", SIZES)
RUN = TrainRun(model=MODEL, data=DataConfig(batch_size=4, seq_len=16), loss_chunk=64)
HISTOGRAM = "f32[8,8,128] = dot_general"  # how the matrix product of a histogram reads in a traced program
FORMS = [("loop", "none"), ("scan", "layer")]


@pytest.fixture(scope="module")
def model():
    return jax.jit(lambda: Transformer(MODEL, jax.random.key(0)))()


@pytest.fixture(scope="module")
def batch():
    tokens = jax.random.randint(jax.random.key(1), (4, 17), 0, 256)
    segments = jnp.where(jnp.arange(16)[None] < jnp.array([16, 5, 11, 16])[:, None], 0, -1)
    return Batch(tokens=tokens[:, :-1], targets=tokens[:, 1:], segment_ids=segments, loss_mask=segments >= 0)


def stepper(model, form=FORMS[0], **options):
    """(first state, compiled train step, what of the model does not train) in a form of the stack."""
    model = jax.tree.map(lambda leaf: leaf, model)
    model.stack, model.remat = form
    run = dataclasses.replace(RUN, **options)
    params, _, rest = split_model(model)
    optimizer = make_optimizer(run.optimizer, params, steps=10)
    return init_state(model, optimizer), jax.jit(make_train_step(run, optimizer, rest)), rest


def biases(state):
    return np.concatenate([leaf.reshape(-1, 8) for leaf in jax.tree.leaves(state.router_bias)])


@jax.jit
def watched(model, batch):
    """(scores, load) of every MoE layer, by kind of layer, as the model hands them out."""
    return model.hidden(
        batch.tokens, segment_ids=batch.segment_ids, watch={"router": lambda view: (view.scores, view.load)}
    ).watched


@pytest.fixture(scope="module")
def loop(model):
    return stepper(model)


@pytest.fixture(scope="module")
def stepped(loop, batch):
    state, step, _ = loop
    return step(state, batch)


def test_a_step_leaves_the_bias_that_its_valid_tokens_give(model, batch, stepped):
    state, metrics = stepped
    valid, loads = np.asarray(batch.segment_ids >= 0), []
    for kind, seen in watched(model, batch).items():
        if "router" not in seen:
            continue
        scores, load = seen["router"]
        bias = state.router_bias.stacks[kind].ffn.router.bias.get_value()
        for layer, of_layer in enumerate(scores):
            expected = balance_step(of_layer[valid], jnp.zeros(8), MODEL.moe.top_k)
            np.testing.assert_allclose(bias[layer], expected, atol=bin_width(np.zeros(8)) / 10)
        loads += list(np.asarray(load))
    mean = valid.sum() * MODEL.moe.top_k / 8
    assert len(loads) == 3
    assert float(metrics["max_load"]) == pytest.approx(np.max(loads) / mean)
    assert float(metrics["dead_experts"]) == np.sum(np.array(loads) == 0)
    assert float(metrics["bias_range"]) == pytest.approx(np.ptp(biases(state), axis=1).max())
    assert float(metrics["dropped"]) == 0


@pytest.mark.parametrize(("form", "accumulate"), [(FORMS[0], 4), (FORMS[1], 2)])
def test_the_bias_is_of_the_whole_step_in_every_form(model, batch, stepped, form, accumulate):
    state, step, _ = stepper(model, form, accumulate=accumulate)
    state, metrics = step(state, batch)
    np.testing.assert_allclose(biases(state), biases(stepped[0]), atol=bin_width(np.zeros(8)) / 10)
    for key in (*ROUTER_METRICS, "max_logit"):
        assert float(metrics[key]) == pytest.approx(float(stepped[1][key]), abs=1e-4)


def test_training_on_spreads_the_tokens(loop, batch):
    state, step, _ = loop
    worst = []
    for _ in range(4):
        state, metrics = step(state, batch)
        worst.append(float(metrics["max_load"]))
    assert worst[-1] < 0.8 * worst[0], worst


def test_training_counts_and_evaluation_does_not(loop, batch):
    state, step, rest = loop
    evaluate = jax.jit(make_eval_step(RUN, rest))
    assert HISTOGRAM in str(step.trace(state, batch).jaxpr)
    assert HISTOGRAM not in str(evaluate.trace(state, batch).jaxpr)


def test_a_rematerialised_pass_does_not_count_again(model, batch):
    """The step's program routes twice for each of the two kinds of MoE layer, and has one histogram for each."""
    state, step, _ = stepper(model, ("scan", "layer"))
    program = str(step.trace(state, batch).jaxpr)
    assert program.count(" = top_k[") == 4
    assert program.count(HISTOGRAM) == 2


def test_a_checkpoint_keeps_the_bias(loop, stepped, tmp_path):
    weights = merge_model(stepped[0].params, stepped[0].router_bias, loop[2])
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, trees={"weights": weights}, records={})
    checkpoints.wait()
    found = checkpoints.restore(like={"weights": jax.eval_shape(lambda: weights)}, records=())
    checkpoints.close()
    restored = jax.tree.leaves(split_model(found.trees["weights"])[1])
    assert restored and all(np.any(bias) for bias in restored)
    for bias, saved in zip(restored, jax.tree.leaves(stepped[0].router_bias), strict=True):
        np.testing.assert_array_equal(bias, saved)


def test_a_model_whose_tokens_choose_every_expert_is_refused():
    config = dataclasses.replace(RUN, model=load_model_config("k3_tiny", ["moe.num_experts=2"]))
    with pytest.raises(ConfigError, match=r"model.moe.top_k = 2: .* num_experts must be larger"):
        make_train_step(config, None, None)
