"""What crosses the slow axis, and what a codec or DiLoCo keeps: in the estimate, its report, compiled programs."""

import dataclasses

import jax
import pytest

from jaxscale.compiler.collectives import Collective
from jaxscale.compiler.report import CompileReport
from jaxscale.planning.estimate import estimate, of_step
from jaxscale.planning.fit import fit
from jaxscale.planning.network_traffic import sent_bytes_by_axes, slow_axis_traffic, slow_link
from jaxscale.planning.program import described_step
from jaxscale.platforms.platform import Platform
from jaxscale.replicas import Codec
from jaxscale.replicas.low_communication import Diloco
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.state.batches import batch_shapes
from jaxscale.step.build import build

MESH, SLICES = "replica:2,fsdp:4", "tpu v5e:2x2 x 2"
INT8 = Codec.parse("int8")


def test_a_codec_s_states_and_bytes_are_told(planned):
    experiment = planned(MESH, zero=2, reduce=INT8, precision="bfloat16")
    estimated, step = estimate(experiment, SLICES), described_step(experiment, Platform.parse(SLICES))
    assert step.gradient_exchange is not None
    assert estimated.device_bytes_by_kind["residuals"] == step.memory(batch_shapes(experiment))["residuals"]
    assert estimated.slow_axis_traffic is not None
    assert (estimated.slow_axis_traffic.sent_bytes, estimated.slow_axis_traffic.exact_bytes) == (
        step.gradient_exchange.wire_bytes,
        step.gradient_exchange.exact_bytes,
    )
    assert estimated.slow_axis_traffic.seconds == pytest.approx(estimated.slow_axis_traffic.sent_bytes / (25e9 / 8))
    assert estimated.state_bytes_per_parameter == pytest.approx(8, rel=1e-3)
    # the model's activations are within a region of each replica's own, and are seen all the same
    plain = estimate(planned(MESH, zero=2, precision="bfloat16"), SLICES)
    assert estimated.device_bytes_by_kind["kept activations"] == pytest.approx(
        plain.device_bytes_by_kind["kept activations"], rel=0.05
    )
    assert "residuals" not in plain.device_bytes_by_kind
    assert plain.slow_axis_traffic is not None
    assert plain.slow_axis_traffic.sent_bytes == estimated.slow_axis_traffic.exact_bytes // 2


def test_the_report_says_it_before_and_after_compiling(planned):
    result = fit(planned(MESH, zero=2, reduce=INT8), SLICES)
    lines = str(result).splitlines()
    assert "optimizer state: 8 bytes a parameter" in lines
    said = next(line for line in lines if line.startswith("on the wire, replica:"))
    assert "per device and step by reduce int8, 3." in said
    assert said.endswith("s over dcn")
    sent = (
        Collective("all-to-all", ("replica",), 4096, 1, "s8", "main"),
        Collective("all-gather", ("replica",), 2048, 1, "s8", "main"),
        Collective("reduce-scatter", ("fsdp",), 8192, 2, "f32", "main"),
        Collective("all-reduce", None, 1024, 1, "f32", "main"),
    )
    verified = dataclasses.replace(result, report=CompileReport(SLICES, collectives=sent))
    source = "on the wire, according to the compiler, per device and step"
    line = f"{source}: replica 4.00 KiB, fsdp 12.0 KiB, other groups 1.00 KiB"
    assert line in str(verified).splitlines()


def test_rings_send_what_their_formulas_say():
    sent_collectives = [
        Collective(kind, ("fsdp",), 4096, 1, "f32", "main")
        for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
    ]
    each = [sent_bytes_by_axes([one], MeshSpec(fsdp=4))["fsdp"] for one in sent_collectives]
    assert each == [6144, 3072, 3072, 3072, 4096]
    # between slices a gather is listed with what a device hands over
    gather = [Collective("all-gather", ("replica",), 4096, 1, "f32", "main")]
    assert sent_bytes_by_axes(gather, MeshSpec(replica=2, fsdp=4), slice_count=2) == {"replica": 4096}


@pytest.mark.parametrize(
    ("platform", "mesh", "expected"),
    [
        ("tpu v5e:4x4", "replica:2,fsdp:8", ("ici", 50e9)),
        ("gpu h100 x 16", "replica:2,fsdp:8", ("dcn", 50e9)),
        ("gpu a100-80 x 16", "replica:2,fsdp:8", ("", 0.0)),
        ("cpu x 8", "replica:2,fsdp:4", ("", 0.0)),
    ],
)
def test_the_links_of_the_slow_axis(platform, mesh, expected):
    assert slow_link(Platform.parse(platform), MeshSpec.parse(mesh)) == expected


def test_diloco_spreads_its_meetings_over_the_steps_between(planned):
    experiment = dataclasses.replace(planned(MESH, diloco=Diloco(every=10)), steps=100)
    step = described_step(experiment, Platform.parse(SLICES))
    wire = slow_axis_traffic(step, Platform.parse(SLICES))
    assert wire is not None
    assert wire.sent_bytes == pytest.approx(wire.exact_bytes / 10, rel=1e-3)
    assert wire.sender == "diloco every 10 steps"
    device = of_step(step, batch_shapes(experiment), Platform.parse(SLICES)).device_bytes_by_kind
    assert device["outer state"] == step.memory(batch_shapes(experiment))["outer state"]
    assert estimate(planned("fsdp:4"), "tpu v5e:2x2").slow_axis_traffic is None


@pytest.mark.slow
@pytest.mark.parametrize("reduce", ["int8", "powersgd:4"])
def test_this_machine_s_compiler_agrees_in_outline(planned, reduce):
    experiment = planned("replica:2,fsdp:4", zero=2, reduce=Codec.parse(reduce), attention="plain")
    step = build(experiment, devices=jax.devices())
    shapes = batch_shapes(experiment)
    compiled = step.compile(shapes)
    memory = of_step(step, shapes, Platform.parse("cpu x 8"))
    assert sum(item.bytes for item in memory.argument_items) == pytest.approx(compiled.argument_bytes, rel=1e-3)
    real = compiled.argument_bytes + compiled.output_bytes - compiled.alias_bytes + compiled.temp_bytes
    assert 0.6 < memory.device_bytes / real < 1.5, (memory.device_bytes / real, str(memory))
