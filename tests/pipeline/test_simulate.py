"""The simulator against closed forms of the papers and against a simulator of another make."""

import heapq
import itertools
import random

import pytest

from jaxscale.errors import UserError
from jaxscale.pipeline.clock.costs import Costs
from jaxscale.pipeline.clock.simulate import simulate
from jaxscale.pipeline.orders import Action, Schedule
from jaxscale.pipeline.schedules import METHODS

RANKS = (2, 4, 8, 16)
RATIOS = ((1.0, 1.0, 1.0), (1.0, 1.3, 0.6), (0.7, 0.8, 1.1))
"""Seconds of F, I, W."""


CASES = [*((ranks, False) for ranks in RANKS), *(pytest.param(p, True, marks=pytest.mark.slow) for p in RANKS)]


def microbatches(ranks: int, every: bool, *, least: int = 1, step: int = 1) -> list[int]:
    """Numbers of microbatches to try: every one up to 8p, or some; fewer of them on many ranks."""
    some = {1, 2, ranks - 1, ranks, ranks + 1, 2 * ranks - 1, 2 * ranks}
    some |= {3 * ranks + 1, 8 * ranks} if ranks < 8 else set()
    some = some if ranks < 16 else {1, 16, 31}
    return sorted(m for m in (range(1, 8 * ranks + 1) if every else some) if m >= least and m % step == 0)


def of(name: str, ranks: int, count: int, chunks: int | None = None) -> Schedule:
    return METHODS[name].schedule(ranks, count, chunks)


def streamed(name: str, ranks: int, updates: int) -> Schedule:
    """An asynchronous schedule of so many updates; a synchronous one with so many microbatches."""
    method = METHODS[name]
    if not method.steps:
        return method.schedule(ranks, updates)
    return method.schedule(ranks, 1 if method.streams else ranks, updates=updates)


def alike(schedule: Schedule, *seconds: float) -> Costs:
    return Costs.alike(schedule, *seconds)


