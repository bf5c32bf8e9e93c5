"""From the tokens of one request to its text: stop strings, held-back text, log-probabilities by token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from k3jax.serve.scheduler import Event, Request, TokenLogprobs
from k3jax.text import Tokenizer


class TextStream:
    """Tokens to text, ended before the first stop string that completes.

    Text that could still become a stop string is held back, so what `feed` has returned is never taken back. The
    result is the same whatever the pieces: of several stop strings the one that completes first wins, and of those
    that complete together the longest.
    """

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...] = ()) -> None:
        self._decoder, self._stops, self._held = tokenizer.decoder(), stops, ""
        self.stopped = False

    @property
    def num_held(self) -> int:
        """Characters decoded but held back."""
        return len(self._held)

    def feed(self, token: int) -> str:
        """The text that is certain after `token`."""
        return self._advance(self._decoder.feed(token))

    def finish(self) -> str:
        """The rest: what was held back."""
        text = self._advance(self._decoder.finish()) + self._held
        self._held = ""
        return text

    def _advance(self, piece: str) -> str:
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


@dataclass(kw_only=True)
class Answer:
    """The completion of one request as it grows."""

    request: Request
    tokenizer: Tokenizer
    stream: TextStream
    pieces: list[str] = field(default_factory=list)
    num_tokens: int = 0  # generated ones, an end id included
    finish: Literal["stop", "length", "error"] | None = None
    logprobs: list[tuple[int, int, TokenLogprobs]] = field(default_factory=list)  # token, offset in the text
    _length: int = 0  # of `text`

    @property
    def text(self) -> str:
        """The text that is certain so far."""
        return "".join(self.pieces)

    def feed(self, event: Event) -> None:
        """Take one event; sets `finish` when the answer is complete, on a stop string before the scheduler knows."""
        self.num_tokens += event.token is not None
        if event.token is not None and event.finish != "stop":
            if event.logprobs is not None:
                self.logprobs.append((event.token, self._length + self.stream.num_held, event.logprobs))
            self._append(self.stream.feed(event.token))
        if event.finish:
            self._append(self.stream.finish())
        self.finish = "stop" if self.stream.stopped else event.finish

    def logprobs_body(self) -> dict[str, Any] | None:
        """OpenAI's `logprobs` of a completion: one entry per token that begins inside the text."""
        if self.request.top_logprobs is None:
            return None
        shown = [entry for entry in self.logprobs if entry[1] < self._length or not self.stream.stopped]
        return {
            "tokens": [self._spell(token) for token, _, _ in shown],
            "token_logprobs": [entry.logprob for _, _, entry in shown],
            "top_logprobs": [{self._spell(token): value for token, value in entry.top} for _, _, entry in shown],
            "text_offset": [offset for _, offset, _ in shown],
        }

    def _append(self, piece: str) -> None:
        self.pieces.append(piece)
        self._length += len(piece)

    def _spell(self, token: int) -> str:
        """A token's text; bytes that are no text of their own are spelled as OpenAI does, `bytes:\\xe5\\xa4`."""
        raw = self.tokenizer.token_bytes(token)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
