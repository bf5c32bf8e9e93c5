"""From the tokens of one request to a choice of its result: text or message, stop strings, log-probabilities."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Literal

from k3jax.serve.request import Job
from k3jax.serve.scheduler import Event, Request, TokenLogprobs
from k3jax.text import CompletionParser, Tokenizer
from k3jax.text.tool_calls import ToolCall

LOWEST_LOGPROB = -9999.0  # what stands for minus infinity, which JSON does not have


class StopStrings:
    """Text in pieces, ended before the first stop string that completes.

    Text that could still become a stop string is held back, so what `feed` has returned is never taken back. The
    result is the same whatever the pieces: of several stop strings the one that completes first wins, and of those
    that complete together the longest.
    """

    def __init__(self, stops: tuple[str, ...] = ()) -> None:
        self._stops, self._held = stops, ""
        self.stopped = False

    @property
    def num_held(self) -> int:
        """Characters held back."""
        return len(self._held)

    def finish(self) -> str:
        """The rest: what was held back."""
        held, self._held = self._held, ""
        return held

    def feed(self, piece: str) -> str:
        """The text that is certain after `piece`."""
        if self.stopped:
            return ""
        text = self._held + piece
        ends = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)[1]]
        keep = max((_partial(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _partial(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)


class Answer(ABC):
    """One choice of a result as it grows."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self.request, self.tokenizer = request, tokenizer
        self.num_tokens = 0  # generated ones, an end id included
        self.num_reasoning = 0  # of them, those up to the end of the think channel
        self.finish: Literal["stop", "length", "tool_calls", "error"] | None = None

    @classmethod
    def of(cls, job: Job, request: Request, tokenizer: Tokenizer) -> Answer:
        """The answer to one of a job's requests."""
        if job.thinking is None:
            return TextAnswer(request, tokenizer, job.stops)
        return ChatAnswer(request, tokenizer, job.stops, thinking=job.thinking)

    @abstractmethod
    def feed(self, event: Event) -> None:
        """Take one event; sets `finish` when the answer is complete, on a stop string before the scheduler knows."""

    @abstractmethod
    def choice(self) -> dict[str, Any]:
        """OpenAI's form of the complete answer."""

    @abstractmethod
    def delta(self) -> dict[str, Any] | None:
        """OpenAI's form of what has become certain since the last call; None where nothing has.

        Put together, the deltas are the choice.
        """

    def _spell(self, token: int) -> str:
        """A token's text; bytes that are no text of their own are spelled as OpenAI does, `bytes:\\xe5\\xa4`."""
        raw = self.tokenizer.token_bytes(token)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class TextAnswer(Answer):
    """The text of a plain completion."""

    def __init__(self, request: Request, tokenizer: Tokenizer, stops: tuple[str, ...] = ()) -> None:
        super().__init__(request, tokenizer)
        self._decoder, self._stops = tokenizer.decoder(), StopStrings(stops)
        self._pieces: list[str] = []
        self._length = 0  # of `text`
        self._logprobs: list[tuple[int, int, TokenLogprobs | None]] = []  # token, offset in the text
        self._echoes = request.echo  # until the prompt is in the text
        self._given = [0, 0]  # pieces and log-probabilities that were in a delta

    @property
    def text(self) -> str:
        """The text that is certain so far."""
        return "".join(self._pieces)

    def feed(self, event: Event) -> None:
        self.num_tokens += event.token is not None
        if self._echoes:
            self._echo(event)
        if event.token is not None and event.finish != "stop":
            if event.logprobs is not None:
                self._logprobs.append((event.token, self._length + self._stops.num_held, event.logprobs))
            self._append(self._stops.feed(self._decoder.feed(event.token)))
        if event.finish:
            self._append(self._stops.feed(self._decoder.finish()))
            self._append(self._stops.finish())
        self.finish = "stop" if self._stops.stopped else event.finish

    def _echo(self, event: Event) -> None:
        """Begin with the prompt, and with its log-probabilities if they came; its first token has none."""
        self._echoes = False
        for token, logprobs in zip_longest(self.request.prompt, (None, *event.prompt)):
            if self.request.scores_prompt:
                self._logprobs.append((token, self._length, logprobs))
            self._append(self._decoder.feed(token))

    def choice(self) -> dict[str, Any]:
        return {
            "index": self.request.sampling.choice,
            "text": self.text,
            "logprobs": self._logprobs_body(),
            "finish_reason": self.finish,
        }

    def delta(self) -> dict[str, Any] | None:
        pieces, logprobs = self._pieces[self._given[0] :], self._logprobs_body(self._given[1])
        text = "".join(pieces)
        if not text and not self.finish:
            return None
        self._given[0] += len(pieces)
        self._given[1] += len(logprobs["tokens"]) if logprobs else 0
        index = self.request.sampling.choice
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": self.finish}

    def _logprobs_body(self, first: int = 0) -> dict[str, Any] | None:
        """One entry per token that begins inside the text, from the `first` on."""
        if self.request.top_logprobs is None:
            return None
        ended = self.finish and not self._stops.stopped
        shown = [entry for entry in self._logprobs if entry[1] < self._length or ended][first:]
        return {
            "tokens": [self._spell(token) for token, _, _ in shown],
            "token_logprobs": [entry and _finite(entry.logprob) for _, _, entry in shown],
            "top_logprobs": [
                entry and {self._spell(token): _finite(value) for token, value in entry.top} for _, _, entry in shown
            ],
            "text_offset": [offset for _, offset, _ in shown],
        }

    def _append(self, piece: str) -> None:
        self._pieces.append(piece)
        self._length += len(piece)


