"""Recipes become typed configs, and every mistake in one is a single line that names it."""

import dataclasses
import re

import pytest
import yaml

from k3jax.config import (
    CONFIG_DIR,
    ConfigError,
    KDAConfig,
    ModelConfig,
    MoEConfig,
    ServeRun,
    TrainRun,
    load_model_config,
    load_run,
    to_yaml,
)


@pytest.fixture
def recipe(tmp_path):
    """recipe(text) writes a YAML file and returns its path."""

    def write(text: str):
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return path

    return write


def refused(call, *arguments) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_k3_is_the_release():
    assert load_model_config("k3") == ModelConfig()


def test_k3_spells_out_every_number():
    written = yaml.safe_load((CONFIG_DIR / "models/k3.yaml").read_text())
    expected = dataclasses.asdict(ModelConfig())
    assert written.keys() == expected.keys()
    for part in ("kda", "mla", "moe"):
        assert written[part].keys() == expected[part].keys()


def test_the_release_has_its_layers_where_they_are():
    config = load_model_config("k3")
    kinds = [config.layer_kind(layer) for layer in range(config.num_layers)]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"kda_dense": 1, "kda_moe": 68, "mla_moe": 24}
    assert [layer for layer, kind in enumerate(kinds) if kind == "mla_moe"][-3:] == [87, 91, 92]
    assert config.num_snapshots == 8
    assert config.moe.shared_width == 6144


@pytest.mark.parametrize("path", sorted((CONFIG_DIR / "models").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_model_recipe_is_valid_and_named_after_its_file(path):
    assert load_model_config(path.stem).name == path.stem


def test_a_recipe_is_sparse_over_the_defaults(recipe):
    run = load_run(TrainRun, recipe("model: k3_tiny\nsteps: 7\ndata: {seq_len: 64}\n"))
    assert (run.steps, run.data.seq_len, run.data.batch_size) == (7, 64, TrainRun().data.batch_size)
    assert run.model == load_model_config("k3_tiny")


def test_a_named_model_can_be_refined(recipe):
    run = load_run(TrainRun, recipe("model: {base: k3_tiny, width: 64, moe: {top_k: 1}}\n"))
    tiny = load_model_config("k3_tiny")
    assert run.model == dataclasses.replace(tiny, width=64, moe=dataclasses.replace(tiny.moe, top_k=1))


@pytest.mark.parametrize(
    ("override", "read", "expected"),
    [
        ("steps=3", lambda run: run.steps, 3),
        ("optimizer.learning_rate=1e-3", lambda run: run.optimizer.learning_rate, 1e-3),
        ("optimizer.learning_rate=1", lambda run: run.optimizer.learning_rate, 1.0),
        ("model.kda.num_heads=4", lambda run: run.model.kda.num_heads, 4),
        ("model.mla_layers=[1, 4]", lambda run: run.model.mla_layers, (1, 4)),
        ("model=k3_tiny", lambda run: run.model.width, 128),
        ("run_dir=runs/a=b", lambda run: run.run_dir, "runs/a=b"),
    ],
)
def test_overrides_win_over_the_recipe(recipe, override, read, expected):
    run = load_run(TrainRun, recipe("model: k3_tiny\nsteps: 7\n"), [override])
    assert read(run) == expected


def test_the_resolved_config_reads_back_equal(recipe):
    run = load_run(TrainRun, recipe("model: k3_tiny\nmesh: {data: 2}\n"), ["seed=5"])
    assert load_run(TrainRun, recipe(to_yaml(run))) == run


def test_numbers_in_scientific_notation_are_numbers(recipe):
    """YAML 1.1 reads 1e-5 as a string; a float field takes it."""
    assert (
        load_run(TrainRun, recipe("model: k3_tiny\noptimizer: {learning_rate: 1e-5}\n")).optimizer.learning_rate == 1e-5
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stesp: 3", "unknown key stesp; did you mean steps?"),
        ("data: {sequence_len: 3}", "unknown key data.sequence_len; did you mean seq_len?"),
        ("model: {base: k3_tiny, kda: {num_head: 3}}", "unknown key model.kda.num_head; did you mean num_heads?"),
        ("model: {base: k3_tiny, zzz: 3}", "unknown key model.zzz; valid keys: name, vocab_size, width"),
        ("model: k3_tinny", "model = k3_tinny: no such model; did you mean k3_tiny?"),
        ("model: {base: k3_tinny}", "model.base = k3_tinny: no such model; did you mean k3_tiny?"),
        ("model: {base: zzz}", "model.base = zzz: no such model (known: k3, k3_mini, "),
        ("model: k3_tiny\nsteps: many", "steps = many: must be a whole number"),
        ("model: k3_tiny\nsteps: 1.5", "steps = 1.5: must be a whole number"),
        ("model: k3_tiny\nsteps: [1]", "steps = [1]: must be a whole number"),
        ("model: k3_tiny\nrun_dir:", "run_dir = (nothing): must be text"),
        ("model: {base: k3_tiny, width: wide}", "model.width = wide: must be a whole number"),
        ("model: {base: k3_tiny, quantized_experts: maybe}", "model.quantized_experts = maybe: must be true or false"),
        ("model: {base: k3_tiny, kda: 3}", "model.kda = 3: must be a mapping with keys of num_heads, head_dim"),
        ("model: k3_tiny\ndata: {mixture: {a: x}}", "data.mixture.a: Value 'x' of type 'str'"),
        ("model: k3_tiny\ndata: {mixture: {a: 0}}", "data.mixture: a has weight 0.0, it must be a number above 0"),
        ("model: k3_tiny\nsteps: 0", "steps = 0: must be at least 1"),
        ("model: k3_tiny\nstack: scann", "stack = scann: one of scan, loop"),
        ("model: k3_tiny\naccumulate: 3", "data.batch_size = 4 is not a multiple of accumulate = 3"),
        ("- a\n- b", "must be a mapping of keys to values"),
        ("a: [1\nb: 2", "line 2: not valid YAML"),
    ],
)
def test_a_mistake_in_a_recipe_is_named(recipe, text, message):
    assert message in refused(load_run, TrainRun, recipe(text))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "override 'steps': write key=value"),
        ("stesp=1", "command line: unknown key stesp; did you mean steps?"),
        ("steps=many", "command line: steps = many: must be a whole number"),
        ("run_dir=", "command line: run_dir = (nothing): must be text"),
        ("model.kda=3", "command line: model.kda = 3: must be a mapping with keys of num_heads"),
        ("model.base=zzz", "model.base = zzz: no such model (known: "),
        ("=3", "override '=3': write key=value"),
        ("steps=[1", "override 'steps=[1': the value is not valid YAML"),
        ("model.kda.num_head=1", "unknown key model.kda.num_head; did you mean num_heads?"),
        ("steps.deep=1", "steps"),
        ("model.base=5", "model.base = 5: must be the name of a model, a file or a folder"),
        ("stages={until: 1.0}", "command line: stages = {'until': 1.0}: must be a list"),
        ("data.mixture=[a]", "command line: data.mixture = ['a']: must be a mapping"),
        ("stages=[{until: .nan}]", "stages[0].until = nan: must lie in (0, 1]"),
    ],
)
def test_a_mistake_in_an_override_is_named(recipe, override, message):
    assert message in refused(load_run, TrainRun, recipe("model: k3_tiny"), [override])


