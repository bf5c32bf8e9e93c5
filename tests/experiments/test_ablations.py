"""The arms of the ablation study change what they say, and nothing else."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import ablations
from experiments.ablations import ARMS, SIBLING, PlainTransformer, _whole, no_balancing, sign_rule
from k3jax.config import ConfigError, TrainRun, load_model_config, load_run
from k3jax.nn.param import is_variable, split_model
from k3jax.nn.transformer import Transformer
from k3jax.train.optimizer import MATRICES, make_optimizer, matrix_spec
from k3jax.train.router_balance import BINS, RouterCounts

SIZES = ["width=32", "dense_width=48", "num_layers=3", "mla_layers=[2]", "attn_res_block=3", "moe.num_experts=4"]
MODEL = load_model_config("k3_tiny", SIZES)


@pytest.fixture(scope="module")
def model():
    return jax.jit(lambda: PlainTransformer(MODEL, jax.random.key(0), stack="loop", remat="none"))()


def shapes(run):
    return jax.eval_shape(lambda: Transformer(run.model, jax.random.key(0)))


def test_the_sibling_has_about_60_million_parameters():
    params = split_model(shapes(load_run(TrainRun, SIBLING)))[0]
    assert 55e6 < sum(leaf.size for leaf in jax.tree.leaves(params)) < 65e6


@pytest.mark.parametrize("name", list(ARMS))
def test_every_arm_is_a_valid_run_with_an_optimizer(name):
    run = load_run(TrainRun, SIBLING, ARMS[name].overrides)
    params = split_model(shapes(run))[0]
    optimizer = make_optimizer(run.optimizer, params, steps=10, table=ARMS[name].table)
    heads = [spec for spec in optimizer.specs.values() if spec.per_head]
    assert bool(heads) == (name not in ("whole_muon", "adamw"))
    assert bool(optimizer.specs) == (name != "adamw")


def test_whole_matrices_are_the_same_weights_in_larger_blocks():
    axes, shape = ("q_rank", "mla_heads", "qk_dim"), (2, 8, 3, 5)
    spec = matrix_spec(axes, shape, _whole(MATRICES))
    assert (spec.batch, spec.sizes) == ((0,), (8, 15))
    weight = np.arange(np.prod(shape)).reshape(shape)
    np.testing.assert_array_equal(spec.from_matrices(spec.to_matrices(weight), shape), weight)


def test_a_plain_layer_reads_the_residual_stream(model):
    """The queries mean nothing, and what a layer reads is the sum of embedding and all layers before it."""
    tokens = jax.random.randint(jax.random.key(1), (1, 9), 0, 256)
    random = lambda v: v.replace(jax.random.normal(jax.random.key(2), v.shape)) if v.shape[-1] == 32 else v  # noqa: E731
    changed = jax.tree.map(lambda leaf: leaf, model)
    for stack in changed.stacks.values():
        stack.ffn_mix.query, stack.mixer_mix.query = random(stack.ffn_mix.query), random(stack.mixer_mix.query)

    @jax.jit
    def run(model):
        out = model.hidden(tokens, collect=True)
        return out.hidden, out.trace.sums[-1]

    out, last = run(model)
    np.testing.assert_array_equal(run(changed)[0], out)
    embedding = model.embed.get_value()[tokens]
    expected = model.final_norm((embedding + last) / 2)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


def test_the_other_balancing_rules(model):
    bias = split_model(model)[1]
    load = jnp.array([[10, 0, 4, 2]])
    counts = {"kda_moe": RouterCounts(histogram=jnp.zeros((1, 4, BINS), jnp.int32), load=load)}
    moved = sign_rule(bias, counts, 2).stacks["kda_moe"].ffn.router.bias.get_value()
    np.testing.assert_allclose(moved, [[-1e-3, 1e-3, 0, 1e-3]], atol=1e-9)
    for old, new in zip(jax.tree.leaves(bias), jax.tree.leaves(no_balancing(bias, counts, 2)), strict=True):
        np.testing.assert_array_equal(old, new)
    assert is_variable(bias.stacks["kda_moe"].ffn.router.bias)


def point(arm, step, loss):
    return {"arm": arm, "seed": 0, "steps": 80, "point": {"step": step, "loss": loss, "max_load": 1.5}}


def whole(arm, nats):
    return {"arm": arm, "seed": 0, "steps": 80, "held_out": nats, "tokens_per_s": 100}


def written(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_report_names_arms_that_have_not_ended_and_draws_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ablations, "PICTURE", tmp_path / "picture.png")
    full = [point("full", step, 2.0 - step / 80) for step in range(10, 81, 10)]
    cut_off = [point("adamw", step, 2.1 - step / 80) for step in range(10, 61, 10)]
    ablations.report([written(tmp_path / "out", *full, whole("full", 1.0), *cut_off)])
    printed = capsys.readouterr().out
    assert "adamw 0: not ended, step 60 of 80" in printed
    assert "| full | 1.0000 | 1.0000 | +0.0000 | 1.50 | 100 |" in printed and "| adamw" not in printed
    assert (tmp_path / "picture.png").exists()


def test_a_report_without_the_arm_that_others_are_compared_with_says_so(tmp_path):
    with pytest.raises(ConfigError, match="no run of the arm `full` has ended"):
        ablations.report([written(tmp_path / "out", point("full", 10, 2.0))])


def test_a_run_too_short_for_a_point_is_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ablations, "PICTURE", tmp_path / "picture.png")
    assert ablations.main([str(written(tmp_path / "out", whole("full", 1.0))), "--report"]) == 0
    assert "| full | 1.0000 | 1.0000 | +0.0000 | nan | 100 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["OUT", "--arms", "ful"], "--arms: ful: one of full, no_attn_res,"),
        (["OUT", "--seeds", "a"], "--seeds: a: whole numbers with commas"),
        (["OUT", "--arms", "full", "--set", "stpes=3"], "stpes"),
        (["MISSING/OUT", "--arms", "full"], "a file in a folder that exists is needed"),
        (["MISSING", "--report"], "cannot be read as records"),
    ],
)
def test_a_mistake_gets_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    try:
        code = ablations.main(arguments)
    except SystemExit as error:
        code = error.code
    assert code == 2 and message in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_a_second_try_of_an_arm_takes_the_place_of_the_first(tmp_path):
    first, second = [point("full", 10, 2.0), point("full", 20, 1.9)], [point("full", 10, 1.8), whole("full", 1.7)]
    old = {**whole("adamw", 1.6), "curve": [{"step": 10, "loss": 1.6, "max_load": 1.0}]}
    rows = ablations.read_rows([written(tmp_path / "out", *first, *second, old)])
    assert [row["held_out"] for row in rows] == [1.7, 1.6]
    assert [[p["loss"] for p in row["curve"]] for row in rows] == [[1.8], [1.6]]
