"""What each of K3's ideas is worth at small scale: a sibling of about 60 M parameters with one of them taken away.

Every arm sees the same batches in the same order for as many steps; only the arm's own change differs. Nothing in the
packages is switched off by a flag: an arm is a config, a subclass, another table or another rule.

usage: python -m experiments.ablations OUT.jsonl [--arms NAME,...] [--seeds N,...] [--set KEY=VALUE]
       python -m experiments.ablations OUT.jsonl ... --report     draws docs/ablations.png and prints the table
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.config import ConfigError, TrainRun, load_run
from k3jax.data import Batch, BatchIterator, load_corpus
from k3jax.nn.attn_res import Mix
from k3jax.nn.layer import Layer
from k3jax.nn.param import split_model
from k3jax.nn.transformer import Transformer
from k3jax.text import Tokenizer
from k3jax.train.optimizer import MATRICES, Table, make_optimizer
from k3jax.train.router_balance import RouterCounts, rebalance
from k3jax.train.step import Rebalance, TrainState, init_state, make_eval_step, make_train_step

SIBLING = Path(__file__).with_name("sibling.yaml")
SIGN_RATE = 1e-3  # step of the sign rule (DeepSeek-V3)
EVERY = 10  # steps between records
WINDOW = 5  # records that a drawn curve is smoothed over
PICTURE = Path(__file__).parent.parent / "docs/ablations.png"


class EqualMix(Mix):
    """A read that weighs all sources equally and learns nothing."""

    def folded(self, dtype: Any) -> jax.Array:
        return jnp.zeros_like(super().folded(dtype))


class PlainLayer(Layer):
    """A layer of a plain residual stream, where all layers are one AttnRes block.

    Its sources are then the embedding and the sum of all layers so far. Their mean is half the residual stream, and the
    norm after the read takes the factor away.
    """

    mix_class = EqualMix


class PlainTransformer(Transformer):
    """K3 without Attention Residuals."""

    layer_class = PlainLayer


def sign_rule(router_bias: Transformer, counts: dict[str, RouterCounts], k: int) -> Transformer:
    """Every bias moves by a fixed step, up where its expert had less than its share (loss-free balancing)."""
    moved = jax.tree.map(lambda leaf: leaf, router_bias)
    for kind, seen in counts.items():
        router = moved.layers(kind).ffn.router
        mean = jnp.mean(seen.load.astype(jnp.float32), axis=-1, keepdims=True)
        router.bias = router.bias.replace(router.bias.get_value() + SIGN_RATE * jnp.sign(mean - seen.load))
    return moved


def no_balancing(router_bias: Transformer, counts: dict[str, RouterCounts], k: int) -> Transformer:
    """The bias stays zero."""
    return router_bias


def _whole(table: Table) -> Table:
    """A table whose heads are no batch: they join the outputs, beside each head's width."""
    return {
        axes: (inputs, (axes[1], *outputs) if axes[1].endswith("_heads") and len(axes) == 3 else outputs)
        for axes, (inputs, outputs) in table.items()
    }


@dataclass(frozen=True)
class Arm:
    """One arm: what it changes."""

    overrides: tuple[str, ...] = ()
    model_class: type[Transformer] = Transformer
    table: Table = field(default_factory=lambda: MATRICES)
    rebalance: Rebalance = rebalance


ARMS = {
    "full": Arm(),
    "no_attn_res": Arm(("model.attn_res_block=9",), model_class=PlainTransformer),
    "sign_rule": Arm(rebalance=sign_rule),
    "no_balancing": Arm(rebalance=no_balancing),
    "whole_muon": Arm(table=_whole(MATRICES)),
    "adamw": Arm(("optimizer.learning_rate=1e-3",), table={}),
    "swiglu": Arm(("model.situ_beta=1e4", "model.situ_linear_beta=1e4")),  # both caps out of reach
}


