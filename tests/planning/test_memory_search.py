"""The plan of least FLOP that fits: save sets of any budget, and what a compiler says of them."""

import dataclasses
from types import SimpleNamespace

import pytest

from jaxscale.errors import UserError
from jaxscale.memory.decision import Decision
from jaxscale.planning import memory_search
from jaxscale.planning.estimate import estimate
from jaxscale.planning.memory_costs import MemoryCosts
from jaxscale.planning.memory_search import cheapest_fit
from jaxscale.planning.program import compiled_bytes
from jaxscale.platforms.detect import detect
from jaxscale.platforms.platform import Platform
from jaxscale.programs.block import BlockGraph
from jaxscale.programs.collect import BlockCall
from tests.plans import plan_of

V5E = Platform.parse("tpu v5e:2x2")
MIB = 2**20


class Model:
    """A model whose memory plans are given by formula: what is asked of it, and what it answers."""

    base, most, least, step, work = 100 * MIB, 900 * MIB, 40 * MIB, 7 * MIB, 3000
    spared, hosted = 0, 50 * MIB
    calls = (BlockCall("block", BlockGraph("block", (), (), (), (), (), ()), (), 8, True, 0),)

    def __init__(self):
        self.asked = []

    def kept(self, memory) -> int:
        budget = memory.budget or 0
        if memory.rule == "save" and budget < self.least:
            raise UserError("below the least possible")
        share = {"none": 1.0, "dots": 0.5, "jax": 0.3, "full": self.least / self.most, "sqrt": 0.2}
        kept = int(share[memory.rule] * self.most) if memory.rule in share else min(budget, self.most)
        return kept if memory.rule == "none" else kept // self.step * self.step

    def flop(self, memory) -> int:
        # half of what is kept costs nothing to compute again; the other half a third of the step
        again = max(0.0, 1 - self.kept(memory) / (self.most / 2))
        worse = {"jax": 100, "sqrt": 1000, "offload": -self.spared}.get(memory.rule, 0)
        return int(self.work * (1 + again / 3)) + worse

    def described_step(self, experiment, platform, plan):
        self.asked.append(str(plan.memory))
        return SimpleNamespace(plan=plan, decision=SimpleNamespace(bytes=self.kept(plan.memory)))

    def costs(self, experiment, platform, plan):
        """Of a platform whose rates nobody knows."""
        return MemoryCosts(platform, self.calls, 1)

    def of_step(self, step, batch, platform):
        memory = step.plan.memory
        return SimpleNamespace(flop=self.flop(memory), device_bytes=self.taken(memory), host_bytes=self.hosted)

    def decision(self, memory):
        return Decision(memory, seconds=float(self.flop(memory) - self.work))

    def taken(self, memory) -> int:
        return self.base + self.kept(memory)


@pytest.fixture
def model(monkeypatch):
    made = Model()
    monkeypatch.setattr(memory_search, "described_step", made.described_step)
    monkeypatch.setattr(memory_search, "of_step", made.of_step)
    monkeypatch.setattr(MemoryCosts, "of", made.costs)
    monkeypatch.setattr(MemoryCosts, "is_timed", False)
    return made


