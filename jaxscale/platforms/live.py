"""Who is alive when device memory is fullest, in the user's own names: read from what XLA dumps of a compilation.

XLA writes which buffer every value got and from which instruction to which it lives (`xla_dump_to`); its own list of
the peak counts a TPU's on-chip memory as well, so the peak is found again here, in device memory alone. Arguments,
outputs and constants take their place for the whole run.

It leaves out what lies between buffers: a heap is packed, so the device bytes of a program are a little more than what
is alive at its peak.
"""

import dataclasses
import pathlib
import re
from collections import defaultdict

from jaxscale.platforms.hlo_program import Program, integers
from jaxscale.platforms.hlo_source import Sources
from jaxscale.platforms.live_names import ARGUMENT, Names, phase_of
from jaxscale.platforms.report import KINDS, Kind, LiveTensor, Moment

MOMENTS = 400
"""Moments of a timeline, about."""

# memory spaces that are device memory: 1 is VMEM on a TPU, memory for collectives on a GPU; 5 is the host
_SPACES = {"tpu": {0}, "gpu": {0, 1}, "cpu": {0}}
_VALUE = re.compile(r" value: <\d+ (\S+?)(\{[\d,]*\})?( \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)")
_RANGE = re.compile(r"    (\S+?)(\{[\d,]*\}):(\d+)-(\d+)$")
_PLACE = re.compile(r"    (\d+):(\S+)$")


@dataclasses.dataclass(frozen=True)
class Live:
    """Who is alive at the peak, and how live bytes go along the schedule.

    Args:
        tensors: the buffers alive at the peak, largest first, without those below a thousandth of it.
        timeline: live bytes by kind, along the schedule.
    """

    tensors: tuple[LiveTensor, ...]
    timeline: tuple[Moment, ...]


@dataclasses.dataclass(frozen=True)
class _Value:
    """A value, its buffer (allocation and offset), and the first and last instruction that it is alive at."""

    name: str
    index: tuple[int, ...]
    place: tuple[int, int]
    bytes: int
    shape: str
    start: int
    end: int
    whole_run: Kind | None


def live_at_the_peak(folder: pathlib.Path, kind: str) -> Live | None:
    """Who is alive at the peak of the program whose compilation was dumped to a folder; None where nothing was.

    Args:
        folder: what `xla_dump_to` named, with `xla_dump_hlo_as_text`.
        kind: "tpu", "gpu" or "cpu".
    """
    # a compilation may compile small helpers as well: the program has the longest text
    ending = "after_optimizations-buffer-assignment.txt"
    found = sorted(folder.glob(f"*{ending}"), key=lambda path: path.stat().st_size)
    if not found:
        return None
    stem = str(found[-1]).removesuffix("-buffer-assignment.txt")
    texts = [pathlib.Path(f"{stem}{end}") for end in ("-buffer-assignment.txt", "-live-range.txt", ".txt")]
    if not all(path.exists() for path in texts):
        return None
    assignment, ranges, text = (path.read_text("utf-8", "replace") for path in texts)
    return _live(assignment, ranges, text, _SPACES[kind])


def _live(assignment: str, ranges: str, text: str, spaces: set[int]) -> Live:
    names = Names(Program(text), Sources(text))
    order, values = _values(assignment, ranges, spaces)
    values = [_replaced(value, names.arguments) for value in values]
    backward = next((at for at, name in enumerate(order) if "transpose(" in names.op_name(name)), len(order))
    lasts = _last_uses(values)
    kinds = {}
    for value in values:
        phase = phase_of(names.own(value.name, value.index))
        kept = phase == "forward" and lasts[value.place, value.start] >= backward
        kinds[value] = value.whole_run or ("kept" if kept else "transient")
    peak, timeline = _sweep(order, values, kinds, names)
    tensors = [
        LiveTensor(
            names.called(value.name, value.index),
            value.bytes,
            kinds[value],
            value.shape.split("{")[0],
            None if value.whole_run in ("argument", "constant") else phase_of(names.own(value.name, value.index)),
            value.whole_run is None and names.in_loop(value.name),
            names.place(value.name, value.index) if value.whole_run is None else None,
        )
        for value in peak
    ]
    small = sum(tensor.bytes for tensor in tensors) // 1000
    tensors = [tensor for tensor in tensors if tensor.bytes > small]
    return Live(tuple(sorted(tensors, key=lambda one: (-one.bytes, one.name))), timeline)


