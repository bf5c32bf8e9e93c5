"""K3's tokenizer: rank BPE through tiktoken, with the special slots and cuts that fix its ids (spec, section 3).

A checkpoint brings `tiktoken.model` (one `base64(token) rank` a line, ranks dense from 0) and `tokenizer_config.json`,
whose `added_tokens_decoder` names some of the special slots that follow the ranks. Every size and id is read from these
two files; `Tokenizer.bytes()` lays the same slots behind the 256 byte values.
"""

from __future__ import annotations

import base64
import builtins
import codecs
import dataclasses
import itertools
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiktoken

from k3jax.config import ConfigError

RANK_FILE, CONFIG_FILE, GENERATION_FILE = "tiktoken.model", "tokenizer_config.json", "generation_config.json"
MODEL_FILE = "config.json"
NUM_SPECIALS = 256  # slots after the ranks, named or reserved
END_OF_MESSAGE, MEDIA_PAD = "<|end_of_msg|>", "<|media_pad|>"

# The released names by their offset from the end of the ranks: the table of `Tokenizer.bytes`, which has no files, and
# what a checkpoint's own table is compared with.
NAMED_OFFSETS = {
    0: "[BOS]",
    1: "[EOS]",
    2: END_OF_MESSAGE,
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: MEDIA_PAD,
    65: "<osagent_mode>",
    254: "[UNK]",
    255: "[PAD]",
}
KEPT_WHEN_SKIPPING = frozenset({"<|open|>", "<|close|>", "<|sep|>"})  # `special: false` in the released file

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD, _TAIL = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = "|".join(
    (
        r"\p{Han}+",
        f"{_LEAD}{_UPPER}*{_LOWER}+{_TAIL}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_TAIL}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

# Long texts are encoded in pieces, which changes ids, so the limits are part of the format (spec, section 3.4).
MAX_TEXT, MAX_RUN = 400_000, 25_000
# `\s` of a str pattern is exactly str.isspace(); the lookbehind starts a match at a run's start only, so it is linear.
_LONG_RUN = re.compile(rf"(?<!\S)\S{{{MAX_RUN + 1},}}|(?<!\s)\s{{{MAX_RUN + 1},}}")


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """Text <-> token ids. Nothing is ever prepended or appended.

    `vocab_size` ids exist: the ranks, then `NUM_SPECIALS` special slots. `stop_ids` end a completion: the end of a
    sequence, the end of a message, and what the checkpoint's generation config names.
    """

    encoding: tiktoken.Encoding
    named: Mapping[str, int]  # spelling -> id of the named special slots
    skipped: frozenset[int]  # ids that decode(skip_special=True) leaves out
    bos_id: int
    eos_id: int
    pad_id: int
    end_of_message_id: int
    stop_ids: frozenset[int]
    is_bytes: bool = False  # id = byte value, so plain text needs no merging

    @classmethod
    def load(cls, name: str | os.PathLike[str]) -> Tokenizer:
        """`Tokenizer.bytes()` for the name "bytes", otherwise `Tokenizer.from_dir(name)`."""
        return cls.bytes() if str(name) == "bytes" else cls.from_dir(name)

    @classmethod
    def from_dir(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Read `tiktoken.model`, `tokenizer_config.json` and, where present, `generation_config.json`'s end ids.

        A table of specials other than the release's is logged. Raises `ConfigError` of one line for a missing or
        malformed file, and for a table that does not fit the model's `config.json`.
        """
        folder = Path(path)
        ranks = _read_ranks(folder / RANK_FILE)
        config = _read_json(folder / CONFIG_FILE)
        named, skipped = _read_specials(config, len(ranks), folder / CONFIG_FILE)
        _check_table(named, len(ranks), folder)
        roles = {role: _role_id(config, role, named, folder / CONFIG_FILE) for role in ("bos", "eos", "pad")}
        return cls._build(ranks, named, skipped, roles, _generation_ends(folder / GENERATION_FILE))

    @classmethod
    def bytes(cls) -> Tokenizer:
        """Ids 0..255 are the byte values; the special slots follow at the released offsets (vocabulary 512)."""
        ranks = {builtins.bytes([value]): value for value in range(256)}
        named = {spelling: len(ranks) + offset for offset, spelling in NAMED_OFFSETS.items()}
        skipped = {named[spelling] for spelling in named.keys() - KEPT_WHEN_SKIPPING}
        roles = {"bos": named["[BOS]"], "eos": named["[EOS]"], "pad": named["[PAD]"]}
        return dataclasses.replace(cls._build(ranks, named, skipped, roles, ends=()), is_bytes=True)

    @classmethod
    def _build(
        cls,
        ranks: dict[builtins.bytes, int],
        named: dict[str, int],
        skipped: Iterable[int],
        roles: Mapping[str, int],
        ends: Iterable[int],
    ) -> Tokenizer:
        taken = set(named.values())
        slots = range(len(ranks), len(ranks) + NUM_SPECIALS)
        reserved = {f"<|reserved_token_{slot}|>": slot for slot in slots if slot not in taken}
        encoding = tiktoken.Encoding(
            "k3",
            pat_str=SPLIT_PATTERN,
            mergeable_ranks=ranks,
            special_tokens={**named, **reserved},
            explicit_n_vocab=slots.stop,
        )
        return cls(
            encoding=encoding,
            named=named,
            skipped=frozenset(skipped),
            bos_id=roles["bos"],
            eos_id=roles["eos"],
            pad_id=roles["pad"],
            end_of_message_id=named[END_OF_MESSAGE],
            stop_ids=frozenset({roles["eos"], named[END_OF_MESSAGE], *ends}),
        )

    @property
    def vocab_size(self) -> int:
        """Number of ids, special slots included."""
        return self.encoding.n_vocab

    def special_id(self, spelling: str) -> int | None:
        """Id of a special slot's spelling, or None where the spelling is ordinary text."""
        return self.encoding._special_tokens.get(spelling)

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        """Token ids of `text`; the spellings of special slots become their ids only with `specials=True`.

        Lone surrogates, which JSON can carry, encode as U+FFFD.
        """
        text = _without_surrogates(text)
        if self.is_bytes and not specials:
            return list(text.encode("utf-8"))  # what merging would give, ten times faster
        ids: list[int] = []
        for piece in _pieces(text):
            ids += (
                self.encoding.encode(piece, allowed_special="all") if specials else self.encoding.encode_ordinary(piece)
            )
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD. `skip_special` leaves out ids flagged special."""
        kept = (i for i in ids if i not in self.skipped) if skip_special else ids
        return self.decode_bytes(kept).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> builtins.bytes:
        """The bytes that `ids` stand for, special slots spelled out. Raises ValueError for an id out of range."""
        return b"".join(map(self.token_bytes, ids))

    def token_bytes(self, token: int) -> builtins.bytes:
        """The bytes of one token, a special slot's spelling included. Raises ValueError for an id out of range."""
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"token id {token} is outside the vocabulary of {self.vocab_size}")
        return self.encoding.decode_single_token_bytes(token)

    def decoder(self) -> IncrementalDecoder:
        """A decoder to feed ids one by one."""
        return IncrementalDecoder(self)


class IncrementalDecoder:
    """Turns ids into text as they come, holding back the bytes of an incomplete trailing code point."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        """The text that `token` completes, often of length 0 inside a code point."""
        return self._utf8.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """What was held back: U+FFFD where the stream ends inside a code point, else nothing."""
        return self._utf8.decode(b"", final=True)


def _pieces(text: str) -> Iterator[str]:
    """The parts of `text` that are encoded alone."""
    for start in range(0, len(text), MAX_TEXT):
        part = text[start : start + MAX_TEXT]
        cuts = [0]
        for run in _LONG_RUN.finditer(part):
            cuts += range(run.start() + MAX_RUN, run.end(), MAX_RUN)
        for begin, end in itertools.pairwise([*cuts, len(part)]):
            yield part[begin:end]


def _without_surrogates(text: str) -> str:
    """`text` with surrogate pairs joined and lone surrogates replaced, so that UTF-8 can hold it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _read_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(_read(path).splitlines(), start=1):
        fields = line.split()
        try:
            token, rank = base64.b64decode(fields[0], validate=True), int(fields[1])
        except (ValueError, IndexError) as error:
            raise ConfigError(f"{path} line {number}: expected `base64 rank`, got {line[:40]!r}") from error
        if token in ranks:
            raise ConfigError(f"{path} line {number}: the token of rank {rank} already has rank {ranks[token]}")
        ranks[token] = rank
    _check_ranks(ranks, path)
    return ranks


def _check_ranks(ranks: dict[bytes, int], path: Path) -> None:
    """Ranks must be 0..N-1, each once, and every single byte must have one: otherwise some text has no ids."""
    for expected, rank in enumerate(sorted(ranks.values())):
        if rank != expected:
            problem = "is missing" if rank > expected else "occurs twice"
            raise ConfigError(f"{path}: rank {min(rank, expected)} {problem}; ranks must be dense from 0")
    absent = [value for value in range(256) if bytes([value]) not in ranks]
    if absent:
        raise ConfigError(f"{path}: no rank for byte 0x{absent[0]:02x}; all 256 single bytes need one")


def _read_specials(config: Mapping[str, Any], first: int, path: Path) -> tuple[dict[str, int], set[int]]:
    """The named special slots by spelling, and the ids of those flagged `special`."""
    named: dict[str, int] = {}
    kept = set()
    for text, entry in config.get("added_tokens_decoder", {}).items():
        if not (text.isdecimal() and isinstance(entry, dict) and isinstance(entry.get("content"), str)):
            raise ConfigError(f"{path}: added_tokens_decoder.{text} must map an id to an object with a `content`")
        slot, spelling = int(text), entry["content"]
        if not first <= slot < first + NUM_SPECIALS:
            raise ConfigError(
                f"{path}: special {spelling!r} has id {slot}, outside the slots {first}..{first + NUM_SPECIALS - 1}"
                f" that follow the {first} ranks of {RANK_FILE}"
            )
        if spelling in named:
            raise ConfigError(f"{path}: special {spelling!r} is listed twice, as {named[spelling]} and {slot}")
        named[spelling] = slot
        if not entry.get("special", True):
            kept.add(slot)
    if END_OF_MESSAGE not in named:
        raise ConfigError(f"{path}: no special is named {END_OF_MESSAGE!r}; this is not a K3 tokenizer")
    return named, set(named.values()) - kept


def _check_table(named: Mapping[str, int], first: int, folder: Path) -> None:
    """The merges are K2's too, so only the specials tell a wrong or renumbered table from the right one."""
    moved = [name for offset, name in NAMED_OFFSETS.items() if named.get(name) != first + offset]
    if moved:
        ids = ", ".join(f"{name} {named.get(name, 'absent')}" for name in moved)
        logging.getLogger(__name__).warning("%s: specials unlike K3's release: %s", folder / CONFIG_FILE, ids)
    path = folder / MODEL_FILE
    expected = _read_json(path).get("media_placeholder_token_id") if path.exists() else None
    if expected is not None and expected != named.get(MEDIA_PAD):
        raise ConfigError(
            f"{folder / CONFIG_FILE}: {MEDIA_PAD!r} has id {named.get(MEDIA_PAD)}, but {path} has"
            f" media_placeholder_token_id = {expected}; a conversion has renumbered the specials"
        )


def _role_id(config: Mapping[str, Any], role: str, named: Mapping[str, int], path: Path) -> int:
    token = config.get(f"{role}_token")
    spelling = token.get("content") if isinstance(token, dict) else token
    if not isinstance(spelling, str) or spelling not in named:
        raise ConfigError(f"{path}: {role}_token = {spelling!r} is not one of its added_tokens_decoder")
    return named[spelling]


def _generation_ends(path: Path) -> list[int]:
    """`eos_token_id` of a generation config: one id, a list, or nothing where there is no such file."""
    if not path.exists():
        return []
    ends = _read_json(path).get("eos_token_id", [])
    return list(ends) if isinstance(ends, list) else [ends]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_read(path))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} line {error.lineno}: not valid JSON ({error.msg})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    return content


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file; a tokenizer directory holds {RANK_FILE} and {CONFIG_FILE}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
