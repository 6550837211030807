"""The buffers alive at the peak of device memory, by the user's names, read from XLA's dump of a compilation.

XLA writes every value's buffer, first instruction and last instruction to files (`xla_dump_to`). Its list of buffers at
the peak counts a TPU's on-chip memory as well, so this module computes the peak of device memory alone. Arguments,
outputs and constants occupy their buffers for the whole run.

Left out: gaps between buffers. The heap is packed, so a program takes slightly more device bytes than are alive at its
peak.
"""

import dataclasses
import pathlib
import re
from collections import defaultdict
from collections.abc import Mapping

from jaxscale.compiler.hlo_program import HloProgram, integers
from jaxscale.compiler.hlo_source import Sources
from jaxscale.compiler.live_names import ValueNames, phase_of
from jaxscale.compiler.report import KINDS, LiveBytes, LiveKind, LiveTensor, StepPhase

MOMENTS = 400
"""Approximate number of positions of the schedule in a timeline."""

# memory spaces that are device memory: 1 is VMEM on a TPU, memory for collectives on a GPU; 5 is the host
_DEVICE_SPACES_BY_KIND = {"tpu": {0}, "gpu": {0, 1}, "cpu": {0}}
_VALUE_LINE = re.compile(r" value: <\d+ (\S+?)(\{[\d,]*\})?( \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)")
_RANGE_LINE = re.compile(r"    (\S+?)(\{[\d,]*\}):(\d+)-(\d+)$")
_SCHEDULED_LINE = re.compile(r"    (\d+):(\S+)$")


@dataclasses.dataclass(frozen=True)
class Live:
    """The buffers alive at the peak, and the live bytes along the schedule.

    Args:
        tensors: the buffers alive at the peak, largest first, without those smaller than a thousandth of the peak.
        timeline: live bytes by kind, along the schedule.
    """

    tensors: tuple[LiveTensor, ...]
    timeline: tuple[LiveBytes, ...]


@dataclasses.dataclass(frozen=True)
class _Value:
    """A value of the program, and its buffer.

    Args:
        name: name of the instruction that computes the value.
        index: index of the value in a tuple that the instruction returns; `()` for a whole result.
        buffer: the buffer, as the number of its allocation and its offset in bytes within the allocation.
        bytes: bytes of the value.
        shape: type and shape, as XLA prints them.
        start: position in the schedule of the first instruction at which the value is alive.
        end: position in the schedule of the last instruction at which the value is alive.
        whole_run_kind: kind of a value that is alive for the whole run; None for a temporary.
    """

    name: str
    index: tuple[int, ...]
    buffer: tuple[int, int]
    bytes: int
    shape: str
    start: int
    end: int
    whole_run_kind: LiveKind | None


def live_at_the_peak(folder: pathlib.Path, device_kind: str) -> Live | None:
    """Return a program's live buffers, read from the dump of its compilation; None if there is no dump.

    Args:
        folder: folder of the dump, passed to `xla_dump_to`, with `xla_dump_hlo_as_text`.
        device_kind: kind of the devices: "tpu", "gpu" or "cpu".
    """
    # a compilation may compile small helpers as well: the program has the longest text
    pattern = "after_optimizations-buffer-assignment.txt"
    files = sorted(folder.glob(f"*{pattern}"), key=lambda path: path.stat().st_size)
    if not files:
        return None
    stem = str(files[-1]).removesuffix("-buffer-assignment.txt")
    paths = [pathlib.Path(f"{stem}{suffix}") for suffix in ("-buffer-assignment.txt", "-live-range.txt", ".txt")]
    if not all(path.exists() for path in paths):
        return None
    assignment_text, ranges_text, program_text = (path.read_text("utf-8", "replace") for path in paths)
    return _live_from_texts(assignment_text, ranges_text, program_text, _DEVICE_SPACES_BY_KIND[device_kind])


