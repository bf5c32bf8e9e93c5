"""Typed access to the fields of a request body, with one clear error for each mistake."""

from __future__ import annotations

import difflib
import json
import reprlib
from collections.abc import Callable, Collection, Mapping
from typing import Any


class RequestError(ValueError):
    """A request that gets an error record: `code` for programs, the message for people, `param` the field at fault."""

    def __init__(self, message: str, *, code: str = "invalid_request", param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


def check_names(body: Mapping[str, Any], *, known: Collection[str], neutral: Mapping[str, Any]) -> None:
    """Raise `RequestError` for a field that is neither `known` nor has its `neutral` value, which asks for nothing."""
    for name, value in body.items():
        if name in known:
            continue
        if name not in neutral:
            near = difflib.get_close_matches(name, (*known, *neutral), n=1)
            raise RequestError(f"unknown field {name!r}{f'; did you mean {near[0]!r}?' if near else ''}", param=name)
        if value != neutral[name] or isinstance(value, bool) != isinstance(neutral[name], bool):
            raise RequestError(
                f"{name} = {shown(value)} is not supported; leave it out", code="unsupported", param=name
            )


def field(body: Mapping[str, Any], name: str, default: Any, valid: Callable[[Any], bool], expected: str) -> Any:
    """A field's value, or `default` where it is absent. Raises `RequestError` saying what was `expected`."""
    value = body.get(name, default)
    if name in body and not valid(value):
        raise RequestError(f"{name} = {shown(value)}: must be {expected}", param=name)
    return value


def whole(body: Mapping[str, Any], name: str, default: Any, low: int, high: int | None = None) -> Any:
    """A whole number from `low` to `high`."""
    expected = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
    return field(body, name, default, is_int(low, float("inf") if high is None else high), expected)


def number(body: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    """A number from `low` to `high`."""
    return float(field(body, name, default, is_number(low, high), f"a number from {low:g} to {high:g}"))


def text(body: Mapping[str, Any], name: str, default: str) -> str:
    """A string."""
    return field(body, name, default, lambda value: isinstance(value, str), "a string")


def flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    """True or false."""
    return field(body, name, default, lambda value: isinstance(value, bool), "true or false")


def is_int(low: float, high: float = float("inf")) -> Callable[[Any], bool]:
    """A check for a whole number in a range; true and false are none."""
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_number(low: float, high: float) -> Callable[[Any], bool]:
    """A check for a number in a range; true and false are none."""
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def kind(value: Any) -> str:
    """What a value is, for a message."""
    return {dict: "an object", list: "a list", str: "a string", type(None): "null"}.get(type(value), shown(value))


def shown(value: Any) -> str:
    """A value for a message, cut to 60 characters."""
    shortened = reprlib.repr(value) if isinstance(value, dict | list) else json.dumps(value)
    return shortened if len(shortened) <= 60 else f"{shortened[:57]}..."
