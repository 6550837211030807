"""A memory plan changes what the backward pass keeps, and neither loss nor gradients."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from jaxscale.blocks import Context
from jaxscale.errors import UserError
from jaxscale.layers.mlp import MLP
from jaxscale.layers.stack import Chain
from jaxscale.memory.plan import MemoryPlan
from jaxscale.models.decoder import Decoder
from jaxscale.models.huggingface import Pretrained
from jaxscale.optim.optimizer import Optimizer
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.state.pure_model import PureModel, in_groups
from jaxscale.step import compiled_checks
from jaxscale.step.build import build
from jaxscale.step.compiled_checks import NoEffect, check_kept_on_host
from jaxscale.step.resolve import settle_unroll
from jaxscale.step.train_step import TrainStep
from jaxscale.values import from_json, override, to_json
from tests.plans import plan_of
from tests.tiers import variants

LAYERS, ROWS, LENGTH = 6, 4, 16


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Data that tells its shapes and nothing else."""

    def shapes(self, batch):
        return dict.fromkeys(("tokens", "targets"), ((batch, LENGTH), "int32"))


BATCH = {
    name: np.random.default_rng(0).integers(0, 32, (ROWS, LENGTH)).astype(np.int32) for name in ("tokens", "targets")
}
MODEL = Decoder(vocab=32, context=LENGTH, heads=2, layers=LAYERS, embed=16, mlp=32, dropout=0.1)
# plain descent shows the scale of gradients, which Adam divides out
DESCENT = Optimizer(name="sgd", learning_rate=1.0, warmup=0, schedule="constant", clip=None, weight_decay=0.0)
EXPERIMENT = Experiment("memory", MODEL, Tokens(), optimizer=DESCENT, batch=ROWS, steps=3)


def step_of(memory, **plan):
    layout = {"mesh": MeshSpec(fsdp=2), "zero": 3, "microbatches": 2} | plan
    return build(EXPERIMENT, plan_of(memory=MemoryPlan.parse(memory), **layout))


def trained(step: TrainStep):
    state, metrics = step(step.init(), step.place(BATCH))
    arrays = {name: np.asarray(leaf) for name, leaf in step.to_canonical(state).items() if name.startswith("params")}
    return float(metrics["loss"]), float(metrics["grad_norm"]), arrays


@pytest.fixture(scope="module")
def plain():
    return trained(step_of("none"))


@pytest.mark.parametrize("apart", ["reduce int8", pytest.param("diloco every=2", marks=pytest.mark.slow)])
def test_blocks_of_replicas_whose_gradients_are_taken_apart_are_planned_as_they_run(apart):
    name, _, value = apart.partition(" ")
    plan = override(Plan(), {"mesh": "replica:2", "memory": "offload:capuchin:20KiB", name: value})
    step = build(EXPERIMENT, plan)
    step.step_fn.trace(step.layout.abstract, step.abstract_batch(BATCH))  # a block of another shape is refused
    together = build(EXPERIMENT, override(Plan(), {"mesh": "data:2", "memory": "offload:capuchin:20KiB"}))
    assert (step.decision.bytes, step.decision.host_bytes) == (together.decision.bytes, together.decision.host_bytes)


@pytest.mark.parametrize(
    "memory",
    [
        pytest.param("jax:dots_with_no_batch_dims_saveable", marks=pytest.mark.slow),
        pytest.param("sqrt", marks=pytest.mark.slow),
        pytest.param("periodic:4", marks=pytest.mark.slow),
        pytest.param("revolve:2", marks=pytest.mark.slow),
        pytest.param("chain:24KiB", marks=pytest.mark.slow),
        "save:24KiB",
        pytest.param("save:14KiB:flop", marks=pytest.mark.slow),
        pytest.param("greedy:24KiB", marks=pytest.mark.slow),
        pytest.param("dtr_static:24KiB", marks=pytest.mark.slow),
        pytest.param("offload:pofo:24KiB", marks=pytest.mark.slow),
    ],
)
def test_a_memory_plan_changes_nothing_but_memory(memory, plain):
    step = step_of(memory)
    step.compile(BATCH)  # and checks that it took effect
    loss, norm, params = trained(step)
    np.testing.assert_allclose([loss, norm], plain[:2], rtol=1e-5)
    assert params.keys() == plain[2].keys()
    for name, array in params.items():
        np.testing.assert_allclose(array, plain[2][name], rtol=1e-5, atol=1e-7, err_msg=name)
    if step.decision is not None:
        assert from_json(type(step.decision), to_json(step.decision)) == step.decision
        assert step.decision.layers == LAYERS
        assert any(memory in line for line in step.describe())


