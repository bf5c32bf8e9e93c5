"""What serving costs on the device at hand, with random weights.

usage: python -m benchmarks.serve throughput [--json OUT] [key=value ...]
       python -m benchmarks.serve context [--json OUT] [--picture OUT.png]

`throughput` answers a batch in which groups of prompts share their beginnings: output tokens a second, time to the
first token and between tokens, prompt tokens that came from the prefix cache; beside it a plain `transformers` generate
loop on a mixture-of-experts model of about the same size, where torch and transformers are installed. `context`
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
from omegaconf import OmegaConf

from k3jax.config import ModelConfig, load_model_config
from k3jax.nn.transformer import Transformer
from k3jax.serve.engine import Engine, Sizes
from k3jax.serve.sampler import Sampling
from k3jax.serve.scheduler import Request, Scheduler

PARITY = 0.5  # standard deviations of the logits by which a greedy token may be below a full forward pass's largest
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


def make_model(config: ModelConfig) -> Transformer:
    """Random weights in the compute dtype."""
    make = jax.jit(lambda key: Transformer(config, key, param_dtype=config.dtype))
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
        "parity": parity(model, prompts[0], answers[0]),
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


def parity(model: Transformer, prompt: tuple[int, ...], answer: list[int]) -> dict[str, float]:
    """How far, in standard deviations of the logits, greedy tokens are below a full forward pass's largest.

    The first token comes from the prefill program, the others from the decode program.
    """
    logits = model(jnp.asarray([[*prompt, *answer]], jnp.int32))[0, len(prompt) - 1 : -1]
    gaps = jnp.max(logits, axis=-1) - logits[jnp.arange(len(answer)), jnp.asarray(answer)]
    gaps = gaps / jnp.std(logits, axis=-1)
    return {"first": round(float(gaps[0]), 4), "worst": round(float(jnp.max(gaps)), 4)}


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
        moe_intermediate_size=c.moe.expert_width,
        intermediate_size=c.dense_width,
        max_position_embeddings=4096,
        eos_token_id=None,
        bos_token_id=None,
    )
    with torch.device("cuda"):
        model = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).eval()
    prompts = torch.tensor(work.prompts(c.vocab_size)[: work.slots], device="cuda")
    options = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompts)}
    model.generate(prompts, max_new_tokens=2, min_new_tokens=2, **options)
    torch.cuda.synchronize()
    start = time.perf_counter()
    out = model.generate(prompts, max_new_tokens=work.new, min_new_tokens=work.new, **options)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return {
        "model": f"transformers {transformers.__version__} Qwen3Moe",
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": round(seconds, 2),
        "output_tokens_per_s": round((out.shape[1] - prompts.shape[1]) * len(prompts) / seconds),
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
        if not found["k3jax"]["parity"]["worst"] <= PARITY:
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
