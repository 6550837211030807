"""The rank of each stage and the number of microbatches, inferred from the actions of a schedule."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from jaxscale.pipeline.action import Action, Kind
from jaxscale.pipeline.check import Fault

Orders = Sequence[Sequence[Action]]
"""The actions of each rank."""


def count_microbatches(name: str, orders: Orders) -> int:
    """Return the number of microbatches that most stages have; some stages may lack the last one, or have one too many.

    Args:
        name: name of the schedule, for error messages.
        orders: the actions of each rank.

    Raises:
        Fault: a microbatch number is as large as the number of actions, so that lower ones must be missing.
    """
    # the highest microbatch number by (stage, whether the action is a forward)
    highest_numbers: dict[tuple[int, bool], int] = defaultdict(int)
    for order in orders:
        for action in order:
            key = action.stage, action.kind is Kind.F
            highest_numbers[key] = max(highest_numbers[key], action.microbatch)
    stage_counts = Counter(highest_numbers.values())  # how many of these keys have each highest number
    last_microbatch = min(stage_counts, key=lambda number: (-stage_counts[number], number))
    if last_microbatch >= sum(map(len, orders)):
        reason = f"is of microbatch {last_microbatch}, but most lower numbers are missing"
        raise _fault_at_first(name, orders, lambda action: action.microbatch == last_microbatch, reason)
    return last_microbatch + 1


def infer_routes(name: str, orders: Orders, microbatches: int) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Return the routes of a schedule, each as the rank of each stage, and the route number of each microbatch.

    A stage is on the rank that runs most of its actions. Actions on other ranks are misplaced, which the check of the
    schedule reports. Several routes are accepted, as for Chimera's two directions, if each gives every rank equally
    many stages.

    Args:
        name: name of the schedule, for error messages.
        orders: the actions of each rank.
        microbatches: m, number of microbatches.

    Raises:
        Fault: a stage below the last one has no action on any rank.
    """
    # for each (stage, None) and each (stage, microbatch), how many of its actions each rank runs
    run_counts: defaultdict[tuple[int, int | None], Counter[int]] = defaultdict(Counter)
    for rank, order in enumerate(orders):
        for action in order:
            run_counts[action.stage, None][rank] += 1
            run_counts[action.stage, action.microbatch][rank] += 1
    last_stage = max(stage for stage, _ in run_counts)
    for stage in range(last_stage):
        if (stage, None) not in run_counts:
            reason = f"is of stage {last_stage}, but stage {stage} has no rank"
            raise _fault_at_first(name, orders, lambda action: action.stage == last_stage, reason)

    def usual_route(microbatch: int | None) -> tuple[int, ...]:
        """Return the usual rank of each stage for a microbatch, or for all microbatches (`None`)."""
        counts_of_stages = (run_counts[stage, microbatch] or run_counts[stage, None] for stage in range(last_stage + 1))
        return tuple(rank_counts.most_common(1)[0][0] for rank_counts in counts_of_stages)

    def is_even(route: Sequence[int]) -> bool:
        """Return whether a route gives every rank equally many stages."""
        stages_of_rank = Counter(route)
        return len(stages_of_rank) == len(orders) and len(set(stages_of_rank.values())) == 1

    routes = list(dict.fromkeys(filter(is_even, map(usual_route, range(microbatches)))))
    if len(routes) < 2:
        return (usual_route(None),), (0,) * microbatches

    def count_agreements(microbatch: int, route: Sequence[int]) -> int:
        """Return the number of actions of a microbatch that are on the ranks of a route."""
        return sum(run_counts[stage, microbatch][rank] for stage, rank in enumerate(route))

    route_numbers = (
        max(range(len(routes)), key=lambda number: count_agreements(microbatch, routes[number]))
        for microbatch in range(microbatches)
    )
    return tuple(routes), tuple(route_numbers)


def _fault_at_first(name: str, orders: Orders, matches: Callable[[Action], bool], reason: str) -> Fault:
    """Make a fault at the first action that `matches` accepts; its reason starts with that action."""
    places = ((rank, cell) for rank, order in enumerate(orders) for cell, a in enumerate(order) if matches(a))
    rank, cell = next(places)
    return Fault(name, f"{orders[rank][cell]} {reason}", rank, cell)
