"""The step of an asynchronous pipeline: weights of a loop that knows no pipeline, restarts to the last bit, refusals.

The loop takes gradients of the whole model on one device, at weights put together from the versions that each stage
would read, and updates each stage by itself.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale.data import Text
from jaxscale.errors import UserError
from jaxscale.models.decoder import Decoder
from jaxscale.optim.leaves import leaves_of
from jaxscale.optim.optimizer import Optimizer
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.step.build import build
from jaxscale.step.train_step import TrainStep
from jaxscale.trees import path_name
from jaxscale.values import override
from tests.plans import grouped
from tests.step.residual import Residual, Vectors, random_batch
from tests.tiers import variants

ROWS, CONTEXT, VOCAB = 8, 4, 8


@dataclasses.dataclass(frozen=True)
class Rows:
    """Random tokens, rows of unlike weight."""

    def shapes(self, batch: int) -> dict[str, tuple[tuple[int, ...], str]]:
        kinds = {"tokens": "int32", "targets": "int32", "weights": "float32"}
        return {name: ((batch, CONTEXT), kind) for name, kind in kinds.items()}


class WeightedVectors(Vectors):
    """Random vectors, rows of unlike weight."""

    def shapes(self, batch: int) -> dict[str, tuple[tuple[int, ...], str]]:
        return {**super().shapes(batch), "weights": ((batch,), "float32")}


def vectors(number: int) -> dict[str, np.ndarray]:
    weights = np.random.default_rng(number).random(ROWS) * np.linspace(0.3, 1, ROWS)
    return {**random_batch(ROWS, number), "weights": weights.astype(np.float32)}


MODEL = Decoder(vocab=VOCAB, context=CONTEXT, layers=2, embed=4, heads=1, dropout=0.1)
# a rule in which a wrong delay shows, and rounding does not grow; most gradients are clipped
RULE = Optimizer(name="sgd", learning_rate=0.3, momentum=0.5, clip=0.3, warmup=2)
EXPERIMENT = Experiment("streamed", MODEL, Rows(), optimizer=RULE, batch=ROWS, steps=8)
VECTORS = dataclasses.replace(EXPERIMENT, model=Residual(), data=WeightedVectors())
WIDE = dataclasses.replace(EXPERIMENT, model=dataclasses.replace(MODEL, embed=16))
STEPS = 5


def batch(number: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(number)
    found = {name: rng.integers(0, VOCAB, (ROWS, CONTEXT)).astype(np.int32) for name in ("tokens", "targets")}
    chance = rng.random((ROWS, CONTEXT)) < np.linspace(0.3, 1, ROWS)[:, None]
    return {**found, "weights": chance.astype(np.float32)}


def step_of(text: str, experiment: Experiment = EXPERIMENT) -> TrainStep:
    return build(experiment, override(Plan(), grouped(dict(part.split("=", 1) for part in text.split("; ")))))


def fed(
    step: TrainStep, state: Any, numbers: range, batch_of: Callable[[int], Any] = batch
) -> tuple[Any, list[dict[str, float]]]:
    told = []
    for number in numbers:
        state, metrics = jax.block_until_ready(step(state, step.place(batch_of(number))))
        told.append({name: float(value) for name, value in metrics.items()})
    return state, told


def on_host(step: TrainStep, state: Any) -> dict[str, np.ndarray]:
    return {name: np.array(leaf) for name, leaf in step.to_canonical(state).items()}


def restored(step: TrainStep, saved: dict[str, np.ndarray]) -> Any:
    wanted = {name: leaf for name, leaf in step.canonical_abstract().items() if name in saved}
    return step.from_canonical({name: jax.device_put(saved[name], leaf.sharding) for name, leaf in wanted.items()})


def parameters(saved: dict[str, Any]) -> dict[str, Any]:
    return {name: leaf for name, leaf in saved.items() if name.startswith("params/")}


class Reference:
    """Versions of each stage's weights, by their names in a checkpoint."""

    def __init__(self, layers: tuple[int, ...], alone: TrainStep, batch_of: Callable[[int], Any]) -> None:
        self.step, self.batch_of, experiment, ranks = alone, batch_of, alone.experiment, len(layers)
        self.state = self.step.init()
        stages = [stage for stage, count in enumerate(layers) for _ in range(count)]
        whole = parameters(on_host(self.step, self.state))

        def stage(name: str) -> int:
            parts = name.split("/")
            if "layers" in parts:
                return stages[int(parts[parts.index("layers") + 1])]
            return 0 if "embedding" in parts else ranks - 1

        self.versions = [[{n: leaf for n, leaf in whole.items() if stage(n) == s}] for s in range(ranks)]
        rules = [experiment.optimizer.build(experiment.steps, leaves_of(own[0])) for own in self.versions]
        self.states = [rule.init(own[0]) for rule, own in zip(rules, self.versions, strict=True)]

        def updated(rule: Any, gradients: Any, state: Any, weights: Any) -> Any:
            updates, state = rule.update(gradients, state, weights)
            return optax.apply_updates(weights, updates), state, optax.tree.norm(gradients)

        self.updates = [jax.jit(functools.partial(updated, rule)) for rule in rules]
        self.norms: list[list[float]] = [[] for _ in range(ranks)]

    def feed(self, number: int, reads: list[int]) -> None:
        """One update of each stage, by a gradient at these versions."""
        read = [own[at] for own, at in zip(self.versions, reads, strict=True)]
        names = {name: jnp.asarray(leaf) for part in read for name, leaf in part.items()}
        arrays = {**self.step.to_canonical(self.state), **names, "step": jnp.int32(number)}
        state = self.step.from_canonical(arrays)
        gradients = self.step.gradients_fn(state, self.step.place(self.batch_of(number)))
        self.state = dataclasses.replace(state, params=gradients)
        named = parameters(on_host(self.step, self.state))
        for s, update in enumerate(self.updates):
            own = {name: named[name] for name in self.versions[s][-1]}
            weights, self.states[s], norm = update(own, self.states[s], self.versions[s][-1])
            self.norms[s].append(float(norm))
            self.versions[s].append(jax.tree.map(np.asarray, weights))


