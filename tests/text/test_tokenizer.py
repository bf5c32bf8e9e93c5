"""The tokenizer against the golden ids, and what malformed files get."""

import base64
import hashlib
import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from k3jax.config import ConfigError
from k3jax.text import Tokenizer


@pytest.fixture(scope="module")
def cases(golden: Path) -> dict[str, list[dict]]:
    by_kind: dict[str, list[dict]] = {}
    for case in json.loads((golden / "chat" / "tokenizer.json").read_text())["cases"]:
        kind = case["input"]["kind"]
        by_kind.setdefault("long" if "recipe" in case["input"] else kind, []).append(case)
    return by_kind


def test_golden_encodings(tokenizer: Tokenizer, cases: dict) -> None:
    for case in cases["encode"]:
        text, expected = case["input"]["text"], case["expected"]
        assert tokenizer.encode(text) == expected["ids"], case["id"]
        assert tokenizer.encode(text, specials=True) == expected["ids_with_specials"], case["id"]
        assert tokenizer.decode(expected["ids"]) == text, case["id"]


def test_golden_long_texts_are_cut_where_the_format_says(tokenizer: Tokenizer, cases: dict) -> None:
    for case in cases["long"]:
        text = "".join(string * count for string, count in case["input"]["recipe"])
        ids, expected = tokenizer.encode(text), case["expected"]
        assert (len(ids), ids[:12], ids[-12:]) == (expected["count"], expected["head"], expected["tail"]), case["id"]
        assert hashlib.sha256(np.asarray(ids, "<u4").tobytes()).hexdigest() == expected["sha256"], case["id"]
        assert (tokenizer.encoding.encode_ordinary(text) != ids) == expected["cut_changes_ids"], case["id"]


def test_golden_special_ids(tokenizer: Tokenizer, cases: dict) -> None:
    for case in cases["special_id"]:
        assert tokenizer.special_id(case["input"]["token"]) == case["expected"]["id"], case["id"]


def test_golden_decodings(tokenizer: Tokenizer, cases: dict) -> None:
    for case in cases["decode"]:
        ids, expected = case["input"]["ids"], case["expected"]
        decoder = tokenizer.decoder()
        assert [decoder.feed(token) for token in ids] == expected["deltas"], case["id"]
        assert decoder.finish() == expected["final"], case["id"]
        assert tokenizer.decode(ids) == expected["text"], case["id"]
        assert tokenizer.decode_bytes(ids).hex() == expected["bytes_hex"], case["id"]


def test_golden_decodings_without_specials(tokenizer: Tokenizer, cases: dict) -> None:
    for case in cases["decode_skip_special"]:
        assert tokenizer.decode(case["input"]["ids"], skip_special=True) == case["expected"]["text"], case["id"]


def test_sizes_and_roles_come_from_the_files(tokenizer: Tokenizer, golden: Path) -> None:
    layout = json.loads((golden / "chat" / "tokenizer" / "layout.json").read_text())
    named = layout["named"]
    assert tokenizer.vocab_size == layout["vocab_size"]
    assert tokenizer.bos_id == named["[BOS]"]["id"]
    assert tokenizer.eos_id == named["[EOS]"]["id"]
    assert tokenizer.pad_id == named["[PAD]"]["id"]
    assert tokenizer.end_of_message_id == named["<|end_of_msg|>"]["id"]
    assert tokenizer.stop_ids == {named["[EOS]"]["id"], named["<|end_of_msg|>"]["id"]}


@pytest.mark.parametrize(("value", "ids"), [(1545, {1545}), ([1538, 1700], {1538, 1700})])
def test_generation_config_adds_stop_ids(golden: Path, tmp_path: Path, value: object, ids: set[int]) -> None:
    folder = shutil.copytree(golden / "chat" / "tokenizer", tmp_path / "checkpoint")
    (folder / "generation_config.json").write_text(json.dumps({"max_length": 1048576, "eos_token_id": value}))
    assert Tokenizer.from_dir(folder).stop_ids == {1537, 1538} | ids


def test_a_renumbered_table_is_refused_where_the_model_says_otherwise(golden: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(golden / "chat" / "tokenizer", tmp_path / "checkpoint")
    (folder / "config.json").write_text(json.dumps({"media_placeholder_token_id": 1557}))
    assert Tokenizer.from_dir(folder).special_id("<|media_pad|>") == 1557
    config = json.loads((folder / "tokenizer_config.json").read_text())
    table = config["added_tokens_decoder"]
    for place, entry in enumerate([table.pop(key) for key in sorted(table)]):  # the gaps between the names are lost
        table[str(1536 + place)] = entry
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"media_placeholder_token_id = 1557; a conversion has renumbered"):
        Tokenizer.from_dir(folder)