@dataclass
class _Channel:
    """The text of one channel up to a stop string."""

    stops: StopStrings
    pieces: list[str] = field(default_factory=list)
    given: int = 0  # pieces that were taken

    def take(self) -> str:
        """The text that has become certain since the last call."""
        text, self.given = "".join(self.pieces[self.given :]), len(self.pieces)
        return text

    def feed(self, piece: str) -> None:
        self.pieces.append(self.stops.feed(piece))

    def text(self) -> str:
        """The whole text, what was held back included."""
        self.pieces.append(self.stops.finish())
        return "".join(self.pieces)


class ChatAnswer(Answer):
    """The message of a chat completion. Stop strings end its reasoning or its content, not a call's arguments."""

    def __init__(self, request: Request, tokenizer: Tokenizer, stops: tuple[str, ...], *, thinking: bool) -> None:
        super().__init__(request, tokenizer)
        self._parser = CompletionParser(tokenizer=tokenizer, thinking=thinking)
        self._reasoning, self._content = _Channel(StopStrings(stops)), _Channel(StopStrings(stops))
        self._calls: list[ToolCall] = []
        self._logprobs: list[tuple[int, TokenLogprobs]] = []
        self._message: dict[str, Any] = {}
        self._given = [0, 0]  # calls and log-probabilities that were in a delta

    def feed(self, event: Event) -> None:
        if event.token is not None:
            self.num_tokens += 1
            self.num_reasoning += self._parser.in_reasoning
            if event.logprobs is not None:
                self._logprobs.append((event.token, event.logprobs))
            self._parser.feed([event.token])
            self._take()
        if event.finish == "error":
            self.finish = "error"
        elif event.finish or self._stopped:
            self._end("length" if event.finish == "length" and not self._stopped else "stop")

    def choice(self) -> dict[str, Any]:
        return {
            "index": self.request.sampling.choice,
            "message": self._message,
            "logprobs": self._logprobs_body(),
            "finish_reason": self.finish,
        }

    def delta(self) -> dict[str, Any] | None:
        pieces = {"reasoning_content": self._reasoning.take(), "content": self._content.take()}
        # A channel that began and stayed empty is an empty text, not a missing one.
        new: dict[str, Any] = {name: text for name, text in pieces.items() if text or self._message.get(name) == ""}
        if calls := self._calls[self._given[0] :]:
            new["tool_calls"] = [{"index": i} | self._call_body(c) for i, c in enumerate(calls, self._given[0])]
        if not new and not self.finish:
            return None
        logprobs = self._logprobs_body(self._given[1])
        self._given = [len(self._calls), len(self._logprobs)]
        index = self.request.sampling.choice
        return {"index": index, "delta": new, "logprobs": logprobs, "finish_reason": self.finish}

    @property
    def _stopped(self) -> bool:
        return self._reasoning.stops.stopped or self._content.stops.stopped

    def _take(self) -> None:
        delta = self._parser.take()
        self._reasoning.feed(delta.reasoning)
        if not self._reasoning.stops.stopped:
            self._content.feed(delta.content)
            self._calls += delta.tool_calls

    def _end(self, reason: Literal["stop", "length"]) -> None:
        parsed = self._parser.finish(reason)
        self._take()
        content = self._content.text()
        self._message = {
            "role": "assistant",
            "content": content if content or parsed.content is not None else None,
            "reasoning_content": self._reasoning.text() if parsed.reasoning is not None else None,
        }
        if self._calls:
            self._message["tool_calls"] = [self._call_body(call) for call in self._calls]
        reason = "stop" if self._stopped else reason  # the last piece may have completed a stop string
        self.finish = "tool_calls" if self._calls else reason

    def _call_body(self, call: ToolCall) -> dict[str, Any]:
        """A call in OpenAI's form. Its id follows from the request, so that a rerun gives the same result."""
        name = f"{self.request.key}/{self.request.sampling.seed}/{call.index}"
        identity = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:24]
        is_text = isinstance(call.arguments, str)
        arguments = call.arguments if is_text else json.dumps(call.arguments, ensure_ascii=False)
        return {"id": f"call_{identity}", "type": "function", "function": {"name": call.name, "arguments": arguments}}

    def _logprobs_body(self, first: int = 0) -> dict[str, Any] | None:
        """One entry per generated token, those of reasoning, markers and the end included, from the `first` on."""
        if self.request.top_logprobs is None:
            return None
        entries = [
            self._entry(token, values.logprob) | {"top_logprobs": [self._entry(*pair) for pair in values.top]}
            for token, values in self._logprobs[first:]
        ]
        return {"content": entries}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self.tokenizer.token_bytes(token)
        return {"token": self._spell(token), "logprob": _finite(logprob), "bytes": list(raw)}


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