@pytest.mark.parametrize(("ranks", "every"), CASES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_gpipe_and_1f1b(name, ranks, every):
    for m in microbatches(ranks, every):
        schedule = of(name, ranks, m)
        for ratio in RATIOS:
            found = simulate(schedule, alike(schedule, *ratio), "dataflow")
            assert found.bubble == pytest.approx((ranks - 1) / (m + ranks - 1), abs=1e-9)
            assert found.seconds == pytest.approx((m + ranks - 1) * sum(ratio), rel=1e-9)


@pytest.mark.parametrize(("ranks", "every"), CASES)
def test_interleaved(ranks, every):
    counts = microbatches(ranks, every, least=ranks, step=ranks)
    for m, chunks in itertools.product(counts, (2, 3, 4) if every or ranks < 8 else (2,)):
        schedule = of("interleaved", ranks, m, chunks)
        for ratio in RATIOS:
            found = simulate(schedule, alike(schedule, *ratio), "dataflow")
            assert found.bubble == pytest.approx((ranks - 1) / (chunks * m + ranks - 1), abs=1e-9)


@pytest.mark.parametrize(("ranks", "every"), CASES)
def test_chimera(ranks, every):
    p = ranks
    for k in range(1, 9) if every else (1, 2) if p == 16 else (1, 3, 8):
        m = k * p
        schedule = of("chimera", p, m)
        for f in (1.0, 0.3, 7.0):
            equal = simulate(schedule, alike(schedule, f, f / 2, f / 2), "dataflow").bubble
            assert equal == pytest.approx((p - 2) / (2 * m + p - 2), abs=1e-9)
            double = simulate(schedule, alike(schedule, f, f, f), "dataflow").bubble
            assert double == pytest.approx((k + 1) * (p - 2) / (k * (4 * p - 2) + p - 2), abs=1e-9)


@pytest.mark.parametrize(("ranks", "every"), CASES)
def test_zb_h1(ranks, every):
    for m in microbatches(ranks, every, least=ranks):
        schedule = of("zb-h1", ranks, m)
        for f, i, w in RATIOS:
            found = simulate(schedule, alike(schedule, f, i, w), "dataflow")
            idle = (ranks - 1) * max(f + i - w, i, f)
            assert found.seconds - m * (f + i + w) == pytest.approx(idle, abs=1e-9 * found.seconds)


@pytest.mark.parametrize(("ranks", "every"), CASES)
def test_zb_v(ranks, every):
    for m in microbatches(ranks, every, least=2 * ranks - 1):
        schedule = of("zb-v", ranks, m)
        for f in (1.0, 0.3, 7.0):
            found = simulate(schedule, alike(schedule, f, f, f), "dataflow")
            assert found.seconds - 3 * f * m == pytest.approx((ranks - 1) * f / 2, abs=1e-9 * found.seconds)
            assert found.bubble_own_span == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("ranks", [4, 8])
def test_lock_step_loses_nothing_among_neighbours_where_1f1b_waits(ranks):
    m = 2 * ranks
    lockstep, plain = (of(name, ranks, m) for name in ("lockstep", "1f1b"))
    exact = (ranks - 1) / (m + ranks - 1)
    assert simulate(lockstep, alike(lockstep)).bubble == pytest.approx(exact, abs=1e-9)
    assert simulate(plain, alike(plain)).bubble > exact + 0.02


def test_the_note_s_table():
    """Units that a prototype took with slept passes, within 2 %: F = 1, B = 2, I = W = 1, p = 4, m = 8."""
    slept = {"gpipe": 33.4, "1f1b": 40.4, "lockstep": 33.4, "zb-h1": 27.5, "chimera": 30.3}
    for name, units in slept.items():
        schedule = of(name, 4, 8)
        assert simulate(schedule, alike(schedule)).seconds == pytest.approx(units, rel=0.02)


def events(schedule: Schedule, costs: Costs) -> float:
    """The dataflow machine made otherwise: messages as events on a heap. Gives the makespan."""
    position, busy_until, makespan = [0] * schedule.ranks, [0.0] * schedule.ranks, 0.0
    readers: dict[Action, list[int]] = {}
    for order in schedule.orders:
        for action in order:
            for needed in schedule.inputs(action):
                readers.setdefault(needed, []).append(schedule.rank(action))
    heap: list[tuple[float, int, str, int, Action | None]] = [
        (0.0, rank, "free", rank, None) for rank in range(schedule.ranks)
    ]
    heapq.heapify(heap)
    seen: dict[tuple[int, Action], float] = {}
    while heap:
        now, _, what, rank, action = heapq.heappop(heap)
        if what == "arrives":
            assert action is not None
            seen[rank, action] = now
        if busy_until[rank] > now or position[rank] == len(schedule.orders[rank]):
            continue
        following = schedule.orders[rank][position[rank]]
        if all((rank, needed) in seen for needed in schedule.inputs(following)):
            position[rank] += 1
            end = now + costs.seconds(following.kind, following.stage)
            busy_until[rank], makespan = end, max(makespan, end)
            for reader in {*readers.get(following, ()), rank}:
                steps = min((reader - rank) % schedule.ranks, (rank - reader) % schedule.ranks)
                heapq.heappush(heap, (end + steps * costs.links[0], len(heap), "arrives", reader, following))
            heapq.heappush(heap, (end, 10**9, "free", rank, None))
    assert position == [len(order) for order in schedule.orders]
    return makespan


@pytest.mark.parametrize("name", sorted(METHODS))
def test_dataflow_is_what_events_give(name):
    """Every method, with costs that differ from stage to stage and messages that take time."""
    rng = random.Random(name)
    schedule = streamed(name, 4, 8)

    def some() -> tuple[float, ...]:
        return tuple(rng.uniform(0.5, 2) for _ in range(schedule.stages))

    costs = Costs(some(), some(), some(), some(), some(), (0.3,) * 4)
    found = simulate(schedule, costs, "dataflow")
    assert found.seconds == pytest.approx(events(schedule, costs), rel=1e-9)
    assert found.seconds <= simulate(schedule, costs, "neighbour").seconds * (1 + 1e-9)


@pytest.mark.parametrize("name", sorted(METHODS))
@pytest.mark.parametrize("machine", ["dataflow", "neighbour"])
def test_what_a_simulation_says_of_itself(name, machine):
    """On every rank one action after another, each after its inputs; idle and busy add up."""
    schedule = streamed(name, 4, 8)
    found = simulate(schedule, Costs.alike(schedule, 1.0, 1.2, 0.8, update=0.1, link=0.2), machine)
    ends = {
        action: end
        for order, spans in zip(schedule.orders, found.spans, strict=True)
        for action, (_, end) in zip(order, spans, strict=True)
    }
    for order, spans in zip(schedule.orders, found.spans, strict=True):
        before = 0.0
        for action, (start, end) in zip(order, spans, strict=True):
            assert start >= before - 1e-9
            for needed in schedule.inputs(action):
                far = schedule.rank(needed) != schedule.rank(action)
                assert start >= ends[needed] + (0.2 if far else 0) - 1e-9
            before = end
    work = schedule.microbatches * (1.0 + 1.2 + 0.8) + (0.1 * 8 if schedule.versions else 0)
    assert sum(found.busy) == pytest.approx(4 * work)
    assert found.seconds == max(ends.values())
    assert 0 <= found.bubble < 1
    assert -1e-9 <= found.bubble_own_span <= 1 - sum(found.busy) / (4 * found.seconds) + 1e-9


def test_bytes_that_wait_for_the_backward():
    cells = [["0F0", "0F1", "0I0", "0W0", "0B1"]]
    orders = tuple(tuple(Action.parse(cell) for cell in row) for row in cells)
    schedule = Schedule("mixed", orders, stages=1, microbatches=2, routes=((0,),), route=(0, 0))
    costs = Costs((1.0,), (1.0,), (1.0,), stash=(10,), pending=(3,))
    found = simulate(schedule, costs)
    assert found.live == (2,)
    assert found.live_bytes == (23,)
    assert found.seconds == 6
    assert found.bubble == found.bubble_own_span == 0


def test_interleaved_stages_are_shares_of_a_rank():
    schedule = of("interleaved", 4, 8, 2)
    costs = alike(schedule, 2.0, 1.0, 1.0)
    assert costs.forward == (1.0,) * 8
    found = simulate(schedule, costs, "dataflow")
    assert found.live_shares == tuple(count / 2 for count in found.live)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["pipedream", "pipemare", "2bw"])
