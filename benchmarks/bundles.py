"""Reads the schedule that the TPU compiler writes for one kernel: VLIW bundles, loops and the slots that are used.

A TPU core issues one bundle a cycle, so bundles times the trips of the loops around them are cycles, without the waits
for memory. The count is strict: every bundle from a loop's first to the last delay slot of its branch counts once a
trip, whether its instructions are predicated or not. The one exception: copies of donated arguments, see below.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

SLOTS = ("MATMUL", "MATPUSH", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "VLOAD:FILL", "VSTORE", "VSTORE:SPILL", "SALU")

_BUNDLE = re.compile(r"^ *(0x[0-9a-f]+|0) +(?:[A-Z]{2})?: *[> ]*\{", re.MULTILINE)
_BRANCH = re.compile(r"sbr\.rel \(!(%p\d+_p\d+)\) target = \$region(\d+)")
_STARTS = re.compile(r"Start(?:/End empty)? region (\d+)")


@dataclass(frozen=True)
class Loop:
    """Bundles `first` to `last` (inclusive) that run `trips` times each time they are entered."""

    first: int
    last: int
    trips: int


@dataclass(frozen=True)
class Schedule:
    """The bundles of one kernel, how often each runs, and the slot uses of each bundle."""

    loops: tuple[Loop, ...]
    runs: tuple[int, ...]
    used: tuple[tuple[int, ...], ...]
    capacity: tuple[int, ...]

    @property
    def cycles(self) -> int:
        """Bundles times trips."""
        return sum(self.runs)

    def slot_cycles(self) -> dict[str, int]:
        """How many slots of each kind are used in all cycles."""
        totals = [sum(run * use[i] for run, use in zip(self.runs, self.used, strict=True)) for i in range(len(SLOTS))]
        return dict(zip(SLOTS, totals, strict=True))


def read_schedule(
    bundles: str, utilisation: str, *, branch_delay: int, traced_trips: Iterator[int] | None = None
) -> Schedule:
    """Parse the texts of `*final_bundles.txt` and `*final_hlo-static-per-bundle-utilization.txt`.

    `branch_delay`: bundles after a branch that still run. `traced_trips`: of the loops whose bounds are not constants,
    in the order of their ends. Raises ValueError where a loop's trips cannot be read.
    """
    texts = _split(bundles)
    capacity, used = read_utilisation(utilisation)
    if len(used) != len(texts):
        raise ValueError(f"{len(texts)} bundles but the slots of {len(used)}: the two files are of different kernels")
    loops = _find_loops(texts, branch_delay, iter(()) if traced_trips is None else traced_trips)
    runs = [1] * len(texts)
    for first, last in _donation_copies(texts, branch_delay):
        runs[first : last + 1] = [0] * (last + 1 - first)
    for loop in loops:
        for i in range(loop.first, loop.last + 1):
            runs[i] *= loop.trips
    return Schedule(loops, tuple(runs), used, capacity)


def read_utilisation(text: str) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Slots there are, and slots used by each bundle, in the order of `SLOTS`."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    names = tuple(name.strip() for name in lines[1].split(","))
    if names != SLOTS:
        raise ValueError(f"the compiler names the slots {names}; {SLOTS} are known")
    rows = tuple(tuple(map(int, line.split())) for line in lines[4:])
    return tuple(map(int, lines[2].split())), rows


def _split(text: str) -> list[str]:
    """One text per bundle, in order (comments may span lines)."""
    marks = [*_BUNDLE.finditer(text)]
    for position, mark in enumerate(marks):
        if int(mark[1], 16) != position:
            raise ValueError(f"bundle {mark[1]} stands where bundle {position:#x} should")
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    return [text[mark.start() : end] for mark, end in zip(marks, ends, strict=True)]


def _donation_copies(texts: list[str], branch_delay: int) -> list[tuple[int, int]]:
    """Bundles that copy an argument to the output it may share: skipped where the caller did donate its buffer.

    The compiler compares the two addresses, which no other code of a program does, and branches over the copy.
    """
    starts = {int(region): i for i, text in enumerate(texts) for region in _STARTS.findall(text)}
    equal: dict[str, int] = {}
    copies = []
    for i, text in enumerate(texts):
        for predicate in re.findall(r"(%p\d+_p\d+) = scmp\.eq\.s32\.totalorder %s\d+_s\d+, %s\d+_s\d+", text):
            equal[predicate] = i
        for predicate, region in re.findall(r"sbr\.rel \((%p\d+_p\d+)\) target = \$region(\d+)", text):
            if predicate in equal and starts.get(int(region), 0) > i:
                copies.append((i + branch_delay + 1, starts[int(region)] - 1))
    return copies


def _find_loops(texts: list[str], branch_delay: int, traced: Iterator[int]) -> tuple[Loop, ...]:
    starts = {int(region): i for i, text in enumerate(texts) for region in _STARTS.findall(text)}
    loops = []
    for i, text in enumerate(texts):
        for predicate, region in _BRANCH.findall(text):
            first = starts.get(int(region), len(texts))
            if first <= i:  # a branch back
                loops.append(Loop(first, i + branch_delay, _trips(texts, predicate, first, i, traced)))
    return tuple(loops)


def _trips(texts: list[str], predicate: str, first: int, branch: int, traced: Iterator[int]) -> int:
    """From the exit test `counter + step >= bound`, the counter's step and the value it enters with; or as told."""
    body = "".join(texts[first : branch + 1])
    test = re.search(
        re.escape(predicate) + r" = scmp\.ge\.s32\.totalorder (?:\(!?%p\w+\), )?(%s\d+_s\d+), (\d+) /\* loop exit test",
        body,
    )
    if test is None:
        for trips in traced:
            return trips
        raise ValueError(f"the loop of bundles {first:#x} to {branch:#x} has no exit test against a constant")
    counter, step = _advance(body, test[1])
    return -(-(int(test[2]) - _enters_with(texts, counter, first)) // step)


def _advance(body: str, register: str) -> tuple[str, int]:
    """The counter that `register` is the next value of, and its step; follows copies and spills to scalar memory."""
    definition = re.search(re.escape(register) + r" = (sadd\.s32|sld|smov\.u32) (?:\(!?%p\w+\), )?([^/;}]+)", body)
    if definition is None:
        raise ValueError(f"the loop counter {register} does not advance by a constant")
    operands = definition[2].strip()
    if definition[1] == "sadd.s32":
        step, counter = operands.split(", ")
        return _unspilled(body, counter), int(step)
    if definition[1] == "smov.u32":
        return _advance(body, operands)
    return _advance(body, _stored(body, register, operands))


def _unspilled(body: str, register: str) -> str:
    """The register that `register` is read back from, if it is."""
    reload = re.search(re.escape(register) + r" = sld (?:\(!?%p\w+\), )?(\S+)", body)
    return register if reload is None else _unspilled(body, _stored(body, register, reload[1]))


def _stored(body: str, register: str, place: str) -> str:
    """The register that the loop stores at a place in scalar memory."""
    spilled = re.search(r"sst " + re.escape(place) + r" (%s\d+_s\d+)", body)
    if spilled is None:
        raise ValueError(f"the loop counter {register} comes from {place}, which the loop does not store")
    return spilled[1]


def _enters_with(texts: list[str], counter: str, first: int) -> int:
    """The constant that a loop's counter starts from: phi, then the copy before the loop."""
    phi = re.search(re.escape(counter) + r" = sphi (%s\d+_s\d+)", texts[first])
    if phi is None:
        raise ValueError(f"the counter {counter} of the loop at {first:#x} has no initial value")
    copies = re.findall(re.escape(phi[1]) + r" = smov\.u32 (?:\(!?%p\w+\), )?(\d+)", "".join(texts[:first]))
    if not copies:
        raise ValueError(f"the counter {counter} of the loop at {first:#x} does not start from a constant")
    return int(copies[-1])
