"""A budget for a chain of real blocks: bytes that count what is passed on once, gradients that stay."""

import dataclasses
import functools
import importlib.util
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale import blocks
from jaxscale.blocks import Context, Loss
from jaxscale.errors import UserError
from jaxscale.layers.mlp import MLP
from jaxscale.layers.stack import Chain, Stack
from jaxscale.memory.apply import treatment_for, treatment_of_chain
from jaxscale.memory.chain import Save, save_nodes, times_run
from jaxscale.memory.chain_decision import block_save_sets, block_stage, decide_chain
from jaxscale.memory.decide import decide
from jaxscale.memory.decision import ChainDecision, Decision
from jaxscale.memory.plan import MemoryPlan
from jaxscale.programs.collect import collect
from jaxscale.programs.flop import count_flop
from jaxscale.values import from_json, to_json
from tests.tiers import variants

EXPERIMENTS = pathlib.Path(__file__).parents[2] / "experiments"


def experiment(name):
    spec = importlib.util.spec_from_file_location(name, EXPERIMENTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def unet():
    return experiment("unet_chain").UNet(width=4, levels=2, depth=1)


def pure(model, batch):
    """The loss as a function of parameters, and them."""
    graphdef, params, rest = nnx.split(model.build(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params):
        module = nnx.merge(graphdef, params, rest, copy=True) if rest else nnx.merge(graphdef, params, copy=True)
        return model.loss(module, batch, Context(key=jax.random.key(0))).total

    return loss, nnx.to_pure_dict(params)


def images(rows=2):
    return {"images": jax.random.uniform(jax.random.key(0), (rows, 8, 8, 1))}


@functools.cache
def unet_calls():
    return collect(*pure(unet(), images()))


ENDS: dict[tuple[str, ...], tuple[int, int]] = {}


def budget_between(calls, share):
    """A budget between the least possible and what keeps all."""
    kinds = tuple(call.fingerprint for call in calls)
    if kinds not in ENDS:
        with pytest.raises(UserError, match="the least possible is") as refused:
            decide_chain(MemoryPlan("chain", budget=0), calls)
        text = str(refused.value).split("the least possible is ")[1].split(",")[0]
        least = MemoryPlan.parse(f"chain:{text}").budget
        assert least is not None
        ENDS[kinds] = least, decide_chain(MemoryPlan("none"), calls).bytes
    least, most = ENDS[kinds]
    assert least < most
    return int(least + share * (most - least))


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_unets_gradients_stay_and_its_flop_are_those_of_the_decision(share):
    loss, params = pure(unet(), images())
    calls = unet_calls()
    assert [call.count for call in calls] == [1] * 5
    decision = decide(MemoryPlan("chain", budget=budget_between(calls, share)), calls)
    assert decision.chain is not None

    def treated(params):
        with blocks.treating(treatment_for(decision)):
            return loss(params)

    plain, found = jax.jit(jax.grad(loss))(params), jax.jit(jax.grad(treated))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, plain)
    before, after = count_flop(jax.grad(loss), params).total, count_flop(jax.grad(treated), params).total
    assert before <= after <= before + decision.flop
    if share == 0.0:
        assert after > before
    assert decision.bytes <= budget_between(calls, share)


def test_more_bytes_never_take_more_flop():
    calls = unet_calls()
    flop = [decide_chain(MemoryPlan("chain", budget=budget_between(calls, s)), calls).flop for s in (0.0, 0.5, 1.0)]
    assert flop == sorted(flop, reverse=True)
    assert flop[0] > flop[-1] == 0


def test_a_budget_means_the_same_for_every_rule():
    """What every rule keeps without a plan's help is what `none` keeps: at that budget nothing runs again."""
    loss, params = pure(Mlps(6), images())
    calls = collect(loss, params)
    most = decide(MemoryPlan("none"), calls).bytes
    assert most == sum(call.input_bytes + call.graph.needed_bytes for call in calls)
    chain = decide(MemoryPlan("chain", budget=most), calls)
    assert chain.flop == decide(MemoryPlan("save", budget=most), calls).flop == 0
    for share in (0.6, 0.3):
        budget = int(share * most)
        found = [decide(MemoryPlan(rule, budget=budget), calls) for rule in ("chain", "save")]
        assert all(decision.bytes <= budget for decision in found)
        # segments and unlike blocks are more to choose from than one save set for all, though of fewer save sets each
        assert found[0].flop <= 1.1 * found[1].flop


@dataclasses.dataclass(frozen=True)
class Mlps:
    """A chain of alike blocks as a model."""

    layers: int

    def build(self, rngs, *, vocab_multiple=1):
        return Chain([Block(rngs) for _ in range(self.layers)])

    def loss(self, module, batch, context):
        return Loss(jnp.sum(jnp.square(module(batch["images"][..., 0], context=context))), jnp.ones(()))


def test_skips_count_once():
    """A U-Net's skips travel through every block between; the stages say which bytes are new."""
    calls = unet_calls()
    stages = [block_stage(call.graph, block_save_sets(call.graph, "flop"), "flop") for call in calls]
    skip, second = 2 * 8 * 8 * 4 * 4, 2 * 4 * 4 * 8 * 4
    assert [stage.passed_bytes for stage in stages] == [0, skip, skip + second, skip, 0]
    everything = stages[2].options[0]
    assert everything.name == "everything"
    assert everything.kept_bytes < calls[2].graph.needed_bytes + 1
    assert stages[2].options[-1].name == "nothing"
    assert stages[2].options[-1].kept_bytes == 0


def test_options_fall_in_bytes_and_rise_in_cost():
    calls = unet_calls()
    options = block_save_sets(calls[0].graph, "flop")
    assert len(options) >= 3
    assert [save.bytes for save in options] == sorted({save.bytes for save in options}, reverse=True)
    assert [save.flop for save in options] == sorted(save.flop for save in options)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.mlp = MLP(8, 16, dropout=0.2, rngs=rngs)

    def __call__(self, x, *, context=Context()):
        return x + self.mlp(x, context=context)


@pytest.mark.parametrize(
    "make",
    variants(
        [lambda: Stack(Block, 4, rngs=nnx.Rngs(0)), lambda: Chain([Block(nnx.Rngs(i)) for i in range(4)])], default=1
    ),
)
@pytest.mark.parametrize(
    "text", ["chain", *(pytest.param(text, marks=pytest.mark.slow) for text in ("revolve:2", "sqrt"))]
)
def test_a_stack_and_a_chain_take_the_same_plans(make, text):
    module = make()
    graphdef, params = nnx.split(module)
    x = jax.random.normal(jax.random.key(1), (4, 3, 8))

    def loss(params):
        return jnp.sum(jnp.square(nnx.merge(graphdef, params, copy=True)(x, context=Context(key=jax.random.key(2)))))

    params = nnx.to_pure_dict(params)
    calls = collect(loss, params)
    plan = MemoryPlan("chain", budget=budget_between(calls, 0.1)) if text == "chain" else MemoryPlan.parse(text)
    decision = decide_chain(plan, calls)
    assert decision.layers == 4
    assert decision.chain is not None
    assert max(times_run(decision.chain.nodes)) > 1 or decision.flop > 0

    def treated(params, chain=decision.chain):
        with blocks.treating(treatment_of_chain(chain)):
            return loss(params)

    plain, found = jax.jit(jax.grad(loss))(params), jax.jit(jax.grad(treated))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * 100), found, plain)


def test_decisions_are_json_both_ways():
    calls = unet_calls()
    decision = decide_chain(MemoryPlan("chain", budget=budget_between(calls, 0.0)), calls)
    assert from_json(Decision, json.loads(json.dumps(to_json(decision)))) == decision
    assert decision.chain is not None
    assert len(list(save_nodes(decision.chain.nodes))) == 5


def test_a_plan_of_another_model_is_refused():
    with pytest.raises(UserError, match=r"a plan of 2 stages \(0, 1\) for a chain of 1"):
        ChainDecision((Save(0), Save(1)), ((),))
    calls = unet_calls()
    decision = decide_chain(MemoryPlan("chain", budget=budget_between(calls, 0.0)), calls)
    loss, params = pure(unet(), images(rows=4))
    with pytest.raises(UserError, match="make the plan again"), blocks.treating(treatment_for(decision)):
        jax.eval_shape(jax.grad(loss), params)
