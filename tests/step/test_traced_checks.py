"""A plan's recipe for products: it took effect or is an error, and is the same over a mesh as on one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.blocks import Loss
from jaxscale.errors import UserError
from jaxscale.layers import linear
from jaxscale.layers.linear import Linear
from jaxscale.lowbit import products as low_precision
from jaxscale.memory.plan import MemoryPlan
from jaxscale.models.decoder import Decoder
from jaxscale.models.foreign import ForeignModel, classification
from jaxscale.pipeline.plan import PipelinePlan
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.step.build import build
from jaxscale.trees import named_leaves

ROWS, LENGTH = 8, 8
DECODER = Decoder(vocab=16, context=LENGTH, layers=2, embed=16, heads=2, mlp=32)
TEXT = {
    name: np.random.default_rng(seed).integers(0, 16, (ROWS, LENGTH)).astype(np.int32)
    for seed, name in enumerate(("tokens", "targets"))
}
VECTORS = {"images": np.zeros((ROWS, 8), np.float32), "labels": np.zeros(ROWS, np.int32)}


@dataclasses.dataclass(frozen=True)
class Plainly:
    """A model value of the user's own whose layer is not given the context."""

    def build(self, rngs, *, vocab_multiple=1):
        return Linear(8, 4, rngs=rngs)

    def loss(self, module, batch, context):
        x = jnp.asarray(batch["images"], context.dtype)
        return Loss(jnp.sum(module(x).astype(jnp.float32)), jnp.float32(ROWS))

    def logical_sizes(self):
        return {}


class Rows:
    """Data that tell the shapes of arrays and nothing else."""

    def __init__(self, arrays):
        self.arrays = arrays

    def shapes(self, batch):
        return {name: (rows.shape, rows.dtype.name) for name, rows in self.arrays.items()}


def make(mesh="1", model=DECODER, batch=TEXT, **fields):
    experiment = Experiment(name="products", model=model, data=Rows(batch), steps=4, batch=ROWS)
    spec, pipeline = MeshSpec.parse(mesh), fields.get("pipeline")
    devices = spec.devices if pipeline is None else spec.devices * pipeline.shape()[0]
    return build(experiment, Plan(mesh=spec, **{"precision": "bfloat16", **fields}), devices=jax.devices()[:devices])


def trace(step, batch=TEXT):
    jaxpr = step.step_fn.trace(step.layout.abstract, step.abstract_batch(batch)).jaxpr
    step.check_traced(jaxpr, batch)


def test_a_recipe_takes_effect_and_says_that_it_is_emulated():
    step = make(matmul="int4", microbatches=2, memory=MemoryPlan("full"))
    assert any(line.startswith("matmul int4: emulated") for line in step.describe())
    trace(step)


def test_models_whose_layers_cannot_are_refused_by_name():
    foreign = ForeignModel(lambda rngs: nnx.Linear(8, 4, rngs=rngs), classification())
    with pytest.raises(UserError, match="matmul int8: this model has its own layers"):
        make(model=foreign, batch=VECTORS, matmul="int8")
    with pytest.raises(UserError, match="matmul fp8: no layer of this model"):
        trace(make(model=Plainly(), batch=VECTORS, matmul="fp8"), VECTORS)


def test_a_recipe_that_is_not_taken_up_is_found(monkeypatch):
    step = make(matmul="int4")
    with monkeypatch.context() as planted:
        planted.setattr(linear, "product", lambda x, w, recipe: linear.matmul(x, w))
        with pytest.raises(UserError, match="matmul int4: no layer of this model"):
            trace(step)
    with monkeypatch.context() as planted:  # straight through, but of a gradient that nothing rounds
        rounded = low_precision.product

        def forward_alone(x, w, recipe):
            plain = linear.matmul(x, w)
            return plain + jax.lax.stop_gradient(rounded(x, w, recipe) - plain)

        planted.setattr(linear, "product", forward_alone)
        with pytest.raises(UserError, match="the gradients of their inputs and the gradients of their weights are"):
            trace(make(matmul="int4"))


def _same(matmul, mesh, tolerance, **fields):
    steps = make(matmul=matmul, precision="float32"), make(mesh, matmul=matmul, precision="float32", **fields)
    one, other = (named_leaves(step.gradients_fn(step.init(), step.place(TEXT))) for step in steps)
    for name, gradient in one.items():
        expected, found = np.asarray(gradient), np.asarray(other[name])
        assert np.linalg.norm(found - expected) <= tolerance * np.linalg.norm(expected), name


@pytest.mark.slow
@pytest.mark.parametrize("matmul", low_precision.RECIPES)
@pytest.mark.parametrize(
    ("mesh", "fields"),
    [
        ("data:2", {}),
        ("fsdp:4", {"zero": 3}),
        ("fsdp:2,tensor:2", {"zero": 3, "memory": MemoryPlan("full")}),
        ("tensor:2", {"sequence_parallel": True}),
        ("sequence:2", {}),
        ("1", {"microbatches": 2, "memory": MemoryPlan("full")}),
        ("1", {"memory": MemoryPlan.parse("save:40KiB")}),
        ("data:2", {"pipeline": PipelinePlan.parse("1f1b:2x4")}),
        ("1", {"pipeline": PipelinePlan.parse("zb-h1:2x4")}),
    ],
    ids=str,
)
def test_every_layout_multiplies_by_the_recipe(matmul, mesh, fields):
    # scales are maxima over all devices; a sum in another order may tip a code now and then
    parts = fields.get("microbatches", 1) > 1 or "pipeline" in fields
    # a scale over part of the rows is another one: what int4 and fp8 make of it differs
    tolerance = {"fp8": 0.15, "int8": 0.05, "int4": 0.6}[matmul] if parts else {"int4": 0.3}.get(matmul, 0.05)
    _same(matmul, mesh, tolerance, **fields)
    trace(make(mesh, matmul=matmul, **fields))


def test_text_forms_of_a_plan():
    assert Plan(matmul="fp8").matmul == "fp8"
    assert dataclasses.replace(Plan(), matmul="int4") != Plan()
    with pytest.raises(UserError, match="matmul"):
        Plan(matmul="fp4")
