"""Import and export: every byte arrives, nothing is redone after a kill, and what is not complete does not load."""

import dataclasses
import errno
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from rich.console import Console
from safetensors.numpy import load_file

from k3jax.checkpoint import importer, work
from k3jax.checkpoint.__main__ import main
from k3jax.checkpoint.convert import Converted
from k3jax.checkpoint.exporter import export_checkpoint
from k3jax.checkpoint.hf_import import HFCheckpoint
from k3jax.checkpoint.importer import Host, Importer, import_checkpoint
from k3jax.checkpoint.load import load
from k3jax.checkpoint.names import PREFIX
from k3jax.checkpoint.orbax_io import Checkpoints, model_record, named_leaves
from k3jax.checkpoint.orbax_tree import OrbaxCheckpoint
from k3jax.checkpoint.safetensors_dir import CheckpointError
from k3jax.checkpoint.source import open_source
from k3jax.text import Tokenizer
from tests.checkpoint.samples import VISION

QUIET = Console(quiet=True)
LAYER = PREFIX + "model.layers."


def tensors_of(directory: Path) -> dict[str, np.ndarray]:
    """All tensors of a directory, read by the safetensors library."""
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape), name
        assert a[name].tobytes() == b[name].tobytes(), name


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(f.relative_to(directory)): f.read_bytes() for f in sorted(directory.rglob("*")) if f.is_file()}


