"""Checkpoints from the command line: `python -m k3jax.checkpoint --help`."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence

from rich.console import Console

from k3jax.checkpoint.folder import is_remote
from k3jax.checkpoint.safetensors_dir import CheckpointError
from k3jax.checkpoint.work import default_workers
from k3jax.config import ConfigError

_WIDTH = 160  # of a table where the output is no terminal
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
DIFFERENT = 1  # exit code of verify


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0, 1 where `verify` found a difference, 2 after one line that says what is wrong."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
    except (CheckpointError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a full disk, a folder without permission
        print(f"error: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
        return 2
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m k3jax.checkpoint", description="Checkpoints of K3 models.")
    commands = parser.add_subparsers(required=True)

    command = commands.add_parser("import", help="released layout -> Orbax; the same command continues after a kill")
    command.add_argument("source", help="directory or gs:// folder with config.json and safetensors")
    command.add_argument("target", help="new directory or gs:// folder")
    command.add_argument("--host", default="0/1", help="INDEX/COUNT: this host's part of the work, such as 0/4")
    command.set_defaults(run=_import)

    export = commands.add_parser("export", help="Orbax -> released layout; the same command continues after a kill")
    export.add_argument("source", help="import, training run, or one of its steps")
    export.add_argument("target", help="new directory")
    export.add_argument("--experts", choices=("mxfp4", "bfloat16"), help="convert the routed experts")
    export.add_argument("--dtype", choices=("bfloat16", "float32"), help="cast what the release holds in bfloat16")
    export.add_argument("--shard-size", metavar="SIZE", help="files of this size, such as 5GB, instead of one a layer")
    export.set_defaults(run=_export)

    verify = commands.add_parser("verify", help="compare two checkpoints byte for byte, or one with its checksums")
    verify.add_argument("first")
    verify.add_argument("second", nargs="?")
    verify.set_defaults(run=_verify)

    for each in (command, export, verify):
        each.add_argument("--workers", type=_positive, default=default_workers(), help="pieces handled at a time")

    diff = commands.add_parser("diff", help="how far apart two checkpoints' values are, family by family")
    diff.add_argument("first")
    diff.add_argument("second")
    diff.set_defaults(run=_diff)

    inspect = commands.add_parser("inspect", help="tensors, shapes, dtypes, bytes and parameters; reads headers only")
    source = inspect.add_mutually_exclusive_group(required=True)
    source.add_argument("directory", nargs="?", help="safetensors directory, an import, a training run or a step")
    source.add_argument("--config", help="a model's name or YAML file instead of a directory")
    inspect.set_defaults(run=_inspect)
    return parser


def _import(options: argparse.Namespace) -> int:
    from k3jax.checkpoint.importer import Host, import_checkpoint

    host = Host.parse(options.host)
    import_checkpoint(options.source, options.target, workers=options.workers, host=host)
    return 0


def _export(options: argparse.Namespace) -> int:
    from k3jax.checkpoint.convert import Converted
    from k3jax.checkpoint.exporter import export_checkpoint
    from k3jax.checkpoint.orbax_tree import OrbaxCheckpoint

    size = _bytes(options.shard_size) if options.shard_size else None
    checkpoint = OrbaxCheckpoint.open(options.source)
    source = Converted(checkpoint, experts=options.experts, weights=options.dtype)
    export_checkpoint(source, options.target, workers=options.workers, shard_bytes=size, side=checkpoint.folder)
    return 0


def _verify(options: argparse.Namespace) -> int:
    from k3jax.checkpoint import compare
    from k3jax.checkpoint.source import open_source

    paths = [path for path in (options.first, options.second) if path is not None]
    for path in paths:
        if not (is_remote(path) or os.path.isdir(path)):
            raise CheckpointError(f"{path}: no such directory")
    try:
        if options.second is None:
            found = compare.damaged(options.first, workers=options.workers)
        else:
            first, second = (open_source(path) for path in paths)
            found = compare.differences(first, second, workers=options.workers)
    except CheckpointError as error:  # one of them is not whole, which is a difference too
        found = [str(error)]
    compare.show_lines(found)
    print(f"{len(found)} differences" if found else "the same")
    return DIFFERENT if found else 0


def _diff(options: argparse.Namespace) -> int:
    from k3jax.checkpoint import compare
    from k3jax.checkpoint.source import open_source

    found = compare.difference_in_numbers(open_source(options.first), open_source(options.second))
    compare.show_differences(found, _console())
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from k3jax.checkpoint.inspect import inspect_config, inspect_directory, show
    from k3jax.config import load_model_config

    config = options.config
    summary = inspect_config(load_model_config(config)) if config else inspect_directory(options.directory)
    show(summary, _console())
    return 0


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a number from 1 on")
    return int(text)


def _bytes(text: str) -> int:
    """ "5GB" in bytes; raises `CheckpointError`."""
    match = re.fullmatch(r"(\d+)(KB|MB|GB|)", text)
    if not match or not int(match[1]):
        raise CheckpointError(f"--shard-size {text}: expected a size such as 5GB or 500MB")
    return int(match[1]) * _UNITS[match[2]]


if __name__ == "__main__":
    sys.exit(main())
