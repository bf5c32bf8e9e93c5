"""The compiled engine on a tiny model: equal to the model itself, and no request sees another."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config import ServeRun
from k3jax.nn.transformer import Transformer
from k3jax.quant.qat import quantize_experts
from k3jax.serve.engine import Chunk, Engine
from k3jax.serve.run import Loaded
from k3jax.serve.sampler import Sampling, token_bits
from k3jax.serve.scheduler import Event, Request, Scheduler
from tests.serve.conftest import BYTES, RECIPE, random_model

LENGTHS = (1, 7, 8, 9, 16, 17, 40, 90)  # around one and two chunks of 8, and many


def prompt(index: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng((index, length)).integers(0, 512, length).tolist())


def requests(lengths=LENGTHS, *, top_logprobs: int | None = None, **sampling) -> list[Request]:
    return [
        Request(
            key=f"{i}",
            prompt=prompt(i, length),
            max_tokens=6,
            sampling=Sampling(**{"seed": i, **sampling}),
            stop_ids=frozenset(),
            top_logprobs=top_logprobs,
        )
        for i, length in enumerate(lengths)
    ]


def run(engine: Engine, submitted: list[Request]) -> dict[str, list[Event]]:
    scheduler = Scheduler(engine)
    for request in submitted:
        scheduler.submit(request)
    events: dict[str, list[Event]] = {request.key: [] for request in submitted}
    while scheduler.num_waiting or scheduler.num_running:
        for event in scheduler.step():
            events[event.request.key].append(event)
    return events


def tokens(events: dict[str, list[Event]]) -> dict[str, list[int | None]]:
    return {key: [event.token for event in got] for key, got in events.items()}


def full_forward(model, sequences: list[list[int]]) -> np.ndarray:
    """Logits of whole sequences in one pass; what follows a sequence is padding that a causal model never sees."""
    width = max(map(len, sequences))
    return np.asarray(model(jnp.asarray([[*s, *[0] * (width - len(s))] for s in sequences], jnp.int32)))


@pytest.mark.soak  # both equal the full forward pass: here, and in tests/nn
def test_greedy_tokens_equal_generate(engine, model) -> None:
    submitted = requests((17, 17, 17, 17), temperature=0.0)
    expected = model.generate(jnp.asarray([r.prompt for r in submitted]), max_new_tokens=6)
    assert list(tokens(run(engine, submitted)).values()) == expected.tolist()


def check_against_the_full_forward_pass(engine: Engine, model: Transformer) -> None:
    submitted = requests(temperature=0.0, top_logprobs=3)
    events = run(engine, submitted)
    logits = full_forward(model, [[*r.prompt, *tokens(events)[r.key]] for r in submitted])
    logprobs = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    for row, request in enumerate(submitted):
        for step, event in enumerate(events[request.key]):
            expected = logprobs[row, len(request.prompt) - 1 + step]
            assert event.token == expected.argmax()
            assert abs(event.logprobs.logprob - expected[event.token]) < 1e-4
            assert [token for token, _ in event.logprobs.top] == np.argsort(-expected)[:3].tolist()
            np.testing.assert_allclose(
                [value for _, value in event.logprobs.top], np.sort(expected)[::-1][:3], atol=1e-4
            )


def test_logprobs_and_greedy_choices_equal_the_full_forward_pass(engine, model) -> None:
    check_against_the_full_forward_pass(engine, model)


def test_mxfp4_experts_are_served_as_the_full_forward_pass_has_them(config) -> None:
    wide = dataclasses.replace(config, moe=dataclasses.replace(config.moe, latent_width=32))  # whole blocks of MXFP4
    model = quantize_experts(random_model(wide, 1))
    jobs = Loaded(run=ServeRun(**RECIPE), model=model, tokenizer=BYTES).jobs(lambda _: None)
    check_against_the_full_forward_pass(jobs.scheduler._device, model)


def test_draws_do_not_depend_on_batch_mates_order_or_slots(engine) -> None:
    submitted = [
        dataclasses.replace(
            request,
            sampling=dataclasses.replace(
                request.sampling, top_p=top_p, temperature=temperature, min_p=0.01, frequency_penalty=1 - top_p
            ),
        )
        for request, top_p, temperature in zip(requests(), [1, 0.8, 1, 0.5] * 2, [1.0, 0.7, 1.5, 1.0] * 2, strict=True)
    ]
    together = tokens(run(engine, submitted))
    assert tokens(run(engine, submitted[::-1])) == together
    assert tokens(run(engine, submitted[3:] + submitted[:3])) == together
    for request in submitted:
        assert tokens(run(engine, [request]))[request.key] == together[request.key]


def test_penalties_see_the_prompt_and_what_was_generated_and_nothing_older(engine) -> None:
    """Three tokens lead by far; one that has been seen falls behind the others."""
    leading = {"logit_bias": tuple((token, 100.0) for token in (5, 6, 7)), "temperature": 0.0}
    for _ in range(2):  # the second round reuses the slots
        submitted = [
            dataclasses.replace(request, prompt=(first, 1, 2), max_tokens=3)
            for first, request in zip((5, 6, 1), requests((9,) * 3, **leading, repetition_penalty=1.1), strict=True)
        ]
        for request, drawn in zip(submitted, tokens(run(engine, submitted)).values(), strict=True):
            unseen = {5, 6, 7} - {request.prompt[0]}
            assert set(drawn[: len(unseen)]) == unseen
    (frequency,) = requests((9,), **leading, frequency_penalty=50.0)
    drawn = tokens(run(engine, [frequency]))["0"]
    assert set(drawn[:3]) == set(drawn[3:]) == {5, 6, 7}


def test_choices_of_one_request_draw_apart(engine) -> None:
    (base,) = requests((9,), temperature=1.5)
    one, two = (
        dataclasses.replace(base, key=f"{choice}", sampling=dataclasses.replace(base.sampling, choice=choice))
        for choice in range(2)
    )
    drawn = tokens(run(engine, [one, two]))
    assert drawn["0"] != drawn["1"]
    assert tokens(run(engine, [two]))["1"] == drawn["1"]


def test_a_seed_reproduces_a_draw_and_another_changes_it(engine) -> None:
    base = requests((9,), temperature=1.5)[0]
    draws = [
        tokens(run(engine, [dataclasses.replace(base, sampling=Sampling(temperature=1.5, seed=seed))]))["0"]
        for seed in (5, 5, 6, 5 + 2**32)
    ]
    assert draws[0] == draws[1]
    assert draws[2] != draws[0] != draws[3]


def test_a_poisoned_slot_ends_its_request_and_is_clean_for_the_next(engine) -> None:
    submitted = requests((9, 10, 11), temperature=0.0)
    expected = tokens(run(engine, submitted))
    scheduler = Scheduler(engine)
    for request in submitted:
        scheduler.submit(request)
    events = {request.key: [] for request in submitted}
    for _ in range(3):
        for event in scheduler.step():
            events[event.request.key].append(event)
    poison(engine, slots=[1], pages=scheduler._table[1])
    while scheduler.num_running:
        for event in scheduler.step():
            events[event.request.key].append(event)
    assert (events["1"][-1].token, events["1"][-1].finish) == (None, "error")
    assert tokens(events)["0"] == expected["0"]
    assert tokens(events)["2"] == expected["2"]
    assert tokens(run(engine, submitted)) == expected


def test_poison_in_everything_that_nobody_holds_reaches_nobody(engine) -> None:
    submitted = requests((9, 16, 40), temperature=0.0)
    expected = tokens(run(engine, submitted))
    poison(engine, slots=range(3), pages=np.arange(1, engine.sizes.pages))
    assert tokens(run(engine, submitted)) == expected


def poison(engine: Engine, *, slots, pages) -> None:
    """Fill what slots and pages hold with NaN."""
    pools, pages = engine._pools, np.asarray([page for page in pages if page >= 0])
    engine._pools = dataclasses.replace(
        pools,
        state=pools.state.at[:, np.asarray(slots)].set(jnp.nan),
        history=pools.history.at[:, np.asarray(slots)].set(jnp.nan),
        pages=jax.tree.map(lambda x: x.at[:, pages].set(jnp.nan), pools.pages),
    )


def test_rows_without_a_token_leave_the_pools_bit_equal(engine) -> None:
    run(engine, requests((20, 30, 40)))
    before = jax.device_get(engine._pools)
    table = np.full((3, engine.sizes.table_width), -1, np.int32)
    table[:, :12] = np.arange(1, 37).reshape(3, 12)
    engine.decode(np.asarray([1, 2, 3], np.int32), np.asarray([0, 9, 0], np.int32), table, logprobs=False)
    after = jax.device_get(engine._pools)
    np.testing.assert_array_equal(np.delete(before.state, 1, axis=1), np.delete(after.state, 1, axis=1))
    np.testing.assert_array_equal(np.delete(before.history, 1, axis=1), np.delete(after.history, 1, axis=1))
    written = table[1, 9 // engine.sizes.page]
    for old, new in zip(jax.tree.leaves(before.pages), jax.tree.leaves(after.pages), strict=True):
        np.testing.assert_array_equal(np.delete(old, written, axis=1), np.delete(new, written, axis=1))
    engine.decode(np.asarray([1, 2, 3], np.int32), np.zeros(3, np.int32), table, logprobs=False)
    engine.prefill([], logprobs=False)
    jax.tree.map(np.testing.assert_array_equal, after, jax.device_get(engine._pools))


def chunk(engine: Engine, slot: int, ids: list[int]) -> Chunk:
    pages = np.full(engine.sizes.table_width, -1, np.int32)
    pages[0] = 1
    seen = token_bits(ids, 512)
    return Chunk(slot=slot, start=0, tokens=ids, pages=pages, seen=seen, sampling=Sampling())


def test_the_pools_are_updated_in_place(engine) -> None:
    table = np.full((3, engine.sizes.table_width), -1, np.int32)
    for step in (
        lambda: engine.prefill([chunk(engine, 1, [5, 6])], logprobs=False),
        lambda: engine.decode(np.zeros(3, np.int32), np.zeros(3, np.int32), table, logprobs=False),
        lambda: engine.copy(1, 2),
        lambda: engine.clear([1]),
    ):
        before = jax.tree.leaves(engine._pools)
        pointers = {leaf.unsafe_buffer_pointer() for leaf in before}
        step()
        assert all(leaf.is_deleted() for leaf in before)
        assert {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(engine._pools)} == pointers


@pytest.mark.parametrize("slot", [-1, 3])
def test_a_slot_that_does_not_exist_is_refused_not_clipped(engine, slot: int) -> None:
    before = jax.device_get(engine._pools)
    with pytest.raises(IndexError, match=f"slot {slot} of 3"):
        engine.prefill([chunk(engine, slot, [1, 2])], logprobs=False)
    with pytest.raises(IndexError, match="slot"):
        engine.copy(0, slot if slot < 0 else 3 + engine.sizes.snapshots)
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(engine._pools))


def test_all_programs_are_compiled_before_the_first_request(engine, compile_messages, caplog) -> None:
    assert compile_messages == ["compiling prefill [1, 8]", "compiling decode [3, 1]"]
    with jax.log_compiles():
        run(engine, requests((3, 20), temperature=0.5, top_p=0.9, top_k=4))
        assert not [record.getMessage() for record in caplog.records if "ompiling" in record.getMessage()]
        jax.jit(lambda x: x * 3 + 1)(jnp.ones(7))  # what the line above would have caught
        assert [record.getMessage() for record in caplog.records if "ompiling" in record.getMessage()]
