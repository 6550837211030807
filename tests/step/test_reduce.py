"""Gradients of replicas reduced by a codec: right, alike on all replicas, and carried on as they were."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxscale.compiler.collectives import collectives
from jaxscale.errors import UserError
from jaxscale.models.decoder import Decoder
from jaxscale.optim.optimizer import Optimizer
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.replicas import Codec
from jaxscale.replicas.reduce import GradientExchange, GradientLeaf
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.step.build import build
from jaxscale.step.compiled_checks import NoEffect, bytes_over, check_codec
from jaxscale.step.exchange import describe_codec
from jaxscale.step.train_step import TrainStep
from jaxscale.values import override
from tests.plans import grouped

MODEL = Decoder(vocab=12, context=8, layers=2, embed=16, heads=2, dropout=0.1)
EXPERIMENT = Experiment(
    "reduce", MODEL, None, batch=8, steps=4, optimizer=Optimizer("sgd", learning_rate=0.1, weight_decay=0.0, clip=None)
)


@dataclasses.dataclass(frozen=True)
class Whole(Codec):
    """Sends gradients as they are, and says that it sends a byte less."""

    name = "whole"

    def _reduce(self, gradient: Any, state: Any, axis: str, key: Any) -> Any:
        return jax.lax.pmean(self.add_residual(gradient, state), axis), {"residual": jnp.zeros_like(gradient)}

    def _wire_bytes(self, shape: tuple[int, ...], n: int) -> int:
        return 2 * (n - 1) * 4 * int(np.prod(shape)) // n - 1


def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    found = {name: rng.integers(0, 12, (8, 8)).astype(np.int32) for name in ("tokens", "targets")}
    # replicas of very unlike weight: a mean of their means would be another number
    return {**found, "weights": (rng.random((8, 8)) < np.linspace(0.1, 1, 8)[:, None]).astype(np.float32)}


def mean_apart(step: TrainStep, state: Any) -> Any:
    found = jax.jit(step.objective.gradients_by_replica)(state, step.place(batch()))[1]
    found = jax.tree.map(lambda g: np.asarray(g).mean(0), found)
    return jax.tree.map(np.asarray, step.pure_model.in_layers(found))


@pytest.fixture(scope="module")
def expected() -> Any:
    step = build(EXPERIMENT, Plan(mesh=MeshSpec()))
    state = step.init()
    return jax.tree.map(np.asarray, step.gradients_fn(state, step.place(batch())))


VARIANT = {"mesh": "replica:2,data:2", "microbatches": "2"}
"""By default, `test_coupling.py` has replicas of unlike weight under a codec that is still exact."""
SLOW_CASES = [
    {"mesh": "replica:2,fsdp:2,tensor:2", "zero": "3"},
    {"mesh": "replica:2,fsdp:2,tensor:2", "zero": "2", "sequence_parallel": "true"},
    {"mesh": "replica:4,sequence:2", "attention": "chunked"},
    {"mesh": "replica:2,fsdp:2", "zero": "2", "memory": "full", "loss_chunk": "4"},
    {"mesh": "replica:2,fsdp:2", "pipeline": "1f1b:2x2", "zero": "2"},
    {"mesh": "replica:2,tensor:2", "pipeline": "zb-h1:2x4"},
]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(VARIANT, marks=pytest.mark.variant),
        *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_CASES),
    ],
    ids=str,
)
def test_the_mean_of_replicas_is_that_of_the_batch(changes: dict[str, str], expected: Any) -> None:
    step = build(EXPERIMENT, override(Plan(), grouped({"reduce": "int8", **changes})))
    found = mean_apart(step, step.init())
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert np.abs(a - b).max() <= 1e-6 * np.abs(b).max(), jax.tree_util.keystr(path)


def test_a_step_trains_and_goes_on_from_its_checkpoint(expected: Any) -> None:
    step = build(EXPERIMENT, Plan(mesh=MeshSpec(replica=2, fsdp=2), zero=2, reduce=Codec.parse("int8")))
    assert step.gradient_exchange is not None
    step.compile(batch())
    state = step.init()
    start = jax.tree.map(np.asarray, state.params)
    state, metrics = step(state, step.place(batch()))
    # one step of plain descent is the gradient: it is near the exact one, and is not it
    for was, now, exact in zip(*map(jax.tree.leaves, (start, state.params, expected)), strict=True):
        gradient = (was - np.asarray(now)) / float(metrics["learning_rate"])
        assert np.abs(gradient - exact).max() <= 0.02 * np.abs(exact).max()
    assert float(metrics["residual_norm"]) > 0
    for leaf in jax.tree.leaves(state.params):
        by_index: dict[Any, bytes] = {}
        for shard in leaf.addressable_shards:
            assert by_index.setdefault(str(shard.index), np.asarray(shard.data).tobytes()) == (
                np.asarray(shard.data).tobytes()
            )
    saved = {name: np.asarray(leaf) for name, leaf in step.to_canonical(state).items()}
    after = [step(state, step.place(batch()))[0]]
    abstract = step.canonical_abstract()
    again = step.from_canonical({n: jax.device_put(a, abstract[n].sharding) for n, a in saved.items()})
    after.append(step(again, step.place(batch()))[0])
    for a, b in zip(*map(jax.tree.leaves, after), strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b))
    # a batch that makes one replica's loss NaN: skipped, and residuals stay as they were in every bit
    kept = jax.tree.map(np.asarray, after[1].extra["reduce"])
    poisoned = batch()
    poisoned["weights"][0, 0] = np.nan
    state, metrics = step(after[1], step.place(poisoned))
    assert int(metrics["skipped"]) == 1
    jax.tree.map(np.testing.assert_array_equal, kept, jax.tree.map(np.asarray, state.extra["reduce"]))


def test_a_warm_up_is_compiled_and_told_step_by_step() -> None:
    """A program with a message for each fraction passes the check of what it sends, and each step says its own."""
    mesh = MeshSpec(replica=2, fsdp=2).build(jax.devices()[:4])
    leaves = {"w": GradientLeaf((64, 64), PartitionSpec("fsdp")), "b": GradientLeaf((64,), PartitionSpec())}
    stage = GradientExchange(Codec.parse("dgc:0.05,start=1,warmup=4"), mesh, leaves)
    given = {"w": jnp.ones((2, 64, 64)), "b": jnp.ones((2, 64))}
    specs = {"w": PartitionSpec("replica", "fsdp"), "b": PartitionSpec("replica")}
    shardings = {name: jax.NamedSharding(mesh, spec) for name, spec in specs.items()}
    compiled = (
        jax.jit(stage, in_shardings=(shardings, stage.shardings(), None))
        .lower(given, stage.abstract_states(), jnp.int32(0))
        .compile()
    )
    check_codec(stage, bytes_over(collectives(compiled.as_text() or "", mesh), stage.axis, stage.replicas))

    later = [dataclasses.replace(stage, codec=Codec.parse(f"dgc:{f},warmup=0")) for f in (0.25, 0.0625, 0.05)]
    first, second, last = (each.wire_bytes for each in later)
    told = [float(stage.wire_bytes_at(jnp.int32(step))) for step in range(7)]
    assert told == [stage.exact_bytes, first, first, second, second, last, last]
    assert stage.wire_bytes == last < second < first


def test_momentum_after_late_gradients_is_said() -> None:
    sgd, mesh = EXPERIMENT.optimizer, MeshSpec(replica=2, fsdp=2).build(jax.devices()[:4])
    stage = GradientExchange(Codec.parse("topk:0.05"), mesh, {"w": GradientLeaf((64, 64), PartitionSpec("fsdp"))})
    late = "this momentum repeats gradients that arrive many steps late"

    def said(optimizer: Optimizer, codec: str) -> str:
        return "\n".join(describe_codec(dataclasses.replace(stage, codec=Codec.parse(codec)), optimizer))

    assert "reduce topk:0.05: more bytes are sent in each step before step 100" in said(sgd, "topk:0.05")
    assert f"with adamw, b1 0.9: {late}" in said(Optimizer(), "topk:0.05")
    assert f"with sgd, momentum 0.9: {late}" in said(dataclasses.replace(sgd, momentum=0.9), "dgc:0.05")
    for optimizer, codec in ((sgd, "topk:0.05"), (Optimizer(b1=0.0), "topk:0.05"), (Optimizer(), "int8")):
        assert late not in said(optimizer, codec)
    assert late not in said(Optimizer(), "topk:0.05,feedback=false"), "nothing is late"


@pytest.mark.slow
def test_a_warm_up_trains() -> None:
    experiment = dataclasses.replace(EXPERIMENT, model=dataclasses.replace(MODEL, layers=1))
    step = build(experiment, Plan(mesh=MeshSpec(replica=2), reduce=Codec.parse("dgc:0.05,warmup=4")))
    assert step.gradient_exchange is not None
    step.compile(batch())
    state, sent = step.init(), []
    for _ in range(5):
        state, metrics = step(state, step.place(batch()))
        sent.append(float(metrics["wire_bytes"]))
        assert np.isfinite(float(metrics["loss"]))
    assert sent[0] == sent[1] > sent[2] == sent[3] > sent[4] == step.gradient_exchange.wire_bytes


def test_more_replicas_owe_as_much_on_average() -> None:
    leaves = {
        "w": GradientLeaf((3, 64, 16), PartitionSpec(None, "fsdp"), layers=True),
        "b": GradientLeaf((16,), PartitionSpec()),
    }

    def stage(replicas: int, codec: str = "int8") -> GradientExchange:
        mesh = MeshSpec(replica=replicas, fsdp=2).build(jax.devices()[: 2 * replicas])
        return GradientExchange(Codec.parse(codec), mesh, leaves)

    two, four = stage(2), stage(4)
    assert two.coded_names == ("w",)
    assert two.plain_names == ("b",)
    rng = np.random.default_rng(0)
    given = {name: rng.normal(size=(2, *leaf.shape)).astype(np.float32) for name, leaf in leaves.items()}
    found = jax.jit(two)(given, jax.jit(two.init)(), jnp.int32(0))
    np.testing.assert_allclose(found.mean["b"], given["b"].mean(0), rtol=1e-6)
    step = np.abs(given["w"]).max() / 127  # half of it at most for a replica's own rounding, half for the mean's
    np.testing.assert_allclose(found.mean["w"], given["w"].mean(0), atol=step)
    one = jax.jit(two.merge)(found.states)
    # n x mean + what is owed on average x n = the sum
    owed = np.asarray(one["w"]["residual"])
    np.testing.assert_allclose(found.mean["w"] + owed, given["w"].mean(0), atol=1e-6 * np.abs(given["w"]).max())
    spread = jax.jit(four.spread)(jax.device_get(one))
    assert spread["w"]["residual"].shape == (4, 3, 64, 16)
    np.testing.assert_allclose(np.asarray(spread["w"]["residual"]).mean(0), owed, rtol=1e-6)
    norm = np.sqrt(np.mean([np.square(r).sum() for r in np.asarray(found.states["w"]["residual"])]))
    np.testing.assert_allclose(found.residual_norm, norm, rtol=1e-5)
    # NaN on one replica alone: bad on all
    given["b"][1, 3] = np.nan
    bad = jax.jit(two)(given, found.states, jnp.int32(1))
    assert np.isnan(np.asarray(bad.mean["w"])).all()
    jax.tree.map(np.testing.assert_array_equal, bad.states, found.states)


def test_a_reduction_in_full_is_found() -> None:
    leaves = {"w": GradientLeaf((64, 64), PartitionSpec("fsdp"))}
    mesh = MeshSpec(replica=2, fsdp=2).build(jax.devices()[:4])
    stage, states = GradientExchange(Codec.parse("int8"), mesh, leaves), {}
    given = {"w": jnp.ones((2, 64, 64))}

    def sent(fault: bool) -> int:
        def step(given: Any, states: Any) -> Any:
            if fault:
                given = {"w": jnp.broadcast_to(given["w"].mean(0), given["w"].shape)}
            return stage(given, states, jnp.int32(0))

        shardings = {"w": jax.NamedSharding(mesh, PartitionSpec("replica", "fsdp"))}
        compiled = (
            jax.jit(step, in_shardings=(shardings, stage.shardings())).lower(given, stage.abstract_states()).compile()
        )
        return bytes_over(collectives(compiled.as_text() or "", mesh), stage.axis, stage.replicas)

    assert states == {}
    check_codec(stage, sent(fault=False))
    with pytest.raises(NoEffect, match="int8"):
        check_codec(stage, sent(fault=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh": "fsdp:2"}, "has none; name the slow axis"),
        ({"mesh": "replica:2", "weights": "host", "gradients": "host"}, "with offload.gradients host"),
        ({"mesh": "replica:2,tensor:2", "pipeline": "pipemare:2"}, "in a branch of its own"),
        ({"mesh": "replica:2", "reduce": "powersgd:0"}, "rank: got 0"),
    ],
)
def test_refusals(changes: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        override(Plan(), grouped({"reduce": "int8", **changes}))


def test_a_codec_for_none_of_the_gradients_is_refused() -> None:
    tiny = dataclasses.replace(EXPERIMENT, model=Decoder(vocab=4, context=8, layers=1, embed=4, heads=2))
    with pytest.raises(UserError, match="none of this model's gradients"):
        build(tiny, Plan(mesh=MeshSpec(replica=2), reduce=Codec.parse("int8")))


def test_state_of_the_whole_batch_is_refused() -> None:
    from jaxscale.models.resnet import ResNet

    model = ResNet()
    with pytest.raises(UserError, match="state of its own"):
        build(
            dataclasses.replace(EXPERIMENT, model=model),
            Plan(mesh=MeshSpec(replica=2), reduce=Codec.parse("int8")),
        )


@pytest.mark.slow
def test_an_exact_codec_trains_as_none_does() -> None:
    rows = []
    for reduce in (None, Whole()):
        step = build(EXPERIMENT, Plan(mesh=MeshSpec(replica=2, fsdp=2), zero=2, reduce=reduce))
        state, found = step.init(), []
        for _ in range(4):
            state, metrics = step(state, step.place(batch()))
            found.append([float(metrics["loss"]), float(metrics["grad_norm"])])
        rows.append(found)
    np.testing.assert_allclose(rows[1], rows[0], rtol=1e-6)
