"""The best plan of a model and a platform: the search against brute force, its text, its files and its refusals."""

import dataclasses
import itertools
import random

import numpy as np
import pytest

import jaxscale as jx
from jaxscale.data import Text
from jaxscale.errors import UserError
from jaxscale.memory.plan import MemoryPlan
from jaxscale.models import Decoder, ForeignModel
from jaxscale.planning.estimate import Estimate
from jaxscale.planning.search import model_costs, search
from jaxscale.planning.search.choice import choose_plan, flags_of, plan_summary
from jaxscale.planning.search.model_costs import SplitCosts, rated
from jaxscale.planning.search.ranked import BIN_WIDTH, RankedPlan, bin_of, rounded_down_bytes
from jaxscale.planning.search.search import Search
from jaxscale.planning.search.space import Choices, Variant, layouts, technique_count, variants
from jaxscale.planning.search.step_seconds import StepSeconds, bubble_of
from jaxscale.planning.search.traffic import Sizes
from jaxscale.planning.timeline import Timeline
from jaxscale.platforms.platform import Platform
from jaxscale.programs import roofline
from jaxscale.recipe.combinations import check
from jaxscale.recipe.plan import OffloadPlan, Plan, read_plan
from jaxscale.recipe.requests import Facts
from jaxscale.values import override

GiB = 2**30
PLATFORMS = ("tpu v5e:2x2", "tpu v5e:2x4", "tpu v5p:2x2x1", "gpu h100 x 8", "gpu a100 x 16", "tpu v6e:2x2 x 2")


DISTANT = ("pipeline", "tensor", "offload", "loss_chunk")
"""Settings whose plans tests of other settings do not search."""


def experiment(**fields):
    model = Decoder(vocab=512, context=128, layers=2, embed=128, heads=4)
    return jx.Experiment("small", model, Text("text.txt", context=128), batch=16, **fields)


class Costs(SplitCosts):
    """Costs of a made-up model, whose rules keep shares of what the blocks need."""

    def suits(self, memory):
        return memory.budget is None or memory.budget > 0

    def kept(self, memory, rows):
        needed, work = self.block_bytes * self.sizes.layers * rows / self.rows, self.forward_seconds * rows / self.rows
        share = {"none": 1.0, "dots": 0.4, "full": 0.05}.get(memory.rule)
        if share is None:
            share = min(1.0, memory.budget * self.pipe_stages / needed)
        return model_costs.Kept(share * needed, (1 - share) ** 2 * work, (1 - share) ** 2)

    pipe_stages = 1


