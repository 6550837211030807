"""Every optimizer x bits of its state x mesh x where the state lies: trains as its float32 twin, saves, restores.

A newcomer is a line of `RULES`. The default suite has rules of elements, of norms and of whole matrices, each number of
bits, each mesh and each place; `-m variant` has a wider cross-section, and `-m slow` runs the rest.
"""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

from jaxscale.errors import UserError
from jaxscale.lowbit.quantize import is_quantized
from jaxscale.optim.optimizer import Optimizer
from jaxscale.recipe.experiment import Experiment
from jaxscale.step.build import build
from tests.plans import plan_of
from tests.step.residual import Residual, random_batch
from tests.tiers import variants

ROWS, STEPS = 8, 4
BATCHES = [random_batch(ROWS, seed) for seed in range(STEPS)]
RULES = {
    "adamw": Optimizer(learning_rate=0.005),
    "nadamw": Optimizer(name="nadamw", learning_rate=0.004),
    "adan": Optimizer(name="adan", learning_rate=0.005),
    "ademamix": Optimizer(name="ademamix", learning_rate=0.005),
    "adopt": Optimizer(name="adopt", learning_rate=0.005),
    "lion": Optimizer(name="lion", learning_rate=0.0015),
    "momentum": Optimizer(name="sgd", learning_rate=0.05, momentum=0.9),
    "lars": Optimizer(name="lars", learning_rate=0.5),
    "lamb": Optimizer(name="lamb", learning_rate=0.01),
    "schedule_free": Optimizer(name="schedule_free", learning_rate=0.005),
    "muon": Optimizer(name="muon", learning_rate=0.005),
    "adafactor": Optimizer(learning_rate=0.005, custom=lambda rate: optax.adafactor(rate, min_dim_size_to_factor=8)),
}
STATES, MESHES, PLACES = ("float32", "int8", "int4"), ("1", "fsdp:2", "tensor:2"), ("device", "streamed", "host")
MIXING = ("muon", "adafactor")
"""Rules that look across a tensor and keep other shapes than its own: their state is updated whole, so not streamed."""
FACTORED = ("adafactor",)
"""Rules whose state has no leaf that blocks would make smaller."""
GATE = {"float32": 1e-3, "int8": 0.05, "int4": 0.25}
"""Largest distance from the parameters of the float32 twin on one device, as a share of the way that these have moved.

In float32, sums have another order. Each step has another batch, so that a rule without its moments lies outside.
"""
BFLOAT16_GATE = 0.03
"""The same for Muon in float32, whose products are in bfloat16."""
LOSS_GATE = {"float32": 2e-4, "int8": 0.01, "int4": 0.02}
"""Nats from the losses of the twin."""
QUICK = {
    ("adamw", "int8", "fsdp:2", "device"),
    ("adamw", "int8", "fsdp:2", "streamed"),
    ("adamw", "int4", "tensor:2", "streamed"),
    ("lion", "int8", "fsdp:2", "streamed"),
    ("lion", "int4", "1", "device"),
    ("momentum", "int4", "tensor:2", "device"),
    ("momentum", "int8", "1", "host"),
    ("momentum", "float32", "fsdp:2", "streamed"),
    ("lamb", "float32", "tensor:2", "host"),
    ("lamb", "int8", "fsdp:2", "device"),
    ("lamb", "int8", "tensor:2", "streamed"),
    ("lamb", "int4", "1", "host"),
    ("adafactor", "float32", "fsdp:2", "device"),
    ("adafactor", "float32", "tensor:2", "host"),
    ("muon", "int8", "fsdp:2", "device"),
    ("muon", "int4", "tensor:2", "host"),
    ("ademamix", "int8", "fsdp:2", "host"),
    ("ademamix", "int4", "1", "streamed"),
    ("schedule_free", "int8", "tensor:2", "device"),
    ("schedule_free", "float32", "fsdp:2", "host"),
    ("schedule_free", "int4", "1", "streamed"),
}


DEFAULT = {
    ("adamw", "int8", "fsdp:2", "streamed"),
    ("lion", "int4", "1", "device"),
    ("lamb", "float32", "tensor:2", "host"),
    ("lamb", "int8", "fsdp:2", "device"),
    ("muon", "int4", "tensor:2", "host"),
}


def tier(cell):
    """Marks of a cell."""
    return [] if cell in DEFAULT else [pytest.mark.variant] if cell in QUICK else [pytest.mark.slow]