def test_the_steady_state_of_asynchronous_schedules_has_no_bubble(name, ranks):
    schedule = streamed(name, ranks, 8 * ranks)
    group = schedule.microbatches // (8 * ranks)
    found = simulate(schedule, Costs.alike(schedule, update=0.5), "dataflow")
    assert found.period == pytest.approx(3.0 * group + 0.5)
    assert found.seconds_per_microbatch == pytest.approx(3.0 + 0.5 / group)
    assert found.bubble == pytest.approx(0, abs=1e-9)
    assert 1 - sum(found.busy) / (ranks * found.seconds) > 0.01
    # a stage of half the speed sets the pace of all
    slow = Costs(*[(1.0,) * (ranks - 1) + (2.0,)] * 3)
    slowed = simulate(schedule, slow, "dataflow")
    assert slowed.period == pytest.approx(6.0 * group)
    assert slowed.bubble == pytest.approx(1 - (ranks + 1) / (2 * ranks))


def test_a_single_update_is_a_period_of_its_own():
    found = streamed("pipedream", 2, 1)
    assert simulate(found, alike(found)).period == 6.0


def test_refusals():
    schedule = METHODS["gpipe"].schedule(2, 2)
    with pytest.raises(UserError, match="got costs of 3 stages for gpipe, expected 2 stages"):
        simulate(schedule, Costs((1.0,) * 3, (1.0,) * 3, (1.0,) * 3))
    with pytest.raises(UserError, match="got costs of 3 links for gpipe, expected 2"):
        simulate(schedule, Costs((1.0,) * 2, (1.0,) * 2, (1.0,) * 2, links=(0.0,) * 3))
    with pytest.raises(UserError, match=r"costs: forward is -1\.0, expected 0 or more"):
        Costs((-1.0,), (1.0,), (1.0,))
    with pytest.raises(UserError, match="costs: got weight of 2 stages, expected 1"):
        Costs((1.0,), (1.0,), (1.0, 1.0))


def test_a_message_to_a_rank_that_is_no_neighbour():
    """The dataflow machine sends it over both links; the executor cannot."""
    cells = [["0F0", "0B0"], ["2F0", "2B0"], ["1F0", "1B0"], ["3F0", "3B0"]]
    orders = tuple(tuple(Action.parse(cell) for cell in row) for row in cells)
    schedule = Schedule("far", orders, stages=4, microbatches=1, routes=((0, 2, 1, 3),), route=(0,))
    costs = Costs((1.0,) * 4, (1.0,) * 4, (1.0,) * 4, links=(0.25, 0.5, 0.75, 1.0))
    found = simulate(schedule, costs, "dataflow")
    # 0 -> 2 by links 0 and 1, 2 -> 1 by link 1, 1 -> 3 by links 1 and 2, and back
    assert found.seconds == pytest.approx(4 * 3 + 2 * (0.75 + 0.5 + 1.25))
    with pytest.raises(
        UserError, match="0B0 on rank 0 needs 1B0 from rank 2, which is not a neighbor on the ring of 4"
    ):
        simulate(schedule, costs)