def restored(directory: Path) -> dict[str, np.ndarray]:
    """What plain Orbax finds."""
    with ocp.StandardCheckpointer() as reader:
        return {name: np.asarray(value) for name, value in reader.restore(directory / "weights").items()}


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces and units as small as those of a large checkpoint are relative to it."""
    monkeypatch.setattr("k3jax.checkpoint.source.PIECE_BYTES", 1 << 10)
    monkeypatch.setattr(importer, "_LARGE", 1 << 10)


@pytest.mark.parametrize("folder", ["tiny_bf16", "tiny_fp32", "tiny_dense", "tiny_vision"])
def test_golden_checkpoints_make_the_round_trip_byte_for_byte(golden, tmp_path, folder):
    assert main(["import", str(golden / folder), str(tmp_path / "orbax")]) == 0
    assert main(["export", str(tmp_path / "orbax"), str(tmp_path / "back")]) == 0
    same(tensors_of(tmp_path / "back"), tensors_of(golden / folder))
    config, index = "config.json", "model.safetensors.index.json"
    assert (tmp_path / "back" / config).read_bytes() == (golden / folder / config).read_bytes()
    then, now = (json.loads((d / index).read_text()) for d in (golden / folder, tmp_path / "back"))
    assert then["metadata"]["total_size"] == now["metadata"]["total_size"]
    assert then["weight_map"].keys() == now["weight_map"].keys()


def test_small_pieces_in_parallel_give_the_same_bytes(tensors, make, tmp_path, small_pieces):
    source = make(tensors | VISION)
    import_checkpoint(source, tmp_path / "orbax", workers=4, console=QUIET)
    export_checkpoint(OrbaxCheckpoint.open(tmp_path / "orbax"), tmp_path / "back", workers=4, console=QUIET)
    same(tensors_of(tmp_path / "back"), tensors | VISION)


def test_plain_orbax_restores_one_array_a_layer_and_matrix(imported, tensors):
    arrays = restored(imported)
    packed = [tensors[f"{LAYER}3.block_sparse_moe.experts.{e}.w2.weight_packed"] for e in range(3)]
    np.testing.assert_array_equal(arrays["layers.3.ffn.w2.codes"], packed)
    q = tensors[f"{LAYER}3.self_attn.q_proj.weight"].reshape(3, 8, 28).transpose(2, 0, 1)
    np.testing.assert_array_equal(arrays["layers.3.mixer.q"], q)
    assert arrays["layers.3.mixer.q"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(arrays["layers.3.mixer.a_log"], tensors[f"{LAYER}3.self_attn.A_log"][:3])
    name = "vision_tower.encoder.blocks.0.wqkv.weight"
    np.testing.assert_array_equal(arrays[name], VISION[name])
    assert not any(name.startswith("stacks.") for name in arrays)


def test_experts_are_chunks_and_nothing_is_compressed(imported):
    base = {"driver": "ocdbt", "base": f"file://{imported}/weights/"}
    for name, array in (("layers.3.ffn.w2.codes", (3, 32, 32)), ("layers.3.mixer.q", (28, 3, 8))):
        zarr = json.loads(ts.KvStore.open(base).result()[f"{name}/zarr.json"])
        assert tuple(zarr["shape"]) == array
        assert {codec["name"] for codec in zarr["codecs"]} <= {"bytes", "transpose"}


@pytest.mark.parametrize(
    ("axes", "shape", "itemsize", "chunk"),
    [
        (["experts", "expert_mlp", "latent/2"], (896, 3072, 1792), 1, (1, 3072, 1792)),
        (["experts", "expert_mlp", "latent/32"], (896, 3072, 112), 1, (7, 3072, 112)),
        (["kda_heads", "head_dim", "embed"], (96, 128, 7168), 2, (12, 128, 896)),
        (["embed", "kda_heads", "head_dim"], (7168, 96, 128), 2, (896, 12, 128)),
        (["vocab", "embed"], (163840, 7168), 2, (1280, 896)),
        (["embed"], (7168,), 2, (7168,)),
    ],
)
def test_chunks_of_the_release_divide_over_a_mesh(axes, shape, itemsize, chunk):
    from k3jax.checkpoint.arrays import chunk_shape

    assert chunk_shape(axes, shape, itemsize) == chunk
    assert all(size % part == 0 for size, part in zip(shape, chunk, strict=True))


def test_an_import_loads_like_its_source_with_the_tokenizer_beside_it(tensors, make, tmp_path):
    source = make(tensors)
    (source / "tiktoken.model").write_text("IQ== 0\n")
    (source / "notes.bin").write_bytes(b"not carried")
    import_checkpoint(source, tmp_path / "orbax", workers=2, console=QUIET)
    a, b = named_leaves(load(source)), named_leaves(load(tmp_path / "orbax"))
    same({n: np.asarray(v) for n, v in a.items()}, {n: np.asarray(v) for n, v in b.items()})
    names = {file.name for file in (tmp_path / "orbax").iterdir()}
    assert {"tiktoken.model", "config.json"} <= names
    assert "notes.bin" not in names


def test_serving_finds_the_tokenizer_of_an_import(imported):
    from k3jax.config import ConfigError
    from k3jax.serve.run import load_tokenizer

    with pytest.raises(ConfigError, match="say --tokenizer"):
        load_tokenizer(imported)
    assert load_tokenizer(imported, "bytes").vocab_size == Tokenizer.bytes().vocab_size


class Interrupted(Exception):
    pass


def interrupt(monkeypatch, owner: object, name: str, after: int) -> list[int]:
    """Make the call number `after` of a method fail; the list counts its calls."""
    calls: list[int] = []
    original = getattr(owner, name)

    def counted(*args, **kwargs):
        calls.append(1)
        if len(calls) == after:
            raise Interrupted
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
    return calls


def test_an_interrupted_import_goes_on_where_it_was(tensors, make, tmp_path, monkeypatch, small_pieces):
    source, target = make(tensors | VISION), tmp_path / "orbax"
    import_checkpoint(source, tmp_path / "undisturbed", workers=2, console=QUIET)
    written: list[str] = []
    original = HFCheckpoint.read

    def read(self, entry, *args):
        written.append(entry.name)
        return original(self, entry, *args)

    for after in (3, 40, 90):
        with monkeypatch.context() as patch:
            interrupt(patch, HFCheckpoint, "read", after)
            with pytest.raises(Interrupted):
                import_checkpoint(source, target, workers=2, console=QUIET)
        with pytest.raises(CheckpointError, match="an import that is not finished; the same command continues it"):
            load(target)
    job = Importer(HFCheckpoint.open(source), importer.Folder.at(target))
    complete = {entry.name for unit in job.units if unit.number in job.complete_units() for entry in unit.entries}
    assert complete
    monkeypatch.setattr(HFCheckpoint, "read", read)
    assert import_checkpoint(source, target, workers=2, console=QUIET)
    assert not complete & set(written)  # no finished unit is read again
    same(restored(target), restored(tmp_path / "undisturbed"))
    record = "checksums/metadata"
    assert json.loads((target / record).read_text()) == json.loads((tmp_path / "undisturbed" / record).read_text())
    assert not (target / "import").exists()


def test_an_import_killed_at_any_moment_goes_on(tensors, make, tmp_path, root):
    source, target = make(tensors | VISION), tmp_path / "orbax"
    import_checkpoint(source, tmp_path / "undisturbed", workers=2, console=QUIET)
    slow = (  # each piece takes a while, so that kills meet the work at different places
        "import sys, time; from k3jax.checkpoint import importer, __main__\n"
        "write = importer._Writer._write\n"
        "importer._Writer._write = lambda *a: (time.sleep(0.03), write(*a))\n"
        "importer._LARGE = 1 << 9\n"
        "sys.exit(__main__.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", slow, "import", str(source), str(target), "--workers", "2"]
    progress, rng = [], random.Random(0)
    for _ in range(3):
        process = subprocess.Popen(command, cwd=root, stderr=subprocess.DEVNULL)
        before = progress[-1] if progress else 0
        wanted = before + rng.randrange(3, 20)
        while process.poll() is None and len(list((target / "import").glob("*"))) < wanted:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        progress.append(len(list((target / "import").glob("*"))))
    assert progress == sorted(progress) and progress[0] > 0  # nothing finished is lost
    assert subprocess.run(command, cwd=root, capture_output=True, check=True).returncode == 0
    same(restored(target), restored(tmp_path / "undisturbed"))


@pytest.mark.parametrize("hosts", [2, 3])
def test_hosts_share_an_import_and_the_last_one_completes_it(tensors, make, tmp_path, hosts, small_pieces):
    source, target = make(tensors), tmp_path / "orbax"
    job = Importer(HFCheckpoint.open(source), importer.Folder.at(target))
    shares = [job.share(Host(i, hosts)) for i in range(hosts)]
    assert [unit.number for share in shares for unit in share] == list(range(len(job.units)))
    sizes = [sum(unit.nbytes for unit in share) for share in shares]
    assert max(sizes) < 2 * min(sizes)
    for i in reversed(range(hosts)):
        finished = import_checkpoint(source, target, workers=2, host=Host(i, hosts), console=QUIET)
        assert finished == (i == 0)
    import_checkpoint(source, tmp_path / "alone", workers=2, console=QUIET)
    same(restored(target), restored(tmp_path / "alone"))


def test_an_import_that_is_complete_is_left_alone(tensors, make, imported):
    before = files_of(imported)
    assert import_checkpoint(imported.parent / "checkpoint", imported, workers=2, console=QUIET)
    assert files_of(imported) == before


def test_a_folder_with_something_else_in_it_is_refused(tensors, make, imported, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").write_text("kept")
    assert main(["import", str(make(tensors)), str(tmp_path / "other")]) == 2
    name = LAYER + "1.self_attn.q_proj.weight"
    other = make(
        tensors
        | {
            name: tensors[name].astype(np.float32),
            LAYER + "3.self_attn.q_proj.weight": np.float32(tensors[LAYER + "3.self_attn.q_proj.weight"]),
            LAYER + "0.self_attn.q_proj.weight": np.float32(tensors[LAYER + "0.self_attn.q_proj.weight"]),
        }
    )
    with pytest.raises(CheckpointError, match="holds an import of another checkpoint"):
        import_checkpoint(other, imported, workers=2, console=QUIET)


def test_a_disk_without_room_is_refused_before_anything_is_written(tensors, make, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=work._SPARE + 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match=r"bytes are still to be written .* the disk has 268,436,456"):
        import_checkpoint(make(tensors), tmp_path / "orbax", workers=2, console=QUIET)
    assert not (tmp_path / "orbax/weights").exists()


def test_a_tensor_that_must_be_refused_stops_the_import(tensors, make, tmp_path):
    tensors[f"{LAYER}3.block_sparse_moe.experts.1.w2.weight_scale"][4, 1] = 255
    with pytest.raises(CheckpointError, match=r"layers\.3\.\S+experts\.1\.w2\.weight_scale: 1 scale bytes are 255"):
        import_checkpoint(make(tensors), tmp_path / "orbax", workers=2, console=QUIET)


def test_an_export_has_the_releases_sharding(imported, tmp_path, small):
    export_checkpoint(OrbaxCheckpoint.open(imported), tmp_path / "back", workers=2, console=QUIET)
    index = json.loads((tmp_path / "back/model.safetensors.index.json").read_text())["weight_map"]
    shards = {
        f"{LAYER}0.self_attn.A_log": "model-00001-of-000008.safetensors",
        f"{LAYER}4.block_sparse_moe.experts.0.w1.weight_scale": "model-00005-of-000008.safetensors",
        PREFIX + "lm_head.weight": "model-00006-of-000008.safetensors",
        "mm_projector.proj.0.weight": "model-00007-of-000008.safetensors",
        "vision_tower.encoder.blocks.0.wqkv.weight": "model-00008-of-000008.safetensors",
    }
    assert {name: index[name] for name in shards} == shards
    with (tmp_path / "back/model-00004-of-000008.safetensors").open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    names = [name.removeprefix(LAYER + "3.block_sparse_moe.") for name in list(header)[-18:]]
    assert names[:3] == ["experts.0.w1.weight_packed", "experts.0.w1.weight_scale", "experts.0.w3.weight_packed"]
    assert [name.split(".")[1] for name in names] == ["0"] * 6 + ["1"] * 6 + ["2"] * 6


def test_an_export_in_files_of_a_size(imported, tmp_path, tensors):
    arguments = ["export", str(imported), str(tmp_path / "back"), "--shard-size", "20KB"]
    assert main(arguments) == 0
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ]
    data = [sum(tensor.nbytes for tensor in load_file(file).values()) for file in files]
    assert max(data) <= 20_000
    assert all(a + b > 20_000 for a, b in itertools.pairwise(data))  # no file could take its neighbour
    same(tensors_of(tmp_path / "back"), tensors | VISION)


def test_an_interrupted_export_goes_on_where_it_was(imported, tensors, tmp_path, monkeypatch, small_pieces):
    target = tmp_path / "back"
    for after in (30, 50):
        with monkeypatch.context() as patch:
            interrupt(patch, OrbaxCheckpoint, "read", after)
            with pytest.raises(Interrupted):
                export_checkpoint(OrbaxCheckpoint.open(imported), target, workers=2, console=QUIET)
        assert not (target / "model.safetensors.index.json").exists()
    finished = {file: file.stat().st_mtime_ns for file in target.glob("model-*")}
    assert finished
    export_checkpoint(OrbaxCheckpoint.open(imported), target, workers=2, console=QUIET)
    assert all(file.stat().st_mtime_ns == written for file, written in finished.items())
    same(tensors_of(target), tensors | VISION)
    assert not [name for name in os.listdir(target) if name.startswith(".") or name == "export.json"]


def test_an_export_is_not_continued_from_another_checkpoint(
    imported, tensors, make, tmp_path, monkeypatch, small_pieces
):
    tensors[LAYER + "3.self_attn.o_proj.weight"] += 1
    import_checkpoint(make(tensors | VISION), tmp_path / "other", workers=2, console=QUIET)
    with monkeypatch.context() as patch:
        interrupt(patch, OrbaxCheckpoint, "read", 30)
        with pytest.raises(Interrupted):
            main(["export", str(imported), str(tmp_path / "back")])
    assert main(["export", str(tmp_path / "other"), str(tmp_path / "back")]) == 2


def test_a_training_run_exports_with_experts_as_floats_or_mxfp4(small, randomise, make, tmp_path):
    config = dataclasses.replace(small, quantized_experts=False)
    float_tensors = randomise(config, weight_dtype="float32")
    model = load(make(float_tensors, config))
    checkpoints = Checkpoints(tmp_path / "run", keep=1)
    checkpoints.save(3, trees={"weights": model}, records={"model": model_record(model.config)})
    checkpoints.close()
    run = str(tmp_path / "run")
    assert main(["export", run, str(tmp_path / "as_is")]) == 0
    same(tensors_of(tmp_path / "as_is"), float_tensors)
    assert main(["export", run, str(tmp_path / "small"), "--experts", "mxfp4", "--dtype", "bfloat16"]) == 0
    quantized = tensors_of(tmp_path / "small")
    assert quantized[PREFIX + "lm_head.weight"].dtype == ml_dtypes.bfloat16
    assert quantized[f"{LAYER}1.self_attn.A_log"].dtype == np.float32  # as in the release
    loaded = load(tmp_path / "small")
    assert loaded.config.quantized_experts
    name = f"{LAYER}1.block_sparse_moe.experts.2.w1"
    weight, codes, scales = (
        float_tensors[f"{name}.weight"],
        quantized[f"{name}.weight_packed"],
        quantized[f"{name}.weight_scale"],
    )
    for row, block in ((0, 0), (63, 0), (17, 0)):  # the stated rule: the power of two of the largest, over four
        largest = np.abs(weight[row, 32 * block : 32 * block + 32]).max()
        assert scales[row, block] == 127 + np.floor(np.log2(largest)) - 2
    assert codes.shape == (64, 16)
    assert main(["export", run, str(tmp_path / "bf16"), "--experts", "bfloat16"]) == 0
    np.testing.assert_array_equal(tensors_of(tmp_path / "bf16")[f"{name}.weight"], weight.astype(ml_dtypes.bfloat16))


def test_dequantised_experts_hold_what_the_codes_mean(imported, tensors):
    source = Converted(OrbaxCheckpoint.open(imported), experts="float32")
    entry = next(e for e in source.entries if e.name.endswith("layers.3.block_sparse_moe.experts.{e}.w2.weight"))
    value = source.read(entry, 1, 2)[0, 7, 63]
    name = f"{LAYER}3.block_sparse_moe.experts.1.w2.weight"
    code, scale = int(tensors[name + "_packed"][7, 31] >> 4), int(tensors[name + "_scale"][7, 1])
    assert value == [0, 0.5, 1, 1.5, 2, 3, 4, 6][code & 7] * (-1) ** (code >> 3) * 2.0 ** (scale - 127)


@pytest.mark.parametrize("into", ["nowhere", "experts"])
def test_nan_weights_are_not_quantised(small, randomise, make, tmp_path, into):
    config = dataclasses.replace(small, quantized_experts=False)
    tensors = randomise(config, weight_dtype="float32")
    if into == "experts":
        tensors[f"{LAYER}2.block_sparse_moe.experts.0.w3.weight"][3, 5] = np.nan
    import_checkpoint(make(tensors, config), tmp_path / "orbax", workers=2, console=QUIET)
    code = main(["export", str(tmp_path / "orbax"), str(tmp_path / "back"), "--experts", "mxfp4"])
    assert code == (2 if into == "experts" else 0)


def test_a_conversion_holds_a_few_pieces_not_the_checkpoint(small, randomise, make, tmp_path, root):
    """Peak memory of an import and an export of 160 MB: under the size of the checkpoint above that of a tiny one."""
    config = dataclasses.replace(small, vocab_size=400_000)
    directory = make(randomise(config, weight_dtype="float32"), config)
    tiny = make(randomise(small), name="tiny")
    code = "import sys, resource; from k3jax.checkpoint.__main__ import main\n" + (
        "import k3jax.checkpoint.source as s; s.PIECE_BYTES = 1 << 20\n"
        "assert main(sys.argv[1:]) == 0; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)"
    )

    def peak(*arguments: str) -> int:
        run = subprocess.run([sys.executable, "-c", code, *arguments], cwd=root, capture_output=True, check=True)
        return int(run.stdout.split()[-1])

    base = peak("import", str(tiny), str(tmp_path / "a"), "--workers", "2")
    assert peak("import", str(directory), str(tmp_path / "b"), "--workers", "2") < base + 60  # MiB of 85
    assert peak("export", str(tmp_path / "b"), str(tmp_path / "c"), "--workers", "2") < base + 60


def test_both_layouts_answer_alike(imported, tmp_path):
    a, b = open_source(tmp_path / "checkpoint"), open_source(imported)
    assert [e.name for e in a.entries] == [e.name for e in b.entries]
    assert [a.dtype(e) for e in a.entries] == [b.dtype(e) for e in b.entries]


@pytest.mark.parametrize("command", ["import", "export"])
def test_a_target_that_is_a_file_is_refused(imported, tmp_path, command, capsys):
    source = {"import": tmp_path / "checkpoint", "export": imported}[command]
    target = tmp_path / "file"
    target.write_text("kept")
    assert main([command, str(source), str(target)]) == 2
    assert f"{target}: cannot be a directory" in capsys.readouterr().err
    assert target.read_text() == "kept"


def test_a_disk_without_room_is_one_line_and_exit_2(monkeypatch, capsys, tmp_path):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "x"))

    monkeypatch.setattr("k3jax.checkpoint.importer.import_checkpoint", full)
    assert main(["import", str(tmp_path), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/x: No space left on device\n"
