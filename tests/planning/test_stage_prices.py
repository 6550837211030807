"""Prices of stages against the FLOP that the papers count: 2 per weight and token forward, twice that backward."""

from typing import Any

import pytest

from jaxscale import Experiment, Plan
from jaxscale.data import Text
from jaxscale.errors import UserError
from jaxscale.memory.plan import MemoryPlan
from jaxscale.models import Decoder
from jaxscale.pipeline.plan import PipelinePlan
from jaxscale.planning.stage_prices import costs_of, model_prices, stage_costs
from jaxscale.platforms.platform import Platform
from tests.plans import plan_of

LAYERS, EMBED, MLP, CONTEXT, VOCAB, BATCH = 4, 2048, 8192, 512, 32_768, 32
V5P = Platform.parse("tpu v5p:2x2x2")
RATE = 459e12 * 0.8
"""FLOP/s of a v5p (its datasheet) and the share of them that products reach."""


def experiment(**plan: Any) -> Experiment:
    model = Decoder(vocab=VOCAB, context=CONTEXT, layers=LAYERS, embed=EMBED, heads=16, mlp=MLP, tied=False)
    return Experiment("prices", model, Text("text.txt", context=CONTEXT), batch=BATCH, plan=plan_of(**plan))


@pytest.fixture(scope="module")
def plain() -> Any:
    """Of 2 ranks, 4 microbatches: 4 devices a stage, 2 rows each."""
    return model_prices(experiment(), V5P, 2, 4)


def test_a_block_takes_the_seconds_of_its_products(plain):
    tokens = BATCH // 4 // 4 * CONTEXT
    weights = 4 * EMBED**2 + 3 * EMBED * MLP
    products = 2 * weights * tokens / RATE
    attention = 2 * 2 * tokens * CONTEXT * EMBED / RATE
    block = plain.blocks[0]
    assert len(plain.blocks) == LAYERS
    assert len(set(plain.blocks)) == 1
    # what is limited by memory comes on top
    assert products + attention <= block.forward <= 2 * (products + attention)
    assert block.weight_gradient == pytest.approx(products, rel=0.1)
    assert block.weight_gradient < block.input_gradient <= 2 * block.forward
    assert block.message_bytes == tokens * EMBED * 4


def test_how_a_pipeline_runs_is_no_matter_of_its_blocks(plain):
    pipeline = PipelinePlan.parse("lockstep:2x4")
    told = experiment(pipeline=pipeline, lowering="phased", stash="input", stages=(2, 2))
    assert model_prices(told, V5P, 2, 4).blocks == plain.blocks
    stale = plan_of(pipeline="pipemare:2", correction=0.5, anneal=3, synchronous_steps=2)
    assert stale.without_pipeline() == Plan()


def test_the_head_is_behind_the_last_block(plain):
    tokens = BATCH // 4 // 4 * CONTEXT
    assert plain.last.forward == pytest.approx(2 * VOCAB * EMBED * tokens / RATE, rel=0.05)
    assert plain.last.forward == plain.last.input_gradient == plain.last.weight_gradient


def test_what_is_recomputed_is_before_the_input_gradient(plain):
    full = model_prices(experiment(memory=MemoryPlan("full")), V5P, 2, 4)
    more = full.blocks[0].input_gradient - plain.blocks[0].input_gradient
    assert more == pytest.approx(plain.blocks[0].forward, rel=0.3)
    assert full.blocks[0].weight_gradient == plain.blocks[0].weight_gradient
    assert full.blocks[0].stash_bytes == full.blocks[0].message_bytes < plain.blocks[0].stash_bytes / 8


def test_stages_are_sums_of_their_blocks(plain):
    block, head = plain.blocks[0], plain.last
    even = costs_of(plain, (2, 2), (0.5, 0.5))
    assert even.forward == pytest.approx((2 * block.forward, 2 * block.forward + head.forward))
    assert even.stash[0] == 2 * block.stash_bytes
    assert even.links == (0.5, 0.5)
    again = costs_of(plain, (3, 1), recomputes_forward=True)
    assert again.input[0] == pytest.approx(3 * (block.input_gradient + block.forward))
    assert again.weight[0] == pytest.approx(3 * block.weight_gradient)
    assert again.stash == (0.0, block.message_bytes)


def test_the_plan_deals_out_the_blocks():
    pipeline = PipelinePlan.parse("1f1b:2x4")
    asked = experiment(pipeline=pipeline, stages=(3, 1))
    costs = stage_costs(asked, V5P, pipeline, pipeline.schedule())
    assert costs.weight[0] > 2.5 * (costs.weight[1] - costs.weight[0] / 3) / 3
    assert costs.links == (costs.links[0],) * 2
    assert costs.links[0] == pytest.approx(BATCH // 4 // 4 * CONTEXT * EMBED * 4 / V5P.links[0].bandwidth)
    # a schedule of another number of stages is dealt out evenly
    other = PipelinePlan.parse("zb-v:2x4")
    costs = stage_costs(asked, V5P, other, other.schedule())
    assert costs.forward[0] == costs.forward[1] == costs.forward[2] < costs.forward[3]


def test_refusals():
    with pytest.raises(UserError, match="the rates of a cpu are unknown"):
        model_prices(experiment(), Platform.parse("cpu x 4"), 2, 4)
    with pytest.raises(UserError, match="pipeline of 3 ranks: tpu v5p:2x2x2 has 8 devices, expected a multiple of 3"):
        model_prices(experiment(), V5P, 3, 4)
    with pytest.raises(UserError, match="batch 32 cannot be split evenly into 5 microbatches"):
        model_prices(experiment(), V5P, 2, 5)
    many = PipelinePlan.parse("1f1b:8x4")
    with pytest.raises(UserError, match="8 stages, but the model has 4 layers"):
        stage_costs(experiment(), V5P, many, many.schedule())
