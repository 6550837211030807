"""Which cases of a test run by default, and which as variants."""

import pytest

from tests.tiers import variants


def marks(case):
    """Return the names of the marks of a case."""
    return [mark.name for mark in getattr(case, "marks", ())]


def test_the_first_cases_run_by_default():
    assert [marks(case) for case in variants("abc", default=2)] == [[], [], ["variant"]]
    assert [marks(case) for case in variants("ab")] == [["variant"], ["variant"]]


def test_cases_are_chosen_by_value_or_id():
    assert [marks(case) for case in variants(["a", "b"], default={"b"})] == [["variant"], []]
    pairs = variants([("a", 1), ("b", 2)], default={("a", 1)})
    assert [marks(case) for case in pairs] == [[], ["variant"]]
    assert pairs[1].values == ("b", 2)
    named = [pytest.param({}, id="one"), pytest.param({}, id="two", marks=pytest.mark.slurm)]
    first, second = variants(named, default={"one"})
    assert (marks(first), marks(second), second.id) == ([], ["slurm", "variant"], "two")


def test_slow_cases_stay_slow_alone():
    (slow,) = variants([pytest.param(1, marks=pytest.mark.slow)])
    assert marks(slow) == ["slow"]


def test_a_name_of_no_case_is_refused():
    with pytest.raises(ValueError, match=r"default: \['c'\] are none of the cases"):
        variants(["a", "b"], default={"c"})