@pytest.mark.parametrize(
    "memory",
    [pytest.param(text, marks=pytest.mark.slow) for text in ("save:24KiB", "save:14KiB:flop", "offload:pofo:24KiB")],
)
def test_weights_stream_from_the_host_under_a_decision(memory, plain):
    step = step_of(memory, weights="host")
    step.compile(BATCH)
    loss, norm, params = trained(step)
    np.testing.assert_allclose([loss, norm], plain[:2], rtol=1e-5)
    for name, array in params.items():
        np.testing.assert_allclose(array, plain[2][name], rtol=1e-5, atol=1e-7, err_msg=name)


def test_an_offload_that_shows_no_host_bytes_is_an_error(monkeypatch):
    step = step_of("offload:pofo:24KiB")
    assert step.decision is not None
    assert step.decision.host_bytes > 0
    check_kept_on_host(step.layout, step.decision, 0)  # a CPU rehearses
    monkeypatch.setattr(compiled_checks, "is_rehearsal", lambda devices: False)
    with pytest.raises(NoEffect, match="on the host for its backward pass"):
        check_kept_on_host(step.layout, step.decision, step.decision.host_bytes // 4)
    check_kept_on_host(step.layout, step.decision, step.decision.host_bytes)
    # on an H200, rotary tables were kept once in place of once per block: 0.8 % fewer bytes
    check_kept_on_host(step.layout, step.decision, int(0.992 * step.decision.host_bytes))


@pytest.mark.parametrize("memory", variants(["save:24KiB", "sqrt"], 1))
def test_a_decision_is_read_from_a_file_and_refused_for_another_model(memory, tmp_path):
    decision = step_of(memory).decision
    assert decision is not None
    decision.write(tmp_path / "memory.json")
    same = step_of(f"file:{tmp_path}/memory.json")
    same.step_fn.trace(same.layout.abstract, same.abstract_batch(BATCH))
    with pytest.raises(UserError, match="made for block"):
        build(
            dataclasses.replace(EXPERIMENT, model=dataclasses.replace(MODEL, mlp=48)),
            Plan(memory=MemoryPlan.parse(f"file:{tmp_path}/memory.json")),
        )
    with pytest.raises(UserError, match=f"made for {LAYERS} blocks, but this model has 3"):
        build(
            dataclasses.replace(EXPERIMENT, model=dataclasses.replace(MODEL, layers=3)),
            Plan(memory=MemoryPlan.parse(f"file:{tmp_path}/memory.json")),
        )


def test_activations_on_a_host_that_is_too_small_are_refused(monkeypatch):
    monkeypatch.setattr("jaxscale.step.build.host_memory", lambda: 1024)
    with pytest.raises(UserError, match=r"^memory offload:pofo:24KiB: .* on the host, .* the host has 1KiB"):
        step_of("offload:pofo:24KiB")


@pytest.mark.parametrize(
    ("memory", "plan", "message"),
    [
        ("save:1KiB", {}, "below the least possible"),
        ("chain:1KiB", {}, "least"),
        ("periodic:7", {}, "7"),
        ("sqrt", {"weights": "host"}, "sqrt with offload.weights host: segments of several blocks are cut out"),
        ("save:5KiB", {"weights": "host"}, "5KiB with offload.weights host: segments of several blocks are cut out"),
        ("fit", {}, "expected a settled rule"),
    ],
)
def test_what_does_not_go_is_refused_before_anything_is_compiled(memory, plan, message):
    with pytest.raises(UserError, match=message):
        step_of(memory, **plan)


@pytest.mark.parametrize(
    ("memory", "platform", "unroll"),
    [
        ("none", "cpu", 3),
        ("full", "cpu", 1),
        ("full", "tpu", 3),
        ("save:24KiB", "tpu", 1),
        ("jax:dots_saveable", "cpu", 1),
    ],
)
def test_a_plan_settles_unroll_under_a_rule_that_wants_a_loop_and_says_so(memory, platform, unroll):
    plan, said = settle_unroll(Plan(memory=MemoryPlan.parse(memory), unroll=3), platform)
    assert plan.unroll == unroll
    assert (f"unroll 1 instead of 3 under memory {memory}" in said) == (unroll == 1)


def test_the_default_recipe_unrolls_under_no_memory_rule():
    step = step_of("save:24KiB", mesh=MeshSpec(), zero=0, unroll=LAYERS)
    assert step.plan.unroll == 1
    assert any(f"unroll 1 instead of {LAYERS} under memory save:24KiB" in line for line in step.describe())


def _first(params, name):
    """The first leaf under a dict of this name."""
    [found] = [part[name] for part in (params, *params.values()) if isinstance(part, dict) and name in part]
    return jax.tree.leaves(found)[0]


def test_loaded_weights_reach_a_stack_in_groups():
    golden = Path(__file__).parents[1] / "golden" / "llama"
    model = Pretrained(str(golden))
    whole = PureModel.of(model, 0)
    layers = model.model.layers
    grouped = PureModel.of(model, 0, group_depths=(layers - 1, 1))
    loaded = in_groups(model.initial_params(), grouped.group_depths)
    structures = [jax.tree.structure(tree) for tree in (loaded, grouped.abstract_params, whole.abstract_params)]
    assert structures[0] == structures[1] != structures[2]
    for leaf, abstract in zip(jax.tree.leaves(loaded), jax.tree.leaves(grouped.abstract_params), strict=True):
        assert leaf.shape == abstract.shape
    last, stacked = _first(loaded, f"layers_from_{layers - 1}"), _first(model.initial_params(), "layers")
    np.testing.assert_array_equal(np.asarray(last[0:1]), np.asarray(stacked[layers - 1 : layers]))


@dataclasses.dataclass(frozen=True)
class Funnel:
    """A chain of unlike blocks."""

    def build(self, rngs, *, vocab_multiple=1):
        return Chain([MLP(8, width, rngs=rngs) for width in (8, 64, 16, 32)])

    def loss(self, module, batch, context=Context()):
        from jaxscale.blocks import Loss

        y = module(batch["images"], context=context)
        return Loss((y**2).sum(), jax.numpy.float32(y.shape[0]))

    def logical_sizes(self):
        return {}


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a (batch, 4, 8) array."""

    def shapes(self, batch):
        return {"images": ((batch, 4, 8), "float32")}


@pytest.mark.slow
def test_a_chain_of_unlike_blocks_keeps_its_gradients():
    experiment = Experiment("funnel", Funnel(), Rows(), optimizer=Optimizer(clip=None), batch=ROWS, steps=3)
    batch = {"images": np.random.default_rng(0).normal(size=(ROWS, 4, 8)).astype(np.float32)}
    found = []
    for memory in ("none", "chain:1KiB", "revolve:2", "save:4KiB"):
        step = build(experiment, Plan(memory=MemoryPlan.parse(memory), mesh=MeshSpec()))
        state, metrics = step(step.init(), step.place(batch))
        found.append([float(metrics["loss"]), float(metrics["grad_norm"])])
        assert nnx.state(step.module(state))
    np.testing.assert_allclose(found[1:], [found[0]] * 3, rtol=1e-6)
