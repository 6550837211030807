"""Seconds of a compiled step: its schedule, timed by the compiler's own estimates and by the platform's links.

    compute       estimated cycles / clock
    kernels       roofline of the FLOP and bytes that a kernel declares, at the chip's efficiency
    memory        bytes / bandwidth of instructions without an estimate, such as gathers from tables
    transfers     collectives by `links.collective_seconds`, copies by the bandwidth of memory or of the host's link;
                  the program waits for a transfer that has not ended when its result is needed

Transfers over the same links follow one another. A loop runs as often as its trip count says, and every trip starts
with idle links; a message between slices ends before the next instruction. A pipelined step is not timed, because its
ranks run different branches. Left out: the memory bandwidth that a transfer takes from a product beside it, and skew
between devices.
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
"""Name of the item for instructions whose cycles the compiler estimates."""


def compiler_seconds(schedule: ProgramSchedule | None, plan: Plan, platform: Platform) -> StepSeconds | None:
    """Time the schedule of a compiled step, and return its seconds by item.

    Return `None` if the plan has a pipeline, or if the schedule, the mesh or the chip's clock is unknown.

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
    entry_run = timer.run(schedule.entry)
    wait_seconds_by_item = {name: seconds for name, seconds in entry_run.wait_seconds_by_item.items() if seconds}
    return StepSeconds({COMPUTE: entry_run.compute_seconds, **wait_seconds_by_item}, entry_run.hidden_seconds)


def clock_text(seconds: StepSeconds | None, plan: Plan, platform: Platform) -> str:
    """Return a text with the seconds of a compiled step by its compiler's estimates, or why there are no estimates.

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
        compute_seconds: seconds of the instructions whose cycles the compiler estimates.
        wait_seconds_by_item: seconds of everything else, by item.
        hidden_seconds: seconds of transfers between devices or to and from the host that overlap with other work.
    """

    compute_seconds: float = 0.0
    wait_seconds_by_item: dict[str, float] = dataclasses.field(default_factory=lambda: collections.defaultdict(float))
    hidden_seconds: float = 0.0

    @property
    def total_seconds(self) -> float:
        """The seconds of the run."""
        return self.compute_seconds + sum(self.wait_seconds_by_item.values())

    def add(self, run: "_Run", count: int) -> None:
        """Add the seconds of `count` runs of a loop's body."""
        self.compute_seconds += count * run.compute_seconds
        self.hidden_seconds += count * run.hidden_seconds
        for name, seconds in run.wait_seconds_by_item.items():
            self.wait_seconds_by_item[name] += count * seconds


@dataclasses.dataclass(frozen=True)
class _Transfer:
    """A transfer that has started: its item, its duration in seconds, and its end in seconds since the run began."""

    item: str
    seconds: float
    end_seconds: float


@dataclasses.dataclass(frozen=True)
class _Timer:
    """Timer of the computations of a schedule."""

    schedule: ProgramSchedule
    mesh: MeshSpec
    platform: Platform

    def run(self, name: str) -> _Run:
        """Time one run of a computation, which starts with idle links."""
        chip, run = self.platform.chip, _Run()
        assert chip.clock is not None
        # by link, the seconds since the run began at which the link has sent its transfers
        free_seconds_by_link: dict[Hashable, float] = collections.defaultdict(float)
        transfers_by_name: dict[str, list[_Transfer]] = collections.defaultdict(list)
        for event in self.schedule.computations[name]:
            if event.kind == "compute":
                run.compute_seconds += event.cycles / chip.clock
            elif event.kind == "kernel":
                run.wait_seconds_by_item["kernels"] += roofline.seconds(chip, event.flop, event.bytes)
            elif event.kind == "memory":
                run.wait_seconds_by_item["memory"] += roofline.seconds(chip, 0, event.bytes)
            elif event.kind == "loop":
                run.add(self.run(event.name), event.trips)
            elif event.kind == "start":
                seconds, links = self._transfer_seconds(event), list(self._links(event))
                end_seconds = seconds + max([run.total_seconds, *(free_seconds_by_link[link] for link in links)])
                free_seconds_by_link |= dict.fromkeys(links, end_seconds)
                transfers_by_name[event.name].append(_Transfer(self._item_name(event), seconds, end_seconds))
            else:
                self._wait(run, transfers_by_name.pop(event.name, []))
        for transfers in transfers_by_name.values():  # transfers whose done event is in another computation
            self._wait(run, transfers)
        return run

    @staticmethod
    def _wait(run: _Run, transfers: list[_Transfer]) -> None:
        """Add the seconds that a run waits for transfers to end."""
        for transfer in transfers:
            wait_seconds = max(0.0, transfer.end_seconds - run.total_seconds)
            run.wait_seconds_by_item[transfer.item] += wait_seconds
            if transfer.item != "memory":
                run.hidden_seconds += max(0.0, transfer.seconds - wait_seconds)

    def _transfer_seconds(self, event: ProgramEvent) -> float:
        """Return the seconds of a transfer if nothing else uses its links."""
        chip = self.platform.chip
        if event.transfer == "memory copy":
            return roofline.seconds(chip, 0, event.bytes)
        if event.transfer == "host copy":
            link = next((link for link in self.platform.links if link.name == "pcie"), None)
            return 0.0 if link is None else event.bytes * chip.devices / link.bandwidth
        assert event.transfer is not None, "the event starts a transfer"
        return collective_seconds(event.transfer, event.bytes, self._mesh_axes(event), self.mesh, self.platform)

    def _mesh_axes(self, event: ProgramEvent) -> tuple[str, ...]:
        """Return the mesh axes of a collective; all axes with several devices if its groups match no axes."""
        if event.axes is not None:
            return event.axes
        return tuple(axis for axis, size in self.mesh.sizes.items() if size > 1)

    def _links(self, event: ProgramEvent) -> Iterator[Hashable]:
        """Yield the links that a transfer uses; a permute uses only the links of one direction."""
        if event.transfer in ("memory copy", "host copy"):
            yield event.transfer
            return
        for axis in self._mesh_axes(event):
            yield from ((axis, direction) for direction in (1, -1) if event.direction in (0, direction))

    def _item_name(self, event: ProgramEvent) -> str:
        """Return the name of the item that counts the seconds of waiting for a transfer."""
        if event.transfer == "memory copy":
            return "memory"
        if event.transfer == "host copy":
            return "host copies"
        return f"{event.transfer} over {'+'.join(self._mesh_axes(event))}"
