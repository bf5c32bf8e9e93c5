"""One step: accumulation and packing leave the gradient's meaning alone, and every part of the recipe does its part."""

import dataclasses
import hashlib
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.checkpoint.orbax_io import named_leaves
from k3jax.config import DataConfig, OptimizerConfig, TrainRun, load_model_config
from k3jax.data import Batch
from k3jax.nn.param import split_model
from k3jax.nn.transformer import Transformer
from k3jax.train.optimizer import clip_queries_and_keys, make_optimizer
from k3jax.train.router_balance import rebalance
from k3jax.train.step import accumulated_gradient, init_state, make_eval_step, make_train_step, make_warm_up

SIZES = ["width=32", "dense_width=48", "num_layers=3", "mla_layers=[2]", "attn_res_block=2", "moe.num_experts=4"]
MODEL = load_model_config("k3_tiny", SIZES)
CLIPPING = OptimizerConfig(qk_clip=1.0)
RUN = TrainRun(
    model=MODEL,
    data=DataConfig(batch_size=4, seq_len=16),
    optimizer=CLIPPING,
    loss_chunk=32,
    stack="loop",
    remat="none",
)


@pytest.fixture(scope="module")
def model():
    return jax.jit(lambda: Transformer(MODEL, jax.random.key(0), stack="loop", remat="none"))()


@pytest.fixture(scope="module")
def batch():
    tokens = jax.random.randint(jax.random.key(1), (4, 17), 0, 256)
    mask = jnp.arange(16)[None] < jnp.array([16, 3, 9, 1])[:, None]  # micro-batches with unequal numbers of tokens
    segments = jnp.where(mask, 0, -1)
    return Batch(tokens=tokens[:, :-1], targets=tokens[:, 1:], segment_ids=segments, loss_mask=mask)


def one_step(model, batch, **options):
    run = dataclasses.replace(RUN, **options)
    params, _, rest = split_model(model)
    optimizer = make_optimizer(run.optimizer, params, steps=10)
    state, metrics = jax.jit(make_train_step(run, optimizer, rest))(init_state(model, optimizer), batch)
    return state, metrics


@pytest.fixture(scope="module")
def compiled(model):
    """The step of RUN, to be run more than once."""
    params, _, rest = split_model(model)
    return jax.jit(make_train_step(RUN, make_optimizer(RUN.optimizer, params, steps=10), rest))


@pytest.fixture(scope="module")
def first(model):
    return init_state(model, make_optimizer(RUN.optimizer, split_model(model)[0], steps=10))


@pytest.fixture(scope="module")
def stepped(compiled, first, batch):
    return compiled(first, batch)


def test_accumulated_micro_batches_equal_one_batch(model, batch, stepped):
    whole, one = stepped
    parts, four = one_step(model, batch, accumulate=4)
    assert float(one["tokens"]) == float(four["tokens"]) == 29
    for key in ("loss", "grad_norm"):
        assert float(four[key]) == pytest.approx(float(one[key]), rel=1e-4)
    moved = {name: leaf - named_leaves(model)[name] for name, leaf in named_leaves(whole.params).items()}
    for name, leaf in named_leaves(parts.params).items():
        # Newton-Schulz amplifies rounding, so compare with the size of the update.
        difference = np.linalg.norm(leaf - named_leaves(whole.params)[name])
        assert difference <= 0.02 * np.linalg.norm(moved[name]) + 1e-6, name


def test_a_step_counts_and_reports_its_rate(stepped):
    state, metrics = stepped
    assert int(state.step) == 1
    assert float(metrics["lr"]) == pytest.approx(RUN.optimizer.learning_rate)


def test_evaluation_is_the_same_loss_and_changes_nothing(model, batch, stepped):
    params, _, rest = split_model(model)
    state = init_state(model, make_optimizer(RUN.optimizer, params, steps=10))
    nats, tokens = jax.jit(make_eval_step(RUN, rest))(state, batch)
    assert float(nats / tokens) == pytest.approx(float(stepped[1]["loss"]), rel=1e-5)


def test_two_runs_of_a_step_are_equal_bit_for_bit(compiled, first, batch, stepped):
    """torchtitan#4731: nothing in a step may depend on chance (bug log 81)."""
    again, _ = compiled(first, batch)
    for name, leaf in named_leaves(again.params).items():
        np.testing.assert_array_equal(leaf, named_leaves(stepped[0].params)[name], err_msg=name)


