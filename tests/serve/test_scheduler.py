"""Slots, chunks and events, on an engine that answers from a table."""

from dataclasses import replace

import numpy as np
import pytest

from k3jax.serve.sampler import Sampling
from k3jax.serve.scheduler import Event, Request, Scheduler


def request(prompt: str, *, max_tokens: int = 100, key: str = "") -> Request:
    ids = tuple(prompt.encode())
    stop_ids = frozenset({257, 258})
    return Request(key=key or prompt, prompt=ids, max_tokens=max_tokens, sampling=Sampling(), stop_ids=stop_ids)


def drain(scheduler: Scheduler) -> dict[str, list[Event]]:
    events: dict[str, list[Event]] = {}
    while scheduler.num_waiting or scheduler.num_running:
        for event in scheduler.step():
            events.setdefault(event.request.key, []).append(event)
    return events


def text(events: list[Event]) -> bytes:
    return bytes(event.token for event in events if event.token is not None and event.token < 256)


def test_every_request_gets_its_own_answer_whatever_the_order(table_engine) -> None:
    prompts = ["a", "bcdef", "ghij", "klmnopqrstuvw", "xy", "z", "0123456789"]
    for order in (prompts, prompts[::-1]):
        scheduler = Scheduler(table_engine(lambda prompt: prompt[::-1]))
        for prompt in order:
            scheduler.submit(request(prompt))
        events = drain(scheduler)
        assert {key: text(got) for key, got in events.items()} == {p: p.encode()[::-1] for p in prompts}
        assert all([e.finish for e in got] == [None] * (len(got) - 1) + ["stop"] for got in events.values())


def test_max_tokens_ends_with_length(table_engine) -> None:
    scheduler = Scheduler(table_engine(lambda prompt: b"abcdef"))
    scheduler.submit(request("p", max_tokens=4))
    scheduler.submit(request("q", max_tokens=1))
    events = drain(scheduler)
    assert text(events["p"]) == b"abcd"
    assert [e.finish for e in events["p"]] == [None, None, None, "length"]
    assert [(e.token, e.finish) for e in events["q"]] == [(97, "length")]


def test_the_end_id_at_max_tokens_counts_as_stop(table_engine) -> None:
    scheduler = Scheduler(table_engine(lambda prompt: b"ab"))
    scheduler.submit(request("p", max_tokens=3))
    assert [e.finish for e in drain(scheduler)["p"]] == [None, None, "stop"]


def test_prompts_are_fed_in_chunks_and_slots_decode_together(table_engine) -> None:
    engine = table_engine(lambda prompt: b"xyz", slots=2, prefill_chunk=4)
    scheduler = Scheduler(engine)
    for prompt in ("abcdefghi", "q"):
        scheduler.submit(request(prompt))
    drain(scheduler)
    assert engine.fed == [(0, b(b"abcd")), (1, b(b"q")), (0, b(b"efgh")), (0, b(b"i"))]
    # "q" decodes while the long prompt is still read: 3 steps alone or shared, and 2 more for the other.
    assert engine.calls == {"prefill": 4, "decode": 5}


def b(raw: bytes) -> tuple[int, ...]:
    return tuple(raw)


def test_a_released_request_sends_nothing_more_and_its_slot_is_reused(table_engine) -> None:
    scheduler = Scheduler(table_engine(lambda prompt: prompt * 5, slots=1))
    first, second = request("aaa"), request("b")
    scheduler.submit(first)
    scheduler.submit(second)
    assert [e.request.key for e in scheduler.step()] == ["aaa"]
    scheduler.release(first)
    events = drain(scheduler)
    assert set(events) == {"b"}
    assert text(events["b"]) == b"bbbbb"


def test_a_request_can_be_released_while_it_waits(table_engine) -> None:
    scheduler = Scheduler(table_engine(lambda prompt: prompt, slots=1))
    first, second, third = request("a"), request("b"), request("c")
    for one in (first, second, third):
        scheduler.submit(one)
    scheduler.release(second)
    assert set(drain(scheduler)) == {"a", "c"}


def test_logits_that_are_not_finite_end_one_request_only(table_engine) -> None:
    scheduler = Scheduler(table_engine(lambda prompt: None if prompt == b"bad" else b"ok"))
    for prompt in ("fine", "bad", "good"):
        scheduler.submit(request(prompt))
    events = drain(scheduler)
    assert [(e.token, e.finish, e.error.code) for e in events["bad"]] == [(None, "error", "non_finite_logits")]
    assert text(events["fine"]) == text(events["good"]) == b"ok"


