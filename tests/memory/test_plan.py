"""Every text form of a memory plan is read and printed by one place; what is mistyped is told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxscale.errors import UserError
from jaxscale.memory.plan import FORMS, POLICIES, MemoryPlan, MemoryRule
from jaxscale.values import from_json, to_json

TEXTS = (
    *("none", "dots", "full", "sqrt", "fit", "periodic:4", "revolve:8", "chain:1.5GiB", "save:136MiB"),
    *("save:136MiB:flop", "save:0B:seconds", "greedy:200MB", "dtr_static:1001B", "file:runs/a:b/memory.json"),
    *(f"jax:{policy}" for policy in POLICIES),
    *(f"offload:{rule}:200MiB" for rule in ("pofo", "vdnn", "tflms", "autoswap", "swapadvisor", "capuchin")),
)


@pytest.mark.parametrize("text", TEXTS)
def test_text_and_json_are_read_back(text):
    plan = MemoryPlan.parse(text)
    assert str(plan) == text
    assert from_json(MemoryPlan, to_json(plan)) == plan


def test_every_rule_has_a_form_and_a_case():
    assert {text.partition(":")[0] for text in TEXTS} == set(FORMS) == set(MemoryRule.__args__)


@given(st.sampled_from(["chain", "save", "greedy", "dtr_static"]), st.integers(0, 2**50))
def test_no_budget_is_rounded(rule, budget):
    plan = MemoryPlan(rule, budget=budget)
    assert MemoryPlan.parse(str(plan)) == plan


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chian:1GiB", "did you mean 'chain'"),
        ("save", r"expected save:BYTES\[:flop\|seconds\]"),
        ("save:3", "a unit is missing; write 3GiB, 3MiB or 3B"),
        ("save:3Gib", "did you mean 'GiB'"),
        ("save:-1B", "expected a number of bytes"),
        ("save:1MiB:flops", "did you mean 'flop'"),
        ("save:1MiB:flop:more", "expected save:BYTES"),
        ("offload:vdn:1MiB", "did you mean 'vdnn'"),
        ("offload:pofo", "expected offload:SELECTOR:BYTES"),
        ("jax:dots_savable", "did you mean 'dots_saveable'"),
        ("periodic:0", "expected a whole number >= 1"),
        ("periodic:x", "expected a whole number"),
        ("sqrt:3", "expected sqrt"),
        ("file:", "write file:PATH"),
    ],
)
def test_what_is_mistyped_is_told(text, message):
    with pytest.raises(UserError, match=message):
        MemoryPlan.parse(text)


@pytest.mark.parametrize(
    "fields",
    [
        {"rule": "save"},
        {"rule": "full", "budget": 1},
        {"rule": "chain", "budget": -1},
        {"rule": "periodic"},
        {"rule": "chain", "budget": 1, "objective": "flop"},
        {"rule": "offload", "budget": 1},
        {"rule": "jax"},
    ],
)
def test_fields_that_do_not_go_together_make_no_plan(fields):
    with pytest.raises(UserError, match="memory plan"):
        MemoryPlan(**fields)
