"""Seconds of a compiled step by the compiler's own estimates, and by the links of the platform: its schedule, timed.

    compute       estimated cycles / clock
    kernels       roofline of the FLOP and bytes that a kernel declares, at the chip's efficiency
    memory        bytes / bandwidth of instructions without an estimate, such as gathers from tables
    transfers     collectives by `links.collective_seconds`, copies by the bandwidth of memory or of the host's link;
                  the program waits for what has not ended when it needs the result

Transfers over the same links follow one another. A loop runs as often as its trip count says, and every trip starts
with idle links; a message between slices ends before the next instruction. A pipelined step has no such seconds,
because its ranks run different branches. Left out: what a transfer takes from the memory's bandwidth beside a product,
and skew between devices.
"""

import collections
import dataclasses
from collections.abc import Hashable, Iterator

from jaxscale.compiler.schedule import ProgramEvent, ProgramSchedule
from jaxscale.planning.search.links import collective_seconds
from jaxscale.planning.search.step_seconds import StepSeconds
from jaxscale.platforms.platform import Platform
from jaxscale.programs import roofline
from jaxscale.recipe.plan import Plan
from jaxscale.sharding.mesh import MeshSpec

COMPUTE = "products and fusions"
"""Item of the instructions for which the compiler estimates cycles."""


def compiler_seconds(schedule: ProgramSchedule | None, plan: Plan, platform: Platform) -> StepSeconds | None:
    """Return the seconds of a compiled step by its schedule; `None` if they cannot be known.

    Args:
        schedule: schedule of the step's program.
        plan: plan of the step, with a mesh.
        platform: platform that the step was compiled for.

    Example:
        >>> gather = ProgramEvent("start", bytes=10**9, name="g", transfer="all-gather", axes=("fsdp",))
        >>> product, done = ProgramEvent("compute", cycles=15_000_000), ProgramEvent("done", name="g")
        >>> events = (ProgramEvent("compute", cycles=1_500_000), gather, product, done)
        >>> schedule = ProgramSchedule("main", {"main": events})
        >>> seconds = compiler_seconds(schedule, Plan(mesh="fsdp:4"), Platform.parse("tpu v5e:2x2"))
        >>> f"{seconds.total:.4f} s, of which {seconds.items[COMPUTE]:.4f} compute; {seconds.hidden:.4f} s beside it"
        '0.0110 s, of which 0.0110 compute; 0.0075 s beside it'
    """
    if schedule is None or plan.mesh is None or plan.pipeline is not None or platform.chip.clock is None:
        return None
    timer = _Timer(schedule, plan.mesh, platform)
    run = timer.run(schedule.entry)
    waits = {name: seconds for name, seconds in run.waits.items() if seconds}
    return StepSeconds({COMPUTE: run.compute, **waits}, run.hidden)


def clock_text(seconds: StepSeconds | None, plan: Plan, platform: Platform) -> str:
    """Return the seconds of a compiled step by its compiler's estimates as text, or why there are none.

    Args:
        seconds: result of `compiler_seconds`.
        plan: plan of the step.
        platform: platform that the step was compiled for.

    Example:
        >>> clock_text(StepSeconds({COMPUTE: 0.02}), Plan(mesh="fsdp:4"), Platform.parse("tpu v5e:2x2"))
        "by the compiler's clock: 20.0 ms a step: products and fusions 100%"
    """
    reason = "the program has no estimates"
    if seconds is not None:
        return f"by the compiler's clock: {seconds}"
    if platform.chip.clock is None:
        reason = "only the compiler of TPUs estimates cycles"
    elif plan.pipeline is not None:
        reason = "the ranks of a pipeline run different branches"
    return f"by the compiler's clock: no seconds; {reason}"


