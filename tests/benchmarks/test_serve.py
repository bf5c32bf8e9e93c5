"""What the serving benchmark asks, and that its answers must be the model's."""

import json
from pathlib import Path

import pytest

from benchmarks.serve import Workload, k3_shaped, main, sequence_bytes


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


@pytest.mark.soak
@pytest.mark.parametrize("parity", [0.5, -1.0])
def test_throughput_is_told_only_where_the_answers_are_the_models(tmp_path: Path, monkeypatch, parity: float) -> None:
    monkeypatch.setattr("benchmarks.serve.PARITY", parity)
    sizes = ["slots=4", "prefill_chunk=32", "prefill_rows=2", "requests=10", "groups=2", "shared=64", "own=16", "new=8"]
    wrong = main(["throughput", "model=k3_tiny", *sizes, "--json", str(tmp_path / "out.json")])
    assert wrong == (parity < 0)
    if not wrong:
        found = json.loads((tmp_path / "out.json").read_text())["k3jax"]
        assert 0.5 < found["hit_rate"] < 1
        assert found["output_tokens_per_s"] > 0 and found["first_token_s"]["median"] > 0
    assert wrong == (not (tmp_path / "out.json").exists())
