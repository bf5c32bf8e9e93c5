"""Low-rank adapters: a weight W becomes W + (alpha / rank) a b, and only a and b are trained (arXiv:2106.09685).

Adapted are the weights that every token uses: attention, dense and shared feed-forward, and the projections into and
out of the experts' latent space; routed experts, router and vectors stay frozen. An adapter takes the whole weight, all
heads, as one matrix from its inputs to its outputs. Merged, a model has nothing to tell it was adapted:
`merged(model, adapters)` is what a run's checkpoint holds as its weights, so it is served and exported as any other.
Apart, the adapters are a safetensors file of a few megabytes:

    python -m k3jax.train.lora RUN OUT.safetensors
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import yaml
from jaxtyping import Array, PRNGKeyArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from k3jax.checkpoint.arrays import ArrayTree
from k3jax.checkpoint.orbax_io import OPTIMIZER, find_step, named_leaves
from k3jax.checkpoint.safetensors_dir import CheckpointError
from k3jax.config import LoraConfig
from k3jax.nn.param import Param, is_variable
from k3jax.nn.transformer import Transformer
from k3jax.train.optimizer import MATRICES, Axes
from k3jax.train.run_dir import CONFIG_FILE

FROZEN: set[Axes] = {axes for axes in MATRICES if "experts" in axes or "expert_scores" in axes}
ADAPTERS = "adapters"  # in a checkpoint's optimizer tree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapter:
    """`scale` times a [*layers, in, rank] times b [*layers, rank, out] is added to a weight."""

    a: Param
    b: Param
    scale: float = field(metadata={"static": True})

    def applied(self, weight: Array) -> Array:
        """The weight with the product added."""
        product = jnp.matmul(self.a.get_value(), self.b.get_value(), precision="highest")
        return weight + (self.scale * product.reshape(weight.shape)).astype(weight.dtype)


def make_adapters(model: Transformer, config: LoraConfig, key: PRNGKeyArray) -> dict[str, Adapter]:
    """Adapters that change nothing yet (b is zero), by the names of the weights of `model` (arrays or shapes)."""
    adapters = {}
    for number, (name, variable) in enumerate(_variables(model).items()):
        if variable.axes not in MATRICES or variable.axes in FROZEN or not name.startswith("stacks."):
            continue
        lead, fan_in, fan_out = _sizes(variable.axes, variable.get_value().shape)
        a = jax.random.normal(jax.random.fold_in(key, number), (*lead, fan_in, config.rank)) * fan_in**-0.5
        adapters[name] = Adapter(
            a=Param(a, axes=("lora_in", "lora_rank")),
            b=Param(jnp.zeros((*lead, config.rank, fan_out)), axes=("lora_rank", "lora_out")),
            scale=config.alpha / config.rank,
        )
    return adapters


def merged(model: Transformer, adapters: Mapping[str, Adapter]) -> Transformer:
    """`model` with its adapted weights changed; differentiable in the adapters."""
    names = iter(_variables(model))

    def one(variable: Any) -> Any:
        if not is_variable(variable) or variable.get_value() is None:
            return variable
        adapter = adapters.get(next(names))
        return variable if adapter is None else variable.replace(adapter.applied(variable.get_value()))

    return jax.tree.map(one, model, is_leaf=is_variable)


def save_adapters(path: Path, adapters: Mapping[str, Adapter]) -> None:
    """Write `NAME.a` and `NAME.b` of every adapted weight, and each scale in the file's metadata."""
    tensors = {name: np.asarray(leaf) for name, leaf in named_leaves(dict(adapters)).items()}
    save_file(tensors, path, metadata={name: str(adapter.scale) for name, adapter in adapters.items()})


def load_adapters(path: Path) -> dict[str, Adapter]:
    """Read what `save_adapters` wrote."""
    with safe_open(path, "numpy") as file:
        scales = {name: float(scale) for name, scale in (file.metadata() or {}).items()}
        return {
            name: Adapter(
                a=Param(jnp.asarray(file.get_tensor(f"{name}.a")), axes=("lora_in", "lora_rank")),
                b=Param(jnp.asarray(file.get_tensor(f"{name}.b")), axes=("lora_rank", "lora_out")),
                scale=scale,
            )
            for name, scale in scales.items()
        }


def _sizes(axes: Axes, shape: tuple[int, ...]) -> tuple[tuple[int, ...], int, int]:
    """(stacked dims, inputs, outputs) of a weight as one matrix: its inputs come first, all else are outputs."""
    lead = len(shape) - len(axes)
    fan_in = math.prod(shape[lead : lead + len(MATRICES[axes][0])])
    return shape[:lead], fan_in, math.prod(shape[lead:]) // fan_in


def _variables(model: Transformer) -> dict[str, Any]:
    variables = [leaf for leaf in jax.tree.leaves(model, is_leaf=is_variable) if leaf.get_value() is not None]
    return dict(zip(named_leaves(model), variables, strict=True))


def adapters_of_run(run_dir: Path) -> dict[str, Adapter]:
    """The adapters in a run's newest checkpoint; raises `CheckpointError` where it has none."""
    step = find_step(run_dir)
    if step is None:
        raise CheckpointError(f"{run_dir}: holds no checkpoint")
    tree, lora = ArrayTree(step / OPTIMIZER), yaml.safe_load((run_dir / CONFIG_FILE).read_text())["lora"]
    read = lambda name: jnp.asarray(tree.open(name).read().result())  # noqa: E731
    prefix = f"{ADAPTERS}."
    names = sorted({name.removeprefix(prefix)[:-2] for name in tree.names if name.startswith(prefix)})
    if not names:
        raise CheckpointError(f"{run_dir}: trained the model itself, not adapters (lora.rank = {lora['rank']})")
    return {
        name: Adapter(
            a=Param(read(f"{prefix}{name}.a"), axes=("lora_in", "lora_rank")),
            b=Param(read(f"{prefix}{name}.b"), axes=("lora_rank", "lora_out")),
            scale=lora["alpha"] / lora["rank"],
        )
        for name in names
    }


def main() -> int:
    """Write the adapters of a run to a file of their own; returns the exit code."""
    parser = argparse.ArgumentParser(description="Write the adapters of a run, apart from its model.")
    parser.add_argument("run_dir", type=Path, metavar="RUN")
    parser.add_argument("out", type=Path, metavar="OUT.safetensors")
    options = parser.parse_args()
    try:
        adapters = adapters_of_run(options.run_dir)
        save_adapters(options.out, adapters)
    except (CheckpointError, OSError, SafetensorError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: adapters of {len(adapters)} weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
