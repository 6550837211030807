"""The train step's own promises: masks, rows, metrics, loaded parameters, evaluation, bad steps."""

import dataclasses
import functools
import inspect
import re
from concurrent.futures import ThreadPoolExecutor

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxscale.compiler.collectives import collectives
from jaxscale.errors import UserError
from jaxscale.models.decoder import Decoder
from jaxscale.models.foreign import ForeignModel, classification
from jaxscale.optim.leaves import is_decayed
from jaxscale.optim.optimizer import Optimizer
from jaxscale.programs.flop import model_flop
from jaxscale.recipe.experiment import Experiment, Guard
from jaxscale.recipe.plan import Plan
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.step.build import build
from jaxscale.training.loop import train
from jaxscale.trees import named_leaves

ROWS, LENGTH, VOCAB = 8, 8, 13
PATIENT = Guard()
SIZES = {"vocab": VOCAB, "context": LENGTH, "layers": 2, "embed": 8, "heads": 4, "mlp": 24}


@dataclasses.dataclass(frozen=True)
class Loaded(Decoder):
    """A Decoder that starts from arrays of the host, as a pretrained one does."""

    def initial_params(self):
        """Host arrays without padding, as a nested dict."""
        return host_params(self)


@functools.cache
def host_params(model):
    plain = Decoder(**{f.name: getattr(model, f.name) for f in dataclasses.fields(Decoder)})
    params = nnx.to_pure_dict(nnx.state(plain.build(nnx.Rngs(5)), nnx.Param))
    return jax.tree.map(np.asarray, params)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(self.norm(x)))


def make(model, mesh="1", guard=PATIENT, **fields):
    optimizer = Optimizer(name="adamw", learning_rate=0.01, warmup=2)
    experiment = Experiment("build", model, None, optimizer=optimizer, steps=10, batch=ROWS, guard=guard)
    return build(experiment, Plan(mesh=MeshSpec.parse(mesh), **fields))


