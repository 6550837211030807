"""Ticks against longest paths, and the turns of lock-step schedules."""

import functools

import pytest

from jaxscale.pipeline.action import Action, Kind
from jaxscale.pipeline.orders import Schedule
from jaxscale.pipeline.schedules import METHODS
from jaxscale.pipeline.ticks import rows, ticks


def longest(schedule: Schedule, kinds: str = "FBIWU", pace: int = 0) -> dict[Action, int]:
    """The tick of an action as the longest path to it; updates take no tick of their own."""
    orders = [[action for action in order if action.kind in kinds] for order in schedule.orders]
    before = {order[i]: order[i - 1] for order in orders for i in range(1, len(order))}

    @functools.cache
    def tick(action: Action) -> int:
        if action.kind is Kind.U:
            return tick(before[action])
        needs = [*schedule.inputs(action), *([before[action]] if action in before else [])]
        entry = pace * action.microbatch if action.kind is Kind.F and action.stage == 0 else 0
        return max(entry, 1 + max((tick(one) for one in needs), default=-1))

    return {action: tick(action) for order in orders for action in order}


@pytest.mark.parametrize("name", METHODS)
def test_as_early_as_inputs_and_order_allow(name):
    method = METHODS[name]
    schedule = method.schedule(4, 1, updates=6) if method.streams else method.schedule(4, 8)
    if schedule.cycle is None:
        assert ticks(schedule) == longest(schedule)
    else:
        at, early = ticks(schedule), longest(schedule)
        assert all(at[action] >= early[action] for action in at)


@pytest.mark.parametrize("name", METHODS)
def test_forwards_alone_take_no_turns_of_other_kinds(name):
    method = METHODS[name]
    schedule = method.schedule(4, 1, updates=6) if method.streams else method.schedule(4, 8)
    assert ticks(schedule, forward_only=True) == longest(schedule, "F")


@pytest.mark.parametrize("pace", [1, 2, 5])
@pytest.mark.parametrize("name", ["pipedream", "2bw", "pipemare", "1f1b", "zb-v"])
def test_microbatches_enter_at_a_pace(name, pace):
    method = METHODS[name]
    schedule = method.schedule(4, 1, updates=6) if method.streams else method.schedule(4, 8)
    assert ticks(schedule, pace=pace) == longest(schedule, pace=pace)


def test_turns_that_no_rank_takes_are_left_out():
    order = tuple(Action.parse(cell) for cell in ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"])
    schedule = Schedule("mine", (order,), 1, 3, ((0,),), (0, 0, 0), cycle=(Kind.F, Kind.B))
    assert [str(row[0]) for row in rows(schedule)] == [str(action) for action in order]


def test_a_tick_waits_for_the_turn_of_its_kind():
    cells = "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"
    orders = tuple(tuple(Action.parse(cell) for cell in row.split()) for row in cells)
    mixed = Schedule("mine", orders, 2, 2, ((0, 1),), (0, 0))
    turns = Schedule("mine", orders, 2, 2, ((0, 1),), (0, 0), cycle=(Kind.F, Kind.B))
    told = [[" ".join(str(one or "-") for one in row) for row in rows(schedule)] for schedule in (mixed, turns)]
    assert told[0] == ["0F0 -", "0F1 1F0", "- 1B0", "0B0 1F1", "- 1B1", "0B1 -"]
    assert told[1] == ["0F0 -", "0F1 1F0", "- 1B0", "- 1F1", "0B0 1B1", "0B1 -"]