def _live_from_texts(assignment_text: str, ranges_text: str, program_text: str, device_spaces: set[int]) -> Live:
    """Return the live buffers, from the texts of the buffer assignment, of the live ranges and of the program."""
    value_names = ValueNames(HloProgram(program_text), Sources(program_text))
    instruction_names, values = _schedule_and_values(
        assignment_text, ranges_text, device_spaces, value_names.argument_name_by_number
    )
    backward_start = next(
        (i for i, name in enumerate(instruction_names) if "transpose(" in value_names.op_name(name)),
        len(instruction_names),
    )
    last_use_by_buffer_and_start = _last_uses(values)
    phase_by_value: dict[_Value, StepPhase | None] = {
        value: phase_of(value_names.writer_scopes(value.name, value.index)) for value in values
    }
    kind_by_value: dict[_Value, LiveKind] = {}
    for value, phase in phase_by_value.items():
        is_kept = phase == "forward" and last_use_by_buffer_and_start[value.buffer, value.start] >= backward_start
        kind_by_value[value] = value.whole_run_kind or ("kept" if is_kept else "transient")
    peak_values, timeline = _peak_and_timeline(instruction_names, values, kind_by_value, value_names)
    tensors = [
        LiveTensor(
            value_names.user_name(value.name, value.index),
            value.bytes,
            kind_by_value[value],
            value.shape.split("{")[0],
            None if value.whole_run_kind in ("argument", "constant") else phase_by_value[value],
            value.whole_run_kind is None and value_names.in_loop(value.name),
            value_names.source_place(value.name, value.index) if value.whole_run_kind is None else None,
        )
        for value in peak_values
    ]
    threshold_bytes = sum(tensor.bytes for tensor in tensors) // 1000
    tensors = [tensor for tensor in tensors if tensor.bytes > threshold_bytes]
    return Live(tuple(sorted(tensors, key=lambda tensor: (-tensor.bytes, tensor.name))), timeline)


def _schedule_and_values(
    assignment_text: str, ranges_text: str, device_spaces: set[int], argument_name_by_number: Mapping[str, str]
) -> tuple[list[str], list[_Value]]:
    """Return the names of the instructions in the order of the schedule, and the values in device memory.

    Args:
        assignment_text: text of the buffer assignment.
        ranges_text: text of the live ranges.
        device_spaces: memory spaces that are device memory.
        argument_name_by_number: name of each argument's instruction, by the argument's number as text.
    """
    instruction_names: list[str] = []
    lifetime_by_value: dict[tuple[str, str], tuple[int, int]] = {}
    for line in ranges_text.splitlines():
        if match := _SCHEDULED_LINE.match(line):
            instruction_names.append(match[2])
        elif match := _RANGE_LINE.match(line):
            lifetime_by_value[match[1], match[2]] = (int(match[3]), int(match[4]))
        elif line.startswith("  Live ranges at"):
            break
    values: list[_Value] = []
    # of the allocation that the current lines describe: number, kind (`None` unless it lasts the whole run)
    allocation, kind, allocation_bytes, is_on_device = -1, None, 0, False
    for line in assignment_text.splitlines():
        if line.startswith("allocation "):
            allocation += 1
            color_match = re.search(r", color (\d+)", line)
            is_on_device = int(color_match[1] if color_match else 0) in device_spaces and "thread-local" not in line
            allocation_bytes = integers(line)[1]
            kind = _whole_run_kind(line)
            if kind is not None and is_on_device:
                parameter_match = re.search(r", parameter (\d+), shape \|(.*?)\|", line)
                # other values reuse a donated argument's buffer; any other allocation is named after its first value
                name, shape = (
                    (argument_name_by_number[parameter_match[1]], parameter_match[2]) if parameter_match else ("", "")
                )
                values.append(
                    _Value(name, (), (allocation, 0), allocation_bytes, shape, 0, len(instruction_names), kind)
                )
        elif is_on_device and (match := _VALUE_LINE.match(line)):
            name, index_text, _, bytes_text, offset_text, shape = match.groups()
            tuple_index = tuple(integers(index_text or ""))
            if kind is not None:
                if not values[-1].name:
                    values[-1] = dataclasses.replace(values[-1], name=name, index=tuple_index, shape=shape)
            elif (lifetime := lifetime_by_value.get((name, index_text or "{}"))) and not shape.startswith("("):
                values.append(
                    _Value(name, tuple_index, (allocation, int(offset_text)), int(bytes_text), shape, *lifetime, None)
                )
        elif not line.strip() and allocation >= 0:
            break
    return instruction_names, values


