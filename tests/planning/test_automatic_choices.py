"""What is left open in a plan is chosen before a step is built."""

import dataclasses

import pytest

from jaxscale.errors import UserError
from jaxscale.models.decoder import Decoder
from jaxscale.pipeline.choose.partition import ModelPrices
from jaxscale.pipeline.choose.price import Price
from jaxscale.planning import pipeline_choice
from jaxscale.planning.automatic_choices import resolve_choices
from jaxscale.planning.pipeline_choice import prices_of_periods
from jaxscale.planning.program import described_step
from jaxscale.planning.search.step_seconds import modeled_seconds
from jaxscale.platforms.platform import Platform
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.step.build import build
from jaxscale.values import override


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Shapes of batches."""

    context: int = 8

    def shapes(self, rows):
        return dict.fromkeys(("tokens", "targets"), ((rows, self.context), "int32"))


MODEL = Decoder(vocab=12, context=8, layers=4, embed=8, heads=2, windows=(4, None))
EXPERIMENT = Experiment("settled", MODEL, Tokens(), batch=4)


def test_a_plan_without_automatic_choices_is_unchanged():
    plan = override(Plan(), {"pipeline": "gpipe:2x2", "zero": "1"})
    assert resolve_choices(EXPERIMENT, plan) is plan


@pytest.mark.slow
def test_auto_becomes_a_schedule_that_builds():
    plan = resolve_choices(EXPERIMENT, override(Plan(), {"pipeline": "auto:2", "mesh": "data:2"}))
    assert plan.pipeline.name != "auto"
    assert plan.pipeline.ranks == 2
    assert 4 % (2 * plan.pipeline.microbatches) == 0
    step = build(EXPERIMENT, plan)
    assert all(start % 2 == 0 for start in step.stages.first_layers)


def test_auto_keeps_to_the_limit():
    plan = override(Plan(), {"pipeline": "auto:2", "mesh": "data:2"})
    with pytest.raises(UserError, match=r"auto:2.*no candidate fits"):
        pipeline_choice.pipeline_choice(EXPERIMENT, Platform.parse("tpu v5e:2x2"), 1024, plan)


def test_auto_chooses_by_the_modeled_seconds_of_whole_steps():
    model = Decoder(vocab=12, context=64, layers=4, embed=256, heads=2)
    experiment, platform = Experiment("whole", model, Tokens(64), batch=512), Platform.parse("tpu v5e:2x2")
    chosen = pipeline_choice.pipeline_choice(experiment, platform, 2**34, override(Plan(), {"pipeline": "auto:4"}))

    def seconds_of(plan):
        return modeled_seconds(experiment, platform, described_step(experiment, platform, plan).plan).total

    others = [override(Plan(), {"pipeline": f"gpipe:4x{count}"}) for count in (4, 8, 16, 32, 64)]
    seconds = [seconds_of(plan) for plan in others]
    assert seconds_of(chosen) <= 1.01 * min(seconds)
    assert 1.2 * seconds_of(chosen) < max(seconds)


def test_both_automatic_choices_go_together():
    plan = override(Plan(), {"pipeline": "auto:2,stash=residuals", "memory": "fit"})
    resolved = resolve_choices(EXPERIMENT, plan, 2**34, Platform.parse("tpu v5e:2x2"))
    assert resolved.pipeline.name != "auto"
    assert resolved.memory.rule == "none"


@pytest.mark.variant
def test_blocks_are_priced_under_the_plan_that_is_given():
    plan, platform = override(Plan(), {"pipeline": "auto:2", "memory": "full"}), Platform.parse("tpu v5e:2x2")
    chosen = pipeline_choice.pipeline_choice(EXPERIMENT, platform, 2**34, plan)
    assert chosen == pipeline_choice.pipeline_choice(dataclasses.replace(EXPERIMENT, plan=plan), platform, 2**34)
    assert chosen.pipeline.name != "auto"


def test_turns_of_unlike_blocks_are_one_to_a_partition():
    model = prices_of_periods(ModelPrices((Price(1, 2, 3, message_bytes=7), Price(2, 2, 2, message_bytes=7)) * 2), 2)
    assert model.blocks == (Price(3, 4, 5, message_bytes=7),) * 2


def test_auto_with_a_number_of_microbatches_is_refused():
    with pytest.raises(UserError, match="leave microbatches out"):
        override(Plan(), {"pipeline": "auto:2", "microbatches": "2"})
