"""The reader of compiler schedules, on a small schedule in the compiler's format; tests/aot has real ones."""

import json

import pytest

from benchmarks import static_cycles
from benchmarks.bundles import SLOTS, Loop, read_schedule
from benchmarks.cases import cases_of, registry

# Two nested loops: 5 trips of bundles 2-8 (counter from 0), inside them 3 trips of 3-6 (from 2 to 8 in steps of 2).
# Each branch has two delay slots; one exit test reads its counter back from a spill, one is predicated.
BUNDLES = """
= control target key start
LH: loop header
= control target key end

     0   :  { %s1_s1 = smov.u32 0  ;;  %s2_s2 = smov.u32 (!%p9_p9), 2 /* copy
over two lines */ }
   0x1   :  { %v1_v1 = vld [vmem:[%s3_s3] sm:$0xff] }
   0x2 LB: > { %s10_s1 = sphi %s1_s1, %s12_s1  ;;  %s11_s1 = sadd.s32 1, %s10_s1 } /* Start region 7 */
   0x3 LB: >> { %s20_s2 = sphi %s2_s2, %s21_s2  ;;  %s21_s2 = sadd.s32 2, %s20_s2
} /* Start region 8 :: Start region 9 */
   0x4   : >> { %p2_p2 = scmp.ge.s32.totalorder (%p3_p3), %s21_s2, 8 /* loop exit test */
;;  %31 = sbr.rel (!%p2_p2) target = $region8 }
   0x5   : >> { %v2_v2 = vmul.f32 %v1_v1, %v1_v1  ;;  %32 = sst [smem:[#allocation5_spill]] %s11_s1 }
   0x6   :  {}
   0x7   : > { %s12_s1 = sld [smem:[#allocation5_spill]] }
   0x8   : > { %p1_p1 = scmp.ge.s32.totalorder %s12_s1, 5 /* loop exit test */
;;  %33 = sbr.rel (!%p1_p1) target = $region7 }
   0x9   :  {}
   0xa   :  {}
   0xb   :  { %34 = vsyncpa [#allocation4], 1 } /* exit bundle */
"""


def utilisation(rows=12, used=None):
    lines = ["== CAPACTIY:", ", ".join(SLOTS), "2 2 2 4 2 1 3 3 2 2 2", "== UTILIZATION:"]
    row = " ".join("1" if name == used else "0" for name in SLOTS)
    return "\n".join(lines + [row] * rows)


def read(bundles=BUNDLES, slots=None):
    return read_schedule(bundles, slots or utilisation(), branch_delay=2)


def test_bundles_are_multiplied_by_the_trips_of_their_loops():
    schedule = read()
    assert set(schedule.loops) == {Loop(3, 6, 3), Loop(2, 10, 5)}
    assert schedule.runs == (1, 1, 5, 15, 15, 15, 15, 5, 5, 5, 5, 1)
    assert schedule.cycles == sum(schedule.runs)


def test_loops_with_traced_bounds_run_as_often_as_the_case_says():
    traced = BUNDLES.replace("%s12_s1, 5", "%s12_s1, %s9_s9").replace("%s21_s2, 8", "%s21_s2, %s8_s8")
    trips = iter((7, 2, 9))  # the inner loop ends first
    schedule = read_schedule(traced, utilisation(), branch_delay=2, traced_trips=trips)
    assert set(schedule.loops) == {Loop(3, 6, 7), Loop(2, 10, 2)}
    assert [*trips] == [9]  # for the program's next kernel


def test_slots_are_counted_as_often_as_their_bundles_run():
    used = read(slots=utilisation(used="VALU")).slot_cycles()
    assert used["VALU"] == read().cycles
    assert used["MATMUL"] == 0


def test_forward_branches_are_no_loops():
    schedule = read(BUNDLES.replace("%34 = vsyncpa", "%p4_p4 = sbr.rel (!%p1_p1) target = $region99 ;; %34 = vsyncpa"))
    assert len(schedule.loops) == 2


def test_copies_of_donated_arguments_do_not_count():
    guard = "%v1_v1 = vld [vmem:[%s3_s3] sm:$0xff]"
    compare = "%p8_p8 = scmp.eq.s32.totalorder %s5_s5, %s6_s6  ;;  %40 = sbr.rel (%p8_p8) target = $region50"
    text = BUNDLES.replace(guard, compare).replace("/* exit bundle */", "/* Start region 50 */")
    assert read(text).runs == (1, 1, 5, 15, *[0] * 7, 1)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("%s12_s1, 5", "%s12_s1, %s9_s9", "no exit test against a constant"),
        ("sadd.s32 2, %s20_s2", "smul.u32 2, %s20_s2", "does not advance by a constant"),
        ("%s2_s2 = smov.u32 (!%p9_p9), 2", "%s2_s2 = sld [smem:[%s4_s4]]", "does not start from a constant"),
        ("   0x5   :", "   0x6   :", "stands where bundle 0x5 should"),
    ],
)
def test_a_schedule_that_is_not_understood_is_refused(old, new, message):
    assert old in BUNDLES
    with pytest.raises(ValueError, match=message):
        read(BUNDLES.replace(old, new))


def test_files_of_different_kernels_are_refused():
    with pytest.raises(ValueError, match="12 bundles but the slots of 11"):
        read(slots=utilisation(rows=11))


# Cases and the command


def test_cases_build_programs_of_their_size():
    for kernel, cases in registry().items():
        for case in cases:
            assert cases_of(case.name) == (kernel, (case,))
            fn, shapes, donated = case.build()
            assert callable(fn)
            assert all(i < len(shapes) for i in donated)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "unknown kernel 'nothing'; use one of kda, "),
        (["kda", "--topology", "gpu:1"], "must be one of tpu7x"),
    ],
)
def test_a_wrong_command_says_what_is_right(arguments, message, capsys):
    assert static_cycles.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_rows_are_printed_and_written(monkeypatch, tmp_path, capsys):
    row = {"case": "kda_fwd_h8_t4096", "body": "tpu", "cycles": 1234, "cycles_per_unit": 0.04, "hbm_bytes": 5e6}
    row["utilisation"] = dict.fromkeys(SLOTS, 0.5)
    monkeypatch.setattr(static_cycles, "measure", lambda kernel, case, topology: row)
    assert static_cycles.main(["kda_fwd_h8_t4096", "--json", str(tmp_path / "rows.json")]) == 0
    assert "1,234" in capsys.readouterr().out
    assert json.loads((tmp_path / "rows.json").read_text()) == [row]
