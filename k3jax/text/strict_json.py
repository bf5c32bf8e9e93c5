"""JSON as the standard has it: what `json.loads` takes beyond it, or could not write again, is an error here."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

MAX_DEPTH = 200  # far under the depth at which reading and writing end in a RecursionError
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[{]|[\]}]', re.DOTALL)


def loads(text: str) -> Any:
    """The value of a JSON text. Raises ValueError, also for NaN, an infinite number or a deeper nesting than 200."""
    check_depth(text)
    return json.loads(text, parse_constant=refuse_constant, parse_float=_finite)


def check_depth(text: str) -> None:
    """Raises ValueError for JSON nested deeper than 200 levels."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    depth = 0
    for match in _BRACKETS.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(match.group(), 0)
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels")


def refuse_constant(name: str) -> NoReturn:
    """Raises ValueError for NaN and infinities, as `parse_constant` of `json.loads`."""
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{digits} is no finite number")
    return value
