"""A model that trains in seconds, and recipes for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

MODEL = {
    "base": "k3_tiny",
    "width": 32,
    "num_layers": 3,
    "mla_layers": [2],
    "dense_width": 48,
    "kda": {"head_dim": 16},
    "mla": {"q_rank": 16, "kv_rank": 16, "nope_dim": 8, "extra_dim": 8, "v_dim": 16},
    "moe": {"num_experts": 4, "expert_width": 32, "latent_width": 16},
}


@pytest.fixture(scope="session")
def write_recipe() -> Callable[..., Path]:
    """`write_recipe(folder, **keys)`: the path of a recipe with these keys, on texts that it writes too."""

    def write(folder: Path, **keys: Any) -> Path:
        (folder / "text").mkdir()
        for n in range(60):
            (folder / "text" / f"{n}.txt").write_text("".join(f"{n} times {k} is {n * k}\n" for k in range(20)))
        data = {"source": str(folder / "text"), "seq_len": 32, "batch_size": 4, "eval_fraction": 0.2, "eval_rows": 8}
        content = {"model": MODEL, "data": data, "optimizer": {"learning_rate": 0.01}, "log_every": 1, **keys}
        (folder / "recipe.yaml").write_text(yaml.safe_dump(content))
        return folder / "recipe.yaml"

    return write
