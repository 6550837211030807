"""Attempts of a launch: how many follow, after which codes, and the number that a command gets."""

import pytest

from jaxscale.errors import UserError
from jaxscale.launch.retry import retry, run_command
from jaxscale.launch.watch import STOP
from jaxscale.records.attempts import read_attempts


def test_attempts_go_on_until_one_ends_well(tmp_path, capfd):
    codes = iter([137, 75, 0])
    assert retry(tmp_path, lambda attempt: (next(codes), False), "a") == 0
    assert [(attempt.number, attempt.code) for attempt in read_attempts(tmp_path)] == [(1, 137), (2, 75), (3, 0)]
    assert "attempt 1 ended with code 137, step 0; attempt 2 starts in 1 s" in capfd.readouterr().err


def test_a_launch_gives_up_with_code_5_and_a_new_launch_starts_afresh(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("jaxscale.launch.retry._sleep_was_interrupted", lambda *_: False)
    numbers: list[int] = []

    def run(attempt: int) -> tuple[int, bool]:
        numbers.append(attempt)
        return 1, False

    assert retry(tmp_path, run, "a") == 5
    assert "gave up: three attempts in a row failed before the first step" in capfd.readouterr().err
    assert retry(tmp_path, run, "b") == 5
    assert numbers == [1, 2, 3, 4, 5, 6]
    assert retry(tmp_path, run, "b") == 5  # as in a requeued job
    assert numbers[-1] == 7


@pytest.mark.parametrize("code", [2, 4])
def test_mistakes_and_divergence_are_not_repeated(code, tmp_path):
    assert retry(tmp_path, lambda attempt: (code, False), "a") == code
    assert len(read_attempts(tmp_path)) == 1


def test_a_stop_ends_the_attempts(tmp_path):
    assert retry(tmp_path, lambda attempt: (75, True), "a") == 75
    assert retry(tmp_path, lambda attempt: (75, False), "b", ends_when_preempted=True) == 75

    def run(attempt: int) -> tuple[int, bool]:
        (tmp_path / STOP).touch()
        return 75, False

    assert retry(tmp_path, run, "c") == 75
    assert len(read_attempts(tmp_path)) == 3


def test_a_stopped_run_is_not_continued_by_the_next_job_but_by_the_next_launch(tmp_path, capfd):
    (tmp_path / STOP).touch()
    assert retry(tmp_path, lambda attempt: (1, False), "job 2", ends_when_preempted=True) == 0
    assert f"launch it again, or remove {tmp_path / STOP}" in capfd.readouterr().err
    assert read_attempts(tmp_path) == []
    assert retry(tmp_path, lambda attempt: (0, False), "b") == 0
    assert not (tmp_path / STOP).exists()


def test_two_launches_of_one_run_are_refused(tmp_path):
    def run(attempt: int) -> tuple[int, bool]:
        with pytest.raises(UserError, match=r"is in use by process \d+"):
            retry(tmp_path, lambda attempt: (0, False), "b")
        return 0, False

    assert retry(tmp_path, run, "a") == 0


def test_a_command_gets_the_attempts_number(tmp_path):
    run = run_command(["bash", "-c", 'exit "$JAXSCALE_ATTEMPT"'])
    assert run(7) == (7, False)
    assert run_command(["bash", "-c", "kill -9 $$"])(1) == (137, False)
    with pytest.raises(UserError, match="cannot start 'no-such-program'"):
        run_command(["no-such-program"])(1)
