"""Long runs of the engine, by hand (make soak)."""

import jax
import numpy as np
import pytest

from k3jax.config import load_model_config
from k3jax.nn.transformer import Transformer
from k3jax.serve.engine import Engine, Sizes
from k3jax.serve.sampler import Sampling
from k3jax.serve.scheduler import Request, Scheduler

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3000)]
LONG = 100_000


def request(key: str, prompt: tuple[int, ...], max_tokens: int) -> Request:
    sampling = Sampling(temperature=0.7, seed=int(key))
    return Request(key=key, prompt=prompt, max_tokens=max_tokens, sampling=sampling, stop_ids=frozenset())


def test_a_prompt_of_100_000_tokens_and_short_ones_beside_it() -> None:
    config = load_model_config("k3_tiny", [f"max_context={LONG + 1000}"])
    model = Transformer(config, jax.random.key(0))
    sizes = Sizes.of(config, slots=4, max_context=LONG + 100, prefill_chunk=512, cache_tokens=2 * LONG)
    engine = Engine(model, sizes, max_top_logprobs=0)
    longer = engine.temporary_bytes
    scheduler, rng = Scheduler(engine), np.random.default_rng(0)
    scheduler.submit(request("0", tuple(rng.integers(0, 256, LONG).tolist()), 20))
    for i in range(1, 30):
        scheduler.submit(request(f"{i}", tuple(rng.integers(0, 256, 50).tolist()), 20))
    order = []
    while scheduler.num_running or scheduler.num_waiting:
        order += [event.request.key for event in scheduler.step() if event.finish == "length"]
    assert order[-1] == "0"
    assert len(order) == 30
    short = Engine(model, Sizes.of(config, slots=4, max_context=1000, prefill_chunk=512), max_top_logprobs=0)
    assert longer < 1.1 * short.temporary_bytes


def test_2000_requests_with_cancellations_leave_nothing_behind(model) -> None:
    sizes = Sizes.of(model.config, slots=8, max_context=256, prefill_chunk=16, cache_tokens=900, snapshot_bytes=2**18)
    engine = Engine(model, sizes, max_top_logprobs=0)
    rng, scheduler = np.random.default_rng(0), Scheduler(engine, snapshot_every=64)
    beginnings = [tuple(rng.integers(0, 512, length).tolist()) for length in (40, 100, 200)]
    serial: dict[str, list[int]] = {}
    found: dict[str, list[int]] = {}
    sent = []
    for i in range(2000):
        own = tuple(rng.integers(0, 512, rng.integers(1, 40)).tolist())
        sent.append(request(f"{i}", (*(beginnings[i % 3] if i % 2 else ()), *own), int(rng.integers(1, 15))))
        scheduler.submit(sent[-1])
        if rng.random() < 0.2:
            scheduler.release(sent[int(rng.integers(len(sent)))])
        while scheduler.num_waiting > 20:
            for event in scheduler.step():
                found.setdefault(event.request.key, []).append(event.token)
    while scheduler.num_running or scheduler.num_waiting:
        for event in scheduler.step():
            found.setdefault(event.request.key, []).append(event.token)
    whole = [one for one in sent if len(found.get(one.key, [])) == one.max_tokens]
    assert len(whole) > 1500
    alone = Scheduler(engine)
    for one in whole[::20]:
        alone.submit(one)
        while alone.num_running or alone.num_waiting:
            for event in alone.step():
                serial.setdefault(event.request.key, []).append(event.token)
    assert serial == {key: found[key] for key in serial}
    while scheduler._shares[0].prefixes.evict():
        pass
    assert scheduler.num_free_pages == sizes.pages - 1
