"""Plans of chains as data: what they cost, that they check themselves, and the two that need no costs."""

import json
import math
import random

import pytest

from jaxscale.errors import UserError
from jaxscale.memory.chain import (
    Nodes,
    Option,
    Remat,
    Save,
    Stage,
    keep_all,
    keep_inputs,
    periodic,
    revolve,
    revolve_cost,
    save_nodes,
    simulate,
    square_root,
)
from jaxscale.values import from_json, to_json

UNIT = Stage(1.0, 2.0, 1)


def least_forwards(stages, slots, known={}):  # noqa: B006 - a table on purpose
    """Forward runs beyond the first of each, by the recurrence of Griewank and Walther."""
    if stages == 1:
        return 0
    if slots == 1:
        return stages * (stages - 1) // 2
    if (stages, slots) not in known:
        known[stages, slots] = min(
            k + least_forwards(k, slots) + least_forwards(stages - k, slots - 1) for k in range(1, stages)
        )
    return known[stages, slots]


@pytest.mark.parametrize("slots", [2, 3, 4, 6, 10])
@pytest.mark.parametrize("stages", [4, 8, 16, 32])
def test_revolve_reaches_the_closed_form(stages, slots):
    cost = simulate(revolve(stages, slots), [UNIT] * stages, 1)
    assert cost.forwards - stages == revolve_cost(stages, slots) == least_forwards(stages, slots)
    assert cost.seconds == cost.forwards + 2 * stages


@pytest.mark.parametrize(("stages", "slots", "extra", "runs"), [(32, 4, 75, 107), (16, 3, 33, 49), (8, 2, 14, 22)])
def test_known_numbers_of_revolve(stages, slots, extra, runs):
    assert revolve_cost(stages, slots) == extra
    assert simulate(revolve(stages, slots), [UNIT] * stages, 1).forwards == runs


@pytest.mark.parametrize(("stages", "slots"), [(32, 4), (20, 1), (9, 3), (5, 20)])
def test_revolve_keeps_no_more_states_than_slots(stages, slots):
    def states(nodes: Nodes) -> int:
        """Inputs of stages alive at once: the list's own, those it keeps, that of the stage it runs."""
        head, *rest = nodes
        if not rest:
            return 1 if isinstance(head, Save) else states(head.nodes)
        assert isinstance(head, Remat)
        return max(1 + states(tuple(rest)), states(head.nodes))

    assert states(revolve(stages, slots)) <= slots + 1


def test_periodic_cuts_and_leaves_the_last_segment_whole():
    assert [len(list(save_nodes((node,)))) for node in periodic(10, 4)] == [4, 4, 1, 1]
    cost = simulate(periodic(10, 4), [UNIT] * 10, 1)
    assert cost.forwards == 10 + 8
    every = simulate(periodic(10, 1), [UNIT] * 10, 1)
    assert every.forwards == 19
    assert simulate(periodic(4, 9), [UNIT] * 4, 1) == simulate(keep_all(4), [UNIT] * 4, 1)


@pytest.mark.parametrize("stages", [1, 2, 7, 16, 32, 100])
def test_the_square_root_is_the_best_period(stages):
    k = square_root(stages)
    assert math.ceil(stages / k) + k == min(math.ceil(stages / j) + j for j in range(1, stages + 1))
    assert abs(k - math.sqrt(stages)) < 2


def test_a_peak_counted_by_hand():
    """Input 3, two stages that keep 10 and 20 beside outputs of 5 and 7."""
    stages = [Stage(1.0, 1.0, 5, (Option(10),)), Stage(1.0, 1.0, 7, (Option(20),))]
    both = simulate(keep_all(2), stages, 3)
    assert both.peak_bytes == 3 + (10 + 5) + (20 + 7) + (7 + 5), "at the last backward pass, with two gradients"
    assert (both.seconds, both.forwards, both.peak_stage) == (4.0, 2, 1)
    again = simulate((Remat((Save(0),)), Save(1)), stages, 3)
    assert again.peak_bytes == 3 + 5 + (20 + 7) + (7 + 5)
    assert (again.seconds, again.forwards) == (5.0, 3)


