"""The plan of least FLOP that fits: save sets of any budget, and what a compiler says of them."""

import dataclasses
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from jaxscale.errors import UserError
from jaxscale.memory.decision import Decision
from jaxscale.models import ForeignModel, classification, linen_model
from jaxscale.optim import Optimizer
from jaxscale.planning import memory_search
from jaxscale.planning.explain import explain
from jaxscale.planning.memory_costs import MemoryCosts
from jaxscale.planning.memory_search import cheapest_fit
from jaxscale.planning.program import compiled_bytes, described_step
from jaxscale.planning.search import model_costs
from jaxscale.planning.search.step_seconds import modeled_seconds
from jaxscale.platforms.detect import detect
from jaxscale.platforms.platform import Platform
from jaxscale.programs.block import BlockGraph
from jaxscale.programs.collect import BlockCall
from jaxscale.recipe.experiment import Experiment
from tests.plans import plan_of
from tests.tiers import variants
from tests.traced_once import estimate

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
    # what lies within CLOSE_SHARE of the limit, and two steps of the curve, is worth no further estimate
    near = model.work / 3 * (memory_search.CLOSE_SHARE * limit * MIB + 2 * model.step) / (model.most / 2)
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


@pytest.mark.parametrize(
    "fields", [{"mesh": "fsdp:4"}, {"mesh": "fsdp:4", "microbatches": 2}, {"mesh": "fsdp:2", "pipeline": "1f1b:2x4"}]
)
def test_steps_cost_what_the_search_over_plans_models(planned, fields):
    experiment, platform = planned(**fields, precision="float32"), V5E
    costs = MemoryCosts.of(experiment, platform, experiment.plan)
    resolved_plan = described_step(experiment, platform).plan
    seconds = {}
    for text in ("none", "dots", "full", "save:1MiB"):
        memory = memory_search.MemoryPlan.parse(text)
        seconds[text] = costs.step_seconds(memory, costs.decision(memory))
        if memory.budget is None:
            modeled = modeled_seconds(experiment, platform, dataclasses.replace(resolved_plan, memory=memory)).total
            assert seconds[text] == pytest.approx(modeled, rel=1e-2)  # traced for other numbers of rows
    assert seconds["none"] <= seconds["save:1MiB"] <= seconds["full"]
    assert seconds["none"] < seconds["full"]


def test_steps_of_a_processor_are_ranked_by_flop(planned):
    experiment, platform = planned("fsdp:4", precision="float32"), Platform.parse("cpu x 4")
    costs = MemoryCosts.of(experiment, platform, experiment.plan)
    assert (
        costs.step_seconds(memory_search.MemoryPlan("full"), costs.decision(memory_search.MemoryPlan("full"))) is None
    )
    limit = estimate(experiment, platform).device_bytes * 9 // 10
    assert cheapest_fit(experiment, platform, limit).memory.rule == "save"


def test_a_model_of_a_fixed_number_of_rows_is_searched_by_added_seconds(planned, monkeypatch):
    def refuse(*_):
        raise ValueError("expects 8 rows")  # as a user's module might, traced for the rows of one device

    monkeypatch.setattr(model_costs, "split_costs", refuse)
    experiment = planned("fsdp:4", precision="bfloat16")
    costs = MemoryCosts.of(experiment, V5E, experiment.plan)
    assert (
        costs.step_seconds(memory_search.MemoryPlan("full"), costs.decision(memory_search.MemoryPlan("full"))) is None
    )
    limit = estimate(experiment, V5E).device_bytes * 4 // 5
    assert cheapest_fit(experiment, V5E, limit).memory.rule in ("save", "offload")


def test_plans_are_ranked_on_one_scale(experiment, model, monkeypatch):
    candidates = [memory_search.Candidate(plan_of(experiment.plan), flop, 0, 0) for flop in (3, 1, 2)]
    ranked = memory_search._Candidates(experiment, V5E, experiment.plan, None)
    seconds = dict(zip(candidates, (0.1, 0.2, None), strict=True))
    monkeypatch.setattr(memory_search._Candidates, "_seconds_of", lambda self, candidate: seconds[candidate])
    assert [candidate.flop for candidate in ranked.cheapest_first(candidates)] == [1, 2, 3]
    seconds[candidates[2]] = 0.15
    assert [candidate.flop for candidate in ranked.cheapest_first(candidates)] == [3, 2, 1]


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


