"""Every way to keep a block, side by side: each is what its text form decides, and the optimum is ahead."""

import functools
import xml.etree.ElementTree as ElementTree

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxscale
from jaxscale.errors import UserError
from jaxscale.memory.plan import MemoryPlan
from jaxscale.planning.menu import BUDGETED_RULES, FIXED_RULES, menu
from jaxscale.planning.program import described_step
from jaxscale.platforms.platform import Platform

LAYERS = 4


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(256, 1024, rngs=rngs), nnx.Linear(1024, 256, rngs=rngs)

    def __call__(self, x, *, scale):
        return x + scale * self.down(nnx.gelu(self.up(x)))


@functools.cache
def found():
    block = nnx.eval_shape(lambda: Mlp(nnx.Rngs(0)))
    x = jax.ShapeDtypeStruct((512, 256), jnp.float32)
    return menu(block, x, platform="tpu v5p:2x2x1", layers=LAYERS, shares=(0.0, 0.3, 1.0), scale=2.0)


def test_every_rule_is_there_and_keeps_within_each_budget():
    assert list(found().decisions) == [*BUDGETED_RULES, *FIXED_RULES]
    for rule in BUDGETED_RULES:
        for decision in found().decisions[rule]:
            assert decision.plan.budget is not None
            assert decision.bytes <= decision.plan.budget
            assert decision.layers == LAYERS


def test_the_combination_is_ahead_and_rules_that_only_swap_are_far_behind():
    menu = found()
    for budget in menu.budgets[1:]:
        cost = {rule: menu.cost(one) for rule in menu.decisions if (one := menu.within(rule, budget)) is not None}
        assert cost["offload:pofo"] <= min(cost[rule] for rule in cost if rule != "chain") + 1e-9
        assert cost["save"] <= min(cost[rule] for rule in ("greedy", "dtr_static", "full"))
        if budget < menu.budgets[-1]:
            swaps = (f"offload:{name}" for name in ("vdnn", "tflms", "autoswap", "swapadvisor"))
            assert min(cost[rule] for rule in swaps) > 3 * cost["full"]


def test_it_prints_a_table_and_draws_itself(tmp_path):
    menu, text = found(), str(found())
    assert text.startswith("Mlp, 4 layers: ")
    assert "kept on the device a layer" in text
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.split()}
    assert all(rule in rows for rule in (*BUDGETED_RULES, *FIXED_RULES))
    assert rows["none"] == ["-"] * (len(menu.budgets) - 1) + ["+0.0%"]
    assert "MiB in host memory a layer" in text
    svg = ElementTree.fromstring(menu.svg())
    assert len([node for node in svg if node.tag.endswith("polyline")]) == len(menu.decisions)
    menu.write(tmp_path / "menu.svg")
    assert (tmp_path / "menu.svg").read_text() == menu.svg()
    assert str(menu).splitlines()[4] in menu.html()
    with pytest.raises(UserError, match="cannot be written"):
        menu.write(tmp_path / "nowhere" / "menu.svg")


def test_without_a_chip_flop_are_counted_and_nothing_is_offloaded():
    w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(64, 64), (8, 64)])
    menu = jaxscale.menu(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w), w, x, layers=4, shares=(0, 1))
    assert not menu.is_timed
    assert not any(rule.startswith("offload") for rule in menu.decisions)
    # two products forward, four backward; to keep nothing runs the first again, for the second has no reader
    assert menu.cost(menu.decisions["full"][0]) == pytest.approx(1 / 3)
    assert "FLOP beyond keeping everything" in str(menu)


@pytest.mark.slow
def test_an_experiment_has_its_own_blocks(planned):
    experiment = planned("fsdp:4", precision="bfloat16", attention="plain")
    menu = jaxscale.menu(experiment, platform="tpu v5e:2x2", shares=(0.0, 0.5))
    assert menu.layers == experiment.model.layers
    half = menu.decisions["save"][-1]
    plan = {"memory": MemoryPlan("save", budget=half.plan.budget), "precision": "bfloat16", "attention": "plain"}
    # what training decides, per device and microbatch
    described = described_step(planned("fsdp:4", **plan), Platform.parse("tpu v5e:2x2"))
    assert described.decision == half


def test_what_cannot_be_asked():
    w = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    with pytest.raises(UserError, match="shares: got 2, expected numbers from 0 to 1"):
        menu(lambda w: w, w, shares=(2,))


def test_an_experiment_needs_a_platform(experiment):
    with pytest.raises(UserError, match="an experiment needs a platform"):
        menu(experiment)
