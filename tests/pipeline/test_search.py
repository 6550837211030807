"""The search for schedules: against every order there is, the named ones, the simulator and the bound."""

import random

import numpy as np
import pytest

from jaxscale.errors import UserError
from jaxscale.pipeline.choose.exhaustive import all_orders, fastest_orders
from jaxscale.pipeline.choose.search import lower_bound, search
from jaxscale.pipeline.clock.costs import Costs
from jaxscale.pipeline.clock.many_orders import BatchClock
from jaxscale.pipeline.clock.simulate import simulate
from jaxscale.pipeline.orders import Action, Kind, Schedule
from jaxscale.pipeline.schedules import METHODS


def some_costs(rng: random.Random, stages: int, spread: float = 0.2) -> Costs:
    forward = [rng.uniform(1 - spread, 1 + spread) for _ in range(stages)]
    inner, weight = rng.uniform(0.8, 1.3), rng.uniform(0.6, 1.1)
    return Costs(tuple(forward), tuple(f * inner for f in forward), tuple(f * weight for f in forward))


@pytest.mark.parametrize(("seed", "most"), [(0, 2), (1, 3), (2, 2), (3, 3)])
def test_two_ranks_three_microbatches_as_fast_as_any_order(seed: int, most: int) -> None:
    costs = some_costs(random.Random(seed), 2, 0.5)
    found = search(costs, 2, 3, most, copies=1)
    best, _ = fastest_orders(costs, 3, most)
    assert found.seconds == pytest.approx(best, rel=1e-9)
    assert found.bound <= best * (1 + 1e-9)


def test_there_are_as_many_orders_as_there_should_be() -> None:
    # with all backwards in two and no limit, the tableaux of 3 rows and m columns
    split = [word for word in all_orders(0, 3, 3) if not any(action.kind is Kind.B for action in word)]
    assert len(split) == 42


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("activations", [1.0, 1.5])
def test_never_slower_than_a_named_schedule(ranks: int, activations: float) -> None:
    rng = random.Random(ranks)
    for microbatches in (1, ranks + 1, 2 * ranks):
        costs = some_costs(rng, ranks)
        limit = activations * ranks
        found = search(costs, ranks, microbatches, limit, changes=400)
        assert max(found.schedule.live) <= limit
        assert found.seconds == pytest.approx(simulate(found.schedule, costs).seconds)
        assert found.bound <= found.seconds * (1 + 1e-9)
        for name, method in METHODS.items():
            if method.steps or method.interleaves:
                continue
            try:
                named = method.schedule(ranks, microbatches)
            except UserError:
                continue
            if named.stages == ranks and max(named.live) <= limit:
                assert found.seconds <= simulate(named, costs).seconds * (1 + 1e-12), name


def test_two_stages_a_rank() -> None:
    half = Costs((0.5, 0.6, 0.4, 0.5), (0.6, 0.5, 0.6, 0.5), (0.3, 0.5, 0.4, 0.4))
    whole = Costs((1.0, 1.0), (1.1, 1.1), (0.7, 0.9))
    found = search({1: whole, 2: half}, 2, 4, 2)
    assert found.seconds <= search(whole, 2, 4, 2).seconds
    assert max(found.schedule.live) * 2 / found.schedule.stages <= 2


def test_same_question_same_answer() -> None:
    costs = some_costs(random.Random(3), 4)
    one, other = (search(costs, 4, 6, 5, changes=500) for _ in range(2))
    assert one.schedule == other.schedule
    assert one.seconds < one.named_seconds
    assert "less than" in str(one)


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 4), (2, 3), (3, 2), (4, 4), (5, 2), (5, 13), (8, 3), (8, 16)])
def test_equal_costs_meet_the_bound(ranks: int, microbatches: int) -> None:
    schedule = METHODS["search"].schedule(ranks, microbatches)
    costs = Costs.alike(schedule)
    assert simulate(schedule, costs).seconds == lower_bound(costs, ranks, microbatches, ranks)
    assert schedule.name == "search"


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "zb-h2", "zb-v", "interleaved", "dualpipe-v"])
def test_the_clock_of_many_orders_is_the_simulator(name: str) -> None:
    rng = random.Random(name)
    schedules = [METHODS[name].schedule(4, 8)]
    start = schedules[0].orders
    route = schedules[0].routes[0]
    for _ in range(40):  # orders that a search would try, those that wait for ever left out
        rank = rng.randrange(4)
        word = list(start[rank])
        at = rng.randrange(len(word) - 1)
        word[at], word[at + 1] = word[at + 1], word[at]
        try:
            schedules.append(
                Schedule("x", (*start[:rank], tuple(word), *start[rank + 1 :]), len(route), 8, (route,), (0,) * 8)
            )
        except UserError:
            continue
    costs = Costs(
        *(tuple(rng.uniform(0.1, 2) for _ in route) for _ in range(3)),
        links=tuple(rng.uniform(0, 0.3) for _ in range(4)),
    )
    clock = BatchClock(costs, route, 4, 8)
    told = clock.seconds(np.stack([clock.pass_numbers(schedule.orders) for schedule in schedules]))
    assert len(schedules) > 5
    assert told.tolist() == pytest.approx([simulate(schedule, costs).seconds for schedule in schedules])


def test_orders_that_wait_for_ever_take_for_ever() -> None:
    costs = Costs((1.0, 1.0), (1.0, 1.0), (1.0, 1.0))
    clock = BatchClock(costs, (0, 1), 2, 2)
    acts = [[Action.parse(cell) for cell in row.split()] for row in ("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0")]
    assert clock.seconds(clock.pass_numbers(acts)[None]).tolist() == [np.inf]


def test_what_is_refused() -> None:
    costs = Costs((1.0,) * 3, (1.0,) * 3, (1.0,) * 3)
    with pytest.raises(UserError, match="costs of 3 stages, expected 4"):
        search(costs, 4, 8)
    with pytest.raises(UserError, match="no named schedule holds at most 1 activations; 1f1b holds 3"):
        search(costs, 3, 6, 1)
