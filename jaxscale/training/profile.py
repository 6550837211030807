"""Trace chosen steps with JAX's profiler, and say in a page of text where their time went.

The trace itself (`profile/plugins/...`, for TensorBoard or Perfetto) is JAX's; the summary is read from it with
`jax.profiler.ProfileData`, so nothing else has to be installed. An operation's time is its self time: what the
operations inside it take is theirs. It leaves out a timeline, and memory.
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
from jaxscale.training.storage import is_remote

Kind = Literal["matmul", "collective", "copy", "other"]
KINDS: tuple[Kind, ...] = ("matmul", "collective", "copy", "other")
FOLDER = "profile"
SUMMARY = "summary.txt"

_COLLECTIVE = re.compile(
    r"all-?reduce|all-?gather|reduce-?scatter|all-?to-?all|collective|nccl|\bsend|\brecv|psum|permute", re.IGNORECASE
)
# ynn is the library that XLA:CPU hands products to
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
        """This range, if a run of so many steps comes to it.

        Raises:
            UserError: it begins beyond the last step.
        """
        if self.first > steps:
            raise UserError(f"profile {self}: the run has {steps} steps, expected FIRST from 1 to {steps}")
        return self

    def __str__(self) -> str:
        return f"{self.first}:{self.stop}"


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a device, all its executions together.

    Args:
        name: its name in the compiled program, or the kernel's.
        kind: what it does.
        seconds: self time of all executions.
        count: executions.
    """

    name: str
    kind: Kind
    seconds: float
    count: int


@dataclasses.dataclass(frozen=True)
class DeviceTime:
    """Where the time of one device went.

    Args:
        device: its name in the trace.
        span: seconds from the first operation's start to the last one's end.
        busy: seconds of it in which at least one operation ran.
        longest_gap: seconds of the longest wait between two operations.
        operations: from the dearest to the cheapest.
    """

    device: str
    span: float
    busy: float
    longest_gap: float
    operations: tuple[Operation, ...]

    @property
    def seconds(self) -> float:
        """Self time of all operations; more than `busy` where some ran at the same time."""
        return sum(operation.seconds for operation in self.operations)

    @property
    def busy_share(self) -> float:
        """Part of the span in which the device worked, 0 to 1."""
        return self.busy / self.span if self.span else 0.0

    def share(self, kind: Kind) -> float:
        """Part of the operations' time that is of a kind, 0 to 1."""
        part = sum(operation.seconds for operation in self.operations if operation.kind == kind)
        return part / self.seconds if self.seconds else 0.0


@dataclasses.dataclass(frozen=True)
class Summary:
    """Where the time of a trace went, device by device.

    Args:
        devices: those that the traced process saw.
        steps: how many steps were traced; None if unknown.
    """

    devices: tuple[DeviceTime, ...]
    steps: int | None = None

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self, top: int = 12) -> Iterator[str]:
        """The page of text: shares of every device, then the `top` operations of the busiest."""
        if not self.devices:
            yield "no operation of a device is in the trace"
            return
        steps = self.steps or 1
        yield f"{self.steps} step(s) traced; seconds are per step" if self.steps else "seconds are of the whole trace"
        yield ""
        yield f"{'device':<16}{'span':>10}{'busy':>8}{'longest gap':>14}" + "".join(f"{kind:>12}" for kind in KINDS)
        for time in self.devices:
            shares = "".join(f"{time.share(kind):>12.1%}" for kind in KINDS)
            span, gap = _seconds(time.span / steps), _seconds(time.longest_gap)
            yield f"{time.device:<16}{span:>10}{time.busy_share:>8.1%}{gap:>14}{shares}"
        dearest = max(self.devices, key=lambda time: time.busy)
        yield ""
        yield f"{dearest.device}: operations by self time"
        yield f"{'seconds':>10}{'share':>8}{'times':>9}  {'kind':<12}name"
        for operation in dearest.operations[:top]:
            share = operation.seconds / dearest.seconds if dearest.seconds else 0.0
            yield (
                f"{_seconds(operation.seconds / steps):>10}{share:>8.1%}{operation.count / steps:>9.4g}"
                f"  {operation.kind:<12}{operation.name[:80]}"
            )
        rest = dearest.operations[top:]
        if rest:
            yield f"{_seconds(sum(operation.seconds for operation in rest) / steps):>10}  {len(rest)} more"


