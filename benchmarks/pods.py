"""Compiles the programs of the whole model for pods, a process for each, and keeps what came of it in `docs/pods.json`.

usage: python -m benchmarks.pods [--rows NAME,...] [--table]

Without `--rows`, those that were never compiled or whose sources have changed since. A row is written as it comes, and
`docs/performance.md` gets its tables from all of them. Needs the TPU compiler (`make aot-all` installs it), no TPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import resource
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.report import PAGE, replace_section
from k3jax.config import ConfigError

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "docs" / "pods.json"
BEGIN, END = "<!-- pods: begin (written by python -m benchmarks.pods) -->", "<!-- pods: end -->"
GIB = 2**30

# What the programs are made from, besides each one's recipe.
SHARED = (
    "configs/models/k3.yaml",
    "k3jax/config.py",
    "k3jax/nn/*.py",
    *(f"k3jax/plan/{name}.py" for name in ("chips", "compiled", "estimate", "plan", "serve", "train")),
    "k3jax/quant/*.py",
    "k3jax/train/flops.py",
    "pallas_kernels/**/*.json",
    "pallas_kernels/**/*.py",
    "sharding/*.py",
)
TRAIN = tuple(f"k3jax/train/{name}.py" for name in ("devices", "guard", "optimizer", "router_balance", "start", "step"))
SERVE = tuple(f"k3jax/serve/{name}.py" for name in ("devices", "engine", "programs", "run", "sampler"))


@dataclass(frozen=True, kw_only=True)
class Row:
    """A program on a slice: a recipe with overrides. `goal`: GiB that a device was to need at most."""

    name: str
    work: str
    config: str
    topology: str
    overrides: tuple[str, ...] = ()
    goal: int | None = None

    @property
    def mode(self) -> str:
        """train, prefill or decode."""
        return self.name.partition("-")[0]

    @property
    def chips(self) -> int:
        """Of the slice."""
        return math.prod(map(int, self.topology.partition(":")[2].split("x")))


_DECODE: dict[str, Any] = {"work": "decode, 128 x 32k", "config": "configs/serve/k3_tpu7x.yaml"}
_PREFILL: dict[str, Any] = {"work": "prefill, 128k of 1M", "config": "configs/serve/k3_tpu7x_prefill.yaml"}
_TRAIN: dict[str, Any] = {"work": "train, 8,192 tokens a device", "config": "configs/train/k3_tpu7x.yaml"}
_HALVES = ("mesh.data=2", "mesh.context=8", "mesh.tensor=16", "slots=2", "prefill_rows=2", "prefill_chunk=65536")
_TWICE = ("mesh.fsdp=16", "data.batch_size=2048")
ROWS = (
    Row(name="decode-tpu7x-64", topology="tpu7x:4x4x4", goal=20, **_DECODE),
    Row(name="decode-tpu7x-32", topology="tpu7x:4x4x2", overrides=("mesh.tensor=16",), goal=38, **_DECODE),
    Row(
        name="decode-tpu7x-16",
        topology="tpu7x:4x2x2",
        overrides=("mesh.expert=2", "mesh.tensor=16"),
        goal=62,
        **_DECODE,
    ),
    Row(name="prefill-tpu7x-64", topology="tpu7x:4x4x4", goal=35, **_PREFILL),
    Row(name="decode-v6e-256", topology="v6e:16x16", overrides=("mesh.data=2",), **_DECODE),
    Row(
        name="prefill-v6e-256",
        topology="v6e:16x16",
        overrides=_HALVES,
        **_PREFILL | {"work": "prefill, 2 x 64k of 1M"},
    ),
    Row(name="train-tpu7x-512", topology="tpu7x:8x8x8", goal=70, **_TRAIN),
    Row(name="train-tpu7x-1024", topology="tpu7x:8x8x16", overrides=_TWICE, **_TRAIN),
    Row(name="train-v5p-1024", topology="v5p:8x8x16", **_TRAIN),
)


def sources_digest(row: Row) -> str:
    """SHA-256 over the names and contents of the files that a row's program is made from."""
    patterns = (*SHARED, *(TRAIN if row.mode == "train" else SERVE), row.config)
    files = sorted(path for pattern in patterns for path in ROOT.glob(pattern) if not path.stem.startswith("gpu"))
    digest = hashlib.sha256()
    for path in files:
        digest.update(
            f"{path.relative_to(ROOT).as_posix()}\n{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode()
        )
    return digest.hexdigest()


