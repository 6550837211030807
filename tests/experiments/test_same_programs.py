"""Two records of one program are identical whatever its instructions are called; another program is none."""

import copy
import json

import pytest
from same_programs import COLLECTIVE, PLANS, compared, stripped

PROGRAM = """HloModule jit_step, is_scheduled=true

%region_1.2 (a: f32[], b.3: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b.3 = f32[] parameter(1)
  ROOT %add.4 = f32[] add(%a, %b.3), metadata={op_name="jit(step)/add{x}" source_line=3}
}

ENTRY %main.9 (p.1: f32[8]) -> f32[8] {
  %p.1 = f32[8]{0} parameter(0)
  ROOT %all-reduce.7 = f32[8]{0} all-reduce(%p.1), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%region_1.2
}
"""


def test_names_and_metadata_do_not_count_and_operations_do():
    renamed = PROGRAM.replace("add.4", "sum").replace("p.1", "weights.12").replace("b.3", "c")
    renamed = renamed.replace("jit_step", "jit_other").replace("source_line=3", "source_line=40")
    assert stripped(renamed) == stripped(PROGRAM)
    assert stripped(PROGRAM.replace("add(", "subtract(")) != stripped(PROGRAM)
    assert stripped(PROGRAM.replace("add(%a, %b.3)", "add(%b.3, %a)")) != stripped(PROGRAM)


def test_a_collective_is_counted_with_its_groups():
    assert COLLECTIVE.findall(stripped(PROGRAM)) == [("f32[8]{0}", "all-reduce", "{{0,1},{2,3}}")]


RECORD = {
    "plan": "--plan.zero 3",
    "programs": [{"hlo": "a", "flop": 8.0, "temp": 1000, "arguments": 500, "collectives": {"all-reduce": 1}}],
    "losses": [(2.5).hex()],
    "norms": [(1.0).hex()],
}


@pytest.mark.parametrize(
    ("figures", "losses", "verdict"),
    [
        ({}, {}, "identical"),
        ({"hlo": "b"}, {}, "alike"),
        ({"hlo": "b", "temp": 1009}, {}, "alike"),
        ({"hlo": "b", "temp": 1011}, {}, "fault"),
        ({"hlo": "b", "flop": 9.0}, {}, "fault"),
        ({"hlo": "b", "collectives": {"all-reduce": 2}}, {}, "fault"),
        ({}, {"norms": [(1.00001).hex()]}, "fault"),
        ({}, {"error": "UserError: refused"}, "fault"),
    ],
)
def test_a_verdict_on_two_records(figures, losses, verdict):
    other = {**copy.deepcopy(RECORD), **losses}
    other["programs"][0] |= figures
    assert compared(RECORD, other)[0] == verdict
    assert compared(RECORD, None)[0] == "fault"


def test_forty_plans_lie_beside_it():
    rows = json.loads(PLANS.read_text())
    assert len(rows) == 40
    assert len({json.dumps(row["techniques"]) for row in rows}) == 40
