"""A processor's memory moves what its cache cannot hold: kept activations, logits, and sums of gradients."""

import pytest

import jaxscale as jx
from jaxscale.planning.search.model_costs import rated, split_costs
from jaxscale.planning.search.space import Variant
from jaxscale.planning.search.step_seconds import modeled_seconds, step_seconds
from jaxscale.platforms.platform import Platform
from jaxscale.platforms.processor import CACHE_BYTES, LOSS_PASSES, MEMORY_BANDWIDTH, memory_seconds


def test_what_fits_the_cache_costs_nothing_and_the_rest_moves_once_each_way():
    assert memory_seconds(CACHE_BYTES, CACHE_BYTES, 1.0, 4) == 0
    excess_bytes = 3 * 2**20
    assert memory_seconds(CACHE_BYTES + excess_bytes, 0, 1.0, 4) == pytest.approx(
        4 * 2 * excess_bytes / MEMORY_BANDWIDTH
    )
    seconds = memory_seconds(0, CACHE_BYTES + excess_bytes, 1.0, 1)
    assert seconds == pytest.approx(LOSS_PASSES * excess_bytes / MEMORY_BANDWIDTH)


def test_a_chunk_of_the_loss_that_fits_the_cache_costs_nothing_and_one_that_does_not_repeats_its_excess():
    loss_bytes = 4 * CACHE_BYTES
    assert memory_seconds(0, loss_bytes, 0.25, 1) == 0
    halves = memory_seconds(0, loss_bytes, 0.5, 1)
    assert halves == pytest.approx(LOSS_PASSES * 2 * CACHE_BYTES / MEMORY_BANDWIDTH)
    assert halves < memory_seconds(0, loss_bytes, 1.0, 1)


def test_a_processor_has_an_item_for_its_memory_and_an_accelerator_has_none():
    model = jx.models.Decoder(vocab=2048, context=128, layers=2, embed=64, heads=4)
    experiment = jx.Experiment("wide", model, jx.data.Text("text.txt", context=128), batch=64)
    whole, chunked = jx.Plan(mesh="1"), jx.Plan(mesh="1", kernels="loss_chunk=16")
    on_cpu = {plan: modeled_seconds(experiment, Platform.parse("cpu"), plan).items for plan in (whole, chunked)}
    assert on_cpu[whole]["memory"] > on_cpu[chunked].get("memory", 0)
    assert on_cpu[whole]["head"] < on_cpu[chunked]["head"]  # a chunk computes its products again
    assert "memory" not in modeled_seconds(experiment, Platform.parse("gpu h100"), whole).items


def test_a_chunked_plan_has_the_seconds_that_the_search_gives_to_its_layout():
    model = jx.models.Decoder(vocab=2048, context=128, layers=2, embed=64, heads=4)
    experiment = jx.Experiment("wide", model, jx.data.Text("text.txt", context=128), batch=64)
    platform, chunked = Platform.parse("cpu"), jx.Plan(mesh="1", kernels="loss_chunk=64")
    costs = split_costs(experiment, rated(platform), jx.Plan(mesh="1"), 1, 1)  # of the plan without a chunk
    searched = step_seconds(chunked, Variant.of(chunked), costs.kept(chunked.memory, 64), costs, rated(platform))
    assert modeled_seconds(experiment, platform, chunked).items == pytest.approx(searched.items)
