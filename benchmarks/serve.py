"""What serving costs on the device at hand, with random weights.

usage: python -m benchmarks.serve throughput [--json OUT] [key=value ...]
       python -m benchmarks.serve context [--json OUT] [--picture OUT.png]

`throughput` answers a batch in which groups of prompts share their beginnings: output tokens a second, time to the
first token and between tokens, prompt tokens that came from the prefix cache; beside it a plain `transformers` generate
loop on a mixture-of-experts model of the same size, where torch and transformers are installed. No figure is told where
the answers are not the model's (`parity`). `context`
measures a decode step against the tokens that each sequence holds, for K3's mix of layers and for latent attention
alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from omegaconf import OmegaConf

from k3jax.config import ModelConfig, load_model_config
from k3jax.nn.param import RouterBias, is_variable
from k3jax.nn.transformer import Transformer
from k3jax.serve.engine import Engine, Sizes
from k3jax.serve.sampler import Sampling
from k3jax.serve.scheduler import Request, Scheduler

CHECKED = 8  # answers that are compared with full forward passes
WORST = 0.5  # standard deviations of the logits by which a settled model's greedy token may be below the largest
TIMES, SLACK = 2.0, 1e-3  # on average: so many times what rounding alone does, and so much more
STEPS = 5  # timed decode steps of a context


@dataclass(kw_only=True)
class Workload:
    """A batch: `groups` of prompts that share `shared` tokens and have `own` more, and `new` tokens for each."""

    model: str = "k3_mini"
    slots: int = 64
    prefill_chunk: int = 512
    prefill_rows: int = 4
    snapshot_mib: int = 512
    latents: str = ""
    requests: int = 256
    groups: int = 8
    shared: int = 1024
    own: int = 128
    new: int = 128

    def prompts(self, vocab: int) -> list[tuple[int, ...]]:
        """Token ids, those of a group not in a row."""
        rng = np.random.default_rng(0)
        shared = rng.integers(0, vocab, (self.groups, self.shared))
        own = rng.integers(0, vocab, (self.requests, self.own))
        return [(*shared[i % self.groups].tolist(), *own[i].tolist()) for i in range(self.requests)]


def make_model(config: ModelConfig, *, weights: str = "") -> Transformer:
    """Random weights in the dtype `weights`, that of the computation where it is empty."""
    make = jax.jit(lambda key: Transformer(config, key, param_dtype=weights or config.dtype))
    return jax.block_until_ready(make(jax.random.key(0)))


def throughput(work: Workload) -> dict[str, Any]:
    """Answer the workload greedily, all requests submitted at once."""
    model = make_model(load_model_config(work.model))
    start = time.perf_counter()
    engine = _engine(model, work)
    compiled = time.perf_counter() - start
    prompts = work.prompts(model.config.vocab_size)
    _answer(engine, prompts[:2], new=4)  # the first call of a program is slower
    alone = _answer(engine, prompts[2:3], new=work.new)[1][0]
    answers, times, scheduler, seconds = _answer(engine, prompts, new=work.new)
    first = [t[0] for t in times]
    between = [_between(t) for t in times]
    return {
        "model": work.model,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(model)),
        "device": jax.devices()[0].device_kind,
        "workload": dataclasses.asdict(work),
        "compile_s": round(compiled, 1),
        "seconds": round(seconds, 2),
        "output_tokens_per_s": round(work.requests * work.new / seconds),
        "prompt_tokens_per_s": round(sum(map(len, prompts)) / seconds),
        "alone": {"first_token_s": round(alone[0], 4), "token_ms": round(_between(alone) * 1e3, 2)},
        "first_token_s": _spread(first),
        "token_ms": {name: round(value * 1e3, 2) for name, value in _spread(between).items()},
        "hit_rate": round(scheduler.cached_tokens / scheduler.prompt_tokens, 3),
        "parity": parity(engine, prompts[:CHECKED], answers[:CHECKED]),
    }


def _engine(model: Transformer, work: Workload) -> Engine:
    sizes = Sizes.of(
        model.config,
        slots=work.slots,
        max_context=work.shared + work.own + work.new,
        prefill_chunk=work.prefill_chunk,
        prefill_rows=work.prefill_rows,
        snapshot_bytes=work.snapshot_mib * 2**20,
        cache_tokens=(work.slots + work.groups) * (work.shared + work.own + work.new + 128),
    )
    return Engine(model, sizes, max_top_logprobs=0, latents=work.latents)


def _answer(
    engine: Engine, prompts: list[tuple[int, ...]], *, new: int
) -> tuple[list[list[int]], list[list[float]], Scheduler, float]:
    """Tokens of every prompt, the time of each since the start, and how long all of it took."""
    scheduler, greedy = Scheduler(engine), Sampling(temperature=0.0)
    for i, prompt in enumerate(prompts):
        scheduler.submit(Request(key=f"{i}", prompt=prompt, max_tokens=new, sampling=greedy, stop_ids=frozenset()))
    answers: list[list[int]] = [[] for _ in prompts]
    times: list[list[float]] = [[] for _ in prompts]
    start = time.perf_counter()
    while scheduler.num_waiting or scheduler.num_running:
        for event in scheduler.step():
            if event.token is None:
                raise RuntimeError(f"request {event.request.key}: {event.error}")
            answers[int(event.request.key)].append(event.token)
            times[int(event.request.key)].append(time.perf_counter() - start)
    return answers, times, scheduler, time.perf_counter() - start


def parity(engine: Engine, prompts: list[tuple[int, ...]], answers: list[list[int]]) -> dict[str, Any]:
    """How far greedy tokens lie below the largest logit of a float32 forward pass, in their standard deviations.

    `free` is of the given answers. With random weights rounding gives nearly every token other experts, and little of
    its logits is left after many layers; `settled` is of such weights that it cannot, in the same programs. Beside the
    `engine` stands what `rounding` alone does: the choices of a full forward pass in the compute dtype.
    """
    model = engine.model
    exact = make_model(dataclasses.replace(model.config, dtype="float32"), weights=model.config.dtype)
    found = {"free": _gaps(model, exact, prompts, answers)}
    engine.model = settled(model)
    answers = _answer(engine, prompts, new=len(answers[0]))[0]
    found["settled"] = _gaps(engine.model, settled(exact), prompts, answers)
    engine.model = model
    return found


def settled(model: Transformer) -> Transformer:
    """The same weights, with biases that give every token the same experts, however its scores are rounded."""

    def settle(variable: nnx.Variable) -> nnx.Variable:
        if not isinstance(variable, RouterBias):
            return variable
        value = variable.get_value()
        chosen = jnp.arange(value.shape[-1]) * model.config.moe.top_k % value.shape[-1] < model.config.moe.top_k
        return variable.replace(jnp.broadcast_to(2.0 * chosen, value.shape))  # scores are between 0 and 1

    return jax.tree.map(settle, model, is_leaf=is_variable)


def _gaps(
    model: Transformer, exact: Transformer, prompts: list[tuple[int, ...]], answers: list[list[int]]
) -> dict[str, Any]:
    """Gaps of answers (`engine`), of the model's own full forward pass (`rounding`), of tokens at random (`any`)."""
    gaps: dict[str, list[np.ndarray]] = {"engine": [], "rounding": [], "any": []}
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens, places = jnp.asarray([[*prompt, *answer]], jnp.int32), slice(len(prompt) - 1, -1)
        logits, ours = np.asarray(exact(tokens)[0, places]), np.asarray(model(tokens)[0, places])
        largest, spread = logits.max(-1), logits.std(-1)
        gaps["any"].append((largest - logits.mean(-1)) / spread)
        for name, choice in (("engine", answer), ("rounding", ours.argmax(-1))):
            gaps[name].append((largest - logits[np.arange(len(answer)), choice]) / spread)
    return {
        name: {"mean": round(float(np.mean(values)), 5), "worst": round(float(np.max(values)), 4)}
        for name, values in gaps.items()
    }


