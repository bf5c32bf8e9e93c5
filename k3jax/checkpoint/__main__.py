"""`python -m k3jax.checkpoint inspect DIR`, or `inspect --config NAME` for the checkpoint a config would have."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from k3jax.checkpoint.inspect import inspect_config, inspect_directory, show
from k3jax.checkpoint.safetensors_dir import CheckpointError
from k3jax.config import ConfigError, load_model_config

_WIDTH = 160  # of the table where the output is no terminal


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0, or 2 after one line that says what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m k3jax.checkpoint", description="Checkpoints of K3 models.")
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="tensors, shapes, dtypes, bytes and parameters; reads headers only")
    source = inspect.add_mutually_exclusive_group(required=True)
    source.add_argument("directory", type=Path, nargs="?", help="safetensors directory, or an Orbax run or step")
    source.add_argument("--config", help="a model's name or YAML file instead of a directory")
    options = parser.parse_args(arguments)
    console = Console()
    try:
        config = options.config
        summary = inspect_config(load_model_config(config)) if config else inspect_directory(options.directory)
    except (CheckpointError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(summary, console if console.is_terminal else Console(width=_WIDTH))
    return 0


if __name__ == "__main__":
    sys.exit(main())
