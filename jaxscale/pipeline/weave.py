"""Weave: the order of one rank in the form of published schedules: warm-up, steady state, cool-down.

A lane is a sequence of forward passes and one of backward passes, through one stage or (interleaved) several. A phase
repeats a motif of letters, and each letter takes the next pass of its lane: `F` twice, `F B` six times, `B` twice is
1F1B on one rank.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from jaxscale.pipeline.action import Action, Kind

Pass = tuple[int, int]
"""(stage, microbatch)."""


@dataclasses.dataclass(frozen=True)
class Lane:
    """The passes of a lane, in forward order and in backward order."""

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
        lanes: by name; `""` for a single one.
        phases: (motif, times). A motif is letters separated by blanks, each a kind and the name of a lane: `F1` is the
            next forward of lane 1; `B1` and `I1` the next backward; `W1` the weight gradient of its oldest `I1`
            without one, and `W` that of the oldest of all lanes.

    Example:
        >>> order = weave({"": Lane.of_stage(0, 3)}, ("F", 1), ("F I", 2), ("W", 1), ("B", 1), ("W", 1))
        >>> " ".join(map(str, order))
        '0F0 0F1 0I0 0F2 0I1 0W0 0B2 0W1'
    """
    forwards = {name: iter(lane.forwards) for name, lane in lanes.items()}
    backwards = {name: iter(lane.backwards) for name, lane in lanes.items()}
    debts: list[tuple[str, Pass]] = []
    order = []
    for motif, times in phases:
        letters = [(Kind(letter[0]), letter[1:]) for letter in motif.split()]
        for kind, lane in letters * times:
            if kind is Kind.W:
                debt = next(pair for pair in debts if lane in ("", pair[0]))
                debts.remove(debt)
                lane_pass = debt[1]
            else:
                lane_pass = next(forwards[lane] if kind is Kind.F else backwards[lane])
            if kind is Kind.I:
                debts.append((lane, lane_pass))
            order.append(Action(kind, *lane_pass))
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

    return tuple(tuple(cell for action in order for cell in updated(action)) for order in orders)
