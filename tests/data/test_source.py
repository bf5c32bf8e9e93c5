"""Documents: which files are read, how they are named, which are held out, and what is refused."""

import json

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from k3jax.config import ConfigError
from k3jax.data.source import JsonLines, TextFile, find_documents, held_out_of

SPAN = 8192


def documents(source, *, text_key="text", eval_fraction=0.0):
    train, held_out = find_documents(str(source), text_key=text_key, span=SPAN, eval_fraction=eval_fraction)
    return [*(train[n] for n in range(len(train))), *(held_out[n] for n in range(len(held_out)))]


def names(source, **options) -> list[str]:
    return [document.name for document in documents(source, **options)]


def fingerprint(source, **options) -> str:
    options = {"text_key": "text", "span": SPAN, "eval_fraction": 0.1} | options
    return find_documents(str(source), **options)[0].fingerprint


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "a.txt").write_text("alpha")
    (tmp_path / "b" / "c.py").write_text("gamma = 3\n")
    (tmp_path / "b" / "empty.py").write_text("")
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "image.bin").write_bytes(b"\x89PNG\0\0")
    return tmp_path


def test_a_folder_gives_its_text_files_in_order_of_their_relative_paths(folder):
    assert names(folder) == ["a.txt", "b/c.py"]


def test_a_glob_names_files_from_its_fixed_part(folder):
    assert names(folder / "**" / "*.py") == ["b/c.py"]


def test_bytes_are_those_of_the_file(folder):
    (folder / "a.txt").write_bytes(b"caf\xe9\r\n")
    assert documents(folder)[0].data == b"caf\xe9\r\n"


def test_the_standard_library_has_code_and_no_installed_packages():
    found = names("python_stdlib")
    assert {"json/decoder.py", "typing.py"} <= set(found)
    assert not [name for name in found if "site-packages" in name or not name.endswith(".py")]
    assert found == sorted(found)


@pytest.mark.parametrize("line", ["line of text\n", "\u00e4\u00f6\u00fc"])
def test_a_text_file_is_cut_into_spans_at_line_ends_or_between_characters(tmp_path, line):
    text = line * 10000
    (tmp_path / "book.txt").write_text(text)
    spans = documents(tmp_path / "book.txt")
    assert b"".join(span.data for span in spans).decode() == text
    assert all(span.data.decode().endswith(line[-1]) or "\n" not in line for span in spans)
    assert all(SPAN <= len(span.data) <= 2 * SPAN + 3 for span in spans[:-1]) and len(spans) > 3
    assert [span.ends for span in spans] == [False] * (len(spans) - 1) + [True]


def test_jsonl_lines_are_documents(tmp_path):
    lines = [json.dumps({"body": "one"}), "", json.dumps({"body": "zw\u00f6lf"})]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    found = documents(tmp_path, text_key="body")
    assert [(d.name, d.data.decode()) for d in found] == [("x.jsonl#0", "one"), ("x.jsonl#2", "zw\u00f6lf")]


def test_array_records_are_documents(tmp_path):
    writer = ArrayRecordWriter(str(tmp_path / "x.array_record"), "group_size:1")
    for text in ("one", "zw\u00f6lf"):
        writer.write(json.dumps({"text": text}).encode())
    writer.close()
    found = documents(tmp_path)
    assert [(d.name, d.data.decode()) for d in found] == [
        ("x.array_record#0", "one"),
        ("x.array_record#1", "zw\u00f6lf"),
    ]
    with pytest.raises(ConfigError, match="record 0 has no text under 'body'"):
        names(tmp_path, text_key="body")


def test_a_parquet_column_gives_documents(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": ["one", "zw\u00f6lf", None], "n": [1, 2, 3]}), tmp_path / "x.parquet")
    assert [document.data.decode() for document in documents(tmp_path)] == ["one", "zw\u00f6lf", ""]
    with pytest.raises(ConfigError, match=r"no column .body. .data.text_key., but text, n"):
        names(tmp_path, text_key="body")
    with pytest.raises(ConfigError, match="column 'n' holds int64, not strings"):
        names(tmp_path, text_key="n")


@pytest.mark.parametrize(("suffix", "message"), [("parquet", "Parquet file"), ("array_record", "ArrayRecord file")])
def test_a_file_of_another_format_is_named(tmp_path, suffix, message):
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    (tmp_path / f"x.{suffix}").write_bytes(b"not that" * 100)
    with pytest.raises(ConfigError, match=f"x.{suffix} is not an? {message}"):
        names(tmp_path)


def test_the_held_out_set_is_a_property_of_names_alone(tmp_path):
    def held_out(count, fraction, name="x.jsonl"):
        (tmp_path / name).write_text('{"text": "a"}\n' * count)
        return set(np.flatnonzero(held_out_of(JsonLines(tmp_path / name, name, text_key="text"), fraction)).tolist())

    some = held_out(4000, 0.1)
    assert 390 < len(some) < 410 and some <= held_out(4000, 0.2)
    assert held_out(2000, 0.1) == {n for n in some if n < 2000}
    assert held_out(4000, 0.1, "y.jsonl") != some and held_out(4000, 0.0) == set()


def test_a_file_of_a_folder_is_held_out_as_a_whole(tmp_path):
    (tmp_path / "x.txt").write_text("text\n" * 20000)
    sides = []
    for n in range(200):
        inside = held_out_of(TextFile(tmp_path / "x.txt", f"{n}.txt", span=SPAN, alone=False), 0.1)
        assert inside.all() or not inside.any()
        sides.append(inside[0])
    assert 8 < sum(sides) < 35
    alone = held_out_of(TextFile(tmp_path / "x.txt", "x.txt", span=1000, alone=True), 0.1)
    assert 0 < alone.sum() < len(alone)


def test_the_fingerprint_follows_texts_names_and_the_choice(folder):
    before = fingerprint(folder)
    assert fingerprint(folder) == before
    assert fingerprint(folder, eval_fraction=0.9) != before
    (folder / "a.txt").write_text("alphb")
    changed = fingerprint(folder)
    (folder / "a.txt").rename(folder / "b.txt")
    assert len({before, changed, fingerprint(folder)}) == 3


def test_nothing_found_is_one_clear_line(tmp_path):
    with pytest.raises(ConfigError, match="no such file or folder"):
        names(tmp_path / "absent")
    with pytest.raises(ConfigError, match="no such file or folder"):
        names(tmp_path / "*.txt")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ConfigError, match="the 1 files found hold no text"):
        names(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[" * 5000 + "]" * 5000, "line 2 is not JSON .nested deeper than 200 levels"),
        ("[1]", "line 2 has neither text"),
        ('{"text": 3}', "line 2 has neither text under 'text' .data.text_key. nor messages"),
    ],
)
def test_a_bad_jsonl_line_is_named(tmp_path, line, message):
    (tmp_path / "x.jsonl").write_text('{"text": "fine"}\n' + line)
    with pytest.raises(ConfigError, match=message):
        names(tmp_path / "x.jsonl")


def test_a_binary_file_asked_for_by_name_is_refused(folder):
    with pytest.raises(ConfigError, match="not a text file"):
        names(folder / "image.bin")
