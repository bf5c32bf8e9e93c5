"""A completion to reasoning, content and tool calls, in one pass over pieces of any size (spec, section 4.7).

The prompt leaves a channel open, think or response, and the completion goes on in it. On token ids a marker is its id
and quoted spellings are text; on text a marker is its spelling. Both run through the same states: for ids, markers
become characters that decoded text cannot hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from k3jax.text.tokenizer import Tokenizer
from k3jax.text.tool_calls import SPELLINGS, Leave, Markers, ToolCall, ToolsChannel

_TEXT_MARKERS = Markers(**SPELLINGS)
_ID_MARKERS = Markers(open="\ud800", close="\ud801", sep="\ud802", end="\ud803")  # no UTF-8 decodes to these


@dataclass(frozen=True, kw_only=True)
class ParsedCompletion:
    """What a completion says. `tool_calls` are `{"index", "name", "arguments"}`, the arguments as a parsed object.

    `reasoning` is None without thinking, `content` None where no response began and where calls stand for it.
    Arguments that were meant as JSON and are none are the text itself.
    """

    reasoning: str | None
    content: str | None
    tool_calls: list[dict[str, Any]]
    finish_reason: str


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What has become certain since the last look: text to append, and complete calls."""

    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...]


def parse_completion(
    completion: Iterable[int] | str, *, tokenizer: Tokenizer, thinking: bool = True, finish: str = "stop"
) -> ParsedCompletion:
    """Parse a whole completion, ids or text; `thinking` says which channel the prompt left open, `finish` why it ended.

    Never fails on what a model wrote; raises ValueError for an id outside the vocabulary.
    """
    parser = CompletionParser(tokenizer=tokenizer, thinking=thinking)
    parser.feed(completion)
    return parser.finish(finish)


class _State(Enum):
    START = auto()  # of the open channel, where its opener may be repeated once
    THINK = auto()
    BETWEEN = auto()
    RESPONSE = auto()
    TOOLS = auto()
    DONE = auto()


class CompletionParser:
    """`parse_completion` for a completion that comes in pieces, all ids or all text; the pieces do not matter.

    `take` gives what has become certain, which is never taken back: text that could still begin a marker is held.
    """

    def __init__(self, *, tokenizer: Tokenizer, thinking: bool = True) -> None:
        self._tokenizer, self._thinking = tokenizer, thinking
        self._front: _Ids | None = None
        self._machine: _Machine | None = None
        self._taken = [0, 0, 0]

    @property
    def in_reasoning(self) -> bool:
        """Whether the next piece still belongs to the think channel."""
        return self._machine.state is _State.THINK if self._machine is not None else self._thinking

    @property
    def in_response(self) -> bool:
        """Whether the next piece belongs to the response channel."""
        return self._machine.state is _State.RESPONSE if self._machine is not None else not self._thinking

    @property
    def between_channels(self) -> bool:
        """Whether a channel has ended and none has begun since."""
        return self._machine is not None and self._machine.state is _State.BETWEEN

    def feed(self, piece: Iterable[int] | str) -> None:
        """Take the next piece. Raises TypeError for a piece of the other kind than the one before."""
        if isinstance(piece, str):
            if self._front is not None:
                raise TypeError("a text after token ids: one completion is all text or all ids")
            self._ready(_TEXT_MARKERS).feed(piece)
            return
        if self._front is None:
            if self._machine is not None:
                raise TypeError("token ids after a text: one completion is all text or all ids")
            self._front = _Ids(self._tokenizer)
        self._ready(_ID_MARKERS).feed(self._front.text(piece))

    def finish(self, finish: str) -> ParsedCompletion:
        """The result, given why the completion ended: "length" when it was cut, "stop" otherwise."""
        machine = self._ready(_TEXT_MARKERS)
        if self._front is not None:
            machine.feed(self._front.finish())
        machine.end(cut=finish == "length")
        content = "".join(machine.content)
        calls = machine.tools.calls
        return ParsedCompletion(
            reasoning="".join(machine.reasoning) if self._thinking else None,
            content=content if machine.responded and (content or not calls) else None,
            tool_calls=[{"index": c.index, "name": c.name, "arguments": c.arguments} for c in calls],
            finish_reason="tool_calls" if calls else finish,
        )

    def take(self) -> Delta:
        """What has become certain since the last `take`; after `finish`, the rest."""
        machine = self._ready(_TEXT_MARKERS)
        lists: tuple[list[Any], ...] = (machine.reasoning, machine.content, machine.tools.calls)
        reasoning, content, calls = (items[start:] for items, start in zip(lists, self._taken, strict=True))
        self._taken = [len(items) for items in lists]
        return Delta(reasoning="".join(reasoning), content="".join(content), tool_calls=tuple(calls))

    def _ready(self, markers: Markers) -> _Machine:
        if self._machine is None:
            self._machine = _Machine(markers, thinking=self._thinking)
        return self._machine


