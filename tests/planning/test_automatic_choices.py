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
from jaxscale.platforms.platform import Platform
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.step.build import build
from jaxscale.values import override


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Shapes of batches."""

    def shapes(self, rows):
        return dict.fromkeys(("tokens", "targets"), ((rows, 8), "int32"))


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


def test_auto_counts_the_messages_and_launches_of_many_microbatches(monkeypatch):
    model = dataclasses.replace(MODEL, windows=(None,))
    experiment, plan = Experiment("whole", model, Tokens(), batch=512), override(Plan(), {"pipeline": "auto:4"})
    chosen = pipeline_choice.pipeline_choice(experiment, Platform.parse("tpu v5e:2x2"), 2**34, plan)
    passes_alone = lambda *_: lambda candidate, plan: candidate.seconds  # noqa: E731
    monkeypatch.setattr(pipeline_choice, "_seconds_of_candidates", passes_alone)
    without_messages = pipeline_choice.pipeline_choice(experiment, Platform.parse("tpu v5e:2x2"), 2**34, plan)
    assert chosen.pipeline.microbatches < without_messages.pipeline.microbatches


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
