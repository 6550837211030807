"""The operations of a trace of JAX's profiler, and a page of text about where the time of each device went.

Traces are read with `jax.profiler.ProfileData`, so nothing else has to be installed. A trace has one plane for each
device and one for the host. A plane has lines, and a line is a list of timed events, such as the operations of a GPU
stream. An operation's time is its self time: the time of operations nested in it does not count. The page shows no
timeline and no memory.
"""

import collections
import contextlib
import dataclasses
import functools
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from jaxscale.errors import UserError

OperationKind = Literal["matmul", "collective", "copy", "other"]
KINDS: tuple[OperationKind, ...] = ("matmul", "collective", "copy", "other")

_COLLECTIVE = re.compile(
    r"all-?reduce|all-?gather|reduce-?scatter|all-?to-?all|collective|nccl|\bsend|\brecv|psum|permute", re.IGNORECASE
)
# ynn is XLA:CPU's library for matrix products
_MATMUL = re.compile(
    r"\bdot|[_-]dot|conv(?!ert)|gemm|matmul|einsum|cublas|cutlass|xmma|wgmma|ynn|attention", re.IGNORECASE
)
_COPY = re.compile(r"\bcopy(?!.*fusion)|memcpy|memset|transfer|infeed|outfeed|host-?offload", re.IGNORECASE)


_LISTED_COUNT = 12
"""Number of operations of the busiest device that a summary lists."""


@dataclasses.dataclass(frozen=True)
class TracedEvent:
    """One execution of an operation on a device.

    Args:
        name: name of the operation in the compiled program, or of the kernel.
        stats: further values that the profiler recorded, by name.
        start: start of the execution in nanoseconds on the trace's clock.
        end: end of the execution in nanoseconds on the trace's clock.
    """

    name: str
    stats: dict[str, Any]
    start: float
    end: float

    @functools.cached_property
    def kind(self) -> OperationKind:
        """The kind of the operation, found from its name and its HLO category."""
        name_parts = (self.name, self.stats.get("hlo_op", ""), self.stats.get("hlo_category", ""))
        return kind_of(" ".join(map(str, name_parts)))


@dataclasses.dataclass(frozen=True)
class DeviceOperation:
    """One operation of a device, summed over its executions.

    Args:
        name: name of the operation in the compiled program, or of the kernel.
        kind: kind of the operation.
        seconds: total self time of all executions.
        count: number of executions.
    """

    name: str
    kind: OperationKind
    seconds: float
    count: int


@dataclasses.dataclass(frozen=True)
class DeviceTime:
    """How one device spent its time, by operation.

    Args:
        device: name of the device in the trace.
        span: seconds from the start of the first operation to the end of the last one.
        busy: seconds of the span in which at least one operation ran.
        longest_gap: longest gap between two operations, in seconds.
        operations: the device's operations, in order of decreasing self time.
    """

    device: str
    span: float
    busy: float
    longest_gap: float
    operations: tuple[DeviceOperation, ...]

    @property
    def seconds(self) -> float:
        """Total self time of all operations; more than `busy` if some ran at the same time."""
        return sum(operation.seconds for operation in self.operations)

    @property
    def busy_share(self) -> float:
        """Share of the span during which the device was busy, from 0 to 1."""
        return self.busy / self.span if self.span else 0.0

    def share(self, kind: OperationKind) -> float:
        """Return the share of the total self time that operations of this kind took, from 0 to 1."""
        kind_seconds = sum(operation.seconds for operation in self.operations if operation.kind == kind)
        return kind_seconds / self.seconds if self.seconds else 0.0


