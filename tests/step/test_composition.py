"""Random combinations of techniques: each lowers or is refused, and what trains equals its plain twin.

The draws, the twins and the tolerances are those of `experiments/composition.py`; other seeds are tried with it. By
default the draws that cost least are lowered, and one is trained, over axes of data and sequence with state on the
host. What the draws combine, other tests prove one by one.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from composing import comparing, draws
from composing.comparing import compare
from composing.draws import SGD, Draw, draw
from composing.judge import judge
from composing.pairs import combination as pair
from composing.pairs import key, pairs, read, table
from composing.twins import built, compiled, experiment_of, lower, plan_of, train

from jaxscale.recipe.combinations import Incompatible
from jaxscale.recipe.plan import Plan
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.state.batches import batch_shapes
from jaxscale.step.build import build
from jaxscale.step.pipelined.asynchronous import AsyncPipeline
from jaxscale.values.annotations import field_types
from tests.plans import grouped
from tests.tiers import variants

SEED = 17
QUICK = (101, 108, 111, 112, 117, 119, 120, 122, 134, 137, 139)
"""The first draws that take less than 13 processor seconds to train with their twins; others take a minute and more."""
PAGE = Path(__file__).parents[2] / "docs" / "choosing" / "combinations.md"


def combination(optimizer: str = "", **fields: str) -> Draw:
    """SGD with momentum, or another rule, under a plan of some fields."""
    rule = {"optimizer.name": optimizer, "optimizer.learning_rate": "0.003"} if optimizer else SGD
    rule |= draws.ONE_BIT_NEEDS if optimizer.startswith("one_bit") else {}
    changes = {f"plan.{name}": text for name, text in grouped({"mesh": "1", **fields}).items()}
    return Draw(tuple(sorted({**rule, **changes}.items())))


LIGHT = {0, 2, 3, 4, 9, 11, 17, 18, 21, 24, 26, 27, 29}
"""Draws that take little more than a processor second to trace, or that are refused."""


@pytest.mark.parametrize("number", variants(range(30), LIGHT))
def test_a_draw_lowers_or_is_refused(number: int) -> None:
    one = draw(SEED, number)
    one = dataclasses.replace(one, length=64)
    try:
        step = built(one)
    except Incompatible:
        return
    traced = step.step_fn.trace(step.layout.abstract, step.abstract_batch(batch_shapes(experiment_of(one))))
    assert "func.func public @main" in traced.lower().as_text()


@pytest.mark.parametrize("number", variants(QUICK, {122}))
def test_a_draw_trains_like_its_twins(number: int) -> None:
    one = dataclasses.replace(draw(SEED, number), length=64)
    verdict = judge(one)
    assert verdict.outcome in ("equal", "refused"), f"{one}: {verdict.reason}"


@pytest.mark.slow
@pytest.mark.parametrize("number", sorted({*range(100, 130), *range(200, 600)} - {*QUICK}))
def test_four_hundred_draws(number: int) -> None:
    one = draw(SEED, number)
    verdict = judge(one)
    assert verdict.outcome in ("equal", "refused"), f"{one}: {verdict.reason}"


FORMER_FAULTS = {
    "a memory rule sees a block as a region of replicas does": combination(
        mesh="replica:2,tensor:2", sequence_parallel="True", memory="save:256KiB", reduce="int8"
    ),
    "a codec with weights on the host": combination(mesh="replica:2,tensor:2", weights="host", reduce="powersgd:4"),
    "what a codec draws for layers that a memory rule keeps in groups": combination(
        mesh="replica:2", memory="save:75KiB:flop", reduce="powersgd:4"
    ),
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
    "bases of SOAP beside a codec": combination("soap", mesh="replica:2,fsdp:2,tensor:2", zero="2", reduce="int8"),
    "projections of GaLore beside a codec": combination("galore", mesh="replica:2,tensor:2", reduce="int8"),
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


@pytest.mark.parametrize(  # that blocks of replicas are planned as they run, `test_memory_plans.py` has by default
    "name",
    [pytest.param(name, marks=pytest.mark.slow if n else pytest.mark.variant) for n, name in enumerate(FORMER_FAULTS)],
)
def test_what_was_refused_or_crashed_trains_like_its_twins(name: str) -> None:
    verdict = judge(FORMER_FAULTS[name])
    assert verdict.outcome == "equal", verdict.reason


@pytest.mark.slow
def test_collectives_that_wait_for_one_another_have_threads() -> None:
    """In half of the starts all threads of XLA waited, and the process ended after 40 seconds."""
    environment = {name: text for name, text in os.environ.items() if name not in ("NPROC", "XLA_FLAGS")}
    command = [sys.executable, "experiments/composition.py", "--seed", "5388312", "--only", *["27"] * 4]
    ended = subprocess.run(command, capture_output=True, text=True, env={**environment, "PYTHONPATH": "."})
    assert json.loads(ended.stdout.splitlines()[-1])["equal"] == 4, ended.stdout


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
    """In few draws, and with every schedule, codec and memory rule; what none can draw is an error."""
    fields = {
        path.split(".")[1] for number in range(400) for path, _ in draw(SEED, number).techniques if "plan" in path
    }
    assert fields == set(field_types(Plan))


def test_a_field_that_nobody_can_draw_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {hint: texts for hint, texts in draws.VALUES.items() if hint is not draws.NamedCodec}
    monkeypatch.setattr(draws, "VALUES", values)
    with pytest.raises(TypeError, match="NamedCodec"):
        draws.techniques()


def refused(numbers: range) -> float:
    """Share of draws that a rule refuses when they are built."""
    count = 0
    for number in numbers:
        try:
            built(draw(SEED, number))
        except Incompatible:
            count += 1
    return count / len(numbers)


@pytest.mark.slow
def test_few_draws_are_refused() -> None:
    """Of all techniques as often as one another."""
    assert refused(range(1000, 1400)) <= 0.15


def test_a_wrong_gradient_is_seen() -> None:
    """The comparison can fail: a norm off by a thousandth, and a last loss off by as much."""
    one = combination(mesh="data:2")
    right = train(one, {"mesh": "1"})
    assert all(figure.holds for figure in compare(one, right))
    for wrong in (
        dataclasses.replace(right, norms=(1.001 * right.norms[0], *right.norms[1:])),
        dataclasses.replace(right, losses=(*right.losses[:-1], 1.001 * right.losses[-1])),
        dataclasses.replace(right, losses=(float("nan"), *right.losses[1:])),
    ):
        assert not all(figure.holds for figure in compare(one, wrong))


BRANCHES = {  # of the comparison: each has tolerances of its own
    "plain": combination(mesh="fsdp:2", zero="3"),
    "bfloat16": combination(mesh="data:2", precision="bfloat16"),
    "products in 8 bits": combination(mesh="data:2", matmul="int8"),
    "products in 4 bits": combination(mesh="data:2", matmul="int4"),
    "codes in 8 bits": combination(mesh="replica:2,data:2", reduce="int8"),
    "codes in 4 bits": combination(mesh="replica:2,tensor:2", reduce="qsgd:4bit"),
    "top-k": combination(mesh="replica:2,fsdp:2", reduce="topk:0.25,warmup=0"),
    "PowerSGD": combination(mesh="replica:2,data:2", reduce="powersgd:4"),
    "state in 4 bits": combination("adamw", mesh="fsdp:2", zero="1", state="int4"),
    "split weights": combination(mesh="data:2", precision="bfloat16", master="split"),
    "1-bit Adam": combination("one_bit_adam", mesh="replica:2,data:2"),
    "1-bit LAMB": combination("one_bit_lamb", mesh="replica:2,fsdp:2", zero="1"),
    "DiLoCo": combination(mesh="replica:2,data:2", diloco="every=2"),
    "2BW": combination(mesh="data:2", pipeline="2bw:2x4"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BRANCHES)
def test_steps_of_a_wrong_length_are_seen(name: str) -> None:
    """Four times as long, or not made at all."""
    one = BRANCHES[name]
    assert all(figure.holds for figure in compare(one, train(one, one.plan)))
    path = "optimizer.learning_rate"
    rate = float(dict(one.techniques)[path])
    for wrong in (4 * rate, 1e-12):
        other = dataclasses.replace(one, techniques=tuple({**dict(one.techniques), path: str(wrong)}.items()))
        assert not all(figure.holds for figure in compare(one, train(other, one.plan))), wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", BRANCHES)
def test_a_wrong_layout_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the combination and in its twin on the same devices alike: steps not made, or four times as long.

    Types of layers hide the latter: from layout to layout they change the losses of small batches as much.
    """
    one, path = BRANCHES[name], "optimizer.learning_rate"
    rate = float(dict(one.techniques)[path])
    for wrong in (1e-12,) if {"precision", "matmul"} & set(one.plan) else (1e-12, 4 * rate):

        def train_wrong(draw: Draw, changes: Any, wrong: float = wrong, **given: Any) -> Any:
            mesh = MeshSpec.parse(changes.get("mesh", "1"))
            if mesh.devices > mesh.replica:
                draw = dataclasses.replace(draw, techniques=tuple({**dict(draw.techniques), path: str(wrong)}.items()))
            return train(draw, changes, **given)

        monkeypatch.setattr(comparing, "train", train_wrong)
        assert not all(figure.holds for figure in compare(one, train_wrong(one, one.plan))), wrong


