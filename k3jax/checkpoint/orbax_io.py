"""Every call of Orbax: asynchronous, atomic checkpoints of a run, and reading one back.

A checkpoint is one folder `RUN/checkpoints/STEP` that appears whole or not at all. It holds named trees of arrays
(a training run writes `weights` and `optimizer`) and small JSON records (`model`: the model's config; `data`: the
position in the data, and the tokenizer's name; `checksums`: of every array). Trees are stored by the names of their
leaves, such as `stacks.kda_moe.mixer.q`, so a checkpoint depends on the names in a model and on no library's tree
classes.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from k3jax.checkpoint.arrays import METADATA, DamagedError
from k3jax.checkpoint.folder import Folder, is_remote
from k3jax.config import ConfigError, KDAConfig, MLAConfig, ModelConfig, MoEConfig, VisionConfig
from k3jax.nn.param import is_variable

Tree = TypeVar("Tree")
RECORD = "metadata"  # file of a JSON record
CHECKPOINTS = "checkpoints"  # folder of a run that holds its steps
WEIGHTS, OPTIMIZER, MODEL, DATA, CHECKSUMS = "weights", "optimizer", "model", "data", "checksums"

log = logging.getLogger(__name__)
logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax reports every stage of every save, and what it raises


class SaveError(OSError):
    """A checkpoint could not be written; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What one step's folder holds: trees in the shape that was asked for, and JSON records."""

    step: int
    trees: dict[str, Any]
    records: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run: saves in the background, restores the newest whole one.

    It keeps the newest `keep`, and for good those of steps that `keep_every` divides (0: none).
    """

    def __init__(self, run_dir: Path, *, keep: int, keep_every: int = 0) -> None:
        self.folder = run_dir.absolute() / CHECKPOINTS
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, keep_period=keep_every or None, cleanup_tmp_directories=True
        )
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def save(self, step: int, *, trees: Mapping[str, Any], records: Mapping[str, Any]) -> None:
        """Copy the arrays and return; writing goes on behind. An earlier save's `SaveError` is raised here."""
        named = {name: named_leaves(tree) for name, tree in trees.items()}
        sums = jax.tree.map(int, jax.device_get(_checksums(named)))
        items: dict[str, Any] = {name: ocp.args.StandardSave(tree) for name, tree in named.items()}
        items |= {name: ocp.args.JsonSave(record) for name, record in {**records, CHECKSUMS: sums}.items()}
        with self._writing():
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def restore(self, *, like: Mapping[str, Any], records: tuple[str, ...]) -> Checkpoint | None:
        """Read the newest checkpoint into trees shaped like `like` (arrays or shapes); None where there is none.

        A checkpoint that cannot be read is set aside as `STEP.damaged` with a warning, and the one before it is
        taken. Raises `ConfigError` where none is left, or where names or shapes differ from `like`.
        """
        steps = list_steps(self.folder)
        for step in reversed(steps):
            place = self.folder / str(step)
            try:
                trees = {name: restore_tree(place, name, tree) for name, tree in like.items()}
                return Checkpoint(
                    step=step, trees=trees, records={n: read_record(Folder.at(place), n) for n in records}
                )
            except (OSError, DamagedError) as error:
                log.warning("checkpoint %s cannot be read and is set aside: %s", place, error)
                if jax.process_index() == 0:
                    place.rename(place.with_name(f"{step}.damaged"))
                self._manager.reload()
        if steps:
            raise ConfigError(f"run_dir: none of the {len(steps)} checkpoints in {self.folder} can be read")
        return None

    def wait(self) -> None:
        """Return when every save is on disk; raises the `SaveError` of one that failed."""
        with self._writing():
            self._manager.wait_until_finished()

    def check(self) -> None:
        """Raise the `SaveError` of a save behind, if one failed."""
        with self._writing():
            self._manager.check_for_errors()

    def close(self) -> None:
        """Wait, and stop the threads."""
        with self._writing():
            self._manager.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            reason = _first_line(error)
            if isinstance(error, ValueError) and "os_error_code" not in reason:  # none of TensorStore's
                raise
            reason = reason.partition(" [os_error_code")[0].rpartition(": ")[2]  # after it has named every folder
            raise SaveError(f"a checkpoint could not be written ({reason})") from error


@jax.jit
def _checksums(trees: Any) -> Any:
    """`work.checksum` of every leaf, its elements as 4 bytes each: taken on the devices, alike for all shardings."""
    return jax.tree.map(_checksum, trees)


