"""A plan that took no effect is found: planted faults fail, real steps pass."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jaxscale.blocks import Loss
from jaxscale.compiler.collectives import Collective, collectives
from jaxscale.errors import UserError
from jaxscale.layers.linear import Linear
from jaxscale.memory.plan import MemoryPlan
from jaxscale.models.decoder import Decoder
from jaxscale.models.foreign import ForeignModel, classification
from jaxscale.optim.optimizer import Optimizer
from jaxscale.pipeline.plan import PipelinePlan
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.replicas import Codec
from jaxscale.replicas.reduce import GradientExchange, GradientLeaf
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.step.build import build
from jaxscale.step.compiled_checks import NoEffect, check_codec, check_compiled, check_wires
from tests.plans import plan_of
from tests.step.residual import Residual, random_batch
from tests.tiers import variants

ROWS, LENGTH = 8, 8
DECODER = Decoder(vocab=16, context=LENGTH, layers=2, embed=8, heads=2, mlp=16)
TEXT = {name: np.zeros((ROWS, LENGTH), np.int32) for name in ("tokens", "targets")}
VECTORS = {"images": np.zeros((ROWS, 8), np.float32), "labels": np.zeros(ROWS, np.int32)}


@dataclasses.dataclass(frozen=True)
class Plainly:
    """A model value of the user's own that shows no blocks and reads nothing of its context."""

    stubborn: bool = False
    recomputes: bool = False

    def build(self, rngs, *, vocab_multiple=1):
        return Linear(8, 4, rngs=rngs)

    def loss(self, module, batch, context):
        x = jnp.asarray(batch["images"], jnp.float32 if self.stubborn else context.dtype)
        if self.stubborn:
            module.weight.set_value(module.weight[...].astype(jnp.float32))
        call = jax.checkpoint(lambda x: jnp.tanh(module(x))) if self.recomputes else module
        return Loss(jnp.sum(call(x).astype(jnp.float32)), jnp.float32(ROWS))

    def logical_sizes(self):
        return {}


class Tokens:
    """Data that tell the shapes of `TEXT` and nothing else."""

    def shapes(self, batch):
        return {name: (rows.shape, rows.dtype.name) for name, rows in TEXT.items()}


def make(model=DECODER, mesh="1", optimizer=Optimizer(), **fields):
    experiment = Experiment(name="check", model=model, data=Tokens(), optimizer=optimizer, steps=4, batch=ROWS)
    return build(experiment, plan_of(mesh=mesh, **fields))


def trace(step):
    batch = {Decoder: TEXT, Residual: random_batch(ROWS)}.get(type(step.experiment.model), VECTORS)
    traced = step.step_fn.trace(step.layout.abstract, step.abstract_batch(batch))
    step.check_traced(traced.jaxpr, batch)
    return traced


def check(step, executable):
    check_compiled(step.layout, step.optimizer, step.extras, executable)


REAL = [
    {"memory": MemoryPlan("dots")},
    {"memory": MemoryPlan("full"), "precision": "bfloat16", "reduce": "float32"},
    {"memory": MemoryPlan.parse("chain:1GiB")},  # enough for everything: nothing is to be recomputed
    {"memory": MemoryPlan.parse("offload:capuchin:1GiB"), "weights": "host"},  # nothing is to be moved, either
    {"memory": MemoryPlan("sqrt"), "model": dataclasses.replace(DECODER, layers=1)},
    {"memory": MemoryPlan("full"), "pipeline": PipelinePlan.parse("zb-h1:2x2"), "mesh": "data:2"},
    {"unroll": 2, "loss_chunk": 4, "attention": "chunked"},
    {"attention": "plain", "precision": "bfloat16", "microbatches": 2},
    {  # most of whose products are the optimizer's
        "model": dataclasses.replace(DECODER, embed=64, mlp=128),
        "optimizer": Optimizer(name="soap"),
        "precision": "bfloat16",
    },
    {"model": Plainly(), "precision": "bfloat16"},
    {"model": ForeignModel(lambda rngs: nnx.Linear(8, 4, rngs=rngs), classification()), "memory": MemoryPlan("full")},
]


# by default those that are traced in little time
@pytest.mark.parametrize("fields", variants(REAL, [REAL[place] for place in (0, 1, 2, 4, 6, 7, 9, 10)]))
def test_what_takes_effect_passes(fields):
    trace(make(**fields))


@pytest.mark.parametrize("name", ["soap", pytest.param("galore", marks=pytest.mark.slow)])
def test_a_rule_that_decomposes_matrices_sends_nothing_over_replicas(name):
    """XLA spread its products over them, the slow axis, where a codec is to send few bytes."""
    step = make(Residual(), "replica:2,fsdp:2", Optimizer(name=name), zero=1, reduce=Codec.parse("int8"))
    step.compile(random_batch(ROWS))


PLANTED = [
    ({"memory": MemoryPlan("full")}, "memory full: nothing is recomputed"),
    ({"model": Plainly(recomputes=True), "memory": MemoryPlan("dots")}, "memory dots: nothing is recomputed"),
    ({"unroll": 2}, "unroll 2: this model has no scan"),
    ({"loss_chunk": 4}, "loss_chunk 4: this model's loss"),
    ({"attention": "chunked"}, "attention chunked: this model does not use jaxscale's attention"),
    ({"model": Plainly(stubborn=True), "precision": "bfloat16"}, "100% of the FLOP"),
]


@pytest.mark.parametrize(("fields", "says"), PLANTED)
def test_a_model_that_does_not_take_up_a_request_is_refused_before_compiling(fields, says):
    step = make(**{"model": Plainly(), **fields})
    with pytest.raises(UserError, match=says):
        step.compile(VECTORS)


