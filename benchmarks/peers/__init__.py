"""Kernels of other projects on the same work as ours, compiled and counted by the same means.

An adapter is a module with `CASES`, named as ours, `DISTRIBUTIONS`, whose versions its rows name (the peer itself
first), and `lowering(device)`, the context in which the peer believes to run on that device. It may import its peer
inside functions only: peers need other versions than we do, in an environment of their own (`make peers`). `rows.json`
keeps their rows for machines without it; `python -m benchmarks.peers` measures them again.
"""

import importlib
import json
from pathlib import Path
from typing import Any

ADAPTERS = {"kda": ("tokamax_kda",), "grouped_matmul": ("tokamax_gmm",)}  # by kernel family

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-peers" / "bin" / "python"
ROWS = Path(__file__).with_name("rows.json")


def adapter(name: str) -> Any:
    """The module of one adapter."""
    return importlib.import_module(f"benchmarks.peers.{name}")


def committed(case: str, topology: str) -> list[dict[str, Any]]:
    """The rows of all peers that are kept for one of our cases."""
    return [row for row in json.loads(ROWS.read_text()) if (row["case"], row["topology"]) == (case, topology)]