@pytest.mark.slow
def test_a_meeting_that_moves_too_little_is_seen() -> None:
    """One that moves nothing is no program that the house would run."""
    one = combination(mesh="replica:2,data:2", diloco="every=2")
    trained = train(one, {**one.plan, "diloco": "every=2,lr=0.35"})
    assert not all(figure.holds for figure in compare(one, trained))


@pytest.mark.slow
def test_a_fault_of_two_lossy_techniques_together_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the combination and in its lossy twin alike: stages that reduce an eighth of their gradients."""
    one, reduced = (
        combination(mesh="replica:2,data:2", pipeline="2bw:2x4", reduce="int8"),
        AsyncPipeline._average,
    )

    def eighth(self: AsyncPipeline, codec: object, gradients: object, *given: object) -> object:
        return reduced(self, codec, jax.tree.map(lambda leaf: leaf / 8, gradients), *given)

    monkeypatch.setattr(AsyncPipeline, "_average", eighth)
    compiled.cache_clear()
    figures = compare(one, train(one, one.plan))
    compiled.cache_clear()
    assert {figure.what for figure in figures if not figure.holds} >= {
        "last norm, techniques together and without them"
    }


def test_the_page_has_the_table_of_pairs() -> None:
    shown = table(read())
    assert f"\n```\n{shown}\n```\n" in PAGE.read_text(), f"make it this:\n{shown}"
    assert set(read()) <= {key(*pair) for pair in pairs()}


PAIRS = [pytest.param(i, j, id=key(i, j)) for i, j in pairs()]


@pytest.mark.slow
@pytest.mark.parametrize(("i", "j"), PAIRS)
def test_a_pair_does_what_the_readme_says(i: int, j: int) -> None:
    verdict = judge(pair(i, j))
    assert verdict.reason == read().get(key(i, j), "")
