"""The release at its true scale: 96 shards with real headers and holes for data; planned, described, and refused where
it does not fit. And as many tensors, all of them narrow, imported and exported for real."""

import dataclasses
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from k3jax.checkpoint import importer
from k3jax.checkpoint.__main__ import main
from k3jax.checkpoint.exporter import FilePlan, export_checkpoint
from k3jax.checkpoint.folder import Folder
from k3jax.checkpoint.hf_import import HFCheckpoint
from k3jax.checkpoint.importer import Host, Importer
from k3jax.checkpoint.inspect import features, summarise
from k3jax.checkpoint.names import Entry, entries
from k3jax.checkpoint.safetensors_dir import CheckpointError
from k3jax.checkpoint.source import open_source, pieces
from k3jax.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig, VisionConfig

RELEASE = ModelConfig(vision=VisionConfig())
TENSORS, BYTES, PARAMETERS = 497_220, 1_560_860_324_864, 2_779_931_837_184  # spec text-model 3 and 4


class Blank:
    """A checkpoint of a config, all zeros."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.entries = entries(config)

    def dtype(self, entry: Entry) -> np.dtype:
        return np.dtype({"float32": "float32", "uint8": "uint8"}.get(entry.family.dtype, "bfloat16"))

    def read(self, entry: Entry, start: int, stop: int, buffer: np.ndarray | None = None) -> np.ndarray:
        return np.zeros((stop - start, *entry.shape[1:]), self.dtype(entry))


@pytest.fixture(scope="module")
def release(tmp_path_factory) -> Path:
    """The release with holes for data."""
    directory = tmp_path_factory.mktemp("release")
    layout = FilePlan(Blank(RELEASE))
    for shard in layout.shards:
        with (directory / shard.file).open("wb") as stream:
            stream.write(shard.header)
            stream.truncate(shard.size)
    (directory / "model.safetensors.index.json").write_text(json.dumps(layout.index()))
    (directory / "config.json").write_text(json.dumps(RELEASE.to_hf()))
    return directory


def test_the_release_is_planned_described_and_refused_where_it_does_not_fit(release, tmp_path):
    began = time.process_time()
    job = Importer(HFCheckpoint.open(release), Folder.at(tmp_path / "orbax"))
    work = [piece for unit in job.units for entry in unit.entries for piece in pieces(job.source, entry)]
    assert len(job._fingerprint()) == 64
    assert time.process_time() - began < 60

    tensors, units = job.source.files.tensors, job.units
    assert len(tensors) == TENSORS
    assert len({tensor.file for tensor in tensors.values()}) == 96
    assert job.source.files.total_bytes == sum(unit.nbytes for unit in units) == BYTES
    named = [e.family.prefix + e.tensor(i) for unit in units for e in unit.entries for i in range(e.experts or 1)]
    assert len(named) == TENSORS and set(named) == tensors.keys()  # each tensor is in one unit, once
    row = {entry: entry.row_elements * job.source.dtype(entry).itemsize for unit in units for entry in unit.entries}
    assert sum(row[piece.entry] * (piece.stop - piece.start) for piece in work) == BYTES
    largest = max(unit.nbytes for unit in units)
    assert largest == 896 * 3072 * 1792  # what a kill costs at most: one matrix of one layer's experts
    sizes = [sum(unit.nbytes for unit in job.share(Host(i, 16))) for i in range(16)]
    assert sum(sizes) == BYTES
    assert max(sizes) - min(sizes) < 2 * largest

    lines = dict(features(summarise(job.source)))
    assert lines["tensors"] == f"{TENSORS:,} in 60 families"
    assert lines["bytes"] == f"{BYTES:,}"
    assert lines["parameters"] == f"{PARAMETERS:,}, active 104,189,614,848"
    assert lines["vision"] == "168 tensors, 447,358,976 parameters"

    with pytest.raises(CheckpointError, match=f"{BYTES:,} bytes are still to be written"):
        job.run(workers=2, host=Host(), console=Console(quiet=True))


NARROW = dataclasses.replace(
    RELEASE,
    vocab_size=48,
    width=40,
    dense_width=56,
    kda=KDAConfig(num_heads=3, head_dim=8, a_log_length=8),
    mla=MLAConfig(num_heads=2, q_rank=12, kv_rank=10, nope_dim=6, extra_dim=4, v_dim=5),
    moe=MoEConfig(expert_width=64, latent_width=32),
    vision=None,
)


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_as_many_tensors_as_the_release_has_make_the_round_trip(tmp_path, monkeypatch):
    source, target, back = (tmp_path / name for name in ("hf", "orbax", "back"))
    monkeypatch.setattr(importer, "_LARGE", 1 << 12)  # so that the experts' matrices are units, as in the release
    export_checkpoint(Blank(NARROW), source, workers=2, console=Console(quiet=True))
    assert len(open_source(source).files.tensors) == 497_052

    def killed(*_args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        complete, original = [], importer._Writer._complete

        def count(self, *args):
            original(self, *args)
            complete.append(1)
            if len(complete) == 300:
                killed()

        patch.setattr(importer._Writer, "_complete", count)
        with pytest.raises(KeyboardInterrupt):
            main(["import", str(source), str(target)])
    assert main(["import", str(source), str(target)]) == 0
    assert main(["export", str(target), str(back)]) == 0
    assert main(["verify", str(source), str(back)]) == 0
    assert len(os.listdir(back)) == 94 + 2
