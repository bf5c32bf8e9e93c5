"""Slots, chunks and events, on an engine that answers from a table."""

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
