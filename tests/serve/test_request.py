"""Every field of a plain completion's line: what is accepted, and the message where it is not; fuzzing of lines."""

import json
import random
import time

import pytest

from k3jax.serve.fields import RequestError
from k3jax.serve.jobs import parse_request
from k3jax.serve.request import Job, Limits, parse_line
from k3jax.serve.sampler import Sampling
from k3jax.serve.scheduler import Request
from k3jax.text import Tokenizer

TOKENIZER = Tokenizer.bytes()
LIMITS = Limits(max_context=32, default_max_tokens=5, max_top_logprobs=4)


def parse(body: object = None, **line: object) -> Job:
    whole = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body, **line}
    return parse_request(parse_line(json.dumps(whole).encode()), tokenizer=TOKENIZER, limits=LIMITS)


def request_of(body: object, **line: object) -> Request:
    (request,) = parse(body, **line).requests
    return request


def test_a_full_request() -> None:
    sampling = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "presence_penalty": -1.5,
        "frequency_penalty": 2,
        "repetition_penalty": 1.1,
        "seed": -3,
    }
    others = {
        "model": "any",
        "prompt": "héy",
        "max_tokens": 7,
        "stop": ["x", "yz"],
        "logprobs": 2,
        "user": "me",
        "n": 2,
    }
    job = parse({**sampling, **others, "logit_bias": {"5": -100, "511": 1.5}})
    assert (job.custom_id, job.stops, job.thinking) == ("a", ("x", "yz"), None)
    assert [request.key for request in job.requests] == ["0/a", "1/a"]
    for choice, request in enumerate(job.requests):
        assert request.prompt == tuple("héy".encode())
        assert (request.max_tokens, request.top_logprobs, request.stop_ids) == (7, 2, {257, 258})
        assert request.sampling == Sampling(**sampling, logit_bias=((5, -100.0), (511, 1.5)), choice=choice)


def test_defaults_are_openais_and_the_recipes() -> None:
    request = request_of({"prompt": "x"})
    assert request.sampling == Sampling(seed=request.sampling.seed)
    assert (request.max_tokens, request.top_logprobs) == (5, None)


def test_null_is_absent_and_neutral_values_of_unsupported_fields_pass() -> None:
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "logprobs", "suffix", "n", "logit_bias")
    neutral = {"n": 1, "best_of": 1, "stream": False, "presence_penalty": 0.0, "logit_bias": {}}
    plain = parse({"prompt": "x"})
    assert parse({"prompt": "x", **dict.fromkeys(names)}) == plain
    assert parse({"prompt": "x", **neutral}) == plain


def test_the_seed_of_a_request_without_one_is_fixed_by_its_custom_id() -> None:
    seeds = [request_of({"prompt": "x"}, custom_id=name).sampling.seed for name in ("a", "b", "a")]
    assert seeds[0] == seeds[2] != seeds[1]


@pytest.mark.parametrize("prompt", [[1, 2, 511], [[1, 2, 511]]])
def test_token_prompts_are_taken_as_they_are(prompt: list) -> None:
    assert request_of({"prompt": prompt}).prompt == (1, 2, 511)


