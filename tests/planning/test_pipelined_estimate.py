"""Estimates of pipelined steps: what hands on from tick to tick, branches, seconds; recorded programs."""

import dataclasses
import json
import statistics
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jaxscale.pipeline.plan import PipelinePlan
from jaxscale.pipeline.run.tables import tabulate
from jaxscale.planning import accuracy
from jaxscale.planning.estimate import estimate
from jaxscale.planning.fit import fit
from jaxscale.planning.fusion import Compiler
from jaxscale.planning.timeline import timeline
from jaxscale.programs.flat import flatten
from jaxscale.programs.placements import place
from jaxscale.records.source import load_file
from tests.plans import plan_of

V5E = "tpu v5e:2x2"
BENCHMARKS = Path(__file__).parents[2] / "experiments" / "benchmarks"
KB = 32 * 32 * 4
X = jax.ShapeDtypeStruct((2 * 32, 32), jnp.float32)  # 4 KB on each of two devices


def walked(body, **properties):
    """Live bytes of a function of one device's part of X, in a region that is manual over the pipe axis."""
    mesh = AbstractMesh((2,), ("pipe",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("pipe")
    run = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"pipe"}, check_vma=False)
    program = flatten(jax.make_jaxpr(run)(X))
    placed = place(program, [(("pipe",), ())], {"pipe": 2})
    return timeline(program, placed, Compiler("all", **properties))


def branched(*branches):
    """A loop over ticks that takes a branch in each, on a pool of three slots."""

    def body(x):
        pool = jnp.zeros((3, *x.shape))

        def tick(pool, turn):
            return jax.lax.switch(turn % len(branches), [lambda pool, f=f: f(pool, x) for f in branches], pool), None

        pool, _ = jax.lax.scan(tick, pool, jnp.arange(4))
        return pool[0]

    return walked(body)


def idle(pool, x):
    return pool


def little(pool, x):
    return jax.lax.dynamic_update_index_in_dim(pool, x @ x, 1, 0)


def much(pool, x):
    a, b, c = (x @ (x + n) for n in range(3))
    return jax.lax.dynamic_update_index_in_dim(pool, (a @ b) @ (b @ c) + a, 1, 0)


def test_a_pool_lies_once_whoever_writes_it():
    found = branched(idle, little)
    assert found.peak_bytes // KB == 3 + 1  # the pool, and the product on its way into it; scalars
    assert {item.kind for item in found.peak_items} == {"gradients", "transients"}  # it is read after the loop


def test_the_branch_that_needs_the_most_decides():
    one, other = branched(idle, much), branched(much, little, idle)
    assert one.peak_bytes == other.peak_bytes > branched(idle, little).peak_bytes


def test_shapes_within_are_of_a_device():
    assert walked(lambda x: (x @ x.T) @ x).peak_bytes == 2 * KB
    assert walked(lambda x: jax.lax.psum(jnp.sin(x), "pipe") * x).peak_bytes == 2 * KB  # what is sent, and what comes


def test_a_tpu_7x_stores_a_gradient_that_two_products_read():
    def products(x):
        gradient = jnp.sin(x).astype(jnp.bfloat16)
        ones = jnp.ones((32, 32), jnp.bfloat16)
        left, right = gradient @ ones, ones @ gradient
        return (left + right).astype(jnp.float32)

    stored, fused = walked(products, stores_split_operands=True), walked(products)
    assert stored.peak_bytes - fused.peak_bytes == KB // 2
    assert any("bfloat16[32, 32] sin" in item.name for item in stored.peak_items)


@pytest.fixture(scope="module")
def piped(experiment):
    """Device bytes by kind under a pipeline."""

    def make(pipeline, rows=1, **fields):
        plan = PipelinePlan.parse(pipeline)
        batch = rows * plan.shape()[1]
        planned = plan_of(experiment.plan, pipeline=plan, precision="bfloat16", **fields)
        return dataclasses.replace(experiment, plan=planned, batch=batch)

    return make


