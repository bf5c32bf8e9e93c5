"""What a measurement on an accelerator is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax


class Work(NamedTuple):
    """`call()` enqueues the work once; `wait()` returns when everything enqueued has finished."""

    call: Callable[[], None]
    wait: Callable[[], None]


@dataclass(frozen=True)
class DeviceCase:
    """One piece of work: `build()` makes ours, `peers` others' by name, which raise ImportError if not installed.

    `units` is the number of units of work, which the kernel family names, in one call.
    """

    name: str
    units: int
    build: Callable[[], Work]
    peers: Mapping[str, Callable[[], Work]] = field(default_factory=dict)


def jax_work(function: Callable[..., tuple[Any, Any]], carry: Any, *arguments: Any) -> Work:
    """`carry, result = function(carry, *arguments)` compiled; the carry (a state, say) is donated from call to call."""
    compiled = jax.jit(function, donate_argnums=0)
    latest = [carry, None]

    def call() -> None:
        latest[:] = compiled(latest[0], *arguments)

    def wait() -> None:
        jax.block_until_ready(latest)

    return Work(call, wait)
