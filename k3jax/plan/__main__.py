"""The command line of `k3jax.plan`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from k3jax.config import ConfigError

MODES = ("train", "prefill", "decode")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m k3jax.plan",
        description="What a training or serving run takes of every device of a TPU slice; needs no TPU.",
        epilog="Times are estimates from data sheets. Exit codes: 0 it fits, 1 it does not, 2 a mistake in the config.",
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="a recipe of configs/train or configs/serve")
    parser.add_argument("--topology", required=True, metavar="NAME", help="a slice, such as tpu7x:8x8x8")
    parser.add_argument("--mode", metavar="LIST", help="train for a training recipe; prefill,decode for a serving one")
    parser.add_argument("--compile", action="store_true", help="compile the real programs (minutes; needs libtpu)")
    parser.add_argument("--json", metavar="OUT", type=Path, help="write the plan there as JSON")
    parser.add_argument("--save", metavar="DIR", type=Path, help="with --compile: save the executables there")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="replaces a key of the recipe")
    return parser.parse_intermixed_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Print the plan; returns the exit code."""
    options = parse(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from k3jax.plan.plan import make_plan
    from k3jax.plan.report import print_plan
    from sharding.mesh import MeshError

    try:
        modes = () if options.mode is None else tuple(map(str.strip, options.mode.split(",")))
        unknown = next((mode for mode in modes if mode not in MODES), None)
        if unknown is not None:
            raise ConfigError(f"--mode {unknown}: one of {', '.join(MODES)}")
        if options.save and not options.compile:
            raise ConfigError("--save needs --compile")
        if options.json and (options.json.is_dir() or not options.json.parent.is_dir()):
            raise ConfigError(f"--json {options.json}: a file in a folder that exists is needed")
        plan = make_plan(
            options.config,
            options.overrides,
            topology=options.topology,
            modes=modes,
            compile_too=options.compile,
            save=options.save,
        )
        print_plan(plan)
        if options.json:
            _write(options.json, plan)
    except (ConfigError, MeshError) as error:
        print(f"k3jax.plan: {error}", file=sys.stderr)
        return 2
    return 0 if plan["fits"] else 1


def _write(path: Path, plan: dict[str, Any]) -> None:
    """As a whole or not at all; raises `ConfigError`."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(json.dumps(plan, indent=1) + "\n")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"--json {path}: cannot be written ({error.strerror})") from error


if __name__ == "__main__":
    sys.exit(main())
