"""Training reaches the tower: a model learns an answer that only the picture tells."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
from PIL import Image

from k3jax.checkpoint.orbax_io import named_leaves
from k3jax.config import DataConfig, OptimizerConfig, TrainRun, load_model_config
from k3jax.data import BatchIterator, load_corpus
from k3jax.nn.param import split_model
from k3jax.nn.transformer import Transformer
from k3jax.text import Tokenizer
from k3jax.train.optimizer import make_optimizer
from k3jax.train.step import init_state, make_train_step

STEPS = 60
SIZES = ["width=32", "dense_width=32", "vision.width=16", "vision.mlp_width=32", "vision.num_blocks=1"]
ANSWERS = {"dark": 30, "light": 220}  # what stands in the text, and the gray of the picture


def write_chats(folder: Path) -> Path:
    lines = []
    for answer, level in ANSWERS.items():
        Image.new("RGB", (28, 28), (level,) * 3).save(folder / f"{answer}.png")
        image = {"type": "image_url", "image_url": {"url": f"{answer}.png"}}
        messages = [{"role": "user", "content": [image]}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": messages, "thinking": False}))
    (folder / "chats.jsonl").write_text("\n".join(lines))
    return folder / "chats.jsonl"


def test_a_model_learns_what_only_the_picture_tells(tmp_path: Path) -> None:
    config = DataConfig(
        source=str(write_chats(tmp_path)), eval_fraction=0.0, batch_size=2, seq_len=120, row_images=1, row_patches=4
    )
    optimizer = OptimizerConfig(learning_rate=0.02, warmup_fraction=0.1)
    model = load_model_config("k3_tiny_vision", SIZES)
    run = TrainRun(model=model, data=config, optimizer=optimizer, loss_chunk=256, stack="loop", remat="none")
    batches = BatchIterator(load_corpus(config, Tokenizer.bytes()).train, config)
    transformer = Transformer(model, jax.random.key(0), stack="loop", remat="none")
    params, _, rest = split_model(transformer)
    chosen = make_optimizer(optimizer, params, steps=STEPS)
    begun = state = init_state(transformer, chosen)
    step = jax.jit(make_train_step(run, chosen, rest))
    for _ in range(STEPS):
        state, _ = step(state, next(batches))
    batch = next(batches)
    inverted = dataclasses.replace(batch, patches=-batch.patches)
    right, wrong = (float(step(state, rows)[1]["loss"]) for rows in (batch, inverted))
    blind = np.log(2) / 25  # what not to see costs each of the 25 tokens that the assistant writes
    assert right < wrong - blind
    before, after = named_leaves(begun.params), named_leaves(state.params)
    tower = [name for name in before if name.startswith("vision.")]
    assert len(tower) == 12 and not [name for name in tower if np.array_equal(before[name], after[name])]