def read_records() -> dict[str, Any]:
    """The record of every row that has been compiled, by its name."""
    return json.loads(RECORDS.read_text()) if RECORDS.exists() else {}


def stale(records: dict[str, Any]) -> list[Row]:
    """Rows without a record, and those whose sources are no longer what they were compiled from."""
    return [row for row in ROWS if records.get(row.name, {}).get("sources") != sources_digest(row)]


def measure(row: Row) -> dict[str, Any]:
    """A row's record; raises `ConfigError` and `MeshError`, and what the compiler raises where it does not fit."""
    from k3jax.plan.plan import make_plan

    sources = sources_digest(row)  # before what may take an hour
    modes = (row.mode,)
    plan = make_plan(str(ROOT / row.config), row.overrides, topology=row.topology, modes=modes, compile_too=True)
    record = plan["modes"][row.mode]
    used = resource.getrusage(resource.RUSAGE_SELF)
    estimated = ("total_bytes", "flops", "hbm_bytes", "axis_bytes", "seconds", "limit", "roofline_s", "tokens")
    return {
        "config": row.config,
        "overrides": list(row.overrides),
        "topology": row.topology,
        "mode": row.mode,
        "devices": plan["devices"],
        "memory_bytes": plan["memory"],
        "mesh": plan["mesh"],
        "fits": plan["fits"],
        "compiled": record["compiled"]
        | {"cpu_s": round(used.ru_utime + used.ru_stime), "compiler_bytes": used.ru_maxrss * 1024},
        "ESTIMATE": {name: record[name] for name in estimated}
        | {"tokens_per_s_per_chip": record["tokens_per_s"] / row.chips},
        "versions": {name: version(name) for name in ("jax", "libtpu")},
        "sources": sources,
    }


def compiled_table(records: dict[str, Any]) -> str:
    """A Markdown table of what the compiler says of each row."""
    head = "program | slice | mesh | arguments | temporaries | peak, GiB | goal | usable | the plan's estimate"
    lines = [f"| {head} | compile, s | CPU, s | compiler, GiB | StableHLO, lines |", "|" + "---|" * 13]
    for row in ROWS:
        slice_ = f"{row.topology}, {row.chips:,} chips"
        if row.name not in records:
            lines.append(f"| {row.work} | {slice_} | not compiled |" + " |" * 10)
            continue
        record = records[row.name]
        compiled, gib = record["compiled"], lambda size: f"{size / GIB:.1f}"
        memory = (gib(compiled[f"{kind}_bytes"]) for kind in ("argument", "temp"))
        goal = "fits" if row.goal is None else f"{row.goal}{_missed(compiled['peak_bytes'] > row.goal * GIB)}"
        peak = f"**{gib(compiled['peak_bytes'])}**{_missed(not record['fits'])}"
        limits = peak, goal, gib(record["memory_bytes"]), gib(record["ESTIMATE"]["total_bytes"])
        costs = f"{compiled['compile_s']:.0f}", f"{compiled['cpu_s']}", gib(compiled["compiler_bytes"])
        mesh = " x ".join(f"{axis} {size}" for axis, size in record["mesh"].items())
        cells = row.work, slice_, mesh, *memory, *limits, *costs, f"{compiled['stablehlo_lines']:,}"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _missed(is_so: bool) -> str:
    return " (missed)" if is_so else ""


