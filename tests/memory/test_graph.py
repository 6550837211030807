"""The optimal save set: against every set there is, against Checkmate's whole program, against JAX's policies."""

import dataclasses
import itertools

import numpy as np
import pytest
from memory.graphs import best, every_set, random_graph
from programs.blocks import decoder_block

from jaxscale.errors import UserError
from jaxscale.memory.graph import menu, smallest_save_set, solve
from jaxscale.memory.greedy_sets import greedy
from jaxscale.memory.plan import POLICIES
from jaxscale.memory.save_set import EVERYTHING, Host, exposed_seconds, policy_set, recompute, save_set
from jaxscale.platforms.platform import Platform
from jaxscale.programs.block import BlockGraph, Equation, Value, block_graph
from tests.tiers import variants


def priced(save, objective):
    return (save.flop if objective == "flop" else round(save.seconds * 1e6)), save.bytes


@pytest.mark.parametrize("seed", variants(range(100), default=20))
def test_the_program_finds_what_trying_every_set_finds(seed):
    graph = random_graph(seed)
    sets = every_set(graph)
    for objective in ("flop", "seconds") if graph.seconds else ("flop",):
        for budget in {0, graph.needed_bytes // 3, graph.needed_bytes // 2}:
            found = solve(graph, budget, objective=objective)
            assert found.bytes <= budget
            assert priced(found, objective) == best(sets, budget, objective)


@pytest.mark.parametrize("seed", range(5))
def test_more_memory_never_costs_more_and_what_a_menu_gives_is_optimal(seed):
    graph = random_graph(seed, 10)
    sets, curve = every_set(graph), menu(graph, 50)
    costs = [save.flop for save in curve]
    assert [save.bytes for save in curve] == sorted({save.bytes for save in curve})
    assert costs == sorted(set(costs), reverse=True)
    for save in curve:
        assert priced(save, "flop") == best(sets, save.bytes, "flop")
    # enough budgets to find every point there is
    assert {priced(save, "flop") for save in curve} == {best(sets, budget, "flop") for budget in range(300)}


@pytest.mark.parametrize("score", ["ratio", "dtr_static"])
@pytest.mark.parametrize("seed", variants(range(20), default=5))
def test_a_heuristic_holds_the_budget_and_is_never_ahead(seed, score):
    graph = random_graph(seed, 12)
    for budget in (0, 20, 60):
        found = greedy(graph, budget, score)
        assert found.bytes <= budget
        assert found.flop >= solve(graph, budget).flop


def checkmate(graph, budget):
    """Least FLOP of Checkmate's program (Jain et al. 2020, section 4) for a forward pass and one backward step.

    Stage t ends with the first run of node t; R[t, i] runs node i in stage t, S[t, i] holds it from the stage before.
    The backward step is the last node, which reads what the backward pass needs. JAX recomputes a block as a whole, so
    of the memory rows the one between the passes counts.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    count = len(graph.equations)
    stages = count + 1
    values = [graph.values[equation.outputs[0]] for equation in graph.equations]
    reads = [[i - 1 for i in equation.inputs if i > 0] for equation in graph.equations]
    reads.append([index - 1 for index in graph.needed])
    cost = [float(equation.flop) for equation in graph.equations] + [0.0]
    run = np.arange(stages * stages).reshape(stages, stages)
    held = run + stages * stages
    lower, upper = np.zeros(2 * stages * stages), np.ones(2 * stages * stages)
    rows, least = [], []

    def at_least(terms, bound):
        row = np.zeros(2 * stages * stages)
        for place, factor in terms:
            row[place] += factor
        rows.append(row)
        least.append(bound)

    for stage in range(stages):
        lower[run[stage, stage]] = 1
        for node in range(stages):
            if node > stage:
                upper[run[stage, node]] = 0
            if node >= stage:
                upper[held[stage, node]] = 0
            for read in reads[node]:
                at_least([(run[stage, read], 1), (held[stage, read], 1), (run[stage, node], -1)], 0)
            if stage:
                at_least([(run[stage - 1, node], 1), (held[stage - 1, node], 1), (held[stage, node], -1)], 0)
    for node, value in enumerate(values):
        if value.mark is None:
            upper[held[count, node]] = 0
    at_least([(held[count, node], -value.bytes) for node, value in enumerate(values)], -budget)
    price = np.zeros(2 * stages * stages)
    for stage in range(stages):
        price[run[stage]] = cost
    rules = LinearConstraint(np.array(rows), np.array(least), np.inf)
    found = milp(price, integrality=np.ones(len(price)), bounds=Bounds(lower, upper), constraints=rules)
    return round(found.fun) - graph.flop


@pytest.mark.parametrize("seed", range(10))
def test_checkmates_program_finds_no_less(seed):
    graph = random_graph(seed, 8)
    for budget in (0, 15, 40):
        if budget < graph.needed_bytes:
            assert solve(graph, budget).flop == checkmate(graph, budget)


def chain_graph():
    """x -> a (10 FLOP) -> b (1) -> c (1); the backward pass reads a, b and c."""
    values = [Value("x", (), "float32", 4, -1)]
    values += [
        Value(name, (), "float32", size, i, name) for i, (name, size) in enumerate(zip("abc", (8, 4, 4), strict=True))
    ]
    equations = [Equation("op", (i,), (i + 1,), flop, 0, flop * 1.0) for i, flop in enumerate((10, 1, 1))]
    return BlockGraph("chain", tuple(values), tuple(equations), (0,), (0,), (3,), (1, 2, 3))


def test_by_hand():
    graph = chain_graph()
    assert [solve(graph, budget).keep for budget in (0, 4, 8, 12, 16)] == [
        (),
        ("b",),
        ("a",),
        ("a", "b"),
        ("a", "b", "c"),
    ]
    assert [solve(graph, budget).flop for budget in (0, 4, 8, 12, 16)] == [12, 11, 2, 1, 0]


def test_values_of_one_name_are_kept_together():
    graph = chain_graph()
    values = [dataclasses.replace(v, mark="same") if v.name in "ab" else v for v in graph.values]
    graph = dataclasses.replace(graph, values=tuple(values))
    assert solve(graph, 11).keep == ("c",)
    assert solve(graph, 12).keep == ("a", "b")


def test_the_host_takes_what_a_copy_is_cheaper_for():
    graph = chain_graph()
    free = Host(budget=100, bandwidth=1e9)
    found = solve(graph, 4, objective="seconds", host=free)
    assert found.seconds == pytest.approx(0, abs=1e-6)
    assert found.bytes <= 4
    assert found.host_bytes >= 12
    assert not set(found.keep) & set(found.offload)
    # 8 bytes at 0.25 bytes/s take 32 s each way, of which 12 and 24 are hidden
    slow = Host(budget=8, bandwidth=0.25)
    assert exposed_seconds(graph, slow, 8, 2.0) == 20.0 + 6.0
    assert solve(graph, 0, objective="seconds", host=slow).offload == ()
    only = Host(budget=100, bandwidth=1e9, names=frozenset({"c"}))
    assert solve(graph, 0, objective="seconds", host=only).offload == ("c",)


@pytest.mark.parametrize("seed", range(10))
def test_with_a_host_the_program_finds_what_trying_every_set_finds(seed):
    graph = random_graph(seed, 6)
    host = Host(budget=30, bandwidth=2e6)
    keepable = [value.name for value in graph.values if value.mark is not None]
    least = min(
        save_set(
            graph,
            [name for name, place in zip(keepable, places, strict=True) if place == 1],
            [name for name, place in zip(keepable, places, strict=True) if place == 2],
            host,
        ).seconds
        for places in itertools.product(range(3), repeat=len(keepable))
        if fits(graph, keepable, places, 1, 15) and fits(graph, keepable, places, 2, 30)
    )
    assert solve(graph, 15, objective="seconds", host=host).seconds == pytest.approx(least, rel=1e-6, abs=1e-12)


def fits(graph, names, places, place, room):
    return sum(graph.values[graph.by_name[n]].bytes for n, p in zip(names, places, strict=True) if p == place) <= room


@pytest.fixture(scope="module")
def llama():
    block, params, x = decoder_block(embed=64, mlp=192, length=64)
    return block_graph(block, params, x, chip=Platform.parse("tpu v5p:2x2x1").chip)


def test_never_worse_than_jaxs_policies_at_their_bytes_nor_larger_at_their_flop(llama):
    for policy in POLICIES:
        jaxs = policy_set(llama, policy)
        for objective in ("flop", "seconds"):
            ours = solve(llama, jaxs.bytes, objective=objective)
            assert ours.bytes <= jaxs.bytes
            assert priced(ours, objective)[0] <= priced(jaxs, objective)[0], policy
        small = smallest_save_set(llama, jaxs.flop)
        assert small.flop <= jaxs.flop
        assert small.bytes <= jaxs.bytes, policy


def test_everything_is_kept_where_there_is_room(llama):
    found = solve(llama, llama.needed_bytes, objective="seconds")
    assert (found.keep, found.seconds, found.bytes) == ((EVERYTHING,), 0.0, llama.needed_bytes)
    assert recompute(llama, ()).flop == solve(llama, 0).flop


def test_mistakes_are_named(llama):
    with pytest.raises(UserError, match="budget of -1 bytes"):
        solve(llama, -1)
    with pytest.raises(UserError, match="budget of -1 bytes"):
        greedy(llama, -1)
    with pytest.raises(UserError, match=r"unknown value .* 'mlp_upp'.* did you mean 'mlp_up'"):
        save_set(llama, ["mlp_upp"])
    unnamed = next(value.name for value in llama.values if value.mark is None and value.producer >= 0)
    with pytest.raises(UserError, match="a custom derivative"):
        save_set(llama, [unnamed])
    without = dataclasses.replace(
        llama, equations=tuple(dataclasses.replace(equation, seconds=0.0) for equation in llama.equations)
    )
    with pytest.raises(UserError, match="needs a chip"):
        solve(without, 0, objective="seconds")
    with pytest.raises(UserError, match="needs a chip"):
        greedy(without, 0, objective="seconds")
    with pytest.raises(UserError, match="copies to a host cost seconds: use 'seconds'"):
        solve(llama, 0, host=Host(1, 1.0))
    with pytest.raises(UserError, match="unknown policy"):
        policy_set(llama, "dots_savable")
