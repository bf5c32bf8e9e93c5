"""What is measured on an accelerator: a module per kernel family, each with its `CASES`."""

import importlib

from benchmarks.device_cases.case import DeviceCase

FAMILIES = ("kda", "mla", "grouped_matmul")


def registry() -> dict[str, tuple[DeviceCase, ...]]:
    """Every family's cases."""
    return {family: importlib.import_module(f"benchmarks.device_cases.{family}").CASES for family in FAMILIES}


def cases_of(name: str) -> tuple[str, tuple[DeviceCase, ...]]:
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
