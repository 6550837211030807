"""Seconds of a compiled schedule, against sums by hand on 16 chips of v5e."""

import pytest

from jaxscale.compiler.schedule import ProgramEvent, ProgramSchedule
from jaxscale.planning.search.compiler_seconds import COMPUTE, compiler_seconds
from jaxscale.planning.search.links import collective_seconds
from jaxscale.planning.search.step_seconds import StepSeconds
from jaxscale.platforms.platform import Platform
from jaxscale.recipe.plan import Plan

V5E = Platform.parse("tpu v5e:4x4")
PLAN = Plan(mesh="fsdp:4,tensor:4", zero=3)
GATHER = ProgramEvent("start", bytes=2**28, name="gather", transfer="all-gather", axes=("fsdp",))
SECOND = 1_500_000_000
"""Cycles of a second of v5e."""


def timed(
    *events: ProgramEvent, plan: Plan = PLAN, platform: Platform = V5E, **bodies: tuple[ProgramEvent, ...]
) -> StepSeconds:
    seconds = compiler_seconds(ProgramSchedule("main", {"main": events, **bodies}), plan, platform)
    assert seconds is not None
    return seconds


def gather_seconds() -> float:
    assert PLAN.mesh is not None
    return collective_seconds("all-gather", 2**28, ("fsdp",), PLAN.mesh, V5E)


def test_a_collective_hides_behind_what_runs_beside_it():
    """The program waits for the rest of a transfer alone; what it waits and what is hidden make its seconds."""
    alone, ended = gather_seconds(), ProgramEvent("done", name="gather")
    assert timed(GATHER, ended).items == {COMPUTE: 0.0, "all-gather over fsdp": pytest.approx(alone)}
    half = ProgramEvent("compute", cycles=int(alone / 2 * SECOND))
    partly = timed(GATHER, half, ended)
    assert partly.items["all-gather over fsdp"] == pytest.approx(alone / 2, rel=1e-6)
    assert partly.hidden == pytest.approx(alone / 2, rel=1e-6)
    assert partly.total == pytest.approx(alone, rel=1e-6)
    covered = timed(GATHER, ProgramEvent("compute", cycles=SECOND), ended)
    assert covered.items == {COMPUTE: 1.0}
    assert covered.hidden == pytest.approx(alone)


def test_links_send_one_after_the_other():
    """Two gathers over one axis take twice as long; over two axes they run side by side, as permutes both ways do."""
    alone = gather_seconds()
    ends = (ProgramEvent("done", name="gather"), ProgramEvent("done", name="second"))
    same_axis = ProgramEvent("start", bytes=2**28, name="second", transfer="all-gather", axes=("fsdp",))
    other_axis = ProgramEvent("start", bytes=2**28, name="second", transfer="all-gather", axes=("tensor",))
    assert timed(GATHER, same_axis, *ends).total == pytest.approx(2 * alone)
    assert timed(GATHER, other_axis, *ends).total == pytest.approx(alone, rel=0.01)

    def permutes(*directions: int) -> float:
        starts = [
            ProgramEvent(
                "start", bytes=2**28, name=f"p{i}", transfer="collective-permute", axes=("fsdp",), direction=direction
            )
            for i, direction in enumerate(directions)
        ]
        return timed(*starts, *(ProgramEvent("done", name=f"p{i}") for i in range(len(starts)))).total

    assert permutes(1, -1) == pytest.approx(permutes(1))
    assert permutes(1, 1) == pytest.approx(2 * permutes(1))


def test_other_work():
    """Kernels and gathers from tables take their roofline, host copies the host's link, a loop all of its trips."""
    bandwidth = 819e9
    kernel = timed(ProgramEvent("kernel", flop=10**9, bytes=1000), ProgramEvent("kernel", flop=10, bytes=10**9))
    assert kernel.items["kernels"] == pytest.approx(10**9 / (0.8 * 197e12) + 10**9 / bandwidth)
    assert timed(ProgramEvent("memory", bytes=10**9)).items["memory"] == pytest.approx(10**9 / bandwidth)
    host = timed(ProgramEvent("start", bytes=10**9, name="c", transfer="host copy"), ProgramEvent("done", name="c"))
    assert host.items["host copies"] == pytest.approx(10**9 / 15e9)
    near = timed(ProgramEvent("start", bytes=10**9, name="c", transfer="memory copy"), ProgramEvent("done", name="c"))
    assert (near.items["memory"], near.hidden) == (pytest.approx(10**9 / bandwidth), 0.0)
    body = (GATHER, ProgramEvent("compute", cycles=SECOND // 1000), ProgramEvent("done", name="gather"))
    once, loop = timed(*body), timed(ProgramEvent("loop", name="body", trips=5), body=body)
    assert loop.total == pytest.approx(5 * once.total)
    assert loop.hidden == pytest.approx(5 * once.hidden)


def test_transfers_without_an_end_or_axes():
    """A transfer that ends in another computation is waited for; groups of no axes count as those of all axes."""
    assert timed(GATHER).total == pytest.approx(gather_seconds())
    assert timed(ProgramEvent("done", name="elsewhere")).total == 0
    unknown = ProgramEvent("start", bytes=2**28, name="g", transfer="all-gather", axes=None)
    assert list(timed(unknown).items) == [COMPUTE, "all-gather over fsdp+tensor"]


def test_devices_that_share_a_chip():
    """A device of 7x is half of a chip, and has half of its rates."""
    kernel = ProgramEvent("kernel", flop=10**12)
    seconds = timed(kernel, platform=Platform.parse("tpu 7x:2x2x1"), plan=Plan(mesh="fsdp:8")).items["kernels"]
    assert seconds == pytest.approx(10**12 / (0.6 * 2307e12 / 2))


def test_no_seconds():
    """A pipeline's ranks run different branches; other compilers have no clock."""
    schedule = ProgramSchedule("main", {"main": (ProgramEvent("compute", cycles=1),)})
    assert compiler_seconds(None, PLAN, V5E) is None
    assert compiler_seconds(schedule, Plan(mesh="data:2", pipeline="1f1b:2x4"), V5E) is None
    assert compiler_seconds(schedule, PLAN, Platform.parse("gpu h100 x 8")) is None
