"""The schedule of a compiled TPU program: every spelling of transfers, on programs written by hand."""

import dataclasses

import pytest

from jaxscale.compiler.hlo_program import HloProgram
from jaxscale.compiler.schedule import ProgramEvent, ProgramSchedule, schedule_of
from jaxscale.values import from_json, to_json

CYCLES = 'backend_config={"window_config":{"estimated_cycles":"%d"}}'
PROGRAM = f"""
%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}}

%start_fusion (p: bf16[8,4]) -> (bf16[8,4], bf16[32,4]) {{
  %p = bf16[8,4]{{1,0}} parameter(0)
  %gather = bf16[32,4]{{1,0}} all-gather(%p), channel_id=3, replica_groups=[2,4]<=[8], dimensions={{0}}
  ROOT %started = (bf16[8,4]{{1,0}}, bf16[32,4]{{1,0}}) custom-call(%gather), custom_call_target="AsyncCollectiveStart"
}}

%beside_fusion (q: (bf16[8,4], bf16[32,4])) -> (bf16[8,4], bf16[32,4]) {{
  %q = (bf16[8,4]{{1,0}}, bf16[32,4]{{1,0}}) parameter(0)
  %part = bf16[8,4]{{1,0}} get-tuple-element(%q), index=0
  %again = bf16[32,4]{{1,0}} all-gather(%part), channel_id=3, replica_groups=[2,4]<=[8], dimensions={{0}}
  ROOT %rest = (bf16[8,4]{{1,0}}, bf16[32,4]{{1,0}}) tuple(%part, %again)
}}

%done_fusion (r: bf16[8,4]) -> bf16[32,4] {{
  %r = bf16[8,4]{{1,0}} parameter(0)
  %last = bf16[32,4]{{1,0}} all-gather(%r), channel_id=3, replica_groups=[2,4]<=[8], dimensions={{0}}
  ROOT %ended = bf16[32,4]{{1,0}} custom-call(%last), custom_call_target="AsyncCollectiveDone"
}}

%all-reduce-scatter (s: f32[8,4]) -> f32[2,4] {{
  %s = f32[8,4]{{1,0}} parameter(0)
  %sum = f32[8,4]{{1,0}} all-reduce(%s), channel_id=5, replica_groups=[2,4]<=[8], to_apply=%add
  %zero = s32[] constant(0)
  ROOT %slice = f32[2,4]{{1,0}} dynamic-slice(%sum, %zero, %zero), dynamic_slice_sizes={{2,4}}
}}

%body (state: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {{
  %state = (s32[], f32[8,4]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[8,4]{{1,0}} get-tuple-element(%state), index=1
  %two = s32[] constant(2)
  %next = s32[]{{:T(128)S(6)}} add(%i, %two)
  %sent = (f32[8,4]{{1,0}}, f32[8,4]{{1,0}}) collective-permute-start(%x), source_target_pairs={{{{1,0}},{{2,1}}}}
  %y = f32[8,4]{{1,0}} fusion(%x), kind=kOutput, calls=%add, {CYCLES % 100}
  %z = f32[8,4]{{1,0}} fusion(%y), kind=kOutput, calls=%add, {CYCLES % 20}
  %got = f32[8,4]{{1,0}} collective-permute-done(%sent)
  ROOT %out = (s32[], f32[8,4]{{1,0}}) tuple(%next, %got)
}}

%condition (state.1: (s32[], f32[8,4])) -> pred[] {{
  %state.1 = (s32[], f32[8,4]{{1,0}}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %bound = s32[] constant(6)
  ROOT %less = pred[] compare(%i.1, %bound), direction=LT
}}

%small (t: f32[8,4]) -> f32[8,4] {{
  %t = f32[8,4]{{1,0}} parameter(0)
  ROOT %u = f32[8,4]{{1,0}} fusion(%t), kind=kLoop, calls=%add, {CYCLES % 5}
}}

%large (v: f32[8,4]) -> f32[8,4] {{
  %v = f32[8,4]{{1,0}} parameter(0)
  ROOT %w = f32[8,4]{{1,0}} fusion(%v), kind=kLoop, calls=%add, {CYCLES % 7}
}}

ENTRY %main (m: bf16[8,4], n: f32[8,4], k: pred[]) -> f32[2,4] {{
  %m = bf16[8,4]{{1,0}} parameter(0)
  %n = f32[8,4]{{1,0}} parameter(1)
  %k = pred[] parameter(2)
  %host = (f32[8,4]{{1,0:S(5)}}, f32[8,4]{{1,0}}, u32[]) copy-start(%n)
  %near = (f32[8,4]{{1,0:S(1)}}, f32[8,4]{{1,0}}, u32[]) copy-start(%n)
  %begun = (bf16[8,4]{{1,0}}, bf16[32,4]{{1,0}}) fusion(%m), kind=kCustom, calls=%start_fusion
  %beside = (bf16[8,4]{{1,0}}, bf16[32,4]{{1,0}}) fusion(%begun), calls=%beside_fusion, {CYCLES % 900}
  %part.1 = bf16[8,4]{{1,0}} get-tuple-element(%beside), index=0
  %whole = bf16[32,4]{{1,0}} fusion(%part.1), kind=kCustom, calls=%done_fusion
  %near.1 = f32[8,4]{{1,0:S(1)}} copy-done(%near)
  %kernel = f32[8,4]{{1,0}} custom-call(%near.1), custom_call_target="tpu_custom_call",
    backend_config={{"cost_estimate":{{"flops":"4000","transcendentals":"0","bytes_accessed":"256"}}}}
  %silent = f32[8,4]{{1,0}} custom-call(%kernel), custom_call_target="tpu_custom_call"
  %rows = f32[8,4]{{1,0}} fusion(%kernel), kind=kCustom, calls=%add
  %zero.1 = s32[] constant(0)
  %pair = (s32[], f32[8,4]{{1,0}}) tuple(%zero.1, %rows)
  %loop = (s32[], f32[8,4]{{1,0}}) while(%pair), condition=%condition, body=%body
  %result = f32[8,4]{{1,0}} get-tuple-element(%loop), index=1
  %either = f32[8,4]{{1,0}} conditional(%k, %result, %result), true_computation=%small, false_computation=%large
  %host.1 = f32[8,4]{{1,0:S(5)}} copy-done(%host)
  ROOT %shard = f32[2,4]{{1,0}} fusion(%either), kind=kCustom, calls=%all-reduce-scatter
}}
"""
MESH = {"data": 2, "fsdp": 4}


