"""A schedule checks itself: against every order there is of a small one, and faults by rank and cell."""

import dataclasses
import graphlib
import itertools
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxscale.errors import UserError
from jaxscale.pipeline.action import Action, Kind
from jaxscale.pipeline.check import Fault
from jaxscale.pipeline.csv import parse_csv, to_csv
from jaxscale.pipeline.orders import Schedule, Versions
from jaxscale.pipeline.schedules import METHODS

Orders = tuple[tuple[Action, ...], ...]


def acts(*rows: str) -> Orders:
    return tuple(tuple(Action.parse(cell) for cell in row.split()) for row in rows)


def plain(*rows: str, microbatches: int = 2, **fields) -> Schedule:
    """One stage a rank."""
    ranks = len(rows)
    route = (0,) * microbatches
    return Schedule("mine", acts(*rows), ranks, microbatches, (tuple(range(ranks)),), route, **fields)


def test_properties_of_a_schedule():
    schedule = plain("0F0 0F1 0B0 0B1", "1F0 1I0 1F1 1B1 1W0")
    assert (schedule.ranks, schedule.chunks, schedule.live, schedule.split) == (2, 1, (2, 2), True)
    assert schedule.gradient(1, 0) == Action(Kind.I, 1, 0)
    assert schedule.gradient(1, 1) == Action(Kind.B, 1, 1)
    assert schedule.inputs(Action.parse("0B0")) == acts("0F0 1I0")[0]
    assert schedule.inputs(Action.parse("1B1")) == acts("1F1")[0]
    assert schedule.inputs(Action.parse("1W0")) == acts("1I0")[0]
    assert schedule.inputs(Action.parse("1F1")) == acts("0F1")[0]
    assert schedule.inputs(Action.parse("0F1")) == ()
    assert hash(schedule) == hash(dataclasses.replace(schedule))


def test_places_and_chunks():
    chimera = METHODS["chimera"].schedule(4, 4)
    assert chimera.stages == 4
    assert chimera.chunks == 2
    for stage in range(4):
        assert chimera.place(0, stage) == (stage, 0)
        assert chimera.place(1, stage) == (3 - stage, 1)
    assert [chimera.stages_of(rank) for rank in range(4)] == [(0, 3), (1, 2), (2, 1), (3, 0)]
    vee = METHODS["zb-v"].schedule(3, 5)
    assert [vee.place(0, stage) for stage in range(6)] == [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1)]


def runs(orders: Orders) -> bool:
    """Whether two ranks with a stage each can do their orders: by trying, with nothing of the checker's."""
    done: set[str] = set()
    left = [list(map(str, order)) for order in orders]
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(left):
            while order:
                kind, microbatch = order[0][1], order[0][2]
                needs = {
                    "0F": [],
                    "1F": [f"0F{microbatch}"],
                    "1B": [f"1F{microbatch}"],
                    "0B": [f"0F{microbatch}", f"1B{microbatch}"],
                }[f"{rank}{kind}"]
                if not done.issuperset(needs):
                    break
                done.add(order.pop(0))
                moved = True
    return not any(left)


def test_accepts_the_orders_that_run_and_no_others():
    passes = [acts(f"{stage}F0 {stage}F1 {stage}B0 {stage}B1")[0] for stage in range(2)]
    accepted = 0
    for orders in itertools.product(*(itertools.permutations(one) for one in passes)):
        fault = None
        try:
            Schedule("tried", orders, 2, 2, ((0, 1),), (0, 0))
        except Fault as found:
            fault = found
        assert (fault is None) == runs(orders), orders
        assert fault is None or (fault.rank is not None and fault.cell is not None)
        accepted += fault is None
    assert 10 < accepted < 24 * 24


FAULTS = {
    "rank 1: lacks 1F1, the forward of microbatch 1 on stage 1": ("0F0 0F1 0B0 0B1", "1F0 1B0 1B1"),
    "rank 1: lacks the backward of 1F1: 1B1, or 1I1 and 1W1": ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1"),
    "rank 1, cell 2: 1F0 occurs twice, first in cell 0": ("0F0 0F1 0B0 0B1", "1F0 1B0 1F0 1F1 1B1"),
    "rank 0, cell 2: 1B0 belongs on rank 1": ("0F0 0F1 1B0 0B0 0B1", "1F0 1F1 1B1"),
    "rank 1, cell 4: 1F2 is of an unknown microbatch, expected 0 to 1": (
        "0F0 0F1 0B0 0B1",
        "1F0 1B0 1F1 1B1 1F2",
    ),
    "rank 0, cell 4: 2F0 is of an unknown stage, expected 0 to 1": (
        "0F0 0F1 0B0 0B1 2F0",
        "1F0 1B0 1F1 1B1",
    ),
    "rank 1, cell 1: 1I0 occurs without 1W0": ("0F0 0F1 0B0 0B1", "1F0 1I0 1F1 1B1"),
    "rank 1, cell 1: 1W0 occurs without 1I0": ("0F0 0F1 0B0 0B1", "1F0 1W0 1F1 1B1"),
    "rank 1, cell 2: 1W0 is already part of 1B0": ("0F0 0F1 0B0 0B1", "1F0 1B0 1W0 1F1 1B1"),
    "rank 1, cell 1: 1B0 comes before 1F0 (cell 2), which it needs": ("0F0 0F1 0B0 0B1", "1F1 1B0 1F0 1B1"),
    "rank 1, cell 1: 1W0 comes before 1I0 (cell 2), which it needs": ("0F0 0F1 0B0 0B1", "1F0 1W0 1I0 1F1 1B1"),
    "rank 0, cell 1: 0B0 waits forever: rank 0 waits in cell 1 (0B0) for 1B0, rank 1 waits in cell 1 (1F1) for 0F1": (
        "0F0 0B0 0F1 0B1",
        "1F0 1F1 1B0 1B1",
    ),
    "rank 0, cell 4: 0U1 updates the weights of a synchronous schedule": ("0F0 0F1 0B0 0B1 0U1", "1F0 1B0 1F1 1B1"),
}


