"""A pipelined train step computes what one device computes, for every layout, and its state is anybody's."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxscale.compiler.collectives import collectives
from jaxscale.errors import UserError
from jaxscale.models.decoder import Decoder
from jaxscale.pipeline.csv import to_csv
from jaxscale.pipeline.schedules import METHODS
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.step.build import build
from jaxscale.step.train_step import TrainStep
from jaxscale.values import override
from tests.plans import grouped
from tests.tiers import variants

MODEL = Decoder(vocab=12, context=8, layers=4, embed=8, heads=2, dropout=0.1)
EXPERIMENT = Experiment("pipelined", MODEL, None, batch=8)
ONE = Plan(mesh=MeshSpec())


def batch(rows: int = 8) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    found = {name: rng.integers(0, 12, (rows, 8)).astype(np.int32) for name in ("tokens", "targets")}
    # rows of unlike weight: a mean of the microbatches' means would be another number
    return {**found, "weights": (rng.random((rows, 8)) < np.linspace(0.2, 1, rows)[:, None]).astype(np.float32)}


def gradients(step: TrainStep, state: Any) -> Any:
    found = step.gradients_fn(state, step.place(batch()))
    return jax.tree.map(np.asarray, step.pure_model.in_layers(jax.device_get(found)))


@pytest.fixture(scope="module")
def reference() -> Any:
    step = build(EXPERIMENT, ONE)
    state = step.init()
    return gradients(step, state), step.evaluate(state, step.place(batch())), step.to_canonical(state)


def compare(found: Any, expected: Any, bound: float) -> None:
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert np.abs(a - b).max() <= bound * np.abs(b).max(), jax.tree_util.keystr(path)


CASES = [
    {"pipeline": "1f1b:2x4"},
    {"pipeline": "zb-v:2x4", "stages": "1,1,1,1", "mesh": "tensor:2", "memory": "full"},
    {"pipeline": "chimera:2x4", "mesh": "fsdp:2", "zero": "2", "stash": "input"},
    {"pipeline": "gpipe:4x2", "mesh": "data:2", "memory": "dots"},
    {"pipeline": "lockstep:2x2", "mesh": "fsdp:4", "zero": "1"},
    {"pipeline": "interleaved:2x4,v=2", "mesh": "sequence:2", "stash": "input"},
    {"pipeline": "1f1b:3x4", "mesh": "fsdp:2", "zero": "1"},
    {"pipeline": "1f1b:2x2", "mesh": "fsdp:2", "zero": "3", "memory": "full"},
    {"pipeline": "interleaved:2x2,v=2", "mesh": "fsdp:2,tensor:2", "zero": "3"},
    {"pipeline": "1f1b:2x2", "stages": "3,1", "unroll": "2"},
    {"pipeline": "lockstep:2x4", "lowering": "phased"},
    {"pipeline": "gpipe:4x2", "lowering": "phased", "stash": "input", "mesh": "fsdp:2", "zero": "1"},
    {"pipeline": "zb-h1:4x8", "stash": "input"},
    {"pipeline": "dualpipe-v:2x4", "mesh": "data:2"},
    {"pipeline": "1f1b:2x2", "mesh": "replica:2,fsdp:2", "zero": "2", "loss_chunk": "4", "attention": "chunked"},
]


@pytest.mark.slow  # `test_chained.py` and `test_composed.py` have some of them by default
@pytest.mark.parametrize("changes", CASES, ids=str)
def test_gradients_and_loss_equal_one_device(changes: dict[str, str], reference: Any) -> None:
    expected, loss, weights = reference
    step = build(EXPERIMENT, override(Plan(), grouped(changes)))
    state = step.init()
    apart = step.to_canonical(state)
    assert {name: leaf.shape for name, leaf in apart.items()} == {name: leaf.shape for name, leaf in weights.items()}
    for name, leaf in weights.items():
        # the last bit of a random number depends on how many a CPU's loop computes at a time
        np.testing.assert_allclose(np.asarray(apart[name]), np.asarray(leaf), rtol=1e-6, err_msg=name)
    compare(gradients(step, state), expected, 1e-6)
    found = step.evaluate(state, step.place(batch()))
    assert float(found.weight) == float(loss.weight)
    assert abs(float(found.total) - float(loss.total)) <= 1e-6 * float(loss.total)


@pytest.mark.parametrize(
    "changes",
    variants([{"pipeline": "1f1b:3x4", "zero": "1", "mesh": "fsdp:2"}, {"pipeline": "interleaved:2x4,v=2"}], 1),
    ids=str,
)
def test_a_checkpoint_is_of_the_model_and_not_of_the_schedule(changes: dict[str, str]) -> None:
    rng = np.random.default_rng(0)
    alone, step = build(EXPERIMENT, ONE), build(EXPERIMENT, override(Plan(), grouped(changes)))
    saved = {name: np.asarray(leaf) for name, leaf in alone.to_canonical(alone.init()).items()}
    for name, leaf in saved.items():
        if leaf.dtype == np.float32:  # as after some steps: momenta start from zeros
            saved[name] = rng.normal(size=leaf.shape).astype(np.float32)
        elif leaf.dtype == np.int32:  # the numbers of steps
            saved[name] = leaf + 3
    abstract = step.canonical_abstract()
    placed = {name: jax.device_put(leaf, abstract[name].sharding) for name, leaf in saved.items()}
    again = step.to_canonical(step.from_canonical(placed))
    for name, leaf in saved.items():
        assert np.array_equal(again[name], leaf), name


def check_wires(step: TrainStep) -> None:
    """Inside the loop over ticks neighbours send messages, and nothing is reduced; after it, once."""
    found = collectives(step._executable.as_text(), step.mesh)
    inside = {(one.kind, one.axes) for one in found if one.in_loop}
    assert inside == {("collective-permute", ("pipe",))}
    gradients = [one for one in found if not one.in_loop and "fsdp" in (one.axes or ())]
    assert gradients
    assert all(one.count == 1 for one in gradients)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"pipeline": "1f1b:3x4", "zero": "1", "mesh": "fsdp:2"}, marks=pytest.mark.slow),
        pytest.param({"pipeline": "zb-h1:2x4", "optimizer_state": "host"}, marks=pytest.mark.slow),
        pytest.param({"pipeline": "1f1b:2x4", "optimizer_state": "streamed"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_step_trains(changes: dict[str, str], reference: Any) -> None:
    plans = [ONE, override(Plan(), grouped(changes))]
    experiment = dataclasses.replace(EXPERIMENT, steps=3)
    losses = []
    for plan in plans:
        step = build(experiment, plan)
        step.compile(batch())
        if plan.zero:
            check_wires(step)
        state = step.init()
        found = []
        for _ in range(3):
            state, metrics = step(state, step.place(batch()))
            found.append([float(metrics[name]) for name in ("loss", "grad_norm", "weight", "skipped")])
        losses.append(found)
        assert step.parameters == build(experiment, ONE).parameters
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline": "1f1b:8x8"}, "8 stages, but the model has 4 layers"),
        ({"pipeline": "1f1b:2x3"}, "batch 8 cannot be split evenly into 3 microbatches"),
        ({"pipeline": "1f1b:2x4", "mesh": "pipe:4"}, "takes 2 devices along pipe, but mesh pipe:4 has 4"),
        ({"pipeline": "1f1b:2x4", "microbatches": "2"}, "leave microbatches out"),
        ({"mesh": "pipe:2"}, "nothing specifies what the devices along pipe do"),
        ({"pipeline": "1f1b:2x4", "lowering": "phased"}, "take lockstep or gpipe, or lowering switch"),
        ({"pipeline": "pipedream:2", "lowering": "phased"}, "the pipeline's ticks mix forward and backward passes"),
        ({"pipeline": "1f1b:2x4", "stages": "2,3"}, "got stages of 5 blocks in total, expected 4"),
        ({"pipeline": "1f1b:2x4", "stages": "4"}, "expected 2 stages"),
        ({"pipeline": "chimera:2x4", "weights": "host"}, "weights host with pipeline"),
        ({"pipeline": "2bw:2x4", "weights": "host"}, "weights host with pipeline"),
        ({"pipeline": "1f1b:2x4", "weights": "host", "gradients": "host"}, "gradients host with pipeline"),
        ({"pipeline": "1f1b:16x4"}, "takes 16 devices"),
        ({"pipeline": "1fb1:2x4"}, "did you mean '1f1b'"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(changes: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match="(?s).*" + message.replace("'", ".")):
        build(EXPERIMENT, override(Plan(), grouped(changes)))


def test_a_schedule_for_another_number_of_devices_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "four.csv"
    file.write_text(to_csv(METHODS["1f1b"].schedule(4, 8)))
    for changes, message in (
        ({"mesh": "pipe:2"}, "takes 4 devices along pipe, but mesh pipe:2 has 2; leave pipe out of the mesh"),
        ({"microbatches": "4"}, "microbatches 4 with pipeline .*: a pipeline specifies by itself"),
    ):
        with pytest.raises(UserError, match=message):
            build(EXPERIMENT, override(Plan(), grouped({"pipeline": f"file:{file}", **changes})))
    with pytest.raises(UserError, match="takes 4 devices, but there are 3"):
        build(EXPERIMENT, override(Plan(), {"pipeline": f"file:{file}"}), devices=jax.devices()[:3])


@dataclasses.dataclass(frozen=True)
class Chip:
    """A device of a slice, of which nothing else is asked before a program is traced."""

    id: int
    slice_index: int
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"


def test_a_pipe_across_unequal_slices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Decoder, "loss", lambda *_: pytest.fail("traced"))
    chips = [Chip(number, int(number >= 3)) for number in range(4)]
    for changes in ({"pipeline": "1f1b:4x4"}, {"pipeline": "1f1b:2x4", "mesh": "data:2"}):
        with pytest.raises(
            UserError,
            match="got TPU slices with 3 and 1 of the mesh's 4 devices, expected the same number on each slice",
        ):
            build(EXPERIMENT, override(Plan(), grouped(changes)), devices=chips)
