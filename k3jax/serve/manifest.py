"""What the results of an output file were made with, kept beside it: a rerun cannot mix two models or two batches."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3jax import __version__
from k3jax.checkpoint.orbax_io import METADATA, find_step
from k3jax.config import ConfigError, ServeRun
from k3jax.text import Tokenizer

SUFFIX = ".manifest.json"
TAIL = 65_536  # bytes of a checkpoint's file that count by their content
DEFAULTS = ("max_context", "default_max_tokens", "dtype", "latents")  # of the recipe, what an answer depends on


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """`made_with` is by name, to be shown where it differs; `requests` is the hash of each input line by custom_id."""

    made_with: dict[str, Any]
    requests: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, run: ServeRun, checkpoint: Path, model: str, tokenizer: Tokenizer) -> Manifest:
        """The manifest of a run without its requests."""
        made_with = {name: getattr(run, name) for name in DEFAULTS}
        tokens = "\n".join(f"{spelling} {token}" for spelling, token in sorted(tokenizer.named.items()))
        made_with |= {
            "k3jax": __version__,
            "model": model,
            "checkpoint": fingerprint(checkpoint),
            "tokenizer": _digest([str(tokenizer.vocab_size).encode(), tokens.encode()]),
        }
        return cls(made_with=made_with)

    def with_requests(self, lines: Mapping[str, bytes]) -> Manifest:
        """This manifest with the input's lines by custom_id."""
        return dataclasses.replace(self, requests={custom_id: _digest([line]) for custom_id, line in lines.items()})

    def join(self, output: Path, done_ids: set[str]) -> None:
        """Compare with the manifest of an output that has results for `done_ids`, and write it anew.

        Lines may be added and lines without a result changed. Raises `ConfigError` for a difference that would mix
        results; without a manifest beside the output there is nothing to compare.
        """
        path = manifest_path(output)
        old = _read(path) if done_ids else Manifest(made_with=self.made_with)
        for name, value in self.made_with.items():
            before = old.made_with.get(name, value)
            if before != value:
                raise ConfigError(
                    f"--output {output}: its results were made with {name} = {before}, now {value}; name another file"
                )
        for custom_id in done_ids & self.requests.keys() & old.requests.keys():
            if old.requests[custom_id] != self.requests[custom_id]:
                raise ConfigError(
                    f"--output {output}: its result for custom_id {custom_id!r} answers another request; change the id"
                    " or name another file"
                )
        merged = dataclasses.replace(self, requests={**old.requests, **self.requests})
        temporary = path.with_name(path.name + ".new")
        try:
            temporary.write_text(json.dumps(dataclasses.asdict(merged)), encoding="utf-8")
            os.replace(temporary, path)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written ({error.strerror})") from error


def manifest_path(output: Path) -> Path:
    """Where the manifest of an output file lies."""
    return output.with_name(output.name + SUFFIX)


def fingerprint(checkpoint: Path) -> str:
    """A hash that tells checkpoints apart without reading all their weights.

    A training run's newest step counts by its file names, which no two saves share, and its metadata; a folder of
    safetensors by names, sizes, small files and the last bytes of large ones.
    """
    step = find_step(checkpoint)
    if step is not None:
        names = step.names()
        return _digest([*map(str.encode, names), *(step.read(name) for name in names if name.endswith(METADATA))])
    parts: list[bytes] = []
    for path in sorted(checkpoint.iterdir()):
        if path.suffix in (".safetensors", ".json", ".model") and not path.name.endswith(SUFFIX):
            size = path.stat().st_size
            with path.open("rb") as file:
                file.seek(max(0, size - TAIL))
                parts += [path.name.encode(), str(size).encode(), file.read()]
    return _digest(parts)


def _read(path: Path) -> Manifest:
    """The manifest at `path`, empty where there is none. Raises `ConfigError`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Manifest(made_with=dict(content["made_with"]), requests=dict(content["requests"]))
    except FileNotFoundError:
        return Manifest(made_with={})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not a manifest; remove it to go on without one") from error


def _digest(parts: Iterable[bytes]) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "big") + part)
    return whole.hexdigest()[:16]