def text(rows=ROWS):
    tokens = np.random.default_rng(0).integers(0, VOCAB, (rows, LENGTH + 1), dtype=np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def vectors():
    rng = np.random.default_rng(0)
    return {
        "images": rng.normal(size=(ROWS, 4)).astype(np.float32),
        "labels": rng.integers(0, 3, ROWS).astype(np.int32),
    }


@pytest.mark.parametrize(
    ("names", "shape", "expected"),
    [
        (("embed", "mlp"), (8, 24), True),
        (("layers", "embed", "mlp"), (2, 8, 24), True),
        (("vocab", "embed"), (13, 8), True),
        (("norm",), (8,), False),
        (("layers", "norm"), (2, 8), False),
        (("layers", "mlp"), (2, 24), False),
        (("layers", "heads", "norm"), (2, 4, 8), False),
        (("mlp",), (24,), False),
        (None, (3, 3, 4, 8), True),
        (None, (8,), False),
        (None, (), False),
    ],
)
def test_matrices_decay_and_norms_and_biases_do_not(names, shape, expected):
    assert is_decayed(names, shape) == expected


def test_weight_decay_reaches_the_matrices_of_a_stack_and_spares_its_gains_and_biases():
    """Without a gradient, what moves is what decays."""
    step = make(Decoder(**SIZES, norm="layer", attention_bias=True, mlp_bias=True))

    @jax.jit
    def after():
        params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), step.pure_model.abstract_params)
        gradients = jax.tree.map(jnp.zeros_like, params)
        updates, _ = step.optimizer.update(gradients, step.optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    params = {name: np.asarray(leaf) for name, leaf in named_leaves(after()).items()}
    spared = {name for name in params if "norm" in name or "bias" in name}
    assert 0 < len(spared) < len(params)
    decayed = 1 - 0.1 * step.experiment.optimizer.learning_rate_at(0, 10)
    for name, leaf in params.items():
        np.testing.assert_allclose(leaf, 1.0 if name in spared else decayed, rtol=1e-6, err_msg=name)


def test_microbatches_take_rows_where_they_are():
    step = make(Decoder(**SIZES), "data:2,fsdp:2", zero=2, microbatches=2)
    compiled = step.gradients_fn.lower(step.layout.abstract, step.abstract_batch(text())).compile()
    sent = collectives(compiled.as_text(), step.mesh)
    assert {c.kind for c in sent} <= {"all-reduce", "reduce-scatter", "all-gather"}
    assert not any(c.dtype in ("s32", "u32") for c in sent), "tokens or row numbers crossed the wires"
    assert not re.search(r" all-to-all\(| collective-permute\(", compiled.as_text())


def test_evaluation_goes_by_microbatches():
    """The same sums, and with fewer activations at a time: what trains by microbatches can be evaluated."""
    wide = {**SIZES, "mlp": 4096}
    whole, parts = make(Decoder(**wide), "data:2"), make(Decoder(**wide), "data:2", microbatches=4)
    weights = np.ones((ROWS, LENGTH), np.float32)
    weights[1, :3] = 0
    batch = whole.place(text() | {"weights": weights})
    state = whole.init()
    one, other = whole.evaluate(state, batch), parts.evaluate(state, batch)
    assert one.weight == other.weight == ROWS * LENGTH - 3
    np.testing.assert_allclose(one.total, other.total, rtol=1e-6)

    def temp(step):
        return step.evaluate_fn.lower(state, batch).compile().memory_analysis().temp_size_in_bytes

    assert temp(parts) < temp(whole) / 2
    assert whole.accuracy(state, batch) is None


@pytest.mark.parametrize("microbatches", [1, 2])
def test_accuracy_is_computed_as_the_loss_is(microbatches):
    model = ForeignModel(Net, classification())
    step = make(model, "data:2", microbatches=microbatches, precision="bfloat16", matmul="highest")
    rng = np.random.default_rng(0)
    images = rng.normal(size=(ROWS, 4)).astype(np.float32)
    batch = {"images": images, "labels": (np.arange(ROWS) % 3).astype(np.int32)}
    state = step.init()
    module = step.module(state)
    module.eval()
    expected = (np.asarray(module(jnp.asarray(images))).argmax(-1) == batch["labels"]).sum()
    right, targets = step.accuracy(state, step.place(batch))
    assert targets == ROWS
    assert abs(float(right) - expected) <= 1, "one may turn where numbers are rounded to bfloat16"
    assert "HIGHEST" in step.accuracy_fn.lower(state, step.place(batch)).as_text(), "matmul, as asked for"


def test_metrics_and_the_rate_of_the_schedule():
    step = make(Decoder(**SIZES), "data:2")
    weights = np.ones((ROWS, LENGTH), np.float32)
    weights[:, :3] = 0
    batch = step.place(text() | {"weights": weights})
    state, rates = step.init(), []
    for i in range(3):
        before = step.evaluate(state, batch)
        state, metrics = step(state, batch)
        assert set(metrics) == {"loss", "grad_norm", "learning_rate", "weight", "skipped", "skipped_in_row"}
        assert all(value.shape == () for value in metrics.values())
        assert float(metrics["weight"]) == float(before.weight) == ROWS * (LENGTH - 3)
        # without dropout the loss of a step is the evaluation before it
        np.testing.assert_allclose(metrics["loss"], before.total / before.weight, rtol=1e-6)
        rates.append(float(metrics["learning_rate"]))
        assert int(state.step) == i + 1
    np.testing.assert_allclose(rates, [step.experiment.optimizer.learning_rate_at(i, 10) for i in range(3)], rtol=1e-6)


@pytest.mark.parametrize(("mesh", "zero"), [("fsdp:2,tensor:4", 3), ("data:4", 0)])
def test_loaded_parameters_are_placed_in_parts_and_padded_with_zeros(mesh, zero):
    model = Loaded(**SIZES)
    step = make(model, mesh, zero=zero)
    params = step.init().params
    padded = 0
    for (name, leaf), sharding in zip(
        named_leaves(params).items(), jax.tree.leaves(step.layout.master_shardings), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        host = named_leaves(host_params(model))[name]
        inside = tuple(slice(0, size) for size in host.shape)
        np.testing.assert_array_equal(np.asarray(leaf)[inside], host)
        assert float(jnp.abs(leaf).sum()) == pytest.approx(float(np.abs(host).sum()), rel=1e-5)
        padded += leaf.shape != host.shape
    assert padded == (2 if "tensor" in mesh else 0)


def numbers(tree):
    return [
        np.asarray(jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a)
        for a in jax.tree.leaves(tree)
    ]


def test_a_bad_step_leaves_everything_as_it_was_and_counts():
    step = make(ForeignModel(Net, classification()), "data:2", Guard(spike=5.0, warmup=2, patience=20))
    good, state = vectors(), step.init()
    nan = {**good, "images": np.where(np.arange(4)[None, :] == 1, np.nan, good["images"]).astype(np.float32)}
    infinite = {**good, "weights": np.array([np.inf] + [1] * 7, np.float32)}
    for _ in range(3):
        state, metrics = step(state, step.place({**good, "weights": np.ones(ROWS, np.float32)}))
    assert (int(metrics["skipped"]), int(metrics["skipped_in_row"])) == (0, 0)
    for count, batch in enumerate([nan, infinite, nan], 1):
        batch = {"weights": np.ones(ROWS, np.float32), **batch}
        kept = (numbers((state.params, state.optimizer, state.rest)), float(state.watch.norm))
        at = int(state.step)
        state, metrics = step(state, step.place(batch))
        for before, after in zip(kept[0], numbers((state.params, state.optimizer, state.rest)), strict=True):
            np.testing.assert_array_equal(before, after)
        assert float(state.watch.norm) == kept[1]
        assert (int(metrics["skipped"]), int(metrics["skipped_in_row"])) == (count, count)
        assert int(state.step) == at + 1, "the next step draws another dropout"
    before = numbers((state.params, state.rest))
    state, metrics = step(state, step.place({**good, "weights": np.ones(ROWS, np.float32)}))
    assert (int(metrics["skipped"]), int(metrics["skipped_in_row"])) == (3, 0)
    assert all(np.isfinite(a).all() for a in numbers(state))
    assert any((a != b).any() for a, b in zip(before, numbers((state.params, state.rest)), strict=True))
    # the rate follows the updates made, not the steps tried
    assert float(metrics["learning_rate"]) == pytest.approx(step.experiment.optimizer.learning_rate_at(3, 10), rel=1e-6)


def test_a_spike_is_skipped():
    """The gradient of a model w x with loss w x is x: its norm is what the batch says."""

    class Scaled(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(jnp.ones(()))
            self.seen = nnx.BatchStat(jnp.zeros(()))

        def __call__(self, x):
            self.seen[...] += 1
            return self.w[...] * x

    step = make(
        ForeignModel(Scaled, lambda module, batch: module(batch["images"])), "data:2", Guard(spike=5.0, warmup=2)
    )
    state, skipped = step.init(), []
    for size in (9.0, 1.0, 1.0, 30.0, 1.0, 8.0):
        state, metrics = step(state, step.place({"images": np.full(ROWS, size, np.float32)}))
        skipped.append((int(metrics["skipped"]), int(metrics["skipped_in_row"])))
        assert float(metrics["grad_norm"]) == pytest.approx(size)
    assert skipped == [(0, 0), (0, 0), (0, 0), (1, 1), (1, 0), (1, 0)]
    assert float(state.rest["seen"]) == 5
    assert float(state.watch.norm) == pytest.approx(np.mean([9, 1, 1, 1, 8]))


def test_building_a_step_filters_the_compile_cache(monkeypatch):
    calls = []
    monkeypatch.setattr("jaxscale.step.build.keep_ordered_programs", lambda: calls.append(True))
    make(Decoder(**SIZES))
    assert calls


def test_steps_of_one_shape_are_traced_once():
    step = make(Decoder(**SIZES))
    chex.clear_trace_counter()
    step.step_fn = jax.jit(chex.assert_max_traces(step._step, n=1))
    state, batch = step.init(), step.place(text())
    for _ in range(3):
        state, _ = step(state, batch)
    assert int(state.step) == 3


def test_the_flop_of_a_batch_are_counted_once(monkeypatch):
    step, counts = make(Decoder(**SIZES)), []

    def count(*arguments):
        counts.append(model_flop(*arguments))
        return counts[-1]

    monkeypatch.setattr("jaxscale.step.train_step.model_flop", count)
    batch = text()
    half = {name: array[: ROWS // 2] for name, array in batch.items()}
    assert step.model_flop(batch) == step.model_flop(step.place(batch)) == 2 * step.model_flop(half) > 0
    assert len(counts) == 2


def test_a_step_of_one_thread_is_trained_in_another():
    step = make(Decoder(**SIZES), mesh="fsdp:2", zero=3)

    def trained():
        state, metrics = step(step.init(), step.place(text()))
        return float(metrics["loss"]), float(step.evaluate(state, step.place(text())).total)

    with ThreadPoolExecutor(1) as pool:
        in_another = pool.submit(trained).result()
        module = pool.submit(lambda: step.experiment.model.build(nnx.Rngs(0))).result()
    assert in_another == trained()
    assert nnx.state(module, nnx.Param)


@pytest.mark.parametrize(
    ("experiment", "plan", "message"),
    [
        ("experiment.py", None, r"experiment: got 'experiment\.py', expected an Experiment"),
        (Experiment, None, "experiment: got <class .* expected an Experiment, such as"),
        (
            lambda: 1,
            None,
            r"experiment: got <function .* expected an Experiment, which the call <lambda>\(\) may return",
        ),
        (Decoder(**SIZES), None, r"expected an Experiment, which has the model and the data: Experiment\(name="),
        (None, "fsdp:4", r"plan: got 'fsdp:4', expected a Plan, such as Plan\("),
    ],
)
def test_arguments_of_another_type_are_refused(experiment, plan, message):
    experiment = experiment or Experiment("tiny", Decoder(**SIZES), data=None, steps=1, batch=ROWS)
    for function in (build, train):
        with pytest.raises(UserError, match=message):
            inspect.unwrap(function)(experiment, plan)  # as without run-time type checks


def test_a_warm_up_that_lasts_beyond_the_run_is_a_line():
    optimizer = Optimizer("sgd", 0.1, warmup=4, groups={"head": Optimizer("sgd", 0.3, warmup=9)})
    lines = build(Experiment("warm", Decoder(**SIZES), None, optimizer, steps=4), Plan(mesh="1")).describe()
    assert (
        "optimizer.warmup 4: the run has 4 steps, so its learning rate ends at 0.08 and never reaches 0.1; set"
        in str(lines)
    )
    assert "optimizer.groups.head.warmup 9: the run has 4 steps, so its learning rate ends at 0.12" in str(lines)
