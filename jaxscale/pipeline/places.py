"""Places: the rank of each stage and the number of microbatches, inferred from the actions of a schedule."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from jaxscale.pipeline.action import Action, Kind
from jaxscale.pipeline.check import Fault


def count_microbatches(name: str, orders: Sequence[Sequence[Action]]) -> int:
    """The number of microbatches, by a vote of stages: a single stage may lack the last one, or have one more.

    Args:
        name: of the schedule, for the message.
        orders: the actions of each rank.

    Raises:
        Fault: a microbatch number above the number of actions.
    """
    last_microbatch: dict[tuple[int, bool], int] = defaultdict(int)
    for order in orders:
        for action in order:
            key = action.stage, action.kind is Kind.F
            last_microbatch[key] = max(last_microbatch[key], action.microbatch)
    votes = Counter(last_microbatch.values())
    count = 1 + min(votes, key=lambda number: (-votes[number], number))
    if count > sum(map(len, orders)):
        rank, cell = next((r, o.index(a)) for r, o in enumerate(orders) for a in o if a.microbatch == count - 1)
        raise Fault(
            name, f"{orders[rank][cell]} is of microbatch {count - 1}, but most lower ones are missing", rank, cell
        )
    return count


def find_routes(
    name: str, orders: Sequence[Sequence[Action]], microbatches: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """The routes of a schedule, and the route of each microbatch.

    A stage is on the rank that runs most of its actions: those on other ranks are misplaced, and the check of the
    schedule reports them. Several routes are accepted if each gives all ranks equally many stages (Chimera's two
    directions).

    Args:
        name: of the schedule, for the message.
        orders: the actions of each rank.
        microbatches: m.

    Raises:
        Fault: no rank runs a stage below the last one.
    """
    runs: dict[int, Counter[int]] = defaultdict(Counter)
    of_microbatch: dict[int, dict[int, Counter[int]]] = defaultdict(lambda: defaultdict(Counter))
    for rank, order in enumerate(orders):
        for action in order:
            runs[action.stage][rank] += 1
            of_microbatch[action.microbatch][action.stage][rank] += 1
    stages = 1 + max(runs)
    for missing in (stage for stage in range(stages) if stage not in runs):
        rank, cell = next((r, o.index(a)) for r, o in enumerate(orders) for a in o if a.stage == stages - 1)
        raise Fault(name, f"{orders[rank][cell]} is of stage {stages - 1}, but stage {missing} has no rank", rank, cell)
    usual = tuple(runs[stage].most_common(1)[0][0] for stage in range(stages))

    def even(route: Sequence[int]) -> bool:
        return stages % len(orders) == 0 and set(Counter(route).values()) == {stages // len(orders)}

    candidates: list[tuple[int, ...]] = []
    for microbatch in range(microbatches):
        places = of_microbatch[microbatch]
        route = tuple(places[stage].most_common(1)[0][0] if places[stage] else usual[stage] for stage in range(stages))
        if len(set(route)) == len(orders) and even(route) and route not in candidates:
            candidates.append(route)
    if len(candidates) < 2:
        return (usual,), (0,) * microbatches

    def agreement(microbatch: int, route: Sequence[int]) -> int:
        return sum(of_microbatch[microbatch][stage][rank] for stage, rank in enumerate(route))

    route_numbers = (
        max(range(len(candidates)), key=lambda number: agreement(microbatch, candidates[number]))
        for microbatch in range(microbatches)
    )
    return tuple(candidates), tuple(route_numbers)
