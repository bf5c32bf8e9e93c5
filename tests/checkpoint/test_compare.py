"""Verify and diff: what is the same is said to be, and every kind of difference is found and named."""

from collections.abc import Callable

import numpy as np
import pytest
from rich.console import Console

from k3jax.checkpoint import work
from k3jax.checkpoint.__main__ import main
from k3jax.checkpoint.importer import import_checkpoint
from k3jax.checkpoint.names import PREFIX
from tests.checkpoint.samples import VISION

QUIET = Console(quiet=True)
LAYER = PREFIX + "model.layers."


@pytest.mark.parametrize("pair", [("checkpoint", "orbax"), ("orbax", "checkpoint"), ("orbax", "orbax")])
def test_verify_finds_the_same(imported, tmp_path, pair, capsys):
    assert main(["verify", *(str(tmp_path / name) for name in pair)]) == 0
    assert capsys.readouterr().out == "the same\n"


Change = Callable[[dict[str, np.ndarray]], None]
NAME = LAYER + "3.block_sparse_moe.experts.1.w2.weight_packed"
CHANGES: dict[str, tuple[Change, str]] = {
    "one bit": (lambda t: t[NAME].__setitem__((5, 6), t[NAME][5, 6] ^ 16), f"{NAME}: other bytes\n"),
    "minus zero": (lambda t: t[PREFIX + "model.norm.weight"].__setitem__(3, -0.0), "model.norm.weight: other bytes\n"),
    "a vision tensor": (lambda t: t.update({"mm_projector.x": np.ones(2)}), "mm_projector.x: only in the second\n"),
    "a dtype": (
        lambda t: t.update({PREFIX + "lm_head.weight": np.float32(t[PREFIX + "lm_head.weight"])}),
        "lm_head.weight: dtype bfloat16 in the first, float32 in the second\n",
    ),
    "a missing tensor": (lambda t: t.__delitem__(NAME), f"1 tensors are missing (first: {NAME})"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_verify_names_what_differs_and_exits_with_1(imported, tensors, make, tmp_path, change, capsys):
    changed = {name: value.copy() for name, value in tensors.items()} | VISION
    CHANGES[change][0](changed)
    if change == "minus zero":
        tensors[PREFIX + "model.norm.weight"][3] = 0.0
        import_checkpoint(make(tensors | VISION), tmp_path / "zero", workers=2, console=QUIET)
        imported = tmp_path / "zero"
    directory = make(changed)
    assert main(["verify", str(imported), str(directory)]) == 1
    out = capsys.readouterr().out
    assert CHANGES[change][1] in out
    assert out.endswith("1 differences\n")


def test_verify_with_a_path_that_is_not_there_is_a_mistake(imported, tmp_path, capsys):
    assert main(["verify", str(imported), str(tmp_path / "absent")]) == 2
    assert "absent: no such directory" in capsys.readouterr().err


def test_checksums_find_a_flipped_bit_and_a_lost_file(imported, capsys):
    assert main(["verify", str(imported)]) == 0
    capsys.readouterr()
    file = max((imported / "weights").rglob("d/*"), key=lambda f: f.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 8
    file.write_bytes(content)
    assert main(["verify", str(imported)]) == 1
    assert "other bytes than were imported" in capsys.readouterr().out
    file.unlink()
    assert main(["verify", str(imported)]) == 1
    assert str(imported) in capsys.readouterr().out


@pytest.mark.parametrize("size", [0, 1, 3, 4, 1024, 4 * 65536, 4 * 65536 * 3 + 8190])
def test_a_checksum_adds_up_over_parts_and_sees_every_change(size):
    rng = np.random.default_rng(size)
    raw = rng.integers(0, 256, size, np.uint8)
    words = np.frombuffer(raw.tobytes() + b"\0" * (-size % 4), "<u4").astype(object)
    assert work.checksum(raw) == sum(int(w) * (2 * k + 1) for k, w in enumerate(words)) % 2**32
    cut = size // 8 * 4
    assert (work.checksum(raw[:cut]) + work.checksum(raw[cut:], cut)) % 2**32 == work.checksum(raw)
    if size:
        changed = raw.copy()
        changed[rng.integers(size)] ^= 64
        assert work.checksum(changed) != work.checksum(raw)


def test_diff_counts_in_numbers(imported, tensors, make, capsys):
    changed = {name: value.copy() for name, value in tensors.items()} | VISION
    norm = changed[PREFIX + "model.norm.weight"]
    norm[3] += np.asarray(2, norm.dtype)
    assert main(["diff", str(imported), str(make(changed))]) == 0
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if "model.norm.weight" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells[1:3] == ["28", "1"]
    assert float(cells[3]) == pytest.approx(2, rel=0.02)
    assert "1 of 47 families differ" in out


def test_diff_compares_mxfp4_with_floats_by_value(imported, tmp_path, capsys):
    assert main(["export", str(imported), str(tmp_path / "floats"), "--experts", "bfloat16"]) == 0
    assert main(["diff", str(imported), str(tmp_path / "floats")]) == 0
    assert "0 of 47 families differ" in capsys.readouterr().out
