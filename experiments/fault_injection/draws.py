"""Draws by number, run in children of this process that may hang, abort or eat memory without ending it.

A child is a fork of this process, which has imported everything and started no backend, and runs one draw after the
other. It announces each draw and its outcome through a pipe. A draw that computes or waits
for longer than its limit is interrupted by a signal; a
child that does not react, dies, or grows by too much memory is a fault of its current draw, and the next child goes on
after that.
"""

import contextlib
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

MAX_GROWTH_BYTES = 1 << 30
"""Most memory that a draw may add to its process."""
GRACE_SECONDS = 20.0
"""Time that an interrupted draw gets, before its child is killed."""
WALL_FACTOR = 6.0
"""Seconds that may pass for each second of computation, on a busy machine."""
JAXSCALE = str(Path(__file__).parents[2] / "jaxscale")


class Outcome(NamedTuple):
    """What became of a draw: its number, outcome ("fault" for a fault) and details, and its time."""

    number: int
    outcome: str
    detail: str
    seconds: float = 0.0


class Hang(BaseException):
    """A draw is not over within its limit."""


def run_draws(
    run: Callable[[int], tuple[str, str]], numbers: Sequence[int], seconds: float, batch: int
) -> Iterator[Outcome]:
    """Run draws in children, and yield their outcomes in the order of the numbers.

    Args:
        run: returns the outcome and its detail for the number of a draw; it raises for a fault.
        numbers: numbers of the draws.
        seconds: longest time of computation of a draw, of all its threads.
        batch: number of draws in each child.
    """
    remaining = list(numbers)
    while remaining:
        outcomes = _run_child(run, remaining[:batch], seconds)
        for outcome in outcomes:
            if outcome.outcome == "fault":
                print(f"fault in draw {outcome.number}: {outcome.detail[:500]}", file=sys.stderr, flush=True)
            yield outcome
        remaining = remaining[len(outcomes) :]


def place_of(error: BaseException) -> str:
    """Return file and line of the last frame of jaxscale in an error's traceback; the last frame if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next(
        (frame for frame in reversed(frames) if frame.filename.startswith(JAXSCALE)), frames[-1] if frames else None
    )
    return "" if frame is None else f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"


def _run_child(run: Callable[[int], tuple[str, str]], numbers: Sequence[int], seconds: float) -> list[Outcome]:
    """Run draws in one child until one of them ends it, and return their outcomes."""
    read_end, write_end = os.pipe()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        sys.stdout.flush()
        process = os.fork()
        if process == 0:
            os.close(read_end)
            _work(run, numbers, seconds, write_end, output)
        os.close(write_end)
        try:
            return _watch(process, read_end, len(numbers), seconds, output)
        finally:
            os.close(read_end)


def _work(
    run: Callable[[int], tuple[str, str]], numbers: Sequence[int], seconds: float, pipe: int, output: IO[str]
) -> None:
    """Run draws in a child, announce them, and end the process."""
    os.setpgid(0, 0)
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)

    def interrupt(*_: object) -> None:
        raise Hang

    signal.signal(signal.SIGPROF, interrupt)
    signal.signal(signal.SIGALRM, interrupt)
    for number in numbers:
        start_time = time.monotonic()
        _announce(pipe, {"start": number})
        output.truncate(0)
        output.seek(0)
        try:
            try:
                signal.setitimer(signal.ITIMER_PROF, seconds)
                signal.setitimer(signal.ITIMER_REAL, WALL_FACTOR * seconds)
                outcome, detail = run(number)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
                signal.setitimer(signal.ITIMER_REAL, 0)
        except Hang as hang:
            outcome, detail = "fault", f"not over after {seconds:.0f} s of computation, at {place_of(hang)}"
        except BaseException as error:
            message = "".join(traceback.format_exception_only(error)).strip()
            outcome, detail = "fault", f"{message[:300]}, at {place_of(error)}"
            if os.environ.get("DRAWS_TRACEBACK"):
                detail += "\n" + "".join(traceback.format_exception(error))
        _announce(
            pipe, {"number": number, "outcome": outcome, "detail": detail, "seconds": time.monotonic() - start_time}
        )
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    os._exit(0)


def _announce(pipe: int, message: dict[str, Any]) -> None:
    """Write a message as one line."""
    with contextlib.suppress(OSError):
        os.write(pipe, (json.dumps(message) + "\n").encode())


def _watch(process: int, pipe: int, count: int, seconds: float, output: IO[str]) -> list[Outcome]:
    """Return the outcomes of a child's draws; one that ended the child is the last."""
    outcomes: list[Outcome] = []
    current, start_time, base_bytes = 0, time.monotonic(), _resident_bytes(process)
    rest, reason = b"", ""
    while not reason:
        ready, _, _ = select.select([pipe], [], [], 0.2)
        if ready:
            chunk = os.read(pipe, 1 << 16)
            if not chunk:
                break
            *lines, rest = (rest + chunk).split(b"\n")
            for message in map(json.loads, lines):
                if "start" in message:
                    current, start_time, base_bytes = message["start"], time.monotonic(), _resident_bytes(process)
                else:
                    outcomes.append(Outcome(**message))
        elif (growth := _resident_bytes(process) - base_bytes) > MAX_GROWTH_BYTES:
            reason = f"the process grew by {growth / 2**30:.1f} GiB"
        elif time.monotonic() - start_time > WALL_FACTOR * seconds + GRACE_SECONDS:
            reason = f"not over after {WALL_FACTOR * seconds + GRACE_SECONDS:.0f} s, and deaf to signals"
    if reason:
        os.killpg(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    if len(outcomes) < count:
        output.seek(0)
        tail = " ".join(output.read()[-400:].split())
        code = os.waitstatus_to_exitcode(status)
        outcomes.append(Outcome(current, "fault", f"{reason or f'the process ended with {code}'}: {tail}"))
    return outcomes


def _resident_bytes(process: int) -> int:
    """Return the resident bytes of a process; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0
