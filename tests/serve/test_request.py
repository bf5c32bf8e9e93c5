"""Every field of a request line: what is accepted, and the message where it is not."""

import json

import pytest

from k3jax.serve.request import Completion, Limits, RequestError, parse_completion_request, parse_line
from k3jax.text import Tokenizer

TOKENIZER = Tokenizer.bytes()
LIMITS = Limits(max_context=32, default_max_tokens=5, max_top_logprobs=4)


def parse(body: object = None, **line: object) -> Completion:
    whole = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body, **line}
    parsed = parse_line(json.dumps(whole).encode())
    return parse_completion_request(parsed, tokenizer=TOKENIZER, limits=LIMITS)


def test_a_full_request() -> None:
    completion = parse(
        {
            "model": "any",
            "prompt": "héy",
            "max_tokens": 7,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 4,
            "seed": -3,
            "stop": ["x", "yz"],
            "logprobs": 2,
            "user": "me",
        }
    )
    request = completion.request
    assert request.prompt == tuple("héy".encode())
    assert (request.key, request.max_tokens, request.top_logprobs) == ("a", 7, 2)
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k, request.sampling.seed) == (
        0.5,
        0.9,
        4,
        -3,
    )
    assert (completion.stops, request.stop_ids) == (("x", "yz"), {257, 258})


def test_defaults_are_openais_and_the_recipes() -> None:
    request = parse({"prompt": "x"}).request
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (1.0, 1.0, 0)
    assert (request.max_tokens, request.top_logprobs) == (5, None)


def test_null_is_absent_and_neutral_values_of_unsupported_fields_pass() -> None:
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "logprobs", "suffix", "n", "logit_bias")
    neutral = {"n": 1, "best_of": 1, "echo": False, "stream": False, "presence_penalty": 0.0, "logit_bias": {}}
    plain = parse({"prompt": "x"})
    assert parse({"prompt": "x", **dict.fromkeys(names)}) == plain
    assert parse({"prompt": "x", **neutral}) == plain


def test_the_seed_of_a_request_without_one_is_fixed_by_its_custom_id() -> None:
    seeds = [parse({"prompt": "x"}, custom_id=name).request.sampling.seed for name in ("a", "b", "a")]
    assert seeds[0] == seeds[2] != seeds[1]


@pytest.mark.parametrize("prompt", [[1, 2, 511], [[1, 2, 511]]])
def test_token_prompts_are_taken_as_they_are(prompt: list) -> None:
    assert parse({"prompt": prompt}).request.prompt == (1, 2, 511)


def test_a_text_prompt_holds_no_specials() -> None:
    assert parse({"prompt": ["[EOS]"]}).request.prompt == tuple(b"[EOS]")


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
        ({"prompt": ["a", "b"]}, "prompt", "holds 2 prompts: write one line for each"),
        ({"prompt": [[1], [2]]}, "prompt", "holds 2 prompts: write one line for each"),
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
        ({"prompt": "x", "n": 2}, "n", "n = 2 is not supported; leave it out"),
        ({"prompt": "x", "n": True}, "n", "n = true is not supported"),
        ({"prompt": "x", "best_of": 3}, "best_of", "best_of = 3 is not supported"),
        ({"prompt": "x", "echo": True}, "echo", "echo = true is not supported"),
        ({"prompt": "x", "stream": True}, "stream", "stream = true is not supported"),
        ({"prompt": "x", "suffix": "y"}, "suffix", 'suffix = "y" is not supported'),
        ({"prompt": "x", "presence_penalty": 0.5}, "presence_penalty", "presence_penalty = 0.5 is not supported"),
        ({"prompt": "x", "frequency_penalty": -1}, "frequency_penalty", "frequency_penalty = -1 is not supported"),
        ({"prompt": "x", "logit_bias": {"5": 1}}, "logit_bias", "logit_bias = {'5': 1} is not supported"),
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
        ({"url": "/v1/chat/completions"}, "url '/v1/chat/completions': chat completions are not supported yet"),
        ({"url": "/v1/nope"}, "url '/v1/nope': no such endpoint; supported: /v1/completions"),
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