def make(name, state="float32", mesh="1", where="device"):
    plan = plan_of(mesh=mesh, zero=2 if "fsdp" in mesh else 0, state=state, optimizer_state=where)
    return build(Experiment("battery", Residual(), None, optimizer=RULES[name], steps=20, batch=ROWS), plan)


def trained(step, state, count=STEPS, is_without_moments=False):
    """Return the state after so many steps, and their losses; before each, the moments may become zeros."""
    losses = []
    for batch in BATCHES[:count]:
        if is_without_moments:
            moments = jax.tree.map(lambda leaf: leaf * (leaf.ndim == 0), state.optimizer)
            state = dataclasses.replace(state, optimizer=jax.device_put(moments, step.layout.state_shardings.optimizer))
        state, metrics = step(state, step.place(batch))
        losses.append(float(metrics["loss"]))
    return state, losses


def parameters(step, state):
    """Return all parameters as one vector."""
    arrays = step.to_canonical(state)
    return np.concatenate([np.asarray(arrays[name]).ravel() for name in sorted(arrays) if name.startswith("params/")])


@functools.cache
def twin(name):
    """Return the float32 step on one device, its parameters before and after the updates, and the losses."""
    step = make(name)
    start = parameters(step, step.init())
    state, losses = trained(step, step.init())
    return step, start, parameters(step, state), losses


@pytest.fixture(scope="module", autouse=True)
def _free_twins():
    yield
    twin.cache_clear()


def distance(name, step, state):
    """Return the distance from the twin's parameters, as a share of the way that these have moved."""
    _, start, end, _ = twin(name)
    return np.linalg.norm(parameters(step, state) - end) / np.linalg.norm(end - start)


CELLS = [
    pytest.param(*cell, id=" ".join(cell), marks=tier(cell))
    for cell in (
        (name, state, mesh, where) for name in RULES for state in STATES for mesh in MESHES for where in PLACES
    )
    if cell[1:] != ("float32", "1", "device")
    and not (cell[0] in MIXING and cell[3] == "streamed")
    and not (cell[0] in FACTORED and cell[1] != "float32")
]


@pytest.mark.parametrize(("name", "state", "mesh", "where"), CELLS)
def test_it_trains_as_its_twin_does_saves_and_restores(name, state, mesh, where):
    step = make(name, state, mesh, where)
    found = [q for q in jax.tree.leaves(step.layout.abstract.optimizer, is_leaf=is_quantized) if is_quantized(q)]
    assert bool(found) == (state != "float32")
    after, losses = trained(step, step.init())
    assert distance(name, step, after) < (BFLOAT16_GATE if (name, state) == ("muon", "float32") else GATE[state])
    np.testing.assert_allclose(losses, twin(name)[3], atol=LOSS_GATE[state])
    saved, abstract = step.to_canonical(after), step.canonical_abstract()
    bits = {leaf: np.array(array) for leaf, array in saved.items()}
    again = step.from_canonical({leaf: jax.device_put(array, abstract[leaf].sharding) for leaf, array in bits.items()})
    for old, new in zip(jax.tree.leaves(after), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(np.array(old), np.array(new))
    (loss,) = trained(step, after, 1)[1]
    assert trained(step, again, 1)[1] == [loss]
    assert loss < losses[0] - 0.1  # of the same batch


# a state of `schedule_free` has weights, and few numbers of a factored one
WITH_MOMENTS = [name for name in RULES if name not in (*FACTORED, "schedule_free")]


@pytest.mark.parametrize("name", variants(WITH_MOMENTS, {cell[0] for cell in DEFAULT}))
def test_a_rule_that_loses_its_moments_lies_outside_of_every_gate(name):
    step = twin(name)[0]
    assert distance(name, step, trained(step, step.init(), is_without_moments=True)[0]) > 1.2 * max(GATE.values())


assert {cell.values for cell in CELLS} >= QUICK >= DEFAULT
REFUSED = [
    *((name, "int8", "1", "streamed", "mixes elements") for name in MIXING if name not in FACTORED),
    *((name, "float32", "1", "streamed", "mixes elements") for name in FACTORED),
    *((name, state, "1", "device", "would quantize no leaf") for name in FACTORED for state in STATES[1:]),
]


@pytest.mark.parametrize(("name", "state", "mesh", "where", "says"), REFUSED)
def test_a_pair_that_is_refused_names_its_reason(name, state, mesh, where, says):
    with pytest.raises(UserError, match=says):
        make(name, state, mesh, where)
