"""Recall from a fixed-size state: KDA against simpler layers on synthetic tasks (Kimi Linear, arXiv:2510.26692, 5.1).

Three tasks, in each of which only tokens that the sequence determines are predicted:
  palindrome   random tokens, a separator, then the same tokens backwards
  mqar         key-value pairs, then all keys again in another order, each followed by its value
  stack        pushes of values on 64 stacks and pops, each followed by the value that it takes off
Three layers, all with KDA's projections, short convolutions, output norm and gate, and its bounded decay:
  kda          a decay for each channel, delta rule
  scalar_gate  one decay for each head, delta rule (Gated DeltaNet's form)
  no_delta     one decay for each head, values are added and never taken off (Mamba-2's form)

usage: python -m experiments.recall OUT.jsonl [--tasks ...] [--layers ...] [--lengths ...] [--set KEY=VALUE]
       python -m experiments.recall OUT.jsonl ... --report        draws docs/recall.png and prints the table
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from k3jax.config import OptimizerConfig, load_model_config
from k3jax.nn.kda import KDA
from k3jax.nn.layer import Layer
from k3jax.nn.param import merge_model, split_model, value_and_grad
from k3jax.nn.transformer import Transformer
from k3jax.train.optimizer import make_optimizer
from pallas_kernels.short_conv import short_conv

WORDS, STACKS = 128, 64  # values; stacks
SEPARATOR = PUSH = 2 * WORDS
POP, VOCABULARY = PUSH + STACKS, PUSH + 2 * STACKS
# Two layers of two heads of 128, as in the paper, in one AttnRes block.
SIZES = [
    *(f"vocab_size={VOCABULARY}", "bos_id=0", "eos_id=0", "pad_id=0", "media_id=0"),
    *("width=256", "num_layers=2", "num_dense_layers=2", "mla_layers=[]", "dense_width=512", "attn_res_block=2"),
    *("kda.num_heads=2", "kda.head_dim=128", "dtype=bfloat16"),
]


class ScalarGateKDA(KDA):
    """A decay for each head: the mean of what its channels ask for."""

    def _sequence(self, qkv, taps, gate, beta, state, history, segment_ids):  # type: ignore[no-untyped-def]
        gate = jnp.broadcast_to(jnp.mean(gate, axis=-1, keepdims=True), gate.shape)
        return super()._sequence(qkv, taps, gate, beta, state, history, segment_ids)

    def _decay(self) -> dict[str, Any]:
        decay = super()._decay()
        bias = decay["dt_bias"]
        return {**decay, "dt_bias": jnp.broadcast_to(jnp.mean(bias, axis=-1, keepdims=True), bias.shape)}


class NoDeltaKDA(ScalarGateKDA):
    """S_t = decay S_(t-1) + beta k v^T, written as attention: every pair of tokens at once."""

    def _sequence(self, qkv, taps, gate, beta, state, history, segment_ids):  # type: ignore[no-untyped-def]
        qkv, history = short_conv(qkv, taps)
        q, k, v = (x.astype(jnp.float32) for x in self._heads(qkv))
        q, k = (x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6) for x in (q, k))
        decay = self._decay()
        z = jnp.exp(decay["a_log"][:, None]) * (gate.astype(jnp.float32) + decay["dt_bias"])
        total = jnp.cumsum(jnp.mean(decay["lower_bound"] * jax.nn.sigmoid(z), axis=-1), axis=1)  # [B, T, H]
        since = total[:, :, None] - total[:, None]  # [B, T, S, H], at most 0 where S <= T
        visible = jnp.tril(jnp.ones(since.shape[1:3], bool))[None, :, :, None]
        weights = jnp.where(visible, jnp.exp(jnp.minimum(since, 0.0)), 0.0) * beta[:, None]
        scores = jnp.einsum("bthk,bshk->btsh", q, k) * q.shape[-1] ** -0.5
        return jnp.einsum("btsh,bshv->bthv", scores * weights, v).astype(qkv.dtype), None, history


LAYERS = {"kda": KDA, "scalar_gate": ScalarGateKDA, "no_delta": NoDeltaKDA}


def palindrome(random: np.random.Generator, batch: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [batch, length], and which of them are to be predicted."""
    words = random.integers(0, WORDS, (batch, (length - 1) // 2))
    between = np.full((batch, length - 2 * words.shape[1]), SEPARATOR)
    tokens = np.concatenate([words, between, words[:, ::-1]], axis=1)
    return tokens, np.broadcast_to(np.arange(length) >= length - words.shape[1], tokens.shape)


def mqar(random: np.random.Generator, batch: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """A quarter of the length in pairs of different keys, up to the number of keys there are."""
    pairs = min(length // 4, WORDS)
    keys = random.permuted(np.tile(np.arange(WORDS), (batch, 1)), axis=1)[:, :pairs]
    values = WORDS + random.integers(0, WORDS, (batch, pairs))
    order = random.permuted(np.tile(np.arange(pairs), (batch, 1)), axis=1)
    again = [np.take_along_axis(x, order, axis=1) for x in (keys, values)]
    told, asked = (np.stack(x, axis=-1).reshape(batch, -1) for x in ((keys, values), again))
    tokens = np.concatenate([told, asked], axis=1)
    at = np.arange(tokens.shape[1])
    return tokens, np.broadcast_to((at >= told.shape[1]) & (at % 2 == 1), tokens.shape)


def stack(random: np.random.Generator, batch: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Operations of two tokens, which stack and which value; an empty stack is always pushed to."""
    tokens, asked = np.zeros((batch, length), np.int64), np.zeros((batch, length), bool)
    for row in range(batch):
        stacks: list[list[int]] = [[] for _ in range(STACKS)]
        numbers, pops = random.integers(0, STACKS, length // 2), random.random(length // 2) < 0.5
        values = random.integers(0, WORDS, length // 2)
        for step, (number, pop, value) in enumerate(zip(numbers, pops, values, strict=True)):
            pop = bool(pop and stacks[number])
            word = stacks[number].pop() if pop else int(value)
            if not pop:
                stacks[number].append(word)
            tokens[row, 2 * step : 2 * step + 2] = (POP if pop else PUSH) + number, word
            asked[row, 2 * step + 1] = pop
    return tokens, asked


TASKS = {"palindrome": palindrome, "mqar": mqar, "stack": stack}


def make_model(layer: str, sizes: Sequence[str] = ()) -> Transformer:
    """The two-layer model with a kind of layer; `sizes` override those of the paper."""

    class OneLayer(Layer):
        kda_class = LAYERS[layer]

    class Model(Transformer):
        layer_class = OneLayer

    return Model(load_model_config("k3_tiny", [*SIZES, *sizes]), jax.random.key(0), stack="loop", remat="none")


def answers(model: Transformer, tokens: Array, asked: Array) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(mean nats of the predicted tokens, share of them that come first)."""
    logits, targets, mask = model.logits(model.hidden(tokens[:, :-1]).hidden), tokens[:, 1:], asked[:, 1:]
    nats = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    right = jnp.argmax(logits, axis=-1) == targets
    return tuple(jnp.sum(jnp.where(mask, x, 0)) / jnp.sum(mask) for x in (nats, right))  # type: ignore[return-value]


def train(
    task: str, layer: str, length: int, *, steps: int, batch: int, rate: float, sizes: Sequence[str]
) -> dict[str, Any]:
    """Train one model on fresh sequences; returns its accuracy on others as it went."""
    random, model = np.random.default_rng(0), jax.jit(lambda: make_model(layer, sizes))()
    params, bias, rest = split_model(model)
    config = OptimizerConfig(learning_rate=rate, warmup_fraction=0.05, weight_decay=0.01)
    optimizer = make_optimizer(config, params, steps=steps, table={})  # AdamW for all weights
    grad = value_and_grad(answers, has_aux=True)

    def step(params: Any, state: Any, number: Array, tokens: Array, asked: Array) -> Any:
        (nats, right), grads = grad(merge_model(params, bias, rest), tokens, asked)
        updated = optimizer.update(grads, state, params, number)
        return updated.params, updated.opt_state, nats, right

    step, held_out = jax.jit(step, donate_argnums=(0, 1)), TASKS[task](np.random.default_rng(1), 2 * batch, length)
    score = jax.jit(lambda params, tokens, asked: answers(merge_model(params, bias, rest), tokens, asked)[1])
    state, curve, began = optimizer.init(params), [], time.monotonic()
    for number in range(steps):
        tokens, asked = TASKS[task](random, batch, length)
        params, state, _, _ = step(params, state, jnp.int32(number), tokens, asked)
        if (number + 1) % max(1, steps // 20) == 0:
            curve.append((number + 1, round(float(score(params, *held_out)), 4)))
            print(f"{task} {layer} {length}: {time.monotonic() - began:.0f} s, step, accuracy {curve[-1]}", flush=True)
    seconds = round(time.monotonic() - began, 1)
    row = {
        "task": task,
        "layer": layer,
        "length": length,
        "steps": steps,
        "batch": batch,
        "rate": rate,
        "sizes": [*sizes],
    }
    return {**row, "accuracy": max(a for _, a in curve), "seconds": seconds, "curve": curve}


def report(paths: list[Path]) -> None:
    """Print accuracies by length and draw them."""
    from matplotlib.figure import Figure

    rows = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    lengths = sorted({row["length"] for row in rows})
    best: dict[tuple[str, str, int], float] = {}
    for row in rows:
        key = (row["task"], row["layer"], row["length"])
        best[key] = max(best.get(key, 0.0), row["accuracy"])
    print("| task | layer | " + " | ".join(f"T = {length}" for length in lengths) + " |")
    print("|---|---|" + "---|" * len(lengths))
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(TASKS), sharey=True), TASKS, strict=True):
        for layer in LAYERS:
            found = [best.get((task, layer, length)) for length in lengths]
            print(f"| {task} | {layer} | " + " | ".join("" if x is None else f"{100 * x:.1f} %" for x in found) + " |")
            run = [(length, 100 * x) for length, x in zip(lengths, found, strict=True) if x is not None]
            axes.plot(*zip(*run, strict=True), "o-", label=layer)
        axes.set(title=task, xlabel="length of the sequence", xscale="log", xticks=lengths, xticklabels=lengths)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.axes[0].set(ylabel="accuracy (%)")
    figure.axes[0].legend()
    figure.savefig(Path(__file__).parent.parent / "docs/recall.png", dpi=130)


def main() -> None:
    """Train every combination and append a line for each, or report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, nargs="+")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--lengths", default="128,256,512")
    parser.add_argument("--rates", default="1e-3")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a size of the model")
    options = parser.parse_args()
    if options.report:
        report(options.out)
        return
    for length in map(int, options.lengths.split(",")):
        for task in options.tasks.split(","):
            for layer in options.layers.split(","):
                for rate in map(float, options.rates.split(",")):
                    how = {"steps": options.steps, "batch": options.batch, "rate": rate, "sizes": options.set}
                    row = train(task, layer, length, **how)
                    print({key: value for key, value in row.items() if key != "curve"}, flush=True)
                    with options.out[0].open("a") as out:
                        out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
