"""Functions that build the named schedules.

`weave` makes the order of one rank from phases, as the papers do: warm-up, steady state and cool-down. `orders_by_slot`
makes orders from a timetable (Chimera, lock-step schedules). `single_route` and `vee` make a schedule from orders.

A lane consists of a sequence of forward passes and a sequence of backward passes, through one stage or, in interleaved
schedules, through several stages. A phase repeats a motif, which is a sequence of kinds of passes; for each kind in the
motif, the rank runs the lane's next pass of that kind. For example, the phases `F` twice, `F B` six times and `B` twice
are the order of one rank in 1F1B.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from jaxscale.pipeline.action import Action, Kind
from jaxscale.pipeline.orders import Schedule, Versions

Pass = tuple[int, int]
"""(stage, microbatch) of a pass."""
Order = tuple[Action, ...]
"""The actions of one rank."""
MotifPhase = tuple[str, int]
"""(motif, number of repetitions): a phase of a rank's order."""


@dataclasses.dataclass(frozen=True)
class Lane:
    """The passes of a lane, in forward order and in backward order."""

    forwards: tuple[Pass, ...]
    backwards: tuple[Pass, ...]

    @classmethod
    def of_stage(cls, stage: int, microbatches: int) -> "Lane":
        """Make the lane of microbatches 0 to m-1 through one stage."""
        passes = tuple((stage, i) for i in range(microbatches))
        return cls(passes, passes)


def weave(lanes: Mapping[str, Lane] | Lane, *phases: MotifPhase) -> Order:
    """Make the order of one rank.

    Args:
        lanes: the lanes by name, or a single lane, which gets the empty name.
        phases: (motif, number of repetitions) of each phase. A motif consists of words separated by blanks. A word is a
            kind and the name of a lane: `F1` is the next forward of lane 1, and `B1` or `I1` is the lane's next
            backward. `W1` is the weight gradient of the oldest `I1` that has no weight gradient yet. `W` alone looks
            for the oldest such `I` in all lanes.

    Example:
        >>> order = weave(Lane.of_stage(0, 3), ("F", 1), ("F I", 2), ("W", 1), ("B", 1), ("W", 1))
        >>> " ".join(map(str, order))
        '0F0 0F1 0I0 0F2 0I1 0W0 0B2 0W1'
    """
    lanes_by_name = {"": lanes} if isinstance(lanes, Lane) else lanes
    forward_iterators = {name: iter(lane.forwards) for name, lane in lanes_by_name.items()}
    backward_iterators = {name: iter(lane.backwards) for name, lane in lanes_by_name.items()}
    # (name of the lane, pass) of each input gradient that has no weight gradient yet, the oldest first
    pending_names_and_passes: list[tuple[str, Pass]] = []
    order = []
    for motif, repeat_count in phases:
        kinds_and_names = [(Kind(word[0]), word[1:]) for word in motif.split()]
        for kind, name in kinds_and_names * repeat_count:
            if kind is Kind.W:
                oldest_name_and_pass = next(
                    name_and_pass for name_and_pass in pending_names_and_passes if name in ("", name_and_pass[0])
                )
                pending_names_and_passes.remove(oldest_name_and_pass)
                lane_pass = oldest_name_and_pass[1]
            else:
                lane_pass = next(forward_iterators[name] if kind is Kind.F else backward_iterators[name])
            if kind is Kind.I:
                pending_names_and_passes.append((name, lane_pass))
            order.append(Action(kind, *lane_pass))
    return tuple(order)


def orders_by_slot(ranks: int, timetable: Iterable[tuple[int, int, Action]]) -> tuple[Order, ...]:
    """Make the order of each rank from a timetable.

    Args:
        ranks: p, number of ranks.
        timetable: (rank, slot, action) of every action, in any order; each slot of a rank has at most one action.

    Example:
        >>> forward, backward = Action(Kind.F, 0, 0), Action(Kind.B, 0, 0)
        >>> orders_by_slot(1, [(0, 5, backward), (0, 2, forward)]) == ((forward, backward),)
        True
    """
    rank_timetables: list[dict[int, Action]] = [{} for _ in range(ranks)]  # for each rank, its actions by slot
    for rank, slot, action in timetable:
        assert slot not in rank_timetables[rank], (
            f"{action} and {rank_timetables[rank][slot]} share slot {slot} of rank {rank}"
        )
        rank_timetables[rank][slot] = action
    return tuple(tuple(rank_timetable[slot] for slot in sorted(rank_timetable)) for rank_timetable in rank_timetables)