class Widening(nnx.Module):
    """A block whose inner values are four times as wide as its input."""

    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(16, 64, rngs=rngs), nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class InList(nnx.Module):
    def __init__(self, rngs, depth=9):
        self.layers = nnx.List([Widening(rngs) for _ in range(depth)])
        self.head = nnx.Linear(16, 5, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class WithSkips(InList):
    """Blocks that also read the first block's result."""

    def __call__(self, x):
        first = self.layers[0](x)
        x = first
        for layer in self.layers[1:]:
            x = layer(x) + layer(first)
        return self.head(x)


class InScan(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.split_rngs(splits=9)(nnx.vmap(Widening))(rngs)
        self.head = nnx.Linear(16, 5, rngs=rngs)

    def __call__(self, x):
        return self.head(jax.lax.scan(lambda x, layer: (layer(x), None), x, self.layers)[0])


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x):
        return x + linen.Dense(16)(jnp.tanh(linen.Dense(64)(x)))


class LinenStack(linen.Module):
    @linen.compact
    def __call__(self, x):
        for _ in range(9):
            x = LinenBlock()(x)
        return linen.Dense(5)(x)


def foreign(model) -> Experiment:
    """An experiment of a model that is not built of jaxscale's layers."""
    if not dataclasses.is_dataclass(model):
        model = ForeignModel(model, classification())
    batch = {"images": np.ones((512, 16), "float32"), "labels": np.zeros(512, "int32")}
    return Experiment("foreign", model, batch, Optimizer("sgd"), steps=1, batch=512, plan=plan_of(mesh="1"))


def linen_stack():
    return linen_model(LinenStack(), jax.ShapeDtypeStruct((1, 16), "float32"), score=classification())


@pytest.mark.parametrize(
    ("make", "menu"),
    [
        pytest.param(lambda: InList, ("none", "sqrt"), marks=pytest.mark.variant),  # tests/models/test_foreign_chain.py
        pytest.param(linen_stack, ("none", "sqrt"), marks=pytest.mark.slow),
        pytest.param(lambda: InScan, ("none", "sqrt"), marks=pytest.mark.slow),
        pytest.param(lambda: InList, None, marks=pytest.mark.slow),
    ],
    ids=["list", "linen", "scan", "list, any"],
)
def test_the_plan_of_foreign_blocks_compiles_within_the_limit(make, menu):
    experiment = foreign(make())
    whole_bytes = compiled_bytes(experiment, experiment.plan)
    plan = cheapest_fit(experiment, detect(), whole_bytes * 3 // 5, menu=menu, measure=compiled_bytes)
    assert plan.memory.rule == "sqrt" if menu else plan.memory.rule in ("save", "chain")
    assert compiled_bytes(experiment, plan) <= whole_bytes * 3 // 5


def shallow(make, depth=3):
    return lambda rngs: make(rngs, depth)


ACCEPTED = {
    "list": (shallow(InList), ""),
    "scan": (InScan, ""),
    "linen": (linen_stack(), ""),
    "skips": (shallow(WithSkips), "needs each block called once, in the order layers/0, layers/1"),
    "one block": (ForeignModel(shallow(InList), classification(), blocks=()), "got no submodules that repeat"),
    "one in a list": (shallow(InList, 1), "got no submodules that repeat"),
    "one named": (ForeignModel(shallow(InList), classification(), blocks=("layers/1",)), "got one block, layers/1"),
    "no blocks": (lambda rngs: nnx.Linear(16, 5, rngs=rngs), "expected at least two blocks in sequence"),
}
"""Foreign models, and why a step refuses segments of their blocks."""


CASES = [pytest.param(*case, id=name) for name, case in ACCEPTED.items()]


@pytest.mark.parametrize(("model", "reason"), variants(CASES, default=set(ACCEPTED) - {"linen", "scan"}))
def test_segments_are_offered_to_the_foreign_models_whose_step_accepts_them(model, reason):
    experiment = foreign(model)
    candidates = memory_search._Candidates(experiment, V5E, experiment.plan, None)
    if reason:
        with pytest.raises(UserError, match=reason):
            candidates.candidate("sqrt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nobody asked for segments
        assert (candidates.candidate_or_none("sqrt") is not None) == (not reason)
        assert (candidates.candidate_or_none("chain:1MiB") is not None) == (not reason)
    named = memory_search._Candidates(experiment, V5E, experiment.plan, None, is_default_menu=False)
    if reason:
        with pytest.warns(UserWarning, match=f"sqrt is left out.*{reason}"):
            assert named.candidate_or_none("sqrt") is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["list", "no blocks"])
def test_explanations_compare_the_plans_that_the_step_accepts(name):
    points = explain(foreign(ACCEPTED[name][0]), V5E, limit=2**20).points
    rules = {point.name.partition(":")[0] for point in points}
    assert ({"sqrt", "chain"} <= rules) == (name == "list")
    assert {"none", "full"} <= rules
