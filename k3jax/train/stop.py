"""Signals that ask a run to save and stop, and the maintenance events of Google Cloud that become one of them.

SIGTERM and SIGINT are noted and acted on between two steps; a second one acts as usual. With several processes JAX's
own preemption service takes SIGTERM: whichever process is told, all of them stop after the same step.
"""

from __future__ import annotations

import os
import signal
import threading
import urllib.error
import urllib.request
from types import FrameType, TracebackType
from typing import Any

import jax
from jax.experimental import multihost_utils

MAINTENANCE_URL = "http://metadata.google.internal/computeMetadata/v1/instance/maintenance-event"
WAIT_S = 60  # that the metadata server holds a request until something changes


class StopSignals:
    """Inside a `with` block, `wanted(step)` says whether to save and stop after `step`."""

    def __init__(self) -> None:
        self._caught: list[int] = []
        self._shared = jax.process_count() > 1
        self._numbers = (signal.SIGINT,) if self._shared else (signal.SIGTERM, signal.SIGINT)
        self._usual: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in self._numbers:
            self._usual[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._usual.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self._caught.append(number)
        signal.signal(number, self._usual[number])

    def wanted(self, step: int) -> bool:
        """Whether a signal came, to this process or, with several, to any of them in time for `step`."""
        return bool(self._caught) or (self._shared and multihost_utils.reached_preemption_sync_point(step))


def watch_maintenance(url: str = MAINTENANCE_URL, *, wait_s: int = WAIT_S) -> threading.Thread:
    """A thread that sends this process SIGTERM when the metadata server at `url` announces its machine's end.

    It gives up where there is no such server.
    """
    thread = threading.Thread(target=_watch, args=(url, wait_s), name="maintenance", daemon=True)
    thread.start()
    return thread


def _watch(url: str, wait_s: int) -> None:
    headers, change = {"Metadata-Flavor": "Google"}, f"?wait_for_change=true&timeout_sec={wait_s}"
    event = ""
    while "TERMINATE" not in event:  # the first request tells the present state, later ones wait for another
        request = urllib.request.Request(url + (change if event else ""), headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=wait_s + 10) as answer:
                event = answer.read().decode()
        except (urllib.error.URLError, OSError):
            return
    os.kill(os.getpid(), signal.SIGTERM)
