"""Rotor against the simulator, brute force, Revolve, an exact solver and Checkmate's integer program."""

import math
import random

import numpy as np
import pytest

from jaxscale.errors import UserError
from jaxscale.memory.chain import Option, Remat, Save, Stage, keep_all, periodic, revolve, simulate
from jaxscale.memory.rotor_table import Bound, least_budget, rotor
from tests.tiers import variants


def chain(rng, count, *, options=3, scale=1000, passes=False):
    """Stages of random costs, and the bytes of the input."""
    stages, before = [], rng.randint(1, scale)
    given = before
    for _ in range(count):
        out = rng.randint(1, scale)
        ways = [
            Option(rng.randint(0, 5 * scale), round(rng.uniform(0, 2), 3), rng.randint(0, scale))
            for _ in range(rng.randint(1, options))
        ]
        passed = rng.randint(0, min(before, out)) if passes and rng.random() < 0.6 else 0
        seconds = round(rng.uniform(0.5, 4), 3), round(rng.uniform(1, 8), 3)
        stages.append(Stage(*seconds, out, tuple(ways), rng.randint(0, scale), passed))
        before = out
    return stages, given


def bounded(cost, bound):
    """Of what a plan costs the bytes that a budget bounds."""
    return cost.peak_bytes if bound == "alive" else cost.kept_bytes


def budgets(rng, stages, given, count, bound: Bound = "alive"):
    """Random ones between the least and what keeps everything."""
    least, most = least_budget(stages, given, bound), bounded(simulate(keep_all(len(stages)), stages, given), bound)
    return [least + int(rng.random() ** 2 * max(most - least, 0)) for _ in range(count)]


BOUNDS = pytest.mark.parametrize("bound", ["alive", "kept"])


@BOUNDS
def test_cost_is_the_simulators_and_the_bytes_within_the_budget(bound):
    rng = random.Random(3)
    for trial in range(200):
        stages, given = chain(rng, rng.randint(1, 11), passes=trial % 2 == 1)
        if trial % 4 == 0:
            stages, given = [stages[0]] * len(stages), stages[0].output_bytes
        [budget] = budgets(rng, stages, given, 1, bound)
        found = rotor(stages, given, budget, slots=300, bound=bound)
        cost = simulate(found.nodes, stages, given)
        assert cost.seconds == pytest.approx(found.seconds, rel=1e-12)
        assert (cost.peak_bytes, cost.kept_bytes) == (found.peak_bytes, found.kept_bytes)
        assert bounded(cost, bound) <= budget


def every_plan(first, last, ways, known):
    """All nested plans of stages first..last, but for segments that nothing comes after."""
    if first > last:
        return [()]
    if (first, last) not in known:
        plans = [
            (Save(first, option), *rest)
            for option in range(ways[first])
            for rest in every_plan(first + 1, last, ways, known)
        ]
        plans += [
            (Remat(inside), *rest)
            for cut in range(first + 1, last + 1)
            for inside in every_plan(first, cut - 1, ways, known)
            for rest in every_plan(cut, last, ways, known)
        ]
        known[first, last] = plans
    return known[first, last]


@BOUNDS
@pytest.mark.parametrize("passes", [False, True])
@pytest.mark.parametrize(("count", "options"), [(1, 3), (2, 3), (3, 2), (4, 2), (5, 1), (6, 1)])
def test_brute_force_agrees(count, options, passes, bound):
    rng = random.Random(4 + count)
    for _ in range(3):
        stages, given = chain(rng, count, options=options, scale=20, passes=passes)
        plans = every_plan(0, count - 1, [len(stage.options) for stage in stages], {})
        costs = [simulate(nodes, stages, given) for nodes in plans]
        least = min(bounded(cost, bound) for cost in costs)
        assert least_budget(stages, given, bound) == least
        for budget in {least, least + 1, *budgets(rng, stages, given, 6, bound)}:
            best = min(cost.seconds for cost in costs if bounded(cost, bound) <= budget)
            found = rotor(stages, given, budget, bound=bound)
            assert found.exact
            assert found.seconds == pytest.approx(best, rel=1e-12)


def test_a_segment_at_the_end_never_helps():
    rng = random.Random(5)
    for _ in range(20):
        stages, given = chain(rng, 4, options=1)
        plain, at_end = keep_all(4), (Save(0), Remat((Save(1), Save(2), Save(3))))
        one, other = simulate(plain, stages, given), simulate(at_end, stages, given)
        assert one.seconds < other.seconds
        assert one.peak_bytes <= other.peak_bytes
        assert one.kept_bytes <= other.kept_bytes


