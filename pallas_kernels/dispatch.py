"""Which body of a kernel runs: by request or by platform, said once in the log, never a silent fallback."""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax

ALIASES = {"chunked": "xla"}
NAMES = ("reference", "xla", "blocked", "tpu", "gpu")
BY_PLATFORM = {"cpu": "xla", "gpu": "xla", "cuda": "xla", "rocm": "xla", "tpu": "xla"}

_log = logging.getLogger("pallas_kernels")
_announced: set[tuple[str, str]] = set()
_compiled_for: ContextVar[str | None] = ContextVar("compiled_for", default=None)


@contextmanager
def compiling_for(platform: str) -> Iterator[None]:
    """Trace what is inside for `platform`, which need not be present: programs compiled ahead of time."""
    token = _compiled_for.set(platform)
    try:
        yield
    finally:
        _compiled_for.reset(token)


def target_platform() -> str:
    """The platform that kernels are chosen for: JAX's default one, unless `compiling_for` another."""
    return _compiled_for.get() or jax.default_backend()


@functools.cache
def on_hopper() -> bool:
    """Whether the `gpu` bodies run here: an NVIDIA GPU of compute capability 9.x, and jax 0.11's Mosaic GPU."""
    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", ""))
    return device.platform == "gpu" and capability.startswith("9.") and jax.__version_info__ >= (0, 11)


def resolve(
    op: str,
    implementation: str | None,
    bodies: Mapping[str, Callable[..., Any]],
    *,
    by_platform: Mapping[str, str] = BY_PLATFORM,
) -> Callable[..., Any]:
    """Return the body of `op` to run and log the choice once at INFO.

    `implementation` is one of `NAMES`, an alias in `ALIASES`, or None: then `by_platform[target_platform()]`.
    Raises ValueError for an unknown name and NotImplementedError for a body that `op` does not have.
    """
    platform = target_platform()
    name = by_platform.get(platform, "xla") if implementation is None else ALIASES.get(implementation, implementation)
    if name not in NAMES:
        valid = ", ".join((*NAMES, *ALIASES))
        raise ValueError(f"{op}: implementation={implementation!r} is unknown; use None or one of {valid}")
    if name not in bodies:
        raise NotImplementedError(f"{op}: there is no {name!r} body; use one of {', '.join(bodies)}")
    if (op, name) not in _announced:
        _announced.add((op, name))
        _log.info("%s runs its %r body on %s (implementation=%r)", op, name, platform, implementation)
    return bodies[name]
