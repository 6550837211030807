"""The operations of a trace of JAX's profiler, and a page of text about where the time of each device went.

A trace is read with `jax.profiler.ProfileData`, so nothing else has to be installed. An operation's time is its self
time, without the operations nested in it. A timeline and memory are left out.
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


_SHOWN = 12
"""Number of operations of the busiest device that a summary lists."""


@dataclasses.dataclass(frozen=True)
class TracedEvent:
    """One execution of an operation on a device.

    Args:
        name: name of the operation in the compiled program, or of the kernel.
        stats: further values that the profiler recorded, by the profiler's names.
        start: start of the execution in nanoseconds on the clock of the trace.
        end: end of the execution in nanoseconds on the same clock.
    """

    name: str
    stats: dict[str, Any]
    start: float
    end: float

    @functools.cached_property
    def kind(self) -> OperationKind:
        """Kind of the operation, by its name and its category in HLO."""
        words = (self.name, self.stats.get("hlo_op", ""), self.stats.get("hlo_category", ""))
        return kind_of(" ".join(map(str, words)))


@dataclasses.dataclass(frozen=True)
class DeviceOperation:
    """One operation of a device, summed over its executions.

    Args:
        name: name of the operation in the compiled program, or of the kernel.
        kind: kind of the operation.
        seconds: self time of all executions.
        count: number of executions.
    """

    name: str
    kind: OperationKind
    seconds: float
    count: int


@dataclasses.dataclass(frozen=True)
class DeviceTime:
    """The time of one device by operation.

    Args:
        device: name of the device in the trace.
        span: seconds from the first operation's start to the last one's end.
        busy: seconds of the span in which at least one operation ran.
        longest_gap: seconds of the longest wait between two operations.
        operations: the device's operations, the one with the most self time first.
    """

    device: str
    span: float
    busy: float
    longest_gap: float
    operations: tuple[DeviceOperation, ...]

    @property
    def seconds(self) -> float:
        """Self time of all operations; more than `busy` if some ran at the same time."""
        return sum(operation.seconds for operation in self.operations)

    @property
    def busy_share(self) -> float:
        """Share of the span in which the device was busy, 0 to 1."""
        return self.busy / self.span if self.span else 0.0

    def share(self, kind: OperationKind) -> float:
        """Share of the operations' self time that operations of a kind took, 0 to 1."""
        kind_seconds = sum(operation.seconds for operation in self.operations if operation.kind == kind)
        return kind_seconds / self.seconds if self.seconds else 0.0


@dataclasses.dataclass(frozen=True)
class Summary:
    """Times of the devices in a trace; its text is the page.

    Args:
        devices: the devices of the traced processes.
        steps: number of traced steps.
    """

    devices: tuple[DeviceTime, ...]
    steps: int

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """The lines of the page: shares of every device, then the longest operations of the busiest device."""
        if not self.devices:
            yield "the trace has no operation of a device"
            return
        yield f"{self.steps} step(s) traced; seconds are per step"
        yield ""
        yield f"{'device':<16}{'span':>10}{'busy':>8}{'longest gap':>14}" + "".join(f"{kind:>12}" for kind in KINDS)
        for device in self.devices:
            shares = "".join(f"{device.share(kind):>12.1%}" for kind in KINDS)
            span, gap = _seconds(device.span / self.steps), _seconds(device.longest_gap)
            yield f"{device.device:<16}{span:>10}{device.busy_share:>8.1%}{gap:>14}{shares}"
        busiest = max(self.devices, key=lambda device: device.busy)
        yield ""
        yield f"{busiest.device}: operations by self time"
        yield f"{'seconds':>10}{'share':>8}{'times':>9}  {'kind':<12}name"
        for operation in busiest.operations[:_SHOWN]:
            share = operation.seconds / busiest.seconds if busiest.seconds else 0.0
            yield (
                f"{_seconds(operation.seconds / self.steps):>10}{share:>8.1%}{operation.count / self.steps:>9.4g}"
                f"  {operation.kind:<12}{operation.name[:80]}"
            )
        remainder = busiest.operations[_SHOWN:]
        if remainder:
            seconds = sum(operation.seconds for operation in remainder) / self.steps
            yield f"{_seconds(seconds):>10}  {len(remainder)} more"


def summary_of(folder: Any, steps: int) -> Summary:
    """The summary of the newest trace under a folder.

    Args:
        folder: the folder passed to `jax.profiler.start_trace`.
        steps: number of traced steps.

    Raises:
        UserError: there is no trace.
    """
    with newest_trace(folder) as profiles:
        return Summary(tuple(time for profile in profiles for time in device_times(profile.planes)), steps)