def fitting(model, limit: int):
    """The least FLOP of all budgets that fit, by trying every one."""
    parse = memory_search.MemoryPlan.parse
    budgets = (parse(f"save:{budget}MiB") for budget in range(model.least // MIB, model.most // MIB + 1))
    return min(model.flop(memory) for memory in budgets if model.taken(memory) <= limit)


@pytest.mark.parametrize("limit", [150, 200, 333, 500, 560, 900])
def test_the_largest_save_set_that_fits_is_found(experiment, model, limit):
    memory = cheapest_fit(experiment, V5E, limit * MIB).memory
    assert model.taken(memory) <= limit * MIB
    assert memory.rule == "save"
    # what lies within CLOSE of the limit, and two steps of the curve, is worth no further estimate
    near = model.work / 3 * (memory_search.CLOSE * limit * MIB + 2 * model.step) / (model.most / 2)
    assert model.flop(memory) - fitting(model, limit * MIB) <= near + 1
    assert len(model.asked) == len(set(model.asked)) <= memory_search.MAX_ESTIMATES + len(memory_search.MENU) + 1
    assert len(str(memory)) <= len("save:888.5MiB")


@pytest.mark.parametrize(
    ("spared", "host", "plan", "rule"),
    [
        (200, 2**40, {}, "offload"),
        (20, 2**40, {}, "save"),
        (200, 49 * MIB, {}, "save"),
        (200, 2**40, {"weights": "host"}, "save"),
    ],
)
def test_offload_is_taken_where_it_spares_enough_time_and_fits_the_host(
    experiment, model, monkeypatch, spared, host, plan, rule
):
    monkeypatch.setattr(MemoryCosts, "is_timed", True)
    monkeypatch.setattr(MemoryCosts, "block_seconds", 3000.0)
    monkeypatch.setattr(MemoryCosts, "decision", lambda self, memory: model.decision(memory))
    model.spared = spared
    plan = plan_of(experiment.plan, **plan)
    memory = cheapest_fit(experiment, V5E, 400 * MIB, plan, host_limit=host).memory
    assert memory.rule == rule
    assert model.taken(memory) <= 400 * MIB
    if plan.offload.weights == "host":  # whose plans run no segments of blocks
        assert "sqrt" not in model.asked


@pytest.mark.slow
def test_of_all_that_fits_the_least_time_is_taken(planned):
    """By estimate, on a chip whose rates are known; and nothing that does not go with the rest is even asked."""
    for place in ("device", "host"):
        experiment = planned("fsdp:4", precision="bfloat16", weights=place)
        limit = estimate(experiment, V5E).device_bytes * 4 // 5
        plan = cheapest_fit(experiment, V5E, limit)
        costs = MemoryCosts.of(experiment, V5E, experiment.plan)
        assert estimate(experiment, V5E, plan).device_bytes <= limit
        assert plan.memory.rule in ("save", "offload")
        least = costs.seconds(costs.decision(plan.memory))
        assert least <= costs.seconds(costs.decision(memory_search.MemoryPlan("full")))
        for text in ("dots", "full"):
            other = dataclasses.replace(plan, memory=memory_search.MemoryPlan.parse(text))
            if estimate(experiment, V5E, other).device_bytes <= limit:
                assert least <= costs.seconds(costs.decision(other.memory))


def test_what_fits_as_it_is_is_asked_nothing_else(experiment, model):
    assert str(cheapest_fit(experiment, V5E, 1000 * MIB).memory) == "none"
    assert model.asked == ["none"]


@pytest.mark.parametrize("off", [lambda b: b * 1.3, lambda b: b * 0.8, lambda b: b + 50 * MIB])
@pytest.mark.parametrize("limit", [260, 400])
def test_the_compiler_corrects_the_estimate(experiment, model, limit, off):
    compiled = []

    def measure(_, plan):
        compiled.append(str(plan.memory))
        return int(off(model.taken(plan.memory)))

    memory = cheapest_fit(experiment, V5E, limit * MIB, measure=measure).memory
    assert off(model.taken(memory)) <= limit * MIB
    assert str(memory) in compiled
    assert len(compiled) == len(set(compiled))
    assert sum(text.startswith("save") for text in compiled) <= memory_search.MAX_COMPILES
    assert len(compiled) <= memory_search.MAX_COMPILES + 1
    true = next(taken for taken in range(1000 * MIB, 0, -MIB) if off(taken) <= limit * MIB)
    assert model.flop(memory) <= 1.03 * fitting(model, true)


def test_what_a_compiler_never_lets_fit(experiment, model):
    with pytest.raises(UserError, match=r"at least .* under each of the memory plans none, dots, .*; the limit is 300"):
        cheapest_fit(experiment, V5E, 300 * MIB, measure=lambda *_: 2**40)


def test_below_the_least_budget_other_plans_are_left(experiment, model):
    model.least = 600 * MIB
    limit = model.base + model.most // 5
    assert cheapest_fit(experiment, V5E, limit).memory.rule == "sqrt"


def test_a_model_that_takes_no_save_set(experiment, model):
    model.least = 2**40
    with pytest.warns(UserWarning, match="save:900MiB is left out: below the least possible"):
        assert cheapest_fit(experiment, V5E, 600 * MIB).memory.rule == "dots"


def test_several_layers_an_iteration_take_plain_plans_alone(experiment, model):
    plan = dataclasses.replace(experiment.plan, unroll=2)
    assert str(cheapest_fit(experiment, V5E, 600 * MIB, plan).memory) == "dots"
    assert model.asked == ["none", "dots", "full"]


@pytest.mark.slow
def test_on_this_machine_what_is_chosen_fits_and_recomputes_little(planned):
    experiment = planned("data:8")
    everything, nothing = (compiled_bytes(experiment, planned("data:8", memory=memory).plan) for memory in PLANS)
    limit = (2 * everything + nothing) // 3
    plan = cheapest_fit(experiment, detect(), limit, measure=compiled_bytes)
    assert plan.memory.rule != "full"
    assert compiled_bytes(experiment, plan) <= limit
    most, taken = (estimate(experiment, detect(), planned("data:8", memory=memory).plan).flop for memory in PLANS)
    assert estimate(experiment, detect(), plan).flop < (most + taken) / 2


PLANS = tuple(map(memory_search.MemoryPlan, ("none", "full")))
