"""DiLoCo in the train step: replicas train alone, meet as the paper has it, go on from checkpoints; refusals."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jaxscale.compiler.collectives import collectives
from jaxscale.errors import UserError
from jaxscale.models.decoder import Decoder
from jaxscale.optim.optimizer import Optimizer
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.replicas.low_communication import Diloco
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.step.build import build
from jaxscale.step.compiled_checks import SCALAR_BYTES, NoEffect, bytes_over, check_inner_step
from jaxscale.values import override
from tests.plans import grouped
from tests.step.residual import Residual, random_batch

MODEL = Decoder(vocab=12, context=8, layers=2, embed=16, heads=2)
RNG = np.random.default_rng(0)
BATCHES = [{name: RNG.integers(0, 12, (8, 8), np.int32) for name in ("tokens", "targets")} for _ in range(6)]
ADAMW = Optimizer(learning_rate=0.01, schedule="constant", clip=0.5)
SGD = Optimizer("sgd", learning_rate=0.1, weight_decay=0.0, schedule="constant", clip=None)


def experiment(optimizer: Optimizer = ADAMW, *, steps: int = 6, batch: int = 8, model: Any = MODEL) -> Experiment:
    return Experiment("diloco", model, None, batch=batch, steps=steps, optimizer=optimizer)


def run(step: Any, state: Any, batches: Any) -> tuple[Any, list[dict[str, float]]]:
    found = []
    for batch in batches:
        state, metrics = step(state, step.place(batch))
        found.append({name: float(value) for name, value in metrics.items()})
    return state, found


def arrays(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def put(step: Any, saved: Any) -> Any:
    abstract = step.canonical_abstract()
    return step.from_canonical({n: jax.device_put(a, abstract[n].sharding) for n, a in saved.items() if n in abstract})


@pytest.mark.slow  # tests/replicas/test_low_communication.py has it without a mesh
@pytest.mark.parametrize("alike", [True, False])
def test_meeting_after_every_step_is_data_parallel_training_with_plain_sgd_alone(alike: bool) -> None:
    rows = BATCHES[:2]
    # replicas of very unlike weight
    rows = [{**b, "weights": (RNG.random((8, 8)) < np.linspace(0.1, 1, 8)[:, None]).astype(np.float32)} for b in rows]
    optimizer = SGD if alike else ADAMW
    found = []
    for plan in (
        Plan(mesh=MeshSpec(replica=2), diloco=Diloco(1, lr=1.0, momentum=0.0)),
        Plan(mesh=MeshSpec(data=2)),
    ):
        step = build(experiment(optimizer), plan)
        state, metrics = run(step, step.init(), rows)
        found.append((arrays(state.params), [row["loss"] for row in metrics]))
    away = max(np.abs(a - b).max() for a, b in zip(found[0][0], found[1][0], strict=True))
    if alike:
        np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-6)
        assert away < 1e-6
    else:
        assert away > 1e-3


VECTORS = [random_batch(8, seed) for seed in range(6)]


@pytest.fixture(scope="module")
def alone() -> Any:
    """A step of one replica's rows."""
    return build(experiment(batch=4, model=Residual()), Plan(mesh=MeshSpec()))


