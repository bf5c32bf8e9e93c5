"""What the processes of one server must agree on. Each runs the same event loop, so they see the same requests in the
same order; process 0 alone talks to the world, and its word goes for what the others cannot know.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from k3jax.config import ConfigError


def is_first() -> bool:
    """Whether this process reads and writes for all."""
    return jax.process_index() == 0


def from_first(make: Callable[[], Any]) -> Any:
    """What process 0 makes, a JSON value, in every process; all wait for it. Raises its `ConfigError` everywhere."""
    if jax.process_count() == 1:
        return make()
    data = _outcome(make) if is_first() else b""
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
    padded = np.zeros(size, np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    answer = json.loads(np.asarray(multihost_utils.broadcast_one_to_all(padded)).tobytes())
    if "error" in answer:
        raise ConfigError(answer["error"])
    return answer["value"]


def _outcome(make: Callable[[], Any]) -> bytes:
    try:
        return json.dumps({"value": make()}).encode()
    except ConfigError as error:
        return json.dumps({"error": str(error)}).encode()
