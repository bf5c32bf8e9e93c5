"""One step: accumulation and packing leave the gradient's meaning alone."""

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
from k3jax.config import DataConfig, TrainRun, load_model_config
from k3jax.data import Batch
from k3jax.nn.param import split_model
from k3jax.nn.transformer import Transformer
from k3jax.train.optimizer import make_optimizer
from k3jax.train.step import init_state, make_eval_step, make_train_step

SIZES = ["width=32", "dense_width=48", "num_layers=3", "mla_layers=[2]", "attn_res_block=2", "moe.num_experts=4"]
MODEL = load_model_config("k3_tiny", SIZES)
RUN = TrainRun(model=MODEL, data=DataConfig(batch_size=4, seq_len=16), loss_chunk=32, stack="loop", remat="none")


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
def stepped(model, batch):
    return one_step(model, batch)


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


def test_every_process_compiles_the_same_program(root):
    """Hosts of one run must agree, and a resumed run must repeat: nothing may follow the hash seed of a process."""
    programs = {
        subprocess.run(
            [sys.executable, __file__],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
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