def check(
    step: TrainStep,
    alone: TrainStep,
    steps: int = STEPS,
    bound: float = 2e-6,
    batch_of: Callable[[int], Any] = batch,
) -> None:
    """A step's weights after so many batches are those of the loop."""
    plan = step.plan.pipeline
    assert plan is not None
    assert plan.ranks is not None
    assert step.stages is not None
    expected = Reference(step.stages.layer_counts, alone, batch_of)
    for number in range(steps):
        delays = [plan.ranks - 1 - s for s in range(plan.ranks)] if plan.name == "pipedream" else [1] * plan.ranks
        expected.feed(number, [max(0, number - delay) for delay in delays])
    state, told = fed(step, step.init(), range(steps), batch_of)
    made = np.asarray(state.extra["in_flight"]["watch"].good).reshape(plan.ranks, -1)[:, 0]
    assert made[-1] == state.watch.good
    assert made[-1] > steps - plan.ranks
    found = on_host(step, state)
    for s, versions in enumerate(expected.versions):
        newest, before = versions[made[s]], versions[made[s] - 1]
        for name, leaf in newest.items():
            assert np.abs(found[name] - leaf).max() <= bound * np.abs(leaf).max(), name
        # another delay would show
        moved = max(np.abs(leaf - before[name]).max() / np.abs(leaf).max() for name, leaf in newest.items())
        assert moved > 100 * bound
    # norms of the gradients that were applied in the last step
    last = np.sqrt(sum(expected.norms[s][count - 1] ** 2 for s, count in enumerate(made)))
    assert abs(told[-1]["grad_norm"] - last) <= 1e-5 * last


