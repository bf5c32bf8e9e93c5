"""Sharded states and models: saved on some devices, restored bit for bit on others, each process reading its part."""

import os
import shutil
import socket
import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console

from k3jax.checkpoint.importer import import_checkpoint
from k3jax.checkpoint.load import abstract_model
from k3jax.checkpoint.orbax_io import named_leaves
from k3jax.checkpoint.source import LeafReader, open_source

WORKER = "tests/checkpoint/devices_worker.py"
LIMIT = 200  # seconds for processes that could wait for each other for ever


def start(root, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, WORKER, *arguments]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    return subprocess.Popen(command, cwd=root, env=env, stderr=subprocess.PIPE, text=True)


def finish(*processes: subprocess.Popen) -> None:
    try:
        for process in processes:
            _, error = process.communicate(timeout=LIMIT)
            assert process.returncode == 0, error[-2000:]
    finally:
        for process in processes:
            process.kill()


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return str(probe.getsockname()[1])


def test_a_state_saved_on_8_devices_is_restored_on_8_4_2_and_1_in_other_shapes(root, tmp_path):
    finish(start(root, "save", str(tmp_path), "4x2"))
    finish(start(root, "restore", str(tmp_path), "2x4,8x1,2x2,1x2,1x1"))


def test_two_processes_save_together_and_restore_together_or_alone(root, tmp_path):
    for command, mesh in (("save", "4x2"), ("restore", "2x2")):
        port = free_port()
        finish(*(start(root, command, str(tmp_path), mesh, f"{i}/2", port) for i in range(2)))
    assert len(list((tmp_path / "checkpoints/5/weights").glob("ocdbt.process_*"))) == 2
    finish(start(root, "restore", str(tmp_path), "1x1"))


def test_a_model_is_loaded_straight_onto_a_mesh_from_either_layout(root, tensors, make, tmp_path):
    source = make(tensors)
    import_checkpoint(source, tmp_path / "orbax", workers=2, console=Console(quiet=True))
    finish(start(root, "load", f"{source},{tmp_path / 'orbax'}", "2x4"))


@pytest.mark.parametrize("layout", ["safetensors", "orbax"])
def test_a_shard_reads_no_other_layer(tensors, make, tmp_path, layout):
    source = make(tensors)
    if layout == "orbax":
        import_checkpoint(source, tmp_path / "orbax", workers=2, console=Console(quiet=True))
        source = tmp_path / "orbax"
    reader, whole = LeafReader(open_source(source)), LeafReader(open_source(source))
    shape = named_leaves(abstract_model(reader.source.config))["stacks.kda_moe.ffn.w1.codes"].shape
    index = (slice(1, 2), slice(0, 2), slice(16, 48), slice(None))
    expected = whole.read("stacks.kda_moe.ffn.w1.codes", shape, (slice(None),) * 4)[index]
    seen: list[tuple[str, tuple]] = []
    fill = reader.source.fill

    class Spy:
        config, entries, dtype = reader.source.config, reader.source.entries, reader.source.dtype

        def fill(self, out, entry, part, index):
            seen.append((entry.name, index))
            fill(out, entry, part, index)

    reader.source = Spy()
    np.testing.assert_array_equal(reader.read("stacks.kda_moe.ffn.w1.codes", shape, index), expected)
    name = "model.layers.3.block_sparse_moe.experts.{e}.w1.weight_packed"
    assert seen == [(name, (slice(0, 2), slice(16, 48), slice(None)))]


def test_a_shard_of_an_import_needs_no_other_leaf_of_its_layer(tensors, make, tmp_path, monkeypatch):
    monkeypatch.setattr("k3jax.checkpoint.importer._LARGE", 1)  # a database for each array
    import_checkpoint(make(tensors), tmp_path / "orbax", workers=2, console=Console(quiet=True))
    source = open_source(tmp_path / "orbax")
    leaf = "stacks.kda_moe.mixer.q"
    shape = named_leaves(abstract_model(source.config))[leaf].shape
    LeafReader(source).dtype(leaf)
    for unit in (tmp_path / "orbax/weights").glob("ocdbt.process_*"):
        keep = {e.arrays[0] for e in source.entries if e.name.endswith("3.self_attn.q_proj.weight")}
        data = b"".join(file.read_bytes() for file in (unit / "d").iterdir())
        if not any(name.encode() in data for name in keep):
            shutil.rmtree(unit / "d")
    part = LeafReader(source).read(leaf, shape, (slice(1, 2), slice(0, 14), slice(None), slice(None)))
    expected = tensors["language_model.model.layers.3.self_attn.q_proj.weight"].reshape(3, 8, 28).transpose(2, 0, 1)
    np.testing.assert_array_equal(part[0], expected[:14])
