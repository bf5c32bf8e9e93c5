"""JSON answers: whatever a model prefers, what it may write keeps to the schema, in the response channel only."""

import json
import random

import numpy as np
import pytest

from k3jax.serve.constraint import Constraint, ConstraintError, Guide, response_schema
from k3jax.serve.fields import RequestError
from k3jax.serve.sampler import Sampling
from k3jax.serve.scheduler import Request, Scheduler
from k3jax.text import ParsedCompletion, Tokenizer, parse_completion

pytest.importorskip("llguidance")

BYTES = Tokenizer.bytes()
SCHEMA = {
    "type": "object",
    "properties": {"城": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["城", "days"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["bytes", "merges"])
def vocabulary(request, golden) -> Tokenizer:
    return BYTES if request.param == "bytes" else Tokenizer.from_dir(golden / "chat" / "tokenizer")


def constraint(tokenizer: Tokenizer = BYTES, schema: object = SCHEMA, *, thinking=False, tools=False) -> Constraint:
    return Constraint.of(schema, tokenizer=tokenizer, thinking=thinking, tools=tools)


def choices(guide: Guide, tokenizer: Tokenizer) -> list[int]:
    """The tokens that may come next."""
    if guide.allowed is None:
        return list(range(tokenizer.vocab_size))
    bits = np.unpackbits(guide.allowed.view(np.uint8), bitorder="little")
    assert not bits[tokenizer.vocab_size :].any()
    return np.flatnonzero(bits).tolist()


def completion(guide: Guide, tokenizer: Tokenizer, rng: random.Random, begin: list[int] = ()) -> list[int]:
    """`begin`, then any allowed tokens until an end id."""
    tokens = []
    for token in begin:
        assert token in choices(guide, tokenizer)
        guide.advance(token)
        tokens.append(token)
    while not tokens or tokens[-1] not in tokenizer.stop_ids:
        tokens.append(rng.choice(choices(guide, tokenizer)))
        guide.advance(tokens[-1])
        assert len(tokens) < 2000
    return tokens


def check(parsed: ParsedCompletion) -> None:
    answer = json.loads(parsed.content)
    assert answer.keys() == {"城", "days"}
    assert answer["城"] in ("Paris", "Rome")
    assert 0 <= answer["days"] <= 99
    assert (parsed.tool_calls, parsed.finish_reason) == ([], "stop")


def test_any_allowed_completion_is_of_the_schema(vocabulary: Tokenizer) -> None:
    rule = constraint(vocabulary)
    for seed in range(10):
        tokens = completion(rule.start(), vocabulary, random.Random(seed))
        check(parse_completion(tokens, tokenizer=vocabulary, thinking=False))


def test_reasoning_is_free_and_the_response_follows_it(vocabulary: Tokenizer) -> None:
    rule = constraint(vocabulary, thinking=True)
    for end in ("<|close|>think<|sep|>", "<|open|>response<|sep|>"):
        begin = [*vocabulary.encode('{"no": 天'), *vocabulary.encode(end, specials=True)]
        tokens = completion(rule.start(), vocabulary, random.Random(1), begin)
        parsed = parse_completion(tokens, tokenizer=vocabulary)
        assert parsed.reasoning == '{"no": 天'
        check(parsed)


def test_with_tools_a_call_may_stand_for_the_response() -> None:
    rule = constraint(tools=True)
    close = BYTES.encode("<|close|>response<|sep|>", specials=True)
    guide = rule.start()
    for token in close:
        assert token in choices(guide, BYTES)
        guide.advance(token)
    assert guide.allowed is None
    guide = rule.start()
    guide.advance(ord("{"))
    assert close[0] not in choices(guide, BYTES)


def test_a_token_that_is_not_allowed_ends_the_guide() -> None:
    guide = constraint().start()
    with pytest.raises(ConstraintError):
        guide.advance(ord("x"))


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "strin"}, "Invalid type: strin"),
        ({"type": "object", "unevaluatedProperties": False}, "Unimplemented keys"),
        ({"$ref": "#/nope"}, "does not exist"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        (False, "Expecting object schema"),
        ([], "Expecting object schema"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused(schema: object, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        constraint(schema=schema)
    assert caught.value.param == "response_format"
    assert "\n" not in str(caught.value)


def test_an_open_schema_takes_any_json() -> None:
    guide = constraint(schema=True).start()
    for token in BYTES.encode('[1, {"a": null}]'):
        assert token in choices(guide, BYTES)
        guide.advance(token)


@pytest.mark.parametrize(
    ("response_format", "schema"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": {"a": 1}}}, {"a": 1}),
        ({"type": "json_schema", "json_schema": {"type": "string"}}, {"type": "string"}),
    ],
)
def test_the_schema_of_a_response_format(response_format: object, schema: object) -> None:
    assert response_schema(response_format) == schema


def constrained(key: str, rule: Constraint | None, **sampling) -> Request:
    return Request(
        key=key,
        prompt=tuple(BYTES.encode("What?")),
        max_tokens=80,
        sampling=Sampling(**sampling),
        stop_ids=BYTES.stop_ids,
        constraint=rule,
    )


def test_a_random_model_answers_in_the_schema_and_its_mates_as_ever(engine) -> None:
    rule = constraint()

    def run(requests: list[Request]) -> dict[str, list[int]]:
        scheduler, tokens = Scheduler(engine), {request.key: [] for request in requests}
        for request in requests:
            scheduler.submit(request)
        while scheduler.num_waiting or scheduler.num_running:
            for event in scheduler.step():
                tokens[event.request.key].append(event.token)
        return tokens

    free = constrained("free", None, seed=3)
    mates = [constrained("greedy", rule, temperature=0.0), free, constrained("drawn", rule, temperature=1.5, seed=1)]
    tokens = run(mates)
    assert tokens["free"] == run([free])["free"]
    for key in ("greedy", "drawn"):
        check(parse_completion(tokens[key], tokenizer=BYTES, thinking=False))