@pytest.mark.parametrize(("message", "rows"), FAULTS.items(), ids=[message[:30] for message in FAULTS])
def test_faults_name_rank_and_cell(message, rows):
    with pytest.raises(Fault) as raised:
        plain(*rows)
    assert str(raised.value) == f"schedule mine, {message}"


def test_a_circle_of_three_ranks_is_told():
    rows = "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1"
    with pytest.raises(Fault, match=r"rank 0 waits in cell 1 \(0B0\) for 1B0, rank 1 waits in cell 1 \(1F1\) for 0F1"):
        plain(*rows)


def test_the_stash_bound():
    rows = "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"
    assert plain(*rows, bound=(2, 1)).bound == (2, 1)
    with pytest.raises(Fault, match="rank 0: holds 2 activations, expected at most 1"):
        plain(*rows, bound=(1, 1))
    with pytest.raises(Fault, match="got a bound of activations for 1 ranks, expected 2"):
        plain(*rows, bound=(1,))


def test_ticks_of_kinds_that_the_cycle_lacks():
    with pytest.raises(Fault, match="rank 1, cell 1: 1I0 is of a kind that is not in the cycle, expected F/B"):
        plain("0F0 0F1 0B0 0B1", "1F0 1I0 1F1 1B1 1W0", cycle=(Kind.F, Kind.B))


SHAPES = {
    "got 2 ranks, 2 stages, 0 microbatches": {"microbatches": 0, "route": ()},
    "got routes for 1 microbatches, expected 2": {"route": (0,)},
    "route 0 has the ranks of 3 stages, expected 2": {"routes": ((0, 1, 1),)},
    "stage 1 is on rank 2, expected a rank from 0 to 1": {"routes": ((0, 2),)},
    "microbatch 1 is on route 1, expected 0 to 0": {"route": (0, 1)},
    "rank 1: holds no stage, expected one or more": {"routes": ((0, 0),)},
}


@pytest.mark.parametrize(("message", "fields"), SHAPES.items(), ids=SHAPES)
def test_numbers_that_do_not_fit(message, fields):
    good = plain("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    with pytest.raises(Fault, match=message):
        dataclasses.replace(good, **fields)


UPDATES = {
    "rank 0: lacks 0U1, the update of stage 0": "0F0 0B0 0U0 0F1 0B1",
    "rank 0, cell 2: 0U1 comes after 1 backwards, expected 0U0 after the backward of microbatch 0": (
        "0F0 0B0 0U1 0F1 0B1 0U0"
    ),
    "rank 0, cell 1: 0U0 comes after 0 backwards, expected": "0F0 0U0 0B0 0F1 0B1 0U1",
    "rank 0, cell 3: 0B1 belongs to update 1, expected 0": "0F0 0F1 0B0 0B1 0U0 0U1",
}


@pytest.mark.parametrize(("message", "row"), UPDATES.items(), ids=[message[:30] for message in UPDATES])
def test_updates_that_take_other_gradients(message, row):
    with pytest.raises(Fault) as raised:
        plain(row, versions=Versions(1, "forward"))
    assert message in str(raised.value)


def test_updates_by_groups_and_versions_in_time():
    row = "0F0 0B0 0F1 0B1 0U1 0F2 0B2 0F3 0B3 0U3"
    for lag in (None, 0, 1):
        assert plain(row, microbatches=4, versions=Versions(2, "forward", lag)).versions is not None
    early = "0F0 0B0 0F1 0F2 0B1 0U1 0B2 0F3 0B3 0U3"
    assert plain(early, microbatches=4, versions=Versions(2, "forward", lag=1)).live == (2,)
    with pytest.raises(Fault, match="rank 0, cell 3: 0F2 reads weights after 1 updates, but 0 updates are done"):
        plain(early, microbatches=4, versions=Versions(2, "forward", lag=0))
    with pytest.raises(Fault, match="got 4 microbatches, expected a multiple of the 3 per update"):
        plain(row, microbatches=4, versions=Versions(3, "forward"))
    with pytest.raises(UserError, match="0 microbatches per update"):
        Versions(0, "forward")
    with pytest.raises(UserError, match="a lag of -1 updates"):
        Versions(1, "forward", -1)


NAMES = sorted(METHODS)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), st.integers(0, 10**6), st.sampled_from(["drop", "double", "move"]))
def test_one_action_dropped_doubled_or_moved_is_refused_where_it_is(name, number, change):
    schedule = METHODS[name].schedule(4, 1 if METHODS[name].streams else 4)
    rank = number % 4
    cell = number // 4 % len(schedule.orders[rank])
    orders = [list(order) for order in schedule.orders]
    action = orders[rank][cell]
    if change == "drop":
        orders[rank].pop(cell)
    elif change == "double":
        orders[rank].insert(cell + 1, action)
    else:
        orders[rank].pop(cell)
        orders[(rank + 1) % 4].append(action)
    with pytest.raises(Fault) as raised:
        dataclasses.replace(schedule, orders=tuple(map(tuple, orders)))
    fault = raised.value
    if change == "drop":
        assert fault.rank == rank
        assert str(action) in str(fault)
    elif change == "double":
        assert (fault.rank, fault.cell) == (rank, cell + 1)
    else:
        assert (fault.rank, fault.cell) == ((rank + 1) % 4, len(orders[(rank + 1) % 4]) - 1)