def test_working_bytes_count_while_a_stage_runs():
    stages = [Stage(1.0, 1.0, 1, (Option(0, working_bytes=100),), working_bytes=40)]
    assert simulate(keep_all(1), stages, 1).peak_bytes == 1 + 1 + 2 + 100
    stages = [Stage(1.0, 1.0, 1, (Option(0, working_bytes=10),), working_bytes=40)]
    assert simulate(keep_all(1), stages, 1).peak_bytes == 1 + 1 + 1 + 40


def test_what_a_stage_passes_on_is_kept_once():
    """A skip of 100 bytes made by the first stage, passed on by the second, used by the third."""
    stages = [Stage(1.0, 1.0, 101), Stage(1.0, 1.0, 101, passed_bytes=100), Stage(1.0, 1.0, 1)]
    assert simulate(keep_all(3), stages, 1).peak_bytes == 1 + 101 + 1 + 1 + (1 + 101)
    twice = [stages[0], Stage(1.0, 1.0, 101), stages[2]]
    assert simulate(keep_all(3), twice, 1).peak_bytes == 1 + 101 + 101 + (101 + 101), "at the second backward pass"
    inside = (Save(0), Remat((Save(1),)), Save(2))
    assert simulate(inside, stages, 1).peak_bytes == 1 + 101 + 1 + 1 + (1 + 101)


def random_nodes(rng: random.Random, first: int, count: int, depth: int = 0) -> Nodes:
    nodes: list[Save | Remat] = []
    while count:
        size = rng.randint(1, count)
        if depth < 4 and rng.random() < 0.5:
            nodes.append(Remat(random_nodes(rng, first, size, depth + 1)))
        else:
            size = 1
            nodes.append(Save(first, rng.randint(0, 2)))
        first, count = first + size, count - size
    return tuple(nodes)


def test_plans_are_json_both_ways_and_hashable():
    rng = random.Random(1)
    for _ in range(20):
        nodes = random_nodes(rng, 0, 9)
        whole = Remat(nodes)
        back = from_json(Remat, json.loads(json.dumps(to_json(whole))))
        assert back == whole
        assert hash(back) == hash(whole)


def test_every_stage_runs_once_for_each_segment_around_it():
    """Forward runs are one, and one more for each Remat around: counted here, without walking."""
    rng = random.Random(2)
    for _ in range(50):
        nodes = random_nodes(rng, 0, 12)
        stages = [Stage(1.0, 2.0, 1, (Option(), Option(1), Option(2)))] * 12

        def depth(nodes: Nodes, around: int) -> int:
            return sum(1 + around if isinstance(n, Save) else depth(n.nodes, around + 1) for n in nodes)

        assert simulate(nodes, stages, 1).forwards == depth(nodes, 0)


@pytest.mark.parametrize(
    ("nodes", "match"),
    [
        (keep_all(2), "a plan of 2 stages .* for a chain of 3"),
        ((Save(0), Save(2), Save(1)), "each stage once, in order"),
        (
            (Save(0), Save(1, 3), Save(2)),
            "option 3 for stage 1, expected at most 0, the stage's last option: make the plan again",
        ),
    ],
)
def test_a_plan_of_another_chain_is_refused(nodes, match):
    with pytest.raises(UserError, match=match):
        simulate(nodes, [UNIT] * 3, 1)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Stage(1.0, 1.0, -1), "output_bytes: got -1"),
        (lambda: Stage(1.0, 1.0, 1, passed_bytes=2), "passed_bytes: got 2, expected at most the 1"),
        (lambda: Stage(1.0, 1.0, 1, ()), "stage: got no options, expected at least one `Option`"),
        (lambda: Option(-5), "kept_bytes: got -5"),
        (lambda: Option(1.5), "kept_bytes"),
        (lambda: Save(-1), "stage: got -1"),
        (lambda: Remat(()), "got no nodes"),
        (lambda: revolve(4, 0), "4 stages and 0 slots"),
        (lambda: periodic(4, 0), "periodic: got 0"),
    ],
)
def test_values_check_themselves(make, match):
    with pytest.raises(UserError, match=match):
        make()


def test_keeping_inputs_runs_every_stage_twice():
    assert simulate(keep_inputs(5), [UNIT] * 5, 1).forwards == 10