class _Ids:
    """Token ids to text with `_ID_MARKERS`, an incomplete code point held back."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decoder = tokenizer.decoder()
        self._markers: dict[int | None, str] = dict.fromkeys(tokenizer.stop_ids, _ID_MARKERS.end)
        for name in ("open", "close", "sep"):
            self._markers[tokenizer.special_id(SPELLINGS[name])] = getattr(_ID_MARKERS, name)

    def text(self, ids: Iterable[int]) -> str:
        pieces = []
        for token in map(int, ids):  # NumPy's integers too
            marker = self._markers.get(token)
            if marker is None:
                pieces.append(self._decoder.feed(token))
            else:
                pieces += (self._decoder.finish(), marker)
        return "".join(pieces)

    def finish(self) -> str:
        return self._decoder.finish()


class _Search:
    """Finds the first of several strings in a text, and how much of the text's end could become one."""

    def __init__(self, *strings: str) -> None:
        self._find = re.compile("|".join(map(re.escape, strings)))
        self._starts = re.compile("|".join(sorted({re.escape(string[0]) for string in strings})))
        self._prefixes = {string[:length] for string in strings for length in range(1, len(string))}
        self._longest = max(map(len, strings)) - 1

    def first(self, text: str, position: int) -> re.Match[str] | None:
        return self._find.search(text, position)

    def held(self, text: str, position: int) -> int:
        """Where the longest end of `text[position:]` begins that could become one of the strings."""
        for match in self._starts.finditer(text, max(position, len(text) - self._longest)):
            if text[match.start() :] in self._prefixes:
                return match.start()
        return len(text)


class _Machine:
    """The states of a completion. `reasoning` and `content` are certain text in pieces."""

    def __init__(self, markers: Markers, *, thinking: bool) -> None:
        self.reasoning: list[str] = []
        self.content: list[str] = []
        self.tools = ToolsChannel(markers)
        self.responded = not thinking
        self._markers, self._state = markers, _State.START
        self._channel = _State.THINK if thinking else _State.RESPONSE
        self._rest = ""  # not yet certain: at most the beginning of a marker
        close, opening = markers.close, markers.open
        close_message = f"{close}message{markers.sep}"
        self._opener = f"{opening}{'think' if thinking else 'response'}{markers.sep}"
        response, tools = f"{opening}response{markers.sep}", f"{opening}tools{markers.sep}"
        close_think, close_response = f"{close}think{markers.sep}", f"{close}response{markers.sep}"
        self._next = {
            close_think: _State.BETWEEN,
            close_response: _State.BETWEEN,
            response: _State.RESPONSE,
            tools: _State.TOOLS,
            close_message: _State.DONE,
            markers.end: _State.DONE,
        }
        self._searches = {
            _State.THINK: _Search(close_think, response, tools, close_message, markers.end),
            _State.BETWEEN: _Search(response, tools, close_message, markers.end),
            _State.RESPONSE: _Search(close_response, tools, close_message, markers.end),
            _State.TOOLS: _Search(opening, close, markers.sep, markers.end),
        }

    @property
    def state(self) -> _State:
        """Where the next piece goes."""
        return self._channel if self._state is _State.START else self._state

    def feed(self, piece: str) -> None:
        text, position = self._rest + piece, 0
        if self._state is _State.START:
            if len(text) < len(self._opener) and self._opener.startswith(text):
                self._rest = text
                return
            self._state = self._channel
            position = len(self._opener) if text.startswith(self._opener) else 0
        while self._state is not _State.DONE:
            search = self._searches[self._state]
            match = search.first(text, position)
            if match is None:
                held = search.held(text, position)
                self._emit(text[position:held])
                self._rest = text[held:]
                return
            self._emit(text[position : match.start()])
            self._enter(match.group())
            position = match.end()
        self._rest = ""

    def end(self, *, cut: bool) -> None:
        """What is held is a marker that was cut, which is dropped, or text after all."""
        rest, self._rest = self._rest, ""
        if self._state is _State.START:
            self._state = self._channel
        if not cut and self._state is not _State.DONE:
            self._emit(rest)
        self._state = _State.DONE

    def _emit(self, text: str) -> None:
        if self._state is _State.TOOLS:
            self.tools.text(text)
        elif text and self._state in (_State.THINK, _State.RESPONSE):
            channel = self.reasoning if self._state is _State.THINK else self.content
            channel.append(self._markers.spelled(text))

    def _enter(self, marker: str) -> None:
        if self._state is _State.TOOLS:
            leave = self.tools.marker(marker)
            if leave is not None:
                after = {Leave.BETWEEN: _State.BETWEEN, Leave.RESPONSE: _State.RESPONSE, Leave.DONE: _State.DONE}
                self._state = after[leave]
        else:
            self._state = self._next[marker]
        self.responded |= self._state is _State.RESPONSE
