"""Compiled programs kept in files: the executable's own bytes, and a description that needs no TPU to read.

No pickle: what calls the program is described in JSON, and the bytes are loaded by the TPU runtime alone.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from k3jax.config import ConfigError

EXECUTABLE, DESCRIPTION = "executable.bin", "description.json"


def save_executable(compiled: Any, place: Path, record: dict[str, Any]) -> None:
    """Write the folder `place`, as a whole or not at all: the executable and its arguments, results and memory."""
    if place.exists():
        raise ConfigError(f"--save {place}: exists already")
    partial = place.with_name(f".{place.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    executable = compiled.runtime_executable()
    (partial / EXECUTABLE).write_bytes(executable.serialize())
    describe = lambda arrays, shardings: [  # noqa: E731
        {"shape": list(info.shape), "dtype": str(info.dtype), "sharding": str(sharding)}
        for info, sharding in zip(arrays, shardings, strict=True)
    ]
    import jax

    arguments = jax.tree.leaves(compiled.in_avals)
    description = {
        "arguments": describe(arguments, executable.get_parameter_shardings()),
        "results": [str(sharding) for sharding in executable.get_output_shardings()],
        **record,
    }
    (partial / DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n")
    partial.rename(place)


def load_executable(place: Path, devices: list[Any]) -> tuple[Any, dict[str, Any]]:
    """The executable for `devices` (of a topology, or real ones), and its description; raises `ConfigError`."""
    try:
        description = json.loads((place / DESCRIPTION).read_text())
        data = (place / EXECUTABLE).read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{place}: is no saved executable ({error})") from error
    return devices[0].client.deserialize_executable(data, devices), description
