"""What a pipelined step sends, as the TPU's own compiler has it: on one slice, and with the pipe across two."""

import functools

import pytest

from jaxscale.compiler.compile import compile_report
from jaxscale.models.decoder import Decoder
from jaxscale.planning.program import lowered_step
from jaxscale.platforms.platform import Platform
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.values import override
from tests.plans import grouped

pytestmark = pytest.mark.slow
pytest.importorskip("libtpu")

LENGTH, VOCAB, EMBED = 128, 1024, 256


class Tokens:
    """Batches of which only the shapes are asked for."""

    def shapes(self, rows):
        return dict.fromkeys(("tokens", "targets"), ((rows, LENGTH), "int32"))


def experiment(tied=True):
    model = Decoder(vocab=VOCAB, context=LENGTH, layers=4, embed=EMBED, heads=2, tied=tied)
    return Experiment("compiled", model, Tokens(), batch=32)


def report(platform, tied=True, **changes):
    plan = override(Plan(precision="bfloat16"), grouped(changes))
    return compile_report(
        functools.partial(lowered_step, make=functools.partial(experiment, tied), plan=plan), Platform.parse(platform)
    )


@pytest.mark.parametrize("zero", ["1", "2"])
def test_gradients_cross_the_data_axes_once(zero):
    found = report("tpu v5e:2x4", pipeline="1f1b:2x4", mesh="data:2,fsdp:2", zero=zero).collectives
    inside = [one for one in found if one.in_loop]
    assert {(one.kind, one.axes) for one in inside} == {("collective-permute", ("pipe",))}
    outside = [one for one in found if not one.in_loop and set(one.axes or ()) & {"data", "fsdp"}]
    assert outside
    assert all(one.count == 1 for one in outside)


def test_across_slices_go_messages_scalars_and_what_stages_share_once():
    found = report("tpu v5e:2x2 x 2", pipeline="1f1b:2x4", mesh="fsdp:4", zero="1").collectives
    crossing = [one for one in found if "pipe" in (one.axes or ("pipe",))]
    inside, outside = ([one for one in crossing if one.in_loop == loop] for loop in (True, False))
    rows = 32 // 4 // 4
    assert {(one.kind, one.bytes) for one in inside} == {("collective-permute", rows * LENGTH * EMBED * 2)}
    table = VOCAB * EMBED
    gathers = [one for one in outside if one.kind == "all-gather"]
    scatters = [one for one in outside if one.kind == "reduce-scatter" and one.bytes == 4 * table]
    assert len(scatters) == 1
    assert all(one.count == 1 for one in outside)
    # the rest: the table's shard, in bfloat16, gains and biases, and scalars
    assert sum(one.bytes for one in gathers) <= 2 * table // 4
    left = sum(one.bytes for one in outside) - sum(one.bytes for one in (*gathers, *scatters))
    assert left < 0.5 * 4 * table


@pytest.mark.parametrize("changes", [{}, {"pipeline": "1f1b:2x4"}, {"pipeline": "interleaved:2x4,v=2", "zero": "3"}])
def test_weights_on_the_host_are_no_arguments_of_the_device(changes):
    changes = {"mesh": "fsdp:4" if "zero" in changes else "data:4", "optimizer_state": "streamed", **changes}
    here, there = report("tpu v5e:2x4", **changes), report("tpu v5e:2x4", weights="host", **changes)
    blocks = 4 * 12 * EMBED**2 * 4 // (1 if changes["mesh"] == "data:4" else 4)
    blocks //= 2 if "pipeline" in changes else 1
    assert there.host_argument_bytes >= here.host_argument_bytes + blocks
    assert there.argument_bytes <= here.argument_bytes - blocks


def test_stages_that_update_on_their_way_send_codes():
    compiled_step = report("tpu v5e:2x4", False, pipeline="2bw:2x4", mesh="replica:2,data:2", reduce="int8")
    slow = [one for one in compiled_step.collectives if "replica" in (one.axes or ())]
    assert {one.kind for one in slow if one.dtype == "s8"} == {"all-to-all", "all-gather"}
    coded = sum(one.bytes * one.count for one in slow if one.dtype == "s8")
    assert sum(one.bytes * one.count for one in slow if one.dtype == "f32") < 0.1 * coded
