"""Finds registered measurements by name: a package has a module per kernel family, each with its `CASES`."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar


class Named(Protocol):
    """What a case of either kind has."""

    @property
    def name(self) -> str: ...


AnyCase = TypeVar("AnyCase", bound=Named)


def load(package: str, families: Sequence[str]) -> dict:
    """{family: its cases}."""
    return {family: importlib.import_module(f"{package}.{family}").CASES for family in families}


def find(families: Mapping[str, tuple[AnyCase, ...]], name: str) -> tuple[str, tuple[AnyCase, ...]]:
    """The kernel family and its cases; `name` is a family or one case. Raises ValueError for an unknown name."""
    if name in families:
        return name, families[name]
    for kernel, cases in families.items():
        for case in cases:
            if case.name == name:
                return kernel, (case,)
    known = [*families, *(case.name for cases in families.values() for case in cases)]
    raise ValueError(f"unknown kernel {name!r}; use one of {', '.join(known)}")
