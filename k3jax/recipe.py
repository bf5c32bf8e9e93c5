"""YAML that must fit typed dataclasses, and the one-line errors where it does not."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import omegaconf
import yaml
from omegaconf import OmegaConf


class ConfigError(ValueError):
    """A mistake in a config file, an override or a checkpoint's config.json; the message is one complete line."""


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; raises `ConfigError`."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"config {path}: no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path}: cannot be read ({error})") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise ConfigError(f"config {path}{where}: not valid YAML") from error
    require(content is None or isinstance(content, dict), f"config {path}: must be a mapping of keys to values")
    return content or {}


def merge(base: Any, update: Any, place: str) -> Any:
    """`update` laid over the typed `base`; a `ConfigError` names `place`, and the key that does not fit."""
    try:
        return OmegaConf.merge(base, update)
    except (omegaconf.errors.ConfigKeyError, omegaconf.errors.ConfigAttributeError) as error:
        full = str(error.full_key or error.key)
        parent, _, key = full.rpartition(".")
        node = OmegaConf.select(base, parent) if parent else base
        known = [str(k) for k in node] if OmegaConf.is_dict(node) else []
        raise ConfigError(f"{place}: unknown key {full}{_nearest(key, known)}") from error
    except (omegaconf.errors.OmegaConfBaseException, TypeError) as error:  # TypeError: a list for a mapping, or back
        place_of_error = getattr(error, "full_key", None)
        reason = _wrong_kind(base, update, place_of_error) or f"{place_of_error}: {str(error).splitlines()[0]}"
        raise ConfigError(f"{place}: {reason}") from error


def _wrong_kind(base: Any, update: Any, failed: str | None, prefix: str = "") -> str | None:
    """What is wrong with the first value of `update` that is of another kind than that of `base`."""
    for key, value in update.items():
        known, full = base.get(key), f"{prefix}{key}"
        kind = _kind(known)
        if OmegaConf.is_dict(known) and OmegaConf.is_dict(value):
            if reason := _wrong_kind(known, value, failed, f"{full}."):
                return reason
        elif kind and (_is_container(known) != _is_container(value) or value is None or full == failed):
            return f"{full} = {'(nothing)' if value is None else value}: must be {kind}"
    return None


def _is_container(value: Any) -> str:
    return "mapping" if OmegaConf.is_dict(value) else "list" if OmegaConf.is_list(value) else ""


def _kind(known: Any) -> str:
    """Words for the kind of a default value; empty for one that may be left out."""
    if OmegaConf.is_dict(known):
        return f"a mapping{' with keys of ' + ', '.join(known) if known else ''}"
    if OmegaConf.is_list(known):
        return "a list"
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return words.get(type(known), "")


def _nearest(name: str, known: Sequence[str]) -> str:
    match = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {match[0]}?" if match else (f"; valid keys: {', '.join(known)}" if known else "")


def require(condition: bool, message: str) -> None:
    """Raise `ConfigError` with the message unless the condition holds."""
    if not condition:
        raise ConfigError(message)