@BOUNDS
@pytest.mark.parametrize(("stages", "slots"), [(32, 4), (16, 3), (8, 2), (32, 8), (24, 1)])
def test_never_worse_than_revolve_at_equal_bytes(stages, slots, bound):
    for one in (
        Stage(1.0, 2.0, 1),
        Stage(1.0, 2.0, 1, (Option(9), Option(4, 0.05, 4))),
        Stage(1.0, 2.0, 7, (Option(3),)),
    ):
        alike = [one] * stages
        theirs = simulate(revolve(stages, slots), alike, one.output_bytes)
        ours = rotor(alike, one.output_bytes, bounded(theirs, bound), bound=bound)
        assert ours.exact
        assert ours.seconds <= theirs.seconds
        assert bounded(ours, bound) <= bounded(theirs, bound)


@BOUNDS
def test_never_worse_than_periodic(bound):
    alike = [Stage(1.0, 2.0, 1, (Option(9),))] * 16
    for k in (2, 4, 8):
        theirs = simulate(periodic(16, k), alike, 1)
        assert rotor(alike, 1, bounded(theirs, bound), bound=bound).seconds <= theirs.seconds


def test_what_is_kept_counted_by_hand():
    """Four alike stages, inputs of 1, which keep 9 within: four of both without a plan; else two inputs and one 9."""
    alike = [Stage(1.0, 2.0, 1, (Option(9, working_bytes=50),), working_bytes=100)] * 4
    assert simulate(keep_all(4), alike, 1).kept_bytes == 4 * (1 + 9)
    assert simulate(revolve(4, 1), alike, 1).kept_bytes == least_budget(alike, 1, "kept") == 2 + 9
    # the last two keep 9 and 1 + 9 at once; before that the inputs of the first and the third
    assert simulate(periodic(4, 2), alike, 1).kept_bytes == 1 + 1 + 9 + 1 + 9
    with pytest.raises(
        UserError, match="a budget of 10B \\(kept\\) is too low for 4 stages: the least possible is 11B"
    ):
        rotor(alike, 1, 10, bound="kept")


KINDS = ["unlike", "alike", "two kinds", "passes"]


def rounding(kind, seed, count, bound: Bound = "alive"):
    """The exact optimum comes from the same recurrence on a grid of single bytes, which brute force has checked."""
    rng = random.Random(seed)
    stages, given = chain(rng, 32, scale=400, passes=kind == "passes")
    if kind == "alike":
        stages, given = [stages[0]] * 32, stages[0].output_bytes
    if kind == "two kinds":
        stages = [stages[0], stages[1]] * 16
    least = least_budget(stages, given, bound)
    for budget in [math.ceil(least / 0.99), *budgets(rng, stages, given, count, bound)]:
        lower = int(0.99 * budget)
        if lower >= least:
            exact = rotor(stages, given, lower, slots=lower, bound=bound)
            assert exact.exact
            rounded = rotor(stages, given, budget, slots=500 if kind == "alike" else 2000, bound=bound)
            # least bytes kept are few enough of some chains for a grid of single bytes
            assert bound == "kept" or kind in ("alike", "two kinds") or not rounded.exact
            assert rounded.seconds <= exact.seconds * (1 + 1e-12), (kind, seed, budget, least)


@pytest.mark.parametrize("kind", variants(KINDS, default=3))
def test_rounding_costs_less_than_a_hundredth_of_the_budget(kind):
    rounding(kind, 6, 1)


@pytest.mark.slow
@BOUNDS
@pytest.mark.parametrize("kind", KINDS)
def test_rounding_over_many_chains(kind, bound):
    for seed in range(20):
        rounding(kind, 100 + seed, 4, bound)


def test_a_bigger_budget_is_never_slower_where_the_grid_is_exact():
    rng = random.Random(7)
    stages, given = chain(rng, 10, scale=30)
    least = least_budget(stages, given)
    seconds = [rotor(stages, given, budget).seconds for budget in range(least, least + 400, 7)]
    assert seconds == sorted(seconds, reverse=True)
    assert len(set(seconds)) > 5


