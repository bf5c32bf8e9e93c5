"""Wall clock of the kernels on the accelerator that is present, peers side by side where they are installed.

A sample is as many calls in a row as take 10 ms, so that the cost of waiting spreads; the result is the median of 20.

usage: python -m benchmarks.device KERNEL [--json OUT]
"""

import argparse
import importlib.metadata
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax

from benchmarks.device_cases import cases_of
from benchmarks.device_cases.case import DeviceCase, Work

WARM_UP = 3
SAMPLES = 20
SAMPLE_S = 10e-3
DISTRIBUTIONS = {"fla": "fla-core"}  # where a peer's version is under another name


def seconds(work: Work) -> float:
    """Median seconds of one call, compilation and warm-up apart."""
    for _ in range(WARM_UP):
        work.call()
    work.wait()
    calls = max(1, math.ceil(SAMPLE_S / _sample(work, 1)))
    return statistics.median(_sample(work, calls) for _ in range(SAMPLES)) / calls


def _sample(work: Work, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        work.call()
    work.wait()
    return time.perf_counter() - start


def measure(kernel: str, case: DeviceCase) -> list[dict[str, Any]]:
    """Our row of a case and its peers', whose `seconds` is None where they are not installed."""
    ours = {"body": "k3jax", "seconds": seconds(case.build())}
    bodies = [ours, *(_peer(name, build) for name, build in case.peers.items())]
    device = jax.devices()[0].device_kind
    rows = []
    for body in bodies:
        taken = body["seconds"]
        per_unit = None if taken is None else taken / case.units * 1e9
        common = {"kernel": kernel, "case": case.name, "device": device, "units": case.units}
        rows.append(common | body | {"ns_per_unit": per_unit})
    return rows


def _peer(name: str, build: Any) -> dict[str, Any]:
    try:
        work = build()
    except ImportError:
        return {"body": name, "seconds": None}
    version = importlib.metadata.version(DISTRIBUTIONS.get(name, name))
    return {"body": f"{name} {version}", "seconds": seconds(work)}


def _line(row: dict[str, Any]) -> str:
    if row["seconds"] is None:
        return f"{row['case']:<28}{row['body']:<14}{'not installed':>14}"
    return f"{row['case']:<28}{row['body']:<14}{row['seconds'] * 1e3:>11.3f} ms{row['ns_per_unit']:>11.3f} ns a unit"


def main(arguments: list[str] | None = None) -> int:
    """Print a line per case and body and write them as JSON; exit code 2 for an unknown kernel."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device", description=__doc__.splitlines()[0])
    parser.add_argument("kernel", help="a kernel family, or one of its cases")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the rows here")
    options = parser.parse_args(arguments)
    try:
        kernel, cases = cases_of(options.kernel)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(jax.devices()[0].device_kind)
    rows = []
    for case in cases:
        rows += (new := measure(kernel, case))
        print(*map(_line, new), sep="\n", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