def test_a_text_prompt_holds_no_specials() -> None:
    assert request_of({"prompt": ["[EOS]"]}).prompt == tuple(b"[EOS]")


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "prompt", "prompt is missing: must be a string or a list of token ids"),
        ({"prompt": ""}, "prompt", "prompt is empty"),
        ({"prompt": []}, "prompt", "prompt is empty"),
        ({"prompt": 5}, "prompt", "prompt is 5: must be"),
        ({"prompt": [1, "a"]}, "prompt", r"prompt is \[1, 'a'\]"),
        ({"prompt": [1, True]}, "prompt", r"prompt is \[1, True\]"),
        ({"prompt": [1.5]}, "prompt", "must be a string or a list of token ids"),
        ({"prompt": [-1]}, "prompt", "must be a string or a list of token ids"),
        ({"prompt": [512]}, "prompt", "token id 512 is outside the vocabulary of 512"),
        ({"prompt": ["a", "b"]}, "prompt", "holds 2 prompts: send a request for each"),
        ({"prompt": [[1], [2]]}, "prompt", "holds 2 prompts: send a request for each"),
        (
            {"prompt": "x" * 32},
            "prompt",
            "context holds 32 tokens, but the prompt has 32 and max_tokens asks for 5 more",
        ),
        ({"prompt": "x" * 30, "max_tokens": 3}, "max_tokens", "the prompt has 30 and max_tokens asks for 3 more"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens", "max_tokens = 0: must be a whole number of at least 1"),
        ({"prompt": "x", "max_tokens": "9"}, "max_tokens", 'max_tokens = "9": must be'),
        ({"prompt": "x", "max_tokens": 2.5}, "max_tokens", "max_tokens = 2.5: must be"),
        ({"prompt": "x", "temperature": -0.1}, "temperature", "temperature = -0.1: must be a number from 0 to 2"),
        ({"prompt": "x", "temperature": 2.01}, "temperature", "temperature = 2.01"),
        ({"prompt": "x", "temperature": True}, "temperature", "temperature = true"),
        ({"prompt": "x", "top_p": 0}, "top_p", "top_p = 0: must be a number above 0, at most 1"),
        ({"prompt": "x", "top_p": 1.1}, "top_p", "top_p = 1.1"),
        ({"prompt": "x", "top_k": -1}, "top_k", "top_k = -1: must be a whole number of at least 1, or 0"),
        ({"prompt": "x", "seed": 1.0}, "seed", "seed = 1.0: must be a 64-bit whole number"),
        ({"prompt": "x", "seed": 2**63}, "seed", "seed = 9223372036854775808"),
        ({"prompt": "x", "stop": ""}, "stop", 'stop = "": must be a non-empty string or a list of such'),
        ({"prompt": "x", "stop": ["a", ""]}, "stop", r"stop = \['a', ''\]"),
        ({"prompt": "x", "stop": 3}, "stop", "stop = 3"),
        ({"prompt": "x", "logprobs": 5}, "logprobs", "logprobs = 5: must be a whole number from 0 to 4"),
        ({"prompt": "x", "logprobs": True}, "logprobs", "logprobs = true"),
        ({"prompt": "x", "model": 3}, "model", "model = 3: must be a string"),
        ({"prompt": "x", "n": True}, "n", "n = true: must be a whole number from 1 to 128"),
        ({"prompt": "x", "n": 0}, "n", "n = 0: must be a whole number from 1 to 128"),
        (
            {"prompt": "x", "presence_penalty": 2.5},
            "presence_penalty",
            "presence_penalty = 2.5: must be a number from -2",
        ),
        ({"prompt": "x", "frequency_penalty": "1"}, "frequency_penalty", 'frequency_penalty = "1": must be a number'),
        (
            {"prompt": "x", "repetition_penalty": 0},
            "repetition_penalty",
            "repetition_penalty = 0: must be a number from",
        ),
        ({"prompt": "x", "min_p": 1.5}, "min_p", "min_p = 1.5: must be a number from 0 to 1"),
        ({"prompt": "x", "logit_bias": {"512": 1}}, "logit_bias", "an object of at most 300 token ids below 512"),
        ({"prompt": "x", "logit_bias": {"-1": 1}}, "logit_bias", "an object of at most 300 token ids below 512"),
        ({"prompt": "x", "logit_bias": {"٣": 1}}, "logit_bias", "an object of at most 300 token ids below 512"),
        ({"prompt": "x", "logit_bias": {"5": 101}}, "logit_bias", "each with a number from -100 to 100"),
        ({"prompt": "x", "logit_bias": [5]}, "logit_bias", r"logit_bias = \[5\]: must be an object"),
        (
            {"prompt": "x", "logit_bias": {str(i): 1 for i in range(301)}},
            "logit_bias",
            "an object of at most 300 token",
        ),
        ({"prompt": "x", "best_of": 3}, "best_of", "best_of = 3 is not supported"),
        ({"prompt": "x", "echo": True, "logprobs": 1}, "echo", "the recipe must say score_prompts: true"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens", "max_tokens = 0"),
        ({"prompt": "x", "stream": True}, "stream", "stream = true is not supported"),
        ({"prompt": "x", "suffix": "y"}, "suffix", 'suffix = "y" is not supported'),
        ({"prompt": "x", "temprature": 1}, "temprature", "unknown field 'temprature'; did you mean 'temperature'?"),
        ({"prompt": "x", "qqq": 1}, "qqq", "unknown field 'qqq'$"),
        ([], "body", "body must be a JSON object, not a list"),
        (None, "body", "body must be a JSON object, not null"),
    ],
)
def test_a_bad_body_is_refused_by_name(body: object, param: str, message: str) -> None:
    with pytest.raises(RequestError, match=message.replace("?", r"\?")) as caught:
        parse(body)
    assert caught.value.param == param
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"url": "/v1/nope"}, "url '/v1/nope': no such endpoint; supported: /v1/completions, /v1/chat/completions"),
        ({"url": None}, "url None: no such endpoint"),
        ({"method": "GET"}, "method 'GET': must be 'POST'"),
    ],
)
def test_a_bad_url_or_method_is_refused_by_name(line: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parse({"prompt": "x"}, **line)


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b'{"custom_id": "a", ', "invalid_json_line"),
        (b"\xff\xfe{}", "invalid_json_line"),
        (b'{"custom_id": "a", "x": NaN}', "invalid_json_line"),
        (b"[" * 100_000, "invalid_json_line"),
        (b'{"custom_id": "a", "body": ' + b"[" * 300 + b"]" * 300 + b"}", "invalid_json_line"),
        (b'{"custom_id": "a", "x": ' + b"9" * 5000 + b"}", "invalid_json_line"),
        (b"[1]", "invalid_json_line"),
        (b"null", "invalid_json_line"),
        (b"{}", "missing_custom_id"),
        (b'{"custom_id": 7}', "missing_custom_id"),
        (b'{"custom_id": ""}', "missing_custom_id"),
    ],
)
def test_a_line_that_names_no_request_is_refused(raw: bytes, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_line(raw)
    assert caught.value.code == code


SEED_LINES = [
    {"prompt": "x", "stop": ["a"], "logit_bias": {"5": 1}, "seed": 3, "n": 2},
    {"prompt": [1, 2], "logprobs": 1, "temperature": 0.5, "max_tokens": 3},
    {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        "tools": [{"function": {"name": "f"}}],
    },
    {
        "messages": [
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "r", "name": "f"},
        ],
        "reasoning_effort": "none",
        "response_format": {"type": "json_schema", "json_schema": {"schema": {}}},
        "chat_template_kwargs": {"thinking": True},
        "top_logprobs": 1,
        "tool_choice": "none",
    },
]
VALUES = [
    None,
    True,
    0,
    -1,
    1.5,
    1e300,
    10**30,
    "",
    "x",
    "none",
    "low",
    "\ud800",
    [],
    [[]],
    ["x"],
    {},
    {"a": 1},
    {"5": 2},
]


