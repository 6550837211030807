import jax
import pytest

from jaxscale.errors import UserError
from jaxscale.models.decoder import Decoder
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.state.layout import check_model
from jaxscale.step.resolve import resolve_mesh
from tests.plans import plan_of

MODEL = Decoder(vocab=64, context=24, layers=1, embed=24, heads=6, kv_heads=2, mlp=20)


@pytest.mark.parametrize(
    ("plan", "batch", "expected"),
    [
        (Plan(), 12, MeshSpec(data=6)),
        (Plan(), 16, MeshSpec(data=8)),
        (Plan(zero=2), 16, MeshSpec(fsdp=8)),
        (Plan(microbatches=4), 16, MeshSpec(data=4)),
        (Plan(), 1, MeshSpec()),
        (Plan(mesh=MeshSpec(data=2)), 4, MeshSpec(data=2)),
    ],
)
def test_without_a_mesh_a_run_takes_the_most_devices_that_divide_the_rows(plan, batch, expected):
    resolved, said = resolve_mesh(plan, Experiment("tiny", MODEL, None, batch=batch), jax.devices())
    assert resolved.mesh == expected
    assert str(expected) in said


@pytest.mark.parametrize(
    ("plan", "batch", "says"),
    [
        (Plan(microbatches=3), 8, "multiple of 3"),
        (Plan(mesh=MeshSpec(data=8)), 12, "multiple of 8"),
        (Plan(mesh=MeshSpec(data=2), microbatches=2), 6, "multiple of 4"),
        (Plan(mesh=MeshSpec(data=16)), 16, "there are 8"),
    ],
)
def test_a_batch_that_does_not_divide_is_refused(plan, batch, says):
    with pytest.raises(UserError, match=says):
        resolve_mesh(plan, Experiment("tiny", MODEL, None, batch=batch), jax.devices())


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (Plan(mesh=MeshSpec(tensor=4)), "heads: 6 cannot be split evenly over tensor:4"),
        (Plan(mesh=MeshSpec(tensor=6)), "kv_heads: 2 cannot be split evenly over tensor:6"),
        (Plan(mesh=MeshSpec(sequence=5)), "context 24: mesh .* splits the context 5 ways; take a multiple of 5"),
    ],
)
def test_a_model_that_does_not_divide_is_refused(plan, says):
    with pytest.raises(UserError, match=says):
        check_model(plan, MODEL)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"zero": 4}, "zero"),
        ({"zero": 1, "mesh": MeshSpec(data=2)}, "add fsdp:N"),
        ({"sequence_parallel": True, "mesh": MeshSpec(data=2)}, "add tensor:N"),
        ({"microbatches": 0}, "microbatches: got 0"),
        ({"loss_chunk": 0}, "loss_chunk: got 0, expected"),
        ({"reduce": "bfloat16"}, "add precision bfloat16"),
        ({"precision": "bf16"}, "precision"),
    ],
)
def test_a_plan_that_means_nothing_cannot_be_made(fields, says):
    with pytest.raises(UserError, match=says):
        plan_of(**fields)
