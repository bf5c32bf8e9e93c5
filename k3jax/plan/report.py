"""A plan for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

GIB = 2**30
STATE, ROWS = (
    "more devices along mesh.fsdp or mesh.expert",
    "fewer tokens a device at a time: data.seq_len, mesh.context",
)
TRAIN_FIXES = {"weights": STATE, "optimizer": STATE, "working_copy": STATE, "gradients": STATE}
TRAIN_FIXES |= {"activations": ROWS, "buffers": f"{ROWS}, or mesh.tensor"}
SERVE_FIXES = {
    "weights": "more devices along mesh.tensor or mesh.expert",
    "kda_state": "fewer slots, or more devices along mesh.data or mesh.tensor",
    "mla_cache": "a smaller max_context or slots, or more devices",
    "sampling": "fewer slots",
    "buffers": "a smaller prefill_chunk or prefill_rows, or mesh.context",
}


def print_plan(plan: dict[str, Any]) -> None:
    """Print the plan's table, and where it does not fit what to change."""
    console = Console()
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan["mesh"].items()) or "one device"
    console.print(f"{plan['config']} on {plan['topology']}: {plan['devices']} devices, {mesh}", highlight=False)
    for mode, record in plan["modes"].items():
        console.print(_table(mode, record, plan["memory"]))
    if not plan["fits"]:
        console.print(f"does not fit: {advice(plan)}", style="bold", highlight=False)


def advice(plan: dict[str, Any]) -> str:
    """Both numbers of the mode that needs most, and what would make it less."""
    mode = max(plan["modes"], key=lambda name: needed_bytes(plan["modes"][name]))
    record = plan["modes"][mode]
    needed = needed_bytes(record)
    kind = max(record["per_device_bytes"], key=lambda name: record["per_device_bytes"][name])
    fix = (TRAIN_FIXES if mode == "train" else SERVE_FIXES)[kind]
    return (
        f"{mode} needs {needed / GIB:.1f} GiB of a device that has {plan['memory'] / GIB:.1f}; "
        f"the most is {kind}: {fix}"
    )


def needed_bytes(record: dict[str, Any]) -> int:
    """Bytes of a device: what the compiler says where it was asked."""
    return record.get("compiled", {}).get("peak_bytes", record["total_bytes"])


def _table(mode: str, record: dict[str, Any], memory: int) -> Table:
    table = Table(title=mode, title_justify="left", show_header=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    for kind, size in record["per_device_bytes"].items():
        table.add_row(kind.replace("_", " "), f"{size / GIB:.2f} GiB")
    total = record["total_bytes"]
    table.add_row("together, of a device", f"{total / GIB:.2f} of {memory / GIB:.2f} GiB ({total / memory:.0%})")
    table.add_section()
    table.add_row("operations", f"{record['flops']:.3g}")
    table.add_row("memory traffic", f"{record['hbm_bytes'] / GIB:.1f} GiB")
    for axis, size in record["axis_bytes"].items():
        table.add_row(f"sent along {axis}", f"{size / GIB:.1f} GiB")
    table.add_section()
    for term, seconds in record["seconds"].items():
        table.add_row(f"{term} (estimate)", f"{seconds * 1e3:.3g} ms")
    table.add_row("limited by", record["limit"])
    table.add_row("tokens a second, all devices (estimate)", f"{record['tokens_per_s']:,.0f}")
    if "compiled" in record:
        table.add_section()
        for name in ("argument", "output"):
            share = record["compiled"][f"{name}_bytes"] / record[f"{name}_bytes"] - 1
            table.add_row(f"compiler's {name}s beside the plan's", f"{share:+.2%}")
        for name, value in record["compiled"].items():
            text = f"{value / GIB:.2f} GiB" if name.endswith("_bytes") else str(value)
            table.add_row(f"compiler: {name.removesuffix('_bytes').replace('_', ' ')}", text)
    return table
