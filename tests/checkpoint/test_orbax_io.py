"""Checkpoints appear whole, come back exactly, and say by name what does not fit."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3jax.checkpoint.__main__ import main
from k3jax.checkpoint.folder import Folder
from k3jax.checkpoint.load import abstract_model
from k3jax.checkpoint.orbax_io import (
    Checkpoints,
    find_step,
    list_steps,
    model_record,
    named_leaves,
    restore_tree,
    with_leaves,
)
from k3jax.config import ConfigError
from k3jax.nn.param import constant, split_model


class Toy(nnx.Module):
    def __init__(self, width: int, *, value: float = 1.0) -> None:
        self.first = constant(value, (width, 2), ("embed", "mlp"), dtype=jnp.float32)
        self.norms = nnx.Dict(a=constant(value, (width,), ("embed",), dtype=jnp.bfloat16))


def save(run_dir: Path, *steps: int, keep: int = 2) -> None:
    checkpoints = Checkpoints(run_dir, keep=keep)
    for step in steps:
        checkpoints.save(step, trees={"weights": Toy(3, value=float(step))}, records={"data": {"next": step}})
    checkpoints.close()


def restore(run_dir: Path, like: Toy) -> tuple[int, Toy, int] | None:
    checkpoints = Checkpoints(run_dir, keep=2)
    found = checkpoints.restore(like={"weights": like}, records=("data",))
    checkpoints.close()
    return found and (found.step, found.trees["weights"], found.records["data"]["next"])


def test_leaves_are_named_after_attributes():
    assert list(named_leaves(Toy(3))) == ["first", "norms.a"]
    assert list(named_leaves(split_model(Toy(3))[1])) == []
    doubled = with_leaves(Toy(3), {name: leaf * 2 for name, leaf in named_leaves(Toy(3)).items()})
    np.testing.assert_array_equal(doubled.first.get_value(), np.full((3, 2), 2.0))


def test_newest_step_comes_back_with_dtypes_and_record(tmp_path):
    save(tmp_path, 1, 2, 3)
    step, model, position = restore(tmp_path, jax.eval_shape(lambda: Toy(3)))
    assert (step, position) == (3, 3)
    assert model.norms["a"].get_value().dtype == jnp.bfloat16
    np.testing.assert_array_equal(model.first.get_value(), np.full((3, 2), 3.0))
    assert list_steps(tmp_path / "checkpoints") == [2, 3]


def test_every_so_many_steps_one_is_kept_for_good(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2, keep_every=4)
    for step in range(1, 11):
        checkpoints.save(step, trees={"weights": Toy(3)}, records={})
    checkpoints.close()
    assert list_steps(tmp_path / "checkpoints") == [4, 8, 9, 10]


def test_an_unfinished_checkpoint_is_never_taken_and_is_cleared_away(tmp_path):
    save(tmp_path, 1)
    unfinished = tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp"  # what a kill inside a save leaves
    shutil.copytree(tmp_path / "checkpoints" / "1", unfinished)
    assert find_step(tmp_path) == Folder.at(tmp_path / "checkpoints" / "1")
    step, _, _ = restore(tmp_path, jax.eval_shape(lambda: Toy(3)))
    assert step == 1 and not unfinished.exists()


def test_a_fresh_run_has_nothing_to_restore(tmp_path):
    assert restore(tmp_path, Toy(3)) is None
    assert find_step(tmp_path) is None


@pytest.mark.parametrize("inside", ["", "checkpoints", "checkpoints/2"])
def test_a_step_is_found_from_the_run_or_below(tmp_path, inside):
    save(tmp_path, 1, 2)
    assert find_step(tmp_path / inside) == Folder.at(tmp_path / "checkpoints" / "2")


def test_saved_values_do_not_follow_a_donated_buffer(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    big = {"w": jnp.zeros((512, 512))}
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1.0, tree), donate_argnums=0)
    for number in range(1, 4):
        big = step(big)
        checkpoints.save(number, trees={"weights": big}, records={})
        big = step(step(big))
    checkpoints.close()
    restored = restore_tree(tmp_path / "checkpoints" / "3", "weights", {"w": jnp.zeros((512, 512))})
    np.testing.assert_array_equal(restored["w"], np.full((512, 512), 7.0))


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_taken(tmp_path, caplog):
    save(tmp_path, 1, 2)
    shutil.rmtree(tmp_path / "checkpoints" / "2" / "weights" / "d")
    (tmp_path / "checkpoints" / "2" / "weights" / "manifest.ocdbt").unlink()
    step, _, position = restore(tmp_path, Toy(3))
    assert (step, position) == (1, 1)
    assert "set aside" in caplog.text
    assert (tmp_path / "checkpoints" / "2.damaged").is_dir()
    save(tmp_path, 2)
    assert restore(tmp_path, Toy(3))[0] == 2


def test_a_run_with_only_damaged_checkpoints_does_not_start_afresh(tmp_path):
    save(tmp_path, 1)
    shutil.rmtree(tmp_path / "checkpoints" / "1" / "weights")
    with pytest.raises(ConfigError, match="none of the 1 checkpoints"):
        restore(tmp_path, Toy(3))


def test_another_shape_is_refused_by_name(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(ConfigError, match=r"first has shape \(3, 2\), the model \(4, 2\)"):
        restore(tmp_path, Toy(4))


def test_missing_and_unexpected_names_are_refused(tmp_path):
    save(tmp_path, 1)
    place = tmp_path / "checkpoints" / "1"
    with pytest.raises(ConfigError, match="holds no second"):
        restore_tree(place, "weights", {"first": jnp.zeros((3, 2)), "second": jnp.zeros(1)})
    with pytest.raises(ConfigError, match=r"holds norms\.a, which the model has not"):
        restore_tree(place, "weights", {"first": jnp.zeros((3, 2))})


def test_a_failed_write_is_raised_not_lost(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep=2)
    monkeypatch.setattr(Path, "rename", _refuse)
    monkeypatch.setattr("os.rename", _refuse)
    with pytest.raises(OSError, match="disk full"):
        save_and_wait(checkpoints)
    assert list_steps(tmp_path / "checkpoints") == []


@pytest.mark.parametrize("tree", ["weights", "optimizer"])
def test_checksums_of_a_saved_state_are_verified_on_demand(tmp_path, tree, small, capsys):
    model = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), abstract_model(small))
    moments = {"m": jnp.arange(70_000.0).reshape(700, 100), "half": jnp.ones((3, 5), jnp.bfloat16), "n": jnp.int32(7)}
    checkpoints = Checkpoints(tmp_path, keep=1)
    trees = {"weights": model, "optimizer": moments}
    checkpoints.save(1, trees=trees, records={"model": model_record(small)})
    checkpoints.close()
    assert main(["verify", str(tmp_path)]) == 0
    sums = tmp_path / "checkpoints/1/checksums/metadata"
    noted = json.loads(sums.read_text())
    name = next(iter(noted[tree]))
    noted[tree][name] ^= 4  # as if the array had changed since
    sums.write_text(json.dumps(noted))
    assert main(["verify", str(tmp_path)]) == 1
    assert f"checkpoints/1/{tree}: {name}: other bytes than were saved" in capsys.readouterr().out


def save_and_wait(checkpoints: Checkpoints) -> None:
    checkpoints.save(1, trees={"weights": Toy(3)}, records={})
    checkpoints.wait()


def _refuse(*_args, **_kwargs):
    raise OSError("disk full")
