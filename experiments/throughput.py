"""Tokens a second, MFU and memory of a training recipe's step on the accelerator at hand, on random tokens.

usage: python -m experiments.throughput configs/train/k3_mini.yaml [--steps N] [--set KEY=VALUE]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from k3jax.config import TrainRun, load_run
from k3jax.data import Batch
from k3jax.nn.param import split_model
from k3jax.nn.transformer import Transformer
from k3jax.train.flops import mean_keys, peak_flops, training_flops
from k3jax.train.optimizer import make_optimizer
from k3jax.train.step import init_state, make_train_step


def measure(run: TrainRun, steps: int) -> dict[str, float | str]:
    """Time `steps` steps after two that warm up."""
    model = jax.jit(lambda: Transformer(run.model, jax.random.key(0), stack=run.stack, remat=run.remat))()
    params, _, rest = split_model(model)
    optimizer = make_optimizer(run.optimizer, params, steps=run.steps, dtype=run.model.dtype)
    state = init_state(model, optimizer)
    rows, length = run.data.batch_size, run.data.seq_len
    tokens = jax.random.randint(jax.random.key(1), (rows, length + 1), 0, 256)
    batch = Batch(
        tokens=tokens[:, :-1],
        targets=tokens[:, 1:],
        segment_ids=jnp.zeros((rows, length), jnp.int32),
        loss_mask=jnp.ones((rows, length), bool),
    )
    began = time.monotonic()
    step = jax.jit(make_train_step(run, optimizer, rest), donate_argnums=0).lower(state, batch).compile()
    compile_s = time.monotonic() - began
    for _ in range(2):
        state, metrics = step(state, batch)
    float(metrics["loss"])
    began = time.monotonic()
    for _ in range(steps):
        state, metrics = step(state, batch)
    loss = float(metrics["loss"])
    seconds = (time.monotonic() - began) / steps
    device = jax.devices()[0]
    rate, peak = rows * length / seconds, peak_flops(device.device_kind)
    flops = training_flops(run.model, keys=mean_keys(length))
    memory = step.memory_analysis()
    return {
        "device": device.device_kind,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "seconds_per_step": round(seconds, 4),
        "tokens_per_s": round(rate),
        "mfu": round(rate * flops / peak, 4) if peak else "",
        "peak_gib": round((device.memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**30, 2),
        "state_gib": round(memory.argument_size_in_bytes / 2**30, 2),
        "compile_s": round(compile_s, 1),
        "loss": round(loss, 4),
    }


def main() -> None:
    """Measure one recipe and print a JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    print(json.dumps(measure(load_run(TrainRun, options.recipe, options.set), options.steps)), flush=True)


if __name__ == "__main__":
    main()
