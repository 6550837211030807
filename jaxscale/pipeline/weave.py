"""Weave: the order of one rank as published schedules tell it: warm up, steady state, cool down.

A lane is the sequence in which passes go forward and backward, through one stage or (interleaved) through several. A
phase is a motif of letters done so many times, each letter taking the next pass of its lane: `F` twice, `F B` six
times, `B` twice is 1F1B on one rank.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from jaxscale.pipeline.action import Action, Kind

Pass = tuple[int, int]
"""(stage, microbatch)."""


@dataclasses.dataclass(frozen=True)
class Lane:
    """The passes of a lane, in the order of their forwards and in that of their backwards."""

    forwards: tuple[Pass, ...]
    backwards: tuple[Pass, ...]

    @classmethod
    def of_stage(cls, stage: int, microbatches: int) -> "Lane":
        """Microbatches 0 to m-1 through one stage."""
        passes = tuple((stage, i) for i in range(microbatches))
        return cls(passes, passes)


def weave(lanes: Mapping[str, Lane], *phases: tuple[str, int]) -> tuple[Action, ...]:
    """The order of one rank.

    Args:
        lanes: by name; `""` where there is but one.
        phases: (motif, times). A motif is letters parted by blanks, a kind and the name of a lane: `F1` is the next
            forward of lane 1; `B1` and `I1` the next backward; `W1` the weight gradient of its oldest `I1` that has
            none yet, and `W` that of the oldest of all lanes.

    Example:
        >>> order = weave({"": Lane.of_stage(0, 3)}, ("F", 1), ("F I", 2), ("W", 1), ("B", 1), ("W", 1))
        >>> " ".join(map(str, order))
        '0F0 0F1 0I0 0F2 0I1 0W0 0B2 0W1'
    """
    forwards = {name: iter(lane.forwards) for name, lane in lanes.items()}
    backwards = {name: iter(lane.backwards) for name, lane in lanes.items()}
    owed: list[tuple[str, Pass]] = []
    order = []
    for motif, times in phases:
        letters = [(Kind(letter[0]), letter[1:]) for letter in motif.split()]
        for kind, lane in letters * times:
            if kind is Kind.W:
                debt = next(one for one in owed if lane in ("", one[0]))
                owed.remove(debt)
                one = debt[1]
            else:
                one = next(forwards[lane] if kind is Kind.F else backwards[lane])
            if kind is Kind.I:
                owed.append((lane, one))
            order.append(Action(kind, *one))
    return tuple(order)


def with_updates(orders: Iterable[Iterable[Action]], group: int) -> tuple[tuple[Action, ...], ...]:
    """The orders with an update of a stage after its last backward of every `group` microbatches.

    Example:
        >>> order = weave({"": Lane.of_stage(0, 2)}, ("F B", 2))
        >>> " ".join(map(str, with_updates([order], 2)[0]))
        '0F0 0B0 0F1 0B1 0U1'
    """

    def updated(action: Action) -> tuple[Action, ...]:
        last = action.kind is Kind.B and (action.microbatch + 1) % group == 0
        return (action, Action(Kind.U, action.stage, action.microbatch)) if last else (action,)

    return tuple(tuple(one for action in order for one in updated(action)) for order in orders)
