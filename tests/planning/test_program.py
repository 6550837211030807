"""The step as the compiler of a described device is given it."""

import functools

import jax
import pytest
from flax import nnx

from jaxscale.compiler.compile import compile_report
from jaxscale.models.decoder import Decoder
from jaxscale.models.foreign import ForeignModel, classification
from jaxscale.models.lora import LoRA
from jaxscale.models.resnet import ResNet
from jaxscale.planning.program import described_step, lowered_step, traced_step
from jaxscale.platforms.platform import Platform
from jaxscale.programs.walk import equations_with_runs
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import OffloadPlan, Plan, StatePlan
from jaxscale.state.batches import batch_shapes
from jaxscale.state.layout import local_bytes

ON_HOST = {
    "state streamed": Plan(zero=3, offload=OffloadPlan(optimizer_state="streamed")),
    "state updated there": Plan(zero=3, offload=OffloadPlan(optimizer_state="host")),
    "weights too": Plan(zero=3, offload=OffloadPlan("host", "host", "streamed")),
}


class Tokens:
    def shapes(self, batch):
        return dict.fromkeys(("tokens", "targets"), ((batch, 16), "int32"))


def tiny() -> Experiment:
    return Experiment("tiny", Decoder(vocab=64, context=16, heads=2, layers=2, embed=64), Tokens(), batch=4, steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_HOST)
def test_what_lies_on_the_host_of_a_described_gpu_is_there(name, monkeypatch, tmp_path):
    """JAX lists no memories of such a GPU; its compiler has them."""
    pytest.importorskip("jax_plugins.xla_cuda13")
    monkeypatch.setenv("JAXSCALE_CACHE", str(tmp_path))
    monkeypatch.delenv("XLA_FLAGS")  # this process's compiler works at its lowest level
    platform, plan = Platform.parse("gpu h100 x 2"), ON_HOST[name]
    report = compile_report(functools.partial(lowered_step, make=tiny, plan=plan), platform)
    assert report.crashed is None
    state = described_step(tiny(), platform, plan).layout.abstract
    assert report.host_argument_bytes == local_bytes(state, is_on_host=True) > 0


class Images:
    def shapes(self, batch):
        return {"images": ((batch, 16, 16, 3), "float32"), "labels": ((batch,), "int32")}


@pytest.mark.parametrize(
    ("platform", "plan", "late"),
    [
        ("tpu v5e:2x2", Plan(mesh="fsdp:4", zero=2), True),
        ("tpu v5e:2x2", Plan(mesh="fsdp:4", zero=1), False),  # the gradients are not summed around a ring
        ("tpu v5e:2x2", Plan(mesh="fsdp:4", zero=2, microbatches=2), False),
        ("tpu v5p:2x2x1", Plan(mesh="fsdp:4", zero=2), False),
        ("gpu h100 x 4", Plan(mesh="fsdp:4", zero=1), True),
        ("gpu a100-80 x 4", Plan(mesh="fsdp:4", zero=1), False),
    ],
)
def test_gradients_of_blocks_outside_of_loops_come_last_where_the_compiler_delays_them(platform, plan, late):
    model = ResNet(classes=8, stages=(2,), bottleneck=False)
    experiment = Experiment("images", model, Images(), batch=8, plan=plan)
    described = Platform.parse(platform)
    step = described_step(experiment, described)
    program = traced_step(step, batch_shapes(experiment), described).program
    loops = [operation.loop_body for operation in program.operations if operation.loop_body is not None]
    program = loops[0] if plan.microbatches > 1 else program
    shapes = [
        program.avals[operation.outputs[0]].shape
        for operation in program.operations
        if operation.is_backward and operation.kind == "conv_general_dilated"
    ]
    are_weights = [shape[0] in (3, 7) for shape in shapes]  # kernels of 3 x 3 or 7 x 7; activations have 8 or 4 rows
    assert are_weights.count(True) == 5
    assert (are_weights == sorted(are_weights)) == late


def test_kernels_that_update_in_place_read_the_gradients():
    """They write to references and have no results; without them, nothing would place or keep the gradients."""
    plan = Plan(mesh="fsdp:4", zero=1, precision="bfloat16", state=StatePlan(moments="int8"))
    model = Decoder(vocab=64, context=16, heads=2, layers=2, embed=128)
    experiment = Experiment("tiny", model, Tokens(), batch=8, steps=3, plan=plan)
    platform = Platform.parse("gpu h100 x 4")
    program = traced_step(described_step(experiment, platform), batch_shapes(experiment), platform).program
    kernels = [operation for operation in program.operations if not operation.outputs]
    assert len(kernels) == 7  # four weights of attention and three of the MLP; others stay in float32
    for kernel in kernels:
        shapes = [program.avals[value].shape for value in kernel.inputs]
        assert len(shapes) == 7  # numbers, gradient, weights, and codes and scales of two moments
        assert shapes[1] == shapes[2]


class AttentionBlocks(nnx.Module):
    """Two blocks of attention to the row itself, of Flax's own layers and outside of loops."""

    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.MultiHeadAttention(2, 32, decode=False, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean(1))


class Signals:
    def shapes(self, batch):
        return {"x": ((batch, 64, 32), "float32"), "labels": ((batch,), "int32")}


def attention_program(platform, plan):
    """Return the program of attention blocks, or of a microbatch; the scores of a row are 64 x 64 for each head."""
    model = ForeignModel(AttentionBlocks, classification(inputs="x"))
    experiment = Experiment("attention", model, Signals(), batch=16, plan=plan)
    described = Platform.parse(platform)
    program = traced_step(described_step(experiment, described), batch_shapes(experiment), described).program
    loops = [operation.loop_body for operation in program.operations if operation.loop_body is not None]
    return loops[0] if plan.microbatches > 1 else program


