"""Whole programs on pods: the page shows what is kept, and what is kept says what it was made from."""

import dataclasses
import json

import pytest

from benchmarks import pods, report
from k3jax.plan.plan import make_plan


def test_the_page_shows_what_is_kept():
    page = report.PAGE.read_text()
    shown = page.partition(pods.BEGIN)[2].partition(pods.END)[0].strip()
    assert shown == pods.section(pods.read_records())


def test_records_are_those_of_the_rows():
    rows = {row.name: row for row in pods.ROWS}
    for name, record in pods.read_records().items():
        row = rows[name]
        kept = record["config"], tuple(record["overrides"]), record["topology"], record["mode"]
        assert kept == (row.config, row.overrides, row.topology, row.mode)
        assert record["fits"] == (record["compiled"]["peak_bytes"] <= record["memory_bytes"])


def test_every_row_is_compiled_from_the_sources_of_today():
    left = [row.name for row in pods.stale(pods.read_records())]
    if left:
        pytest.skip(
            f"docs/pods.json is older than the sources of {', '.join(left)}; "
            "make aot-all, or python -m benchmarks.pods, compiles them again (an hour and a half)"
        )


@pytest.mark.parametrize("row", pods.ROWS, ids=lambda row: row.name)
def test_every_row_is_a_plan_that_fits(row):
    plan = make_plan(str(pods.ROOT / row.config), row.overrides, topology=row.topology, modes=(row.mode,))
    assert plan["fits"]
    assert plan["devices"] == row.chips * (2 if row.topology.startswith("tpu7x") else 1)


def test_every_source_is_there():
    for pattern in (*pods.SHARED, *pods.TRAIN, *pods.SERVE, *(row.config for row in pods.ROWS)):
        assert list(pods.ROOT.glob(pattern)), pattern


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A tree with one recipe and one kernel, an empty page, and a compiler that takes no time."""
    (row,) = (row for row in pods.ROWS if row.name == "decode-tpu7x-64")
    for file in (row.config, "pallas_kernels/a.py", "pallas_kernels/gpu.py", "k3jax/serve/programs.py", "README.md"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("one")
    page = tmp_path / "performance.md"
    page.write_text(f"before\n{pods.BEGIN}\nold\n{pods.END}\nafter\n")
    monkeypatch.setattr(pods, "ROOT", tmp_path)
    monkeypatch.setattr(pods, "RECORDS", tmp_path / "pods.json")
    monkeypatch.setattr(pods, "PAGE", page)
    return tmp_path


def record(row: pods.Row, *, peak: float) -> dict:
    compiled = dict.fromkeys(("argument_bytes", "temp_bytes", "compiler_bytes"), pods.GIB)
    compiled |= {"peak_bytes": peak * pods.GIB, "compile_s": 4.4, "cpu_s": 5, "stablehlo_lines": 5000}
    compiled["collectives"] = {"all-gather": 3}
    estimate = {"seconds": {"compute": 1e-3, "memory": 2e-3, "network": 0.0}, "limit": "memory", "roofline_s": 2e-3}
    estimate |= {"total_bytes": 2 * pods.GIB, "tokens_per_s_per_chip": 1234.4}
    kept = {"config": row.config, "overrides": list(row.overrides), "topology": row.topology, "mode": row.mode}
    kept |= {"mesh": {"expert": 4}, "memory_bytes": 94 * pods.GIB, "fits": True, "devices": 128}
    kept |= {"compiled": compiled, "ESTIMATE": estimate, "versions": {"jax": "1", "libtpu": "2"}}
    return kept | {"sources": pods.sources_digest(row)}


@pytest.mark.parametrize(
    ("file", "ages"),
    [
        ("pallas_kernels/a.py", True),
        ("k3jax/serve/programs.py", True),
        ("pallas_kernels/gpu.py", False),
        ("README.md", False),
    ],
)
def test_a_record_ages_with_its_sources_alone(copy, file, ages):
    (row,) = (row for row in pods.ROWS if row.name == "decode-tpu7x-64")
    records = {row.name: record(row, peak=20)}
    assert row not in pods.stale(records)
    (copy / file).write_text("two")
    assert (row in pods.stale(records)) is ages


def test_a_row_is_kept_beside_the_others_and_shown(copy, monkeypatch):
    first, second = pods.ROWS[:2]
    pods.keep_record(second.name, record(second, peak=38))
    pods.keep_record(first.name, record(first, peak=22))
    assert list(json.loads(pods.RECORDS.read_text())) == [first.name, second.name]
    lines = pods.PAGE.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    shown = [line for line in lines if "4x4x4, 64 chips" in line or "4x4x2, 32 chips" in line]
    assert "| **22.0** | 20 (missed) | 94.0 | 2.0 |" in shown[0]
    assert "| **38.0** | 38 | 94.0 |" in shown[1]
    assert "| 1.0 | 2.0 | 0.0 | HBM | **2.0** | **1,234** | 3 all-gather |" in shown[-1]
    assert sum("not compiled" in line for line in lines) == len(pods.ROWS) - 2


def test_a_row_that_fails_leaves_the_rest(copy, monkeypatch, capsys):
    broken = dataclasses.replace(pods.ROWS[0], overrides=("mesh.tensor=31",))
    monkeypatch.setattr(pods, "ROWS", (broken,))
    assert pods.main(["--rows", broken.name]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"{broken.name}: ") and error.count("\n") == 1
    assert not pods.RECORDS.exists()


def test_an_unknown_row_is_named(capsys):
    assert pods.main(["--rows", "decode"]) == 2
    assert "--rows decode: one of decode-tpu7x-64, " in capsys.readouterr().err
