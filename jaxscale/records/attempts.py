"""The attempts of a launched run, one line each in `attempts.jsonl` in the run's folder of heartbeats."""

import contextlib
import dataclasses
import json
from pathlib import Path

from jaxscale.errors import UserError
from jaxscale.values.limits import MAX_INT64
from jaxscale.values.read_files import check_own_file, parse_json, read_bytes

FILE = "attempts.jsonl"


@dataclasses.dataclass(frozen=True)
class Attempt:
    """An attempt that has ended.

    Args:
        number: number of the attempt among all of the run, from 1.
        launch: name of the launch that it belongs to; the rules look at the attempts of one launch.
        code: exit code.
        step: the last step that any process entered; 0 if none was entered.
        start_time: start, in seconds since 1970.
        end_time: end, in seconds since 1970.
        verdict: one sentence about a failure; "" without one.
        seconds_by_phase: seconds that the first process spent in each phase, by its last heartbeat.
    """

    number: int
    launch: str
    code: int
    step: int
    start_time: float = 0.0
    end_time: float = 0.0
    verdict: str = ""
    seconds_by_phase: dict[str, float] = dataclasses.field(default_factory=dict)


def read_attempts(folder: Path) -> list[Attempt]:
    """Return the attempts of a run, the earliest first; lines that cannot be read are left out."""
    attempts: list[Attempt] = []
    with contextlib.suppress(OSError, UserError):
        for line in read_bytes(folder / FILE).splitlines():
            with contextlib.suppress(UserError, TypeError):
                attempt = Attempt(**parse_json(line, "the line"))
                if _is_valid(attempt):
                    attempts.append(attempt)
    return attempts


def _is_valid(attempt: Attempt) -> bool:
    """Return whether the fields of an attempt, read from a file, have their types."""
    numbers = [attempt.number, attempt.code, attempt.step]
    texts = [attempt.launch, attempt.verdict]
    is_valid = all(type(number) is int and abs(number) <= MAX_INT64 for number in numbers)
    is_valid = is_valid and all(type(text) is str for text in texts) and type(attempt.seconds_by_phase) is dict
    times = [attempt.start_time, attempt.end_time, *attempt.seconds_by_phase.values()] if is_valid else []
    return is_valid and all(type(time) in (int, float) and abs(time) <= MAX_INT64 for time in times)


def write_attempt(folder: Path, attempt: Attempt) -> None:
    """Append an attempt that has ended; a full disk must not keep the run from its next attempt."""
    with contextlib.suppress(OSError, UserError):
        check_own_file(folder / FILE)
        with (folder / FILE).open("a") as file:
            file.write(json.dumps(dataclasses.asdict(attempt)) + "\n")
