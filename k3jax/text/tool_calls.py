"""The tools channel of a completion: calls with their arguments, read piece by piece (spec, section 4.7).

    open(call tool="f" index="1") { open(argument key="k" type="number") 1 close(argument) } close(call) ...

A call or an argument counts when it is closed. What closes or reopens a level drops everything unfinished inside it:
another call drops the open one, the end of the channel drops both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from k3jax.text import strict_json

# Possessive and from the start of a name only, so that any header costs one pass.
_ATTRIBUTE = re.compile(r'(?<![\w-])([\w-]++)="([^"]*+)"')
SPELLINGS = {"open": "<|open|>", "close": "<|close|>", "sep": "<|sep|>", "end": "<|end_of_msg|>"}


@dataclass(frozen=True, kw_only=True)
class Markers:
    """How the markers look in the text to parse: their spellings, or characters that no decoded text holds."""

    open: str
    close: str
    sep: str
    end: str

    def spelled(self, text: str) -> str:
        """`text` with the markers that turned out to be part of it as they are spelled."""
        for name, spelling in SPELLINGS.items():
            text = text.replace(getattr(self, name), spelling)
        return text


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A complete call. `arguments` that are a string are text that the model meant as JSON and that is none."""

    index: int  # from 0, in the order of the completion
    name: str
    arguments: dict[str, Any] | str


class Leave(Enum):
    """Where the completion goes on after the tools channel."""

    BETWEEN = auto()
    RESPONSE = auto()
    DONE = auto()


@dataclass(kw_only=True)
class _Block:
    """An open `argument` or `json`."""

    tag: str
    attributes: dict[str, str]
    pieces: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class _OpenCall:
    name: str | None
    arguments: dict[str, Any] = field(default_factory=dict)
    json_texts: list[str] = field(default_factory=list)
    mixed: bool = False  # something beside one json block, which then does not count


class ToolsChannel:
    """Collects `calls` from texts and markers in turn."""

    def __init__(self, markers: Markers) -> None:
        self.calls: list[ToolCall] = []
        self._markers = markers
        self._call: _OpenCall | None = None
        self._block: _Block | None = None
        self._header: list[str] | None = None  # an opening or closing marker and what follows, until a separator

    def text(self, text: str) -> None:
        """A text without markers."""
        if self._header is not None:
            self._header.append(text)
        elif self._block is not None:
            self._block.pieces.append(text)
        elif self._call is not None and text.strip():
            self._call.mixed = True

    def marker(self, marker: str) -> Leave | None:
        """A marker; returns where to go on when it ends the channel."""
        if marker == self._markers.end:
            return self._leave(Leave.DONE)
        header, self._header = self._header, None
        if marker == self._markers.sep and header is not None:
            kind, words = header[0], "".join(header[1:])
            leave = self._leave_at(kind, words)
            if leave is not None:
                return self._leave(leave)
            if not (self._closed(words) if kind == self._markers.close else self._opened(words)):
                self.text(kind + words + marker)
            return None
        if header is not None:
            self.text("".join(header))  # no tag: another marker came before the separator
        if marker == self._markers.sep:
            self.text(marker)
        else:
            self._header = [marker]
        return None

    def _leave_at(self, kind: str, words: str) -> Leave | None:
        if kind == self._markers.close:
            return {"tools": Leave.BETWEEN, "message": Leave.DONE}.get(words)
        return Leave.RESPONSE if words == "response" and self._call is None else None

    def _opened(self, words: str) -> bool:
        """Take an opening tag; false for one that means nothing here, which is text."""
        tag = next(iter(words.split(maxsplit=1)), "")
        if tag == "call":
            self._call, self._block = _OpenCall(name=_attributes(words).get("tool")), None
        elif tag in ("argument", "json") and self._call is not None:
            self._block = _Block(tag=tag, attributes=_attributes(words))
            self._call.mixed |= tag != "json"
        else:
            return False
        return True

    def _closed(self, words: str) -> bool:
        """Take a closing tag; false for one that closes nothing here, which is text."""
        if words == "call":
            self._end_call()
        elif self._block is not None and words == self._block.tag:
            self._end_block(self._block)
        else:
            return False
        return True

    def _end_block(self, block: _Block) -> None:
        assert self._call is not None  # blocks open inside calls only
        self._block = None
        text, key = self._markers.spelled("".join(block.pieces)), block.attributes.get("key")
        if block.tag == "json":
            self._call.json_texts.append(text)
        elif key is not None:
            is_string = block.attributes.get("type", "string") == "string"
            self._call.arguments[key] = text if is_string else _value(text)

    def _end_call(self) -> None:
        call, self._call, self._block = self._call, None, None
        if call is None or call.name is None:
            return
        arguments: dict[str, Any] | str = call.arguments
        if len(call.json_texts) == 1 and not call.mixed:
            try:
                arguments = strict_json.loads(call.json_texts[0])
            except ValueError:
                arguments = call.json_texts[0]
            else:
                if not isinstance(arguments, dict):
                    return
        self.calls.append(ToolCall(index=len(self.calls), name=call.name, arguments=arguments))

    def _leave(self, leave: Leave) -> Leave:
        self._call = self._block = self._header = None
        return leave


def _attributes(words: str) -> dict[str, str]:
    """Attributes by name, unescaped in the reverse order of escaping."""
    return {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in _ATTRIBUTE.findall(words)}


def _value(text: str) -> Any:
    """The JSON value of a text, or the text where it is none."""
    try:
        return strict_json.loads(text)
    except ValueError:
        return text