@dataclasses.dataclass(frozen=True)
class Summary:
    """The times of the devices in a trace; `str(summary)` is the page of text.

    Args:
        devices: the time of each device of the traced processes.
        steps: number of traced steps.
    """

    devices: tuple[DeviceTime, ...]
    steps: int

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """Yield the lines of the page: a table of all devices, then the longest operations of the busiest device."""
        if not self.devices:
            yield "the trace contains no device operations"
            return
        yield f"{self.steps} step(s) traced; seconds are per step"
        yield ""
        yield f"{'device':<16}{'span':>10}{'busy':>8}{'longest gap':>14}" + "".join(f"{kind:>12}" for kind in KINDS)
        for device_time in self.devices:
            share_texts = "".join(f"{device_time.share(kind):>12.1%}" for kind in KINDS)
            span_text, gap_text = _time_text(device_time.span / self.steps), _time_text(device_time.longest_gap)
            yield f"{device_time.device:<16}{span_text:>10}{device_time.busy_share:>8.1%}{gap_text:>14}{share_texts}"
        busiest_time = max(self.devices, key=lambda device_time: device_time.busy)
        yield ""
        yield f"{busiest_time.device}: operations by self time"
        yield f"{'seconds':>10}{'share':>8}{'times':>9}  {'kind':<12}name"
        for operation in busiest_time.operations[:_LISTED_COUNT]:
            share = operation.seconds / busiest_time.seconds if busiest_time.seconds else 0.0
            yield (
                f"{_time_text(operation.seconds / self.steps):>10}{share:>8.1%}{operation.count / self.steps:>9.4g}"
                f"  {operation.kind:<12}{operation.name[:80]}"
            )
        unlisted_operations = busiest_time.operations[_LISTED_COUNT:]
        if unlisted_operations:
            unlisted_seconds = sum(operation.seconds for operation in unlisted_operations) / self.steps
            yield f"{_time_text(unlisted_seconds):>10}  {len(unlisted_operations)} more"


def summary_of(folder: Any, steps: int) -> Summary:
    """Return the summary of the newest trace under a folder.

    Args:
        folder: the folder passed to `jax.profiler.start_trace`.
        steps: number of traced steps.

    Raises:
        UserError: there is no trace.
    """
    with newest_trace(folder) as profiles:
        return Summary(
            tuple(device_time for profile in profiles for device_time in device_times(profile.planes)), steps
        )


@contextlib.contextmanager
def newest_trace(folder: Any) -> Iterator[Iterator[Any]]:
    """Open the newest trace under a folder, as a context manager.

    The value of the context is an iterator over `ProfileData`, one for each traced process. The file of a process is
    read only when the iterator reaches it.

    Raises:
        UserError: there is no trace.
    """
    trace_dirs = sorted(Path(folder).glob("plugins/profile/*"))
    process_files = sorted(trace_dirs[-1].glob("*.xplane.pb")) if trace_dirs else []
    if not process_files:
        raise UserError(
            f"no trace in {folder}: expected plugins/profile/*/*.xplane.pb, as jax.profiler.start_trace writes"
        )
    from jax.profiler import ProfileData

    # the first use of ProfileData warns that its classes lack __module__; Python 3.12 crashes if warnings are errors
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield (ProfileData.from_file(str(file)) for file in process_files)


def device_events(plane: Any) -> Iterator[tuple[str, list[TracedEvent]]]:
    """Yield pairs (name of a device, list of the events of its operations on one line of the plane).

    A TPU's plane has all operations, some nested in others, in the line "XLA Ops". A GPU's plane has one line for each
    stream. The operations of CPU devices are among the host's events, each with the number of its device.
    """
    for line in plane.lines:
        is_tpu_line = plane.name.startswith("/device:TPU") and line.name == "XLA Ops"
        is_gpu_line = plane.name.startswith("/device:GPU") and line.name.startswith("Stream")
        if is_tpu_line or is_gpu_line:
            yield plane.name.removeprefix("/device:"), [traced_event(event) for event in line.events]
        elif plane.name == "/host:CPU":
            events_by_device: dict[int, list[TracedEvent]] = collections.defaultdict(list)
            for event in map(traced_event, line.events):
                if "hlo_op" in event.stats:
                    events_by_device[int(event.stats.get("device_ordinal", 0))].append(event)
            for device_number, events in events_by_device.items():
                yield f"CPU:{device_number}", events