@pytest.fixture(scope="module")
def pipedream() -> TrainStep:
    return step_of("pipeline=pipedream:2; mesh=data:1")


@pytest.fixture(scope="module")
def alone() -> TrainStep:
    return build(EXPERIMENT, Plan(mesh=MeshSpec()), devices=jax.devices()[:1])


def test_weights_equal_a_loop_of_whole_gradients_and_clipping_is_by_stage() -> None:
    alone = build(VECTORS, Plan(mesh=MeshSpec()), devices=jax.devices()[:1])
    check(step_of("pipeline=pipedream:2; mesh=data:1", VECTORS), alone, batch_of=vectors)


@pytest.mark.slow
def test_weights_of_a_decoder_with_dropout_equal_that_loop(pipedream: TrainStep, alone: TrainStep) -> None:
    check(pipedream, alone)


def test_a_restart_is_exact_and_any_plan_goes_on(pipedream: TrainStep, alone: TrainStep) -> None:
    state, before = fed(pipedream, pipedream.init(), range(3))
    saved = on_host(pipedream, state)
    state, after = fed(pipedream, state, range(3, 6))
    again, repeated = fed(pipedream, restored(pipedream, saved), range(3, 6))
    assert after == repeated
    one, other = on_host(pipedream, state), on_host(pipedream, again)
    names = [name for name in one if "/pipe/" not in name]  # zeros of slots that nothing reads may differ
    for name in names:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)
    assert all(metrics["weight"] > 0 for metrics in before)
    # one device takes the parameters, optimizer and all, and leaves what is in flight
    plain = alone.canonical_abstract()
    assert not any(name.startswith("in_flight") for name in plain)
    taken = on_host(alone, restored(alone, saved))
    assert set(taken) == {name for name in saved if not name.startswith("in_flight")}
    for name, leaf in taken.items():
        np.testing.assert_array_equal(leaf, saved[name], err_msg=name)
    # and the other way round: a pipe that is filled anew
    begun = restored(pipedream, taken)
    assert pipedream.describe_restored(taken) == (
        "; it has nothing in flight for pipeline pipedream:2, which starts empty"
    )
    assert not pipedream.describe_restored(saved)
    for name, leaf in taken.items():
        np.testing.assert_allclose(on_host(pipedream, begun)[name], leaf, rtol=1e-6, err_msg=name)
    # the newest weights are evaluated
    placed = alone.place(batch(9)), pipedream.place(batch(9))
    expected = alone.evaluate(restored(alone, taken), placed[0])
    found = pipedream.evaluate(begun, placed[1])
    np.testing.assert_allclose(float(found.total), float(expected.total), rtol=1e-6)
    assert pipedream.parameters == alone.parameters
    shown, wanted = (step.module(restored(step, taken)).head.weight[...] for step in (pipedream, alone))
    np.testing.assert_array_equal(np.asarray(shown), np.asarray(wanted))


def test_a_bad_gradient_skips_the_update_of_each_stage(pipedream: TrainStep) -> None:
    state, _ = fed(pipedream, pipedream.init(), range(3))
    bad = batch(3)
    bad["weights"] = np.where(bad["weights"] > 0, np.nan, bad["weights"]).astype(np.float32)
    state, _ = pipedream(state, pipedream.place(bad))
    state, told = fed(pipedream, state, range(4, 7))
    assert told[-1]["skipped"] == 1
    assert told[-1]["skipped_in_row"] == 0
    assert [list(np.asarray(getattr(state.extra["in_flight"]["watch"], name))) for name in ("skipped", "good")] == [
        [1, 1],
        [5, 5],
    ]
    assert all(np.isfinite(leaf).all() for leaf in parameters(on_host(pipedream, state)).values())


