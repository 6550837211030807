"""Which communication of a step adds to its modeled seconds."""

import functools

import pytest

import jaxscale as jx
from jaxscale.planning.search.links import collective_seconds
from jaxscale.planning.search.step_seconds import INTERFERENCE, modeled_seconds
from jaxscale.platforms.platform import Platform
from tests.tiers import variants

MODEL = jx.models.Decoder(vocab=4096, context=2048, layers=4, embed=4096, heads=32, mlp=16384)
EXPERIMENT = jx.Experiment("timed", MODEL, jx.data.Text("text.txt", context=2048), batch=64)


@functools.cache
def items(platform, mesh):
    """Return the modeled seconds by item of a step in bfloat16, under ZeRO 3 if the mesh has an axis fsdp."""
    plan = jx.Plan(mesh=mesh, zero=3 if "fsdp" in mesh else 0, precision="bfloat16", sequence_parallel="tensor" in mesh)
    return modeled_seconds(EXPERIMENT, Platform.parse(platform), plan).items


@pytest.mark.parametrize("platform", variants(["gpu h100 x 16", "tpu v5p:2x2x2 x 2"], default=1))
def test_gradients_between_hosts_and_slices_wait_for_no_product(platform):
    """Their time is that of an all-reduce of the shards, all layers together; inside a host, it is hidden."""
    between = items(platform, "data:2,fsdp:8")["gradients over data"]
    shard_bytes = 2 * 4 * (4 * 4096**2 + 3 * 4096 * 16384) / 8
    at_once = collective_seconds(
        "all-reduce", shard_bytes, ("data",), jx.MeshSpec(data=2, fsdp=8), Platform.parse(platform)
    )
    assert between > at_once
    assert between < 1.5 * at_once  # the tables, and a latency for each layer
    inside = items(platform.replace("16", "8").removesuffix(" x 2"), "data:2,fsdp:4")
    assert inside["gradients over data"] < 0.2 * between
    scattered = items(platform, "fsdp:16")["gradients over fsdp"]  # half of what an all-reduce sends
    assert 0.4 * between < scattered < 0.9 * between


def test_a_slower_network_takes_longer():
    """At a fourth of the rate, gradients between hosts take four times as long, but for the latency."""
    fast = items("gpu h100 x 16 over 400Gb/s", "data:2,fsdp:8")
    slow = items("gpu h100 x 16 over 100Gb/s", "data:2,fsdp:8")
    assert slow["gradients over data"] == pytest.approx(4 * fast["gradients over data"], rel=0.1)
    assert fast == items("gpu h100 x 16", "data:2,fsdp:8")
    assert {name: fast[name] for name in ("forward", "backward")} == {
        name: slow[name] for name in ("forward", "backward")
    }


def test_libtpu_sends_beside_products_along_long_tensor_axes():
    """A tensor axis of 8 devices of a TPU slice leaves a tenth of its messages; 4, two slices or 8 GPUs leave all."""
    item = "activations over tensor"
    long_axis, short_axis = items("tpu v5p:2x2x4", "fsdp:2,tensor:8"), items("tpu v5p:2x2x4", "fsdp:4,tensor:4")
    assert long_axis[item] < 2 * INTERFERENCE * short_axis[item]
    assert short_axis[item] > 0.05 * short_axis["forward"]
    assert items("tpu v5p:2x2x1 x 2", "tensor:8")[item] > 5 * items("tpu v5p:2x2x2", "tensor:8")[item]
    on_gpu = items("gpu h100 x 16", "fsdp:2,tensor:8")
    assert on_gpu[item] > 0.05 * on_gpu["forward"]
