"""Random combinations of techniques: each lowers or is refused, and what trains equals its plain twin.

The draws, the twins and the tolerances are those of `experiments/composition.py`; other seeds are tried with it.
"""

import dataclasses
from pathlib import Path

import jax
import pytest
from composing.draws import TECHNIQUES, Draw, draw
from composing.judge import compare, judge
from composing.pairs import drawn, key, pairs, read, table
from composing.twins import experiment_of, lower, plan_of, train

from jaxscale.errors import UserError
from jaxscale.planning.settle import settled
from jaxscale.step.build import build
from jaxscale.step.plan import Plan
from jaxscale.step.rows import batch_shapes
from jaxscale.values.annotations import field_types

SEED = 17
README = Path(__file__).parents[2] / "README.md"
SGD = {"optimizer.name": "sgd", "optimizer.momentum": "0.9", "optimizer.learning_rate": "0.1"}


def combination(optimizer: str = "", **fields: str) -> Draw:
    """SGD with momentum, or another rule, under a plan of some fields."""
    rule = {"optimizer.name": optimizer, "optimizer.learning_rate": "0.003"} if optimizer else SGD
    changes = {f"plan.{name}": text for name, text in {"mesh": "1", **fields}.items()}
    return Draw(tuple(sorted({**rule, **changes}.items())))


@pytest.mark.parametrize("number", range(30))
def test_a_draw_lowers_or_is_refused(number: int) -> None:
    one = draw(SEED, number)
    one = dataclasses.replace(one, length=64)
    experiment = experiment_of(one)
    try:
        step = build(experiment, settled(experiment, plan_of(one.plan)))
    except UserError:
        return
    traced = step.step_fn.trace(step.layout.abstract, step.abstract_batch(batch_shapes(experiment)))
    assert "func.func public @main" in traced.lower().as_text()


@pytest.mark.parametrize("number", range(100, 110))
def test_a_draw_trains_like_its_twins(number: int) -> None:
    one = dataclasses.replace(draw(SEED, number), length=64)
    verdict = judge(one)
    assert verdict.outcome in ("equal", "refused"), f"{one}: {verdict.reason}"


@pytest.mark.slow
@pytest.mark.parametrize("number", range(200, 600))
def test_four_hundred_draws(number: int) -> None:
    one = draw(SEED, number)
    verdict = judge(one)
    assert verdict.outcome in ("equal", "refused"), f"{one}: {verdict.reason}"


FORMER_FAULTS = {
    "a memory rule sees a block as a region of replicas does": combination(
        mesh="replica:2,tensor:2", sequence_parallel="True", memory="save:256KiB", reduce="int8"
    ),
    "a codec with weights on the host": combination(mesh="replica:2,tensor:2", weights="host", reduce="powersgd:4"),
    "streamed state of replicas of their own": combination(
        mesh="replica:2,fsdp:2", diloco="every=2", optimizer_state="streamed"
    ),
    "streamed state of split weights": combination(
        mesh="fsdp:2", zero="2", precision="bfloat16", master="split", optimizer_state="streamed"
    ),
    "weights in flight beside a tensor axis": combination(mesh="data:2,tensor:2", pipeline="2bw:2x4"),
    "replicas of their own in a pipeline": combination(
        mesh="replica:2,fsdp:2", zero="2", diloco="every=2", pipeline="1f1b:2x4"
    ),
    "matrices that replicas of their own decompose": combination(
        "soap", mesh="replica:2,fsdp:2,tensor:2", zero="1", diloco="every=2"
    ),
    "singular vectors on several CPU devices": combination("galore", mesh="replica:2,data:2", diloco="every=2"),
    "weights on the host in a pipeline": combination(
        mesh="replica:2,fsdp:2", pipeline="zb-h1:2x4", weights="host", zero="1", precision="bfloat16", reduce="int8"
    ),
    "weights on the host in stages of unlike depth": combination(
        "adamw", mesh="fsdp:2,tensor:2", pipeline="1f1b:2x4", weights="host", zero="3", stages="3,5", stash="input"
    ),
    "weights on the host in several stages a device": combination(
        mesh="data:2", pipeline="interleaved:2x4,v=2", weights="host", optimizer_state="streamed"
    ),
    "state in few bits beside stale weights": combination("adamw", mesh="tensor:2", pipeline="2bw:2x4", state="int8"),
    "messages in flight beside a sequence axis": combination(mesh="sequence:2", pipeline="pipemare:2"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (n > 0)) for n, name in enumerate(FORMER_FAULTS)]
)
def test_what_was_refused_or_crashed_trains_like_its_twins(name: str) -> None:
    verdict = judge(FORMER_FAULTS[name])
    assert verdict.outcome == "equal", verdict.reason


def test_streamed_state_of_replicas_lies_on_the_host() -> None:
    one = FORMER_FAULTS["streamed state of replicas of their own"]
    step = build(experiment_of(one), plan_of(one.plan))
    momenta = [leaf for leaf in jax.tree.leaves(step.layout.abstract.optimizer) if leaf.ndim > 1]
    assert {leaf.sharding.memory_kind for leaf in momenta} == {"pinned_host"}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_products_in_three_passes_lower_for_a_tpu(precision: str) -> None:
    """Mosaic has one pass or all: the kernels of attention crashed."""
    one = dataclasses.replace(combination(mesh="data:2", matmul="high", precision=precision), length=256)
    assert lower(one, "tpu v5e:2x4") > 0


def test_every_field_of_a_plan_is_drawn() -> None:
    drawn_fields = {path.split(".")[1] for path, _ in TECHNIQUES}
    assert drawn_fields == set(field_types(Plan)) - {"mesh"}


def test_few_draws_are_refused_before_they_are_traced() -> None:
    """Of all techniques as often as one another, 15 % may not go together."""
    refused = 0
    for number in range(40):
        one = draw(SEED, 1000 + number)
        try:
            plan_of(one.plan)
        except UserError:
            refused += 1
    assert refused <= 10


def test_a_wrong_gradient_is_seen() -> None:
    """The comparison can fail: a norm off by a thousandth, and a second loss off by as much."""
    one = combination(mesh="data:2")
    right = train(one, {"mesh": "1"})
    assert all(figure.holds for figure in compare(one, right))
    for wrong in (
        dataclasses.replace(right, norms=(1.001 * right.norms[0], right.norms[1])),
        dataclasses.replace(right, losses=(right.losses[0], 1.001 * right.losses[1])),
        dataclasses.replace(right, losses=(float("nan"), right.losses[1])),
    ):
        assert not all(figure.holds for figure in compare(one, wrong))


def test_the_readme_has_the_table_of_pairs() -> None:
    shown = table(read())
    assert f"\n```\n{shown}\n```\n" in README.read_text(), f"make it this:\n{shown}"
    assert set(read()) <= {key(*pair) for pair in pairs()}


PAIRS = [pytest.param(i, j, id=key(i, j)) for i, j in pairs()]


@pytest.mark.slow
@pytest.mark.parametrize(("i", "j"), PAIRS)
def test_a_pair_does_what_the_readme_says(i: int, j: int) -> None:
    verdict = judge(drawn(i, j))
    assert verdict.reason == read().get(key(i, j), "")
