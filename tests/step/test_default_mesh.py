import jax
import pytest
from flax import nnx

from jaxscale.compiler.described_device import DescribedDevice
from jaxscale.data import Text
from jaxscale.models import Decoder, ResNet, ViT
from jaxscale.models.foreign import ForeignModel
from jaxscale.planning.estimate import estimate
from jaxscale.platforms.platform import Platform
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.step.resolve import resolve_mesh


def mean_loss(module, batch):
    return module(batch["images"]).mean((1, 2, 3))


MODEL = Decoder(vocab=64, context=32, layers=4, embed=32, heads=8, kv_heads=4, mlp=64)


FOREIGN = ForeignModel(make=lambda rngs: nnx.Conv(3, 8, (16, 16), padding="VALID", rngs=rngs), score=mean_loss)


class Pixels:
    """Shapes of images and labels; there are none."""

    def open(self, *_):
        raise AssertionError

    def shapes(self, batch):
        return {"images": ((batch, 16, 16, 3), "float32"), "labels": ((batch,), "int32")}


def described(count, slices=1, platform="tpu"):
    return [DescribedDevice("a chip", None, platform, index * slices // count) for index in range(count)]


def resolved(plan, batch, devices, model=MODEL):
    plan, line = resolve_mesh(plan, Experiment("tiny", model, None, batch=batch), devices)
    assert line.startswith(f"mesh {plan.mesh}: {plan.mesh.devices} of {len(devices)} ")
    return plan.mesh, line


@pytest.mark.parametrize(
    ("plan", "batch", "devices", "mesh", "reason"),
    [
        (Plan(zero=3), 64, described(32, slices=2), "replica:2,fsdp:16", ""),
        (Plan(), 64, described(32, slices=2), "data:32", ""),
        (Plan(zero=3), 256, described(512, slices=2), "replica:2,fsdp:128,tensor:2", "256 rows are too few"),
        (Plan(zero=1, pipeline="1f1b:4x4"), 64, described(16, slices=2), "pipe:4,fsdp:4", ""),
        (Plan(zero=1, pipeline="1f1b:3x4"), 64, described(24, slices=2), "replica:2,pipe:3,fsdp:4", ""),
        (Plan(), 2, described(8), "data:2,tensor:4", "2 rows are too few"),
        (Plan(), 1, described(8), "tensor:4", "1 row is too few"),  # four key heads
        (Plan(), 32, described(7, platform="gpu"), "data:4", "a batch that is a multiple of 7 would use 7"),
        (Plan(microbatches=4), 16, jax.devices, "data:4", "a batch that is a multiple of 32 would use 8"),
    ],
)
def test_a_mesh_uses_all_devices_or_the_line_gives_the_reason(plan, batch, devices, mesh, reason):
    settled_mesh, line = resolved(plan, batch, devices() if callable(devices) else devices)
    assert settled_mesh == MeshSpec.parse(mesh)
    assert reason in line
    assert (" row" in line) == bool(reason)


def test_tensor_parallelism_that_a_model_or_a_request_does_not_allow_is_not_chosen():
    odd_heads = Decoder(vocab=64, context=32, layers=1, embed=30, heads=3, mlp=63)
    mesh, line = resolved(Plan(), 4, described(8), odd_heads)
    assert mesh == MeshSpec(data=4)
    assert "the most that divide 4 rows" in line


def test_a_named_axis_that_crosses_slices_is_reported():
    _, line = resolved(Plan(mesh="fsdp:32", zero=3), 64, described(32, slices=2))
    assert "fsdp crosses the slow network between slices" in line
    for mesh in ("replica:2,fsdp:16", "data:2,fsdp:16"):
        _, line = resolved(Plan(mesh=mesh, zero=3), 64, described(32, slices=2))
        assert "network" not in line


@pytest.mark.parametrize(
    ("model", "batch", "mesh"),
    [
        (MODEL, 4, "fsdp:4,tensor:2"),
        (ViT(classes=8, image=16, patch=4, layers=1, embed=32, heads=4, mlp=64), 2, "fsdp:2,tensor:4"),
        (ResNet(classes=8, stages=(1, 1), width=16), 2, "fsdp:2"),  # no dim of it is split over tensor
        (FOREIGN, 2, "fsdp:2"),  # its dims are unknown
    ],
)
def test_a_step_on_the_default_mesh_is_traced(model, batch, mesh):
    platform = Platform.parse("tpu v5e:2x4")
    data = Text("text.txt", context=32) if isinstance(model, Decoder) else Pixels()
    experiment = Experiment("tiny", model, data, batch=batch)
    settled = estimate(experiment, platform, Plan(zero=3))
    assert settled.plan.mesh == MeshSpec.parse(mesh)
    assert settled.device_bytes > 0
