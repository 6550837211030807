"""The attempts of a launched run, one line each in `attempts.jsonl` in the run's folder of heartbeats."""

import contextlib
import dataclasses
import json
from pathlib import Path

from jaxscale.errors import UserError
from jaxscale.values import from_json
from jaxscale.values.read_files import check_own_file, parse_json, read_bytes

FILE = "attempts.jsonl"


@dataclasses.dataclass(frozen=True)
class Attempt:
    """An attempt that has ended.

    Args:
        number: number of the attempt in the run, from 1.
        launch: name of the launch that the attempt belongs to. `launch.rules` considers only attempts of one launch.
        code: exit code.
        step: the last step that any process entered; 0 if none was entered.
        start_time: start, in seconds since 1970.
        end_time: end, in seconds since 1970.
        verdict: one sentence about the failure; "" if the attempt did not fail.
        seconds_by_phase: seconds that the first process spent in each phase, according to its last heartbeat.
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
    """Return the attempts of a run, the earliest first. Incomplete and damaged lines are left out."""
    attempts: list[Attempt] = []
    with contextlib.suppress(OSError, UserError):
        for line in read_bytes(folder / FILE).split(b"\n"):
            with contextlib.suppress(UserError):
                attempts.append(from_json(Attempt, parse_json(line, "the line")))
    return attempts


def write_attempt(folder: Path, attempt: Attempt) -> None:
    """Append an attempt that has ended. Errors are ignored, since a full disk must not prevent the next attempt."""
    with contextlib.suppress(OSError, UserError):
        check_own_file(folder / FILE)
        with (folder / FILE).open("a") as file:
            file.write(json.dumps(dataclasses.asdict(attempt)) + "\n")