def test_a_table_unlike_the_releases_is_said(golden: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = shutil.copytree(golden / "chat" / "tokenizer", tmp_path / "checkpoint")
    Tokenizer.from_dir(folder)
    assert not caplog.records
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"]["1700"] = config["added_tokens_decoder"].pop("1538")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_dir(folder)
    assert tokenizer.end_of_message_id in tokenizer.stop_ids
    assert tokenizer.end_of_message_id == 1700
    assert "specials unlike K3's release: <|end_of_msg|> 1700" in caplog.text


def test_another_models_specials_are_plain_text(tokenizer: Tokenizer) -> None:
    assert max(tokenizer.encode("a<|im_end|>b", specials=True)) < 1536


def test_byte_vocabulary_keeps_the_released_offsets() -> None:
    tokenizer = Tokenizer.bytes()
    text = "def f():\n\treturn '天🎉'  # <|end_of_msg|>[EOS]\x00"
    assert tokenizer.vocab_size == 512
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("a<|end_of_msg|>[EOS]é<|reserved_token_264|>", specials=True) == [
        97,
        258,
        257,
        0xC3,
        0xA9,
        264,
    ]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.end_of_message_id, tokenizer.pad_id) == (256, 257, 258, 511)
    assert tokenizer.stop_ids == {257, 258}
    assert tokenizer.decode([258, 259, 104, 511], skip_special=True) == "<|open|>h"


def test_byte_vocabulary_agrees_with_merging() -> None:
    tokenizer = Tokenizer.bytes()
    text = "It's 12345 naïve 今天\r\n\n   x" * 20
    assert tokenizer.encode(text) == tokenizer.encoding.encode_ordinary(text)


def test_surrogates_become_text_that_utf8_can_hold(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud83c\udf89b")) == "a🎉b"
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
    assert Tokenizer.bytes().decode(Tokenizer.bytes().encode("a\ud800b")) == "a\ufffdb"


def test_encoding_time_is_linear_in_run_length(tokenizer: Tokenizer) -> None:
    runs = ("x" * 24_000 + " ") * 40  # a quadratic search for long runs would take minutes
    assert tokenizer.decode(tokenizer.encode(runs)) == runs


@pytest.mark.parametrize("token", [-1, 512, 163840])
def test_an_id_out_of_range_is_refused_by_number(token: int) -> None:
    with pytest.raises(ValueError, match=rf"{token} is outside the vocabulary of 512"):
        Tokenizer.bytes().decode([65, token])


def test_tokenizer_travels_to_other_processes(tokenizer: Tokenizer) -> None:
    for original in (tokenizer, Tokenizer.bytes()):
        copy = pickle.loads(pickle.dumps(original))
        assert copy.encode("Hello<|sep|>", specials=True) == original.encode("Hello<|sep|>", specials=True)


def _line(token: bytes, rank: int) -> str:
    return f"{base64.b64encode(token).decode()} {rank}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: ["!!! 0", *lines[1:]], r"tiktoken.model line 1: expected `base64 rank`"),
        (lambda lines: [*lines[:9], "abcd", *lines[10:]], r"tiktoken.model line 10: expected `base64 rank`"),
        (lambda lines: [*lines[:9], "", *lines[10:]], r"tiktoken.model line 10: expected `base64 rank`"),
        (lambda lines: [*lines[:300], *lines[301:]], r"rank 300 is missing"),
        (lambda lines: [*lines[:300], lines[300].split()[0] + " 299", *lines[301:]], r"rank 299 occurs twice"),
        (
            lambda lines: [*lines, lines[5].split()[0] + " 1536"],
            r"line 1537: the token of rank 1536 already has rank 5",
        ),
        (lambda lines: [_line(b"zz!zz", 0), *lines[1:]], r"no rank for byte 0x21"),
        (lambda lines: lines[:200], r"no rank for byte 0x0"),
    ],
)
def test_a_malformed_rank_file_gets_one_line(golden: Path, tmp_path: Path, change, message: str) -> None:
    folder = shutil.copytree(golden / "chat" / "tokenizer", tmp_path / "checkpoint")
    lines = (folder / "tiktoken.model").read_text().splitlines()
    (folder / "tiktoken.model").write_text("\n".join(change(lines)) + "\n")
    with pytest.raises(ConfigError, match=message) as caught:
        Tokenizer.from_dir(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c: c["added_tokens_decoder"].pop("1538"),
            r"no special is named '<\|end_of_msg\|>'; this is not a K3 tok",
        ),
        (lambda c: c["added_tokens_decoder"].update({"1792": {"content": "<|x|>"}}), r"'<\|x\|>' has id 1792, outside"),
        (lambda c: c["added_tokens_decoder"].update({"1550": {"content": "[EOS]"}}), r"'\[EOS\]' is listed twice"),
        (lambda c: c.update({"pad_token": "<pad>"}), r"pad_token = '<pad>' is not one of"),
        (lambda c: c.pop("bos_token"), r"bos_token = None is not one of"),
        (lambda c: c["added_tokens_decoder"].update({"abc": {"content": "<|x|>"}}), r"added_tokens_decoder\.abc"),
        (lambda c: c["added_tokens_decoder"].update({"1550": "x"}), r"added_tokens_decoder\.1550"),
    ],
)
def test_a_malformed_special_table_gets_one_line(golden: Path, tmp_path: Path, change, message: str) -> None:
    folder = shutil.copytree(golden / "chat" / "tokenizer", tmp_path / "checkpoint")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    change(config)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        Tokenizer.from_dir(folder)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tiktoken\.model: no such file"):
        Tokenizer.from_dir(tmp_path)