def is_sound(found: dict[str, Any]) -> bool:
    """Whether `parity` found no more than rounding."""
    means = all(gaps["engine"]["mean"] <= TIMES * gaps["rounding"]["mean"] + SLACK for gaps in found.values())
    return means and found["settled"]["engine"]["worst"] <= WORST


def _between(times: list[float]) -> float:
    """Mean time between a request's tokens."""
    return (times[-1] - times[0]) / max(1, len(times) - 1)


def _spread(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=20)
    return {"median": round(statistics.median(values), 5), "p95": round(cuts[-1], 5)}


def plain_loop(work: Workload) -> dict[str, Any] | None:
    """The same prompts, `slots` at a time, through `transformers`; None where it or a GPU is missing."""
    if not all(map(importlib.util.find_spec, ("torch", "transformers"))):
        return None
    import torch
    import transformers

    if not torch.cuda.is_available():
        return None
    c = load_model_config(work.model)
    config = transformers.Qwen3MoeConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.width,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.mla.num_heads,
        num_key_value_heads=c.mla.num_heads,
        head_dim=c.mla.v_dim,
        num_experts=c.moe.num_experts,
        num_experts_per_tok=c.moe.top_k,
        moe_intermediate_size=c.moe.expert_width * c.moe.latent_width // c.width,  # as many weights in an expert
        mlp_only_layers=[0],
        intermediate_size=c.dense_width,
        max_position_embeddings=4096,
        eos_token_id=None,
        bos_token_id=None,
    )
    with torch.device("cuda"):
        model = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).eval()
    prompts = torch.tensor(work.prompts(c.vocab_size)[: work.slots], device="cuda")

    def seconds(new: int) -> float:
        options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": new, "min_new_tokens": new}
        start = time.perf_counter()
        out = model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
        torch.cuda.synchronize()
        assert out.shape[1] == prompts.shape[1] + new
        return time.perf_counter() - start

    seconds(2)  # the first calls are slower
    first, whole = seconds(1), seconds(work.new)
    return {
        "model": f"transformers {transformers.__version__} Qwen3Moe",
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": round(whole, 2),
        "output_tokens_per_s": round(len(prompts) * work.new / whole),
        "first_token_s": round(first, 4),
        "token_ms": round((whole - first) / (work.new - 1) * 1e3, 2),
    }


