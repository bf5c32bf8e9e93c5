"""Compiled programs kept in files: the executable's own bytes, and a description that needs no TPU to read.

No pickle: what calls the program is described in JSON, and the bytes are for the TPU runtime alone.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax

from k3jax.config import ConfigError


def save_executable(compiled: Any, place: Path, record: dict[str, Any]) -> None:
    """Write the folder `place`, as a whole or not at all: the executable and its arguments, results and memory."""
    if place.exists():
        raise ConfigError(f"--save {place}: exists already")
    partial = place.with_name(f".{place.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    executable = compiled.runtime_executable()
    (partial / "executable.bin").write_bytes(executable.serialize())
    arguments = zip(jax.tree.leaves(compiled.in_avals), executable.get_parameter_shardings(), strict=True)
    description = {
        "arguments": [
            {"shape": list(info.shape), "dtype": str(info.dtype), "sharding": str(sharding)}
            for info, sharding in arguments
        ],
        "results": [str(sharding) for sharding in executable.get_output_shardings()],
        **record,
    }
    (partial / "description.json").write_text(json.dumps(description, indent=1) + "\n")
    partial.rename(place)
