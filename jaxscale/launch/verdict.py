"""The verdict: which process of a run failed, or delays the other processes. It follows from all heartbeats.

The verdict is a pure function of the heartbeats and of the failures that watchdogs have seen. The clocks of the hosts
need not agree: a heartbeat holds only durations by its own host's clock, and the order of the processes follows from
their steps and phases.
"""

import dataclasses
import signal
from collections.abc import Mapping, Sequence
from typing import Literal

from jaxscale.errors import STUCK
from jaxscale.heartbeat import Heartbeat, RunPhase

ORDER: tuple[RunPhase, ...] = (
    "starting", "joining", "preparing", "initializing", "restoring", "data", "compiling", "stepping", "evaluating",
    "saving", "finished",
)  # fmt: skip
"""The phases in the order of a step: a process takes a step's data before it waits for that step. Logging is part of
stepping: a process that has logged a step waits for the others in stepping."""
PEER_FAILED = "UserError: another process failed"
"""Start of the failure of a process that ends only because another one failed."""

Cause = Literal["exit", "timeout", "frozen", "missing"]


@dataclasses.dataclass(frozen=True)
class Ending:
    """The failure of one process, as its watchdog saw it.

    Args:
        rank: number of the process.
        host: name of its machine.
        attempt: number of the attempt.
        cause: "exit" if the process ended, "timeout" if its phase took too long, "frozen" if its heartbeats stopped,
            "missing" if its host could not be reached.
        code: exit code of the process; minus the signal's number if a signal ended it, and 1 if it was still running.
        seconds: duration of the phase or of the silence when the watchdog gave up; 0 for an exit.
    """

    rank: int
    host: str
    attempt: int
    cause: Cause
    code: int = 1
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The processes that caused a failure.

    Args:
        ranks: numbers of these processes.
        cause: "exit", "timeout", "frozen" or "missing".
        phase: current phase of these processes; "" if they wrote no heartbeat.
        step: the step that these processes entered last.
        text: one sentence for the user.
    """

    ranks: tuple[int, ...]
    cause: Cause
    phase: str
    step: int
    text: str

    def __str__(self) -> str:
        return self.text


def judge(heartbeats: Mapping[int, Heartbeat], process_count: int, attempt: int, ending: Ending | None) -> Verdict:
    """Return the verdict on an attempt.

    A process that ended or froze by itself is the cause. After a timeout, or if a process ended because its step is
    stuck, the cause is the process that is farthest behind, because the other processes wait for it in a collective. If
    several processes are equally far behind, the cause is one that is not waiting itself.

    Args:
        heartbeats: the heartbeats in the run's folder, by rank; heartbeats of other attempts are ignored.
        process_count: number of processes of the run.
        attempt: number of the attempt.
        ending: the first failure that a watchdog saw; `None` if no failure was seen, as in `jaxscale status`.

    Example:
        >>> beats = {rank: Heartbeat(rank, "node1", 7, 1, "stepping", 5 - (rank == 2), 61.0, 90.0, 9, {})
        ...          for rank in range(3)}
        >>> print(judge(beats, 3, 1, Ending(0, "node1", 1, "timeout", seconds=60)))
        rank 2 on node1 never entered step 5: it has been in stepping, step 4 for 61 s, and 2 others wait
    """
    beat_by_rank = {rank: beat for rank, beat in heartbeats.items() if beat.attempt == attempt and rank < process_count}
    if ending is not None and ending.cause == "exit" and ending.code == STUCK and len(beat_by_rank) > 1:
        verdict = judge(heartbeats, process_count, attempt, dataclasses.replace(ending, cause="timeout"))
        failure_text = next((beat.failure for beat in beat_by_rank.values() if beat.failure), f"code {STUCK}")
        return dataclasses.replace(verdict, text=f"{verdict.text} ({failure_text})")
    if ending is not None and ending.cause in ("exit", "frozen"):
        beat = beat_by_rank.get(ending.rank)
        phase_text = "before its first heartbeat" if beat is None else f"in {_phase_text(beat)}"
        subject = f"rank {ending.rank} on {ending.host}"
        failure_text = f": {beat.failure}" if beat is not None and beat.failure else ""
        if ending.cause == "frozen":
            text = f"{subject} is frozen {phase_text}: no heartbeat for {ending.seconds:.0f} s"
        elif ending.code < 0:
            text = (
                f"{subject} was ended by {_signal_name(-ending.code)} {phase_text}{_memory_hint(ending.code)}"
                f"{failure_text}"
            )
        else:
            text = f"{subject} ended with code {ending.code} {phase_text}{failure_text}"
        phase, step = ("", 0) if beat is None else (beat.phase, beat.step)
        return Verdict((ending.rank,), ending.cause, phase, step, text)
    missing_ranks = sorted(set(range(process_count)) - set(beat_by_rank))
    position_by_rank = {rank: _position(beat) for rank, beat in beat_by_rank.items()}
    is_joined = any(beat.phase not in ("starting", "joining") for beat in beat_by_rank.values())
    if missing_ranks and not is_joined:
        waiting_text = f", and {len(beat_by_rank)} of {process_count} wait to join" if beat_by_rank else ""
        return Verdict(
            tuple(missing_ranks), "missing", "", 0, f"{_ranks_text(missing_ranks)} wrote no heartbeat{waiting_text}"
        )
    rearmost_position = min(position_by_rank.values())
    rearmost_ranks = [rank for rank in sorted(position_by_rank) if position_by_rank[rank] == rearmost_position]
    busy_ranks = [rank for rank in rearmost_ranks if not beat_by_rank[rank].is_waiting]
    rearmost_ranks = busy_ranks or rearmost_ranks
    beat = beat_by_rank[rearmost_ranks[0]]
    cause: Cause = "timeout" if ending is None else ending.cause
    host_names = sorted({beat_by_rank[rank].host for rank in rearmost_ranks})
    subject = (
        f"{_ranks_text(rearmost_ranks)} on {', '.join(host_names[:4])}{' and others' if len(host_names) > 4 else ''}"
    )
    phase_seconds = max(beat_by_rank[rank].since for rank in rearmost_ranks)
    if len(rearmost_ranks) == len(beat_by_rank):
        lost_text = f" ({_ranks_text(missing_ranks)} left no heartbeat file)" if missing_ranks else ""
        text = (
            f"all processes are in {_phase_text(beat)} for up to {phase_seconds:.0f} s, and none is behind{lost_text}"
        )
        if len(beat_by_rank) == 1:
            text = f"{subject} has been in {_phase_text(beat)} for {phase_seconds:.0f} s"
        return Verdict(tuple(rearmost_ranks), cause, beat.phase, beat.step, text)
    newest_step = max(beat.step for beat in beat_by_rank.values())
    progress_text = f"never entered step {beat.step + 1}" if beat.step < newest_step else f"did not leave {beat.phase}"
    pronoun, auxiliary = ("it", "has") if len(rearmost_ranks) == 1 else ("they", "have")
    other_count = len(beat_by_rank) - len(rearmost_ranks)
    waiting_text = "another one waits" if other_count == 1 else f"{other_count} others wait"
    line_text = f" ({beat.place})" if beat.place else ""
    text = (
        f"{subject} {progress_text}: {pronoun} {auxiliary} been in {_phase_text(beat)}{line_text} for "
        f"{phase_seconds:.0f} s, and {waiting_text}"
    )
    return Verdict(tuple(rearmost_ranks), cause, beat.phase, beat.step, text)


def exit_code(ending: Ending) -> int:
    """Return the exit code with which a watchdog reports a failure: the process's code, or 128 plus a signal's number.

    Example:
        >>> exit_code(Ending(0, "node1", 1, "exit", -9)), exit_code(Ending(0, "node1", 1, "exit", 2))
        (137, 2)
    """
    return 128 - ending.code if ending.code < 0 else ending.code


def _position(beat: Heartbeat) -> tuple[int, int]:
    """Return the sort key of a heartbeat: its step, and the index in `ORDER` of its phase."""
    phase = "stepping" if beat.phase == "logging" else beat.phase
    return beat.step, ORDER.index(phase)  # pyright: ignore[reportArgumentType]


def _phase_text(beat: Heartbeat) -> str:
    """Return the phase and the step of a heartbeat as text."""
    return f"{beat.phase}, step {beat.step}" if beat.step else beat.phase


def _ranks_text(ranks: Sequence[int]) -> str:
    """Return numbers of processes as text, such as "ranks 0-2, 5"."""
    rank_runs: list[list[int]] = []
    for rank in ranks:
        if rank_runs and rank == rank_runs[-1][-1] + 1:
            rank_runs[-1].append(rank)
        else:
            rank_runs.append([rank])
    range_texts = [f"{rank_run[0]}-{rank_run[-1]}" if len(rank_run) > 1 else f"{rank_run[0]}" for rank_run in rank_runs]
    shown_text = ", ".join(range_texts[:8]) + (
        f" and {len(range_texts) - 8} more ranges" if len(range_texts) > 8 else ""
    )
    return f"rank{'s' if len(ranks) > 1 else ''} {shown_text}"


def _signal_name(number: int) -> str:
    """Return the name of a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _memory_hint(code: int) -> str:
    """Return a hint about exhausted memory if the exit code is that of SIGKILL; "" for other codes."""
    return " (by a user, or by Linux when the host's memory was exhausted)" if code == -signal.SIGKILL else ""
