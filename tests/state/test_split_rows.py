"""The products of a user's own layers under ZeRO 3: placed by rows of the batch, so that weights are gathered."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxscale.compiler.compile import compile_report
from jaxscale.data.rows import Arrays
from jaxscale.layers.linear import Linear
from jaxscale.layers.stack import Stack
from jaxscale.models.foreign import ForeignModel
from jaxscale.optim.optimizer import Optimizer
from jaxscale.planning.program import lowered_step
from jaxscale.programs.dims import constraint_placement
from jaxscale.programs.walk import equations_with_runs
from jaxscale.recipe.experiment import Experiment
from jaxscale.records.source import load_file
from jaxscale.sharding import place
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.sharding.rules import AxisRules
from jaxscale.state.split_rows import with_split_rows
from jaxscale.step.build import build
from tests.plans import plan_of

ROWS, WIDTH = 8, 16
OPEN = P.UNCONSTRAINED
MODELS = Path(__file__).parents[2] / "experiments/benchmarks/fit_models.py"


def specs_of(block, x, mesh="data:2,fsdp:2", weight_shape=(6, 10)):
    """The placements of the block's constraints, in order."""
    arguments = (jnp.ones(weight_shape), (), x)
    with place.layout(MeshSpec.parse(mesh).build(), AxisRules()):
        jaxpr = jax.make_jaxpr(with_split_rows(block))(*arguments)
    return [eqn.params["sharding"].spec for eqn, _ in equations_with_runs(jaxpr) if "sharding" in eqn.primitive.name]


@pytest.mark.parametrize(
    ("block", "x_shape", "mesh", "expected"),
    [
        (lambda w, s, x: x @ w, (8, 5, 6), "data:2,fsdp:2", [P(("data", "fsdp"), OPEN, OPEN)]),
        (lambda w, s, x: jnp.einsum("btd,df->tbf", x, w), (8, 5, 6), "fsdp:4", [P(OPEN, "fsdp", OPEN)]),
        (lambda w, s, x: x.transpose(1, 0, 2) @ w, (8, 5, 6), "fsdp:4", [P(OPEN, "fsdp", OPEN)]),
        (lambda w, s, x: jax.nn.gelu(x @ w) @ w.T, (12, 6), "fsdp:2", [P("fsdp", OPEN)] * 2),
        (lambda w, s, x: x.reshape(40, 6) @ w, (8, 5, 6), "fsdp:2", [P("fsdp", OPEN)]),
        (lambda w, s, x: x.reshape(40, 6) @ w, (8, 5, 6), "fsdp:2,sequence:2", []),  # rows and positions in one dim
        (lambda w, s, x: x[:, :5] @ w, (8, 5, 6), "fsdp:2,sequence:2", [P("fsdp", OPEN, OPEN)]),
        (lambda w, s, x: x.sum(0) @ w, (8, 5, 6), "fsdp:4", []),  # the rows are summed
        (lambda w, s, x: x + (w @ w.T).sum(), (8, 5, 6), "fsdp:4", []),  # a product of weights
        (lambda w, s, x: x @ w, (6, 5, 6), "fsdp:4", []),  # the axis does not divide the rows
        (lambda w, s, x: x @ w, (8, 5, 6), "tensor:2", []),
        (lambda w, s, x: x @ w, (0, 5, 6), "fsdp:2", []),
        (lambda w, s, x: x @ w, (10, 6), "fsdp:2", [P("fsdp", OPEN)]),  # as many elements as the weight
        (lambda w, s, x: x @ w, (8, 6), "fsdp:2", []),  # fewer than the weight
        (lambda w, s, x: x @ w, (16, 6), "data:2,fsdp:2", []),  # fewer in each group of devices with the same rows
        (lambda w, s, x: x + x @ x.T @ x, (10, 6), "fsdp:2", []),  # no weight
    ],
)  # fmt: skip
def test_products_with_rows_are_placed_by_them(block, x_shape, mesh, expected):
    assert specs_of(block, jnp.ones(x_shape), mesh) == expected


def test_only_activations_with_the_rows_of_the_largest_have_rows():
    def block(w, state, activations):
        x, mask = activations
        return jnp.einsum("ts,bsd->btd", mask, x) @ w

    placed = [P("fsdp", OPEN, OPEN), P("fsdp", OPEN, OPEN)]
    assert [sorted(map(str, spec)) for spec in specs_of(block, (jnp.ones((8, 5, 6)), jnp.ones((5, 5))), "fsdp:2")] == [
        sorted(map(str, spec)) for spec in placed
    ]


def test_names_and_results_stay_and_nothing_is_placed_outside_of_a_layout():
    def block(w, state, x):
        return {"y": checkpoint_name(x @ w, "hidden")}, state

    x = jnp.arange(96.0).reshape(16, 6)
    assert specs_of(block, x, "fsdp:2") == [P("fsdp", OPEN)]
    with place.layout(MeshSpec.parse("fsdp:2").build(), AxisRules()):
        jaxpr = jax.make_jaxpr(with_split_rows(block))(jnp.ones((6, 10)), (), x)
    assert [eqn.params["name"] for eqn in jaxpr.eqns if eqn.primitive.name == "name"] == ["hidden"]
    result, state = with_split_rows(block)(jnp.ones((6, 10)), (), x)
    assert jnp.array_equal(result["y"], x @ jnp.ones((6, 10)))
    assert state == ()


