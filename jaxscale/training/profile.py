"""Trace chosen steps with JAX's profiler, and summarize where their time went in a page of text.

The trace itself (`profile/plugins/...`, for TensorBoard or Perfetto) is JAX's; the summary is read from it with
`jax.profiler.ProfileData`, so nothing else has to be installed. An operation's time is its self time, without the
operations nested in it. A timeline and memory are left out.
"""

import collections
import dataclasses
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from jaxscale.errors import UserError
from jaxscale.records.storage import is_remote

Kind = Literal["matmul", "collective", "copy", "other"]
KINDS: tuple[Kind, ...] = ("matmul", "collective", "copy", "other")
FOLDER = "profile"
SUMMARY = "summary.txt"

_COLLECTIVE = re.compile(
    r"all-?reduce|all-?gather|reduce-?scatter|all-?to-?all|collective|nccl|\bsend|\brecv|psum|permute", re.IGNORECASE
)
# ynn is XLA:CPU's library for matrix products
_MATMUL = re.compile(
    r"\bdot|[_-]dot|conv(?!ert)|gemm|matmul|einsum|cublas|cutlass|xmma|wgmma|ynn|attention", re.IGNORECASE
)
_COPY = re.compile(r"\bcopy(?!.*fusion)|memcpy|memset|transfer|infeed|outfeed|host-?offload", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class ProfileRange:
    """Steps to trace: from `first` up to, but not including, `stop`.

    Example:
        >>> ProfileRange.parse("10:13")
        ProfileRange(first=10, stop=13)
        >>> str(ProfileRange.parse("10"))
        '10:11'
    """

    first: int
    stop: int

    def __post_init__(self) -> None:
        if not 1 <= self.first < self.stop:
            raise UserError(
                f"profile {self.first}:{self.stop}: expected FIRST:STOP with 1 <= FIRST < STOP, such as 10:13 for the "
                "steps 10, 11 and 12"
            )

    @classmethod
    def parse(cls, text: str) -> "ProfileRange":
        """The range of "10:13" (steps 10, 11, 12) or "10" (that step alone)."""
        match = re.fullmatch(r"\s*(\d{1,9})\s*(?::\s*(\d{1,9})\s*)?", text)
        if match is None:
            raise UserError(f"profile {text!r}: expected FIRST:STOP, such as 10:13 for the steps 10, 11 and 12")
        first = int(match[1])
        return cls(first, first + 1 if match[2] is None else int(match[2]))

    def within(self, steps: int) -> "ProfileRange":
        """This range, if a run of so many steps reaches it.

        Raises:
            UserError: it begins beyond the last step.
        """
        if self.first > steps:
            raise UserError(f"profile {self}: the run has {steps} steps, expected FIRST from 1 to {steps}")
        return self

    def __str__(self) -> str:
        return f"{self.first}:{self.stop}"


@dataclasses.dataclass(frozen=True)
class DeviceOperation:
    """One operation of a device, summed over its executions.

    Args:
        name: its name in the compiled program, or the kernel's.
        kind: its kind of work.
        seconds: self time of all executions.
        count: executions.
    """

    name: str
    kind: Kind
    seconds: float
    count: int


@dataclasses.dataclass(frozen=True)
class DeviceTime:
    """The time of one device by operation.

    Args:
        device: its name in the trace.
        span: seconds from the first operation's start to the last one's end.
        busy: seconds of the span in which at least one operation ran.
        longest_gap: seconds of the longest wait between two operations.
        operations: in order of falling self time.
    """

    device: str
    span: float
    busy: float
    longest_gap: float
    operations: tuple[DeviceOperation, ...]

    @property
    def seconds(self) -> float:
        """Self time of all operations; more than `busy` where some ran at the same time."""
        return sum(operation.seconds for operation in self.operations)

    @property
    def busy_share(self) -> float:
        """Share of the span in which the device was busy, 0 to 1."""
        return self.busy / self.span if self.span else 0.0

    def share(self, kind: Kind) -> float:
        """Share of the operations' time in operations of a kind, 0 to 1."""
        part = sum(operation.seconds for operation in self.operations if operation.kind == kind)
        return part / self.seconds if self.seconds else 0.0


@dataclasses.dataclass(frozen=True)
class Summary:
    """The time of a trace, by device.

    Args:
        devices: the devices of the traced processes.
        steps: how many steps were traced; None if unknown.
    """

    devices: tuple[DeviceTime, ...]
    steps: int | None = None

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self, top: int = 12) -> Iterator[str]:
        """The lines of the page: shares of every device, then the `top` operations of the busiest."""
        if not self.devices:
            yield "no operation of a device is in the trace"
            return
        steps = self.steps or 1
        yield f"{self.steps} step(s) traced; seconds are per step" if self.steps else "seconds are of the whole trace"
        yield ""
        yield f"{'device':<16}{'span':>10}{'busy':>8}{'longest gap':>14}" + "".join(f"{kind:>12}" for kind in KINDS)
        for device in self.devices:
            shares = "".join(f"{device.share(kind):>12.1%}" for kind in KINDS)
            span, gap = _seconds(device.span / steps), _seconds(device.longest_gap)
            yield f"{device.device:<16}{span:>10}{device.busy_share:>8.1%}{gap:>14}{shares}"
        busiest = max(self.devices, key=lambda device: device.busy)
        yield ""
        yield f"{busiest.device}: operations by self time"
        yield f"{'seconds':>10}{'share':>8}{'times':>9}  {'kind':<12}name"
        for operation in busiest.operations[:top]:
            share = operation.seconds / busiest.seconds if busiest.seconds else 0.0
            yield (
                f"{_seconds(operation.seconds / steps):>10}{share:>8.1%}{operation.count / steps:>9.4g}"
                f"  {operation.kind:<12}{operation.name[:80]}"
            )
        remainder = busiest.operations[top:]
        if remainder:
            yield f"{_seconds(sum(operation.seconds for operation in remainder) / steps):>10}  {len(remainder)} more"


