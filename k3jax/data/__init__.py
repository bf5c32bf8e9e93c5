"""Documents to rows of tokens: sources, packing, and the batches of a training run."""

from k3jax.data.batch import Batch, BatchIterator, Corpus, join_positions, load_corpus

__all__ = ["Batch", "BatchIterator", "Corpus", "join_positions", "load_corpus"]
