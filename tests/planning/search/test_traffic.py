"""Collectives in closed form: bytes beside those of compiled steps, and seconds by hand."""

import collections

import pytest

import jaxscale as jx
from jaxscale.compiler.collectives import collectives
from jaxscale.planning.network_traffic import sent_bytes_by_axes
from jaxscale.planning.program import described_step
from jaxscale.planning.search.links import collective_seconds, route
from jaxscale.planning.search.traffic import Sizes, sizes_of, transfers
from jaxscale.platforms.platform import Platform
from jaxscale.recipe.plan import Plan
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.state.batches import batch_shapes
from jaxscale.step.memory_resolve import traced_blocks
from tests.tiers import variants

EXPERIMENT = jx.Experiment(
    "small",
    jx.models.Decoder(vocab=512, context=64, layers=4, embed=64, heads=8, mlp=256),
    jx.data.Text("text.txt", context=64),
    batch=32,
)


def by_kind(transfers_or_collectives):
    """Return the bytes of whole arrays by kind; small sums are left out."""
    byte_counts = collections.Counter()
    for each in transfers_or_collectives:
        byte_counts[each.kind] += each.count * (each.nbytes if hasattr(each, "nbytes") else each.bytes)
    return {kind: count for kind, count in byte_counts.items() if count > 10_000}


@pytest.mark.parametrize(
    "fields",
    variants(
        [
            {"mesh": "data:8", "microbatches": 2},
            {"mesh": "fsdp:8", "zero": 3, "microbatches": 2, "memory": "full"},
            {"mesh": "fsdp:8", "zero": 2, "microbatches": 2},
            {"mesh": "fsdp:8", "zero": 3, "memory": "full"},
        ],
        default=2,
    ),
    ids=str,
)
def test_the_bytes_are_those_of_the_compiled_step(fields):
    plan = Plan(**fields)
    step = jx.build(EXPERIMENT, plan)
    traced = step.step_fn.trace(step.layout.abstract, step.abstract_batch(batch_shapes(EXPERIMENT)))
    compiled = collectives(traced.lower().compile().as_text(), step.mesh)
    alone = described_step(EXPERIMENT, Platform.parse("cpu"), Plan(mesh="1"), 1)
    sizes = sizes_of(alone, traced_blocks(alone.objective))
    assert (sizes.layers, sizes.activation_elements) == (4, 64 * 64)
    modeled = transfers(plan, sizes, 32 // 8 // plan.microbatches, recomputed=float("memory" in fields), chip="cpu")
    assert by_kind(modeled) == pytest.approx(by_kind(compiled), rel=0.02)
    assert sum(sent_bytes_by_axes(compiled, plan.mesh).values()) > 0


def test_an_all_gather_over_a_torus_takes_the_time_of_the_book():
    """2 GB over all chips of a v5p:4x4x4: three rings of 2 x 100 GB/s; and over a line of half a v5e ring."""
    v5p = Platform.parse("tpu v5p:4x4x4")
    assert collective_seconds("all-gather", 2e9, ("fsdp",), MeshSpec(fsdp=64), v5p) == pytest.approx(
        2e9 / 6e11, rel=0.02
    )
    v5e = Platform.parse("tpu v5e:16x16")
    mesh = MeshSpec(fsdp=32, tensor=8)
    seconds = collective_seconds("all-gather", 1e9, ("tensor",), mesh, v5e)
    assert seconds == pytest.approx(7 / 8 * 1e9 / 50e9, rel=0.01)
    assert collective_seconds("all-reduce", 1e9, ("tensor",), mesh, v5e) == pytest.approx(2 * seconds)
    assert collective_seconds("reduce-scatter", 1e9, ("tensor",), mesh, v5e) == pytest.approx(seconds)
    ring = MeshSpec(fsdp=16, tensor=16)
    assert collective_seconds("all-to-all", 1e8, ("tensor",), ring, v5e) == pytest.approx(4 * 1e8 / 1e11, rel=0.01)


def test_hosts_and_slices_share_their_network():
    h100 = Platform.parse("gpu h100 x 16")
    across = route(("fsdp",), MeshSpec(fsdp=16), h100)
    assert (across.local_count, across.parts, across.slowest_link_name) == (8, 2, "dcn")
    seconds = collective_seconds("all-gather", 8e9, ("fsdp",), MeshSpec(fsdp=16), h100)
    assert seconds == pytest.approx(
        7 / 8 * 8e9 / 450e9, rel=0.02
    )  # NVLink is the slower part: 8 cards carry half of it
    alone = collective_seconds("all-reduce", 8e9, ("data",), MeshSpec(data=2, fsdp=8), h100)
    assert alone == pytest.approx(8e9 / 50e9, rel=0.01)
    slices = Platform.parse("tpu v5e:4x4 x 2")
    gradient = collective_seconds("all-reduce", 1e9, ("replica",), MeshSpec(replica=2, fsdp=16), slices)
    assert gradient == pytest.approx(1e9 / (25e9 / 8), rel=0.01)
    assert collective_seconds("all-gather", 1e9, ("fsdp",), MeshSpec(fsdp=8), Platform.parse("cpu x 8")) == 0
    assert collective_seconds("all-gather", 1e9, ("data",), MeshSpec(fsdp=8), h100) == 0


def test_tensor_sequence_and_pipe_axes_send_activations():
    sizes = Sizes(block_weights=1000, other_weights=200, layers=2, activation_elements=64, kv_elements=16)
    plan = Plan(mesh="tensor:2", sequence_parallel=True, precision="bfloat16")
    sent = [(t.kind, t.count, t.passes) for t in transfers(plan, sizes, 3, recomputed=1.0)]
    assert sent == [
        ("all-gather", 4, "forward"), ("reduce-scatter", 4, "forward"),
        ("all-gather", 8, "backward"), ("reduce-scatter", 6, "backward"),
    ]  # fmt: skip
    piped = transfers(Plan(mesh="pipe:2", pipeline="1f1b:2x4", microbatches=4), sizes, 1)
    assert [(t.count, t.nbytes) for t in piped if t.purpose == "stages"] == [(4, 256), (4, 256)]
    sharded = transfers(Plan(mesh="pipe:2,fsdp:2", zero=3, pipeline="1f1b:2x4", microbatches=4), sizes, 1)
    # branches of the loop over ticks: each runs once for each of 4 microbatches and 2 blocks
    assert [t.count for t in sharded if t.axes == ("fsdp",) and t.nbytes == 4 * 500] == [8, 8, 8]
    split = {t.purpose for t in transfers(Plan(mesh="sequence:2"), sizes, 1)}
    assert split == {"gradients", "sequence"}