def test_a_memory_plan_is_not_the_other_one():
    dots, full = (make(memory=MemoryPlan(keep)) for keep in ("dots", "full"))
    with pytest.raises(UserError, match="memory full"):
        full.check_traced(trace(dots).jaxpr, TEXT)


@pytest.fixture(scope="module")
def compiled():
    """Steps of each stage, compiled: what each is asked for, and what each does."""
    steps = {zero: make(Residual(), mesh="fsdp:4", zero=zero) for zero in (0, 1, 2, 3)}
    return {zero: (step, trace(step).lower().compile()) for zero, step in steps.items()}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_stage_shows_in_its_program(compiled, zero):
    step, executable = compiled[zero]
    check(step, executable)
    kinds = {c.kind for c in collectives(executable.as_text(), step.mesh) if c.axes == ("fsdp",)}
    assert ("reduce-scatter" in kinds) == (zero > 1)


@pytest.mark.parametrize(
    ("asked", "does", "says"),
    [
        (1, 0, "keeps the optimizer state of .* in shards"),
        (2, 1, "scatters no gradient over fsdp"),
        (3, 2, "keeps the parameter .* in shards"),
        (2, 0, "keeps the optimizer state"),
    ],
)
def test_the_program_of_a_lower_stage_is_refused(compiled, asked, does, says):
    with pytest.raises(NoEffect, match=says):
        check(compiled[asked][0], compiled[does][1])


def test_optimizer_state_that_the_layout_forgot_to_split_is_found():
    """Placements say what is meant; a step built with other shardings does not do it."""
    step = make(Residual(), mesh="fsdp:4", zero=1)
    whole = NamedSharding(step.mesh, PartitionSpec())
    state = dataclasses.replace(
        step.layout.state_shardings, optimizer=jax.tree.map(lambda _: whole, step.layout.state_shardings.optimizer)
    )
    abstract = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), step.layout.abstract, state
    )
    layout = dataclasses.replace(step.layout, state_shardings=state, abstract=abstract)
    planted = type(step)(dataclasses.replace(step.parts, layout=layout))
    with pytest.raises(NoEffect, match="zero 1: the compiled step keeps the optimizer state of"):
        planted.compile(random_batch(ROWS))


def wires(**dtypes):
    return [Collective("all-reduce", ("data",), size, 1, dtype, "main") for dtype, size in dtypes.items()]


@pytest.mark.parametrize(
    ("reduce", "found", "fails"),
    [
        ("float32", wires(f32=400), False),
        ("float32", wires(bf16=200, f32=4), True),
        ("bfloat16", wires(bf16=200, f32=4), False),
        ("bfloat16", wires(f32=400), True),
        (None, wires(f32=400), True),
        (None, [dataclasses.replace(c, axes=("tensor",)) for c in wires(f32=400)], False),
    ],
)
def test_the_type_of_reductions_shows_in_the_program(reduce, found, fails):
    plan = Plan(mesh=MeshSpec(data=2), precision="bfloat16", reduce=reduce)
    check_wires(plan, "cpu", found, False)  # XLA:CPU reduces in float32, whatever is asked for
    if fails:
        with pytest.raises(NoEffect, match="over the data axes"):
            check_wires(plan, "gpu", found, False)
    else:
        check_wires(plan, "gpu", found, False)


def test_a_ring_is_how_a_tpu_scatters():
    ring = [Collective("collective-permute", ("fsdp",), 64, 3, "bf16", "main")]
    plan = Plan(mesh=MeshSpec(fsdp=4), zero=3)
    check_wires(plan, "tpu", ring, True)
    with pytest.raises(NoEffect, match="scatters no gradient"):
        check_wires(plan, "gpu", ring, True)
    with pytest.raises(NoEffect, match="scatters no gradient"):
        check_wires(dataclasses.replace(plan, zero=2), "tpu", ring, True)


def test_a_program_in_an_unknown_spelling_stops_nothing(compiled):
    step, executable = compiled[2]

    class Strange(jax.stages.Compiled):
        output_shardings, out_info = executable.output_shardings, executable.out_info

        def __init__(self):
            """Nothing of a real program's."""

        def as_text(self):
            return executable.as_text().replace("replica_groups=", "replica_groups=[banana")

    with pytest.warns(UserWarning, match="not checked"):
        check(step, Strange())


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"optimizer": Optimizer(name="sgd"), "zero": 1}, "this optimizer keeps no state"),
        (
            {"model": ForeignModel(lambda rngs: nnx.Linear(3, 5, rngs=rngs), classification()), "zero": 2},
            "no parameter has a dim",
        ),
    ],
)
def test_a_stage_that_splits_nothing_is_refused(fields, says):
    with pytest.raises(UserError, match=says):
        make(mesh="fsdp:8", **fields)


def test_single_numbers_beside_codes_take_more_between_slices():
    """A TPU sends 512 bytes for each between slices, 4096 for one that is packed behind codes."""
    mesh = AbstractMesh((2, 2), ("replica", "fsdp"))
    stage = GradientExchange(
        Codec.parse("powersgd:4"), mesh, {"kernel": GradientLeaf((128, 128), PartitionSpec("fsdp"))}
    )
    assert (stage.wire_bytes, stage.exact_bytes) == (3072, 32768)
    sent = stage.wire_bytes + 3 * 512 + 4096
    check_codec(stage, sent, slice_count=2)
    with pytest.raises(NoEffect, match="sends 8704 bytes over replica, but the codec should send 3072"):
        check_codec(stage, sent)
    with pytest.raises(NoEffect, match=r"3072 bytes \(float32: 32768\)"):
        check_codec(stage, sent + stage.exact_bytes, slice_count=2)
