"""A pipeline with other techniques trains as one device does: loss, gradient norm, and the loss after a step of SGD.

Several rows a device, so that an axis of rows that is named where it is manual does not go unseen.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxscale.errors import UserError
from jaxscale.memory.decision import Group, StackDecision
from jaxscale.memory.plan import MemoryPlan
from jaxscale.models.decoder import Decoder
from jaxscale.optim.optimizer import Optimizer
from jaxscale.pipeline.run.actions import Actions
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.step.build import build
from jaxscale.step.train_step import TrainStep
from jaxscale.trees import leaf_bytes
from jaxscale.values import override
from tests.plans import grouped

LENGTH, ROWS, LONG = 16, 16, 2048
# momentum shows the scale of gradients, which Adam divides out
DESCENT = Optimizer(
    name="sgd", momentum=0.9, learning_rate=0.3, warmup=0, schedule="constant", clip=None, weight_decay=0.0
)


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Shapes of batches."""

    length: int

    def shapes(self, rows: int) -> Any:
        return {
            **dict.fromkeys(("tokens", "targets"), ((rows, self.length), "int32")),
            "weights": ((rows, self.length), "float32"),
        }


def experiment(length: int = LENGTH, layers: int = 4) -> Experiment:
    model = Decoder(vocab=12, context=length, layers=layers, embed=8, heads=2)
    return Experiment("twins", model, Tokens(length), optimizer=DESCENT, batch=ROWS, steps=4)


def batch(length: int = LENGTH) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    found = {name: rng.integers(0, 12, (ROWS, length)).astype(np.int32) for name in ("tokens", "targets")}
    weights = rng.random((ROWS, length)) < np.linspace(0.2, 1, ROWS)[:, None]
    return {**found, "weights": weights.astype(np.float32)}


def trained(step: TrainStep, length: int = LENGTH) -> list[float]:
    state, placed = step.init(), step.place(batch(length))
    state, first = step(state, placed)
    state, second = step(state, placed)
    loss = step.evaluate(state, placed)
    return [float(x) for x in (first["loss"], first["grad_norm"], second["loss"], loss.total / loss.weight)]


@pytest.fixture(scope="module")
def twins() -> dict[Any, list[float]]:
    return {}


def compare(changes: dict[str, str], twins: dict[Any, list[float]], *, layers: int = 4, length: int = LENGTH) -> None:
    step = build(experiment(length, layers), override(Plan(), grouped(changes)))
    step.compile(batch(length))
    asynchronous = {"pipeline": changes["pipeline"]} if step.plan.asynchronous else {"mesh": "data:1"}
    key = (layers, length, *asynchronous.values())
    if key not in twins:
        twins[key] = trained(build(experiment(length, layers), override(Plan(), asynchronous)), length)
    np.testing.assert_allclose(trained(step, length), twins[key], rtol=2e-5)


STANDARD = {"pipeline": "1f1b:2x2", "mesh": "fsdp:2,tensor:2", "zero": "2", "sequence_parallel": "true"}
AXES = [
    STANDARD,
    {"pipeline": "1f1b:2x4", "mesh": "data:2,sequence:2"},
    {"pipeline": "gpipe:2x2", "mesh": "replica:2,sequence:2", "attention": "chunked", "memory": "full"},
    {"pipeline": "lockstep:2x2", "mesh": "data:2,tensor:2", "sequence_parallel": "true", "lowering": "phased"},
    {"pipeline": "zb-v:2x4", "mesh": "fsdp:2,tensor:2", "zero": "3", "sequence_parallel": "true"},
    {"pipeline": "chimera:2x4", "mesh": "fsdp:2", "attention": "chunked", "loss_chunk": "8", "stash": "input"},
    {"pipeline": "interleaved:2x4,v=2", "mesh": "data:2", "attention": "chunked"},
    {"pipeline": "2bw:2x4", "mesh": "data:2", "attention": "chunked", "memory": "save:100KiB"},
    {"pipeline": "pipemare:2", "mesh": "replica:2", "attention": "chunked", "stash": "input"},
]


@pytest.mark.parametrize("changes", [STANDARD, {"pipeline": "1f1b:2x4", "mesh": "data:2", "attention": "chunked"}])
def test_axes_of_rows_and_of_positions_make_a_program(changes: dict[str, str]) -> None:
    step = build(experiment(), override(Plan(), grouped(changes)))
    step.step_fn.trace(step.layout.abstract, step.abstract_batch(batch())).lower()


@pytest.mark.slow
@pytest.mark.parametrize("changes", AXES, ids=str)
def test_axes_of_rows_and_of_positions(changes: dict[str, str], twins: dict[Any, list[float]]) -> None:
    compare(changes, twins)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["data", "fsdp", "replica"])
def test_a_long_context_takes_chunks_by_itself(axis: str, twins: dict[Any, list[float]]) -> None:
    compare({"pipeline": "1f1b:2x4", "mesh": f"{axis}:2"}, twins, layers=2, length=LONG)


