"""The pieces of a step: which there are, and what the compiler says of one compiled by itself."""

import jax
import pytest

import jaxscale as jx
from jaxscale.errors import UserError
from jaxscale.memory.plan import MemoryPlan
from jaxscale.planning import compile_pieces
from jaxscale.planning.compile_pieces import lowered_piece, pieces_of
from jaxscale.planning.estimate import estimate, of_step
from jaxscale.planning.fit import fit
from jaxscale.planning.program import described_step, traced_step
from jaxscale.platforms.platform import Platform
from jaxscale.state.batches import batch_shapes

CPU = Platform.parse("cpu x 4")
NAMES = ["forward blocks", "loss", "backward blocks"]


def traced(experiment):
    return traced_step(described_step(experiment, CPU), batch_shapes(experiment), CPU)


def test_the_pieces_of_a_step(planned):
    program = traced(planned(memory=MemoryPlan("full"))).program
    pieces = pieces_of(program)
    assert [piece.name for piece in pieces] == NAMES
    assert all(piece.path == () for piece in pieces)
    forward, loss, backward = pieces
    assert program.operations[forward.start].loop_body is not None
    assert program.operations[backward.start].params["reverse"]
    assert loss.indices == range(forward.stop, backward.start)


def test_microbatches_are_a_loop_around_them(planned):
    pieces = pieces_of(traced(planned(microbatches=2)).program)
    assert [piece.name for piece in pieces] == NAMES
    assert len({piece.path for piece in pieces}) == 1
    assert len(pieces[0].path) == 1


def test_pieces_have_names_of_their_own(planned):
    pieces = pieces_of(traced(planned(loss_chunk=32, memory=MemoryPlan("sqrt"))).program)
    assert len({piece.name for piece in pieces}) == len(pieces)


def test_what_was_measured_takes_the_place_of_the_formula(planned):
    experiment = planned(memory=MemoryPlan("full"), attention="plain")
    step, shapes = described_step(experiment, CPU), batch_shapes(experiment)
    asked = []

    def measure(piece, size=10 * 2**20):
        asked.append(piece.name)
        return size

    formula = of_step(step, shapes, CPU)
    found = of_step(step, shapes, CPU, measure)
    assert len(set(asked)) == len(asked)
    assert set(asked) == set(found.compiled_piece_names)
    assert found.timeline.peak.piece.name == asked[-1]
    assert 10 * 2**20 < found.timeline.peak_bytes < 10 * 2**20 + formula.timeline.peak_bytes
    # what is said of one piece changes no other
    nothing = of_step(step, shapes, CPU, lambda piece: 0)
    assert set(nothing.compiled_piece_names) >= {formula.timeline.peak.piece.name}
    assert nothing.timeline.peak_bytes < formula.timeline.peak_bytes


def test_every_piece_is_a_program(planned):
    experiment = planned(memory=MemoryPlan("dots"), zero=3, precision="bfloat16", microbatches=2)
    for piece in pieces_of(traced(experiment).program):
        lowered = lowered_piece(jax.devices()[:4], lambda: experiment, CPU, experiment.plan, piece)
        text = lowered.as_text()
        assert "mesh" in text
        assert ("while" in text) == ("blocks" in piece.name)


@pytest.mark.slow
def test_the_compiler_s_word_on_a_piece(planned):
    experiment = planned(memory=MemoryPlan("full"), attention="plain")
    found = fit(experiment, CPU, limit=2**30, compile_block=True)
    assert found.estimate.compiled_piece_names
    assert f"by estimate, {' and '.join(found.estimate.compiled_piece_names)} compiled" in found.verdict
    assert 0.5 < found.device_bytes / estimate(experiment, CPU).device_bytes < 2


def test_blocks_in_no_loop_have_no_piece(planned):
    experiment = planned(memory=MemoryPlan.parse("revolve:2"))
    with pytest.raises(UserError, match="compile-block: the model's blocks do not run in a loop"):
        estimate(experiment, CPU, compile_block=True)


def test_a_piece_with_a_part_for_one_device_is_refused(monkeypatch):
    """Attention of a GPU is written for one device, and the blocks of the forward pass end with what leaves it."""
    platform = Platform.parse("gpu h100 x 4")
    plan = jx.Plan(mesh="fsdp:4", zero=3, precision="bfloat16")
    model = jx.models.Decoder(vocab=64, context=64, layers=2, embed=64, heads=2)
    experiment = jx.Experiment("small", model, jx.data.Text("text.txt", context=64), batch=8, plan=plan)
    step = described_step(experiment, platform)
    forward = pieces_of(traced_step(step, batch_shapes(experiment), platform).program)[0]
    monkeypatch.setattr(compile_pieces, "build", lambda *_, **__: step)  # its devices are absent
    with pytest.raises(UserError, match=r"cannot compile 'forward blocks' alone: .* \(jax.shard_map\)"):
        lowered_piece((), lambda: experiment, platform, plan, forward)
