"""One line of an OpenAI batch file to one `Request`, with every field checked by type and range.

A field that would change the result and is not supported is refused by name; a neutral value of it (`"n": 1`) is fine.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from k3jax.serve.sampler import Sampling
from k3jax.serve.scheduler import Request
from k3jax.text import Tokenizer

URL = "/v1/completions"
FIELDS = (
    "model",
    "prompt",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "stop",
    "logprobs",
    "user",
    "metadata",
)
# Known fields that are not supported, with the value that asks for nothing; null always does.
NEUTRAL: dict[str, Any] = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "stream": False,
    "suffix": "",
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "logit_bias": {},
    "stream_options": {},
}


class RequestError(ValueError):
    """A request that gets an error record: `code` for programs, the message for people, `param` the field at fault."""

    def __init__(self, message: str, *, code: str = "invalid_request", param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a request must fit into."""

    max_context: int
    default_max_tokens: int
    max_top_logprobs: int


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of the batch file that names a request; its body is still unchecked."""

    custom_id: str
    url: Any
    method: Any
    body: Any


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A checked request, and the stop strings that the scheduler does not see."""

    request: Request
    stops: tuple[str, ...]


def parse_line(raw: bytes) -> Line:
    """The request that a line names. Raises `RequestError` where it is not JSON or has no usable custom_id."""
    try:
        line = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, ValueError) else "nested too deeply"
        raise RequestError(f"not a line of JSON: {reason}", code="invalid_json_line") from error
    if not isinstance(line, dict):
        raise RequestError(f"a line must be a JSON object, not {_kind(line)}", code="invalid_json_line")
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        problem = "is missing" if custom_id is None else "must be a non-empty string"
        raise RequestError(f"custom_id {problem}", code="missing_custom_id", param="custom_id")
    return Line(custom_id=custom_id, url=line.get("url"), method=line.get("method", "POST"), body=line.get("body"))


def parse_completion_request(line: Line, *, tokenizer: Tokenizer, limits: Limits) -> Completion:
    """Check a line's url, method and body. Raises `RequestError` naming the field, its value and what is allowed."""
    if line.url != URL:
        note = "chat completions are not supported yet" if line.url == "/v1/chat/completions" else "no such endpoint"
        raise RequestError(f"url {line.url!r}: {note}; supported: {URL}", code="unsupported_url", param="url")
    if line.method != "POST":
        raise RequestError(f"method {line.method!r}: must be 'POST'", param="method")
    if not isinstance(line.body, dict):
        raise RequestError(f"body must be a JSON object, not {_kind(line.body)}", param="body")
    body = {name: value for name, value in line.body.items() if value is not None}
    _check_names(body)
    _field(body, "model", "", _is_string, "a string")
    prompt = prompt_ids(body, tokenizer)
    max_tokens = _field(body, "max_tokens", limits.default_max_tokens, _is_int(1), "a whole number of at least 1")
    _check_length(len(prompt), max_tokens, limits)
    request = Request(
        key=line.custom_id,
        prompt=prompt,
        max_tokens=max_tokens,
        sampling=_sampling(body, line.custom_id),
        stop_ids=tokenizer.stop_ids,
        top_logprobs=_field(
            body, "logprobs", None, _is_int(0, limits.max_top_logprobs), _between(0, limits.max_top_logprobs)
        ),
    )
    return Completion(request=request, stops=_stops(body))


def prompt_ids(body: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Token ids of a body's prompt, at least one. Raises `RequestError`."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and all(isinstance(part, str | list) for part in prompt):
        if len(prompt) > 1:
            raise RequestError(f"prompt holds {len(prompt)} prompts: write one line for each", param="prompt")
        prompt = prompt[0]
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt)
    elif isinstance(prompt, list) and all(_is_int(0)(token) for token in prompt):
        ids = prompt
    else:
        wrong = "is missing" if prompt is None else f"is {_shown(prompt)}"
        raise RequestError(f"prompt {wrong}: must be a string or a list of token ids", param="prompt")
    if not ids:
        raise RequestError("prompt is empty: it must hold at least one token", param="prompt")
    if max(ids) >= tokenizer.vocab_size:
        raise RequestError(
            f"prompt: token id {max(ids)} is outside the vocabulary of {tokenizer.vocab_size}", param="prompt"
        )
    return tuple(ids)


def default_seed(custom_id: str) -> int:
    """The seed of a request that names none: fixed by its custom_id, so that a rerun gives the same answer."""
    return int.from_bytes(hashlib.sha256(custom_id.encode("utf-8", "surrogatepass")).digest()[:4], "big")


def _sampling(body: Mapping[str, Any], custom_id: str) -> Sampling:
    return Sampling(
        temperature=float(_field(body, "temperature", 1.0, _is_number(0, 2), "a number from 0 to 2")),
        top_p=float(_field(body, "top_p", 1.0, lambda v: _is_number(0, 1)(v) and v > 0, "a number above 0, at most 1")),
        top_k=_field(body, "top_k", 0, _is_int(0, 2**31 - 1), "a whole number of at least 1, or 0 for all tokens"),
        seed=_field(body, "seed", default_seed(custom_id), _is_int(-(2**63), 2**63 - 1), "a 64-bit whole number"),
    )


def _check_length(num_prompt: int, max_tokens: int, limits: Limits) -> None:
    if num_prompt + max_tokens > limits.max_context:
        raise RequestError(
            f"the context holds {limits.max_context} tokens, but the prompt has {num_prompt} and max_tokens asks for"
            f" {max_tokens} more",
            code="context_length_exceeded",
            param="prompt" if num_prompt >= limits.max_context else "max_tokens",
        )


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    def valid(value: Any) -> bool:
        return bool(value) if isinstance(value, str) else isinstance(value, list) and all(map(_is_text, value))

    stop = _field(body, "stop", [], valid, "a non-empty string or a list of such")
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _check_names(body: Mapping[str, Any]) -> None:
    for name, value in body.items():
        if name in FIELDS:
            continue
        if name not in NEUTRAL:
            near = difflib.get_close_matches(name, (*FIELDS, *NEUTRAL), n=1)
            raise RequestError(f"unknown field {name!r}{f'; did you mean {near[0]!r}?' if near else ''}", param=name)
        neutral = NEUTRAL[name]
        if value != neutral or isinstance(value, bool) != isinstance(neutral, bool):
            raise RequestError(
                f"{name} = {_shown(value)} is not supported; leave it out", code="unsupported", param=name
            )


def _field(body: Mapping[str, Any], name: str, default: Any, valid: Callable[[Any], bool], expected: str) -> Any:
    value = body.get(name, default)
    if name in body and not valid(value):
        raise RequestError(f"{name} = {_shown(value)}: must be {expected}", param=name)
    return value


def _is_string(value: Any) -> bool:
    return isinstance(value, str)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_int(low: int, high: float = float("inf")) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _between(low: int, high: int) -> str:
    return f"a whole number from {low} to {high}"


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "a string", type(None): "null"}.get(type(value), _shown(value))


def _shown(value: Any) -> str:
    text = reprlib.repr(value) if isinstance(value, dict | list) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
