"""Where the hours went: the parts add up, and the time from a failure to the first new step is lost."""

import pytest

from jaxscale.records.attempts import Attempt
from jaxscale.records.hours import hours_of


def _row(moment: str, time: float, start: float, **seconds: float) -> dict[str, object]:
    return {"name": "hours", "at": moment, "time": time, "process_start": start, "seconds_by_phase": seconds}


FIRST = {"starting": 2.0, "compiling": 8.0, "stepping": 30.0}
AT_NEW = {"starting": 2.0, "compiling": 8.0, "stepping": 10.0}
LAST = {"starting": 2.0, "compiling": 8.0, "stepping": 40.0, "saving": 5.0}


def _attempt(
    number: int, code: int, times: tuple[float, float], seconds: dict[str, float], launch: str = "a"
) -> Attempt:
    return Attempt(number, launch, code, 0, *times, f"verdict {number}" if code else "", seconds)


def test_a_failure_costs_the_time_until_the_first_new_step():
    attempts = [_attempt(1, 137, (100, 141), FIRST), _attempt(2, 0, (145, 201), LAST)]
    rows = [_row("first new step", 112, 101, stepping=1.0), _row("first new step", 166, 146, **AT_NEW)]
    hours = hours_of(rows, attempts)
    assert hours is not None
    assert hours.lost == (("verdict 1", 166 - 141),)
    assert hours.seconds == 201 - 100
    # the second attempt's steps before the first new one are in the lost time
    assert hours.seconds_by_phase["stepping"] == 30 + (40 - 10)
    assert hours.seconds_by_phase["saving"] == 5
    assert sum(hours.seconds_by_phase.values()) + 25 == pytest.approx(hours.seconds)
    assert str(hours).splitlines() == [
        "1 min 41 s: stepping 1 min 0 s, compiling 8.00 s, saving 5.00 s, starting 3.00 s, lost to 1 restart 25.0 s",
        "lost 25.0 s: verdict 1",
    ]


def test_attempts_without_a_new_step_are_lost_by_their_own_causes():
    attempts = [
        _attempt(1, 137, (0, 40), FIRST), _attempt(2, 1, (42, 50), {"starting": 2.0}), _attempt(3, 0, (51, 111), LAST)
    ]  # fmt: skip
    rows = [_row("first new step", 12, 1, stepping=1.0), _row("first new step", 76, 52, **AT_NEW)]
    hours = hours_of(rows, attempts)
    assert hours is not None
    assert hours.lost == (("verdict 1", 10), ("verdict 2", 26))
    assert sum(hours.seconds_by_phase.values()) + 36 == pytest.approx(hours.seconds) == 111


def test_the_time_between_two_launches_is_not_the_runs():
    attempts = [_attempt(1, 75, (0, 40), FIRST, "a"), _attempt(2, 0, (1000, 1060), LAST, "b")]
    rows = [_row("first new step", 1020, 1001, **AT_NEW)]
    hours = hours_of(rows, attempts)
    assert hours is not None
    assert hours.seconds == 100
    assert hours.lost == (("stopped by a signal", 20),)


def test_a_run_without_a_launcher():
    train_row = {"kind": "train", "step": 3, "time": 60.0}
    rows = [_row("first new step", 12, 0, compiling=8.0, stepping=4.0), train_row]
    killed = hours_of(rows, [])
    assert killed is not None
    assert (killed.seconds, killed.lost) == (60, ())
    assert killed.seconds_by_phase == {"compiling": 8, "stepping": 52}
    rows += [_row("first new step", 1020, 1000, **AT_NEW), _row("end", 1055, 1000, **LAST)]
    whole = hours_of(rows, [])
    assert whole is not None
    assert whole.seconds == 60 + 55
    assert whole.lost == (("the process was killed", 20),)
    assert hours_of([], []) is None
    assert hours_of([_row("end", 5.0, 5.0)], []) is not None