def _values(assignment: str, ranges: str, spaces: set[int]) -> tuple[list[str], list[_Value]]:
    """Instructions in the order of the schedule, and the values that lie in device memory."""
    order: list[str] = []
    lives: dict[tuple[str, str], tuple[int, int]] = {}
    for line in ranges.splitlines():
        if match := _PLACE.match(line):
            order.append(match[2])
        elif match := _RANGE.match(line):
            lives[match[1], match[2]] = (int(match[3]), int(match[4]))
        elif line.startswith("  Live ranges at"):
            break
    values: list[_Value] = []
    number, kind, size, counted = -1, None, 0, False
    for line in assignment.splitlines():
        if line.startswith("allocation "):
            number += 1
            color = re.search(r", color (\d+)", line)
            counted = int(color[1] if color else 0) in spaces and "thread-local" not in line
            size = integers(line)[1]
            kind = _whole_run(line)
            if kind is not None and counted:
                given = re.search(r", parameter (\d+), shape \|(.*?)\|", line)
                # a donated argument's place holds other values after it; all else is named after its first value
                name, shape = (f"{ARGUMENT}{given[1]}", given[2]) if given else ("", "")
                values.append(_Value(name, (), (number, 0), size, shape, 0, len(order), kind))
        elif counted and (match := _VALUE.match(line)):
            name, index, _, bytes_, offset, shape = match.groups()
            path = tuple(integers(index or ""))
            if kind is not None:
                if not values[-1].name:
                    values[-1] = dataclasses.replace(values[-1], name=name, index=path, shape=shape)
            elif (life := lives.get((name, index or "{}"))) and not shape.startswith("("):
                values.append(_Value(name, path, (number, int(offset)), int(bytes_), shape, *life, None))
        elif not line.strip() and number >= 0:
            break
    return order, values


def _replaced(value: _Value, arguments: dict[str, str]) -> _Value:
    """A value whose argument's number has become the argument's instruction."""
    return dataclasses.replace(value, name=arguments.get(value.name, value.name))


def _whole_run(allocation: str) -> Kind | None:
    """What an allocation is that stays for the whole run; None for temporaries."""
    if ", parameter " in allocation:
        return "argument"
    if "constant" in allocation:
        return "constant"
    return "output" if "output shape" in allocation or "maybe-live-out" in allocation else None


def _last_uses(values: list[_Value]) -> dict[tuple[tuple[int, int], int], int]:
    """Where the buffer of each (place, start) ends, the values of one shape that touch being one."""
    places: dict[tuple[tuple[int, int], str], list[_Value]] = defaultdict(list)
    for value in values:
        places[value.place, value.shape].append(value)
    lasts: dict[tuple[tuple[int, int], int], int] = {}
    for chain in places.values():
        chain.sort(key=lambda value: value.start, reverse=True)
        starts: list[tuple[int, int]] = []  # (start, last use) of the values after this one
        for value in chain:
            last = value.end
            for start, end in reversed(starts):  # the nearest first
                if start > value.end:
                    break
                last = max(last, end)
            starts.append((value.start, last))
            key = (value.place, value.start)
            lasts[key] = max(last, lasts.get(key, 0))
    return lasts


def _sweep(
    order: list[str], values: list[_Value], kinds: dict[_Value, Kind], names: Names
) -> tuple[list[_Value], tuple[Moment, ...]]:
    """The values alive at the peak, one a buffer, and the timeline."""
    begins: dict[int, list[_Value]] = defaultdict(list)
    ends: dict[int, list[_Value]] = defaultdict(list)
    for value in values:
        begins[value.start].append(value)
        ends[value.end + 1].append(value)
    alive: dict[tuple[int, int], list[_Value]] = defaultdict(list)
    totals: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    moments: list[Moment] = []
    best, peak = -1, []

    def change(value: _Value, there: bool) -> None:
        here = alive[value.place]
        if here:
            first = max(here, key=_rank)
            totals[kinds[first]] -= first.bytes
        here.append(value) if there else here.remove(value)
        if here:
            first = max(here, key=_rank)
            totals[kinds[first]] += first.bytes

    for at in range(len(order) + 1):
        for value in ends[at]:
            change(value, False)
        for value in begins[at]:
            change(value, True)
        phase = phase_of(names.op_name(order[at])) if at < len(order) else None
        moments.append(Moment(at, {kind: count for kind, count in totals.items() if count}, phase))
        if sum(totals.values()) > best:
            best, peak = sum(totals.values()), [max(here, key=_rank) for here in alive.values() if here]
    return peak, _thinned(moments)


def _rank(value: _Value) -> tuple[int, int]:
    """Of several values in one buffer, the one to name it after: the largest, then the latest."""
    return value.bytes, value.start


def _thinned(moments: list[Moment]) -> tuple[Moment, ...]:
    """The fullest moment of each stretch: peaks stay, and the list stays short."""
    stretch = -(-len(moments) // MOMENTS)
    return tuple(
        max(moments[i : i + stretch], key=lambda moment: moment.total) for i in range(0, len(moments), stretch or 1)
    )
