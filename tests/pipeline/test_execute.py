"""The executor against one device, and the hazards of a pipeline in one program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale.compat import varying_axes
from jaxscale.compiler.hlo_program import HloProgram, callees
from jaxscale.errors import UserError
from jaxscale.pipeline.run.execute import Lowering, execute
from jaxscale.pipeline.run.held import held_shapes
from jaxscale.pipeline.run.tables import tabulate
from jaxscale.pipeline.schedules import METHODS
from tests.pipeline import tiny_stages
from tests.pipeline.tiny_stages import Model, distance, program, run, to_chunks

BAR = 1e-6
COLLECTIVES = {"psum", "psum2", "psum_invariant", "ppermute", "all_gather", "all_to_all", "reduce_scatter", "pmax"}


@functools.cache
def reference(model, microbatches):
    """Loss and gradients on one device."""
    return model.reference(microbatches, jax.random.key(7))


def agrees(name, ranks, microbatches, chunks=None, **settings):
    """Whether a schedule gives the loss and the gradients of one device."""
    features = {key: settings.pop(key) for key in tuple(settings) if key in Model.__dataclass_fields__}
    schedule = METHODS[name].schedule(ranks, microbatches, chunks)
    model = Model(schedule.stages, **features)
    loss, gradients = run(model, schedule, **settings)
    expected, exact = reference(model, microbatches)
    assert abs(loss - expected) <= BAR * abs(expected)
    if gradients is not None:
        assert distance(gradients, exact) <= BAR


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "settings"),
    [
        pytest.param(
            *("1f1b", 4, 6),
            {"stash": "residuals", "layers": 2, "unequal": True, "dropout": 0.3, "auxiliary": 0.1},
            marks=pytest.mark.slow,
        ),
        ("lockstep", 2, 3, {"lowering": "phased", "remat": True, "stash": "residuals", "scan": True, "layers": 2}),
        ("zb-v", 2, 4, {"stash": "residuals", "dropout": 0.3, "layers": 2, "scan": True}),
        ("gpipe", 4, 3, {"forward_only": True}),
        # by default in `test_gradients.py`
        pytest.param("chimera", 2, 4, {}, marks=pytest.mark.variant),
        pytest.param("zb-h1", 2, 3, {}, marks=pytest.mark.variant),
        pytest.param("interleaved", 2, 3, {"stash": "residuals"}, marks=pytest.mark.variant),
    ],
)
def test_gradients_equal_those_of_one_device(name, ranks, microbatches, settings):
    agrees(name, ranks, microbatches, **settings)


def synchronous(ranks, microbatches):
    """Names of schedules that are defined for these numbers."""
    for name in sorted(name for name, method in METHODS.items() if not method.steps):
        try:
            METHODS[name].schedule(ranks, microbatches)
        except UserError:
            continue
        yield name


@pytest.mark.slow
@pytest.mark.parametrize("stash", ["input", "residuals"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("times", ["1", "3", "p", "2p", "4p"])
def test_every_schedule(times, ranks, stash):
    microbatches = {"1": 1, "3": 3, "p": ranks, "2p": 2 * ranks, "4p": 4 * ranks}[times]
    for name in synchronous(ranks, microbatches):
        agrees(name, ranks, microbatches, stash=stash)
        if tabulate(METHODS[name].schedule(ranks, microbatches)).is_lockstep:
            agrees(name, ranks, microbatches, stash=stash, lowering="phased")


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"unequal": True, "layers": 2, "stash": "residuals"},
        {"unequal": True, "layers": 2, "dropout": 0.3},
        {"dropout": 0.3, "auxiliary": 0.1, "stash": "residuals"},
        {"auxiliary": 0.1, "remat": True, "layers": 2},
        {"remat": True, "layers": 2, "scan": True, "stash": "residuals", "dropout": 0.3},
        {"remat": True, "layers": 2, "unequal": True, "scan": True},
    ],
)
@pytest.mark.parametrize("name", ["1f1b", "lockstep", "chimera", "zb-h1", "zb-v", "interleaved"])
def test_every_two_features(name, settings):
    agrees(name, 4, 8, **settings)


def test_with_data_and_tensor_axes():
    """Mesh pipe x data x model: data manual beside pipe and reduced once by the caller, model inside the stage."""
    schedule = METHODS["1f1b"].schedule(2, 3)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("pipe", "data", "model"), axis_types=(AxisType.Auto,) * 3)
    model = Model(schedule.stages, rows=2)
    half = Model(schedule.stages, rows=1)  # of a data rank
    manual = ("pipe", "data")

    def stage(weights, shared, x, microbatch, at, key):
        split = lax.with_sharding_constraint(weights["up"], P(None, None, "model"))
        y, objective, sums = half.stage({**weights, "up": split}, shared, x, microbatch, at, key)
        return y, objective / 2, sums

    def body(weights, shared, batch, key):
        own = jax.tree.map(lambda leaf: leaf[0], weights)
        tables = tabulate(schedule, "residuals")
        found = execute(tables, stage, own, shared, batch, key, half.message(), manual_axes=manual)
        weight, common = lax.psum(found.weight_gradients, "data"), lax.psum(found.shared_gradients, manual)
        return jax.tree.map(lambda leaf: leaf[None], weight), common

    specs = (P("pipe"), P(), P(None, "data"), P())
    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=(P("pipe"), P()), axis_names=set(manual))
    with jax.set_mesh(mesh):
        given = to_chunks(schedule, model.weights()), model.shared(), model.batch(3), jax.random.key(7)
        placed = [jax.device_put(tree, NamedSharding(mesh, spec)) for tree, spec in zip(given, specs, strict=True)]
        compiled = jax.jit(mapped).lower(*placed).compile()
        weights, shared = compiled(*placed)
        text = compiled.as_text()
    _, exact = reference(model, 3)
    found = tiny_stages.to_stages(schedule, jax.tree.map(np.asarray, weights)), shared
    assert distance(found, exact) <= BAR
    assert not [line for line in reductions_in_loops(text) if "model" not in line]


def reductions_in_loops(text):
    """Reductions in loops over the data axis or the pipe axis, whose groups differ from those of the model axis."""
    parsed = HloProgram(text)
    groups = "replica_groups={{0,1},{2,3},{4,5},{6,7}}", "replica_groups=[4,2]<=[8]"
    for computation in parsed.computations.values():
        if not parsed.executions(computation.name)[1]:
            continue
        for op in computation.instructions.values():
            if op.opcode in ("all-reduce", "all-gather", "reduce-scatter"):
                over_model = any(group in op.attributes for group in groups) or "'model'" in op.attributes
                yield f"{op.name} {'model' if over_model else op.attributes}"


def inside_branches(jaxpr):
    """(collective, whether its branch is chosen by what may differ between devices) of a program."""
    found = []

    def walk(jaxpr, differs):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in COLLECTIVES:
                found.append((eqn.primitive.name, differs))
            own = differs or (eqn.primitive.name == "cond" and "pipe" in varying_axes(eqn.invars[0].aval))
            for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    walk(inner, own)

    walk(jaxpr, False)
    return found


@pytest.mark.parametrize(("name", "stash"), [("1f1b", "input"), ("zb-v", "residuals"), ("chimera", "input")])
def test_no_collective_in_a_branch_that_devices_may_not_share(name, stash):
    """Hazard 1: a `psum` that `vjp` hides in a branch hangs. The exchange stands in branches that all take together."""
    schedule = METHODS[name].schedule(4, 4)
    model = Model(schedule.stages)
    given = to_chunks(schedule, model.weights()), model.shared(), model.batch(4), jax.random.key(0)
    found = inside_branches(jax.make_jaxpr(program(model, schedule, stash=stash))(*given).jaxpr)
    assert ("ppermute", False) in found
    assert not [one for one in found if one[1]]


def test_the_compiled_program_has_no_reduction_and_branches_on_devices_without_exchange():
    """Hazard 1, in what XLA made of it: the branches of the actions, which do products, do not communicate."""
    schedule = METHODS["1f1b"].schedule(2, 3)
    model = Model(schedule.stages)
    given = to_chunks(schedule, model.weights()), model.shared(), model.batch(3), jax.random.key(0)
    parsed = HloProgram(program(model, schedule).lower(*given).compile().as_text())

    def opcodes(name):
        ops = parsed.computations[name].instructions.values()
        return {op.opcode for op in ops}.union(*(opcodes(inner) for op in ops for inner in callees(op.attributes)))

    branches = 0
    for computation in parsed.computations.values():
        for op in computation.instructions.values():
            if op.opcode == "conditional":
                found = [opcodes(name) for name in callees(op.attributes)]
                works = any("dot" in branch for branch in found)
                branches += works
                assert not (works and any("collective-permute" in branch for branch in found))
        if parsed.executions(computation.name)[1]:
            assert "all-reduce" not in opcodes(computation.name)
    assert branches == 1


def instructions(microbatches):
    """Instructions of the compiled program of 1F1B on two devices, which takes 2(m+1) ticks."""
    schedule = METHODS["1f1b"].schedule(2, microbatches)
    model = Model(schedule.stages)
    assert tabulate(schedule).tick_count == 2 * (microbatches + 1)
    given = to_chunks(schedule, model.weights()), model.shared(), model.batch(microbatches), jax.random.key(0)
    parsed = HloProgram(program(model, schedule).lower(*given).compile().as_text())
    return sum(len(computation.instructions) for computation in parsed.computations.values())


def test_the_program_does_not_grow_with_microbatches():
    short, long = instructions(7), instructions(255)
    assert abs(long / short - 1) <= 0.01


def test_bfloat16_messages_of_any_structure():
    """Hazard 5, and messages that are trees with whole numbers among them."""
    schedule = METHODS["1f1b"].schedule(2, 3)
    mesh = Mesh(np.array(jax.devices()[:2]), ("pipe",), axis_types=(AxisType.Auto,))
    message = {
        "hidden": jax.ShapeDtypeStruct((2, 4), jnp.bfloat16),
        "count": jax.ShapeDtypeStruct((2,), jnp.int32),
    }

    def stage(weights, shared, x, microbatch, at, key):
        hidden = jnp.where(at.stage == 0, microbatch["x"].astype(jnp.bfloat16), x["hidden"])
        hidden = jnp.tanh(hidden @ weights.astype(jnp.bfloat16))
        count = x["count"] + 1
        objective = jnp.where(at.stage == 1, (hidden.astype(jnp.float32) * count[:, None]).sum(), 0.0)
        return {"hidden": hidden, "count": count}, objective, {}

    def body(weights, batch):
        found = execute(tabulate(schedule, "residuals"), stage, weights, {}, batch, None, message)
        return found.weight_gradients

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P("pipe"), P()), out_specs=P("pipe"), axis_names={"pipe"})
    weights = jax.random.normal(jax.random.key(0), (2, 4, 4))
    batch = {"x": jax.random.normal(jax.random.key(1), (3, 2, 4))}
    found = jax.jit(mapped)(weights, batch)

    def whole(weights, x):
        for weight in weights:
            x = jnp.tanh(x.astype(jnp.bfloat16) @ weight.astype(jnp.bfloat16))
        return (x.astype(jnp.float32) * 2).sum()

    gradient = jax.jit(jax.grad(whole))
    exact = sum(gradient(weights, x) for x in batch["x"])
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, exact, rtol=1e-6, atol=1e-6)


def test_residuals_leave_out_weights_and_what_depends_on_them_alone():
    """Hazard 6: what a vjp function keeps, told apart: a cast copy of weights is made again, also out of a scan."""
    schedule = METHODS["1f1b"].schedule(2, 4)
    message = jax.ShapeDtypeStruct((2, 8), jnp.bfloat16)

    def stage(weights, shared, x, microbatch, at, key):
        def layer(x, weight):
            return x @ weight.astype(jnp.bfloat16), None

        x = x + microbatch["x"]
        y, _ = lax.scan(layer, x, weights)
        return y, y.astype(jnp.float32).sum(), {}

    weights, batch = (
        jax.ShapeDtypeStruct((1, 3, 8, 8), jnp.float32),
        {"x": jax.ShapeDtypeStruct((4, 2, 8), jnp.bfloat16)},
    )
    found = held_shapes(tabulate(schedule, "residuals"), stage, weights, {}, batch, None, message)
    assert [leaf.shape for leaf in jax.tree.leaves(found.stashes)] == [(2, 3, 2, 8)], (
        "the inputs of the layers, in 2 slots"
    )


def test_idle_devices_of_a_program_without_branches_do_no_harm():
    """Hazard 7: zeros go into idle devices, and what is not finite there reaches neither sums nor slots."""
    schedule = METHODS["lockstep"].schedule(2, 3)
    mesh = Mesh(np.array(jax.devices()[:2]), ("pipe",), axis_types=(AxisType.Auto,))
    message = jax.ShapeDtypeStruct((2, 4), jnp.float32)

    def one(weight, x):
        inner = x @ weight
        return inner / jnp.sqrt(jnp.square(inner).sum())  # of zeros: neither it nor its gradient is finite

    def stage(weights, shared, x, microbatch, at, key):
        y = one(weights, jnp.where((at.stage == 0) & (x.sum() == 0), microbatch["x"] * (at.microbatch >= 0), x))
        loss = jnp.where(at.stage == 1, y.sum(), 0.0)
        return y, loss, {"loss": loss}

    def body(weights, batch):
        tables = tabulate(schedule, "residuals")
        found = execute(tables, stage, weights, {}, batch, None, message, lowering="phased")
        return found.weight_gradients, lax.psum(found.sums["loss"], "pipe")

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P("pipe"), P()), out_specs=(P("pipe"), P()), axis_names={"pipe"})
    weights = jax.random.normal(jax.random.key(0), (2, 4, 4))
    batch = {"x": jax.random.normal(jax.random.key(1), (3, 2, 4))}

    def whole(weights):
        return sum(one(weights[1], one(weights[0], x)).sum() for x in batch["x"])

    gradients, loss = jax.jit(mapped)(weights, batch)
    expected, exact = jax.jit(jax.value_and_grad(whole))(weights)
    assert abs(loss - expected) <= BAR * abs(expected)
    assert distance(gradients, exact) <= 2 * BAR


def works(name, ranks, microbatches, stash, **settings):
    """How often each (what, stage) ran: 'forward', 'input' and 'weight' for the gradients of the two."""
    counts = {}

    def note(what, stage):
        key = what, int(stage)
        counts[key] = counts.get(key, 0) + 1
        return np.zeros((), np.float32)

    def called_with(what, stage):
        return jax.pure_callback(functools.partial(note, what), jax.ShapeDtypeStruct((), jnp.float32), stage)

    @jax.custom_vjp
    def product(x, weight, stage):
        return x @ weight + called_with("forward", stage)

    def forward(x, weight, stage):
        return product(x, weight, stage), (x, weight, stage)

    def backward(kept, g):
        x, weight, stage = kept
        dx = g @ weight.T + called_with("input", stage)
        dw = x.T @ g + called_with("weight", stage)
        return dx, dw, np.zeros((), jax.dtypes.float0)

    product.defvjp(forward, backward)
    schedule = METHODS[name].schedule(ranks, microbatches)
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("pipe",), axis_types=(AxisType.Auto,))
    message = jax.ShapeDtypeStruct((2, 4), jnp.float32)

    def stage(weights, shared, x, microbatch, at, key):
        y = product(jnp.tanh(product(jnp.where(at.stage == 0, microbatch, x), weights, at.stage)), weights, at.stage)
        return y, jnp.where(at.stage == schedule.stages - 1, y.sum(), 0.0), {}

    def body(weights, batch):
        tables = tabulate(schedule, stash)
        found = execute(tables, stage, weights[0], {}, batch, None, message, **settings)
        return found.weight_gradients[None]

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P("pipe"), P()), out_specs=P("pipe"), axis_names={"pipe"})
    weights = jnp.ones((ranks, schedule.chunks, 4, 4)) / 4
    jax.block_until_ready(jax.jit(mapped)(weights, jnp.ones((microbatches, 2, 4))))
    return schedule, counts


@pytest.mark.parametrize(
    ("name", "stash"),
    [
        ("1f1b", "residuals"),
        ("zb-h1", "residuals"),
        pytest.param("1f1b", "input", marks=pytest.mark.slow),
        pytest.param("gpipe", "residuals", marks=pytest.mark.slow),
        pytest.param("lockstep", "residuals", marks=pytest.mark.slow),
        pytest.param("interleaved", "residuals", marks=pytest.mark.slow),
        pytest.param("chimera", "residuals", marks=pytest.mark.slow),
        pytest.param("zb-h2", "residuals", marks=pytest.mark.slow),
        pytest.param("zb-v", "residuals", marks=pytest.mark.slow),
        pytest.param("dualpipe-v", "residuals", marks=pytest.mark.slow),
        pytest.param("zb-v", "input", marks=pytest.mark.slow),
    ],
)
def test_idle_stages_do_not_compute(name, stash):
    """Every stage goes forward m times and backward m times, through two products.

    Where its input alone is kept, each backward, or half of one, makes what its gradients read again: the first
    product, and the weights' half the gradient between the two.
    """
    microbatches = 4
    schedule, counts = works(name, 4, microbatches, stash)
    again, between = (0, 0) if stash == "residuals" else (2, 1) if schedule.split else (1, 0)
    for stage in range(schedule.stages):
        assert counts["forward", stage] == (2 + again) * microbatches
        assert counts["weight", stage] == 2 * microbatches
        assert counts["input", stage] == (2 + between) * microbatches


def refuses(match, *, lowering: Lowering = "switch", message=None, objective=None, batch=3, name="1f1b"):
    """Whether a mistake is answered."""
    schedule = METHODS[name].schedule(2, 3)
    mesh = Mesh(np.array(jax.devices()[:2]), ("pipe",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct((2, 4), jnp.float32)

    def stage(weights, shared, x, microbatch, at, key):
        y = x @ weights
        return y.astype(message or y.dtype), y.sum() if objective is None else y.sum(objective), {}

    def body(weights, batch):
        return execute(tabulate(schedule), stage, weights, {}, batch, None, x, lowering=lowering).weight_gradients

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P("pipe"), P()), out_specs=P("pipe"), axis_names={"pipe"})
    with pytest.raises(UserError, match=match):
        jax.eval_shape(mapped, jnp.ones((2, 4, 4)), jnp.ones((batch, 2, 4)))


def test_mistakes_are_named():
    refuses(r"batch  is \(4, 2, 4\), expected a first dim of 3", batch=4)
    refuses(r"the stage sends bfloat16\[2, 4\], but messages between stages are float32", message=jnp.bfloat16)
    refuses(r"objective is float32\[2\], expected a float32 scalar", objective=1)
    refuses(r"some devices run a forward and others a backward.*use lockstep or gpipe", lowering="phased")
    refuses(r"weights  is \(1, 4, 4\), expected a first dim of 2", name="interleaved")