class Profiler:
    """Traces a range of steps of a training loop, and writes the summary beside the trace.

    The loop calls `before` every step and, where `ends` says so or the run stops inside the range, `after` it; and
    `close` however it ends. A step that is still running when the trace starts shows in it.

    Args:
        steps: the steps to trace; where a run is resumed inside the range, the rest of it.
    """

    def __init__(self, steps: ProfileRange) -> None:
        self.steps = steps
        self._started_at: int | None = None
        self._folder = Path()

    @property
    def running(self) -> bool:
        """Whether a trace has been started, and not stopped."""
        return self._started_at is not None

    def missed(self, step: int) -> bool:
        """Whether the whole range lies behind a run that continues after `step`."""
        return self.steps.stop <= step + 1

    def before(self, step: int, folder: Any) -> None:
        """Start tracing if `step`, which comes next, is the first of the range.

        Args:
            step: number of the step that comes next.
            folder: the run's folder; the trace goes into its subfolder "profile".
        """
        if self.running or not self.steps.first <= step < self.steps.stop:
            return
        import jax

        self._started_at = step
        self._folder = Path(tempfile.mkdtemp()) if is_remote(folder) else Path(folder) / FOLDER
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # it slows the host, and the summary has no use for it
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
        """Stop tracing when `state` is there, write the summary, and tell of it.

        Args:
            step: number of the step just dispatched.
            folder: the run's folder.
            state: what the step returns; waited for, so that the trace holds the whole step.
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
        found = summary_of(self._folder, steps=step + 1 - first)
        if jax.process_index() == 0:
            (self._folder / SUMMARY).write_text(f"{found}\n")
            for name, text in (beside or {}).items():
                (self._folder / name).write_text(text)
        if is_remote(folder):
            _upload(self._folder, folder / FOLDER)
            shutil.rmtree(self._folder)
        dearest = max(found.devices, key=lambda time: time.busy, default=None)
        if event is not None and dearest is not None:
            shares: dict[str, float] = {kind: round(dearest.share(kind), 4) for kind in KINDS}
            shares["busy"] = round(dearest.busy_share, 4)
            event("profile", steps=f"{first}:{step + 1}", file=f"{FOLDER}/{SUMMARY}", **shares)
        if say is not None:
            say(str(found))
        return found

    def close(self) -> None:
        """Stop a trace that a failed step has left running, without a summary: JAX runs one trace at a time."""
        if self.running:
            import jax

            self._started_at = None
            jax.profiler.stop_trace()
            if self._folder.name != FOLDER:  # what was to be uploaded
                shutil.rmtree(self._folder)


def summary_of(folder: Any, steps: int | None = None) -> Summary:
    """Where the time went, from the newest trace under a folder.

    Args:
        folder: the one given to `jax.profiler.start_trace`.
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
    """The devices of a trace.

    A TPU's plane has its operations, nested, in the line "XLA Ops"; a GPU's has a line per stream; the CPU's operations
    are among the host's events, and carry their device's number.

    Args:
        planes: `ProfileData.planes`.
    """
    found: dict[str, list[list[_Event]]] = collections.defaultdict(list)
    for plane in planes:
        name = plane.name.removeprefix("/device:")
        for line in plane.lines:
            tpu = plane.name.startswith("/device:TPU") and line.name == "XLA Ops"
            gpu = plane.name.startswith("/device:GPU") and line.name.startswith("Stream")
            if tpu or gpu:
                found[name].append([_event(event) for event in line.events])
            elif plane.name == "/host:CPU":
                for device, events in _host_operations(line.events).items():
                    found[f"CPU:{device}"].append(events)
    return [_device_time(device, lines) for device, lines in sorted(found.items()) if any(lines)]


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
    words = " ".join(str(word) for word in (name, stats.get("hlo_op", ""), stats.get("hlo_category", "")))
    return _Event(name, kind_of(words), event.start_ns, event.start_ns + event.duration_ns)


def _host_operations(events: Iterable[Any]) -> dict[int, list[_Event]]:
    found: dict[int, list[_Event]] = collections.defaultdict(list)
    for event in events:
        stats = dict(event.stats)
        if "hlo_op" in stats:
            found[int(stats.get("device_ordinal", 0))].append(_event(event))
    return found


def kind_of(name: str) -> Kind:
    """What an operation does, by the words of its name.

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
        for event, own in _self_times(line):
            seconds[event.name, event.kind] += own * 1e-9
            counts[event.name, event.kind] += 1
    busy, longest, end = 0.0, 0.0, None
    events = sorted((event for line in lines for event in line), key=lambda event: event.start)
    for event in events:
        if end is None:
            end = event.start
        longest = max(longest, event.start - end)
        busy += max(0.0, event.end - max(end, event.start))
        end = max(end, event.end)
    span = (end or 0.0) - events[0].start
    operations = [Operation(name, kind, own, counts[name, kind]) for (name, kind), own in seconds.items()]
    operations.sort(key=lambda operation: (-operation.seconds, operation.name))
    return DeviceTime(device, span * 1e-9, busy * 1e-9, longest * 1e-9, tuple(operations))


def _self_times(line: list[_Event]) -> Iterator[tuple[_Event, float]]:
    """Events of one line, which nest, with the nanoseconds that are not of an event inside."""
    inside: dict[int, float] = collections.defaultdict(float)
    ordered = sorted(line, key=lambda event: (event.start, -event.end))
    open_: list[int] = []
    for i, event in enumerate(ordered):
        while open_ and ordered[open_[-1]].end <= event.start:
            open_.pop()
        if open_:
            inside[open_[-1]] += min(event.end, ordered[open_[-1]].end) - event.start
        open_.append(i)
    for i, event in enumerate(ordered):
        yield event, max(0.0, event.end - event.start - inside[i])


def _upload(source: Path, target: Any) -> None:
    for file in sorted(source.rglob("*")):
        if file.is_file():
            copy = target / str(file.relative_to(source))
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())


def _seconds(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
