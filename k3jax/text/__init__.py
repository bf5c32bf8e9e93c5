"""Text to token ids and back; chats to prompts, completions to messages."""

from k3jax.text.chat import Prompt, render_chat
from k3jax.text.completion import CompletionParser, Delta, ParsedCompletion, parse_completion
from k3jax.text.messages import ChatError
from k3jax.text.tokenizer import IncrementalDecoder, Tokenizer

__all__ = [
    "ChatError",
    "CompletionParser",
    "Delta",
    "IncrementalDecoder",
    "ParsedCompletion",
    "Prompt",
    "Tokenizer",
    "parse_completion",
    "render_chat",
]
