"""The rules by which a run is started again."""

import pytest

from jaxscale.launch.rules import LONGEST_DELAY, decide
from jaxscale.records.attempts import Attempt, read_attempts, write_attempt


def _attempts(*ends: tuple[int, int]) -> list[Attempt]:
    return [Attempt(number, "a", code, step) for number, (code, step) in enumerate(ends, start=1)]


@pytest.mark.parametrize("code", [0, 2, 4, 5, 6])
def test_codes_that_another_attempt_would_repeat_are_final(code):
    assert decide(_attempts((137, 3), (code, 9))).code == code


def test_stops_by_a_signal_do_not_count():
    decision = decide(_attempts(*[(75, 3)] * 50, (130, 3)))
    assert (decision.code, decision.delay) == (None, 1)
    assert decide(_attempts((1, 7), (75, 7), (1, 7), (75, 7))).code is None
    assert decide(_attempts((1, 7), (75, 7), (1, 7), (75, 7), (137, 7))).code == 5


def test_three_failures_at_one_step_end_the_launch():
    assert decide(_attempts((1, 7), (137, 7))).code is None
    decision = decide(_attempts((1, 7), (137, 7), (1, 7)))
    assert (decision.code, decision.reason) == (5, "three attempts in a row failed at step 7")
    assert decide(_attempts((2, 0), (1, 0), (1, 0))).reason == "three attempts in a row failed before the first step"
    assert decide(_attempts((1, 7), (1, 7), (1, 8))).code is None


def test_five_failures_without_progress_end_the_launch():
    steps = [40, 38, 39, 37, 36]
    assert decide(_attempts(*((1, step) for step in steps))).code is None
    decision = decide(_attempts(*((1, step) for step in [*steps, 40])))
    assert (decision.code, decision.reason) == (5, "five attempts in a row failed without getting beyond step 40")
    assert decide(_attempts(*((1, step) for step in [*steps[:-1], 41, 40, 39]))).code is None


def test_the_delay_doubles_without_progress_and_has_a_limit():
    delays = [decide(_attempts(*((1, step) for step in range(9, 9 - count, -1)))).delay for count in (1, 2, 3, 4)]
    assert delays == [1, 1, 2, 4]
    assert decide(_attempts((1, 5), (1, 4), (1, 6))).delay == 1
    assert LONGEST_DELAY == 300


def test_torn_lines_are_passed_over(tmp_path):
    assert read_attempts(tmp_path) == []
    for attempt in _attempts((1, 5), (0, 9)):
        write_attempt(tmp_path, attempt)
    path = tmp_path / "attempts.jsonl"
    path.write_text(path.read_text() + '{"number": 3, "lau')
    assert read_attempts(tmp_path) == _attempts((1, 5), (0, 9))