def made_up(rng, platform):
    """Return an experiment and a function that returns the costs of its splits."""
    layers, embed = rng.choice([8, 16, 32]), rng.choice([1024, 2048, 4096])
    batch = platform.devices * rng.choice([1, 2, 4, 8])
    model = Decoder(vocab=32000, context=4096, layers=layers, embed=embed, heads=16)
    weights = 12 * layers * embed**2

    def split_costs(experiment, platform, plan, tensor, sequence):
        rows = max(1, batch * tensor * sequence // platform.devices)
        tokens = rows * 4096 / sequence
        seconds = 2 * weights * tokens / tensor / 1e14
        return Costs(
            batch=batch,
            rows=rows,
            sizes=Sizes(weights // tensor, 2 * 32000 * embed // tensor, layers, 4096 // sequence * embed),
            forward_seconds=seconds,
            backward_seconds=2 * seconds,
            head_seconds=0.1 * seconds,
            block_bytes=34 * tokens * embed / tensor,
            input_bytes=2 * tokens * embed,
            loss_bytes=6 * tokens * 32000 / tensor,
            working_bytes=40 * tokens * embed / tensor,
            weight_bytes=4 * (weights + 64000 * embed) / tensor,
            state_bytes=8 * (weights + 64000 * embed) / tensor,
            positions=4096 // sequence,
            row_positions=4096,
            step_flop=1.0,
            calls=(),
            chip=platform.chip,
            products=7 * layers,
        )

    return jx.Experiment("made up", model, Text("text.txt"), batch=batch), split_costs


def plan_or_none(candidate):
    """Return the plan of a candidate; `None` if a rule refuses it."""
    try:
        return candidate.plan
    except UserError:
        return None


@pytest.mark.parametrize("case_count", [3, pytest.param(300, marks=pytest.mark.slow)])
def test_the_search_is_not_worse_than_brute_force(case_count, monkeypatch):
    seed = random.SystemRandom().randrange(10**6)
    rng = random.Random(seed)
    noise: dict = {}

    def fake_estimate(experiment, platform, plan):
        """Bytes by the closed form, off by a factor that plans of one family share."""
        variant = Variant.of(plan)
        costs = finder.costs_of(plan)
        kept = costs.kept(plan.memory, costs.batch / plan.mesh.batch_shards / plan.microbatches)
        family = RankedPlan(plan, variant, kept, costs, finder._rated_platform, 0.0).family
        byte_count = search.sum_of_kinds(search.bytes_by_kind(plan, variant, kept, costs))
        factor = noise.setdefault((seed, str(family)), rng.uniform(0.97, 1.1))
        return Estimate(plan, {"parameters": int(factor * byte_count)}, {}, 0, Timeline(()))

    monkeypatch.setattr(search, "estimate", fake_estimate)
    counts = []
    for case in range(case_count):
        platform = Platform.parse(rng.choice(PLATFORMS))
        made_up_experiment, split_costs = made_up(rng, platform)
        monkeypatch.setattr(search, "split_costs", split_costs)
        choices = Choices(Plan(precision="bfloat16"), forbidden=frozenset(rng.choice([[], ["pipeline"], ["offload"]])))
        finder = Search(made_up_experiment, platform, choices, None, None)
        candidates, _ = finder.candidates
        byte_counts = sorted(candidate.bytes for candidate in candidates)
        limit = int(byte_counts[int(rng.uniform(0.02, 0.9) * len(byte_counts))])
        finder = dataclasses.replace(finder, limit=limit)
        best = finder.run().plans[0]
        assert best.fits, (seed, case)
        for candidate in candidates:  # none that is faster fits
            if candidate.computation_seconds >= best.seconds.total:
                continue
            assert candidate.seconds.total >= candidate.computation_seconds
            if candidate.seconds.total < best.seconds.total * (1 - BIN_WIDTH) and (plan := plan_or_none(candidate)):
                assert fake_estimate(None, platform, plan).device_bytes > limit, (seed, case, plan_summary(plan))
        counts.append(len(finder.estimates))
    assert max(counts) <= search.MAX_ESTIMATES + search.MAX_BUDGETS


def test_a_layout_that_keeps_everything_only_by_closed_form_has_other_memory_rules(monkeypatch):
    platform = Platform.parse("tpu v5e:2x2")
    made_up_experiment, split_costs = made_up(random.Random(0), platform)
    monkeypatch.setattr(search, "split_costs", split_costs)
    base = Plan(mesh="fsdp:4", zero=3, precision="bfloat16")
    choices = Choices(base, frozenset({"mesh", "zero"}), frozenset({"offload", "loss_chunk", "microbatches"}))
    finder = Search(made_up_experiment, platform, choices, None, None)
    bytes_by_rule = {candidate.variant.memory.rule: candidate.bytes for candidate in finder.candidates[0]}
    assert bytes_by_rule["dots"] < 0.9 * bytes_by_rule["none"]

    def fake_estimate(experiment, platform, plan):
        factor = 1.05 if plan.memory.rule == "none" else 1.0
        return Estimate(plan, {"parameters": int(factor * bytes_by_rule[plan.memory.rule])}, {}, 0, Timeline(()))

    monkeypatch.setattr(search, "estimate", fake_estimate)
    finder = dataclasses.replace(finder, limit=int(1.02 * bytes_by_rule["none"]))
    best = finder.run().plans[0]
    assert (best.fits, best.plan.memory.rule) == (True, "dots")


@pytest.mark.variant  # brute force, above
def test_a_search_of_a_real_model_finds_the_fastest_plan_that_fits():
    base = Plan(precision="bfloat16")
    forbidden = frozenset({"pipeline", "offload", "loss_chunk", "tensor"})
    platform = Platform.parse("tpu v5e:2x2")
    limit = 20 * 2**20
    finder = Search(experiment(), platform, Choices(base, forbidden=forbidden), limit, None)
    best = finder.run().plans[0]
    judged = [finder.judge(candidate) for candidate in itertools.islice(finder.best_first(finder.candidates[0]), 6)]
    fitting = [one.seconds.total for one in judged if one is not None and one.fits]
    assert best.fits
    assert best.seconds.total <= min(fitting)
    assert best.seconds.total == pytest.approx(sum(best.seconds.items.values()))


@pytest.mark.parametrize(
    ("platform", "forbidden"),
    [
        pytest.param("tpu v5e:2x2", (), marks=pytest.mark.variant),
        ("gpu h100 x 2", ()),
        ("cpu x 2", (*DISTANT, "microbatches")),
    ],
)
def test_a_choice_is_a_plan_of_all_devices(platform, forbidden, tmp_path):
    choice = choose_plan(experiment(), platform, forbidden=forbidden)
    assert choice.fits
    assert choice.plan.mesh.devices == choice.platform.devices
    words = flags_of(choice.plan).replace("--plan.", "").split()
    plan = choice.plan if choice.plan.pipeline is None else dataclasses.replace(choice.plan, microbatches=1)
    assert override(Plan(), dict(zip(words[::2], words[1::2], strict=True))) == plan  # a pipeline sets microbatches
    choice.save_plan(tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == choice.plan
    choice.write(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert "<svg" in page
    assert plan_summary(choice.plan) in page
    assert ("modeled:" in str(choice)) == (platform != "cpu x 2")


def test_fixed_and_forbidden_settings_hold():
    plan = Plan(mesh="data:2,fsdp:4", zero=2, memory="full")
    fixed = choose_plan(
        experiment(), "gpu h100 x 8", plan, fixed=("mesh", "zero", "memory"), forbidden=("offload", "loss_chunk")
    ).plan
    assert (str(fixed.mesh), fixed.zero, str(fixed.memory)) == ("data:2,fsdp:4", 2, "full")
    plain = choose_plan(experiment(), "gpu h100 x 2", forbidden=("zero", "microbatches", *DISTANT)).plan
    assert (plain.zero, plain.pipeline, plain.mesh.tensor, plain.microbatches) == (0, None, 1, 1)


@pytest.mark.variant  # a fixed setting, above
def test_replicas_with_a_codec_stay():
    base = Plan(mesh="replica:2,fsdp:4", zero=3, reduce="int8")
    codec = choose_plan(experiment(), "tpu v5e:2x2 x 2", base, forbidden=(*DISTANT, "microbatches")).plan
    assert (codec.mesh.replica, str(codec.reduce)) == (2, "int8")


def test_the_objective_memory_takes_the_least_memory_and_equal_searches_choose_alike(monkeypatch):
    forbidden = (*DISTANT, "microbatches")
    least = choose_plan(experiment(), "gpu h100 x 4", objective="memory", forbidden=forbidden)
    fastest = choose_plan(experiment(), "gpu h100 x 4", forbidden=forbidden)
    assert least.best.device_bytes < fastest.best.device_bytes
    assert least.best.seconds.total >= fastest.best.seconds.total
    monkeypatch.undo()  # the steps are traced again
    assert str(choose_plan(experiment(), "gpu h100 x 4", forbidden=forbidden)) == str(fastest)


def test_the_objective_chips_takes_the_smallest_machine_that_the_model_fits():
    forbidden = (*DISTANT, "replica")
    choice = choose_plan(experiment(), "gpu h100 x 8", limit="9MiB", objective="chips", forbidden=forbidden)
    assert choice.fits
    assert 1 < choice.platform.chips < 8
    half = Platform.parse(f"gpu h100 x {choice.platform.chips // 2}")
    assert not choose_plan(experiment(), half, limit="9MiB", objective="memory", forbidden=forbidden).fits


def test_when_nothing_fits_the_choice_reports_what_is_missing_and_which_machine_would_do():
    choice = choose_plan(experiment(), "gpu h100 x 2", limit="5MiB", forbidden=DISTANT)
    assert not choice.fits
    text = str(choice)
    assert "does not fit" in text
    assert "too much" in text
    assert "offload was not searched, as you asked" in text
    assert "--plan.precision bfloat16 would free" in text or "--plan.state.moments int8 would free" in text
    assert "h100" in text.split("the smallest gpu")[-1] or "up to 64 times as large would do" in text


def test_one_device_on_which_nothing_fits_gets_advice():
    choice = choose_plan(experiment(), "gpu h100", limit="20KiB", forbidden=("tensor", "pipeline", "microbatches"))
    assert not choice.fits
    assert "too much" in str(choice)


def test_an_optimizer_whose_replicas_send_momenta_gets_replicas():
    one_bit = experiment(optimizer=jx.Optimizer("one_bit_adam", freeze=20), steps=100)
    choice = choose_plan(one_bit, "gpu h100 x 4", forbidden=("pipeline", "offload", "tensor", "microbatches"))
    assert choice.fits
    assert choice.plan.mesh.replica == 2


def test_devices_that_share_a_chip_do_not_exceed_its_peak():
    """The modeled seconds of a TPU 7x, whose devices are half a chip, stay below the efficiency of its products."""
    model = Decoder(vocab=4096, context=2048, layers=2, embed=4096, heads=32)
    wide = jx.Experiment("wide", model, Text("text.txt", context=2048), batch=64)
    fixed = ("mesh", "zero", "memory", "microbatches", "pipeline", "offload", "loss_chunk")
    choice = choose_plan(wide, "tpu 7x:2x2x1", Plan(mesh="fsdp:8", zero=3, precision="bfloat16"), fixed=fixed)
    assert roofline.DEFAULT_EFFICIENCY / 2 < choice.mfu < roofline.DEFAULT_EFFICIENCY


def test_a_chip_without_bfloat16_has_seconds_and_simpler_plans_win_ties():
    t4 = Platform.parse("gpu t4")
    assert rated(t4).chip.bfloat16 == t4.chip.float32
    assert rated(t4).links == t4.links
    full = Variant(MemoryPlan("full"), 64)
    assert technique_count(Plan(mesh="data:8"), Variant(MemoryPlan("none"))) < technique_count(
        Plan(mesh="data:8"), full
    )
    assert bin_of(1.0) == bin_of(1.001)
    assert bin_of(1.0) < bin_of(1.05)
    assert rounded_down_bytes(1000 * 2**20 + 5) == 1000 * 2**20


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"forbidden": "pipeline"}, "forbidden: got the text 'pipeline', expected names of settings"),
        ({"forbidden": ("pipelines",)}, "unknown setting 'pipelines'.*did you mean 'pipeline'"),
        ({"fixed": ("zero",), "forbidden": ("zero",)}, "zero: it is both fixed and forbidden"),
        ({"fixed": ("mesh",)}, "mesh: it is fixed, but the plan has no mesh"),
        ({"plan": Plan(mesh="fsdp:4"), "fixed": ("mesh",), "forbidden": ("tensor",)}, "tensor: it is forbidden, but"),
        ({"forbidden": ("mesh",)}, "mesh: it is forbidden, but every plan has one"),
        ({"fixed": ("tensor",)}, "tensor: it is fixed, but the plan has no mesh"),
        (
            {"plan": Plan(mesh="pipe:2", pipeline="1f1b:2x4"), "fixed": ("mesh",), "forbidden": ("pipeline",)},
            "pipeline: it is forbidden, but the fixed mesh pipe:2 has an axis pipe",
        ),
        ({"objective": "cost"}, "objective: got 'cost', expected 'time', 'memory' or 'chips'"),
        ({"verify": -1}, "verify: got -1, expected a whole number"),
        ({"plan": Plan(mesh="fsdp:3"), "fixed": ("mesh",)}, "every plan is refused: no mesh divides the batch"),
    ],
)
def test_mistakes(fields, message):
    with pytest.raises(UserError, match=message):
        choose_plan(experiment(), "gpu h100 x 8", **fields)


