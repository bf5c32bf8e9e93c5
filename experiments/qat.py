"""Does quantisation-aware fine-tuning lose less in MXFP4 than quantising afterwards? (k3_mini, one accelerator)

Pre-trains `k3_mini` on the standard library's sources, then fine-tunes it on chats made from the same sources ("write
the docstring of this function"), for every seed once plainly and once with QAT, and measures held-out nats per token of
the assistant: before and after the export of the experts to MXFP4, with MXFP8 activations as they are served.

usage: python -m experiments.qat OUT.json [--pretrain N] [--steps N] [--seeds N]
"""

import argparse
import ast
import dataclasses
import json
import sysconfig
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from k3jax.config import TrainRun, load_run
from k3jax.data import BatchIterator, load_corpus
from k3jax.nn.loss import batch_loss
from k3jax.nn.param import split_model
from k3jax.nn.transformer import Transformer
from k3jax.quant.qat import quantize_experts
from k3jax.text import Tokenizer
from k3jax.train.optimizer import make_optimizer
from k3jax.train.step import init_state, make_train_step, model_of

ROWS, LENGTH = 8, 2048
SIZES = [f"data.seq_len={LENGTH}", f"data.batch_size={ROWS}", "accumulate=1", "data.eval_rows=64", "data.workers=0"]


def write_chats(path: Path) -> int:
    """A chat for each documented function of the standard library; returns how many."""
    count = 0
    with path.open("w") as out:
        for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            try:
                nodes = list(ast.walk(ast.parse(file.read_text())))
            except (SyntaxError, UnicodeDecodeError):
                continue
            for node in nodes:
                if isinstance(node, ast.FunctionDef) and (doc := ast.get_docstring(node)):
                    node.body[0].value.value = "..."
                    source = ast.unparse(node)
                    if len(source) < 1200 and 20 < len(doc) < 600:
                        question = {"role": "user", "content": f"Write the docstring of:\n{source}"}
                        answer = {"role": "assistant", "content": doc}
                        out.write(json.dumps({"messages": [question, answer], "thinking": False}) + "\n")
                        count += 1
    return count


def recipe(name: str, *overrides: str) -> TrainRun:
    """A recipe of the project at this experiment's sizes."""
    root = Path(__file__).parent.parent
    return load_run(TrainRun, root / f"configs/train/{name}.yaml", [*SIZES, *overrides])


def skeleton(run: TrainRun) -> Transformer:
    """The recipe's model, shapes only."""
    return jax.eval_shape(lambda: Transformer(run.model, jax.random.key(0), stack=run.stack, remat=run.remat))


def with_recipe(weights: Transformer, like: Transformer) -> Transformer:
    """The same weights in a model that computes as `like` does."""
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(weights))


class Trainer:
    """A compiled step for one recipe, run from any weights on any order of its data."""

    def __init__(self, run: TrainRun) -> None:
        self.run, self.corpus = run, load_corpus(run.data, Tokenizer.bytes())
        self.skeleton = skeleton(run)
        params, _, self.rest = split_model(self.skeleton)
        self.optimizer = make_optimizer(run.optimizer, params, steps=run.steps)
        self.step = jax.jit(make_train_step(run, self.optimizer, self.rest), donate_argnums=0)

    def __call__(self, model: Transformer, seed: int) -> Transformer:
        """The model after all steps."""
        state = init_state(jax.tree.map(jax.numpy.copy, with_recipe(model, self.skeleton)), self.optimizer)
        data = dataclasses.replace(self.run.data, shuffle_seed=seed)
        batches, began = BatchIterator(self.corpus.train, data), time.monotonic()
        for step in range(self.run.steps):
            state, metrics = self.step(state, next(batches))
            if step in (0, self.run.steps - 1):
                seconds = time.monotonic() - began
                print(f"  step {step + 1} loss {float(metrics['loss']):.4f} after {seconds:.0f} s", flush=True)
        return model_of(state, self.rest)


def main() -> None:
    """Run all arms and write their numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--pretrain", type=int, default=400)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    chats = Path(tempfile.mkdtemp()) / "chats.jsonl"
    print(f"{write_chats(chats)} chats", flush=True)
    sft = [f"steps={options.steps}", f"data.source={chats}", "data.eval_fraction=0.1"]
    pretrain = Trainer(recipe("k3_mini", f"steps={options.pretrain}"))
    arms = {
        name: Trainer(recipe("k3_mini_sft", *sft, f"qat={qat}")) for name, qat in (("plain", "false"), ("qat", "true"))
    }
    held_out = arms["qat"].corpus.eval_batches(arms["qat"].run.data, batch_size=ROWS)
    loss = jax.jit(lambda m, b: batch_loss(m, b.tokens, b.targets, b.segment_ids, b.loss_mask, chunk=4096))

    def nats(model: Transformer) -> float:
        sums = [loss(model, batch) for batch in held_out]
        return float(sum(n for n, _ in sums) / sum(tokens for _, tokens in sums))

    def served(model: Transformer) -> Transformer:
        """As it is exported and served: experts in MXFP4, what they read in MXFP8."""
        return with_recipe(jax.jit(quantize_experts)(model), jax.eval_shape(quantize_experts, arms["qat"].skeleton))

    print("pretrain", flush=True)
    run = pretrain.run
    base = pretrain(jax.jit(lambda: Transformer(run.model, jax.random.key(0), stack=run.stack, remat=run.remat))(), 0)
    rows = [{"arm": "before SFT", "nats": nats(base), "nats_mxfp4": nats(served(base))}]
    for seed in range(options.seeds):
        for name, arm in arms.items():
            print(name, seed, flush=True)
            model = arm(base, seed)
            rows.append({"arm": name, "seed": seed, "nats": nats(model), "nats_mxfp4": nats(served(model))})
            print(rows[-1], flush=True)
            options.out.write_text(json.dumps(rows, indent=1) + "\n")
    for name in arms:
        mean = np.mean([row["nats_mxfp4"] for row in rows if row["arm"] == name])
        print(f"{name}: {mean:.4f} nats per token in MXFP4, mean of {options.seeds} seeds")


if __name__ == "__main__":
    main()
