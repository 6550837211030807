"""Weights, gradients and optimizer state on the host: the losses are those of a step with everything on the device."""

import dataclasses
import functools
import types

import jax
import numpy as np
import optax
import pytest

from jaxscale.errors import UserError
from jaxscale.memory.plan import MemoryPlan
from jaxscale.models.decoder import Decoder
from jaxscale.optim.optimizer import Optimizer
from jaxscale.recipe.experiment import Experiment
from jaxscale.step.build import build
from jaxscale.step.compiled_checks import NoEffect, check_host_bytes
from jaxscale.step.host import check_host_size
from tests.plans import plan_of
from tests.step.residual import Residual, random_batch

ROWS, LENGTH, VOCAB = 8, 8, 13
MODEL = Decoder(vocab=VOCAB, context=LENGTH, layers=3, embed=8, heads=4, mlp=24)
TEXT = {
    name: np.random.default_rng(seed).integers(0, VOCAB, (ROWS, LENGTH), dtype=np.int32)
    for seed, name in enumerate(("tokens", "targets"))
}
SMALL, BATCH = Residual(), random_batch(ROWS)


def make(mesh="fsdp:2", optimizer=Optimizer(learning_rate=0.01, warmup=2), model=SMALL, **fields):
    experiment = Experiment("host", model, None, optimizer=optimizer, steps=10, batch=ROWS)
    return build(experiment, plan_of(mesh=mesh, **fields))


def trained(step, steps=3):
    """Losses, norms and the parameters after some steps."""
    state, told = step.init(), []
    step.compile(BATCH)
    for _ in range(steps):
        state, metrics = step(state, step.place(BATCH))
        told.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    evaluated = step.evaluate(state, step.place(BATCH))
    return np.array([*told, (float(evaluated.total), float(evaluated.weight))]), jax.device_get(state), state


@functools.cache
def expected(**fields):
    return trained(make(**fields))[:2]


PLACES = [
    {"optimizer_state": "streamed"},
    {"optimizer_state": "host"},
    {"weights": "host"},
    {"weights": "host", "optimizer_state": "streamed"},
    {"weights": "host", "optimizer_state": "streamed", "gradients": "host"},
    {"weights": "host", "optimizer_state": "host", "gradients": "host"},
]


QUICK = {(4, 3, "float32")}
EVERY = [
    pytest.param(
        PLACES[index],
        zero,
        precision,
        id=" ".join([*(f"{k} {v}" for k, v in PLACES[index].items()), f"zero {zero} {precision}"]),
        marks=[] if (index, zero, precision) in QUICK else [pytest.mark.slow],
    )
    for index in range(len(PLACES))
    for zero in (0, 2, 3)
    for precision in ("float32", "bfloat16")
]


@pytest.mark.parametrize(("places", "zero", "precision"), EVERY)
def test_losses_are_those_of_everything_on_the_device(places, zero, precision):
    wanted, wanted_state = expected(zero=zero, precision=precision)
    found, found_state, state = trained(make(zero=zero, precision=precision, **places))
    close = {"rtol": 1e-5, "atol": 1e-6} if precision == "float32" else {"rtol": 2e-2, "atol": 2e-3}
    np.testing.assert_allclose(found, wanted, **close)
    jax.tree.map(functools.partial(np.testing.assert_allclose, **close), found_state, wanted_state)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.params)}
    masters = places.get("weights") == "host" or places.get("optimizer_state") == "host"
    assert kinds == {"pinned_host" if masters else "device"}
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim}
    assert kinds == {"device" if places.get("optimizer_state", "device") == "device" else "pinned_host"}


@pytest.mark.parametrize("memory", [pytest.param(text, marks=pytest.mark.slow) for text in ("full", "dots")])
def test_weights_stream_under_rematerialization_and_microbatches(memory):
    fields = {"memory": MemoryPlan.parse(memory), "microbatches": 2}
    wanted, _ = expected(**fields)
    found, _, _ = trained(make(weights="host", optimizer_state="streamed", **fields))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("memory", ["none", "dots"])
def test_no_scan_over_layers_copies_weights_from_host_to_host(memory):
    """Where one does, the TPU's compiler gives up."""
    step = make(model=MODEL, weights="host", memory=MemoryPlan.parse(memory))
    program = step.step_fn.trace(step.layout.abstract, step.abstract_batch(TEXT)).jaxpr
    scans = [eqn for eqn in equations(program) if eqn.primitive.name == "scan"]
    on_host = [sum(v.aval.memory_space == jax.memory.Space.Host for v in eqn.invars) for eqn in scans]
    assert sum(on_host) > 0
    assert not [v for eqn in scans for v in eqn.outvars if v.aval.memory_space == jax.memory.Space.Host]