@pytest.mark.slow
def test_1f1b_is_flat_and_gpipe_grows_by_its_slots(piped):
    message = 128 * 128 * 2  # one row of 128 tokens, 128 wide, in bfloat16

    def stash(pipeline):
        return estimate(piped(pipeline, stash="input"), V5E).device_bytes_by_kind["stash"]

    def slots(pipeline):
        return tabulate(PipelinePlan.parse(pipeline).schedule(), "input").message_slot_count

    assert stash("1f1b:4x8") == stash("1f1b:4x16")
    more = slots("gpipe:4x16") - slots("gpipe:4x8")
    assert more > 0
    assert stash("gpipe:4x16") - stash("gpipe:4x8") == more * message


@pytest.mark.slow
def test_flop_are_those_of_the_passes_whatever_the_schedule(piped, experiment):
    one_f_one_b, gpipe, zero_bubble = (estimate(piped(f"{name}:4x8"), V5E).flop for name in ("1f1b", "gpipe", "zb-h1"))
    plain_plan = plan_of(experiment.plan, microbatches=8, precision="bfloat16", memory="none")
    plain = estimate(dataclasses.replace(experiment, plan=plain_plan, batch=32), V5E).flop / 4  # four rows a microbatch
    assert one_f_one_b == gpipe == zero_bubble
    assert plain < one_f_one_b < 4 / 3 * plain  # the head's products are recomputed


@pytest.mark.slow
def test_seconds_and_margin(piped):
    fit_result = fit(piped("1f1b:4x8"), V5E)
    assert fit_result.simulation is not None
    assert 0.27 < fit_result.simulation.bubble < 0.6  # (p-1)/(m+p-1), and what the head adds to the last stage
    assert "simulated: " in str(fit_result)
    assert fit_result.margin == accuracy.PIPELINED_TPU_MARGIN
    assert "pipelined train steps" in str(fit_result)
    on_cpu = fit(piped("1f1b:4x8"), "cpu x 4")
    assert on_cpu.simulation is None
    assert on_cpu.margin == accuracy.WIDE_MARGIN


@pytest.mark.slow
def test_recorded_programs():
    errors = []
    for row in map(json.loads, (BENCHMARKS / "fit_cases.jsonl").read_text().splitlines()):
        is_asynchronous = row["design"] == "asynchronous"
        if not ("pipelined" in row["design"] or is_asynchronous) or "device" not in row:
            continue
        case = row["case"]
        texts = dict(word.split("=", 1) for word in case["fields"].split()) | {"mesh": case["mesh"]}
        overrides = {f"plan.{name}": text for name, text in texts.items()} | {"batch": str(case["batch"])}
        experiment, _ = load_file(BENCHMARKS / "fit_models.py", case["model"], overrides)
        step_estimate = estimate(experiment, case["platform"])
        errors.append(step_estimate.device_bytes / row["device"] - 1)
        if is_asynchronous:
            assert abs(errors.pop()) <= accuracy.TPU_MARGIN, case
            continue
        is_unseen = row["design"] in ("unseen pipelined TPU", "outside pipelined")  # nothing was fitted on their steps
        assert errors[-1] >= (-0.135 if is_unseen else -0.125), case
        # along a tensor axis, XLA for TPUs may split the residual stream (docs/choosing/fit.md)
        largest_error = accuracy.MARGIN
        if case["platform"].startswith("tpu"):
            has_split_stream = "tensor" in case["mesh"]
            largest_error = accuracy.TPU_MARGIN if is_unseen else largest_error
            largest_error = accuracy.PIPELINED_TPU_MARGIN if has_split_stream else largest_error
        assert errors[-1] <= largest_error, case
    assert len(errors) > 95
    assert statistics.median(map(abs, errors)) <= 0.045
    assert statistics.mean(errors) >= -0.05
