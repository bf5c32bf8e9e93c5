"""Documents laid end to end and cut into rows of fixed length; any row can be made from its number alone."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np
from jaxtyping import Bool, Int, UInt

PADDING_SEGMENT = -1


@dataclass(frozen=True, kw_only=True)
class TokenStream:
    """Documents in a fixed shuffled order, each with its end token: `tokens` [N], `ends` [documents] ascending.

    `trained` [N] says which tokens are to be predicted, as in a chat the assistant's; None: all but a document's first.
    """

    tokens: UInt[np.ndarray, " N"]
    ends: Int[np.ndarray, " documents"]
    trained: Bool[np.ndarray, " N"] | None = None

    @classmethod
    def shuffled(
        cls,
        documents: Sequence[UInt[np.ndarray, " length"]],
        *,
        eos_id: int,
        seed: int,
        trained: Sequence[Bool[np.ndarray, " length"]] | None = None,
    ) -> TokenStream:
        """Lay the documents end to end in an order that depends on `seed` and their number only.

        Where `trained` says for each document which tokens are to be predicted, its end token is not.
        """
        order = np.random.default_rng(seed).permutation(len(documents))
        dtype = documents[0].dtype if documents else np.dtype(np.uint16)
        tokens = _end_to_end(documents, order, np.array([eos_id], dtype))
        ends = np.cumsum([len(documents[index]) + 1 for index in order], dtype=np.int64)
        mask = None if trained is None else _end_to_end(trained, order, np.array([False]))
        return cls(tokens=tokens, ends=ends, trained=mask)

    @property
    def fingerprint(self) -> str:
        """Changes when any token, any document boundary or what is to be predicted does."""
        mask = b"" if self.trained is None else np.packbits(self.trained).tobytes()
        return f"{zlib.crc32(mask, zlib.crc32(self.ends.tobytes(), zlib.crc32(self.tokens.tobytes()))):08x}"


def _end_to_end(parts: Sequence[np.ndarray], order: np.ndarray, end: np.ndarray) -> np.ndarray:
    return np.concatenate([piece for index in order for piece in (parts[index], end)] or [end[:0]])


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """The rows of a stream, as a grain data source.

    Row r is tokens r*T to (r+1)*T. `segment_ids` count the documents of the row from 0; where a document began in an
    earlier row, its rest starts afresh here. A target is the following token of the same document; the last token of a
    document has none, and `loss_mask` is False there, as it is before a token that is not `trained`. Only the very last
    row has padding: token 0, segment -1.
    """

    stream: TokenStream
    seq_len: int

    def __len__(self) -> int:
        return -(-len(self.stream.tokens) // self.seq_len)

    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]:
        start = int(index) * self.seq_len
        window = self.stream.tokens[start : start + self.seq_len + 1].astype(np.int32)
        document = np.searchsorted(self.stream.ends, np.arange(start, start + len(window)), side="right")
        within = document[1:] == document[:-1]
        counts = (
            within if self.stream.trained is None else within & self.stream.trained[start + 1 : start + len(window)]
        )
        used = min(len(window), self.seq_len)
        row = {
            "tokens": np.zeros(self.seq_len, np.int32),
            "targets": np.zeros(self.seq_len, np.int32),
            "segment_ids": np.full(self.seq_len, PADDING_SEGMENT, np.int32),
            "loss_mask": np.zeros(self.seq_len, np.bool_),
        }
        row["tokens"][:used] = window[:used]
        row["segment_ids"][:used] = document[:used] - document[0]
        row["targets"][: len(within)] = np.where(within, window[1:], 0)
        row["loss_mask"][: len(within)] = counts
        return row
