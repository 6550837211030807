"""A pipeline of unlike blocks computes what one device computes."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from unlike_blocks import Unlike

from jaxscale.errors import UserError
from jaxscale.models import ResNet
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.step.build import build
from jaxscale.values import override
from tests.plans import grouped

EXPERIMENT = Experiment("unlike", Unlike(), None, batch=8)


def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.integers(0, 12, (8, 3)).astype(np.int32) for name in ("tokens", "targets")}


def computed(plan: Plan) -> tuple[Any, float, Any]:
    step = build(EXPERIMENT, plan)
    state, placed = step.init(), step.place(batch())
    found = jax.tree.map(np.asarray, jax.device_get(step.gradients_fn(state, placed)))
    return found, float(step.evaluate(state, placed).total), step


@pytest.fixture(scope="module")
def reference() -> Any:
    return computed(Plan(mesh=MeshSpec()))


@pytest.mark.parametrize(
    "changes",
    [
        {"pipeline": "1f1b:2x2", "stages": "1,3"},
        *(
            pytest.param(changes, marks=pytest.mark.slow)
            for changes in (
                {"pipeline": "1f1b:2x4", "mesh": "fsdp:2", "zero": "2"},
                {"pipeline": "chimera:2x4", "mesh": "data:2"},
                {"pipeline": "zb-v:2x4", "memory": "full"},
                {"pipeline": "gpipe:4x2"},
                {"pipeline": "interleaved:2x4,v=2", "mesh": "fsdp:2", "zero": "1"},
                {"pipeline": "lockstep:2x2", "mesh": "replica:2", "optimizer_state": "streamed"},
            )
        ),
    ],
    ids=str,
)
def test_gradients_and_loss_equal_one_device(changes: dict[str, str], reference: Any) -> None:
    expected, total, alone = reference
    found, again, step = computed(override(Plan(), grouped({**changes, "stash": "input"})))
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert np.abs(a - b).max() <= 1e-6 * np.abs(b).max(), jax.tree_util.keystr(path)
    assert abs(again - total) <= 1e-6 * total
    weights, others = (one.to_canonical(one.init()) for one in (step, alone))
    for name, leaf in others.items():
        np.testing.assert_allclose(np.asarray(weights[name]), np.asarray(leaf), rtol=1e-6, err_msg=name)
    # a device computes with its stages' weights alone, and between steps has a share of each parameter
    longest = max(part.end for part in step.objective.form.flat_slices.values())
    own = longest * step.stages.schedule.chunks
    assert own <= step.parameters
    split = [leaf for leaf in jax.tree.leaves(step.layout.master_shardings) if "pipe" in str(leaf.spec)]
    assert len(split) > 5


@pytest.mark.slow
def test_it_trains() -> None:
    losses = []
    for plan in (Plan(mesh=MeshSpec()), override(Plan(), grouped({"pipeline": "1f1b:2x2", "stash": "input"}))):
        step = build(dataclasses.replace(EXPERIMENT, steps=2), plan)
        step.compile(batch())
        state = step.init()
        for _ in range(2):
            state, metrics = step(state, step.place(batch()))
            losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses[2:], losses[:2], rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "add the option stash=input"),
        ({"stash": "input", "mesh": "tensor:2"}, "which nothing splits over tensor"),
        ({"stash": "input", "mesh": "fsdp:2", "zero": "3"}, "take zero 2"),
        ({"stash": "input", "memory": "sqrt"}, "take none, dots or full"),
        ({"pipeline": "pipedream:2"}, "cannot update their weights at different times; take a synchronous pipeline"),
        ({"pipeline": "1f1b:8x8"}, "8 stages, but the model has 4 layers"),
        ({"stages": "3,2"}, "got stages of 5 blocks in total, expected 4"),
    ],
)
def test_what_does_not_go_with_unlike_blocks_is_refused(changes: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(EXPERIMENT, override(Plan(), grouped({"pipeline": "1f1b:2x4", **changes})))


def test_running_statistics_are_refused_before_anything_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch norm in a stage, or in front of all of them."""
    monkeypatch.setattr(ResNet, "loss", lambda *_: pytest.fail("traced"))
    model = ResNet(classes=10, channels=1, stages=(1, 1), width=8, stem="small")
    with pytest.raises(UserError, match=r"holds running statistics \(blocks/layers/0/.*use layer or group norm"):
        build(
            Experiment("norms", model, None, batch=8),
            override(Plan(), grouped({"pipeline": "1f1b:2x4", "stash": "input"})),
        )