REFUSALS = [
    ("pipeline=pipedream:2; mesh=fsdp:2; zero=1", {}, r"zero 1 with pipeline pipedream:2: .* take zero 0"),
    ("pipeline=pipemare:2; optimizer_state=streamed", {}, "optimizer_state streamed with pipeline pipemare:2"),
    ("pipeline=pipedream:2; mesh=data:1", {"model": {"tied": True}}, r"embedding/weight is read both before .* \(tied"),
    (
        "pipeline=2bw:2x4; mesh=data:1",
        {"optimizer": {"name": "adafactor", "momentum": None}},
        "other shapes than its parameters",
    ),
    ("pipeline=1f1b:2x4; anneal=3", {}, "anneal 3 with pipeline 1f1b:2x4: this pipeline's gradients"),
    ("pipeline=1f1b:2x4; synchronous_steps=3", {}, "synchronous_steps 3 with pipeline 1f1b:2x4"),
    ("pipeline=pipemare:2; anneal=-1", {}, "anneal: got -1, expected 0"),
    ("pipeline=pipemare:2; correction=1", {}, "correction: got 1.0, expected 0"),
    ("pipeline=2bw:2x4; correction=0.1", {}, "correction 0.1 with pipeline 2bw:2x4"),
    ("pipeline=pipedream:4", {}, "4 stages, but the model has 2 layers"),
    ("pipeline=2bw:2x3", {}, "batch 8 cannot be split evenly into 3 microbatches"),
]


@pytest.mark.parametrize(("text", "changes", "message"), REFUSALS, ids=[case[2] for case in REFUSALS])
def test_what_updates_by_stage_cannot_mean_is_refused(text: str, changes: Any, message: str) -> None:
    parts = {name: dataclasses.replace(getattr(EXPERIMENT, name), **fields) for name, fields in changes.items()}
    with pytest.raises(UserError, match="(?s).*" + message):
        step_of(text, dataclasses.replace(EXPERIMENT, **parts))


def test_a_step_says_what_is_done_by_stage(pipedream: TrainStep) -> None:
    assert pipedream.describe()[1] == (
        "pipeline pipedream:2: gradients are up to 1 updates old; each stage clips by its own gradient's norm and "
        "skips bad updates by itself"
    )
    assert pipedream.memory(batch(0))["in flight"] > 0
    with pytest.raises(UserError, match="a step has no gradients of its own"):
        jax.eval_shape(pipedream.gradients_fn, pipedream.layout.abstract, pipedream.abstract_batch(batch(0)))


def test_what_is_in_flight_is_split_over_the_axes_of_a_stage() -> None:
    """No device keeps the parts of others between steps; the losses and the restart stay exact."""
    experiment = dataclasses.replace(EXPERIMENT, model=dataclasses.replace(MODEL, heads=2, embed=16, dropout=0.0))
    whole, split_step = (step_of(f"pipeline=2bw:2x4; mesh={mesh}", experiment) for mesh in ("data:1", "tensor:2"))
    bytes_of = [
        sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(step.layout.abstract.extra))
        for step in (whole, split_step)
    ]
    assert bytes_of[1] < 0.75 * bytes_of[0]  # norms, messages and the residual stream are whole
    versions = split_step.layout.abstract.extra["in_flight"]["pipe"]["versions"][0]
    assert versions["blocks/layers/mlp/up/weight"].sharding.spec[-1] == "tensor"
    assert versions["blocks/layers/mlp/down/weight"].sharding.spec[-1] == "tensor"
    _, expected = fed(whole, whole.init(), range(STEPS))
    state, before = fed(split_step, split_step.init(), range(3))
    saved = on_host(split_step, state)
    _, after = fed(split_step, state, range(3, STEPS))
    _, again = fed(split_step, restored(split_step, saved), range(3, STEPS))
    assert after == again
    for found, wanted in zip(before + after, expected, strict=True):
        np.testing.assert_allclose(list(found.values()), list(wanted.values()), rtol=1e-5)