def _whole_run_kind(allocation_text: str) -> LiveKind | None:
    """Return the kind of an allocation that lasts the whole run, from XLA's line about it; None for temporaries."""
    if ", parameter " in allocation_text:
        return "argument"
    if "constant" in allocation_text:
        return "constant"
    return "output" if "output shape" in allocation_text or "maybe-live-out" in allocation_text else None


def _last_uses(values: list[_Value]) -> dict[tuple[tuple[int, int], int], int]:
    """Return each value's last use, by (buffer, start); directly successive values of one shape count as one value."""
    values_by_buffer: dict[tuple[tuple[int, int], str], list[_Value]] = defaultdict(list)
    for value in values:
        values_by_buffer[value.buffer, value.shape].append(value)
    last_use_by_buffer_and_start: dict[tuple[tuple[int, int], int], int] = {}
    for buffer_values in values_by_buffer.values():
        buffer_values.sort(key=lambda value: value.start, reverse=True)
        later_spans: list[tuple[int, int]] = []  # (start, last use) of the values after this one
        for value in buffer_values:
            last_use = value.end
            for later_start, later_use in reversed(later_spans):  # the nearest first
                if later_start > value.end:
                    break
                last_use = max(last_use, later_use)
            later_spans.append((value.start, last_use))
            key = (value.buffer, value.start)
            last_use_by_buffer_and_start[key] = max(last_use, last_use_by_buffer_and_start.get(key, 0))
    return last_use_by_buffer_and_start


def _peak_and_timeline(
    instruction_names: list[str], values: list[_Value], kind_by_value: dict[_Value, LiveKind], value_names: ValueNames
) -> tuple[list[_Value], tuple[LiveBytes, ...]]:
    """Return the values alive at the peak, the largest one of each buffer, and the timeline."""
    values_by_start: dict[int, list[_Value]] = defaultdict(list)
    values_by_end: dict[int, list[_Value]] = defaultdict(list)
    for value in values:
        values_by_start[value.start].append(value)
        values_by_end[value.end + 1].append(value)
    occupants_by_buffer: dict[tuple[int, int], list[_Value]] = defaultdict(list)
    bytes_by_kind: dict[LiveKind, int] = dict.fromkeys(KINDS, 0)
    moments: list[LiveBytes] = []
    peak_bytes, peak_values = -1, []

    def update_buffer(value: _Value, is_added: bool) -> None:
        """Add a value to its buffer or remove it, and update the bytes by kind."""
        occupants = occupants_by_buffer[value.buffer]
        if occupants:
            largest_value = max(occupants, key=_rank)
            bytes_by_kind[kind_by_value[largest_value]] -= largest_value.bytes
        occupants.append(value) if is_added else occupants.remove(value)
        if occupants:
            largest_value = max(occupants, key=_rank)
            bytes_by_kind[kind_by_value[largest_value]] += largest_value.bytes

    for index in range(len(instruction_names) + 1):
        for value in values_by_end[index]:
            update_buffer(value, is_added=False)
        for value in values_by_start[index]:
            update_buffer(value, is_added=True)
        phase = phase_of(value_names.op_name(instruction_names[index])) if index < len(instruction_names) else None
        moments.append(LiveBytes(index, {kind: nbytes for kind, nbytes in bytes_by_kind.items() if nbytes}, phase))
        if moments[-1].total > peak_bytes:
            peak_bytes = moments[-1].total
            peak_values = [max(occupants, key=_rank) for occupants in occupants_by_buffer.values() if occupants]
    return peak_values, _sample(moments)


def _rank(value: _Value) -> tuple[int, int]:
    """Return a value's sort key (bytes, start); the value with the largest key describes its buffer."""
    return value.bytes, value.start


def _sample(moments: list[LiveBytes]) -> tuple[LiveBytes, ...]:
    """Split the moments into about `MOMENTS` intervals; return the moment of each interval with the most bytes."""
    moments_per_interval = max(1, -(-len(moments) // MOMENTS))
    return tuple(
        max(moments[i : i + moments_per_interval], key=lambda moment: moment.total)
        for i in range(0, len(moments), moments_per_interval)
    )