def train(name: str, seed: int, overrides: list[str]) -> Iterator[dict[str, Any]]:
    """Train one arm: a record of every `EVERY`-th step as soon as it is known, then one of the whole."""
    arm = ARMS[name]
    run = load_run(TrainRun, SIBLING, [*arm.overrides, f"seed={seed}", f"data.shuffle_seed={seed}", *overrides])
    corpus = load_corpus(run.data, Tokenizer.bytes())
    held_out = corpus.eval_batches(replace(run.data, shuffle_seed=0), batch_size=run.data.batch_size)
    print(f"{name} {seed}: {corpus}", flush=True)
    iterator = BatchIterator(corpus.train, run.data)
    batches = [jax.tree.map(np.asarray, next(iterator)) for _ in range(run.steps)]  # so that no arm waits for data

    model = jax.jit(lambda: arm.model_class(run.model, jax.random.key(seed), stack=run.stack, remat=run.remat))()
    params, _, rest = split_model(model)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    optimizer = make_optimizer(run.optimizer, params, steps=run.steps, dtype=run.model.dtype, table=arm.table)
    state = init_state(model, optimizer)
    step = jax.jit(make_train_step(run, optimizer, rest, rebalance=arm.rebalance), donate_argnums=0)
    began = time.monotonic()
    compiled = step.lower(state, batches[0]).compile()
    compile_s = time.monotonic() - began
    print(f"{name} {seed}: compiled in {compile_s:.0f} s", flush=True)
    evaluate = jax.jit(make_eval_step(run, rest))

    def point(number: int, metrics: dict[str, Any]) -> dict[str, Any]:
        values = {key: round(float(metrics[key]), 5) for key in KEYS if key in metrics}
        return {"arm": name, "seed": seed, "steps": run.steps, "point": {"step": number, **values}}

    began, pending = time.monotonic(), None
    for number, batch in enumerate(batches, 1):
        state, metrics = compiled(state, batch)
        if number % EVERY == 0:
            if pending:  # read late, so that the device always has work
                yield point(*pending)
                print(f"{name} {seed}: {time.monotonic() - began:.0f} s, step {number} of {run.steps}", flush=True)
            pending = number, metrics
    if pending:
        yield point(*pending)
    seconds = time.monotonic() - began
    tokens = run.data.batch_size * run.data.seq_len * run.steps
    yield {
        "arm": name,
        "seed": seed,
        "parameters": size,
        "steps": run.steps,
        "tokens": tokens,
        "held_out": _held_out(evaluate, state, held_out),
        "seconds": round(seconds, 1),
        "compile_s": round(compile_s, 1),
        "tokens_per_s": round(tokens / seconds),
    }


KEYS = ("loss", "max_load", "dead_experts", "bias_range", "max_logit", "grad_norm")
KEYS += ("head_update_rms/min", "head_update_rms/max", "update_norm/muon")


def _held_out(evaluate: Any, state: TrainState, batches: list[Batch]) -> float:
    sums = [evaluate(state, batch) for batch in batches]
    return float(sum(nats for nats, _ in sums) / sum(tokens for _, tokens in sums))


def read_rows(paths: list[Path]) -> list[dict[str, Any]]:
    """What is known of each arm and seed: its `curve` so far and, where it ended, the record of the whole.

    A later try of an arm and seed takes the place of an earlier one.
    """
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for record in (record for path in paths for record in _read_records(path)):
        key, point = (record["arm"], record["seed"]), record.pop("point", None)
        row = rows.get(key, {"curve": []})
        if point and row["curve"] and row["curve"][-1]["step"] >= point["step"]:
            row = {"curve": []}
        rows[key] = row | record | ({"curve": [*row["curve"], point]} if point else {})
    return list(rows.values())


