"""Writes the table of `docs/performance.md` from the rows of `static_cycles` and the committed rows of peers.

usage: python -m benchmarks.report ROWS.json
"""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import peers

PAGE = peers.ROOT / "docs" / "performance.md"
BEGIN = "<!-- static cycles: begin (written by make bench) -->"
END = "<!-- static cycles: end -->"
UNITS = {"MXU": "MATMUL", "VPU": "VALU", "EUP": "EUP", "loads": "VLOAD", "stores": "VSTORE"}


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table: our rows in their order, each with the committed rows of peers on the same work below it."""
    columns = ["case", "body", "cycles", "per unit", "ours / peer", "HBM bytes", "temporaries", *UNITS]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for ours in (row for row in rows if row["body"] == "tpu"):
        for row in (ours, *peers.committed(ours["case"], ours["topology"])):
            ratio = "" if row is ours else f"{ours['cycles'] / row['cycles']:.2f}"
            sizes = f"{row['cycles_per_unit']:.2f}", ratio, f"{row['hbm_bytes']:,}", f"{row['temp_bytes']:,}"
            used = (f"{row['utilisation'][slot]:.2f}" for slot in UNITS.values())
            cells = f"`{row['case']}`", row["body"], f"{row['cycles']:,}", *sizes, *used
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def replace_section(page: str, section: str, *, begin: str = BEGIN, end: str = END) -> str:
    """The page with what stands between the markers replaced; raises ValueError where a marker is missing."""
    before, found, rest = page.partition(begin)
    _, found_too, after = rest.partition(end)
    if not found or not found_too:
        raise ValueError(f"docs/performance.md needs the lines {begin!r} and {end!r}, in this order")
    return f"{before}{begin}\n{section}\n{end}{after}"


def main(source: str) -> None:
    """Rewrite the section of the page."""
    rows = json.loads(Path(source).read_text())
    PAGE.write_text(replace_section(PAGE.read_text(), table(rows)))


if __name__ == "__main__":
    main(*sys.argv[1:])
