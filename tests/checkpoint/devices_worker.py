"""Saves and restores a sharded state in a process of its own, whose number of devices the test chooses.

`devices_worker.py save|restore RUN_DIR MESHES [PROCESS/PROCESSES PORT]`, MESHES such as 4x2 or 2x2,1x1; `restore` exits
0 where every bit is what `save` wrote. `load CHECKPOINTS MESHES` exits 0 where models loaded onto the meshes are those
loaded without.
"""

import os
import sys
from pathlib import Path

command, target, meshes, *rest = sys.argv[1:]
shapes = [tuple(int(n) for n in mesh.split("x")) for mesh in meshes.split(",")]
process, _, processes = (rest[0] if rest else "0/1").partition("/")
local = max(data * model for data, model in shapes) // int(processes)
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={local}"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from k3jax.checkpoint.load import load  # noqa: E402
from k3jax.checkpoint.orbax_io import Checkpoints, named_leaves  # noqa: E402

if rest:
    jax.distributed.initialize(f"localhost:{rest[1]}", int(processes), int(process))

SPECS = {
    "weights": {"w": ((8, 16, 6), "float32", P("data", "model")), "norm": ((24,), "bfloat16", P(("data", "model")))},
    "optimizer": {
        "step": ((), "int32", P()),
        "codes": ((16, 5), "uint8", P("model")),
        "moment": ((8, 16, 6), "float32", P(None, "data")),
    },
}


def value(name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """What a leaf holds: all its bits are used."""
    bits = np.random.default_rng(len(name)).integers(0, 256, (*shape, jnp.dtype(dtype).itemsize), np.uint8)
    return bits.view(jnp.dtype(dtype)).reshape(shape)


def sharded(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def cut(leaf: jax.Array, mesh: Mesh) -> NamedSharding:
    """The mesh's axes along the first dims that they divide."""
    spec: list[str | None] = [None] * leaf.ndim
    for axis, size in mesh.shape.items():
        free = (i for i, n in enumerate(leaf.shape) if spec[i] is None and n % size == 0)
        if (i := next(free, None)) is not None:
            spec[i] = axis
    return NamedSharding(mesh, P(*spec))


def check_load(path: str, mesh: Mesh) -> None:
    plain = load(path)
    placed = load(path, shardings=jax.tree.map(lambda leaf: cut(leaf, mesh), plain), param_dtype="float32")
    shared = 0
    for name, array in named_leaves(placed).items():
        expected = np.asarray(named_leaves(plain)[name])
        assert array.dtype == (expected.dtype if expected.dtype == np.uint8 else np.float32)
        for shard in array.addressable_shards:
            assert np.array_equal(np.asarray(shard.data), expected[shard.index].astype(array.dtype)), name
        shared += len({str(shard.index) for shard in array.addressable_shards}) > 1
    assert shared > 20


def save(run_dir: Path, mesh: Mesh) -> None:
    trees = {
        tree: {name: sharded(value(name, s, d), NamedSharding(mesh, p)) for name, (s, d, p) in leaves.items()}
        for tree, leaves in SPECS.items()
    }
    checkpoints = Checkpoints(run_dir, keep=2)
    checkpoints.save(5, trees=trees, records={"data": {"position": 17}})
    checkpoints.close()


def check_restore(run_dir: Path, mesh: Mesh) -> None:
    like = {
        tree: {n: jax.ShapeDtypeStruct(s, d, sharding=NamedSharding(mesh, p)) for n, (s, d, p) in leaves.items()}
        for tree, leaves in SPECS.items()
    }
    checkpoints = Checkpoints(run_dir, keep=2)
    found = checkpoints.restore(like=like, records=("data",))
    checkpoints.close()
    assert found is not None and found.step == 5 and found.records["data"] == {"position": 17}
    for tree, leaves in SPECS.items():
        for name, (s, d, p) in leaves.items():
            array, expected = found.trees[tree][name], value(name, s, d)
            assert array.sharding == NamedSharding(mesh, p) and array.dtype == d
            for shard in array.addressable_shards:
                assert np.asarray(shard.data).tobytes() == expected[shard.index].tobytes(), (name, shard.index)


for shape in shapes:
    devices = np.asarray(jax.devices()[: shape[0] * shape[1]]).reshape(shape)
    mesh = Mesh(devices, ("data", "model"))
    if command == "load":
        for path in target.split(","):
            check_load(path, mesh)
    elif command == "save":
        save(Path(target), mesh)
    else:
        check_restore(Path(target), mesh)
