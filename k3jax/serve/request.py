"""One line of an OpenAI batch file to one `Job`, with every field checked by type and range.

A field that would change the result and is not supported is refused by name; a neutral value of it is fine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from k3jax.serve.fields import (
    RequestError,
    check_names,
    field,
    flag,
    is_int,
    is_number,
    kind,
    number,
    shown,
    text,
    whole,
)
from k3jax.serve.sampler import MAX_BIAS, Sampling
from k3jax.serve.scheduler import Request
from k3jax.text import Tokenizer, strict_json
from k3jax.vision import Prepared

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MAX_CHOICES = 128
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
)
SHARED = (*SAMPLING, "model", "max_tokens", "n", "stop", "logprobs", "user", "metadata")  # fields of both endpoints
# Known fields that are not supported, with the value that asks for nothing; null always does.
NEUTRAL: dict[str, Any] = {"best_of": 1, "stream": False, "suffix": "", "stream_options": {}}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a request must fit into."""

    max_context: int
    default_max_tokens: int
    max_top_logprobs: int
    score_prompts: bool = False  # whether `echo` can come with log-probabilities


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of the batch file that names a request; its body is still unchecked."""

    custom_id: str
    url: Any
    method: Any
    body: Any


@dataclass(frozen=True, kw_only=True)
class Job:
    """A checked line: one scheduler request for each choice, and what only the reader of their text needs.

    `thinking` is whether a chat's completion starts in the think channel, and None for a plain completion. `images` are
    those of the prompt, in its order; their features are still to be given to the requests (`ImageEncoder.job`).
    """

    custom_id: str
    requests: tuple[Request, ...]
    stops: tuple[str, ...]
    thinking: bool | None = None
    images: tuple[Prepared, ...] = ()


def parse_line(raw: bytes) -> Line:
    """The request that a line names. Raises `RequestError` where it is not JSON or has no usable custom_id."""
    line = parse_json(raw, "a line of JSON", code="invalid_json_line")
    if not isinstance(line, dict):
        raise RequestError(f"a line must be a JSON object, not {kind(line)}", code="invalid_json_line")
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        problem = "is missing" if custom_id is None else "must be a non-empty string"
        raise RequestError(f"custom_id {problem}", code="missing_custom_id", param="custom_id")
    return Line(custom_id=custom_id, url=line.get("url"), method=line.get("method", "POST"), body=line.get("body"))


def parse_json(raw: bytes, what: str, *, code: str) -> Any:
    """The value of strict JSON. Raises `RequestError` with this code where it is not `what`."""
    try:
        decoded = raw.decode("utf-8")
        strict_json.check_depth(decoded)  # whatever reads the value, or shows it in a message, recurses
        return json.loads(decoded, parse_constant=strict_json.refuse_constant)
    except ValueError as error:
        raise RequestError(f"not {what}: {error}", code=code) from error


def body_of(line: Line) -> dict[str, Any]:
    """A line's body without fields that are null. Raises `RequestError` for a wrong method, no body or a bad model."""
    if line.method != "POST":
        raise RequestError(f"method {line.method!r}: must be 'POST'", param="method")
    if not isinstance(line.body, dict):
        raise RequestError(f"body must be a JSON object, not {kind(line.body)}", param="body")
    body = {name: value for name, value in line.body.items() if value is not None}
    text(body, "model", "")
    return body


def completion_job(line: Line, *, tokenizer: Tokenizer, limits: Limits) -> Job:
    """Check the body of a plain completion. Raises `RequestError` naming the field, its value and what is allowed."""
    body = body_of(line)
    check_names(body, known=(*SHARED, "prompt", "echo"), neutral=NEUTRAL)
    prompt, echo = prompt_ids(body, tokenizer), flag(body, "echo", False)
    max_tokens = whole(body, "max_tokens", limits.default_max_tokens, 0 if echo else 1)
    check_length(len(prompt), max_tokens, limits, prompt="prompt", completion="max_tokens")
    request = Request(
        key=line.custom_id,
        prompt=prompt,
        max_tokens=max_tokens,
        sampling=sampling(body, line.custom_id, tokenizer),
        stop_ids=tokenizer.stop_ids,
        top_logprobs=whole(body, "logprobs", None, 0, limits.max_top_logprobs),
        echo=echo,
    )
    if request.scores_prompt and not limits.score_prompts:
        message = "echo with logprobs: the recipe must say score_prompts: true"
        raise RequestError(message, code="unsupported", param="echo")
    return Job(custom_id=line.custom_id, requests=choices(body, request), stops=stops(body))


