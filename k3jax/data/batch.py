"""From a `DataConfig` to the batches of a run.

There is one endless, shuffled order of documents, a function of the files and the seed. Row r of a batch of B rows has
its own lane of it, documents r, r + B, r + 2B and so on, packed by itself. So no row depends on how many hosts share
the batch: a host makes the rows it is asked for. The position of a run is that of every lane: the next document, and
the place among the rows that its packer last filled; it continues on any number of hosts, and no document is read twice
or left out.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, SupportsIndex

import grain
import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, Bool, Float, Int

from k3jax.config import ConfigError, DataConfig
from k3jax.data.images import find_pictures
from k3jax.data.packing import Encoded, ImageRoom, Pieces, check_pictures, pack
from k3jax.data.source import Document, Documents, find_documents
from k3jax.text import Tokenizer, render_chat
from k3jax.vision.image import PATCH

SPAN_ROWS = 8  # rows that a span of a text file fills: long enough to be cut seldom, short enough to be mixed well
BYTES_PER_TOKEN = 4  # roughly, of a tiktoken vocabulary
EVAL_CHOICE = 16  # evaluation draws its rows from this many times as many
EVAL_TOKENS = 2**24  # but not from more than these


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of packed texts; see `packing.pack` for what a row holds."""

    tokens: Int[Array, "B T"]
    targets: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"]
    loss_mask: Bool[Array, "B T"]
    patches: Float[Array, "B P 3 S S"] | None = None  # of the images in a row, where the run has room for any
    grids: Int[Array, "B G 3"] | None = None

    @classmethod
    def shapes(cls, rows: int, seq_len: int, *, row_images: int = 0, row_patches: int = 0) -> Batch:
        """A batch of shapes, to compile for."""
        ids: Any = jax.ShapeDtypeStruct((rows, seq_len), np.int32)
        images: dict[str, Any] = {}
        if row_images:
            images["patches"] = jax.ShapeDtypeStruct((rows, row_patches, 3, PATCH, PATCH), np.float32)
            images["grids"] = jax.ShapeDtypeStruct((rows, row_images, 3), np.int32)
        return cls(tokens=ids, targets=ids, segment_ids=ids, loss_mask=ids.update(dtype=np.bool_), **images)