OFFLOAD = [f"offload:{selector}:20KiB" for selector in ("pofo", "vdnn", "capuchin", "tflms", "autoswap", "swapadvisor")]
KEPT = ["dots", "full", "jax:dots_saveable", "sqrt", "periodic:1", "revolve:1", "chain:20KiB", "save:20KiB"]
KEPT += ["greedy:20KiB", "dtr_static:20KiB"]
RULES = [
    ({"pipeline": "zb-h1:2x4"}, KEPT + OFFLOAD),
    ({"pipeline": "zb-h2:2x4", "mesh": "fsdp:2", "zero": "3"}, ["dots", "full", "save:20KiB", "offload:vdnn:20KiB"]),
    ({"pipeline": "zb-v:2x4", "mesh": "data:2,tensor:2"}, ["full", "chain:20KiB", "offload:pofo:20KiB"]),
    ({"pipeline": "1f1b:2x4"}, OFFLOAD),
    ({"pipeline": "1f1b:2x4", "stash": "input"}, OFFLOAD),
    ({"pipeline": "1f1b:2x4", "stages": "3,1"}, ["offload:pofo:30KiB", "offload:tflms:20KiB"]),
    ({"pipeline": "gpipe:2x2", "mesh": "fsdp:2", "zero": "3"}, ["save:20KiB", "offload:autoswap:20KiB"]),
    ({"pipeline": "interleaved:2x4,v=2"}, ["offload:pofo:20KiB", "offload:vdnn:20KiB"]),
    ({"pipeline": "chimera:2x4"}, ["offload:capuchin:20KiB"]),
    ({"pipeline": "dualpipe-v:2x4", "mesh": "data:2"}, ["offload:swapadvisor:20KiB"]),
    ({"pipeline": "lockstep:2x4", "lowering": "phased"}, ["offload:vdnn:20KiB"]),
    ({"pipeline": "2bw:2x4", "stash": "input"}, ["offload:vdnn:20KiB"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{**changes, "memory": rule} for changes, rules in RULES for rule in rules], ids=str
)
def test_memory_rules(changes: dict[str, str], twins: dict[Any, list[float]]) -> None:
    compare(changes, twins)


def hosted_bytes(step: TrainStep, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes of a slot that lie on the host, as the traced step has them."""
    found = []

    def start(actions: Actions) -> Any:
        state = original(actions)
        for leaf, hosted in zip(state["kept"], actions._passes.is_hosted, strict=True):
            assert (jax.typeof(leaf).memory_space == jax.memory.Space.Host) == hosted
            found.append(hosted * leaf_bytes(leaf) // leaf.shape[0])
        return state

    original = Actions.initial_state
    with monkeypatch.context() as patch:
        patch.setattr(Actions, "initial_state", start)
        traced = step.step_fn.trace(step.layout.abstract, step.abstract_batch(batch()))
    step.check_traced(traced.jaxpr, batch())
    return sum(found)


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb-h1", marks=pytest.mark.slow)])
def test_what_is_offloaded_lies_on_the_host_between_forward_and_backward(
    schedule: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    step = build(experiment(), override(Plan(), {"pipeline": f"{schedule}:2x4", "memory": "offload:vdnn:20KiB"}))
    decision, found = step.decision, hosted_bytes(step, monkeypatch)
    assert decision is not None
    # what follows from weights or positions alone is made again in place of a slot
    assert 0.75 * decision.host_bytes <= found <= decision.host_bytes
    # a plan in two groups is one of a stage's two layers, not of the model's four
    [save] = decision.saves
    file = tmp_path / "first_layer.json"
    stack = StackDecision((Group(1, save), Group(1)))
    dataclasses.replace(decision, plan=MemoryPlan.parse(f"file:{file}"), saves=(), stack=stack).write(file)
    first = build(experiment(), override(Plan(), {"pipeline": f"{schedule}:2x4", "memory": f"file:{file}"}))
    assert hosted_bytes(first, monkeypatch) == found // 2
    with pytest.raises(UserError, match="activations from step to step"):
        build(experiment(), override(Plan(), {"pipeline": "2bw:2x4", "memory": f"file:{file}"}))


@pytest.mark.slow
def test_zero_bubble_schedules_keep_less_under_a_rule_that_computes_again() -> None:
    temp = {}
    for rule in ("none", "dots", "full"):
        changes = {"pipeline": "zb-h1:2x4", "memory": rule}
        temp[rule] = build(experiment(64, 8), override(Plan(), grouped(changes))).compile(batch(64)).temp_bytes
    assert temp["full"] < 0.7 * temp["none"]
    assert temp["full"] < temp["dots"] < temp["none"]


def test_what_stages_of_an_asynchronous_pipeline_keep_is_not_offloaded() -> None:
    changes = {"pipeline": "pipedream:2", "memory": "offload:vdnn:20KiB"}
    with pytest.raises(UserError, match=r"activations from step to step.* add the option stash=input"):
        build(experiment(), override(Plan(), grouped(changes)))
