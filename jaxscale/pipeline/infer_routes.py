"""The rank of each stage and the number of microbatches, inferred from the actions of a schedule."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from jaxscale.pipeline.action import Action, Kind
from jaxscale.pipeline.check import Fault

Orders = Sequence[Sequence[Action]]
"""The actions of each rank."""


def count_microbatches(name: str, orders: Orders) -> int:
    """Return the number of microbatches of most stages. In an invalid schedule, some stages have fewer or more.

    Args:
        name: name of the schedule, for error messages.
        orders: the actions of each rank.

    Raises:
        Fault: the index of a microbatch is at least the number of actions, so earlier microbatches must be missing.
    """
    # the last microbatch by (stage, whether the action is a forward)
    last_microbatch_of: dict[tuple[int, bool], int] = defaultdict(int)
    for order in orders:
        for action in order:
            stage_and_direction = action.stage, action.kind is Kind.F
            last_microbatch_of[stage_and_direction] = max(last_microbatch_of[stage_and_direction], action.microbatch)
    key_count_of = Counter(last_microbatch_of.values())  # for each last microbatch, the number of keys that have it
    last_microbatch = min(key_count_of, key=lambda microbatch: (-key_count_of[microbatch], microbatch))
    if last_microbatch >= sum(map(len, orders)):
        problem_text = f"is of microbatch {last_microbatch}, but most earlier microbatches are missing"
        raise _fault_at_first(name, orders, lambda action: action.microbatch == last_microbatch, problem_text)
    return last_microbatch + 1


def infer_routes(name: str, orders: Orders, microbatches: int) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Return (routes, route): for every route, the rank of each stage; for each microbatch, the index of its route.

    A stage is on the rank that runs most of the stage's actions. Actions of the stage on other ranks are misplaced, and
    the check of the schedule reports them. Several routes are inferred, such as the two directions of Chimera, only if
    each route gives every rank the same number of stages.

    Args:
        name: name of the schedule, for error messages.
        orders: the actions of each rank.
        microbatches: m, number of microbatches.

    Raises:
        Fault: a stage has no action on any rank, although a later stage has one; or there are far too few actions for
            the stages and microbatches.
    """
    # for each (stage, microbatch), the number of its actions on each rank; (stage, None) counts all microbatches
    rank_counters: defaultdict[tuple[int, int | None], Counter[int]] = defaultdict(Counter)
    for rank, order in enumerate(orders):
        for action in order:
            rank_counters[action.stage, None][rank] += 1
            rank_counters[action.stage, action.microbatch][rank] += 1
    last_stage = max(stage for stage, _ in rank_counters)
    for stage in range(last_stage):
        if (stage, None) not in rank_counters:
            problem_text = f"is of stage {last_stage}, but stage {stage} has no rank"
            raise _fault_at_first(name, orders, lambda action: action.stage == last_stage, problem_text)

    # a valid schedule has two or more actions for each stage and microbatch; with far fewer, the loops take too long
    action_count = sum(map(len, orders))
    if (last_stage + 1) * microbatches > 2 * action_count + 1024:
        problem_text = f"has {action_count} actions, expected two or more for each of {last_stage + 1} stages and "
        raise Fault(name, f"{problem_text}{microbatches} microbatches", 0)

    def usual_route(microbatch: int | None) -> tuple[int, ...]:
        """Return, for each stage, the rank with most of its actions for a microbatch; `None`: for all microbatches."""
        stage_counters = (
            rank_counters[stage, microbatch] or rank_counters[stage, None] for stage in range(last_stage + 1)
        )
        return tuple(rank_counter.most_common(1)[0][0] for rank_counter in stage_counters)

    def is_even(route: Sequence[int]) -> bool:
        """Return whether a route gives every rank the same number of stages."""
        stage_counts = Counter(route)  # by rank
        return len(stage_counts) == len(orders) and len(set(stage_counts.values())) == 1

    routes = list(dict.fromkeys(filter(is_even, map(usual_route, range(microbatches)))))
    if len(routes) < 2:
        return (usual_route(None),), (0,) * microbatches

    def agreement_count(microbatch: int, route: Sequence[int]) -> int:
        """Return how many actions of a microbatch are on the ranks to which a route assigns their stages."""
        return sum(rank_counters[stage, microbatch][rank] for stage, rank in enumerate(route))

    route_indices = (
        max(range(len(routes)), key=lambda index: agreement_count(microbatch, routes[index]))
        for microbatch in range(microbatches)
    )
    return tuple(routes), tuple(route_indices)


def _fault_at_first(name: str, orders: Orders, is_wrong: Callable[[Action], bool], problem_text: str) -> Fault:
    """Return a fault at the first wrong action. Its message is the action's text form, followed by `problem_text`."""
    wrong_places = ((rank, cell) for rank, order in enumerate(orders) for cell, a in enumerate(order) if is_wrong(a))
    rank, cell = next(wrong_places)
    return Fault(name, f"{orders[rank][cell]} {problem_text}", rank, cell)