@dataclass(frozen=True, kw_only=True)
class Texts:
    """The encoded documents of one source, as a grain data source; chats are encoded once and kept."""

    documents: Documents
    tokenizer: Tokenizer
    chats: Mapping[int, Encoded]

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: SupportsIndex) -> Encoded:
        chat = self.chats.get(int(index))
        return _encode(self.documents[index], self.tokenizer) if chat is None else chat


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The texts of several sources, each with its share of the documents."""

    parts: Sequence[Texts]
    weights: Sequence[float]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def order(self, seed: int, *, endless: bool) -> grain.MapDataset:
        """All texts in a shuffled order; where it is endless, every source is shuffled anew when it is through."""
        shuffled = [grain.MapDataset.source(part).seed(seed + n).shuffle() for n, part in enumerate(self.parts)]
        shuffled = [part.repeat(None) for part in shuffled] if endless else shuffled
        return shuffled[0] if len(shuffled) == 1 else grain.MapDataset.mix(shuffled, self.weights)

    @cached_property
    def fingerprint(self) -> str:
        """Changes when a document or a weight does."""
        parts = [(part.documents.fingerprint, weight) for part, weight in zip(self.parts, self.weights, strict=True)]
        return f"{zlib.crc32(json.dumps(parts).encode()):08x}"


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A run's texts: those trained on, and those held out (none where nothing is evaluated)."""

    train: Mixture
    held_out: Mixture

    def eval_batches(self, config: DataConfig, *, batch_size: int) -> list[Batch]:
        """The same `config.eval_rows` held-out rows every time, whole batches of them, spread over many documents."""
        rows = self._held_out_rows(config)
        count = min(config.eval_rows, len(rows)) // batch_size * batch_size
        if count == 0:
            raise ConfigError(
                f"data.eval_rows = {config.eval_rows}: {len(rows)} rows are held out "
                f"(data.eval_fraction = {config.eval_fraction}), but an evaluation needs at least {batch_size}"
            )
        chosen = np.random.default_rng(config.shuffle_seed).permutation(len(rows))[:count]
        return [_stack([rows[n] for n in chosen[first : first + batch_size]]) for first in range(0, count, batch_size)]

    def _held_out_rows(self, config: DataConfig) -> list[dict[str, Any]]:
        if not len(self.held_out):
            return []
        order = self.held_out.order(config.shuffle_seed, endless=False)
        texts = order.to_iter_dataset(grain.ReadOptions(num_threads=0))
        limit = max(config.eval_rows, min(EVAL_CHOICE * config.eval_rows, EVAL_TOKENS // config.seq_len))
        rows = pack(texts, seq_len=config.seq_len, seed=config.shuffle_seed, room=_room(config))
        return list(islice(rows, limit))

    def __str__(self) -> str:
        files = [part.documents for part in self.train.parts]
        count, size = sum(len(part.files) for part in files), sum(part.size for part in files)
        return f"{count:,} files ({size / 1e6:,.1f} MB), {len(self.train):,} texts and {len(self.held_out):,} held out"


class BatchIterator(Iterator[Batch]):
    """The given rows of every batch, without end, from a position that can be saved and sought."""

    def __init__(self, texts: Mixture, config: DataConfig, *, rows: Sequence[int] | None = None) -> None:
        """`rows`: which rows of the batch this host makes; all of them by default."""
        self._rows = range(config.batch_size) if rows is None else rows
        self._fingerprint = f"{texts.fingerprint} {config.shuffle_seed}"
        order = texts.order(config.shuffle_seed, endless=True)
        ahead = grain.ReadOptions(num_threads=config.workers, prefetch_buffer_size=max(1, 4 * config.workers))
        lanes = [order[row :: config.batch_size].to_iter_dataset(ahead) for row in self._rows]
        shape: dict[str, Any] = {"seq_len": config.seq_len, "room": _room(config)}
        packed = [pack(lane, **shape, seed=row) for row, lane in zip(self._rows, lanes, strict=True)]
        batches = grain.experimental.ZipIterDataset(packed).map(_stack)
        if config.workers:  # a batch is made while the device works on the one before
            batches = grain.experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=2)
        self._iterator = iter(batches)

    def __next__(self) -> Batch:
        return next(self._iterator)

    def position(self) -> dict[str, Any]:
        """A JSON object: the state of the lane of every row of this host. `join_positions` makes it that of a run."""
        lanes = self._iterator.get_state()["parents"]
        return {"corpus": self._fingerprint, "lanes": dict(zip(map(str, self._rows), lanes, strict=True))}

    def seek(self, position: Mapping[str, Any]) -> None:
        """Continue at a run's `position`; `ConfigError` where the documents are not those it was taken from."""
        if position["corpus"] != self._fingerprint:
            raise ConfigError(
                "data.source: its files changed since the checkpoint was saved "
                f"(fingerprint {self._fingerprint}, then {position['corpus']}); use another run_dir to train on them"
            )
        self._iterator.set_state({"parents": [position["lanes"][str(row)] for row in self._rows]})

    def close(self) -> None:
        """Stop the threads that read ahead."""
        self._iterator.close()


def join_positions(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The position of a run from those of its hosts."""
    lanes = {row: state for part in parts for row, state in part["lanes"].items()}
    return {"corpus": parts[0]["corpus"], "lanes": lanes}


def position_of_run(position: dict[str, Any]) -> dict[str, Any]:
    """`join_positions` over all processes; every one of them must call it."""
    if jax.process_count() == 1:
        return position
    text = json.dumps(position).encode()
    sizes = multihost_utils.process_allgather(np.array(len(text)))
    padded = np.frombuffer(text.ljust(int(sizes.max())), np.uint8)
    return join_positions([json.loads(part.tobytes()) for part in multihost_utils.process_allgather(padded)])


def load_corpus(config: DataConfig, tokenizer: Tokenizer) -> Corpus:
    """Find all documents of `config.source`, or of the sources in `config.mixture`; raises `ConfigError`.

    Chats are encoded here and stay in memory, so that a bad one is told before anything is compiled.
    """
    span = SPAN_ROWS * config.seq_len * (1 if tokenizer.is_bytes else BYTES_PER_TOKEN)
    train: list[Texts] = []
    held_out: list[Texts] = []
    weights = dict(config.mixture) or {config.source: 1.0}
    for source in weights:
        found = find_documents(source, text_key=config.text_key, span=span, eval_fraction=config.eval_fraction)
        for side, documents in zip((train, held_out), found, strict=True):
            side.append(_texts(documents, tokenizer, config))
        if not len(train[-1]):
            raise ConfigError(
                f"data.eval_fraction = {config.eval_fraction}: all {len(held_out[-1])} documents of {source} "
                "are held out"
            )
        _check_trained(train[-1], source, config.seq_len)
    return Corpus(train=_mixture(train, weights.values()), held_out=_mixture(held_out, weights.values()))


def _mixture(parts: Sequence[Texts], weights: Any) -> Mixture:
    """The parts that hold anything."""
    filled = [(part, float(weight)) for part, weight in zip(parts, weights, strict=True) if len(part)]
    return Mixture(parts=[part for part, _ in filled], weights=[weight for _, weight in filled])


def _room(config: DataConfig) -> ImageRoom:
    return ImageRoom(patches=config.row_patches, images=config.row_images)


def _texts(documents: Documents, tokenizer: Tokenizer, config: DataConfig) -> Texts:
    chats = {index: _encode_chat(documents[index], tokenizer, config) for index in documents.chats()}
    return Texts(documents=documents, tokenizer=tokenizer, chats=chats)


def _check_trained(texts: Texts, source: str, seq_len: int) -> None:
    """`ConfigError` where an endless search would find nothing to train on."""
    if not any(Pieces(seq_len).flat_map(texts[index]) for index in range(len(texts))):
        raise ConfigError(f"data.source = {source}: no token to train on (of a chat, those that the assistant writes)")


def _encode(document: Document, tokenizer: Tokenizer) -> Encoded:
    """A text's ids, with the end token where the text ends."""
    if tokenizer.is_bytes:  # an id is the byte's value: no need to decode
        ids = np.frombuffer(document.data, np.uint8).astype(np.int32)
    else:
        ids = np.asarray(tokenizer.encode(document.data.decode("utf-8", "replace")), np.int32)
    end = np.full(int(document.ends and len(ids) > 0), tokenizer.eos_id, np.int32)
    return Encoded(ids=np.concatenate([ids, end]))


def _encode_chat(document: Document, tokenizer: Tokenizer, config: DataConfig) -> Encoded:
    """A chat's ids, which of them the assistant writes, and its images, of which only the headers are read."""
    chat = document.chat or {}
    try:
        pictures = find_pictures(chat["messages"], document.folder)
        sizes = [picture.size for picture in pictures]
        prompt = render_chat(**chat, tokenizer=tokenizer, image_sizes=sizes, add_generation_prompt=False)
        trained = np.zeros(len(prompt.ids), np.bool_)
        for start, end in prompt.completions:
            trained[start:end] = True
        in_order = tuple(pictures[index] for index in prompt.image_order)
        encoded = Encoded(ids=np.asarray(prompt.ids, np.int32), trained=trained, pictures=in_order)
        check_pictures(encoded, seq_len=config.seq_len, room=_room(config))
    except ValueError as error:
        raise ConfigError(f"data.source: {document.name}: {error}") from error
    return encoded


def _stack(rows: Sequence[dict[str, Any]]) -> Batch:
    columns: dict[str, Any] = {key: np.stack([row[key] for row in rows]) for key in rows[0]}
    return Batch(**columns)
