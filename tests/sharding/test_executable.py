"""A compiled program is saved, described, loaded on the same devices, and refused on others."""

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from k3jax.config import ConfigError
from k3jax.plan.executable import load_executable, save_executable
from sharding.mesh import make_mesh

SIZES = {"data": 2, "tensor": 4}


def step(state: dict[str, Any], x: jax.Array, unused: jax.Array) -> Any:
    """A state that is donated, rows over two axes, and an argument without use."""
    y = jnp.tanh(x @ state["w"])
    return {"w": state["w"] - 0.1 * x.T @ y, "count": state["count"] + 1, "absent": None}, y


def arguments() -> Any:
    """The step's arrays on the devices, devices in an order of their own."""
    mesh = make_mesh(SIZES, jax.devices()[::-1])
    place = lambda x, *axes: jax.device_put(jnp.asarray(x), NamedSharding(mesh, PartitionSpec(*axes)))  # noqa: E731
    rng = np.random.default_rng(0)
    w, x = rng.standard_normal((16, 8), np.float32), rng.standard_normal((32, 16), np.float32)
    state = {"w": place(w, None, "tensor"), "count": place(np.int32(3)), "absent": None}
    return state, place(x, ("data", "tensor")), place(np.zeros(5, np.float32))


@functools.cache  # fixtures see one device
def saved() -> Path:
    """The folder of the compiled step."""
    place = Path(tempfile.mkdtemp()) / "train"
    atexit.register(shutil.rmtree, place.parent)
    compiled = jax.jit(step, donate_argnums=0).lower(*arguments()).compile()
    save_executable(compiled, place, {"peak_bytes": 7})
    return place


def test_a_loaded_program_gives_what_the_compiled_one_gives() -> None:
    program = load_executable(saved())
    ours = program(*arguments())
    theirs = jax.tree_util.tree_leaves_with_path(jax.jit(step)(*arguments()))
    assert list(ours) == [jax.tree_util.keystr(path) for path, _ in theirs]
    for got, (_, expected) in zip(ours.values(), theirs, strict=True):
        assert got.sharding.is_equivalent_to(expected.sharding, got.ndim) and got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


def test_what_was_donated_is_gone_and_results_go_in_again() -> None:
    program = load_executable(saved())
    state, *rest = arguments()
    for _ in range(2):
        before, out = state, program(state, *rest)
        state = jax.tree.unflatten(jax.tree.structure(state), list(out.values())[:2])
        assert before["w"].is_deleted()
    assert int(state["count"]) == 5


def test_arrays_of_the_host_go_to_their_places() -> None:
    program = load_executable(saved())
    of_host = jax.tree.map(np.asarray, arguments())
    np.testing.assert_array_equal(program(*of_host)["[1]"], program(*arguments())["[1]"])


def test_the_description_needs_no_runtime() -> None:
    description = json.loads((saved() / "description.json").read_text())
    by_name = {argument["name"]: argument for argument in description["arguments"]}
    assert by_name["[0][0]['w']"] == {
        "name": "[0][0]['w']",
        "shape": [16, 8],
        "dtype": "float32",
        "axes": [None, "tensor"],
    }
    assert by_name["[0][1]"]["axes"] == [["data", "tensor"]]
    assert by_name["[0][2]"]["axes"] is None
    assert (description["device_ids"], description["peak_bytes"]) == ([*range(7, -1, -1)], 7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state, x, u: (state, x), "3 arrays for a program of 4"),
        (lambda state, x, u: (state, x[:8], u), r"argument \[0\]\[1\]: shape \[8, 16\], needs \[32, 16\]"),
        (lambda state, x, u: (state, x.astype(jnp.bfloat16), u), r"dtype bfloat16, needs float32"),
        (lambda state, x, u: ({"v": state["w"], "count": state["count"]}, x, u), r"name \[0\]\[0\]\['v'\], needs"),
    ],
    ids=["fewer", "shape", "dtype", "name"],
)
def test_other_arguments_are_refused(change: Any, message: str) -> None:
    program = load_executable(saved())
    with pytest.raises(ValueError, match=message):
        program(*change(*arguments()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"made_by": {"jax": "0.1"}}, "made by jax '0.1', here is"),
        ({"made_by": {"device": "TPU7x"}}, "made by device 'TPU7x', here is 'cpu'"),
        ({"made_by": {"runtime": "libtpu"}}, "made by runtime 'libtpu', here is"),
        ({"device_ids": [0, 1, 2, 3, 4, 5, 6, 99]}, "made for 8 devices; device 99 is not among these 8"),
    ],
    ids=["jax", "device", "runtime", "devices"],
)
def test_another_machine_is_refused_in_one_line(tmp_path: Path, changes: Any, message: str) -> None:
    description = json.loads((saved() / "description.json").read_text())
    changes = {**changes, "made_by": description["made_by"] | changes.get("made_by", {})}
    (tmp_path / "description.json").write_text(json.dumps(description | changes))
    (tmp_path / "executable.bin").write_bytes(b"never read")
    with pytest.raises(ConfigError, match=message) as caught:
        load_executable(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_program_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no saved program"):
        load_executable(tmp_path)