class Profiler:
    """Traces a range of steps of a training loop, and writes the summary beside the trace.

    The loop calls `before` every step, `after` when `ends` is true or the run stops inside the range, and `close` in
    the end. The trace includes a step that is still running when it starts.

    Args:
        steps: the steps to trace; a run that is resumed inside the range traces its remainder.
    """

    def __init__(self, steps: ProfileRange) -> None:
        self.steps = steps
        self._started_at: int | None = None
        self._folder = Path()

    @property
    def running(self) -> bool:
        """Whether a trace is running."""
        return self._started_at is not None

    def missed(self, step: int) -> bool:
        """Whether the whole range lies behind a run that continues after `step`."""
        return self.steps.stop <= step + 1

    def before(self, step: int, folder: Any) -> None:
        """Start tracing if the next step is in the range.

        Args:
            step: number of the next step.
            folder: the run's folder; the trace goes into its subfolder "profile".
        """
        if self.running or not self.steps.first <= step < self.steps.stop:
            return
        import jax

        self._started_at = step
        self._folder = Path(tempfile.mkdtemp()) if is_remote(folder) else Path(folder) / FOLDER
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # it slows the host, and the summary does not use it
        jax.profiler.start_trace(self._folder, profiler_options=options)

    def ends(self, step: int) -> bool:
        """Whether a trace is running and `step`, which was just dispatched, is the last of the range."""
        return self.running and step >= self.steps.stop - 1

    def after(
        self,
        step: int,
        folder: Any,
        state: Any,
        event: Callable[..., None] | None = None,
        say: Callable[[str], None] | None = None,
        beside: Mapping[str, str] | None = None,
    ) -> Summary | None:
        """Stop tracing once `state` is ready, write the summary, and report it.

        Args:
            step: number of the step just dispatched.
            folder: the run's folder.
            state: the state that the step returns; waited for, so that the trace holds the whole step.
            event: called as `event("profile", ...)` with the figures of the busiest device.
            say: called with the summary's text.
            beside: further files for the trace's folder: text by name.

        Returns:
            The summary; None where no trace was running.
        """
        import jax

        if self._started_at is None:
            return None
        jax.block_until_ready(state)
        first, self._started_at = self._started_at, None
        jax.profiler.stop_trace()
        summary = summary_of(self._folder, steps=step + 1 - first)
        if jax.process_index() == 0:
            (self._folder / SUMMARY).write_text(f"{summary}\n")
            for name, text in (beside or {}).items():
                (self._folder / name).write_text(text)
        if is_remote(folder):
            _upload(self._folder, folder / FOLDER)
            shutil.rmtree(self._folder)
        busiest = max(summary.devices, key=lambda device: device.busy, default=None)
        if event is not None and busiest is not None:
            shares: dict[str, float] = {kind: round(busiest.share(kind), 4) for kind in KINDS}
            shares["busy"] = round(busiest.busy_share, 4)
            event("profile", steps=f"{first}:{step + 1}", file=f"{FOLDER}/{SUMMARY}", **shares)
        if say is not None:
            say(str(summary))
        return summary

    def close(self) -> None:
        """Stop a trace that a failed step has left running, without a summary: JAX runs one trace at a time."""
        if self.running:
            import jax

            self._started_at = None
            jax.profiler.stop_trace()
            if self._folder.name != FOLDER:  # a temporary folder, of a run in a bucket
                shutil.rmtree(self._folder)


