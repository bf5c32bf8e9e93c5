"""Documents: which files are read, how they are named, which are held out, and what is refused."""

import json

import pytest

from k3jax.config import ConfigError, DataConfig
from k3jax.data.source import PIECE_BYTES, Document, read_documents


def names(source, **options) -> list[str]:
    return [document.name for document in read_documents(DataConfig(source=str(source), **options))]


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
    first = next(iter(read_documents(DataConfig(source=str(folder)))))
    assert first.data == b"caf\xe9\r\n"


def test_the_standard_library_has_code_and_no_installed_packages():
    documents = names("python_stdlib")
    assert {"json/decoder.py", "typing.py"} <= set(documents)
    assert not [name for name in documents if "site-packages" in name or not name.endswith(".py")]
    assert documents == sorted(documents)


def test_a_lone_text_file_is_cut_at_line_ends(tmp_path):
    text = "".join(f"line {n}\n" for n in range(3000))
    (tmp_path / "book.txt").write_text(text)
    documents = list(read_documents(DataConfig(source=str(tmp_path / "book.txt"))))
    assert [document.name for document in documents] == [f"book.txt#{n}" for n in range(len(documents))]
    assert b"".join(document.data for document in documents).decode() == text
    assert all(document.data.endswith(b"\n") and len(document.data) < PIECE_BYTES + 20 for document in documents)


def test_jsonl_lines_are_documents(tmp_path):
    lines = [json.dumps({"body": "one"}), "", json.dumps({"body": "zw\u00f6lf"})]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    documents = list(read_documents(DataConfig(source=str(tmp_path), text_key="body")))
    assert [(d.name, d.data.decode()) for d in documents] == [("x.jsonl#0", "one"), ("x.jsonl#2", "zw\u00f6lf")]


def test_the_held_out_set_is_a_property_of_names_alone():
    documents = [Document(name=f"pkg/{n}.py", data=b"") for n in range(4000)]
    held_out = {d.name for d in documents if d.is_held_out(0.1)}
    assert 300 < len(held_out) < 500
    assert held_out <= {d.name for d in documents if d.is_held_out(0.2)}
    assert Document(name="pkg/7.py", data=b"other").is_held_out(0.1) == ("pkg/7.py" in held_out)
    assert not any(d.is_held_out(0.0) for d in documents)


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
        ("[1]", "line 2 has neither text"),
        ('{"text": 3}', "line 2 has neither text under 'text'"),
    ],
)
def test_a_bad_jsonl_line_is_named(tmp_path, line, message):
    (tmp_path / "x.jsonl").write_text('{"text": "fine"}\n' + line)
    with pytest.raises(ConfigError, match=message):
        names(tmp_path / "x.jsonl")


def test_a_binary_file_asked_for_by_name_is_refused(folder):
    with pytest.raises(ConfigError, match="not a text file"):
        names(folder / "image.bin")