def test_an_odd_number_of_devices_is_used_as_far_as_the_batch_allows():
    choice = choose_plan(experiment(), "gpu h100 x 7", forbidden=(*DISTANT, "microbatches"))
    assert choice.plan.mesh.devices == 4


def test_proposals_pass_the_rules_without_a_trace():
    seed = random.SystemRandom().randrange(10**6)
    rng = random.Random(seed)
    for _ in range(6):
        platform = Platform.parse(rng.choice(PLATFORMS))
        choices = Choices(Plan(precision=rng.choice(["float32", "bfloat16"])))
        every = list(layouts(experiment(), platform, platform.devices, choices))
        for layout in rng.sample(every, min(40, len(every))):
            variant = rng.choice(variants(experiment(), platform, choices))
            assert layout.mesh.devices == platform.devices, seed
            assert experiment().batch % (layout.mesh.batch_shards * layout.microbatches) == 0, seed
            if variant.offload.gradients == "device":
                check(Facts(variant.applied_to(layout), experiment()))


def test_seconds_of_pipelines_offload_and_interference():
    assert bubble_of(jx.pipeline.PipelinePlan.parse("gpipe:4x8")) == pytest.approx(3 / 11)
    assert bubble_of(jx.pipeline.PipelinePlan.parse("zb-h1:4x8")) < bubble_of(
        jx.pipeline.PipelinePlan.parse("1f1b:4x8")
    )
    assert str(StepSeconds({"forward": 1.0, "backward": 3.0}, 0.5)) == (
        "4.00 s a step: forward 25%, backward 75%; 0.50 s of communication beside the products"
    )
    choice = choose_plan(
        experiment(),
        "tpu v5e:2x2",
        Plan(offload=OffloadPlan(optimizer_state="streamed")),
        fixed=("offload",),
        forbidden=("tensor", "pipeline"),
    )
    assert choice.best.seconds.items["host copies"] > 0
    assert rated(Platform.parse("gpu h100")) == Platform.parse("gpu h100")


