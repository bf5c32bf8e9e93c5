"""JSON by schema: which tokens may follow in a chat with a response format.

Reasoning is free. From the response channel on, llguidance says which tokens keep the text inside the schema, and the
markers around it are the only choice. llguidance, because it takes a tiktoken vocabulary as it is, needs no other
package and works on the host, where it costs a fraction of a millisecond per token.
"""

from __future__ import annotations

import json
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import UInt32

from k3jax.serve.fields import RequestError
from k3jax.text import CompletionParser, Tokenizer
from k3jax.text.chat import CLOSE, OPEN, SEP

if TYPE_CHECKING:
    import tiktoken
    from llguidance import LLMatcher, LLTokenizer

# A model that is unsure could write white space for ever: at most a line break and an indentation.
_OPTIONS: Any = {"whitespace_pattern": r"\n? {0,40}"}
_vocabularies: weakref.WeakKeyDictionary[tiktoken.Encoding, LLTokenizer] = weakref.WeakKeyDictionary()


class ConstraintError(RuntimeError):
    """The grammar cannot go on, for example because the schema needs too much work for one token."""


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """A checked response format of one request."""

    grammar: str
    tokenizer: Tokenizer
    thinking: bool
    tools: bool  # whether the model may call tools, after a response or instead of one

    @classmethod
    def of(cls, schema: Any, *, tokenizer: Tokenizer, thinking: bool, tools: bool) -> Constraint:
        """The constraint to a JSON schema. Raises `RequestError` for one that cannot be enforced."""
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            message = "response_format: JSON is enforced with the package llguidance, which is not installed"
            raise RequestError(message, code="unsupported", param="response_format") from error
        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps({} if schema is True else schema), _OPTIONS)
            failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, _vocabulary(tokenizer))
        except ValueError as error:
            failed, messages = True, [str(error)]
        if failed:
            reason = " ".join(messages[0].split())
            raise RequestError(f"response_format: the schema cannot be enforced ({reason})", param="response_format")
        constraint = cls(grammar=grammar, tokenizer=tokenizer, thinking=thinking, tools=tools)
        constraint.start()
        return constraint

    def start(self) -> Guide:
        """The state of a new completion."""
        return Guide(self)


class Guide:
    """Follows one completion, token by token.

    Bit t%32 of word t//32 of `allowed` says whether token t may come next; None allows all.
    """

    def __init__(self, constraint: Constraint) -> None:
        self._constraint, self._tokenizer = constraint, constraint.tokenizer
        self._parser = CompletionParser(tokenizer=self._tokenizer, thinking=constraint.thinking)
        self._open, self._close, self._sep = (_special(self._tokenizer, name) for name in (OPEN, CLOSE, SEP))
        self._forced: deque[int] = deque()
        self._matcher: LLMatcher | None = None
        self._started = False  # the JSON has; there is one
        self._before(reasoning=False)
        self.allowed = self._allowed()

    def advance(self, token: int) -> None:
        """Take the token that was chosen. Raises `ConstraintError`."""
        reasoning = self._parser.in_reasoning
        self._parser.feed([token])
        if self._forced:
            self._forced.popleft()
        elif self._matcher is not None:
            self._advance_json(self._matcher, token)
        self._before(reasoning=reasoning)
        self.allowed = self._allowed()

    def _allowed(self) -> UInt32[np.ndarray, "W"] | None:
        num_words = -(-self._tokenizer.vocab_size // 32)
        if self._forced:
            return _bits(np.zeros(num_words, np.uint32), self._forced[0])
        if self._matcher is None:
            return None
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[:num_words]
        if self._matcher.is_error():
            raise ConstraintError(self._matcher.get_error())
        return words if self._started or not self._constraint.tools else _bits(words.copy(), self._close)

    def _advance_json(self, matcher: LLMatcher, token: int) -> None:
        self._started = True
        if token == self._close:  # allowed where the JSON is complete
            self._matcher = None
            self._forced.extend([*self._tokenizer.encode("response"), self._sep])
            if not self._constraint.tools:
                end = self._tokenizer.end_of_message_id
                self._forced.extend([self._close, *self._tokenizer.encode("message"), self._sep, end])
        elif not matcher.consume_token(token):
            raise ConstraintError(matcher.get_error())

    def _before(self, *, reasoning: bool) -> None:
        """Prepare for the next token: the JSON when the response begins, its opener when the reasoning has ended."""
        if self._parser.in_response and self._matcher is None and not self._started:
            from llguidance import LLMatcher

            self._matcher = LLMatcher(_vocabulary(self._tokenizer), self._constraint.grammar)
        elif reasoning and self._parser.between_channels and not self._constraint.tools:
            self._forced.extend([self._open, *self._tokenizer.encode("response"), self._sep])


def response_schema(response_format: Any) -> Any:
    """The JSON schema that a response format asks for; None for text."""
    kind = response_format.get("type") if isinstance(response_format, dict) else response_format
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        return None
    wrapped = response_format["json_schema"]
    return wrapped.get("schema", wrapped) if isinstance(wrapped, dict) else wrapped


def _vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    """The tokenizer as llguidance has it, made once; what it calls the end of a text is the marker after the JSON."""
    from llguidance.tiktoken import lltokenizer_from_encoding

    encoding = tokenizer.encoding
    if encoding not in _vocabularies:
        end = _special(tokenizer, CLOSE)
        _vocabularies[encoding] = lltokenizer_from_encoding(encoding, n_vocab=tokenizer.vocab_size, eos_token=end)
    return _vocabularies[encoding]


def _special(tokenizer: Tokenizer, spelling: str) -> int:
    token = tokenizer.special_id(spelling)
    assert token is not None  # a chat's prompt has been rendered with it
    return token


def _bits(words: UInt32[np.ndarray, "W"], token: int) -> UInt32[np.ndarray, "W"]:
    words[token // 32] |= np.uint32(1 << (token % 32))
    return words