@st.composite
def any_schedule(draw) -> tuple[Orders, tuple[int, ...], int]:
    """Orders that can be done: stages anywhere, backwards fused or apart, in any sequence that their inputs allow."""
    ranks, extra, microbatches = draw(st.integers(1, 4)), draw(st.integers(0, 3)), draw(st.integers(1, 4))
    places = draw(st.permutations([*range(ranks), *(draw(st.integers(0, ranks - 1)) for _ in range(extra))]))
    last = len(places) - 1
    needs: dict[str, list[str]] = {}
    apart = {(s, i): draw(st.booleans()) for s in range(last + 1) for i in range(microbatches)}
    for (stage, i), split in apart.items():
        needs[f"{stage}F{i}"] = [f"{stage - 1}F{i}"] if stage else []
        above = [f"{stage + 1}{'I' if apart[stage + 1, i] else 'B'}{i}"] if stage < last else []
        needs[f"{stage}{'I' if split else 'B'}{i}"] = [f"{stage}F{i}", *above]
        if split:
            needs[f"{stage}W{i}"] = [f"{stage}I{i}"]
    rows: list[list[str]] = [[] for _ in range(ranks)]
    done: set[str] = set()
    while len(done) < len(needs):
        cell = draw(st.sampled_from(sorted(c for c in needs if c not in done and done.issuperset(needs[c]))))
        done.add(cell)
        rows[places[int(cell[0])]].append(cell)
    return acts(*map(" ".join, rows)), tuple(places), microbatches


@settings(max_examples=40, deadline=None)
@given(any_schedule(), st.integers(0, 10**6))
def test_whatever_can_be_done_is_taken_and_survives_the_csv(case, number):
    orders, places, microbatches = case
    schedule = Schedule("any", orders, len(places), microbatches, (places,), (0,) * microbatches)
    for lower in (False, True):
        again = parse_csv(to_csv(schedule, lower=lower), "any")
        assert (again.orders, again.routes, again.route) == (schedule.orders, schedule.routes, schedule.route)
    rank = number % schedule.ranks
    swapped = [list(order) for order in orders]
    cell = number // 7 % (len(swapped[rank]) - 1)
    swapped[rank][cell : cell + 2] = swapped[rank][cell : cell + 2][::-1]
    fault = None
    try:
        dataclasses.replace(schedule, orders=tuple(map(tuple, swapped)))
    except Fault as found:
        fault = found
    assert (fault is not None) == circular(schedule, swapped)


def circular(schedule: Schedule, orders: list[list[Action]]) -> bool:
    """Whether the graph of inputs and orders has a circle."""
    graph = {action: set(schedule.inputs(action)) for order in orders for action in order}
    for order in orders:
        for one, following in itertools.pairwise(order):
            graph[following].add(one)
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError:
        return True
    return False


def test_it_is_data_and_needs_no_jax():
    code = (
        "import sys, time; from jaxscale.pipeline.plan import PipelinePlan;"
        "from jaxscale.pipeline.csv import parse_csv, to_csv;"
        "parse_csv(to_csv(PipelinePlan.parse('zb-v:4x8').schedule()));"
        "print([name for name in sys.modules if name.split('.')[0] in ('jax', 'jaxlib', 'flax')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
