"""The registered measurements: a module per kernel family, each with its `CASES`."""

import importlib

from benchmarks.cases.case import Case

FAMILIES = ("kda", "mla", "attn_res", "grouped_matmul")


def registry() -> dict[str, tuple[Case, ...]]:
    """Every family's cases."""
    return {family: importlib.import_module(f"benchmarks.cases.{family}").CASES for family in FAMILIES}


def cases_of(name: str) -> tuple[str, tuple[Case, ...]]:
    """The kernel family and its cases; `name` is a family or one case. Raises ValueError for an unknown name."""
    families = registry()
    if name in families:
        return name, families[name]
    for kernel, cases in families.items():
        for case in cases:
            if case.name == name:
                return kernel, (case,)
    known = [*families, *(case.name for cases in families.values() for case in cases)]
    raise ValueError(f"unknown kernel {name!r}; use one of {', '.join(known)}")