def equations(jaxpr):
    """Those of a jaxpr and of all inside it."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(getattr(x, "jaxpr", x), "eqns")):
            if hasattr(getattr(value, "jaxpr", value), "eqns"):
                yield from equations(value)


def test_a_bad_step_leaves_what_is_on_the_host_as_it_was():
    step = make(weights="host", optimizer_state="streamed", gradients="host")
    state = step.init()
    before = jax.device_get((state.params, state.optimizer))
    poisoned = jax.tree.map(lambda x: jax.device_put(np.full(x.shape, np.nan, x.dtype), x.sharding), state.params)
    state, metrics = step(dataclasses.replace(state, params=poisoned), step.place(BATCH))
    assert int(metrics["skipped"]) == 1
    after = jax.device_get((state.params, state.optimizer))
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(after[0]))
    jax.tree.map(np.testing.assert_array_equal, after[1], before[1])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gradients": "host"}, "add offload.weights host"),
        (
            {"gradients": "host", "weights": "host", "microbatches": 2},
            "gradients on the host are not summed over microbatches",
        ),
        ({"weights": "host", "memory": MemoryPlan.parse("jax:everything_saveable")}, "keep every weight"),
        ({"optimizer_state": "hots"}, "did you mean 'host'"),
        ({"optimizer_state": "streamed", "optimizer": Optimizer(name="adafactor")}, "mixes elements"),
        ({"weights": "host", "optimizer": Optimizer(custom=lambda rate: optax.lamb(rate))}, "weights host: this"),
    ],
)
def test_what_offload_does_not_take_is_refused_before_anything_is_traced(fields, message):
    with pytest.raises(UserError, match=message):
        make(**fields)


@pytest.mark.parametrize(
    "places", [pytest.param(PLACES[1], id="state", marks=pytest.mark.slow), pytest.param(PLACES[4], id="everything")]
)
def test_a_checkpoint_of_one_placement_is_one_of_every_other(places):
    here, there = make(zero=2), make(zero=2, **places)
    state = here.init()
    arrays = there.to_canonical(there.init())
    wanted = here.to_canonical(state)
    assert {n: a.shape for n, a in arrays.items()} == {n: a.shape for n, a in wanted.items()}
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(arrays), jax.device_get(wanted))
    abstract = there.canonical_abstract()
    assert {name: a.sharding for name, a in arrays.items()} == {name: a.sharding for name, a in abstract.items()}
    assert there.canonical_copy_bytes < here.canonical_copy_bytes
    moved = {name: jax.device_put(jax.device_get(array), abstract[name].sharding) for name, array in wanted.items()}
    back = there.from_canonical(moved)
    assert jax.tree.map(lambda a: a.sharding, back) == there.layout.state_shardings
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(back.params), jax.device_get(here.init().params))


def test_the_module_of_a_state_has_its_weights_on_the_device():
    step = make(weights="host", optimizer_state="streamed")
    module = step.module(step.init())
    assert np.isfinite(np.asarray(module.blocks(jax.numpy.asarray(BATCH["inputs"])))).all()


def test_a_cpu_rehearses_and_says_so():
    step = make(weights="host", optimizer_state="streamed")
    told, lies, here = step.describe(), step.host_memory(), make().memory(BATCH)
    assert (lies["parameters"], lies["optimizer"]) == (here["parameters"], here["optimizer"] - 8)  # two counts stay
    assert make().host_memory() == {}
    assert any("weights host, optimizer_state streamed" in line and "per device on the host" in line for line in told)
    assert any("a rehearsal" in line for line in told)
    assert not any("host" in line for line in make().describe())


def test_a_host_that_is_too_small_is_refused():
    layout = make(weights="host", optimizer_state="streamed").layout
    check_host_size(layout, None)
    check_host_size(layout, 2**30)
    with pytest.raises(
        UserError, match=r"each of 2 devices needs .* on the host \(the state counts twice.* but the host has 1KiB"
    ):
        check_host_size(layout, 1024)


def test_a_compiled_step_without_host_bytes_or_with_whole_copies_has_no_effect(monkeypatch):
    layout = make(mesh="1", model=MODEL, weights="host", optimizer_state="streamed").layout
    monkeypatch.setattr("jaxscale.step.compiled_checks.is_rehearsal", lambda devices: False)
    monkeypatch.setattr("jaxscale.step.compiled_checks.cut", lambda *args: types.SimpleNamespace(pieces=3))
    with pytest.raises(NoEffect, match="0 bytes of the compiled step's arguments lie on the host"):
        check_host_bytes(layout, 0, str)
    check_host_bytes(layout, 2**30, str)
    whole = "%c = (f32[3,8,24]{2,1,0:T(8,128)}, f32[3,8,24]{2,1,0:T(8,128)S(5)}, u32[]{:S(2)}) copy-start(%p)"
    with pytest.raises(NoEffect, match="saves no memory"):
        check_host_bytes(layout, 2**30, lambda: whole)
    table = "x".join(map(str, layout.abstract.params["embedding"]["weight"].shape)).replace("x", ",")
    check_host_bytes(layout, 2**30, lambda: whole.replace("3,8,24", table))  # read whole by the embedding