def test_qk_clip_follows_the_largest_score_of_the_step(model, stepped):
    """And of all micro-batches: `test_accumulated_micro_batches_equal_one_batch` clips too."""
    largest, limit = float(stepped[1]["max_logit"]), RUN.optimizer.qk_clip
    assert largest > 1.3 * limit
    norms = [
        np.sqrt(np.sum(np.square(named_leaves(params)["stacks.mla_moe.mixer.k_up"]), axis=(0, 1, 3)))
        for params in (model, stepped[0].params)
    ]
    assert np.min(norms[1] / norms[0]) == pytest.approx((limit / largest) ** 0.5, rel=0.03)  # beside Muon's update


# ---- the recipe ------------------------------------------------------------------------------------------------------


def gradient(model, **options):
    """A compiled function of a batch: what was seen, and the gradients by name."""
    run = dataclasses.replace(RUN, **options)
    params, _, rest = split_model(model)
    state = init_state(model, make_optimizer(run.optimizer, params, steps=10))
    compiled = jax.jit(lambda state, batch: accumulated_gradient(state, batch, run, rest))

    def of(batch):
        seen, grads = compiled(state, batch)
        return seen, named_leaves(grads)

    return of


@pytest.fixture(scope="module")
def plain(model, batch):
    return gradient(model)(batch)


def test_a_model_starts_as_k3_does(model):
    leaves = named_leaves(model)
    for name, leaf in leaves.items():
        if name.endswith(("query", "a_log", "router.bias")):  # reads of depth start as plain averages
            assert not np.any(leaf), name
        if name.endswith(("norm.weight", "mix.norm")):
            assert np.all(np.asarray(leaf) == 1), name
    bias = np.concatenate([np.ravel(leaf) for name, leaf in leaves.items() if name.endswith("dt_bias")])
    step = np.log1p(np.exp(bias))  # softplus
    assert step.min() * 1.001 >= 1e-3 and step.max() <= 0.1001
    assert abs(np.mean(np.log(step)) - np.log(1e-2)) < 0.3  # log-uniform


def test_the_z_loss_weighs_the_normaliser_and_is_not_reported(model, batch, plain):
    seen, grads = gradient(model, z_loss=0.1)(batch)
    assert float(seen.sums["nats"]) == pytest.approx(float(plain[0].sums["nats"]), rel=1e-6)

    @jax.jit
    def of_head(model):
        hidden = model.hidden(batch.tokens, segment_ids=batch.segment_ids).hidden

        def squares(head):
            normaliser = jax.nn.logsumexp(hidden @ head, axis=-1)
            return 0.1 * jnp.sum(jnp.where(batch.loss_mask, normaliser**2, 0))

        return jax.grad(squares)(model.lm_head.get_value())

    np.testing.assert_allclose(grads["lm_head"] - plain[1]["lm_head"], of_head(model), rtol=1e-3, atol=1e-5)


def with_remat(model, remat):
    changed = jax.tree.map(lambda leaf: leaf, model)
    changed.remat = remat
    return changed


def test_recomputing_one_kind_of_layer_changes_no_gradient(model, batch, plain):
    _, grads = gradient(with_remat(model, "kda_moe"))(batch)
    for name, leaf in plain[1].items():
        np.testing.assert_allclose(grads[name], leaf, rtol=1e-3, atol=1e-4 * np.abs(leaf).max(), err_msg=name)


def test_only_the_named_kinds_are_recomputed(model, batch):
    def checkpoints(remat):
        run = lambda model: model.hidden(batch.tokens, segment_ids=batch.segment_ids).hidden  # noqa: E731
        program = str(jax.make_jaxpr(run)(with_remat(model, remat)))
        return program.count(" = remat2[") + program.count(" = checkpoint[")  # by the version of jax

    none, kda, both = (checkpoints(remat) for remat in ("none", "kda_moe", "kda_moe,mla_moe"))
    assert (kda - none, both - none) == (1, 2)


def test_gradients_add_up_in_float32(batch):
    """However narrow the computation: a small micro-batch is not lost beside a large one."""
    run = dataclasses.replace(RUN, model=dataclasses.replace(MODEL, dtype="bfloat16"), accumulate=4)
    narrow = jax.eval_shape(lambda: Transformer(run.model, jax.random.key(0), stack="loop", remat="none"))
    params, _, rest = split_model(narrow)
    optimizer = make_optimizer(run.optimizer, params, steps=10)
    state = jax.eval_shape(lambda model: init_state(model, optimizer), narrow)
    shapes = jax.eval_shape(lambda state: accumulated_gradient(state, batch, run, rest)[1], state)
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype("float32")}


