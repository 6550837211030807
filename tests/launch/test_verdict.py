"""The verdict names the process that failed or holds the others back, whatever the other files look like."""

import dataclasses
import json
import random

import pytest

from jaxscale.errors import STUCK
from jaxscale.heartbeat import Heartbeat, heartbeat_file, read_heartbeats
from jaxscale.launch.verdict import ORDER, PEER_FAILED, Ending, exit_code, judge

BEAT = Heartbeat(0, "node0", 100, 2, "stepping", 7, 61.0, 900.0, 50, {"stepping": 61.0}, place="loop.py:3 f")
HANG = Ending(0, "node0", 2, "timeout", seconds=60)
LOOP_PHASES = ("data", "stepping", "evaluating", "saving")


def _beat(draw: random.Random, phase: str, step: int, *, is_waiting: bool) -> Heartbeat:
    """Return a heartbeat from a host whose clock is up to 5 minutes off."""
    uptime, host = 1000 + draw.uniform(-300, 300), f"node{draw.randrange(125)}"
    since = draw.uniform(60, 400)
    return dataclasses.replace(
        BEAT, phase=phase, step=step, host=host, since=since, uptime=uptime, is_waiting=is_waiting
    )


def _scenario(seed: int, count: int) -> tuple[dict[int, Heartbeat], set[int]]:
    """Return the heartbeats of a run, and the processes that hold the others back.

    A few processes are behind in a phase of their own; the others wait ahead of them. Some files are of an earlier
    attempt or missing. The clocks of the hosts differ, which shows in nothing but `since` and `uptime`.
    """
    draw = random.Random(seed)
    beats: dict[int, Heartbeat] = {}
    behind = set(draw.sample(range(count), draw.randint(1, 3)))
    step = draw.randint(1, 10**6)
    front_phase = draw.choice(LOOP_PHASES[1:])
    back_step = step - draw.choice([0, 1])
    is_same_place = draw.random() < 0.3  # only whether they wait distinguishes them
    back_phases = [phase for phase in LOOP_PHASES if back_step < step or ORDER.index(phase) < ORDER.index(front_phase)]
    back_phase = draw.choice(back_phases)
    if is_same_place:
        back_phase, back_step = front_phase, step
    front = [_beat(draw, front_phase, step, is_waiting=True) for _ in range(16)]
    for rank in range(count):
        is_waiting = not is_same_place and draw.random() < 0.2
        beats[rank] = (
            _beat(draw, back_phase, back_step, is_waiting=is_waiting) if rank in behind else front[rank // 8 % 16]
        )
    for rank in draw.sample(sorted(set(range(count)) - behind), count // 10):
        if draw.random() < 0.5:
            del beats[rank]  # torn or missing
        else:  # of the attempt before, farther back than any
            beats[rank] = dataclasses.replace(beats[rank], attempt=1, phase="restoring", step=0, is_waiting=False)
    if not is_same_place:  # among those behind, one that waits is not the cause if another one works
        working = {rank for rank in behind if not beats[rank].is_waiting}
        behind = working or behind
    return beats, behind


def test_a_thousand_runs_of_a_thousand_processes():
    for seed in range(1000):
        beats, behind = _scenario(seed, 1000)
        verdict = judge(beats, 1000, 2, HANG)
        assert set(verdict.ranks) == behind, seed
        assert verdict.cause == "timeout"
        for rank in sorted(behind)[:1]:
            assert (verdict.phase, verdict.step) == (beats[rank].phase, beats[rank].step)
            assert str(rank) in str(verdict)


def test_files_that_are_torn_or_missing_change_no_verdict(tmp_path):
    for seed in range(3):
        beats, behind = _scenario(seed, 100)
        folder = tmp_path / str(seed)
        folder.mkdir()
        for rank, beat in beats.items():
            heartbeat_file(folder, rank).write_text(json.dumps(dataclasses.asdict(beat) | {"rank": rank}))
        ahead = sorted(set(beats) - behind)
        for rank in ahead[:5]:
            path = heartbeat_file(folder, rank)
            path.write_text(path.read_text()[:-20])
        assert set(judge(read_heartbeats(folder), 100, 2, HANG).ranks) == behind


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        (
            Ending(3, "node0", 2, "exit", -9),
            "rank 3 on node0 was ended by SIGKILL in stepping, step 7 (by a user, or by Linux when the host's memory "
            "was exhausted): RuntimeError: no",
        ),
        (Ending(3, "node0", 2, "exit", 3), "rank 3 on node0 ended with code 3 in stepping, step 7: RuntimeError: no"),
        (Ending(9, "node1", 2, "exit", -11), "rank 9 on node1 was ended by SIGSEGV before its first heartbeat"),
        (
            Ending(3, "node0", 2, "frozen", 1, 61.0),
            "rank 3 on node0 is frozen in stepping, step 7: no heartbeat for 61 s",
        ),
    ],
)
def test_a_process_that_ended_or_froze_is_the_cause(ending, expected):
    beats = {3: dataclasses.replace(BEAT, rank=3, failure="RuntimeError: no"), 4: dataclasses.replace(BEAT, rank=4)}
    verdict = judge(beats, 10, 2, ending)
    assert str(verdict) == expected
    assert verdict.ranks == (ending.rank,)
    assert exit_code(ending) == {-9: 137, 3: 3, -11: 139, 1: 1}[ending.code]


def test_processes_that_never_started_are_named_while_the_others_join():
    beats = {rank: dataclasses.replace(BEAT, rank=rank, phase="joining", step=0) for rank in (0, 1, 4)}
    verdict = judge(beats, 8, 2, HANG)
    assert verdict.ranks == (2, 3, 5, 6, 7)
    assert str(verdict) == "ranks 2-3, 5-7 wrote no heartbeat, and 3 of 8 wait to join"
    assert judge({}, 2, 2, HANG).ranks == (0, 1)


def test_one_process_and_equal_processes():
    alone = judge({0: BEAT}, 1, 2, HANG)
    assert str(alone) == "rank 0 on node0 has been in stepping, step 7 for 61 s"
    equal = judge({rank: dataclasses.replace(BEAT, rank=rank) for rank in range(3)}, 4, 2, HANG)
    assert str(equal) == (
        "all processes are in stepping, step 7 for up to 61 s, and none is behind (rank 3 left no heartbeat file)"
    )
    assert PEER_FAILED.startswith("UserError")


def test_a_callback_that_hangs_is_the_fault_of_its_process_though_the_others_wait_in_stepping():
    waiting = {rank: dataclasses.replace(BEAT, rank=rank, is_waiting=True) for rank in (1, 2, 3)}
    verdict = judge({0: dataclasses.replace(BEAT, phase="logging", place="user.py:3 callback")} | waiting, 4, 2, HANG)
    assert verdict.ranks == (0,)
    assert verdict.phase == "logging"
    assert "user.py:3 callback" in verdict.text


def test_a_stuck_step_is_the_fault_of_the_process_that_stands_farthest_back():
    failure = "Stuck: step 7 is stuck: it has waited 61 s for its devices"
    waiting = dataclasses.replace(BEAT, is_waiting=True, failure=failure)
    behind = dataclasses.replace(BEAT, rank=1, host="node1", phase="data", is_waiting=False)
    ending = Ending(0, "node0", 2, "exit", STUCK)
    verdict = judge({0: waiting, 1: behind}, 2, 2, ending)
    assert verdict.ranks == (1,)
    assert verdict.text.startswith("rank 1 on node1")
    assert failure in verdict.text
    alone = judge({0: waiting}, 1, 2, ending)
    assert alone.ranks == (0,)
    assert "ended with code 7" in alone.text
