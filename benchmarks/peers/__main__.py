"""Measures peers' cases and puts their rows into `rows.json`; needs `.venv-peers` (make peers).

usage: python -m benchmarks.peers [CASE ...] [--topology tpu7x:2x2x1]
"""

import argparse
import json
import sys
from typing import Any

from benchmarks import peers
from benchmarks.static_cycles import TOPOLOGY, measure


def keep(row: dict[str, Any]) -> None:
    """Put a row in the place of the one that it measures again, or at the end."""
    rows = {_key(row): row for row in json.loads(peers.ROWS.read_text())} | {_key(row): row}
    peers.ROWS.write_text(json.dumps([*rows.values()], indent=1) + "\n")


def _key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["body"].split()[0], row["case"], row["topology"]


def main(arguments: list[str] | None = None) -> int:
    """Measure the named cases, or all, and write each row at once; exit code 2 without the peers' environment."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--topology", default=TOPOLOGY)
    options = parser.parse_args(arguments)
    if not peers.PYTHON.exists():
        print(f"{peers.PYTHON} is missing: make peers", file=sys.stderr)
        return 2
    for kernel, names in peers.ADAPTERS.items():
        for name in names:
            for case in peers.adapter(name).CASES:
                if not options.cases or case.name in options.cases:
                    row = measure(kernel, case, options.topology, peer=name)
                    print(f"{case.name}: {row['body']}, {row['cycles']:,} cycles", flush=True)
                    keep(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