def mutated(rng: random.Random, value: object, depth: int = 0) -> object:
    """`value` with parts of it exchanged for something of another kind."""
    if depth and rng.random() < 0.08:
        return rng.choice(VALUES)
    if isinstance(value, dict):
        return {
            (rng.choice(["", "name", "type"]) if rng.random() < 0.03 else key): mutated(rng, part, depth + 1)
            for key, part in value.items()
        }
    return [mutated(rng, part, depth + 1) for part in value] if isinstance(value, list) else value


@pytest.mark.parametrize("seconds", [3, pytest.param(600, marks=[pytest.mark.soak, pytest.mark.timeout(900)])])
def test_fuzzed_lines_give_a_job_or_one_clear_error(seconds: int) -> None:
    limits = Limits(max_context=2048, default_max_tokens=5, max_top_logprobs=4)
    rng, deadline, jobs, errors = random.Random(0), time.monotonic() + seconds, 0, 0
    while time.monotonic() < deadline:
        body = rng.choice(SEED_LINES)
        url = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        line = {"custom_id": "a", "method": "POST", "url": url, "body": body}
        raw = json.dumps(mutated(rng, line)).encode()
        if rng.random() < 0.3:
            place = rng.randrange(len(raw))
            raw = raw[:place] + bytes(rng.choices(b'{}[]",:\\x0123e-\xff\xc3', k=rng.randint(0, 3))) + raw[place + 1 :]
        try:
            job = parse_request(parse_line(raw), tokenizer=TOKENIZER, limits=limits)
        except RequestError as error:
            errors += 1
            message = str(error)
            json.dumps([error.code, error.param])
        else:
            jobs, message = jobs + 1, ""
            assert all(0 <= token < 512 for token in job.requests[0].prompt)
        assert "\n" not in message, raw
    assert jobs > 20 < errors