def with_cache(table_engine, **options):
    """An engine of chunks of 4 and pages of 2 that keeps states; it checks state and pages at every token."""
    return table_engine(lambda prompt: prompt[-3:], **{"slots": 2, "snapshots": 8, "pages": 60, **options})


def cached(events: dict[str, list[Event]]) -> dict[str, int]:
    return {key: got[-1].cached_tokens for key, got in events.items()}


def serve_all(scheduler: Scheduler, *prompts: str) -> dict[str, int]:
    """Answer prompts one after the other, check the answers, and say how much of each was cached."""
    found = {}
    for number, prompt in enumerate(prompts):
        key = f"{number} {prompt}"
        scheduler.submit(request(prompt, key=key))
        events = drain(scheduler)
        assert text(events[key]) == prompt.encode()[-3:]
        found[prompt] = cached(events)[key]
    return found


def test_a_prompt_of_130_tokens_with_pages_of_64_resumes_at_128(table_engine) -> None:
    engine = with_cache(table_engine, prefill_chunk=64, page=64)
    scheduler, prompt = Scheduler(engine), "x" * 127 + "abc"
    assert serve_all(scheduler, prompt) == {prompt: 0}
    assert serve_all(scheduler, prompt) == {prompt: 128}
    assert [len(tokens) for _, tokens in engine.fed] == [64, 64, 2, 2]
    assert (scheduler.prompt_tokens, scheduler.cached_tokens) == (260, 128)