def roofline_table(records: dict[str, Any]) -> str:
    """A Markdown table of estimated step times, and the collectives in each lowered program."""
    head = "program | slice | matrix unit, ms | HBM, ms | network, ms | limited by | step, ms | tokens/s a chip"
    lines = [f"| {head} | collectives in the program |", "|" + "---|" * 9]
    for row in (row for row in ROWS if row.name in records):
        estimate, found = records[row.name]["ESTIMATE"], records[row.name]["compiled"]["collectives"]
        terms = (f"{estimate['seconds'][term] * 1e3:,.1f}" for term in ("compute", "memory", "network"))
        step = f"**{estimate['roofline_s'] * 1e3:,.1f}**", f"**{estimate['tokens_per_s_per_chip']:,.0f}**"
        limit = {"compute": "matrix unit", "memory": "HBM", "network": "network"}[estimate["limit"]]
        collectives = ", ".join(f"{count} {name}" for name, count in found.items())
        cells = row.work, f"{row.topology}, {row.chips:,} chips", *terms, limit, *step, collectives
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def section(records: dict[str, Any]) -> str:
    """What stands between the markers of the page."""
    made = sorted({f"jax {r['versions']['jax']}, libtpu {r['versions']['libtpu']}" for r in records.values()})
    return (
        f"What the compiler says ({'; '.join(made)}), GiB of one device:\n\n{compiled_table(records)}\n\n"
        f"ESTIMATES, from the makers' data sheets and the plan's counts:\n\n{roofline_table(records)}"
    )


def write_page(records: dict[str, Any]) -> None:
    """Replace the section of `docs/performance.md`."""
    PAGE.write_text(replace_section(PAGE.read_text(), section(records), begin=BEGIN, end=END))


def keep_record(name: str, record: dict[str, Any]) -> None:
    """Put one record beside the others that are there by now, as a whole or not at all."""
    records = read_records() | {name: record}
    ordered = {row.name: records[row.name] for row in ROWS if row.name in records}
    partial = RECORDS.with_name(f".{RECORDS.name}.partial")
    partial.write_text(json.dumps(ordered, indent=1) + "\n")
    partial.replace(RECORDS)
    write_page(ordered)


def _compile_one(row: Row) -> bool:
    """Measure a row in a process of its own, so that its memory returns, and keep its record; False where it failed."""
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            record = pool.submit(measure, row).result()
    except Exception as error:  # whatever the compiler raises, or its death, is this row's alone
        print(f"{row.name}: {type(error).__name__}: {str(error).partition(chr(10))[0]}", file=sys.stderr, flush=True)
        return False
    keep_record(row.name, record)
    compiled = record["compiled"]
    gib = f"peak {compiled['peak_bytes'] / GIB:.1f} GiB a device, compiler {compiled['compiler_bytes'] / GIB:.1f} GiB"
    print(f"{row.name}: {gib}, {compiled['compile_s']:.0f} s, CPU {compiled['cpu_s']} s", flush=True)
    return True


def _chosen(names: str | None) -> list[Row]:
    if names is None:
        return stale(read_records())
    by_name = {row.name: row for row in ROWS}
    unknown = next((name for name in names.split(",") if name not in by_name), None)
    if unknown is not None:
        raise ConfigError(f"--rows {unknown}: one of {', '.join(by_name)}")
    return [by_name[name] for name in names.split(",")]


def main(arguments: list[str] | None = None) -> int:
    """Compile the rows that are asked for; 1 where one failed, 2 for a mistake in the call."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pods", description=__doc__)
    parser.add_argument("--rows", metavar="NAME,...", help=", ".join(row.name for row in ROWS))
    parser.add_argument("--table", action="store_true", help="compile nothing: write the page from the records")
    options = parser.parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if options.table:
        write_page(read_records())
        return 0
    try:
        rows = _chosen(options.rows)
    except ConfigError as error:
        print(f"benchmarks.pods: {error}", file=sys.stderr)
        return 2
    print(f"{len(rows)} to compile: {', '.join(row.name for row in rows) or 'all are up to date'}", flush=True)
    done = []
    for number, row in enumerate(rows, 1):
        print(f"[{number}/{len(rows)}] {row.name}: {row.work} on {row.topology}", flush=True)
        done.append(_compile_one(row))
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