def traced_event(event: Any) -> TracedEvent:
    """Convert an event of `ProfileData` to a `TracedEvent`."""
    # on a TPU, the event's name is a whole line of HLO, "%NAME = ..."
    name = str(event.name).split(" = ")[0].lstrip("%")
    return TracedEvent(name, dict(event.stats), event.start_ns, event.start_ns + event.duration_ns)


def device_times(planes: Iterable[Any]) -> list[DeviceTime]:
    """Return the `DeviceTime` of each device in a trace, sorted by the devices' names.

    Args:
        planes: `ProfileData.planes`.
    """
    # for each device, a list of events for each of its lines
    event_lists_by_device: dict[str, list[list[TracedEvent]]] = collections.defaultdict(list)
    for plane in planes:
        for device, line_events in device_events(plane):
            event_lists_by_device[device].append(line_events)
    return [
        _device_time(device, event_lists)
        for device, event_lists in sorted(event_lists_by_device.items())
        if any(event_lists)
    ]


def kind_of(name: str) -> OperationKind:
    """Return the kind of an operation, found from the words in its name.

    Example:
        >>> kind_of("all-gather-start.3"), kind_of("loop_convert_fusion"), kind_of("gemm_fusion_dot_1")
        ('collective', 'other', 'matmul')
    """
    if _COLLECTIVE.search(name):
        return "collective"
    if _MATMUL.search(name):
        return "matmul"
    return "copy" if _COPY.search(name) else "other"


def _device_time(device: str, events_by_line: list[list[TracedEvent]]) -> DeviceTime:
    """Return the `DeviceTime` of one device; `events_by_line` holds a list of events for each line of the device."""
    seconds_by_operation: dict[tuple[str, OperationKind], float] = collections.defaultdict(float)
    count_by_operation: collections.Counter[tuple[str, OperationKind]] = collections.Counter()
    for line_events in events_by_line:
        for event, self_ns in _events_and_self_ns(line_events):
            seconds_by_operation[event.name, event.kind] += self_ns * 1e-9
            count_by_operation[event.name, event.kind] += 1
    busy_ns, longest_gap_ns, latest_end_ns = 0.0, 0.0, None
    events = sorted((event for line_events in events_by_line for event in line_events), key=lambda event: event.start)
    for event in events:
        if latest_end_ns is None:
            latest_end_ns = event.start
        longest_gap_ns = max(longest_gap_ns, event.start - latest_end_ns)
        busy_ns += max(0.0, event.end - max(latest_end_ns, event.start))
        latest_end_ns = max(latest_end_ns, event.end)
    span_ns = (latest_end_ns or 0.0) - events[0].start
    operations = [
        DeviceOperation(name, kind, seconds, count_by_operation[name, kind])
        for (name, kind), seconds in seconds_by_operation.items()
    ]
    operations.sort(key=lambda operation: (-operation.seconds, operation.name))
    return DeviceTime(device, span_ns * 1e-9, busy_ns * 1e-9, longest_gap_ns * 1e-9, tuple(operations))


def _events_and_self_ns(line_events: list[TracedEvent]) -> Iterator[tuple[TracedEvent, float]]:
    """Yield pairs (event of a line, its self time in nanoseconds); self time excludes nested events."""
    nested_ns_by_index: dict[int, float] = collections.defaultdict(float)
    events = sorted(line_events, key=lambda event: (event.start, -event.end))
    # indices of the events that are still running when the next event starts, with the innermost one last
    enclosing_indices: list[int] = []
    for index, event in enumerate(events):
        while enclosing_indices and events[enclosing_indices[-1]].end <= event.start:
            enclosing_indices.pop()
        if enclosing_indices:
            nested_ns_by_index[enclosing_indices[-1]] += min(event.end, events[enclosing_indices[-1]].end) - event.start
        enclosing_indices.append(index)
    for index, event in enumerate(events):
        yield event, max(0.0, event.end - event.start - nested_ns_by_index[index])


def _time_text(seconds: float) -> str:
    """Return a time as text, with up to four digits and a unit from nanoseconds to seconds."""
    for unit, unit_seconds in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= unit_seconds:
            return f"{seconds / unit_seconds:.4g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
