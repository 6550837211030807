"""Estimates against the compiled step of this machine, and against sums that must hold anywhere."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxscale.memory.plan import MemoryPlan
from jaxscale.planning.estimate import of_step
from jaxscale.planning.program import described_step
from jaxscale.platforms.platform import Platform
from jaxscale.state.batches import batch_shapes
from jaxscale.step.build import build
from jaxscale.trees import named_leaves
from tests.tiers import variants
from tests.traced_once import estimate

V5E = "tpu v5e:2x2"


def test_arguments_are_exact(planned):
    experiment = planned(zero=3, precision="bfloat16")
    found = estimate(experiment, "cpu x 4")
    step = build(experiment, devices=jax.devices()[:4])
    batch = {name: np.zeros((8, 128), np.int32) for name in ("tokens", "targets")}
    compiled = step.compile(batch)
    assert sum(item.bytes for item in found.argument_items) == pytest.approx(compiled.argument_bytes, rel=1e-3)
    told = step.memory(batch)
    assert found.device_bytes_by_kind["parameters"] == told["parameters"]
    assert found.device_bytes_by_kind["optimizer state"] == told["optimizer"]
    assert found.device_bytes_by_kind["batch"] == told["batch"]


@pytest.mark.parametrize("memory", variants(["none", "dots", "full"], default=1))
def test_this_machine_s_compiler_agrees_in_outline(planned, memory):
    """XLA:CPU fuses and schedules as no accelerator's compiler does; half as much again is as near as it comes."""
    experiment = planned(memory=MemoryPlan(memory), attention="plain")
    step = build(experiment, devices=jax.devices()[:4])
    shapes = batch_shapes(experiment)
    compiled = step.compile(shapes)
    found = of_step(step, shapes, Platform.parse("cpu x 4"))
    real = compiled.argument_bytes + compiled.output_bytes - compiled.alias_bytes + compiled.temp_bytes
    assert 0.6 < found.device_bytes / real < 1.5


def test_a_described_step_is_the_step(planned):
    """What is traced for described devices is what would be traced for them."""
    experiment = planned(zero=3)
    here = build(experiment, devices=jax.devices()[:4])
    there = described_step(experiment, Platform.parse("cpu x 4"))
    shapes = batch_shapes(experiment)
    programs = [
        jax.make_jaxpr(step.step_fn)(step.layout.abstract, step.abstract_batch(shapes)).pretty_print(use_color=False)
        for step in (here, there)
    ]
    assert len({len(text.splitlines()) for text in programs}) == 1
    platform = Platform.parse("cpu x 4")
    assert of_step(here, shapes, platform).device_bytes_by_kind == of_step(there, shapes, platform).device_bytes_by_kind


def test_remat_trades_bytes_for_flop(planned):
    none, dots, full = (
        estimate(planned(memory=MemoryPlan(rule), precision="bfloat16", attention="plain"), V5E)
        for rule in ("none", "dots", "full")
    )
    assert (
        none.device_bytes_by_kind["kept activations"]
        > dots.device_bytes_by_kind["kept activations"]
        > full.device_bytes_by_kind["kept activations"]
    )
    assert none.flop == dots.flop < full.flop


def test_kept_activations_of_full_are_the_blocks_inputs(planned):
    found = estimate(planned(memory=MemoryPlan("full"), precision="bfloat16", zero=3), V5E)
    kept = [item.bytes for item in found.timeline.peak_items if item.kind == "kept activations"]
    rows, layers = 8 // 4, 4
    assert max(kept) == layers * rows * 128 * 128 * 2


def test_more_devices_take_less_each(planned):
    few, many = (estimate(planned(f"fsdp:{n}", zero=3, precision="bfloat16"), "tpu v5e:2x4") for n in (4, 8))
    assert many.device_bytes < 0.6 * few.device_bytes
    assert many.device_bytes_by_kind["optimizer state"] == pytest.approx(
        few.device_bytes_by_kind["optimizer state"] / 2, rel=0.01
    )


