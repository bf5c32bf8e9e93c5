"""Cycles of the Pallas TPU kernels from the compiler's own schedule, on a machine without a TPU.

The TPU compiler (libtpu) compiles for any topology and writes the bundles it scheduled; `bundles.py` counts them. The
numbers are free of noise and equal from run to run. They leave out waits for memory: compare with hbm_bytes over the
chip's bandwidth. Everything the program runs counts, the fusions and copies around the kernel included.

With `--peers`, kernels of other projects stand below ours on the same work (`benchmarks.peers`).

usage: python -m benchmarks.static_cycles KERNEL [--topology tpu7x:2x2x1] [--peers] [--json OUT]
"""

import argparse
import glob
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.bundles import SLOTS, Schedule, read_schedule
from benchmarks.cases import cases_of, registry
from benchmarks.cases.case import Case

TOPOLOGY = "tpu7x:2x2x1"
Row = dict[str, Any]

# What libtpu wants to hear about a machine that it cannot ask, by the topology's chip.
ACCELERATOR = {"tpu7x": "tpu7x-8", "v6e": "v6e-4", "v5p": "v5p-8", "v5e": "v5litepod-4"}
BRANCH_DELAY = {"tpu7x": 6, "v6e": 4, "v5p": 4, "v5e": 4}
NOT_THE_PROGRAM = "<late-"  # what runs before and after any program


def environment(topology: str, dump: Path | None = None) -> dict[str, str]:
    """The variables under which libtpu compiles for `topology` without a TPU and writes its schedule to `dump`."""
    chip = topology.split(":")[0]
    if chip not in ACCELERATOR:
        raise ValueError(f"topology {topology!r}: the chip must be one of {', '.join(ACCELERATOR)}")
    variables = {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": "",  # a cached program writes no schedule
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": ACCELERATOR[chip],
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    if dump is not None:
        variables["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true"
    return os.environ | variables


def read_schedules(folder: Path, topology: str, traced_trips: tuple[int, ...] = ()) -> list[Schedule]:
    """The schedule of every part of the one program that was compiled into `folder`; trips as `Case` has them."""
    delay, traced = BRANCH_DELAY[topology.split(":")[0]], iter(traced_trips)
    schedules = []
    for path in sorted(folder.glob("*[0-9]-final_bundles.txt")):
        stem = path.name.removesuffix("-final_bundles.txt").rpartition("-")[0]
        if NOT_THE_PROGRAM in stem:
            continue
        (slots,) = folder.glob(f"{glob.escape(stem)}-*final_hlo-static-per-bundle-utilization.txt")
        text = path.read_text(), slots.read_text()
        schedules.append(read_schedule(*text, branch_delay=delay, traced_trips=traced))
    if not schedules:
        raise RuntimeError(f"the compiler left no schedule in {folder}")
    if unused := [*traced]:
        raise ValueError(f"the program has fewer traced loops than trips given: {unused} are left of {traced_trips}")
    return schedules


def measure(kernel: str, case: Case, topology: str, *, peer: str | None = None) -> Row:
    """Compile one case, ours or the one that a peer's adapter has, in a process of its own and return its row."""
    python = sys.executable if peer is None else str(peers.PYTHON)
    with tempfile.TemporaryDirectory() as folder:
        command = [python, "-m", "benchmarks.compile_case", case.name, topology, *([] if peer is None else [peer])]
        done = subprocess.run(command, env=environment(topology, Path(folder)), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{case.name} does not compile for {topology}:\n{done.stderr[-4000:]}")
        schedules = read_schedules(Path(folder), topology, case.traced_trips)
    cycles = sum(schedule.cycles for schedule in schedules)
    return {
        "kernel": kernel,
        "case": case.name,
        "body": "tpu",
        "topology": topology,
        "cycles": cycles,
        "units": case.units,
        "cycles_per_unit": round(cycles / case.units, 4),
        "utilisation": utilisation(schedules),
        **json.loads(done.stdout.splitlines()[-1]),
    }


def measure_peers(kernel: str, case: Case, topology: str) -> list[Row]:
    """The rows of all peers that do the work of one of our cases: the committed ones where none is installed."""
    if not peers.PYTHON.exists():
        return [row | {"committed": True} for row in peers.committed(case.name, topology)]
    adapters = {name: peers.adapter(name).CASES for name in peers.ADAPTERS.get(kernel, ())}
    same = [(name, other) for name, cases in adapters.items() for other in cases if other.name == case.name]
    return [measure(kernel, other, topology, peer=name) for name, other in same]


def utilisation(schedules: list[Schedule]) -> dict[str, float]:
    """The part of each kind of slot that is used, over all cycles; loads and stores include fills and spills."""
    cycles = sum(schedule.cycles for schedule in schedules)
    totals = dict.fromkeys(SLOTS, 0)
    for schedule in schedules:
        for name, used in schedule.slot_cycles().items():
            totals[name] += used
    capacity = dict(zip(SLOTS, schedules[0].capacity, strict=True))
    return {name: round(totals[name] / (cycles * capacity[name]), 4) for name in SLOTS}


SHOWN = ("MATMUL", "MATPUSH", "VALU", "XLU", "EUP", "VPOP", "VLOAD", "VSTORE")


def _header() -> str:
    slots = "".join(f"{name:>8}" for name in SHOWN)
    return f"{'case':<24}{'body':<18}{'cycles':>12}{'per unit':>10}{'HBM MB':>9}  {slots}"


def _line(row: Row, ours: Row) -> str:
    """One row of the table; a peer's ends with what ours takes of its cycles, and says if it was not measured now."""
    used = "".join(f"{row['utilisation'][name]:8.2f}" for name in SHOWN)
    numbers = f"{row['cycles']:>12,}{row['cycles_per_unit']:>10.2f}{row['hbm_bytes'] / 1e6:>9.1f}"
    line = f"{row['case']:<24}{row['body']:<18}{numbers}  {used}"
    if row is ours:
        return line
    return f"{line}  ours: {ours['cycles'] / row['cycles']:.2f}" + ("; committed" if row.get("committed") else "")


def main(arguments: list[str] | None = None) -> int:
    """Print one row per case and write them as JSON; exit code 2 for an unknown kernel or topology."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.static_cycles", description=__doc__.splitlines()[0])
    parser.add_argument("kernel", help="a kernel family, one of its cases, or 'all'")
    parser.add_argument("--topology", default=TOPOLOGY)
    parser.add_argument("--peers", action="store_true", help="other projects' kernels too (make peers installs them)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the rows here")
    options = parser.parse_args(arguments)
    try:
        families = registry() if options.kernel == "all" else dict([cases_of(options.kernel)])
        environment(options.topology)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.peers and not peers.PYTHON.exists():
        print("peers: not installed (make peers); their rows are those of benchmarks/peers/rows.json")
    rows = []
    print(_header())
    for kernel, case in ((kernel, case) for kernel, cases in families.items() for case in cases):
        ours = measure(kernel, case, options.topology)
        for row in (ours, *(measure_peers(kernel, case, options.topology) if options.peers else ())):
            print(_line(row, ours), flush=True)
            rows.append(row)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
