"""A chat request to K3's prompt: messages between markers, encoded segment by segment (spec, section 4).

Only markers and image spans become special ids. Every text, tag and attribute value is encoded alone and without
specials, so no text can forge a marker, and no merge crosses the edge of a segment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from k3jax.text.messages import Call, ChatError, Message, read_messages, shown
from k3jax.text.tokenizer import END_OF_MESSAGE, MEDIA_PAD, Tokenizer
from k3jax.vision.image import image_token_count

OPEN, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"
MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_END = "<|media_begin|>", "<|media_content|>", "<|media_end|>"
EFFORTS = ("low", "high", "max")  # the prompt's own text also names `medium`, which the release refuses

# The fixed texts of the format, byte for byte.
_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
_MORE_TOOLS = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n"
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel),"
    " supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_TOOL_CHOICE = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
_RESPONSE_FORMAT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n"


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A rendered chat. `image_order[i]` is the index in `image_sizes` of the i-th image span.

    `completions` are the spans [start, end) of `ids` that the model writes: of each assistant's message, what follows
    the channel that a generation prompt opens, with its end token.
    """

    text: str
    ids: list[int]
    image_order: tuple[int, ...] = ()
    completions: tuple[tuple[int, int], ...] = ()


def render_chat(
    messages: Sequence[Any],
    *,
    tokenizer: Tokenizer,
    tools: Sequence[Any] | None = None,
    tool_choice: Any = None,
    response_format: Any = None,
    thinking: bool = True,
    effort: str | None = "max",
    image_sizes: Sequence[tuple[int, int]] = (),
    add_generation_prompt: bool = True,
) -> Prompt:
    """The prompt of a chat in OpenAI's form; the completion starts inside the channel that the prompt leaves open.

    `effort` None writes no effort message. `image_sizes` are the original (width, height) in pixels of the image parts,
    in the order of `messages`. A system message that declares tools is rendered without its content, as the release
    does. Raises `ChatError`, a ValueError, for what must be refused.
    """
    if effort is not None and effort not in EFFORTS:
        raise ChatError(f"effort = {shown(effort)}: must be one of {', '.join(EFFORTS)}", param="reasoning_effort")
    conversation, num_images = read_messages(messages)
    if num_images != len(image_sizes):
        raise ChatError(f"messages hold {num_images} images, but {len(image_sizes)} image sizes are given")
    writer = _Writer(tokenizer=tokenizer, image_sizes=image_sizes)
    if tools:
        writer.system("tool-declare", _TOOLS + _fenced(_list_of(tools, "tools"), "tools"))
    if thinking and effort is not None:
        writer.system("thinking-effort", _EFFORT.format(effort))
    _write_conversation(writer, conversation, thinking=thinking)
    if (choice := _tool_choice(tool_choice)) is not None:
        writer.system("tool-choice", choice)
    if (body := _response_format(response_format)) is not None:
        writer.system("response-format", body)
    if add_generation_prompt:
        writer.open("message", role="assistant")
        writer.open("think" if thinking else "response")
    return writer.prompt()


@dataclass(kw_only=True)
class _Writer:
    """Collects segments. Words of the format, which come again and again, are encoded once."""

    tokenizer: Tokenizer
    image_sizes: Sequence[tuple[int, int]]
    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    images: list[int] = field(default_factory=list)
    completions: list[tuple[int, int]] = field(default_factory=list)
    _words: dict[str, list[int]] = field(default_factory=dict)

    def text(self, text: str) -> None:
        """A segment in which nothing is special."""
        self.texts.append(text)
        self.ids += self.tokenizer.encode(text)

    def marker(self, spelling: str, count: int = 1) -> None:
        """A special slot, `count` times."""
        token = self.tokenizer.special_id(spelling)
        if token is None:
            raise ChatError(f"the tokenizer has no special {spelling!r}, which chats need")
        self.texts.append(spelling * count)
        self.ids += [token] * count

    def word(self, text: str) -> None:
        """A tag, an attribute's name or its punctuation."""
        if text not in self._words:
            self._words[text] = self.tokenizer.encode(text)
        self.texts.append(text)
        self.ids += self._words[text]

    def open(self, tag: str, **attributes: str) -> None:
        self.marker(OPEN)
        self.word(tag)
        for key, value in attributes.items():
            self.word(f" {key}")
            self.word('="')
            self.text(value.replace("&", "&amp;").replace('"', "&quot;"))
            self.word('"')
        self.marker(SEP)

    def close(self, tag: str) -> None:
        self.marker(CLOSE)
        self.word(tag)
        self.marker(SEP)

    def end_message(self) -> None:
        self.close("message")
        self.marker(END_OF_MESSAGE)

    def system(self, kind: str, body: str) -> None:
        """A message that the request's options make."""
        self.open("message", role="system", type=kind)
        self.text(body)
        self.end_message()

    def parts(self, parts: Sequence[str | int]) -> None:
        for part in parts:
            if isinstance(part, str):
                self.text(part)
            else:
                self.image(part)

    def image(self, index: int) -> None:
        width, height = self.image_sizes[index]
        self.images.append(index)
        self.marker(MEDIA_BEGIN)
        self.text(f"image {width}x{height}")
        self.marker(MEDIA_CONTENT)
        self.marker(MEDIA_PAD, image_token_count(width, height))
        self.marker(MEDIA_END)

    def prompt(self) -> Prompt:
        return Prompt(
            text="".join(self.texts),
            ids=self.ids,
            image_order=tuple(self.images),
            completions=tuple(self.completions),
        )