def k3_shaped(mla_layers: list[int]) -> ModelConfig:
    """Eight layers with K3's mixers at full width and a small MoE: the mixers are what the context costs."""
    changes = {
        "name": "k3_shaped",
        "num_layers": 8,
        "mla_layers": mla_layers,
        "vocab_size": 512,
        "media_id": 277,
        "dense_width": 7168,
        "quantized_experts": False,
        "moe": {"num_experts": 16, "top_k": 4, "expert_width": 512},
    }
    merged = OmegaConf.merge(OmegaConf.structured(load_model_config("k3")), changes)
    config = OmegaConf.to_object(merged)
    assert isinstance(config, ModelConfig)
    return config.validate()


def context(rows: int, longest: int) -> Iterator[dict[str, Any]]:
    """Milliseconds of a decode step of `rows` sequences, and bytes that a sequence keeps, by tokens it holds."""
    for name, layers in (("KDA:MLA 3:1", [3, 7]), ("MLA only", list(range(8)))):
        config, page = k3_shaped(layers), 128
        width = -(-(longest + 1) // page)
        sizes = Sizes(
            slots=rows, snapshots=0, pages=1 + rows * width, page=page, table_width=width, prefill_chunk=2 * page
        )
        engine = Engine(make_model(config), sizes, max_top_logprobs=0)
        table = np.arange(1, 1 + rows * width, dtype=np.int32).reshape(rows, width)
        for length in _lengths(longest):
            held = np.full(rows, length, np.int32)
            step = partial(engine.decode, np.zeros(rows, np.int32), held, table, logprobs=False)
            row = {"layers": name, "tokens": length, "rows": rows, "step_ms": _median_ms(step)}
            yield row | {"bytes": sequence_bytes(config, length)}
        del engine, step


def _lengths(longest: int) -> list[int]:
    return [length for length in (4**n for n in range(6, 20)) if length <= longest]


def sequence_bytes(config: ModelConfig, tokens: int) -> int:
    """What one sequence keeps: its KDA states and conv history, and its latents."""
    num_mla, kda, mla = len(config.mla_layers), config.kda, config.mla
    itemsize = jnp.dtype(config.dtype).itemsize
    state = kda.num_heads * kda.head_dim * (4 * kda.head_dim + 3 * (kda.conv_width - 1) * itemsize)
    return (config.num_layers - num_mla) * state + num_mla * tokens * (mla.kv_rank + mla.extra_dim) * itemsize


def _median_ms(step: Callable[[], Any]) -> float:
    step()
    samples = []
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        samples.append(time.perf_counter() - start)
    return round(statistics.median(samples) * 1e3, 3)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Step time and bytes a sequence against the context, a line for each mix of layers."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for name in dict.fromkeys(row["layers"] for row in rows):
        mine = [row for row in rows if row["layers"] == name]
        tokens = [row["tokens"] for row in mine]
        axes[0].plot(tokens, [row["step_ms"] for row in mine], marker="o", label=name)
        axes[1].plot(tokens, [row["bytes"] / 2**30 for row in mine], marker="o", label=name)
    for axis, label in zip(axes, ("ms a decode step", "GiB a sequence keeps"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel=label)
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> int:
    """Print the figures as JSON; exit code 1 where the answers are wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("throughput", "context"))
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--picture", type=Path, metavar="OUT", help="context only")
    parser.add_argument("--rows", type=int, default=4, help="context only: sequences that decode together")
    parser.add_argument("--longest", type=int, default=2**20, help="context only: tokens")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="throughput only: keys of Workload")
    options = parser.parse_intermixed_args(arguments)
    found: Any
    if options.what == "context":
        found = []
        for row in context(options.rows, options.longest):
            print(row, flush=True)
            found.append(row)
            _write(found, options.json)
        if options.picture:
            draw(found, options.picture)
    else:
        work = OmegaConf.to_object(OmegaConf.merge(Workload, OmegaConf.from_dotlist(options.overrides)))
        assert isinstance(work, Workload)
        found = {"k3jax": throughput(work)}
        print(json.dumps(found["k3jax"]), flush=True)
        if not is_sound(found["k3jax"]["parity"]):
            print("no throughput: the answers are not the model's", file=sys.stderr)
            return 1
        _write(found, options.json)
        found["plain"] = plain_loop(work)
        print(json.dumps(found, indent=1))
        _write(found, options.json)
    return 0


def _write(found: Any, path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