def _checksum(leaf: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")).astype(jnp.uint32)
    position, stride = jnp.zeros(leaf.shape, jnp.uint32), 1
    for axis in reversed(range(leaf.ndim)):
        position += jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) * np.uint32(stride % 2**32)
        stride *= leaf.shape[axis]
    return jnp.sum(bits * (2 * position + 1), dtype=jnp.uint32)


def list_steps(folder: Path) -> list[int]:
    """The steps saved in a run's `checkpoints` folder, ascending."""
    return sorted(int(path.name) for path in folder.glob("*") if re.fullmatch(r"\d+", path.name) and path.is_dir())


def find_step(path: str | os.PathLike[str]) -> Folder | None:
    """The newest complete step of `path`: a run, its `checkpoints`, or a step itself; None where it has none."""
    if is_remote(path):
        folder = Folder.at(path)
        return folder if f"{WEIGHTS}/{METADATA}" in folder.names() else None
    path = Path(path)
    if (path / WEIGHTS / METADATA).is_file():
        return Folder.at(path)
    for place in (path / CHECKPOINTS, path):
        if steps := list_steps(place):
            return Folder.at(place / str(steps[-1]))
    return None


def read_record(step: Folder, name: str) -> Any:
    """A JSON record of a checkpoint; raises `DamagedError`."""
    try:
        return json.loads((step / name).read(RECORD))
    except (OSError, ValueError) as error:
        raise DamagedError(f"{step / name}: {_first_line(error)}") from error


def read_model_config(step: Folder) -> ModelConfig:
    """The config of a checkpoint's model."""
    record = read_record(step, MODEL)
    parts = {"kda": KDAConfig(**record["kda"]), "mla": MLAConfig(**record["mla"]), "moe": MoEConfig(**record["moe"])}
    vision = record.get("vision")  # records of older text models have none
    return ModelConfig(**{**record, **parts, "vision": vision and VisionConfig(**vision)}).validate()


def model_record(config: ModelConfig) -> dict[str, Any]:
    """The JSON record that `read_model_config` reads."""
    return dataclasses.asdict(config)


def restore_tree(step_dir: Path, name: str, like: Tree, *, keep_dtype: bool = False) -> Tree:
    """Read tree `name` of a checkpoint into the structure of `like`, placed where `like`'s leaves say.

    `keep_dtype` keeps the file's dtypes instead of `like`'s. Raises `ConfigError` where names or shapes differ, and
    `DamagedError` where the files cannot be read.
    """
    wanted, stored = named_leaves(like), stored_leaves(step_dir, name)
    _check_names(step_dir / name, stored, wanted)
    target = {key: _target(leaf, stored[key].dtype if keep_dtype else leaf.dtype) for key, leaf in wanted.items()}
    with _reading(step_dir / name) as reader:
        restored = reader.restore((step_dir / name).absolute(), args=ocp.args.StandardRestore(target))
    return with_leaves(like, restored)


def stored_leaves(step_dir: Path, name: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every leaf of tree `name` of a checkpoint, from its metadata; raises `DamagedError`."""
    with _reading(step_dir / name) as reader:
        metadata = reader.metadata((step_dir / name).absolute()).item_metadata
        if metadata is None:
            raise DamagedError(f"{step_dir / name}: its metadata is missing")
        return {key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for key, leaf in metadata.tree.items()}


@contextmanager
def _reading(place: Path) -> Iterator[ocp.Checkpointer]:
    """A reader of trees; what damaged files make it raise becomes a `DamagedError`."""
    try:
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
            yield reader
    except (OSError, ValueError, KeyError) as error:  # what Orbax and TensorStore raise for damaged files
        raise DamagedError(f"{place}: {_first_line(error)}") from error


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a tree of Flax variables by name, in the tree's order."""
    named = {}
    for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_variable)[0]:
        value = node.get_value() if is_variable(node) else node
        for inner, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
            named[jax.tree_util.keystr((*path, *inner), simple=True, separator=".")] = leaf
    return named


def with_leaves(tree: Tree, named: Mapping[str, Any]) -> Tree:
    """`tree` with its leaves taken from `named`, the inverse of `named_leaves`."""
    return jax.tree.unflatten(jax.tree.structure(tree), [named[name] for name in named_leaves(tree)])


def _target(leaf: Any, dtype: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding)


def _check_names(place: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for name in wanted:
        if name not in stored:
            raise ConfigError(f"{place}: holds no {name}, which the model has")
        if tuple(stored[name].shape) != tuple(wanted[name].shape):
            raise ConfigError(f"{place}: {name} has shape {tuple(stored[name].shape)}, the model {wanted[name].shape}")
    extra = next((name for name in stored if name not in wanted), None)
    if extra is not None:
        raise ConfigError(f"{place}: holds {extra}, which the model has not")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
