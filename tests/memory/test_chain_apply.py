"""Plans of chains as nested checkpoints: not one bit of a gradient changes, and blocks run as often as simulated.

By default: segments of one length, and nested ones of a table.
"""

import random

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxscale import blocks
from jaxscale.blocks import Context
from jaxscale.errors import UserError
from jaxscale.layers.conv import BatchNorm
from jaxscale.layers.mlp import MLP
from jaxscale.layers.norm import RMSNorm
from jaxscale.layers.stack import Chain, Stack
from jaxscale.memory.apply import chain_treatment
from jaxscale.memory.chain import Option, Remat, Save, Stage, keep_all, periodic, revolve, simulate
from jaxscale.memory.chain_decision import CHAIN_RULES, chain_nodes
from jaxscale.memory.plan import MemoryPlan
from jaxscale.memory.rotor_table import rotor
from jaxscale.programs.flop import count_flop
from tests.tiers import variants

SIZE = 8
RUNS: list[int] = []


class Block(nnx.Module):
    """Tells when it runs forward, and drops out."""

    def __init__(self, rngs, width=2 * SIZE):
        self.mlp = MLP(SIZE, width, dropout=0.3, rngs=rngs)

    def __call__(self, x, *, context=Context()):
        jax.debug.callback(lambda: RUNS.append(1))
        return x + self.mlp(x, context=context)


class Running(Block):
    """Normalises too, and holds running statistics."""

    def __init__(self, rngs, width=2 * SIZE):
        super().__init__(rngs, width)
        self.norm = RMSNorm(SIZE, rngs=rngs)
        self.batch = BatchNorm(SIZE, momentum=0.5)

    def __call__(self, x, *, context=Context()):
        return self.batch(super().__call__(self.norm(x), context=context), context=context)


def chain_of(count, kind=Block):
    """Unlike blocks."""
    return Chain([kind(nnx.Rngs(seed), (1 + seed % 3) * SIZE) for seed in range(count)])


def stack_of(count):
    return Stack(Block, count, rngs=nnx.Rngs(0))


def gradient(module, treatment):
    """Loss, gradients and the statistics that the blocks left, and how often a block ran."""
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)
    x = jax.random.normal(jax.random.key(9), (2, 3, SIZE))

    def loss(params, rest):
        inside = nnx.merge(graphdef, params, rest, copy=True)
        with blocks.treating(treatment):
            y = inside(x, context=Context(key=jax.random.key(1)))
        return jnp.sum(jnp.square(y)), nnx.to_pure_dict(nnx.state(inside, nnx.Not(nnx.Param)))

    fn = jax.jit(jax.value_and_grad(loss, has_aux=True))
    RUNS.clear()
    found = jax.block_until_ready(fn(nnx.to_pure_dict(params), nnx.to_pure_dict(rest)))
    jax.effects_barrier()
    return found, len(RUNS)


def equal(one, other):
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(one)) > 0.1
    chex.assert_trees_all_equal(one, other)


def close(one, other):
    """Within 1e-5, and of sums that cancel within 1e-6 of the largest number: what XLA fuses decides how it rounds."""
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(other))
    chex.assert_trees_all_close(one, other, rtol=1e-5, atol=1e-6 * largest)


def costs(count):
    return [Stage(1.0, 2.0, 1, (Option(9), Option(4, 0.1)))] * count


def nine(budget):
    return rotor(costs(9), 1, budget).nodes


PLANS = {
    "periodic": periodic(9, 3),
    "revolve 2": revolve(9, 2),
    "rotor 30": nine(30),
    "rotor 22": nine(22),
    "at the end": (*keep_all(5), Remat((Save(5), Remat((Save(6), Save(7))), Remat((Save(8),))))),
}


@pytest.fixture(scope="module")
def plain():
    return gradient(chain_of(9), blocks.Treatment())[0]


@pytest.mark.parametrize("name", variants(PLANS, default=["periodic", "rotor 22"]))
def test_gradients_are_bitwise_the_same_and_blocks_run_as_simulated(plain, name):
    nodes = PLANS[name]
    options = [[blocks.identity, blocks.identity]] * 9
    found, runs = gradient(chain_of(9), chain_treatment(nodes, options))
    equal(found, plain)
    assert runs == simulate(nodes, costs(9), 1).forwards


