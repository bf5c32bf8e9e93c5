"""Every field of a chat's line: the prompt it gives, and the message where it is refused."""

import json

import pytest

from k3jax.serve.fields import RequestError
from k3jax.serve.jobs import parse_request
from k3jax.serve.request import Job, Limits, parse_line
from k3jax.serve.scheduler import Request
from k3jax.text import Tokenizer, render_chat

TOKENIZER = Tokenizer.bytes()
LIMITS = Limits(max_context=1000, default_max_tokens=5, max_top_logprobs=4)
USER = {"role": "user", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def parse(**body: object) -> Job:
    whole = {"custom_id": "a", "url": "/v1/chat/completions", "body": {"messages": [USER], **body}}
    return parse_request(parse_line(json.dumps(whole).encode()), tokenizer=TOKENIZER, limits=LIMITS)


def request_of(**body: object) -> Request:
    (request,) = parse(**body).requests
    return request


def prompt(messages: list[dict], **options) -> tuple[int, ...]:
    return tuple(render_chat(messages, tokenizer=TOKENIZER, **options).ids)


def test_a_full_request() -> None:
    pytest.importorskip("llguidance")
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "x"}], "name": "me"},
        {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "12"},
    ]
    options = {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}
    drawing = {"temperature": 0.5, "top_p": 0.9, "min_p": 0.1, "presence_penalty": 1, "seed": 7, "stop": "END", "n": 2}
    limits = Limits(max_context=5000, default_max_tokens=5, max_top_logprobs=4)
    body = {"messages": messages, "model": "k3", "reasoning_effort": "low", "max_completion_tokens": 9, **options}
    body |= {**drawing, "logprobs": True, "top_logprobs": 3, "logit_bias": {"5": 2}, "user": "u", "metadata": {}}
    whole = {"custom_id": "a", "url": "/v1/chat/completions", "body": body}
    job = parse_request(parse_line(json.dumps(whole).encode()), tokenizer=TOKENIZER, limits=limits)
    assert (job.thinking, job.stops, len(job.requests)) == (True, ("END",), 2)
    for choice, request in enumerate(job.requests):
        assert request.prompt == prompt(messages, effort="low", **options)
        assert (request.max_tokens, request.top_logprobs, request.stop_ids) == (9, 3, {257, 258})
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.min_p, sampling.seed) == (0.5, 0.9, 0.1, 7)
        assert (sampling.presence_penalty, sampling.logit_bias, sampling.choice) == (1, ((5, 2.0),), choice)


def test_defaults_are_the_vendors() -> None:
    request = request_of()
    assert (request.sampling.temperature, request.sampling.top_p) == (1.0, 0.95)
    assert request.prompt == prompt([USER], effort="max")
    assert len(request.prompt) + request.max_tokens == LIMITS.max_context
    assert request.top_logprobs is None


@pytest.mark.parametrize(
    ("body", "thinking", "effort"),
    [
        ({}, True, "max"),
        ({"reasoning_effort": None}, True, "max"),
        ({"reasoning_effort": "high"}, True, "high"),
        ({"reasoning_effort": "none"}, False, "max"),
        ({"reasoning_effort": "low", "thinking_effort": "high"}, True, "high"),
        ({"reasoning_effort": "none", "thinking_effort": "high"}, False, "max"),
        ({"chat_template_kwargs": {"thinking": False}}, False, "max"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False, "max"),
        ({"chat_template_kwargs": {"thinking": True, "enable_thinking": False, "thinking_effort": "low"}}, True, "low"),
    ],
)
def test_options_of_thinking(body: dict, thinking: bool, effort: str) -> None:
    assert parse(**body).thinking == thinking
    assert request_of(**body).prompt == prompt([USER], thinking=thinking, effort=effort)


@pytest.mark.parametrize(
    ("body", "tools"),
    [
        ({}, False),
        ({"tools": TOOLS}, True),
        ({"tools": TOOLS, "tool_choice": "none"}, False),
        ({"messages": [{"role": "system", "tools": TOOLS}, USER]}, True),
    ],
)
def test_a_response_format_constrains_the_response(body: dict, tools: bool) -> None:
    pytest.importorskip("llguidance")
    constraint = request_of(**body, response_format={"type": "json_object"}).constraint
    assert (constraint.thinking, constraint.tools) == (True, tools)
    assert request_of(**body, response_format={"type": "text"}).constraint is None


