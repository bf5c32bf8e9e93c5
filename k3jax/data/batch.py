"""From a `DataConfig` to the batches of a run.

The order of rows is a function of the documents and the seed only, never of the number of hosts or of threads: step n
uses rows n*B to (n+1)*B of one shuffled, endless order, and each host takes its share of them. The place in that order
is grain's iterator state, a small JSON object that is saved beside the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grain
import jax
import numpy as np
from jaxtyping import Array, Bool, Int

from k3jax.config import ConfigError, DataConfig
from k3jax.data.packing import PackedRows, TokenStream
from k3jax.data.source import Document, read_documents
from k3jax.text import Tokenizer, render_chat

_Encoded = tuple[np.ndarray, np.ndarray | None]  # ids, and which of them are to be predicted (None: all)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of packed documents; see `PackedRows` for what a row holds."""

    tokens: Int[Array, "B T"]
    targets: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"]
    loss_mask: Bool[Array, "B T"]

    @classmethod
    def shapes(cls, rows: int, seq_len: int) -> Batch:
        """A batch of shapes, to compile for."""
        ids: Any = jax.ShapeDtypeStruct((rows, seq_len), np.int32)
        return cls(tokens=ids, targets=ids, segment_ids=ids, loss_mask=ids.update(dtype=np.bool_))


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A run's rows: those trained on, and those held out (none where nothing is evaluated)."""

    train: PackedRows
    held_out: PackedRows

    def eval_batches(self, config: DataConfig, *, batch_size: int) -> list[Batch]:
        """The same `config.eval_rows` held-out rows every time, whole batches of them, spread over all documents."""
        count = min(config.eval_rows, len(self.held_out)) // batch_size * batch_size
        if count == 0:
            raise ConfigError(
                f"data.eval_rows = {config.eval_rows}: {len(self.held_out)} rows are held out "
                f"(data.eval_fraction = {config.eval_fraction}), but an evaluation needs at least {batch_size}"
            )
        chosen = np.random.default_rng(config.shuffle_seed).permutation(len(self.held_out))[:count]
        rows = [self.held_out[index] for index in chosen]
        return [_stack(rows[first : first + batch_size]) for first in range(0, count, batch_size)]


class BatchIterator(Iterator[Batch]):
    """This host's part of every batch, without end, from a position that can be saved and sought."""

    def __init__(self, rows: PackedRows, config: DataConfig, *, host: int = 0, hosts: int = 1) -> None:
        if config.batch_size % hosts:
            raise ConfigError(f"data.batch_size = {config.batch_size} is not a multiple of the {hosts} hosts")
        order = grain.MapDataset.source(rows).seed(config.shuffle_seed).shuffle().repeat(None)[host::hosts]
        batches = order.batch(config.batch_size // hosts, drop_remainder=True)
        ahead = grain.ReadOptions(num_threads=config.workers, prefetch_buffer_size=4 * config.workers)
        self._iterator = iter(batches.to_iter_dataset(ahead))
        self._fingerprint = rows.stream.fingerprint

    def __next__(self) -> Batch:
        return Batch(**next(self._iterator))

    def position(self) -> dict[str, Any]:
        """The JSON object that `seek` takes, in this process or another."""
        return {"corpus": self._fingerprint, "iterator": self._iterator.get_state()}

    def seek(self, position: dict[str, Any]) -> None:
        """Continue at `position`; `ConfigError` where the documents are not those it was taken from."""
        if position["corpus"] != self._fingerprint:
            raise ConfigError(
                "data.source: its files changed since the checkpoint was saved "
                f"(fingerprint {self._fingerprint}, then {position['corpus']}); use another run_dir to train on them"
            )
        self._iterator.set_state(position["iterator"])


def load_corpus(config: DataConfig, tokenizer: Tokenizer) -> Corpus:
    """Read and tokenise all documents of `config.source`; they stay in memory, 2 or 4 bytes a token."""
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    train: list[_Encoded] = []
    held_out: list[_Encoded] = []
    for document in read_documents(config):
        side = held_out if document.is_held_out(config.eval_fraction) else train
        ids, trained = _encode(document, tokenizer)
        side.append((ids.astype(dtype), trained))
    if not train:
        raise ConfigError(f"data.eval_fraction = {config.eval_fraction}: all {len(held_out)} documents are held out")
    return Corpus(train=_pack(train, config, tokenizer), held_out=_pack(held_out, config, tokenizer))


def _encode(document: Document, tokenizer: Tokenizer) -> _Encoded:
    """A document's ids, and for a chat which of them the assistant writes."""
    if document.chat is not None:
        return _encode_chat(document, tokenizer)
    if tokenizer.is_bytes:  # an id is the byte's value: no need to decode
        return np.frombuffer(document.data, np.uint8), None
    return np.asarray(tokenizer.encode(document.data.decode("utf-8", "replace")), np.int64), None


def _encode_chat(document: Document, tokenizer: Tokenizer) -> _Encoded:
    try:
        prompt = render_chat(**document.chat or {}, tokenizer=tokenizer, add_generation_prompt=False)
    except ValueError as error:
        raise ConfigError(f"data.source: {document.name}: {error}") from error
    trained = np.zeros(len(prompt.ids), np.bool_)
    for start, end in prompt.completions:
        trained[start:end] = True
    return np.asarray(prompt.ids, np.int64), trained


def _pack(documents: list[_Encoded], config: DataConfig, tokenizer: Tokenizer) -> PackedRows:
    trained = [np.ones(len(ids), np.bool_) if mask is None else mask for ids, mask in documents]
    stream = TokenStream.shuffled(
        [ids for ids, _ in documents],
        eos_id=tokenizer.eos_id,
        seed=config.shuffle_seed,
        trained=trained if any(mask is not None for _, mask in documents) else None,
    )
    return PackedRows(stream=stream, seq_len=config.seq_len)


def _stack(rows: list[dict[str, Any]]) -> Batch:
    columns: dict[str, Any] = {key: np.stack([row[key] for row in rows]) for key in rows[0]}
    return Batch(**columns)