@pytest.mark.parametrize(
    "plan",
    [
        {"mesh": "replica:2,fsdp:2", "zero": "2", "diloco": "every=2,fragments=2"},
        pytest.param({"mesh": "replica:2", "diloco": "every=3,momentum=0"}, marks=pytest.mark.slow),
        pytest.param(
            {"mesh": "replica:2,fsdp:2,tensor:2", "zero": "3", "microbatches": "2", "diloco": "every=2"},
            marks=pytest.mark.slow,
        ),
        pytest.param({"mesh": "replica:2,data:2", "memory": "full", "diloco": "every=2"}, marks=pytest.mark.slow),
    ],
)
def test_replicas_train_alone_and_meet_as_the_paper_has_it(plan: dict[str, str], alone: Any) -> None:
    step = build(experiment(steps=5, model=Residual()), override(Plan(), grouped(plan)))
    diloco, outer = step.plan.diloco, step.replicas
    assert diloco is not None
    assert outer is not None
    step.compile(VECTORS[0])  # checks what both programs send
    assert "single numbers in between" in " ".join(step.describe())
    state = step.init()
    shared = {n: np.asarray(a) for n, a in step.to_canonical(state).items() if n.startswith("params/")}
    momentum = {n: np.zeros_like(a) for n, a in shared.items()}
    parts = [{f"params/{n}" for n in part} for part in outer.names_of_fragments]
    own = [alone.init() for _ in range(2)]
    for n, a in alone.to_canonical(own[0]).items():
        np.testing.assert_array_equal(np.asarray(a), shared.get(n, np.asarray(a)))
    for number, batch in enumerate(VECTORS[:5], 1):
        losses = []
        for i in range(2):
            rows = {name: part[4 * i : 4 * i + 4] for name, part in batch.items()}
            own[i], metrics = alone(own[i], alone.place(rows))
            losses.append(float(metrics["loss"]))
        due = range(diloco.fragments) if number == 5 else diloco.due(number)
        taken = [{n: np.asarray(a) for n, a in alone.to_canonical(mine).items()} for mine in own]
        for part in due:
            for name in shared:
                if plain_name(name) not in parts[part]:
                    continue
                way = shared[name] - (taken[0][name] + taken[1][name]) / 2
                momentum[name] = diloco.momentum * momentum[name] + way
                move = way + diloco.momentum * momentum[name] if diloco.momentum else way
                shared[name] = shared[name] - diloco.lr * move
                for mine in taken:
                    mine[name] = shared[name]
        own = [put(alone, mine) for mine in taken] if due else own
        state, (row,) = run(step, state, [batch])
        assert row["loss"] == pytest.approx(np.mean(losses), rel=2e-5)
        assert row["wire_bytes"] == sum(map(outer.wire_bytes, due))
        found = step.to_canonical(state)
        for name, theta in shared.items():
            np.testing.assert_allclose(np.asarray(found[name]), theta, atol=2e-5, err_msg=f"{number} {name}")
            one = np.mean([mine[name] for mine in taken], 0)
            kept = np.asarray(found[f"outer/one/weights/{name.removeprefix('params/')}"])
            np.testing.assert_allclose(kept, one, atol=2e-5)


def plain_name(name: str) -> str:
    """Of a stacked parameter whose layer has the name."""
    return "/".join(part for part in name.split("/") if not part.isdigit())


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint_with_other_replicas_and_without_them() -> None:
    plan = Plan(mesh=MeshSpec(replica=2), diloco=Diloco(2), reduce=override(Plan(), {"reduce": "int8"}).reduce)
    step, batches = build(experiment(), plan), [{**b, "weights": np.ones((8, 8), np.float32)} for b in BATCHES]
    step.compile(batches[0])
    state, rows = run(step, step.init(), batches[:2])
    # NaN in one replica's rows: a step for none, that counts
    batches[2]["weights"][0, 0] = np.nan
    before = arrays(state.extra["outer"])
    state, more = run(step, state, batches[2:3])
    rows += more
    assert rows[-1]["skipped"] == 1
    for a, b in zip(before, arrays(state.extra["outer"]), strict=True):
        np.testing.assert_array_equal(a, b)
    assert [row["wire_bytes"] > 0 for row in rows] == [False, True, False]
    assert "residual_norm" in rows[1]
    saved = {n: np.asarray(a) for n, a in step.to_canonical(state).items()}
    assert step.describe_restored(saved) == ""
    again = put(step, saved)
    ends = [run(step, one, batches[3:4])[0] for one in (state, again)]
    for a, b in zip(*map(arrays, ends), strict=True):
        np.testing.assert_array_equal(a, b)
    # replicas that went on from what is the same to the bit are alike where they met
    weights = ends[0].extra["outer"]["weights"]
    for leaf, theta in zip(arrays(weights), arrays(ends[0].params), strict=True):
        np.testing.assert_array_equal(leaf, np.broadcast_to(theta, leaf.shape))
    for mesh, diloco, said in (
        (MeshSpec(replica=4), Diloco(2), "another number of replicas, so 4 replicas start from their mean"),
        (MeshSpec(data=2), None, ""),
    ):
        other = build(experiment(), Plan(mesh=mesh, diloco=diloco))
        assert said in other.describe_restored(saved)
        taken = put(other, saved)
        for a, b in zip(arrays(taken.params), arrays(put(step, saved).params), strict=True):
            np.testing.assert_array_equal(a, b)
        if diloco is not None:
            mean = [a.mean(0) for a in arrays(put(step, saved).extra["outer"]["weights"])]
            for a, b in zip(arrays(taken.extra["outer"]["weights"]), mean, strict=True):
                np.testing.assert_allclose(a, np.broadcast_to(b, a.shape), rtol=1e-6)
            continue
        plain = {n: np.asarray(a) for n, a in other.to_canonical(taken).items()}
        assert "it was trained without diloco, so 2 replicas start from its weights" in step.describe_restored(plain)
        begun = put(step, plain)
        for a, b in zip(arrays(begun.extra["outer"]["weights"]), arrays(begun.params), strict=True):
            np.testing.assert_array_equal(a, np.broadcast_to(b, a.shape))
        assert not any(a.any() for a in arrays(begun.extra["outer"]["momentum"]))