@pytest.mark.parametrize(("count", "slots", "runs"), variants([(16, 3, 49), (8, 2, 22), (32, 4, 107)], default=2))
def test_revolve_runs_blocks_as_often_as_the_closed_form_says(count, slots, runs):
    treatment = chain_treatment(chain_nodes(MemoryPlan.parse(f"revolve:{slots}"), costs(count), 1))

    def loss(weights, x):
        def block(weight, x):
            jax.debug.callback(lambda: RUNS.append(1))
            return jnp.tanh(x * weight), None

        with blocks.treating(treatment):
            return blocks.run([blocks.Call(block, (weight,)) for weight in weights], x)[0].sum()

    RUNS.clear()
    jax.block_until_ready(jax.jit(jax.grad(loss))(list(jnp.ones(count)), jnp.ones(3)))
    jax.effects_barrier()
    assert len(RUNS) == runs


def test_a_stack_takes_the_plan_of_a_chain_and_is_then_not_scanned():
    plain, _ = gradient(stack_of(4), blocks.Treatment())
    nodes = revolve(4, 2)
    found, runs = gradient(stack_of(4), chain_treatment(nodes))
    assert runs == simulate(nodes, costs(4), 1).forwards
    close(found, plain)


def test_running_statistics_leave_a_segment_as_they_leave_a_block():
    plain, _ = gradient(chain_of(3, Running), blocks.Treatment())
    nodes = (Remat((Save(0), Remat((Save(1),)))), *keep_all(3)[2:])
    found, runs = gradient(chain_of(3, Running), chain_treatment(nodes))
    assert runs == 3 + 3
    close(found, plain)


def test_the_option_of_a_stage_chooses_its_wrapper():
    seen = []

    def marked(stage, option):
        def wrapper(block, rolled):
            seen.append((stage, option, rolled))
            return block

        return wrapper

    options = [[marked(stage, option) for option in range(2)] for stage in range(3)]
    nodes = (Save(0, 1), Remat((Save(1, 0),)), Save(2, 1))
    gradient(chain_of(3), chain_treatment(nodes, options))
    assert set(seen) == {(0, 1, False), (1, 0, False), (2, 1, False)}


def test_traced_flop_of_random_plans_are_those_of_the_simulator():
    """Blocks that end in the function whose result their backward pass reads: nothing of a second run is left out."""
    rng = random.Random(1)
    size, rows, count = 8, 4, 6

    def block(weight, x):
        return jnp.tanh(x @ weight), None

    weights, x = [jnp.eye(size)] * count, jnp.ones((rows, size))
    product = 2 * rows * size * size
    for _ in range(6):
        budget = rng.randint(8, 20)
        stages = [Stage(1.0, 2.0, 1, (Option(1),))] * count
        nodes = rotor(stages, 1, budget).nodes

        def loss(weights, x, nodes=nodes):
            with blocks.treating(chain_treatment(nodes)):
                return jnp.sum(blocks.run([blocks.Call(block, (weight,)) for weight in weights], x)[0])

        found = count_flop(jax.grad(loss, argnums=(0, 1)), weights, x).total
        assert found == product * (simulate(nodes, stages, 1).forwards + 2 * count)


def test_every_rule_gives_a_plan():
    texts = {"none": 4, "full": 8, "sqrt": 6, "periodic:4": 4, "revolve:1": 10, "chain:1000B": 4, "chain:6B": 10}
    assert {MemoryPlan.parse(text).rule for text in texts} == set(CHAIN_RULES)
    stages = [Stage(1.0, 2.0, 1, (Option(4),))] * 4
    found = {text: simulate(chain_nodes(MemoryPlan.parse(text), stages, 1), stages, 1).forwards for text in texts}
    assert found == texts


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("dots", "is not for a chain of blocks: expected one of none, full"),
        ("chain:3B", "a budget of 3B \\(kept\\) .* the least possible is 6B"),
    ],
)
def test_refusals(text, match):
    with pytest.raises(UserError, match=match):
        chain_nodes(MemoryPlan.parse(text), [Stage(1.0, 2.0, 1, (Option(4),))] * 4, 1)


def test_a_plan_of_another_chain_is_refused_while_tracing():
    with pytest.raises(UserError, match=r"a plan of 4 stages .* for a chain of 3"):
        gradient(chain_of(3), chain_treatment(revolve(4, 2)))
