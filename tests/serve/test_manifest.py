"""What stops a rerun from mixing results: another model, another recipe, another request under an answered id."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from k3jax.config import ConfigError, ServeRun
from k3jax.serve.manifest import Manifest, fingerprint, manifest_path
from k3jax.text import Tokenizer


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(100_000))
    return folder


@pytest.fixture
def manifest(checkpoint: Path) -> Manifest:
    return Manifest.of(ServeRun(), checkpoint, "tiny", Tokenizer.bytes())


def test_a_batch_may_grow_and_unanswered_lines_may_change(manifest: Manifest, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    manifest.with_requests({"a": b"1", "b": b"2"}).join(output, set())
    manifest.with_requests({"a": b"1", "b": b"changed", "c": b"3"}).join(output, {"a"})
    kept = json.loads(manifest_path(output).read_text())["requests"]
    assert kept.keys() == {"a", "b", "c"}
    with pytest.raises(ConfigError, match="its result for custom_id 'b' answers another request; change the id"):
        manifest.with_requests({"b": b"2"}).join(output, {"a", "b"})
    assert json.loads(manifest_path(output).read_text())["requests"] == kept


def test_answers_of_two_models_or_recipes_do_not_mix(manifest: Manifest, checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    manifest.join(output, set())
    (checkpoint / "model.safetensors").write_bytes(bytes(99_999) + b"x")
    others = {
        "checkpoint": Manifest.of(ServeRun(), checkpoint, "tiny", Tokenizer.bytes()),
        "default_max_tokens": dataclasses.replace(manifest, made_with={**manifest.made_with, "default_max_tokens": 9}),
        "model": dataclasses.replace(manifest, made_with={**manifest.made_with, "model": "other"}),
    }
    for name, other in others.items():
        with pytest.raises(ConfigError, match=f"its results were made with {name} = .*, now .*; name another file"):
            other.join(output, {"a"})
        other.join(tmp_path / "another.jsonl", set())
    manifest.join(output, {"a"})


def test_an_output_without_results_or_without_a_manifest_starts_anew(manifest: Manifest, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    other = dataclasses.replace(manifest, made_with={"model": "other"})
    other.join(output, set())
    manifest.join(output, set())
    manifest_path(output).unlink()
    other.join(output, {"a"})


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"made_with": 1, "requests": {}}', "\x00"])
def test_a_damaged_manifest_is_named(manifest: Manifest, tmp_path: Path, content: str) -> None:
    manifest_path(tmp_path / "out.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=r"out.jsonl.manifest.json: not a manifest; remove it"):
        manifest.join(tmp_path / "out.jsonl", {"a"})


def test_a_fingerprint_follows_the_content_not_the_place(checkpoint: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    assert fingerprint(copy) == fingerprint(checkpoint)
    (copy / "out.jsonl").write_text("results")
    (copy / "out.jsonl.manifest.json").write_text("{}")
    assert fingerprint(copy) == fingerprint(checkpoint)
    (copy / "config.json").write_text("[]")
    assert fingerprint(copy) != fingerprint(checkpoint)