def test_warm_up_passes_balance_the_routers_and_nothing_else(compiled, first, model, batch, stepped):
    run = dataclasses.replace(RUN, router_warmup=3, accumulate=2)
    warm = jax.jit(make_warm_up(run, split_model(model)[2]))(first, batch)
    for name, leaf in named_leaves(warm.params).items():
        np.testing.assert_array_equal(leaf, named_leaves(first.params)[name])
    assert int(warm.step) == 0 and np.any(jax.tree.leaves(warm.router_bias)[0])
    _, metrics = compiled(warm, batch)
    assert float(metrics["max_load"]) < float(stepped[1]["max_load"])


# ---- multi-token prediction ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_mtp():
    return jax.jit(lambda: Transformer(MODEL, jax.random.key(0), stack="loop", remat="none", with_mtp=True))()


@pytest.fixture(scope="module")
def mtp_gradient(with_mtp):
    return gradient(with_mtp, mtp_weight=0.3)


def test_the_mtp_layer_predicts_the_token_after_the_next(with_mtp, mtp_gradient, batch, plain):
    seen, grads = mtp_gradient(batch)
    assert float(seen.sums["nats"]) == pytest.approx(float(plain[0].sums["nats"]), rel=1e-5)
    assert float(seen.sums["mtp_tokens"]) == sum(n - 1 for n in (16, 3, 9, 1))

    @jax.jit
    def of_the_next_but_one(model):
        hidden = model.hidden(batch.tokens, segment_ids=batch.segment_ids).hidden
        out, _ = model.next_but_one(hidden, batch.targets, segment_ids=batch.segment_ids)
        nats = -jax.nn.log_softmax(model.logits(out))[:, :-1]
        picked = jnp.take_along_axis(nats, batch.targets[:, 1:, None], axis=-1)[..., 0]
        return jnp.sum(jnp.where(batch.loss_mask[:, 1:], picked, 0))

    assert float(seen.sums["mtp_nats"]) == pytest.approx(float(of_the_next_but_one(with_mtp)), rel=1e-4)
    reached = [name for name, leaf in grads.items() if np.any(leaf)]
    assert {"mtp.join", "mtp.layer.mixer.q_up", "mtp.layer.ffn.w1"} <= set(reached)
    assert not np.allclose(grads["embed"], plain[1]["embed"])  # the model learns from it too


def test_the_mtp_layer_is_balanced_and_clipped_like_others(with_mtp, mtp_gradient, batch):
    seen, _ = mtp_gradient(batch)
    params, bias, _ = split_model(with_mtp)
    assert np.any(rebalance(bias, seen.counts, MODEL.moe.top_k).mtp.layer.ffn.router.bias.get_value())
    clipped = clip_queries_and_keys(params, seen.max_logits, 0.1)
    assert not np.array_equal(clipped.mtp.layer.mixer.k_up.get_value(), params.mtp.layer.mixer.k_up.get_value())


def test_the_mtp_layer_predicts_nothing_across_documents(mtp_gradient, batch):
    two = jnp.where(batch.loss_mask, jnp.arange(16) >= 2, -1).astype(batch.segment_ids.dtype)
    seen, _ = mtp_gradient(dataclasses.replace(batch, segment_ids=two))
    assert float(seen.sums["mtp_tokens"]) == (16 - 2) + (3 - 2) + (9 - 2) + 0


def test_a_released_model_is_one_without_the_layer(with_mtp, model):
    released, mtp = with_mtp.split_mtp()
    assert jax.tree.structure(released) == jax.tree.structure(model)
    for one, other in zip(jax.tree.leaves(released), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(one, other)
    assert jax.tree.structure(released.with_mtp(mtp)) == jax.tree.structure(with_mtp)


def test_every_process_compiles_the_same_program(root):
    """Hosts of one run must agree, and a resumed run must repeat: nothing may follow the hash seed of a process."""
    programs = {
        subprocess.run(
            [sys.executable, __file__],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(programs) == 1 and programs != {""}


def program_hash() -> str:
    """A hash of the lowered training step."""
    skeleton = jax.eval_shape(lambda: Transformer(MODEL, jax.random.key(0), stack="loop", remat="none"))
    params, _, rest = split_model(skeleton)
    optimizer = make_optimizer(RUN.optimizer, params, steps=10)
    state = jax.eval_shape(lambda model: init_state(model, optimizer), skeleton)
    lowered = jax.jit(make_train_step(RUN, optimizer, rest)).lower(state, Batch.shapes(4, 16))
    return hashlib.sha256(lowered.as_text().encode()).hexdigest()


if __name__ == "__main__":
    print(program_hash())