def test_a_missing_recipe_is_named(tmp_path):
    assert refused(load_run, ServeRun, tmp_path / "none.yaml") == f"config {tmp_path / 'none.yaml'}: no such file"
    assert "cannot be read" in refused(load_run, ServeRun, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers = 0: must be at least 1"),
        ({"num_layers": 50}, "mla_layers names layer [51], but num_layers = 50"),
        ({"mla_layers": (-1,)}, "mla_layers names layer [-1]"),
        ({"mla_layers": (3, 3)}, "mla_layers names a layer twice"),
        ({"attn_res_block": 0}, "attn_res_block = 0"),
        ({"num_dense_layers": 94}, "num_dense_layers = 94: must lie in 0..num_layers = 93"),
        ({"moe": MoEConfig(top_k=897)}, "moe.top_k = 897: num_experts is 896"),
        ({"moe": MoEConfig(latent_width=100)}, "moe.latent_width = 100: MXFP4 and MXFP8 need a multiple of 32"),
        ({"moe": MoEConfig(expert_width=100)}, "moe.expert_width = 100: MXFP4 and MXFP8 need a multiple of 32"),
        ({"kda": KDAConfig(gate_lower_bound=0.5)}, "kda.gate_lower_bound = 0.5"),
        ({"kda": KDAConfig(a_log_length=95)}, "kda.a_log_length = 95: at least kda.num_heads = 96"),
        ({"dtype": "float16"}, "dtype = float16: one of bfloat16, float32, float64"),
    ],
)
def test_numbers_that_describe_no_k3_are_refused(change, message):
    assert message in refused(dataclasses.replace(ModelConfig(), **change).validate)


def test_float_experts_need_no_multiple_of_32():
    config = dataclasses.replace(ModelConfig(), quantized_experts=False, moe=MoEConfig(latent_width=100))
    assert config.validate() is config


@pytest.mark.parametrize(
    "override",
    [
        "keep_checkpoints=0",
        "checkpoint_every=0",
        "loss_chunk=0",
        "data.batch_size=0",
        "data.seq_len=-1",
        "data.workers=-1",
        "optimizer.learning_rate=-1",
        "optimizer.learning_rate=.nan",
        "optimizer.muon_steps=0",
        "optimizer.warmup_fraction=5",
        "optimizer.weight_decay=.nan",
        "optimizer.adam_learning_rate=.inf",
        "optimizer.adam_b2=1",
        "optimizer.muon_momentum=-1",
        "lora.alpha=.nan",
        "steps=99999999999",
        "data.shuffle_seed=99999999999",
        "seed=99999999999999999999",
        "model.width=0",
        "model.kda.num_heads=0",
        "model.mla.q_rank=-1",
        "model.moe.num_shared=0",
    ],
)
def test_numbers_out_of_range_are_refused_with_their_name(override):
    key = override.partition("=")[0].removeprefix("model.")
    with pytest.raises(ConfigError, match=rf"^{re.escape(key)} = .*(must|at least)"):
        load_run(TrainRun, CONFIG_DIR / "train/tiny_cpu.yaml", [override])
