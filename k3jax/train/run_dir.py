"""A run's folder: whether it can be written, and whether it holds a run of the same config."""

from __future__ import annotations

import errno
import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from k3jax.checkpoint.orbax_io import CHECKPOINTS, SaveError, list_steps
from k3jax.config import ConfigError, TrainRun, to_yaml

CONFIG_FILE = "config.yaml"
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# What may change when a run is continued: none of these touches the order of the data or the size of an update.
MAY_CHANGE = {"run_dir", "log_every", "eval_every", "checkpoint_every", "keep_checkpoints", "keep_every", "init_from"}
MAY_CHANGE |= {"stack", "remat", "loss_chunk", "mesh", "data.workers", "data.eval_rows", "hang_seconds"}
MAY_CHANGE |= {"profile_step", "profile_steps", "max_skipped"}


def check_run_dir(run: TrainRun) -> None:
    """`ConfigError` where the folder cannot be written, or holds a run of another config; makes nothing."""
    run_dir = Path(run.run_dir)
    nearest = next(place for place in (run_dir, *run_dir.absolute().parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ConfigError(f"run_dir = {run_dir}: cannot be written ({nearest} is not a folder that can be)")
    saved = run_dir / CONFIG_FILE
    if list_steps(run_dir / CHECKPOINTS) and saved.exists():
        _check_same_run(flat(read_config(saved)), flat(yaml.safe_load(to_yaml(run))), run)


def read_config(path: Path) -> dict[str, Any]:
    """The config that a run began with, as written in its folder. Raises `ConfigError`."""
    try:
        config = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        config = None
    if not isinstance(config, dict):
        raise ConfigError(f"run_dir: {path} is damaged; without it the run continues with today's config, unchecked")
    return config


@contextmanager
def open_run_dir(run: TrainRun, *, alone: bool) -> Iterator[Path]:
    """The folder, made where it is missing, with the run's config in it; no other run's while it is open, if `alone`.

    One process of a run asks to be alone. Raises `ConfigError` where another run has it, or it cannot be written.
    """
    run_dir = Path(run.run_dir)
    with _writable(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        folder = os.open(run_dir, os.O_RDONLY)
    try:
        if alone:
            _lock(folder, run_dir)
        with _writable(run_dir):
            # All processes write the same, whole at any moment.
            scratch = run_dir / f".{CONFIG_FILE}.{uuid.uuid4().hex}"
            scratch.write_text(to_yaml(run))
            scratch.replace(run_dir / CONFIG_FILE)
        yield run_dir
    finally:
        os.close(folder)


@contextmanager
def _writable(run_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"run_dir = {run_dir}: cannot be written ({error.strerror})") from error


def _lock(folder: int, run_dir: Path) -> None:
    """For as long as the folder is open; a file system without locks gives none."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(f"run_dir = {run_dir}: another process trains there; wait for it, or name another") from error
    except OSError:
        pass


@contextmanager
def written_to(run: TrainRun) -> Iterator[None]:
    """Inside a `with` block, a disk without room and a checkpoint that cannot be written are a `ConfigError`."""
    try:
        yield
    except OSError as error:
        if not isinstance(error, SaveError) and error.errno not in NO_ROOM:
            raise
        what = error if isinstance(error, SaveError) else f"cannot be written ({error.strerror})"
        hint = "make room, and the same command continues from the last whole checkpoint"
        raise ConfigError(f"run_dir = {run.run_dir}: {what}; {hint}") from error


def flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """{"data.seq_len": 256, ...} of nested mappings."""
    if not isinstance(node, dict) or not node:
        return {prefix: node}
    return {k: v for key, child in node.items() for k, v in flat(child, f"{prefix}.{key}" if prefix else key).items()}


def _check_same_run(then: dict[str, Any], now: dict[str, Any], run: TrainRun) -> None:
    may_change = MAY_CHANGE - ({"init_from"} if run.lora.rank else set())  # adapters stand on the same weights
    for key, value in now.items():
        if key in then and then[key] != value and key not in may_change and key.partition(".")[0] not in may_change:
            raise ConfigError(
                f"{key} = {value}: the run in {run.run_dir} began with {then[key]}; "
                "continue it with that, or train in another run_dir"
            )