def summary_of(folder: Any, steps: int | None = None) -> Summary:
    """The summary of the newest trace under a folder.

    Args:
        folder: the folder passed to `jax.profiler.start_trace`.
        steps: how many steps were traced, to print times per step.

    Raises:
        UserError: there is no trace.
    """
    files = newest_trace(folder)
    from jax.profiler import ProfileData

    # making ProfileData's classes warns about their lack of __module__, and kills Python 3.12 where that is an error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        times = [time for file in files for time in device_times(ProfileData.from_file(str(file)).planes)]
    return Summary(tuple(times), steps)


def newest_trace(folder: Any) -> list[Path]:
    """The files of the newest trace under a folder, one for each process.

    Raises:
        UserError: there is no trace.
    """
    sessions = sorted(Path(folder).glob("plugins/profile/*"))
    files = sorted(sessions[-1].glob("*.xplane.pb")) if sessions else []
    if not files:
        raise UserError(
            f"no trace in {folder}: expected plugins/profile/*/*.xplane.pb, as jax.profiler.start_trace writes"
        )
    return files


def device_times(planes: Iterable[Any]) -> list[DeviceTime]:
    """The times of the devices of a trace.

    A TPU's plane has its operations, nested, in the line "XLA Ops"; a GPU's has a line per stream; the CPU's operations
    are among the host's events, and carry their device's number.

    Args:
        planes: `ProfileData.planes`.
    """
    timelines: dict[str, list[list[_Event]]] = collections.defaultdict(list)
    for plane in planes:
        name = plane.name.removeprefix("/device:")
        for line in plane.lines:
            tpu = plane.name.startswith("/device:TPU") and line.name == "XLA Ops"
            gpu = plane.name.startswith("/device:GPU") and line.name.startswith("Stream")
            if tpu or gpu:
                timelines[name].append([_event(event) for event in line.events])
            elif plane.name == "/host:CPU":
                for device, events in _host_operations(line.events).items():
                    timelines[f"CPU:{device}"].append(events)
    return [_device_time(device, lines) for device, lines in sorted(timelines.items()) if any(lines)]


@dataclasses.dataclass(frozen=True)
class _Event:
    name: str
    kind: Kind
    start: float  # nanoseconds
    end: float


def _event(event: Any) -> _Event:
    stats = dict(event.stats)
    # a TPU names an operation by its whole line of HLO
    name = str(event.name).split(" = ")[0].lstrip("%")
    text = " ".join(str(part) for part in (name, stats.get("hlo_op", ""), stats.get("hlo_category", "")))
    return _Event(name, kind_of(text), event.start_ns, event.start_ns + event.duration_ns)


def _host_operations(events: Iterable[Any]) -> dict[int, list[_Event]]:
    operations: dict[int, list[_Event]] = collections.defaultdict(list)
    for event in events:
        stats = dict(event.stats)
        if "hlo_op" in stats:
            operations[int(stats.get("device_ordinal", 0))].append(_event(event))
    return operations


def kind_of(name: str) -> Kind:
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


def _device_time(device: str, lines: list[list[_Event]]) -> DeviceTime:
    seconds: dict[tuple[str, Kind], float] = collections.defaultdict(float)
    counts: collections.Counter[tuple[str, Kind]] = collections.Counter()
    for line in lines:
        for event, self_time in _self_times(line):
            seconds[event.name, event.kind] += self_time * 1e-9
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
        DeviceOperation(name, kind, self_time, counts[name, kind]) for (name, kind), self_time in seconds.items()
    ]
    operations.sort(key=lambda operation: (-operation.seconds, operation.name))
    return DeviceTime(device, span * 1e-9, busy * 1e-9, longest_gap * 1e-9, tuple(operations))


def _self_times(line: list[_Event]) -> Iterator[tuple[_Event, float]]:
    """Each event of a line, with its nanoseconds outside nested events."""
    inner_times: dict[int, float] = collections.defaultdict(float)
    events = sorted(line, key=lambda event: (event.start, -event.end))
    stack: list[int] = []
    for i, event in enumerate(events):
        while stack and events[stack[-1]].end <= event.start:
            stack.pop()
        if stack:
            inner_times[stack[-1]] += min(event.end, events[stack[-1]].end) - event.start
        stack.append(i)
    for i, event in enumerate(events):
        yield event, max(0.0, event.end - event.start - inner_times[i])


def _upload(source: Path, target: Any) -> None:
    for file in sorted(source.rglob("*")):
        if file.is_file():
            target_file = target / str(file.relative_to(source))
            target_file.parent.mkdir(parents=True, exist_ok=True)
            target_file.write_bytes(file.read_bytes())


def _seconds(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