@pytest.mark.parametrize("moments", ["int8", pytest.param("int4", marks=pytest.mark.variant)])
def test_copies_of_shared_weights_of_odd_size_have_moments_in_few_bits(moments: str) -> None:
    """A synchronous pipeline would split these positions over stages along their other dim."""
    model = Decoder(vocab=256, context=65, layers=2, embed=128, heads=2, positions="learned")
    experiment = Experiment("odd", model, Text("text.txt", context=65), batch=ROWS, steps=8)
    step = step_of(f"pipeline=2bw:2x4; mesh=data:1; state.moments={moments}", experiment)
    assert state_types(step, "/positions") & {"int8", "uint4"}
    tokens = np.random.default_rng(0).integers(0, 256, (ROWS, 66), dtype=np.int32)
    state, placed = step.init(), step.place({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]})
    losses = []
    for _ in range(8):
        state, metrics = step(state, placed)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[2]


def test_copies_of_a_norm_have_no_blocks_over_stages() -> None:
    model = dataclasses.replace(MODEL, layers=4, embed=1024, mlp=64)
    step = step_of("pipeline=2bw:4x4; mesh=data:1; state.moments=int8", dataclasses.replace(EXPERIMENT, model=model))
    assert "int8" in state_types(step, "/mlp/up")
    assert state_types(step, "/norm/weight") == {"float32"}


def state_types(step: TrainStep, name: str) -> set[str]:
    """Types of the optimizer state of the parameters with this text in their names."""
    leaves = jax.tree_util.tree_leaves_with_path(step.layout.abstract.optimizer)
    return {str(leaf.dtype) for path, leaf in leaves if name in path_name(path)}


OTHERS = [
    ("pipeline=2bw:2x4; mesh=data:1; stash=input", 2, 2e-6),
    ("pipeline=2bw:4x4; mesh=fsdp:2; memory=full", 4, 5e-6),
    ("pipeline=pipedream:4; mesh=data:2", 4, 5e-6),
    ("pipeline=pipedream:3; mesh=data:1; stages=1,2,1", 4, 5e-6),
    ("pipeline=pipedream:1; mesh=replica:2; loss_chunk=2", 2, 2e-6),
]


@pytest.mark.parametrize(
    "name", [pytest.param("lamb", marks=pytest.mark.variant), pytest.param("lars", marks=pytest.mark.slow)]
)
def test_layers_of_a_stage_are_updated_one_by_one(name: str) -> None:
    """Two layers a stage, which a rule of norms would otherwise take for one tensor."""
    rule = override(Optimizer(learning_rate=0.3, clip=0.3, warmup=2), {"name": name})
    experiment = dataclasses.replace(EXPERIMENT, model=Residual(layers=4), data=Vectors(), optimizer=rule)
    alone = build(experiment, Plan(mesh=MeshSpec()), devices=jax.devices()[:1])
    step = step_of("pipeline=2bw:2x4; mesh=data:1", experiment)
    check(step, alone, bound=1e-5, batch_of=functools.partial(random_batch, ROWS))


@pytest.mark.slow
@pytest.mark.parametrize(("text", "layers", "bound"), OTHERS, ids=[case[0] for case in OTHERS])
def test_weights_equal_the_loop_under_every_layout(text: str, layers: int, bound: float) -> None:
    experiment = dataclasses.replace(EXPERIMENT, model=dataclasses.replace(MODEL, layers=layers), steps=12)
    alone = build(experiment, Plan(mesh=MeshSpec()), devices=jax.devices()[:1])
    check(step_of(text, experiment), alone, 9, bound)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["pipeline=pipemare:2; mesh=data:2", "pipeline=2bw:2x2; precision=bfloat16; mesh=data:1"]
)
def test_others_train_and_restart_exactly(text: str) -> None:
    step = step_of(text)
    state, before = fed(step, step.init(), range(3))
    saved = on_host(step, state)
    _, after = fed(step, state, range(3, 6))
    _, again = fed(step, restored(step, saved), range(3, 6))
    assert after == again
    assert all(np.isfinite(metrics["loss"]) for metrics in before + after)


