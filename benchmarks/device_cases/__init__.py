"""What is measured on an accelerator: a module per kernel family, each with its `CASES`."""

from benchmarks import registry as registered
from benchmarks.device_cases.case import DeviceCase

FAMILIES = ("kda", "mla", "attn_res", "grouped_matmul")


def registry() -> dict[str, tuple[DeviceCase, ...]]:
    """Every family's cases."""
    return registered.load(__name__, FAMILIES)


def cases_of(name: str) -> tuple[str, tuple[DeviceCase, ...]]:
    """The kernel family and its cases; `name` is a family or one case. Raises ValueError for an unknown name."""
    return registered.find(registry(), name)