def test_dims_left_to_the_compiler_keep_their_placement():
    mesh = MeshSpec.parse("fsdp:2,tensor:2").build()

    def constrained(x):
        return jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, P("fsdp", OPEN, OPEN)))

    (constraint,) = jax.make_jaxpr(constrained)(jnp.ones((4, 4, 4))).eqns
    assert constraint_placement(constraint.params, ((), ("tensor",), ("fsdp",))) == (("fsdp",), ("tensor",), ())


class OwnLayer(nnx.Module):
    """Two products with nothing placed between them."""

    def __init__(self, rngs):
        init = nnx.initializers.normal(0.1)
        self.up = nnx.Param(init(rngs.params(), (WIDTH, 4 * WIDTH)), out_sharding=("embed", "mlp"))
        self.down = nnx.Param(init(rngs.params(), (4 * WIDTH, WIDTH)), out_sharding=("mlp", "embed"))

    def __call__(self, x, *, context=None):
        return x + jax.nn.gelu(x @ self.up[...]) @ self.down[...]


class LibraryLayer(nnx.Module):
    def __init__(self, rngs):
        self.linear = Linear(WIDTH, WIDTH, axes=("embed", None), rngs=rngs)

    def __call__(self, x, *, context=None):
        return x + self.linear(x)


class Net(nnx.Module):
    def __init__(self, rngs, layer=OwnLayer, width=WIDTH):
        self.layers = Stack(lambda rngs: layer(rngs), 3, rngs=rngs)

    def __call__(self, x):
        return self.layers(x)


def squared_errors(module, batch):
    return jnp.square(module(batch["x"]) - batch["y"]).mean((-2, -1))


def experiment_of(layer=OwnLayer, **fields):
    model = ForeignModel(functools.partial(Net, layer=layer), squared_errors)
    rows = jax.random.normal(jax.random.key(0), (4 * ROWS, 32, WIDTH))
    data = Arrays({"x": jax.device_get(rows), "y": jax.device_get(rows[:, ::-1])})
    optimizer = Optimizer(learning_rate=1e-2, warmup=0)
    return Experiment("own", model, data, optimizer, steps=4, batch=ROWS, plan=plan_of(**fields))


def row_constraints(step, batch):
    """The number of constraints that leave dims to the compiler, in the program of a step."""
    jaxpr = step.step_fn.trace(step.layout.abstract, step.abstract_batch(batch)).jaxpr
    return sum(bool(eqn.params.get("unconstrained_dims")) for eqn, _ in equations_with_runs(jaxpr))


@pytest.fixture(scope="module")
def batch():
    rows = jax.device_get(jax.random.normal(jax.random.key(1), (ROWS, 32, WIDTH)))
    return {"x": rows, "y": rows[:, ::-1]}


def losses(step, batch):
    state, values = step.init(), []
    for _ in range(4):
        state, metrics = step(state, step.place(batch))
        values.append(float(metrics["loss"]))
    return values


@pytest.mark.parametrize("memory", ["none", "full", "dots", "save:40KiB"])
def test_training_is_that_of_one_device(memory, batch):
    split = build(experiment_of(mesh="data:2,fsdp:4", zero=3, memory=memory))
    assert row_constraints(split, batch) >= 4  # both products, in both passes
    assert losses(split, batch) == pytest.approx(losses(build(experiment_of(mesh="1")), batch), rel=1e-5)


@pytest.mark.parametrize(
    ("layer", "fields"),
    [
        (LibraryLayer, {"mesh": "fsdp:4", "zero": 3}),
        (OwnLayer, {"mesh": "fsdp:4", "zero": 2}),
        (OwnLayer, {"mesh": "data:4", "zero": 0}),
    ],
)
def test_layers_of_the_package_and_whole_weights_need_no_placement(layer, fields, batch):
    assert row_constraints(build(experiment_of(layer, **fields)), batch) == 0


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp:8", "fsdp:4,tensor:2", "fsdp:4,sequence:2"])
def test_the_compiler_for_gpus_gathers_the_weights_of_a_mixture_of_experts(mesh):
    pytest.importorskip("jax_plugins.xla_cuda13")
    fields = {"mesh": mesh, "zero": "3", "memory": "full", "precision": "bfloat16", "microbatches": "8"}
    overrides = {f"plan.{name}": value for name, value in fields.items()}
    _, source = load_file(MODELS, "experts_large", {"batch": "64", "model.layers": "2", **overrides})
    report = compile_report(functools.partial(lowered_step, make=source.remake), "gpu h100 x 8")
    kinds = {collective.kind for collective in report.collectives if "fsdp" in (collective.axes or ())}
    assert "all-to-all" not in kinds
    assert "all-gather" in kinds