@contextlib.contextmanager
def newest_trace(folder: Any) -> Iterator[Iterator[Any]]:
    """A context with the `ProfileData` of each process in the newest trace under a folder, read one after the other.

    Raises:
        UserError: there is no trace.
    """
    sessions = sorted(Path(folder).glob("plugins/profile/*"))
    files = sorted(sessions[-1].glob("*.xplane.pb")) if sessions else []
    if not files:
        raise UserError(
            f"no trace in {folder}: expected plugins/profile/*/*.xplane.pb, as jax.profiler.start_trace writes"
        )
    from jax.profiler import ProfileData

    # making ProfileData's classes warns about their lack of __module__, and crashes Python 3.12 if warnings are errors
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield (ProfileData.from_file(str(file)) for file in files)


def operations_of(plane: Any) -> Iterator[tuple[str, list[TracedEvent]]]:
    """Yield the name of a device and its operations, for each line of a plane (a table of the trace) with operations.

    A TPU's plane has its operations, nested, in the line "XLA Ops"; a GPU's has a line per stream; the CPU's operations
    are among the host's events, with the number of their device.
    """
    for line in plane.lines:
        is_tpu = plane.name.startswith("/device:TPU") and line.name == "XLA Ops"
        is_gpu = plane.name.startswith("/device:GPU") and line.name.startswith("Stream")
        if is_tpu or is_gpu:
            yield plane.name.removeprefix("/device:"), [traced_event(event) for event in line.events]
        elif plane.name == "/host:CPU":
            operations_by_device: dict[int, list[TracedEvent]] = collections.defaultdict(list)
            for operation in map(traced_event, line.events):
                if "hlo_op" in operation.stats:
                    operations_by_device[int(operation.stats.get("device_ordinal", 0))].append(operation)
            for device, operations in operations_by_device.items():
                yield f"CPU:{device}", operations


def traced_event(event: Any) -> TracedEvent:
    """An event of `ProfileData` as a `TracedEvent`, whose name is cut from the whole line of HLO that a TPU records."""
    name = str(event.name).split(" = ")[0].lstrip("%")
    return TracedEvent(name, dict(event.stats), event.start_ns, event.start_ns + event.duration_ns)


def device_times(planes: Iterable[Any]) -> list[DeviceTime]:
    """The times of the devices of a trace.

    Args:
        planes: `ProfileData.planes`, the tables of a trace.
    """
    lines_by_device: dict[str, list[list[TracedEvent]]] = collections.defaultdict(list)
    for plane in planes:
        for device, operations in operations_of(plane):
            lines_by_device[device].append(operations)
    return [_device_time(device, lines) for device, lines in sorted(lines_by_device.items()) if any(lines)]


def kind_of(name: str) -> OperationKind:
    """The kind of an operation, by the words of its name.

    Example:
        >>> kind_of("all-gather-start.3"), kind_of("loop_convert_fusion"), kind_of("gemm_fusion_dot_1")
        ('collective', 'other', 'matmul')
    """
    if _COLLECTIVE.search(name):
        return "collective"
    if _MATMUL.search(name):
        return "matmul"
    return "copy" if _COPY.search(name) else "other"


def _device_time(device: str, lines: list[list[TracedEvent]]) -> DeviceTime:
    """The time of one device, from the operations of each of its lines."""
    self_seconds: dict[tuple[str, OperationKind], float] = collections.defaultdict(float)
    counts: collections.Counter[tuple[str, OperationKind]] = collections.Counter()
    for line in lines:
        for event, self_nanoseconds in _self_times(line):
            self_seconds[event.name, event.kind] += self_nanoseconds * 1e-9
            counts[event.name, event.kind] += 1
    busy, longest_gap, end = 0.0, 0.0, None
    events = sorted((event for line in lines for event in line), key=lambda event: event.start)
    for event in events:
        if end is None:
            end = event.start
        longest_gap = max(longest_gap, event.start - end)
        busy += max(0.0, event.end - max(end, event.start))
        end = max(end, event.end)
    span = (end or 0.0) - events[0].start
    operations = [
        DeviceOperation(name, kind, seconds, counts[name, kind]) for (name, kind), seconds in self_seconds.items()
    ]
    operations.sort(key=lambda operation: (-operation.seconds, operation.name))
    return DeviceTime(device, span * 1e-9, busy * 1e-9, longest_gap * 1e-9, tuple(operations))


def _self_times(line: list[TracedEvent]) -> Iterator[tuple[TracedEvent, float]]:
    """Each event of a line, with its nanoseconds outside nested events."""
    nested_times: dict[int, float] = collections.defaultdict(float)
    events = sorted(line, key=lambda event: (event.start, -event.end))
    open_indices: list[int] = []
    for i, event in enumerate(events):
        while open_indices and events[open_indices[-1]].end <= event.start:
            open_indices.pop()
        if open_indices:
            nested_times[open_indices[-1]] += min(event.end, events[open_indices[-1]].end) - event.start
        open_indices.append(i)
    for i, event in enumerate(events):
        yield event, max(0.0, event.end - event.start - nested_times[i])


def _seconds(seconds: float) -> str:
    """Seconds with four digits and a unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
