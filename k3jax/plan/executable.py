"""Compiled programs kept in files: the executable's own bytes, and a description that needs no TPU to read.

No pickle: what calls the program is described in JSON, and the bytes are for the TPU runtime alone.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax


def save_executable(compiled: Any, place: Path, record: dict[str, Any]) -> None:
    """Write the folder `place`, as a whole or not at all: the executable and its arguments, results and memory."""
    partial = place.with_name(f".{place.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    executable = compiled.runtime_executable()
    (partial / "executable.bin").write_bytes(executable.serialize())
    description = {
        "arguments": _described(compiled.in_avals, compiled.input_shardings),
        "results": _described(compiled.out_info, compiled.output_shardings),
        **record,
    }
    (partial / "description.json").write_text(json.dumps(description, indent=1) + "\n")
    partial.rename(place)


def _described(shapes: Any, shardings: Any) -> list[dict[str, Any]]:
    """Every array of a tree by its place in it, whole shape, dtype and the mesh axes that each dim is spread over."""
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    return [
        {"name": jax.tree_util.keystr(path), "shape": list(x.shape), "dtype": str(x.dtype), "axes": list(sharding.spec)}
        for (path, x), sharding in zip(leaves, jax.tree.leaves(shardings), strict=True)
    ]
