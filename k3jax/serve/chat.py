"""The body of a chat completion: messages to a prompt, options to how its completion is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from k3jax.serve.constraint import Constraint, response_schema
from k3jax.serve.fields import RequestError, check_names, field, flag, kind, shown, text, whole
from k3jax.serve.images import ImageReader
from k3jax.serve.request import (
    NEUTRAL,
    SHARED,
    Job,
    Limits,
    Line,
    body_of,
    check_length,
    choices,
    sampling,
    stops,
)
from k3jax.serve.scheduler import Request
from k3jax.text import ChatError, Prompt, Tokenizer, render_chat
from k3jax.text.chat import EFFORTS
from k3jax.text.messages import read_messages

FIELDS = (
    *SHARED,
    "messages",
    "tools",
    "tool_choice",
    "response_format",
    "reasoning_effort",
    "thinking_effort",
    "chat_template_kwargs",
    "max_completion_tokens",
    "top_logprobs",
    "store",  # these three change no answer
    "service_tier",
    "prompt_cache_key",
)
CHAT_NEUTRAL = {name: NEUTRAL[name] for name in ("stream", "stream_options")} | {"parallel_tool_calls": True}
TOP_P = 0.95  # the vendor's value for K3


def chat_job(line: Line, *, tokenizer: Tokenizer, limits: Limits, reader: ImageReader | None = None) -> Job:
    """Check the body of a chat completion. Raises `RequestError` naming the field, its value and what is allowed.

    Without a `reader` of images only text is supported.
    """
    body = body_of(line)
    check_names(body, known=FIELDS, neutral=CHAT_NEUTRAL)
    thinking, effort = _thinking(body)
    _check_messages(body.get("messages"), with_images=reader is not None)
    found = reader.find(body["messages"]) if reader is not None else []
    sizes = [image.size for image in found]
    prompt = chat_prompt(body, tokenizer, thinking=thinking, effort=effort, image_sizes=sizes)
    max_tokens = _max_tokens(body, len(prompt.ids), limits)
    request = Request(
        key=line.custom_id,
        prompt=tuple(prompt.ids),
        max_tokens=max_tokens,
        sampling=sampling(body, line.custom_id, tokenizer, top_p=TOP_P),
        stop_ids=tokenizer.stop_ids,
        top_logprobs=_top_logprobs(body, limits),
        constraint=_constraint(body, tokenizer, thinking=thinking),
    )
    job = Job(custom_id=line.custom_id, requests=choices(body, request), stops=stops(body), thinking=thinking)
    if reader is None:
        return job
    return replace(job, images=reader.prepare([found[index] for index in prompt.image_order]))  # decoded only now


def chat_prompt(
    body: Mapping[str, Any],
    tokenizer: Tokenizer,
    *,
    thinking: bool,
    effort: str,
    image_sizes: Sequence[tuple[int, int]] = (),
) -> Prompt:
    """The prompt of a chat body. Raises `RequestError`."""
    try:
        return render_chat(
            body["messages"],
            tokenizer=tokenizer,
            tools=_tools(body),
            tool_choice=_tool_choice(body),
            response_format=body.get("response_format"),
            thinking=thinking,
            effort=effort,
            image_sizes=image_sizes,
        )
    except ChatError as error:
        raise RequestError(str(error), param=error.param) from error


def _thinking(body: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether to think, and the effort: `thinking_effort` before `reasoning_effort`, whose "none" means no thinking."""
    options = field(body, "chat_template_kwargs", {}, lambda value: isinstance(value, dict), "an object")
    options = {name: value for name, value in options.items() if value is not None}
    check_names(options, known=("thinking", "enable_thinking", "thinking_effort"), neutral={})
    thinking = flag(options, "thinking", flag(options, "enable_thinking", True))
    allowed = f"one of {', '.join(EFFORTS)}"
    effort = field(body, "reasoning_effort", "max", lambda v: v in (*EFFORTS, "none"), f"{allowed}, or none")
    thinking &= effort != "none"
    for source in (options, body):
        effort = field(source, "thinking_effort", effort, lambda v: v in EFFORTS, allowed)
    return thinking, "max" if effort == "none" else effort


def _check_messages(messages: Any, *, with_images: bool) -> None:
    """What the format would render and a server should not: no messages, images that nothing reads, lost contents."""
    if not isinstance(messages, list) or not messages:
        wrong = "is missing" if messages is None else f"is {kind(messages) if messages != [] else 'an empty list'}"
        raise RequestError(f"messages {wrong}: must be a list of at least one message", param="messages")
    try:
        _, num_images = read_messages(messages)
    except ChatError as error:
        raise RequestError(str(error), param=error.param) from error
    if num_images and not with_images:
        raise RequestError(
            f"messages hold {num_images} images: only text is supported", code="unsupported", param="messages"
        )
    for index, message in enumerate(messages):
        if message.get("tools") and message.get("content"):
            raise RequestError(
                f"messages[{index}] declares tools and has a content: write two system messages", param="messages"
            )


def _tools(body: Mapping[str, Any]) -> list[Any]:
    def valid(value: Any) -> bool:
        return isinstance(value, list) and all(
            isinstance(tool, dict)
            and tool.get("type", "function") == "function"
            and isinstance(tool.get("function"), dict)
            and isinstance(tool["function"].get("name"), str)
            for tool in value
        )

    return field(body, "tools", [], valid, 'a list of {"type": "function", "function": {"name", ...}}')


def _tool_choice(body: Mapping[str, Any]) -> str | None:
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        raise RequestError(
            f"tool_choice = {shown(choice)}: a named tool cannot be forced; use 'required'",
            code="unsupported",
            param="tool_choice",
        )
    if choice == "required" and not _declares_tools(body):
        raise RequestError("tool_choice = 'required': needs tools", param="tool_choice")
    return text(body, "tool_choice", "auto")


def _declares_tools(body: Mapping[str, Any]) -> bool:
    return bool(body.get("tools")) or any(message.get("tools") for message in body["messages"])


def _constraint(body: Mapping[str, Any], tokenizer: Tokenizer, *, thinking: bool) -> Constraint | None:
    """What the response format demands of the response, if anything."""
    schema = response_schema(body.get("response_format"))
    if schema is None:
        return None
    may_call = _declares_tools(body) and body.get("tool_choice") != "none"
    return Constraint.of(schema, tokenizer=tokenizer, thinking=thinking, tools=may_call)


def _top_logprobs(body: Mapping[str, Any], limits: Limits) -> int | None:
    top, wanted = whole(body, "top_logprobs", 0, 0, limits.max_top_logprobs), flag(body, "logprobs", False)
    if top and not wanted:
        raise RequestError(f"top_logprobs = {top}: needs logprobs = true", param="top_logprobs")
    return top if wanted else None


def _max_tokens(body: Mapping[str, Any], num_prompt: int, limits: Limits) -> int:
    """What the body asks for, else all that the context leaves, at least one."""
    name = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    max_tokens = whole(body, name, max(1, limits.max_context - num_prompt), 1)
    check_length(num_prompt, max_tokens, limits, prompt="messages", completion=name)
    return max_tokens