def render_video(chunks: Sequence[tuple[str, int]], *, tokenizer: Tokenizer) -> Prompt:
    """A video by the (timestamp, tokens) of its chunks (`k3jax.vision.video`), to stand within a prompt.

    The layout is that of the model before K3; no chat leads here.
    """
    writer = _Writer(tokenizer=tokenizer, image_sizes=())
    for timestamp, num_tokens in chunks:
        writer.text(timestamp)
        writer.marker(MEDIA_BEGIN)
        writer.text("video")
        writer.marker(MEDIA_CONTENT)
        writer.marker(MEDIA_PAD, num_tokens)
        writer.marker(MEDIA_END)
    return writer.prompt()


def _write_conversation(writer: _Writer, messages: Sequence[Message], *, thinking: bool) -> None:
    calls: tuple[Call, ...] = ()
    num_results = 0  # since the last assistant's message
    for message in messages:
        if message.role == "assistant":
            calls, num_results = message.calls, 0
            _write_assistant(writer, message, thinking=thinking)
        elif message.role == "tool":
            num_results += 1
            writer.open("message", role="tool", tool=_result_name(message, calls, num_results), index=str(num_results))
            writer.parts(message.parts)
            writer.end_message()
        elif message.tools:
            writer.system("tool-declare", _MORE_TOOLS + _fenced(message.tools, "messages"))
        else:
            writer.open("message", role=message.role, **_name(message))
            writer.parts(message.parts)
            writer.end_message()


def _write_assistant(writer: _Writer, message: Message, *, thinking: bool) -> None:
    """All earlier reasoning is kept; without thinking there is no think channel at all."""
    writer.open("message", role="assistant", **_name(message))
    writer.open("think" if thinking else "response")
    start = len(writer.ids)
    if thinking:
        writer.text(message.reasoning if message.reasoning.strip() else "")
        writer.close("think")
        writer.open("response")
    writer.parts(message.parts)
    writer.close("response")
    if message.calls:
        writer.open("tools")
        for index, call in enumerate(message.calls, start=1):
            writer.open("call", tool=call.name, index=str(index))
            _write_arguments(writer, call.arguments)
            writer.close("call")
        writer.close("tools")
    writer.end_message()
    writer.completions.append((start, len(writer.ids)))


def _write_arguments(writer: _Writer, arguments: Mapping[str, Any] | str) -> None:
    if isinstance(arguments, str):
        writer.open("json", type="object")
        writer.text(arguments)
        writer.close("json")
        return
    for key, value in arguments.items():
        if not isinstance(key, str):
            raise ChatError(f"a tool call's argument is named {shown(key)}: must be a string")
        writer.open("argument", key=key, type=_json_type(value))
        writer.text(value if isinstance(value, str) else _json(value, "messages"))
        writer.close("argument")


def _result_name(message: Message, calls: Sequence[Call], number: int) -> str:
    """The tool that result `number` (from 1) is of: what it or its call says, else the call at its position."""
    if message.tool is not None:
        return message.tool
    if number > len(calls):
        raise ChatError(
            f"tool result {number} after an assistant's message with {len(calls)} tool calls: name its tool, or give"
            " the tool_call_id of a call"
        )
    return calls[number - 1].name


def _tool_choice(choice: Any) -> str | None:
    if choice is None or choice == "auto":
        return None
    if not isinstance(choice, str) or choice not in _TOOL_CHOICE:
        raise ChatError(f"tool_choice = {shown(choice)}: must be 'auto', 'none' or 'required'", param="tool_choice")
    return _TOOL_CHOICE[choice]


def _response_format(response_format: Any) -> str | None:
    """The body of the response-format message; a schema may also stand without OpenAI's wrapper."""
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else response_format
    if kind == "text":
        return None
    if kind == "json_object":
        return _RESPONSE_FORMAT.format(kind)
    if kind != "json_schema" or not isinstance(response_format, Mapping):
        raise ChatError(
            f"response_format = {shown(response_format)}: its type must be 'text', 'json_object' or 'json_schema'",
            param="response_format",
        )
    wrapped = response_format.get("json_schema")
    schema = wrapped.get("schema", wrapped) if isinstance(wrapped, Mapping) else wrapped
    if schema is None:
        raise ChatError("response_format.json_schema.schema is missing", param="response_format")
    return _RESPONSE_FORMAT.format(kind) + _SCHEMA + _fenced(schema, "response_format")


def _fenced(value: Any, param: str) -> str:
    return f"```json\n{_json(value, param, sort_keys=True, separators=(',', ':'))}\n```"


def _json(value: Any, param: str, **options: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, **options)
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatError(f"{param}: a value cannot be written as JSON ({error})", param=param) from error


def _json_type(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if value is None or isinstance(value, str):
        return "null" if value is None else "string"
    return "object" if isinstance(value, Mapping) else "array"


def _name(message: Message) -> dict[str, str]:
    return {"name": message.name} if message.name else {}


def _list_of(value: Any, param: str) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ChatError(f"{param} = {shown(value)}: must be a list", param=param)
    return value
