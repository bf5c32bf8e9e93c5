"""Train a K3 model from a config file; `--help` says how."""

from __future__ import annotations

import argparse
import dataclasses
import sys

from k3jax.config import ConfigError, TrainRun, load_run, to_yaml

EPILOG = """\
A config is YAML over these keys; `key=value` overrides replace single ones, nested keys with dots:

  train.py --config configs/train/tiny_cpu.yaml run_dir=runs/mine data.source='docs/**/*.md' steps=500

Keys and defaults ({note}):

{keys}
What a run writes into run_dir: config.yaml (resolved), metrics.jsonl, tensorboard/, train.log, goodput.json, loss.png,
checkpoints/STEP; hang.txt and xprof/ where there is cause. The same command continues a run that was stopped or killed.
Exit codes: 0 done, 1 more than max_skipped updates in a row were not finite, 2 a mistake in the config or the data, or
no room on the disk, 75 stopped by SIGTERM or SIGINT after saving.
"""


def parse() -> argparse.Namespace:
    """The command line."""
    defaults = TrainRun()
    names = [field.name for field in dataclasses.fields(defaults) if field.name != "model"]
    keys = {name: getattr(defaults, name) for name in names}
    listing = "".join(f"  {line}\n" for line in to_yaml(keys).splitlines())
    parser = argparse.ArgumentParser(
        description=__doc__.partition(";")[0] + ".",
        epilog=EPILOG.format(keys=listing, note="`model` names a file of configs/models, `model.KEY` refines it"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the recipe: a file of configs/train, or yours")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="replaces a key of the recipe")
    return parser.parse_intermixed_args()


def main() -> int:
    """Run; returns the exit code."""
    arguments = parse()
    try:
        run = load_run(TrainRun, arguments.config, arguments.overrides)
        from k3jax.nn.placement import join_processes
        from k3jax.train.loop import train  # JAX starts here, after the config is known to be good
        from k3jax.train.run_dir import written_to

        join_processes()
        with written_to(run):
            return train(run)
    except ConfigError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