def with_updates(orders: Iterable[Iterable[Action]], group_size: int) -> tuple[Order, ...]:
    """Return the orders with updates added: each stage gets an update after every `group_size` of its backwards.

    Example:
        >>> order = weave(Lane.of_stage(0, 2), ("F B", 2))
        >>> " ".join(map(str, with_updates([order], 2)[0]))
        '0F0 0B0 0F1 0B1 0U1'
    """

    def action_and_update(action: Action) -> Order:
        """Return an action, followed by an update if the action is the last backward of a group."""
        is_last_of_group = action.kind is Kind.B and (action.microbatch + 1) % group_size == 0
        return (action, Action(Kind.U, action.stage, action.microbatch)) if is_last_of_group else (action,)

    return tuple(
        tuple(scheduled_action for action in order for scheduled_action in action_and_update(action))
        for order in orders
    )


def single_route(
    name: str,
    orders: Iterable[Order],
    microbatches: int,
    bound: Iterable[int],
    *,
    route: Sequence[int] = (),
    cycle: tuple[Kind, ...] | None = None,
    versions: Versions | None = None,
) -> Schedule:
    """Make a schedule in which all microbatches take one route.

    Args:
        name: name of the schedule.
        orders: the actions of each rank.
        microbatches: m, number of microbatches.
        bound: for each rank, the most activations that the rank may hold.
        route: the rank of each stage; empty: stage s is on rank s.
        cycle: kinds of successive ticks, as in `Schedule`.
        versions: weights of an asynchronous schedule, as in `Schedule`.

    Example:
        >>> order = weave(Lane.of_stage(0, 2), ("F B", 2))
        >>> single_route("mine", [order], 2, bound=[1]).routes
        ((0,),)
    """
    order_tuple = tuple(orders)
    rank_of_stage = tuple(route or range(len(order_tuple)))
    return Schedule(
        name=name,
        orders=order_tuple,
        stages=len(rank_of_stage),
        microbatches=microbatches,
        routes=(rank_of_stage,),
        route=(0,) * microbatches,
        versions=versions,
        cycle=cycle,
        bound=tuple(bound),
    )


def vee(
    name: str,
    ranks: int,
    microbatches: int,
    phases_of: Callable[[int, int], Sequence[MotifPhase]],
    *,
    min_microbatches: int,
    max_activations: int,
) -> Schedule:
    """Make a schedule in which the stages go down the ranks and back up.

    Rank r has two stages: stage r, whose lane is named 0, and stage 2p-1-r, whose lane is named 1.

    Args:
        name: name of the schedule.
        ranks: p, number of ranks.
        microbatches: m, any number of microbatches.
        phases_of: function from a rank and a number of microbatches to the phases of that rank's order.
        min_microbatches: the fewest microbatches for which `phases_of` is defined. If m is smaller, the order is made
            for `min_microbatches`, and the actions of microbatches m and later are removed.
        max_activations: the most activations that a rank may hold; activations are counted for each stage separately.
    """
    padded_microbatches = max(microbatches, min_microbatches)
    orders = []
    for rank in range(ranks):
        lanes = {
            "0": Lane.of_stage(rank, padded_microbatches),
            "1": Lane.of_stage(2 * ranks - 1 - rank, padded_microbatches),
        }
        order = weave(lanes, *phases_of(rank, padded_microbatches))
        orders.append(tuple(action for action in order if action.microbatch < microbatches))
    rank_bounds = (min(max_activations, 2 * microbatches, microbatches + 1 + rank) for rank in range(ranks))
    return single_route(name, orders, microbatches, rank_bounds, route=(*range(ranks), *reversed(range(ranks))))