@dataclasses.dataclass
class _Run:
    """Seconds of one run of a computation.

    Args:
        compute: seconds by estimated cycles.
        waits: seconds of everything else, by item.
        hidden: seconds of transfers between devices, or with the host, beside other work.
    """

    compute: float = 0.0
    waits: dict[str, float] = dataclasses.field(default_factory=lambda: collections.defaultdict(float))
    hidden: float = 0.0

    @property
    def total(self) -> float:
        """The seconds of the run."""
        return self.compute + sum(self.waits.values())

    def add(self, run: "_Run", count: int) -> None:
        """Add several runs of a loop's body."""
        self.compute += count * run.compute
        self.hidden += count * run.hidden
        for name, seconds in run.waits.items():
            self.waits[name] += count * seconds


@dataclasses.dataclass(frozen=True)
class _Transfer:
    """A transfer that has started: its item, its seconds, and when it ends."""

    item: str
    seconds: float
    end: float


@dataclasses.dataclass(frozen=True)
class _Timer:
    """Times the computations of a schedule."""

    schedule: ProgramSchedule
    mesh: MeshSpec
    platform: Platform

    def run(self, name: str) -> _Run:
        """Return the seconds of one run of a computation, with idle links at its start."""
        chip, run = self.platform.chip, _Run()
        assert chip.clock is not None
        free_at: dict[Hashable, float] = collections.defaultdict(float)  # when a link has sent what was given to it
        in_flight: dict[str, list[_Transfer]] = collections.defaultdict(list)
        for event in self.schedule.computations[name]:
            if event.kind == "compute":
                run.compute += event.cycles / chip.clock
            elif event.kind == "kernel":
                run.waits["kernels"] += roofline.seconds(chip, event.flop, event.bytes)
            elif event.kind == "memory":
                run.waits["memory"] += roofline.seconds(chip, 0, event.bytes)
            elif event.kind == "loop":
                run.add(self.run(event.name), event.trips)
            elif event.kind == "start":
                seconds, links = self._seconds(event), list(self._links(event))
                end = seconds + max([run.total, *(free_at[link] for link in links)])
                free_at |= dict.fromkeys(links, end)
                in_flight[event.name].append(_Transfer(self._item(event), seconds, end))
            else:
                self._wait(run, in_flight.pop(event.name, []))
        for transfers in in_flight.values():  # those whose end is in another computation
            self._wait(run, transfers)
        return run

    @staticmethod
    def _wait(run: _Run, transfers: list[_Transfer]) -> None:
        """Let a run wait for the end of transfers."""
        for transfer in transfers:
            wait = max(0.0, transfer.end - run.total)
            run.waits[transfer.item] += wait
            if transfer.item != "memory":
                run.hidden += max(0.0, transfer.seconds - wait)

    def _seconds(self, event: ProgramEvent) -> float:
        """Return the seconds of a transfer, if nothing else uses its links."""
        chip = self.platform.chip
        if event.transfer == "memory copy":
            return roofline.seconds(chip, 0, event.bytes)
        if event.transfer == "host copy":
            link = next((link for link in self.platform.links if link.name == "pcie"), None)
            return 0.0 if link is None else event.bytes * chip.devices / link.bandwidth
        assert event.transfer is not None, "the event starts a transfer"
        return collective_seconds(event.transfer, event.bytes, self._axes(event), self.mesh, self.platform)

    def _axes(self, event: ProgramEvent) -> tuple[str, ...]:
        """Return the mesh axes of a collective: all that have several devices, if its groups match none."""
        if event.axes is not None:
            return event.axes
        return tuple(axis for axis, size in self.mesh.sizes.items() if size > 1)

    def _links(self, event: ProgramEvent) -> Iterator[Hashable]:
        """Yield the links that a transfer uses; a permute leaves those of the other direction free."""
        if event.transfer in ("memory copy", "host copy"):
            yield event.transfer
            return
        for axis in self._axes(event):
            yield from ((axis, direction) for direction in (1, -1) if event.direction in (0, direction))

    def _item(self, event: ProgramEvent) -> str:
        """Return the name of the item of the seconds for which a program waits."""
        if event.transfer == "memory copy":
            return "memory"
        if event.transfer == "host copy":
            return "host copies"
        return f"{event.transfer} over {'+'.join(self._axes(event))}"