@BOUNDS
@pytest.mark.parametrize("alike", [False, True])
def test_a_budget_below_the_least_is_refused_and_told(alike, bound):
    rng = random.Random(8)
    stages, given = chain(rng, 9)
    if alike:
        stages, given = [stages[0]] * 9, stages[0].output_bytes
    least = least_budget(stages, given, bound)
    assert bounded(rotor(stages, given, least, bound=bound), bound) == least
    with pytest.raises(UserError, match=r"the least possible is .*, and stage \d alone takes .*; more microbatch"):
        rotor(stages, given, least - 1, bound=bound)
    with pytest.raises(UserError, match="least possible"):
        rotor(stages, given, 0, bound=bound)
    with pytest.raises(UserError, match="no stages"):
        rotor([], 1, 5)


def checkmate(count, budget):
    """Least seconds of a unit chain by Checkmate's integer program (Jain et al. 2020, arXiv:1910.02653); None if none.

    Values in order: x0 (free, and always kept), x1 .. xn of one second, then the gradients of two. A gradient reads the
    one behind it and its stage's input and output; that of xn is there from the start of the backward pass.
    """
    optimize, sparse = pytest.importorskip("scipy.optimize"), pytest.importorskip("scipy.sparse")
    reads = [[], *([i] for i in range(count))]
    for stage in reversed(range(count)):
        reads.append([*([] if stage == count - 1 else [len(reads) - 1]), stage, stage + 1])
    total = len(reads)
    seconds = [0.0] + [1.0] * count + [2.0] * count
    index, low, high, whole, rows = {}, [], [], [], []

    def variable(name, least=0.0, most=1.0, integer=1):
        index[name] = len(index)
        low.append(least)
        high.append(most)
        whole.append(integer)

    for t in range(total):
        for i in range(total):
            variable(("run", t, i), least=float(i == t), most=float(i <= t))
            variable(("keep", t, i), least=float(i == 0 < t), most=float(i < t))
            for k in range(i, total):
                if k == i or i in reads[k]:
                    variable(("free", t, i, k))
            variable(("used", t, i), most=budget, integer=0)
    for t in range(total):
        for i in range(total):
            for j in reads[i]:
                rows.append(({("run", t, i): 1, ("run", t, j): -1, ("keep", t, j): -1}, -np.inf, 0))
            if t:
                rows.append(({("keep", t, i): 1, ("run", t - 1, i): -1, ("keep", t - 1, i): -1}, -np.inf, 0))
            for k in range(i, total):
                free = ("free", t, i, k)
                if free in index:
                    rows.append(({free: 1, ("run", t, k): -1}, -np.inf, 0))
                    # not while it is kept for the next round, nor while something later in this one reads it
                    rows.append(({free: 1, ("keep", t + 1, i): 1} if t + 1 < total else {free: 1}, -np.inf, 1))
                    for later in range(k + 1, total):
                        if i in reads[later]:
                            rows.append(({free: 1, ("run", t, later): 1}, -np.inf, 1))
        for k in range(total):
            terms = {("used", t, k): 1.0, ("run", t, k): -1.0}
            if k:
                terms[("used", t, k - 1)] = -1.0
                terms |= {("free", t, i, k - 1): 1.0 for i in {k - 1, *reads[k - 1]}}
            else:
                terms |= {("keep", t, i): -1.0 for i in range(total)}
            rows.append((terms, 0, 0))
            if k == count + 1:
                rows.append(({("used", t, k): 1.0, ("run", t, k): 1.0}, -np.inf, budget))
    matrix = sparse.lil_matrix((len(rows), len(index)))
    for row, (terms, _, _) in enumerate(rows):
        for name, factor in terms.items():
            matrix[row, index[name]] = factor
    objective = np.zeros(len(index))
    for (kind, _, i, *_), column in index.items():
        objective[column] = seconds[i] if kind == "run" else 0.0
    found = optimize.milp(
        objective,
        constraints=optimize.LinearConstraint(matrix.tocsr(), [r[1] for r in rows], [r[2] for r in rows]),
        integrality=whole,
        bounds=optimize.Bounds(low, high),
        options={"mip_rel_gap": 1e-6, "time_limit": 60},
    )
    return None if found.x is None else found.fun


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_checkmates_integer_program_gains_at_most_one_value(count):
    """Any schedule at all needs the same least memory, and one more value makes nested segments as fast as the best."""
    alike = [Stage(1.0, 2.0, 1)] * count
    least = least_budget(alike, 1)
    assert checkmate(count, least - 1) is None
    for budget in range(least, 2 * count + 2):
        best = checkmate(count, budget)
        assert best is not None
        assert rotor(alike, 1, budget + 1).seconds - 1e-6 <= best <= rotor(alike, 1, budget).seconds + 1e-6