@pytest.mark.slow
def test_synchronous_steps_come_first(alone: TrainStep) -> None:
    step = step_of("pipeline=pipedream:2; mesh=data:2; synchronous_steps=3")
    assert "the first 3 steps are synchronous, then gradients" in step.describe()[1]
    expected, one = fed(alone, alone.init(), range(3))
    state, other = fed(step, step.init(), range(3))
    for metrics, wanted in zip(other, one, strict=True):
        np.testing.assert_allclose(list(metrics.values()), list(wanted.values()), rtol=1e-5)
    taken, saved = on_host(alone, expected), on_host(step, state)
    for name, leaf in taken.items():
        np.testing.assert_allclose(saved[name], leaf, rtol=1e-5, atol=1e-7, err_msg=name)
    _, after = fed(step, state, range(3, 6))
    _, again = fed(step, restored(step, saved), range(3, 6))
    assert after == again
    # a pipe fills, and all go on from the updates that were made
    assert [metrics["weight"] > 0 for metrics in after] == [True, True, True]
    assert after[2]["learning_rate"] < after[0]["learning_rate"] < one[-1]["learning_rate"]


@pytest.mark.parametrize(
    ("codec", "bound", "experiment", "batch_of"),
    [
        ("int8,start=100", 2e-5, VECTORS, vectors),
        pytest.param("int8,start=100", 2e-5, WIDE, batch, marks=pytest.mark.variant),
        pytest.param("int8", 2e-2, WIDE, batch, marks=pytest.mark.slow),
    ],
    ids=["exact", "exact with dropout", "int8"],
)
def test_a_codec_that_still_sends_the_exact_mean_changes_nothing(
    codec: str, bound: float, experiment: Experiment, batch_of: Callable[[int], Any]
) -> None:
    told = []
    for reduce in ("", f"; reduce={codec}"):
        step = step_of(f"pipeline=2bw:2x2; mesh=replica:2{reduce}", experiment)
        told.append(fed(step, step.init(), range(STEPS), batch_of)[1])
    for name in ("loss", "grad_norm"):
        exact, coded = ([metrics[name] for metrics in one] for one in told)
        np.testing.assert_allclose(coded, exact, rtol=bound)
    assert bound < 1e-3 or told[0] != told[1]


@pytest.mark.parametrize(("mesh", "synchronous"), variants([("replica:2", 0), ("replica:2,data:2", 1)], 1))
def test_a_codec_reports_what_stages_send_and_owe(mesh: str, synchronous: int) -> None:
    """Nothing while a pipe fills: 2BW makes the first update of a batch when the next one enters."""
    without_dropout = dataclasses.replace(WIDE, model=dataclasses.replace(WIDE.model, dropout=0.0))
    step = step_of(f"pipeline=2bw:2x2; mesh={mesh}; reduce=int8; synchronous_steps={synchronous}", without_dropout)
    assert step.async_pipeline is not None
    codes = step.async_pipeline.gradient_exchange
    state, metrics = fed(step, step.init(), range(synchronous + 3))
    sent, owed = ([one[name] for one in metrics] for name in ("wire_bytes", "residual_norm"))
    assert sent == [codes.exact_bytes] * synchronous + [0, codes.wire_bytes, codes.wire_bytes]
    flights = jax.device_get(state.extra["in_flight"])["codes"]["states"]
    residuals = np.concatenate([np.ravel(mine["residual"]) for mine in flights.values()])
    np.testing.assert_allclose(owed[-1], np.sqrt(np.square(residuals).sum() / MeshSpec.parse(mesh).devices), rtol=1e-5)
    assert owed[0] == 0 < owed[-1]
