"""Text files to rows of tokens: sources, packing, and the batches of a training run."""

from k3jax.data.batch import Batch, BatchIterator, Corpus, load_corpus

__all__ = ["Batch", "BatchIterator", "Corpus", "load_corpus"]
