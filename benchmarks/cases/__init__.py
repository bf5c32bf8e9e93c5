"""The registered measurements: a module per kernel family, each with its `CASES`."""

from benchmarks import registry as registered
from benchmarks.cases.case import Case

FAMILIES = ("kda", "mla", "attn_res", "grouped_matmul")


def registry() -> dict[str, tuple[Case, ...]]:
    """Every family's cases."""
    return registered.load(__name__, FAMILIES)


def cases_of(name: str) -> tuple[str, tuple[Case, ...]]:
    """The kernel family and its cases; `name` is a family or one case. Raises ValueError for an unknown name."""
    return registered.find(registry(), name)
