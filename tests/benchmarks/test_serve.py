"""What the serving benchmark asks, and that its answers must be the model's."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.serve import Workload, is_sound, k3_shaped, main, make_model, sequence_bytes, settled
from k3jax.config import load_model_config
from k3jax.nn.transformer import Transformer
from k3jax.serve.engine import Engine


def test_prompts_of_a_group_share_their_beginning_and_nothing_else() -> None:
    work = Workload(requests=6, groups=2, shared=8, own=4)
    prompts = work.prompts(512)
    assert {len(prompt) for prompt in prompts} == {12}
    assert len({prompt[:8] for prompt in prompts}) == 2
    assert prompts[0][:8] == prompts[2][:8] != prompts[1][:8]
    assert len({prompt[8:] for prompt in prompts}) == 6


def test_three_quarters_of_the_cache_go_with_three_quarters_of_the_layers() -> None:
    hybrid, mla = k3_shaped([3, 7]), k3_shaped(list(range(8)))
    less = [1 - sequence_bytes(hybrid, tokens) / sequence_bytes(mla, tokens) for tokens in (4096, 2**20)]
    assert less[0] < 0 and 0.74 < less[1] < 0.75
    assert sequence_bytes(mla, 1000) == 8 * 1000 * 1152


def test_a_settled_router_gives_every_token_the_same_experts() -> None:
    model = make_model(load_model_config("k3_tiny"))
    experts = jax.jit(lambda model: jnp.sort(model.hidden(jnp.arange(40)[None], collect=True).trace.experts, axis=-1))
    fixed, free = np.asarray(experts(settled(model))), np.asarray(experts(model))
    assert (fixed == fixed[:, :1, :1]).all()
    assert (free != free[:, :1, :1]).any()


@pytest.mark.parametrize(
    ("engine", "rounding", "expected"),
    [
        ({"mean": 0.002, "worst": 0.1}, {"mean": 0.001, "worst": 0.1}, True),
        ({"mean": 0.0041, "worst": 0.1}, {"mean": 0.001, "worst": 0.1}, False),  # every token a little wrong
        ({"mean": 0.002, "worst": 2.0}, {"mean": 0.001, "worst": 0.1}, False),  # one token of a thousand wrong
        ({"mean": 0.0, "worst": 0.0}, {"mean": 0.0, "worst": 0.0}, True),
    ],
)
def test_answers_are_sound_within_a_multiple_of_rounding(engine: dict, rounding: dict, expected: bool) -> None:
    settled = {"engine": engine, "rounding": rounding}
    free = {"engine": {"mean": 0.8, "worst": 4.0}, "rounding": {"mean": 0.8, "worst": 4.0}}
    assert is_sound({"free": free, "settled": settled}) == expected
    assert not is_sound({"free": free | {"engine": {"mean": 3.0, "worst": 4.0}}, "settled": settled})


@pytest.mark.soak
@pytest.mark.parametrize("is_right", [True, False])
def test_throughput_is_told_only_where_the_answers_are_the_models(tmp_path: Path, monkeypatch, is_right: bool) -> None:
    if not is_right:  # the engine then serves other weights
        monkeypatch.setattr("benchmarks.serve.Engine", lambda model, *args, **kw: Engine(_shifted(model), *args, **kw))
        monkeypatch.setattr("benchmarks.serve.settled", lambda model: model)
    sizes = ["slots=4", "prefill_chunk=32", "prefill_rows=2", "requests=10", "groups=2", "shared=64", "own=16", "new=8"]
    code = main(["throughput", "model=k3_tiny", *sizes, "--json", str(tmp_path / "out.json")])
    assert code == (not is_right)
    assert is_right == (tmp_path / "out.json").exists()
    if is_right:
        found = json.loads((tmp_path / "out.json").read_text())["k3jax"]
        assert 0.5 < found["hit_rate"] < 1
        assert found["output_tokens_per_s"] > 0 and found["first_token_s"]["median"] > 0


def _shifted(model: Transformer) -> Transformer:
    changed = jax.tree.map(lambda leaf: leaf, model)
    changed.lm_head = model.lm_head.replace(jnp.roll(model.lm_head.get_value(), 1, axis=1))
    return changed
