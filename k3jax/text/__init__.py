"""Text to token ids and back."""

from k3jax.text.tokenizer import IncrementalDecoder, Tokenizer

__all__ = ["IncrementalDecoder", "Tokenizer"]