@pytest.mark.slow
def test_a_gradient_that_crosses_between_meetings_is_found() -> None:
    step, plain = (
        build(experiment(), Plan(mesh=MeshSpec(replica=2, fsdp=2), zero=2, diloco=diloco))
        for diloco in (Diloco(2), None)
    )
    assert step.replicas is not None
    sent = []
    for one in (step, plain):
        one.compile(BATCHES[0])
        sent.append(bytes_over(collectives(one.program or "", one.mesh), "replica", 2))
    assert 0 < sent[0] <= SCALAR_BYTES
    assert sent[1] > 4 * plain.parameters / 2
    check_inner_step(step.replicas.diloco, sent[0])
    with pytest.raises(NoEffect, match="train alone"):
        check_inner_step(step.replicas.diloco, sent[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "plan"),
    [
        (ADAMW, {"state": "int8", "mesh": "replica:2,fsdp:2", "zero": "2"}),
        (ADAMW, {"precision": "bfloat16", "mesh": "replica:2,fsdp:2", "zero": "2"}),
        (ADAMW, {"reduce": "topk:0.1", "mesh": "replica:4,fsdp:2", "zero": "3"}),
        (Optimizer("muon", learning_rate=0.01, precision="float32"), {"mesh": "replica:2,fsdp:2", "zero": "3"}),
        (Optimizer("lamb", learning_rate=0.01), {"mesh": "replica:8"}),
        (Optimizer("schedule_free", learning_rate=0.01), {"mesh": "replica:2"}),
    ],
)
def test_other_optimizers_and_plans_inside(optimizer: Optimizer, plan: dict[str, str]) -> None:
    model = dataclasses.replace(MODEL, embed=32, mlp=128)
    step = build(experiment(optimizer, model=model), override(Plan(), grouped({**plan, "diloco": "every=2"})))
    step.compile(BATCHES[0])
    state, rows = run(step, step.init(), [BATCHES[0]] * 6)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["skipped"] == 0
    saved = {n: np.asarray(a) for n, a in step.to_canonical(state).items()}
    for a, b in zip(arrays(put(step, saved)), arrays(state), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"mesh": "fsdp:2"}, "mesh fsdp:2 has none; name the slow axis"),
        ({}, "has none; name the slow axis"),
        ({"mesh": "replica:2", "weights": "host"}, "with offload.weights host: each replica has"),
        ({"mesh": "replica:2", "optimizer_state": "host"}, "with offload.optimizer_state host"),
        ({"mesh": "replica:2", "pipeline": "2bw:2x2"}, "with pipeline 2bw:2x2"),
        ({"mesh": "replica:2", "precision": "bfloat16", "master": "split"}, "with state.master split"),
        ({"mesh": "replica:2", "diloco": "every=7"}, "has 6 steps"),
        ({"mesh": "replica:2", "diloco": "every=6,fragments=99"}, "expected 1 to 6"),
        ({"mesh": "replica:2", "diloco": "evry=6"}, "did you mean 'every'"),
    ],
)
def test_refusals(plan: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(experiment(), override(Plan(), grouped({"diloco": "every=2", **plan})))


def test_momenta_and_meetings_are_two_things() -> None:
    optimizer = Optimizer("one_bit_adam")
    with pytest.raises(UserError, match="exchange momenta in every step"):
        build(experiment(optimizer), Plan(mesh=MeshSpec(replica=2), diloco=Diloco(2)))