def test_neutral_fields_change_nothing() -> None:
    neutral = {
        "stream": False,
        "parallel_tool_calls": True,
        "n": 1,
        "logprobs": False,
        "tools": [],
        "tool_choice": "auto",
    }
    assert parse(**neutral, response_format={"type": "text"}, store=True, service_tier="auto") == parse()


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"messages": None}, "messages", "messages is missing: must be a list of at least one message"),
        ({"messages": []}, "messages", "messages is an empty list: must be a list"),
        ({"messages": "hi"}, "messages", "messages is a string: must be a list"),
        ({"messages": [5]}, "messages", r"messages\[0\] is 5: must be an object with a role"),
        ({"messages": [{"role": "critic"}]}, "messages", r"messages\[0\].role = 'critic': must be one of"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "hold 1 images: only text"),
        ({"messages": [{**USER, "tools": TOOLS}]}, "messages", "only a system message may declare tools"),
        (
            {"messages": [{"role": "system", "content": "x", "tools": TOOLS}]},
            "messages",
            r"messages\[0\] declares tools and has a content: write two system messages",
        ),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            "messages",
            "tool result 1 after an assistant's message with 0",
        ),
        (
            {"reasoning_effort": "medium"},
            "reasoning_effort",
            'reasoning_effort = "medium": must be one of low, high, max',
        ),
        ({"thinking_effort": "none"}, "thinking_effort", 'thinking_effort = "none": must be one of low, high, max'),
        ({"chat_template_kwargs": {"thinking": 1}}, "thinking", "thinking = 1: must be true or false"),
        ({"chat_template_kwargs": {"thinkin": True}}, "thinkin", "unknown field 'thinkin'; did you mean 'thinking'?"),
        ({"tools": [{"name": "f"}]}, "tools", 'must be a list of {"type": "function"'),
        ({"tools": {"f": 1}}, "tools", "tools = {'f': 1}: must be a list"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice = 'required': needs tools"),
        (
            {"tool_choice": "any", "tools": TOOLS},
            "tool_choice",
            "tool_choice = 'any': must be 'auto', 'none' or 'required'",
        ),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice", "a named tool cannot be forced"),
        ({"tool_choice": 5}, "tool_choice", "tool_choice = 5: must be a string"),
        ({"response_format": {"type": "xml"}}, "response_format", "its type must be 'text', 'json_object' or"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema is missing"),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs = 2: needs logprobs = true"),
        ({"top_logprobs": 5, "logprobs": True}, "top_logprobs", "top_logprobs = 5: must be a whole number from 0 to 4"),
        ({"logprobs": 2}, "logprobs", "logprobs = 2: must be true or false"),
        ({"stream": True}, "stream", "stream = true is not supported; leave it out"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", "parallel_tool_calls = false is not supported"),
        ({"prompt": "x"}, "prompt", "unknown field 'prompt'"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens = 0: must be a whole number"),
        (
            {"max_completion_tokens": 999},
            "max_completion_tokens",
            r"the context holds 1000 tokens, but the prompt has \d+ and max_completion_tokens asks for 999 more",
        ),
        ({"messages": [{"role": "user", "content": "x" * 1000}]}, "messages", "the context holds 1000 tokens, but the"),
    ],
)
def test_a_bad_body_is_refused_by_name(body: dict, param: str, message: str) -> None:
    with pytest.raises(RequestError, match=message.replace("?", r"\?")) as caught:
        parse(**body)
    assert caught.value.param == param
    assert "\n" not in str(caught.value)


def test_a_prompt_that_fills_the_context_is_refused_by_its_code() -> None:
    with pytest.raises(RequestError) as caught:
        parse(messages=[{"role": "user", "content": "x" * 1000}])
    assert caught.value.code == "context_length_exceeded"