@pytest.mark.parametrize("microbatches", [1, pytest.param(2, marks=pytest.mark.variant)])
@pytest.mark.parametrize(("platform", "repeated_count"), [("tpu v5e:2x2", 0), ("tpu v6e:2x2", 2), ("gpu h100 x 4", 0)])
def test_scores_that_blocks_outside_of_loops_keep_are_repeated_on_v6e(platform, repeated_count, microbatches):
    """The scores of both blocks are computed in the forward pass, and on a v6e in the backward pass as well."""
    plan = Plan(mesh="data:4", memory="dots", precision="bfloat16", microbatches=microbatches)
    program = attention_program(platform, plan)
    sizes = [
        (program.avals[operation.outputs[0]].size, operation.is_backward)
        for operation in program.operations
        if operation.kind == "dot_general" and str(program.avals[operation.outputs[0]].dtype) == "float32"
    ]
    score_size = 16 // microbatches * 2 * 64 * 64
    assert sizes.count((score_size, False)) == 2
    assert sizes.count((score_size, True)) == repeated_count


@pytest.mark.parametrize(
    ("platform", "memory", "late"),
    [
        ("tpu v5e:2x2", "dots", True),
        ("tpu v6e:2x2", "none", True),
        ("tpu v5e:2x2", "full", False),
        ("tpu v5p:2x2x1", "dots", False),
    ],
)
def test_matrix_gradients_of_blocks_outside_of_loops_come_last_on_flat_slices(platform, memory, late):
    """Every gradient of a weight, of shape (32, 2, 16) or (2, 16, 32), is computed after the other products."""
    program = attention_program(platform, Plan(mesh="data:4", memory=memory, precision="bfloat16"))
    are_weights = [
        program.avals[operation.outputs[0]].size == 32 * 32
        for operation in program.operations
        if operation.is_backward and operation.kind == "dot_general"
    ]
    assert are_weights.count(True) == 2 * 4
    tail = are_weights[are_weights.index(True) :]
    assert all(tail) == late


@pytest.mark.parametrize(
    ("platform", "compiler", "product_fusion"),
    [
        ("tpu v5e:2x2", "default", "local"),
        ("tpu v5e:2x2", "overlap", "all"),
        ("tpu v5e:2x2", "xla_tpu_scoped_vmem_limit_kib=1024", "local"),
        ("tpu v5p:2x2x1", "overlap", "all"),
    ],
)
def test_options_of_the_compiler_decide_whether_products_run_around_a_ring(platform, compiler, product_fusion):
    """A ring stores the operands of its products; a fusion computes them inside the product."""
    experiment, described = tiny(), Platform.parse(platform)
    step = described_step(experiment, described, Plan(mesh="fsdp:4", zero=3, compiler=compiler))
    assert traced_step(step, batch_shapes(experiment), described).compiler.product_fusion == product_fusion


@pytest.mark.parametrize(
    ("platform", "zero", "width", "shapes"),
    [
        ("tpu v5e:2x2", 1, 528, [(2, 528, 528)] * 4),  # shards of 132 columns pad to 256, and 528 rows to 640
        ("tpu v5e:2x2", 1, 512, []),  # shards of 128 columns pad to nothing
        ("tpu v5e:2x2", 3, 528, []),
        ("gpu h100 x 4", 1, 528, []),
    ],
)
def test_weights_that_a_tpu_gathers_in_another_layout_are_row_major_in_the_passes(platform, zero, width, shapes):
    model = Decoder(vocab=64, context=16, heads=2, layers=2, embed=width)
    experiment = Experiment("tiny", model, Tokens(), batch=4, steps=3)
    step = described_step(experiment, Platform.parse(platform), Plan(mesh="fsdp:4", zero=zero, precision="bfloat16"))
    jaxpr = step.step_fn.trace(step.layout.abstract, step.abstract_batch(batch_shapes(experiment))).jaxpr
    constraints = [eqn for eqn, _ in equations_with_runs(jaxpr) if eqn.primitive.name == "layout_constraint"]
    assert [eqn.invars[0].aval.shape for eqn in constraints if eqn.invars[0].aval.shape[1:] == (width, width)] == shapes
    assert bool(constraints) == bool(shapes)
    assert all(eqn.params["layout"].major_to_minor == tuple(range(eqn.invars[0].aval.ndim)) for eqn in constraints)


def test_adapters_of_few_columns_keep_the_layout_that_xla_gives_them():
    """Row-major, an adapter of 8 columns would take 16 times its bytes."""
    model = LoRA(Decoder(vocab=64, context=16, heads=2, layers=8, embed=1024), rank=8)
    experiment = Experiment("tiny", model, Tokens(), batch=4, steps=3)
    plan = Plan(mesh="fsdp:4", zero=1, precision="bfloat16")
    step = described_step(experiment, Platform.parse("tpu v5e:2x2"), plan)
    jaxpr = step.step_fn.trace(step.layout.abstract, step.abstract_batch(batch_shapes(experiment))).jaxpr
    constraints = [eqn for eqn, _ in equations_with_runs(jaxpr) if eqn.primitive.name == "layout_constraint"]
    assert all(eqn.invars[0].aval.shape[-1] > 8 for eqn in constraints)
    assert any(leaf.shape[-1] == 8 for leaf in jax.tree.leaves(step.layout.abstract.params))
