"""Peers beside our kernels: their rows where they are not installed, the page with both, counters kept in memory."""

import json

import pytest

from benchmarks import peers, report, static_cycles
from benchmarks.bundles import SLOTS, read_schedule
from benchmarks.cases import registry


def row(case="kda_fwd_h8_t4096", body="tpu", cycles=100, **rest):
    sizes = {"units": 10, "cycles_per_unit": cycles / 10, "hbm_bytes": 5_000_000, "temp_bytes": 1_000}
    used = {"utilisation": dict.fromkeys(SLOTS, 0.5)}
    return (
        {"kernel": "kda", "case": case, "body": body, "topology": "tpu7x:2x2x1", "cycles": cycles} | sizes | used | rest
    )


@pytest.fixture
def without_peers(monkeypatch, tmp_path):
    """No peers' environment, one committed row, and a kernel of our own that takes 100 cycles."""
    kept = tmp_path / "rows.json"
    kept.write_text(json.dumps([row(body="peer 1.0", cycles=400), row(body="peer 1.0", topology="v6e:2x2")]))
    monkeypatch.setattr(peers, "PYTHON", tmp_path / "python")
    monkeypatch.setattr(peers, "ROWS", kept)
    monkeypatch.setattr(static_cycles, "measure", lambda kernel, case, topology: row(case.name))


def test_peers_that_are_not_installed_show_their_committed_rows(without_peers, tmp_path, capsys):
    out = tmp_path / "rows" / "out.json"
    assert static_cycles.main(["kda_fwd_h8_t4096", "--peers", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "peers: not installed (make peers)" in printed
    assert "ours: 0.25; committed" in printed
    ours, theirs = json.loads(out.read_text())
    assert (ours["body"], theirs["body"], theirs["committed"]) == ("tpu", "peer 1.0", True)


def test_peers_are_shown_when_asked_for_only(without_peers, capsys):
    assert static_cycles.main(["kda_fwd_h8_t4096"]) == 0
    assert "peer" not in capsys.readouterr().out.replace("per unit", "")


def test_all_measures_every_case(without_peers, capsys):
    assert static_cycles.main(["all"]) == 0
    printed = capsys.readouterr().out
    assert all(case.name in printed for cases in registry().values() for case in cases)


def test_installed_peers_are_measured_under_their_own_python(monkeypatch):
    (case,) = (case for case in registry()["kda"] if case.name == "kda_fwd_h8_t4096")
    measured = []

    def measure(kernel, case, topology, *, peer=None):
        measured.append((kernel, case.name, topology, peer))
        return row(case.name, body="tokamax")

    monkeypatch.setattr(peers, "PYTHON", peers.ROWS)  # exists
    monkeypatch.setattr(static_cycles, "measure", measure)
    assert len(static_cycles.measure_peers("kda", case, "tpu7x:2x2x1")) == 1
    assert measured == [("kda", "kda_fwd_h8_t4096", "tpu7x:2x2x1", "tokamax_kda")]


def test_committed_rows_name_what_made_them():
    rows = json.loads(peers.ROWS.read_text())
    assert {"kda_fwd_h8_t4096", "kda_fwd_bwd_h8_t4096"} <= {row["case"] for row in rows}
    for row in rows:
        assert row["body"] == f"tokamax {row['versions']['tokamax']}"
        assert {"python", "jax", "libtpu"} <= row["versions"].keys()
        assert row["cycles_per_unit"] == round(row["cycles"] / row["units"], 4)
        assert set(row["utilisation"]) == set(SLOTS)


@pytest.mark.parametrize("kernel", peers.ADAPTERS)
def test_adapters_do_the_work_that_our_cases_of_that_name_do(kernel):
    ours = {case.name: case.units for case in registry()[kernel]}
    for name in peers.ADAPTERS[kernel]:
        for case in peers.adapter(name).CASES:
            assert case.units == ours.get(case.name, case.units)


def test_the_page_keeps_its_words_and_takes_the_new_table(without_peers, monkeypatch, tmp_path):
    page = tmp_path / "performance.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    (tmp_path / "new.json").write_text(json.dumps([row(), row("kda_decode_b256_h96", cycles=30)]))
    monkeypatch.setattr(report, "PAGE", page)
    report.main(str(tmp_path / "new.json"))
    lines = page.read_text().splitlines()
    assert (lines[0], lines[1], lines[-2], lines[-1]) == ("before", report.BEGIN, report.END, "after")
    assert [line.split(" | ")[1:5] for line in lines[4:-2]] == [
        ["tpu", "100", "10.00", ""],
        ["peer 1.0", "400", "40.00", "0.25"],
        ["tpu", "30", "3.00", ""],
    ]


def test_a_page_without_markers_is_refused():
    with pytest.raises(ValueError, match="needs the lines"):
        report.replace_section("no markers", "table")


# A loop of five trips whose counter waits in scalar memory while the body runs.
SPILLED = """
     0   :  { %s1_s1 = smov.u32 0 /* copy */ }
   0x1 LB: > { %s10_s1 = sphi %s1_s1, %s12_s1 } /* Start region 7 */
   0x2   : > { %31 = sst [smem:[#allocation5_spill]] %s10_s1 }
   0x3   : > { %s11_s2 = sld [smem:[#allocation5_spill]] /* phi copy */ }
   0x4   : > { %s12_s1 = sadd.s32 1, %s11_s2 /* copy */ }
   0x5   : > { %p1_p1 = scmp.ge.s32.totalorder %s12_s1, 5 /* loop exit test */
;;  %33 = sbr.rel (!%p1_p1) target = $region7 }
   0x6   :  { %34 = vsyncpa [#allocation4], 1 }
"""
NOTHING_USED = "\n".join(["==", ", ".join(SLOTS), "1 " * len(SLOTS), "==", *["0 " * len(SLOTS)] * 7])


def test_a_counter_that_is_read_back_from_memory_is_followed():
    schedule = read_schedule(SPILLED, NOTHING_USED, branch_delay=0)
    assert [(loop.first, loop.last, loop.trips) for loop in schedule.loops] == [(1, 5, 5)]


def test_a_counter_that_nothing_stores_is_refused():
    with pytest.raises(ValueError, match="which the loop does not store"):
        read_schedule(SPILLED.replace("= sst", "= sxx"), NOTHING_USED, branch_delay=0)
