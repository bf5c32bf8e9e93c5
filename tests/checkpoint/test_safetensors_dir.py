"""Damaged and hostile files: each is refused with one line that names the file and what is wrong."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from k3jax.checkpoint.folder import File, Folder
from k3jax.checkpoint.safetensors_dir import CheckpointError, SafetensorsDir, read_header

INDEX = "model.safetensors.index.json"


def header(entries: object, data: bytes = b"") -> bytes:
    raw = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(dtype="U8", shape=(4,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def refused(path) -> str:
    with pytest.raises(CheckpointError) as caught:
        SafetensorsDir.open(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def shards(tmp_path):
    """Two shards and their index."""
    weight_map = {}
    for i in (1, 2):
        tensors = {f"t{i}.{j}": np.arange(6, dtype=np.float32).reshape(2, 3) + j for j in range(3)}
        save_file(tensors, tmp_path / f"model-{i}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"model-{i}.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


@pytest.mark.parametrize("dtype", [np.float32, np.uint8, ml_dtypes.bfloat16, np.float16, np.int64, np.bool_])
def test_tensors_are_read_as_they_were_written(tmp_path, dtype):
    value = np.arange(24).reshape(2, 3, 4).astype(dtype)
    save_file({"a": value, "b": value[0], "empty": value[:0]}, tmp_path / "model.safetensors")
    tensors = SafetensorsDir.open(tmp_path).tensors
    for name, expected in (("a", value), ("b", value[0]), ("empty", value[:0])):
        read = tensors[name].read()
        assert read.dtype == expected.dtype
        np.testing.assert_array_equal(read, expected)


def test_all_shards_of_an_index_are_read(shards):
    files = SafetensorsDir.open(shards)
    assert len(files.tensors) == 6
    assert files.tensors["t2.1"].read()[1, 2] == 6
    assert files.total_bytes == 6 * 24


def test_a_missing_shard_is_named(shards):
    (shards / "model-2.safetensors").unlink()
    assert "shard model-2.safetensors is missing; the index puts 3 tensors there" in refused(shards)


@pytest.mark.parametrize("keep", [-1, -24, 9, 4, 0])
def test_a_truncated_file_is_named_with_both_sizes(shards, keep):
    file = shards / "model-2.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:keep])
    message = refused(shards)
    assert message.startswith(f"{file}: truncated: the header ")
    assert message.endswith(f"the file has {len(content[:keep])}")
    if keep < 0:
        assert f"says {len(content)} bytes" in message


def test_bytes_after_the_last_tensor_are_refused(shards):
    with (shards / "model-1.safetensors").open("ab") as stream:
        stream.write(b"more")
    assert "model-1.safetensors: too long" in refused(shards)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header(b"not json"), "not a safetensors header"),
        (header(b"\xff\xfe{}"), "not a safetensors header"),
        (header([1, 2]), "not a safetensors header"),
        (header({"a": 3}), "not a safetensors header"),
        (header({"a": {"dtype": "U8", "shape": [4]}}, b"1234"), "not a safetensors header (KeyError: 'data_offsets')"),
        (header({"a": entry(dtype="F3")}, b"1234"), "not a safetensors header (KeyError: 'F3')"),
        (header({"a": entry(shape=(-4,))}, b"1234"), "shape (-4,)"),
        (header({"a": entry(shape=("4",))}, b"1234"), "shape ('4',)"),
        (header({"a": entry(offsets=(0, 3))}, b"1234"), "U8 (4,) takes 4 bytes, data_offsets give 3"),
        (header({"a": entry(dtype="F32")}, b"1234"), "F32 (4,) takes 16 bytes, data_offsets give 4"),
        (header({"a": entry(), "b": entry()}, b"1234"), "b starts at byte"),
        (header({"a": entry(offsets=(2, 6))}, b"123456"), "a starts at byte"),
        (header({"a": entry(offsets=(0, 4, 8))}, b"1234"), "not a safetensors header"),
        (
            header(
                b'{"a": ' + json.dumps(entry()).encode() + b', "a": ' + json.dumps(entry()).encode() + b"}", b"1234"
            ),
            "not a safetensors header (ValueError: a is there twice)",
        ),
        (
            header(b'{"a": {"dtype": "U8", "dtype": "I8", "shape": [4], "data_offsets": [0, 4]}}', b"1234"),
            "dtype is there",
        ),
        (header({"a": entry(shape=(True,), offsets=(0, 1))}, b"1"), "shape (True,)"),
        (header({"a": entry(shape=(2**70, 0), offsets=(0, 0))}), "shape (1180591620717411303424, 0)"),
        (
            header({"a": entry(shape=(2,), offsets=(0, 2)), "b": entry(shape=(3,), offsets=(1, 4))}, b"1234"),
            "b starts at byte",
        ),
        (header({"a": entry(offsets=(0, 2**40))}, b"1234"), "data_offsets give 1099511627776"),
        (header({"two\nlines": entry(dtype="F3")}, b"1234"), r"two\nlines: not a safetensors header"),
        (struct.pack("<Q", 2**63) + b"{}", f"the header takes {2**63} bytes; at most 100000000 are read"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, content, message):
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    assert f"{file}: " in refused(tmp_path)
    assert message in refused(tmp_path)


def test_an_index_that_names_an_absent_tensor_is_refused(shards):
    index = json.loads((shards / INDEX).read_text())
    index["weight_map"]["t2.9"] = "model-2.safetensors"
    (shards / INDEX).write_text(json.dumps(index))
    assert "model-2.safetensors: lacks t2.9, which the index puts there" in refused(shards)


def test_a_tensor_outside_the_index_is_refused(shards):
    index = json.loads((shards / INDEX).read_text())
    del index["weight_map"]["t1.0"], index["weight_map"]["t1.2"]
    (shards / INDEX).write_text(json.dumps(index))
    assert "model-1.safetensors: holds t1.0 and 1 more, which the index does not put there" in refused(shards)


@pytest.mark.parametrize(
    "shard", ["../model-1.safetensors", "model-1\0.safetensors", "/etc/hostname", "sub/model-1.safetensors", ".."]
)
def test_an_index_cannot_point_outside_its_directory(shards, shard):
    (shards / INDEX).write_text(json.dumps({"weight_map": {"t1.0": shard}}))
    message = refused(shards)
    assert "not a plain file name" in message or "is missing" in message
    assert repr(shard) in message or shard in message or "\\x00" in message


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "{"])
def test_a_broken_index_is_refused(shards, content):
    (shards / INDEX).write_text(content)
    assert f"{INDEX}: not a safetensors index" in refused(shards)


def test_metadata_is_no_tensor(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"a": np.zeros(2)}, file, metadata={"format": "pt"})
    assert list(read_header(File(Folder.at(tmp_path), file.name))) == ["a"]