def test_the_costs_of_a_split_are_those_of_the_model():
    platform = Platform.parse("tpu v5e:2x2")
    whole, halved = (model_costs.split_costs(experiment(), platform, Plan(), tensor, 1) for tensor in (1, 2))
    block = 2 * (4 * 128 * 128 + 3 * 128 * 512)  # two layers: attention and a gated mlp
    assert whole.sizes.layers == 2
    assert whole.sizes.block_weights == pytest.approx(block, rel=0.05)
    assert halved.sizes.block_weights == pytest.approx(block / 2, rel=0.05)
    assert whole.sizes.activation_elements == 128 * 128
    assert whole.row_positions == 128
    assert whole.rows == 4
    flop = 2 * 16 * 128 * (block + 128 * 512) * 3
    assert whole.step_flop == pytest.approx(flop, rel=0.15)
    assert halved.forward_seconds == pytest.approx(whole.forward_seconds, rel=0.4)  # twice the rows, half the work


def test_a_foreign_model_and_one_without_blocks_are_planned():
    from flax import nnx

    def score(module, batch):
        return ((module(batch["x"]) - batch["y"]) ** 2).mean(-1)

    rows = {"x": np.zeros((64, 8), np.float32), "y": np.zeros((64, 4), np.float32)}
    model = ForeignModel(lambda rngs: nnx.Linear(8, 4, rngs=rngs), score)
    choice = choose_plan(jx.Experiment("line", model, jx.data.Arrays(rows), batch=16), "gpu h100 x 4")
    assert choice.fits
    assert choice.plan.memory.rule == "none"
    assert choice.plan.pipeline is None


@pytest.mark.slow
def test_every_chosen_plan_trains_with_the_losses_of_one_device():
    seed = random.SystemRandom().randrange(10**6)
    rng = random.Random(seed)
    names = ("tensor", "pipeline", "zero", "microbatches", "memory", "replica", "sequence_parallel")
    tokens = np.random.default_rng(0).integers(0, 512, (16, 129)).astype(np.int32)
    batches = [{"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}] * 2

    def losses(plan):
        step = jx.build(experiment(), plan)
        state, step_losses = step.init(), []
        for batch in batches:
            state, metrics = step(state, step.place(batch))
            step_losses.append(float(metrics["loss"]))
        return step_losses

    plain = losses(Plan(mesh="1"))
    for _ in range(20):
        forbidden = tuple(rng.sample(names, rng.randrange(5)))
        limit = rng.choice([None, "12MiB", "6MiB"])
        choice = choose_plan(experiment(), "cpu x 8", forbidden=forbidden, limit=limit)
        np.testing.assert_allclose(losses(choice.plan), plain, rtol=2e-4, err_msg=f"{seed} {plan_summary(choice.plan)}")