def prompt_ids(body: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Token ids of a body's prompt, at least one. Raises `RequestError`."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and all(isinstance(part, str | list) for part in prompt):
        if len(prompt) > 1:
            raise RequestError(f"prompt holds {len(prompt)} prompts: send a request for each", param="prompt")
        prompt = prompt[0]
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt)
    elif isinstance(prompt, list) and all(map(is_int(0), prompt)):
        ids = prompt
    else:
        wrong = "is missing" if prompt is None else f"is {shown(prompt)}"
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


def choices(body: Mapping[str, Any], request: Request) -> tuple[Request, ...]:
    """`n` requests like `request`, each with its own key and its own draws."""
    return tuple(
        replace(request, key=f"{choice}/{request.key}", sampling=replace(request.sampling, choice=choice))
        for choice in range(whole(body, "n", 1, 1, MAX_CHOICES))
    )


def sampling(body: Mapping[str, Any], custom_id: str, tokenizer: Tokenizer, *, top_p: float = 1.0) -> Sampling:
    """How a body asks to draw; `top_p` is the default of its endpoint."""
    return Sampling(
        temperature=number(body, "temperature", 1.0, 0, 2),
        top_p=float(field(body, "top_p", top_p, lambda v: is_number(0, 1)(v) and v > 0, "a number above 0, at most 1")),
        top_k=field(body, "top_k", 0, is_int(0, 2**31 - 1), "a whole number of at least 1, or 0 for all tokens"),
        min_p=number(body, "min_p", 0.0, 0, 1),
        presence_penalty=number(body, "presence_penalty", 0.0, -2, 2),
        frequency_penalty=number(body, "frequency_penalty", 0.0, -2, 2),
        repetition_penalty=number(body, "repetition_penalty", 1.0, 0.01, 10),
        logit_bias=_logit_bias(body, tokenizer),
        seed=field(body, "seed", default_seed(custom_id), is_int(-(2**63), 2**63 - 1), "a 64-bit whole number"),
    )


def check_length(num_prompt: int, max_tokens: int, limits: Limits, *, prompt: str, completion: str) -> None:
    """Raise `RequestError` where a prompt and its completion exceed the context; the names are the fields'."""
    if num_prompt + max_tokens > limits.max_context:
        raise RequestError(
            f"the context holds {limits.max_context} tokens, but the prompt has {num_prompt} and {completion} asks for"
            f" {max_tokens} more",
            code="context_length_exceeded",
            param=prompt if num_prompt >= limits.max_context else completion,
        )


def stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    """The stop strings of a body."""

    def valid(value: Any) -> bool:
        texts = value if isinstance(value, list) else [value]
        return all(isinstance(one, str) and one for one in texts)

    stop = field(body, "stop", [], valid, "a non-empty string or a list of such")
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _logit_bias(body: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[tuple[int, float], ...]:
    def valid(value: Any) -> bool:
        ids_fit = isinstance(value, dict) and all(
            key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < tokenizer.vocab_size for key in value
        )
        return ids_fit and len(value) <= MAX_BIAS and all(map(is_number(-100, 100), value.values()))

    bias = field(
        body,
        "logit_bias",
        {},
        valid,
        f"an object of at most {MAX_BIAS} token ids below {tokenizer.vocab_size}, each with a number from -100 to 100",
    )
    return tuple((int(token), float(value)) for token, value in bias.items())
