"""A chat's messages, as a request gives them, to what `render_chat` writes: every field checked, tool results in order.

Messages are OpenAI's: objects with a `role` and a `content` that is a string, a list of parts or null.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from k3jax.text import strict_json

ROLES = ("system", "user", "assistant", "tool")


class ChatError(ValueError):
    """A chat that cannot be rendered: one line that names the field, its value and what is allowed.

    `param` is the top-level field at fault.
    """

    def __init__(self, message: str, *, param: str = "messages") -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, kw_only=True)
class Call:
    """One tool call of an assistant's message. `arguments` that are a string are text that is not JSON."""

    id: str | None
    name: str
    arguments: Mapping[str, Any] | str


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message. `parts` are texts and the numbers of images; `tools` not empty means a dynamic declaration."""

    role: str
    parts: tuple[str | int, ...] = ()
    name: str | None = None
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    tools: tuple[Any, ...] = ()
    call_id: str | None = None  # a tool result's
    tool: str | None = None  # the name that a tool result gives itself


def read_messages(messages: Sequence[Any]) -> tuple[list[Message], int]:
    """Checked messages in the order in which they are rendered, and how many images they hold. Raises `ChatError`.

    Images are numbered as they appear in `messages`. A run of tool results is put in the order of the calls that it
    answers if every one of its ids is a call's (spec, section 4.3).
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise ChatError(f"messages is {kind(messages)}: must be a list of messages")
    images = itertools.count()
    checked = [_message(value, f"messages[{index}]", images) for index, value in enumerate(messages)]
    return list(_in_call_order(checked)), next(images)


def _message(value: Any, where: str, images: Iterator[int]) -> Message:
    if not isinstance(value, Mapping):
        raise ChatError(f"{where} is {kind(value)}: must be an object with a role")
    role = "system" if value.get("role") == "developer" else value.get("role")
    if role not in ROLES:
        raise ChatError(f"{where}.role = {shown(value.get('role'))}: must be one of developer, {', '.join(ROLES)}")
    tools = value.get("tools") or ()
    if tools and role != "system":
        raise ChatError(f"{where}.tools: only a system message may declare tools, not a message of role {role!r}")
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ChatError(f"{where}.tools is {kind(tools)}: must be a list")
    calls = value.get("tool_calls") or ()
    if calls and role != "assistant":
        raise ChatError(f"{where}.tool_calls: only an assistant's message may hold tool calls, not role {role!r}")
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise ChatError(f"{where}.tool_calls is {kind(calls)}: must be a list")
    call_id = value.get("tool_call_id", value.get("id"))
    tool = _text(value, "tool", where)
    return Message(
        role=role,
        parts=tuple(_parts(value.get("content"), f"{where}.content", images)),
        name=_text(value, "name", where) or None,
        reasoning=_text(value, "reasoning_content", where) or _text(value, "reasoning", where) or "",
        calls=tuple(_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)),
        tools=tuple(tools),
        call_id=None if call_id is None else str(call_id),
        tool=_text(value, "name", where) if tool is None else tool,
    )


def _parts(content: Any, where: str, images: Iterator[int]) -> Iterator[str | int]:
    """The texts and the image numbers of a content."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, Sequence):
        for index, part in enumerate(content):
            if not isinstance(part, Mapping):
                raise ChatError(f"{where}[{index}] is {kind(part)}: must be an object with a type")
            if part.get("type") in ("image", "image_url"):
                yield next(images)
            elif isinstance(part.get("text"), str):
                yield part["text"]
            else:
                raise ChatError(f"{where}[{index}] of type {shown(part.get('type'))} holds no text and is no image")
    elif content is not None:
        raise ChatError(f"{where} is {kind(content)}: must be a string, a list of parts or null")


def _call(value: Any, where: str) -> Call:
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ChatError(f"{where}: must be an object whose function has a name")
    identity = value.get("id")
    return Call(
        id=None if identity is None else str(identity),
        name=function["name"],
        arguments=_arguments(function.get("arguments"), f"{where}.function.arguments"),
    )


def _arguments(value: Any, where: str) -> Mapping[str, Any] | str:
    """The arguments by name; text that is not JSON stays as it is."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    parsed = value
    if isinstance(value, str):
        try:
            parsed = strict_json.loads(value)
        except ValueError:
            return value
    if not isinstance(parsed, Mapping):
        raise ChatError(f"{where} = {shown(value)}: must be a JSON object")
    return parsed


def _in_call_order(messages: list[Message]) -> Iterator[Message]:
    calls: tuple[Call, ...] = ()
    for is_tool, run in itertools.groupby(messages, key=lambda message: message.role == "tool"):
        if is_tool:
            yield from _results_in_order(list(run), calls)
            continue
        for message in run:
            calls = message.calls if message.role == "assistant" else calls
            yield message


def _results_in_order(results: list[Message], calls: tuple[Call, ...]) -> list[Message]:
    """The results of a run by the position of their calls, named after them; as they are if one has no call."""
    positions: dict[str, int] = {}
    for position, call in enumerate(calls):
        if call.id is not None:
            positions.setdefault(call.id, position)
    matched = [positions.get(result.call_id) if result.call_id is not None else None for result in results]
    pairs = [(position, result) for position, result in zip(matched, results, strict=True) if position is not None]
    if len(pairs) < len(results):
        return results
    return [replace(result, tool=calls[position].name) for position, result in sorted(pairs, key=lambda pair: pair[0])]


def _text(message: Mapping[str, Any], field: str, where: str) -> str | None:
    value = message.get(field)
    if value is not None and not isinstance(value, str):
        raise ChatError(f"{where}.{field} = {shown(value)}: must be a string")
    return value


def kind(value: Any) -> str:
    """What a value is, for a message."""
    return {dict: "an object", list: "a list", str: "a string", type(None): "null"}.get(type(value), shown(value))


def shown(value: Any) -> str:
    """A value for a message, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
