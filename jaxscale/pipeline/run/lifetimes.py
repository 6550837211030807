"""Lifetimes: the ticks in which a rank holds each value of a schedule, and the allocation of slots for the values.

A tick has four steps: (1) messages of the previous tick enter their slots, (2) operands are read, (3) the action runs,
and (4) the message of the action leaves. So a message that is sent in tick t lives from tick t+1, and a slot that is
read for the last time in tick t is free in tick t+1. Memory depends on the schedule: stage s of 1F1B holds p-s
messages, and a stage of GPipe holds m messages.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from jaxscale.pipeline.action import GRADIENT, Action, Kind
from jaxscale.pipeline.orders import Schedule

Stash = Literal["input", "residuals"]
"""What a stage keeps from a forward to its backward: its input, or the residuals that the backward reads."""
Interval = tuple[int, int, Hashable]
"""(first tick, tick after the last, name of the value)."""


class Life(NamedTuple):
    """The ticks in which a rank holds a value.

    Args:
        column: column of the table that has the value's slot: `x` for an input message, `g` for an incoming gradient,
            `residual` for the stash of a forward, `cut` for the values that are kept from I to W.
        stage: stage of the action that reads the value.
        microbatch: microbatch of the action that reads the value.
        first_tick: tick in which the value enters its slot.
        last_tick: tick of the last action that reads the value.
    """

    column: Literal["x", "g", "residual", "cut"]
    stage: int
    microbatch: int
    first_tick: int
    last_tick: int

    @property
    def name(self) -> tuple[str, int, int]:
        """The name (column, stage, microbatch), which is unique within a schedule."""
        return self[:3]

    @property
    def interval(self) -> Interval:
        """The interval (first tick, tick after the last, name), for `allocate`."""
        return self.first_tick, self.last_tick + 1, self.name


def lifetimes(schedule: Schedule, tick_of: Mapping[Action, int], stash: Stash) -> list[Life]:
    """Return the lifetimes of all values of a schedule, in the order of `tick_of`.

    The first stage has no input message, and the last stage has no incoming gradient.

    Args:
        schedule: the actions of each rank.
        tick_of: the tick of each action that runs; in evaluation no backwards run.
        stash: "input": a stage keeps its input message until its backward is done. "residuals": a stage keeps its input
            message until its forward is done.
    """
    lives = []
    for action, tick in tick_of.items():
        kind, stage, microbatch = action
        if kind not in (Kind.F, *GRADIENT):
            continue
        backward_actions = schedule.gradient(stage, microbatch), Action(Kind.W, stage, microbatch)
        last_tick = max(tick_of.get(backward, tick) for backward in backward_actions)
        if kind is Kind.F:
            lives.append(Life("residual", stage, microbatch, tick, last_tick))
        elif kind is Kind.I:
            lives.append(Life("cut", stage, microbatch, tick, last_tick))
        last_read_tick = last_tick if stash == "input" else tick
        if kind is Kind.F and stage > 0:
            sent_tick = tick_of[Action(Kind.F, stage - 1, microbatch)]
            lives.append(Life("x", stage, microbatch, sent_tick + 1, last_read_tick))
        elif kind in GRADIENT and stage + 1 < schedule.stages:
            sent_tick = tick_of[schedule.gradient(stage + 1, microbatch)]
            lives.append(Life("g", stage, microbatch, sent_tick + 1, last_read_tick))
    return lives


def allocate(intervals: Iterable[Interval]) -> tuple[Mapping[Hashable, int], int]:
    """Allocate slots by first fit: in the order of their first ticks, each value gets the first free slot.

    The number of slots is then the smallest possible: the largest number of values that are alive at once.

    Args:
        intervals: (first tick, tick after the last, name) of each value.

    Returns:
        (slots, count): the slot of each value, by its name, and the number of slots.

    Example:
        >>> allocate([(0, 3, "a"), (1, 4, "b"), (3, 5, "c")])
        ({'a': 0, 'b': 1, 'c': 0}, 2)
    """
    slot_end_ticks: list[int] = []
    slot_of: dict[Hashable, int] = {}
    for first_tick, end_tick, name in sorted(intervals, key=lambda interval: interval[:2]):
        free_slot = next(
            (slot for slot, slot_end_tick in enumerate(slot_end_ticks) if slot_end_tick <= first_tick),
            len(slot_end_ticks),
        )
        if free_slot == len(slot_end_ticks):
            slot_end_ticks.append(end_tick)
        slot_end_ticks[free_slot] = end_tick
        slot_of[name] = free_slot
    return slot_of, len(slot_end_ticks)


def allocate_by_rank(schedule: Schedule, lives: Sequence[Life]) -> tuple[Mapping[Hashable, int], int]:
    """Allocate slots on each rank. Return the slot of each value, by its name, and the most slots that a rank needs."""
    intervals_by_rank: defaultdict[int, list[Interval]] = defaultdict(list)
    for life in lives:
        rank = schedule.rank(Action(Kind.F, life.stage, life.microbatch))
        intervals_by_rank[rank].append(life.interval)
    allocations = [allocate(rank_intervals) for rank_intervals in intervals_by_rank.values()]
    slot_by_name = {name: slot for slot_of, _ in allocations for name, slot in slot_of.items()}
    return slot_by_name, max((count for _, count in allocations), default=0)