def _read_records(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as records ({error})") from error


def report(paths: list[Path]) -> None:
    """Print the table of all runs that ended, name the others, and draw the curves as far as they go."""
    rows = read_rows(paths)
    ended = [row for row in rows if "held_out" in row]
    for row in rows:
        if row not in ended:
            print(f"{row['arm']} {row['seed']}: not ended, step {row['curve'][-1]['step']} of {row['steps']}")
    if not any(row["arm"] == "full" for row in ended):
        raise ConfigError("--report: no run of the arm `full` has ended, and all others are compared with it")
    _print_table(ended)
    _draw({name: [row["curve"] for row in rows if row["arm"] == name] for name in ARMS})


def _print_table(rows: list[dict[str, Any]]) -> None:
    full = np.mean([row["held_out"] for row in rows if row["arm"] == "full"])
    print(
        "| arm | held-out nats per byte, by seed | mean | against full | worst max/mean load, last tenth | tokens/s |"
    )
    print("|---|---|---|---|---|---|")
    for name in [name for name in ARMS if any(row["arm"] == name for row in rows)]:
        runs = [row for row in rows if row["arm"] == name]
        nats = [run["held_out"] for run in runs]
        last = [point["max_load"] for run in runs for point in run["curve"][-len(run["curve"]) // 10 :]]
        load = max(last, default=np.nan)  # a run of fewer than `EVERY` steps has no point
        seeds = ", ".join(f"{value:.4f}" for value in nats)
        speed = np.mean([run["tokens_per_s"] for run in runs])
        print(f"| {name} | {seeds} | {np.mean(nats):.4f} | {np.mean(nats) - full:+.4f} | {load:.2f} | {speed:,.0f} |")


def _draw(curves: dict[str, list[list[dict[str, float]]]]) -> None:
    from matplotlib.figure import Figure

    means = {name: _mean_curve(of_arm) for name, of_arm in curves.items() if of_arm}
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    losses, loads = figure.subplots(1, 2)
    for name, mean in means.items():
        both = min(len(mean["loss"]), len(means["full"]["loss"]))
        gap = mean["loss"][:both] - means["full"]["loss"][:both]  # all arms see the same batches
        for axes, values in ((losses, gap), (loads, mean["max_load"])):
            if len(values) >= WINDOW:
                smooth = np.convolve(values, np.ones(WINDOW) / WINDOW, "valid")
                axes.plot(mean["step"][WINDOW // 2 :][: len(smooth)], smooth, label=name, lw=1.2)
    losses.set(xlabel="step", ylabel="training loss less that of full (nats per byte)", ylim=(-0.04, 0.16))
    loads.set(xlabel="step", ylabel="max / mean load of the worst layer", yscale="log")
    for axes in (losses, loads):
        axes.grid(alpha=0.3, which="both")
    losses.legend()
    figure.savefig(PICTURE, dpi=130)


def _mean_curve(curves: list[list[dict[str, float]]]) -> dict[str, np.ndarray]:
    """The mean over seeds of what is drawn, as far as all of them go."""
    points = list(zip(*curves, strict=False))
    return {key: np.array([np.mean([p[key] for p in at]) for at in points]) for key in ("step", "loss", "max_load")}


def _arms(text: str) -> list[str]:
    unknown = next((name for name in text.split(",") if name not in ARMS), None)
    if unknown is not None:
        raise argparse.ArgumentTypeError(f"{unknown}: one of {', '.join(ARMS)}")
    return text.split(",")


def _seeds(text: str) -> list[int]:
    if not all(seed.isdecimal() for seed in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text}: whole numbers with commas between them")
    return [int(seed) for seed in text.split(",")]


def main(arguments: list[str] | None = None) -> int:
    """Run arms one after the other, each record a line as soon as it is known, or report; 2 where it cannot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, nargs="+")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--arms", type=_arms, default=list(ARMS), metavar="NAME,...")
    parser.add_argument("--seeds", type=_seeds, default=[0, 1], metavar="N,...")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args(arguments)
    try:
        if options.report:
            report(options.out)
        else:
            _train_all(options)
    except ConfigError as error:
        print(f"experiments.ablations: {error}", file=sys.stderr)
        return 2
    return 0


def _train_all(options: argparse.Namespace) -> None:
    path: Path = options.out[0]
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"{path}: a file in a folder that exists is needed")
    for seed in options.seeds:
        for name in options.arms:
            for record in train(name, seed, options.set):
                with path.open("a") as out:  # closed at once: a run that is cut off keeps what it knew
                    out.write(json.dumps(record) + "\n")
            print(record, flush=True)


if __name__ == "__main__":
    sys.exit(main())