def test_zero_splits_what_it_says(planned):
    stages = [estimate(planned(zero=stage, precision="bfloat16"), V5E).device_bytes_by_kind for stage in range(4)]
    assert stages[1]["optimizer state"] == pytest.approx(stages[0]["optimizer state"] / 4, rel=0.01)
    assert stages[3]["parameters"] == pytest.approx(stages[0]["parameters"] / 4, rel=0.01)
    assert sum(stages[3].values()) < sum(stages[2].values()) <= sum(stages[1].values()) < sum(stages[0].values())


def test_new_weights_of_blocks_are_gathered_beside_the_old_ones_on_gpus_that_hide_latency(planned):
    def gathered(platform, **fields):
        end = estimate(planned(**fields), platform).timeline.moments[-1]
        return sum(item.bytes for item in end.items if item.kind == "gathered weights")

    step = described_step(planned(zero=2), Platform.parse("gpu h100 x 4"))
    blocks = [leaf for name, leaf in named_leaves(step.layout.abstract.params).items() if name.startswith("blocks/")]
    split_bytes = sum(leaf.size * 4 for leaf in blocks if leaf.ndim == 3)  # norms are split too, but are small
    assert gathered("gpu h100 x 4", zero=2) == pytest.approx(split_bytes * 5 / 4, rel=0.02)
    assert gathered("gpu h100 x 4", zero=2) == gathered("gpu h100 x 4", zero=1)
    assert gathered("gpu a100-40 x 4", zero=2) == gathered(V5E, zero=2) == 0
    assert gathered("gpu h100 x 4", zero=3) == gathered("gpu h100 x 4", zero=2, precision="bfloat16") == 0


def test_a_chunked_loss_holds_a_chunk(planned):
    def taken(chunk: int | None) -> int:
        experiment = planned(loss_chunk=chunk, memory=MemoryPlan("full"))
        model = dataclasses.replace(experiment.model, vocab=16_384, layers=1)
        return estimate(dataclasses.replace(experiment, model=model, batch=64), V5E).device_bytes

    assert taken(16) < 0.8 * taken(None)


def test_microbatches_divide_activations(planned):
    one, two = (estimate(planned(microbatches=n, precision="bfloat16"), V5E) for n in (1, 2))
    assert two.device_bytes_by_kind["kept activations"] == pytest.approx(
        one.device_bytes_by_kind["kept activations"] / 2, rel=0.1
    )
    assert two.device_bytes_by_kind["gradients"] >= one.device_bytes_by_kind.get("gradients", 0)


def test_offloaded_state_counts_on_the_host(planned):
    here, there = (estimate(planned(zero=3, optimizer_state=place), V5E) for place in ("device", "streamed"))
    moved = here.device_bytes_by_kind["optimizer state"] - there.device_bytes_by_kind.get("optimizer state", 0)
    assert there.host_bytes_by_kind["optimizer state"] == pytest.approx(moved, rel=0.01)
    assert there.host_bytes_by_kind["second copy"] == there.host_bytes_by_kind["optimizer state"]
    assert "optimizer state" not in here.host_bytes_by_kind


def test_the_host_holds_a_checkpoint_while_it_is_written(planned):
    found = estimate(planned(zero=3), V5E)
    kinds = ("parameters", "optimizer state", "model state")
    assert found.host_bytes_by_kind == {"checkpoint": sum(found.device_bytes_by_kind[kind] for kind in kinds)}


def test_it_adds_up_and_prints(planned):
    found = estimate(planned(), V5E)
    assert found.device_bytes == sum(found.device_bytes_by_kind.values())
    lines = str(found).splitlines()
    assert lines[-1].startswith("total")
    assert {line.split("  ")[0] for line in lines[1:-1]} == {*found.device_bytes_by_kind, *found.host_bytes_by_kind}


def test_data_without_shapes_is_opened(experiment):
    class Opened:
        def train(self):
            return iter([{"tokens": np.zeros((8, 128), np.int32)}])

    class Data:
        def open(self, batch, seed):
            return Opened()

    shapes = batch_shapes(dataclasses.replace(experiment, data=Data()))
    assert {name: (leaf.shape, str(leaf.dtype)) for name, leaf in shapes.items()} == {"tokens": ((8, 128), "int32")}