@pytest.mark.parametrize(("length", "expected"), [(3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (11, 8), (12, 8)])
def test_one_token_at_least_is_always_read(table_engine, length: int, expected: int) -> None:
    scheduler, prompt = Scheduler(with_cache(table_engine), snapshot_every=4), "abcdefghijkl"[:length]
    serve_all(scheduler, prompt)
    assert serve_all(scheduler, prompt) == {prompt: expected}


def test_turns_of_a_conversation_read_only_what_is_new(table_engine) -> None:
    """What was generated is read again by the next turn, in chunks: a state is only kept where chunks end."""
    turns = ["system+user1", "system+user1er1+user2", "system+user1er1+user2er2+user3"]
    assert serve_all(Scheduler(with_cache(table_engine)), *turns) == dict(zip(turns, (0, 12, 20), strict=True))


def test_states_are_kept_where_prompts_part_and_at_the_end_of_what_is_shared(table_engine) -> None:
    scheduler = Scheduler(with_cache(table_engine))
    prompts = [f"common prefix {i} and more" for i in range(3)]
    assert serve_all(scheduler, *prompts) == dict(zip(prompts, (0, 0, 12), strict=True))
    told = Scheduler(with_cache(table_engine))
    first, second = (replace(request(prompt), shared_tokens=13) for prompt in prompts[:2])
    for one in (first, second):
        told.submit(one)
        events = drain(told)
    assert cached(events) == {second.key: 12}


def test_states_are_kept_in_intervals(table_engine) -> None:
    long = "abcdefghijklmnopqrstuvwxyz"
    scheduler = Scheduler(with_cache(table_engine), snapshot_every=8)
    assert serve_all(scheduler, long, long[:17] + "#") == {long: 0, long[:17] + "#": 16}


def test_a_prompt_waits_for_one_that_reads_the_same(table_engine) -> None:
    """Submitted together: the first one reads what is shared, once, while others of another kind go on."""
    engine = with_cache(table_engine, slots=4)
    scheduler = Scheduler(engine)
    prompts = ["shared beginning 1", "shared beginning 2", "other", "shared beginning 3"]
    for prompt in prompts:
        scheduler.submit(request(prompt))
    first = scheduler.step()
    assert [event.request.key for event in first] == []
    assert {slot for slot, _ in engine.fed} == {0, 1}
    events = drain(scheduler)
    assert cached(events) == dict(zip(prompts, (0, 16, 0, 16), strict=True))
    assert all(text(events[prompt]) == prompt.encode()[-3:] for prompt in prompts)


def test_choices_of_one_prompt_read_it_once(table_engine) -> None:
    scheduler = Scheduler(with_cache(table_engine, slots=4))
    for choice in range(3):
        scheduler.submit(request("abcdefghij", key=f"{choice}"))
    assert cached(drain(scheduler)) == {"0": 0, "1": 8, "2": 8}


@pytest.mark.parametrize("snapshots", [0, 8])
def test_when_pages_run_out_the_youngest_waits_and_no_answer_changes(table_engine, snapshots: int) -> None:
    """Four sequences of up to 26 tokens in 15 pages of 2: they cannot all go on together."""
    engine = table_engine(lambda prompt: prompt * 3, slots=4, pages=16, snapshots=snapshots)
    scheduler, prompts = Scheduler(engine), ["abcdef", "bcdefg", "cdefgh", "defghi", "abcdeg", "z"]
    suspended = []
    suspend = scheduler._suspend
    scheduler._suspend = lambda sequence: (suspended.append(sequence.request.key), suspend(sequence))
    for prompt in prompts:
        scheduler.submit(request(prompt))
    events = drain(scheduler)
    assert {key: text(got) for key, got in events.items()} == {p: p.encode() * 3 for p in prompts}
    assert all([e.finish for e in got] == [None] * (len(got) - 1) + ["stop"] for got in events.values())
    assert suspended
    assert "abcdef" not in suspended, "the oldest always goes on"
    assert everything_is_free(scheduler)


def everything_is_free(scheduler: Scheduler) -> bool:
    while any(share.prefixes.evict() for share in scheduler._shares):
        pass
    return scheduler.num_free_pages == scheduler._sizes.pages - scheduler._sizes.shares and not scheduler.num_running


def test_a_sequence_that_fills_the_whole_pool_is_served(table_engine) -> None:
    engine = table_engine(lambda prompt: b"y" * 20, slots=2, pages=16, snapshots=4)
    scheduler = Scheduler(engine)
    scheduler.submit(request("abcdefghi", max_tokens=21))  # 9 + 21 tokens in 15 pages
    scheduler.submit(request("j"))
    events = drain(scheduler)
    assert text(events["abcdefghi"]) == text(events["j"]) == b"y" * 20


def test_a_long_prompt_delays_nobody_by_more_than_a_chunk_a_step(table_engine) -> None:
    engine = with_cache(table_engine, slots=3, pages=300)
    scheduler = Scheduler(engine)
    scheduler.submit(request("0123456789" * 40))
    for prompt in ("one", "two", "six"):
        scheduler.submit(request(prompt))
    done: list[str] = []
    for _ in range(12):
        done += [event.request.key for event in scheduler.step() if event.finish]
    assert done == ["one", "two", "six"]


def test_a_request_goes_to_the_share_that_has_its_beginning_or_most_room(table_engine) -> None:
    engine = with_cache(table_engine, shares=3)
    scheduler, prompt = Scheduler(engine), "a long beginning "
    serve_all(scheduler, prompt + "x")
    scheduler.submit(request("something else", key="other"))
    scheduler.step()
    assert serve_all(scheduler, prompt + "y") == {prompt + "y": 16}
    slots = [slot // 2 for slot, tokens in engine.fed if tokens in (tuple(b"a lo"), tuple(b"some"), tuple(b" y"))]
    assert slots == [0, 1, 0]


def test_rows_of_one_prefill_call_answer_as_alone(table_engine) -> None:
    engine = with_cache(table_engine, slots=4, prefill_rows=3)
    scheduler, prompts = Scheduler(engine), ["abcdefg", "hi", "jklmnopqrstu", "vwxyz"]
    for prompt in prompts:
        scheduler.submit(request(prompt))
    assert {key: text(got) for key, got in drain(scheduler).items()} == {p: p.encode()[-3:] for p in prompts}
    assert engine.calls["prefill"] < 7


@pytest.mark.parametrize("shares", [1, 3])
def test_random_load_with_cancellations_leaves_nothing_behind(table_engine, shares: int) -> None:
    rng = np.random.default_rng(0)
    reply = lambda prompt: prompt[: len(prompt) // 2]  # noqa: E731
    engine = table_engine(reply, slots=4 if shares == 1 else 2, pages=24, snapshots=5, prefill_rows=2, shares=shares)
    scheduler, expected, found = Scheduler(engine, snapshot_every=8), {}, {}
    in_flight: list[Request] = []
    for number in range(400):
        prompt = "".join(rng.choice(list("ab"), rng.integers(1, 24)))
        one = request(prompt, key=f"{number}")
        expected[one.key] = prompt.encode()[: len(prompt) // 2]
        scheduler.submit(one)
        in_flight.append(one)
        if rng.random() < 0.1:
            gone = in_flight[int(rng.integers(len(in_flight)))]
            scheduler.release(gone)
            expected.pop(gone.key, None)
        for event in scheduler.step():
            found.setdefault(event.request.key, []).append(event)
        in_flight = [r for r in in_flight if not any(e.finish for e in found.get(r.key, []))]
    for key, events in drain(scheduler).items():
        found.setdefault(key, []).extend(events)
    finished = {key: text(got) for key, got in found.items() if got[-1].finish}
    assert {key: finished[key] for key in expected} == expected
    assert scheduler.cached_tokens > 0
    assert everything_is_free(scheduler)