@pytest.fixture(scope="module")
def schedule() -> ProgramSchedule:
    program_schedule = schedule_of(HloProgram(PROGRAM), MESH)
    assert program_schedule is not None
    return program_schedule


def test_events_in_their_order(schedule: ProgramSchedule):
    """Each spelling of a transfer starts and ends where the program runs it; fused parts of one are no further ones."""
    moved = 2 * 8 * 4 * 4  # an instruction without an estimate reads and writes as much as its result
    assert schedule.computations["main"] == (
        ProgramEvent("start", bytes=128, name="host", transfer="host copy"),
        ProgramEvent("start", bytes=128, name="near", transfer="memory copy"),
        ProgramEvent("start", bytes=256, name="begun", transfer="all-gather", axes=("fsdp",)),
        ProgramEvent("compute", cycles=900),
        ProgramEvent("done", name="begun"),
        ProgramEvent("done", name="near"),
        ProgramEvent("kernel", flop=4000, bytes=256),
        ProgramEvent("kernel", bytes=moved),
        ProgramEvent("memory", bytes=moved),
        ProgramEvent("loop", name="body", trips=3),
        ProgramEvent("loop", name="large"),
        ProgramEvent("done", name="host"),
        ProgramEvent("start", bytes=128, name="shard", transfer="reduce-scatter", axes=("fsdp",)),
        ProgramEvent("done", name="shard"),
    )


def test_loop_and_branch(schedule: ProgramSchedule):
    """A counter that rises by 2 up to 6 makes three trips; of branches, the one with the most cycles counts."""
    assert schedule.computations["body"] == (
        ProgramEvent("start", bytes=128, name="sent", transfer="collective-permute", axes=("fsdp",), direction=-1),
        ProgramEvent("compute", cycles=120),
        ProgramEvent("done", name="sent"),
    )
    assert schedule.cycles() == 900 + 3 * 120 + 7
    assert schedule.cycles("body") == 120


def test_programs_without_estimates():
    """A program of a CPU or GPU has no schedule."""
    bare = PROGRAM.replace("estimated_cycles", "cycles")
    assert schedule_of(HloProgram(bare), MESH) is None


def test_json(schedule: ProgramSchedule):
    """A schedule is part of the report that a child process writes."""
    assert from_json(ProgramSchedule, to_json(schedule), "the test") == schedule


def test_step_of_a_counter():
    """The trips of a loop are its bound over the step of its counter, rounded up; without a step, the bound."""

    def trips(text: str) -> int | None:
        program = HloProgram(text)
        return program.trip_count(program.computations["main"].instructions["loop"])

    assert trips(PROGRAM) == 3
    assert trips(PROGRAM.replace("%bound = s32[] constant(6)", "%bound = s32[] constant(7)")) == 4
    assert trips(PROGRAM.replace("add(%i, %two)", "add(%i, %i)")) == 6
    assert trips(PROGRAM.replace("direction=LT", "direction=NE")) is None


def test_a_transfer_that_ends_elsewhere(schedule: ProgramSchedule):
    """An end without its start in the same computation keeps its name; whoever times it finds nothing to wait for."""
    text = PROGRAM.replace("copy-done(%near)", "copy-done(%elsewhere)")
    changed = schedule_of(HloProgram(text), MESH)
    assert changed is not None
    assert ProgramEvent("done", name="elsewhere") in changed.computations["main"]
    assert dataclasses.replace(changed, computations={}) == ProgramSchedule("main", {})
