"""The watchdog, on processes that write heartbeats and fail in a given way, without JAX."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxscale.errors import UserError
from jaxscale.heartbeat import read_heartbeats
from jaxscale.launch.host import host_variables, watch_host
from jaxscale.launch.local import ALONE
from jaxscale.launch.rank_process import log_file
from jaxscale.launch.status import is_running, show_log, status, stop
from jaxscale.launch.watch import FAILURE, STOP, TIMEOUTS, Ending, Watchdog, Watched, parse_timeouts, write_ending
from jaxscale.records.attempts import read_attempts
from tests.tiers import variants

PROCESS = """
import os, signal, sys, time
from jaxscale import heartbeat
rank = int(os.environ["JAXSCALE_RANK"])
heartbeat.start(rank)
heartbeat.set_phase("joining")
stopped = []
def wait(seconds=60.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if stopped:
            print("saved", flush=True)
            sys.exit(75)
        time.sleep(0.02)
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
def block_until_ready():
    wait()
heartbeat.set_phase("stepping", 4)
time.sleep(0.05)
"""
FAST = {**TIMEOUTS, "stepping": 1.5, "data": 1.5, "frozen": 2.0, "starting": 5.0}


@pytest.fixture(autouse=True)
def _short_graces(monkeypatch):
    monkeypatch.setattr("jaxscale.launch.watch.FAILURE_GRACE", 0.8)
    monkeypatch.setattr("jaxscale.launch.watch.STACK_SECONDS", 0.3)


def _watchdog(folder: Path, body: str, count: int = 3, attempt: int = 1, **timeouts: float) -> Watchdog:
    script = folder / "process.py"
    folder.mkdir(exist_ok=True)
    script.write_text(PROCESS + textwrap.dedent(body))
    variables = host_variables(None, count, {**os.environ, **ALONE})
    return Watchdog(
        Watched(folder / "processes", count, attempt, {**FAST, **timeouts}), [sys.executable, str(script)], variables
    )


def _run(folder: Path, body: str, count: int = 3, **timeouts: float) -> tuple[int, str, float]:
    """Run processes, and return the code, the verdict and the seconds."""
    watchdog = _watchdog(folder, body, count, **timeouts)
    start_time = time.monotonic()
    code = watchdog.run()
    assert not any(_is_alive(beat.pid) for beat in read_heartbeats(folder / "processes").values())
    return code, str(watchdog.verdict()), time.monotonic() - start_time


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def test_processes_that_end_well(tmp_path, capfd):
    code, _, _ = _run(tmp_path, "print('from', rank); heartbeat.set_phase('finished'); heartbeat.stop()")
    assert code == 0
    out, err = capfd.readouterr()
    assert (out, err) == ("from 0\n", "")  # the others' output is in their logs
    assert log_file(tmp_path / "processes", 2).read_text().endswith("from 2\n")
    assert f"attempt 1 on {socket.gethostname()}" in log_file(tmp_path / "processes", 2).read_text()
    assert not (tmp_path / "processes" / FAILURE).exists()


def test_an_exception_ends_all_and_its_traceback_comes_last(tmp_path, capfd):
    body = """
        if rank == 1:
            heartbeat.fail(RuntimeError("no luck"))
            raise RuntimeError("no luck")
        block_until_ready()
    """
    code, verdict, seconds = _run(tmp_path, body)
    host = socket.gethostname()
    assert code == 1
    assert verdict == f"rank 1 on {host} ended with code 1 in stepping, step 4: RuntimeError: no luck"
    assert seconds < 10
    lines = capfd.readouterr().err.splitlines()
    assert lines[-1] == f"jaxscale: attempt 1: {verdict}"
    assert lines[-2].startswith("[1] ")
    assert lines[-2].endswith("RuntimeError: no luck")
    assert sum("Traceback" in line for line in lines) == 1


@pytest.mark.parametrize("rank", variants([0, 2], default=1))
def test_a_killed_process_is_noticed_at_once(rank, tmp_path):
    body = f"if rank == {rank}: os.kill(os.getpid(), signal.SIGKILL)\nblock_until_ready()"
    code, verdict, seconds = _run(tmp_path, body)
    assert code == 137
    assert f"rank {rank} on {socket.gethostname()} was ended by SIGKILL" in verdict
    assert seconds < 6


def test_a_process_that_only_follows_another_is_not_the_cause(tmp_path):
    body = """
        if rank == 0:
            heartbeat.fail(RuntimeError("disk"))
            time.sleep(0.7)
            sys.exit(1)
        from jaxscale.errors import UserError
        heartbeat.fail(UserError("another process failed and reports the reason"))
        sys.exit(2)
    """
    code, verdict, _ = _run(tmp_path, body)
    assert (code, "rank 0" in verdict, "disk" in verdict) == (1, True, True)


def test_a_process_that_hangs_in_the_data_is_named_with_its_line_and_all_write_their_stacks(tmp_path, capfd):
    body = """
        def read_rows():
            time.sleep(60)
        if rank == 2:
            with heartbeat.in_phase("data"):
                read_rows()
        block_until_ready()
    """
    code, verdict, seconds = _run(tmp_path, body)
    assert code == 1
    assert f"rank 2 on {socket.gethostname()} did not leave data" in verdict
    assert "read_rows" in verdict
    assert "2 others wait" in verdict
    assert seconds < 1.5 + 10
    for rank in range(3):
        assert "most recent call first" in log_file(tmp_path / "processes", rank).read_text(), rank
    out, err = capfd.readouterr()
    assert "most recent call first" not in out  # the stacks of process 0 are in its log
    assert "read_rows" in err


def test_a_process_that_never_enters_a_collective_is_named(tmp_path):
    body = "\nif rank == 1:\n    while True: pass\nblock_until_ready()"
    code, verdict, _ = _run(tmp_path, body)
    assert (code, f"rank 1 on {socket.gethostname()} did not leave stepping" in verdict) == (1, True)


def test_a_stopped_process_is_frozen(tmp_path):
    body = "if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\nblock_until_ready()"
    code, verdict, _ = _run(tmp_path, body, stepping=30)
    assert (code, f"rank 1 on {socket.gethostname()} is frozen in" in verdict) == (1, True)


def test_a_process_that_never_writes_is_missing(tmp_path):
    script = tmp_path / "silent.py"
    script.write_text("import time; time.sleep(60)")
    watched = Watched(tmp_path / "processes", 1, 1, {**FAST, "starting": 0.6})
    watchdog = Watchdog(watched, [sys.executable, str(script)], host_variables(None, 1, {**os.environ, **ALONE}))
    assert watchdog.run() == 1
    assert str(watchdog.verdict()) == "rank 0 wrote no heartbeat"


def test_long_phases_that_change_give_no_alarm(tmp_path):
    body = """
        for step in range(5, 9):
            heartbeat.set_phase("stepping", step)
            time.sleep(0.5)
        heartbeat.set_phase("finished")
        heartbeat.stop()
        time.sleep(3)  # a script's own work after training, longer than a process may be silent before
    """
    assert _run(tmp_path, body, count=2)[0] == 0


@pytest.mark.parametrize(("seconds", "code"), variants([(2.3, 0), (20.0, 1)], default=1))
def test_a_phase_may_take_five_times_as_long_as_before(seconds, code, tmp_path):
    body = f"""
        heartbeat.set_phase("evaluating")
        wait(0.6)
        heartbeat.set_phase("stepping", 5)
        heartbeat.set_phase("evaluating")
        wait({seconds})
        heartbeat.set_phase("finished")
        heartbeat.stop()
    """
    ended_code, verdict, _ = _run(tmp_path, body, 1, evaluating=1.0)
    assert ended_code == code
    if code:
        assert "has been in evaluating, step 5" in verdict


def test_a_process_that_failed_but_stays_in_a_barrier_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxscale.launch.rank_process.FAILED_GRACE", 0.5)
    body = "if rank == 1: heartbeat.fail(ValueError('no'))\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwait()"
    code, verdict, seconds = _run(tmp_path, body, stepping=30)
    assert (code, "ValueError: no" in verdict) == (1, True)
    assert seconds < 12


def test_a_stop_signal_is_passed_on_once(tmp_path):
    # a signal before a process handles it would end that process without a line
    watchdog = _watchdog(tmp_path, f"open(f'{tmp_path}/waiting.{{rank}}', 'w').close(); wait()", stepping=30)
    all_wait = f"until [ $(ls {tmp_path} | grep -c waiting) = 3 ]; do sleep 0.05; done"
    timer = subprocess.Popen(["bash", "-c", f"{all_wait}; kill -TERM {os.getpid()}"])
    assert watchdog.run() == 75
    timer.wait()
    assert watchdog.was_interrupted
    assert log_file(tmp_path / "processes", 1).read_text().count("saved") == 1


@pytest.mark.parametrize(
    ("report", "rank", "code"),
    variants(
        [
            ("heartbeat.fail(Preempted('saved'))", 1, 75),
            ("heartbeat.set_phase('finished'); heartbeat.stop()", 1, 0),
            ("heartbeat.set_phase('finished'); heartbeat.stop()", 0, 134),
            ("heartbeat.fail(RuntimeError('no luck'))", 1, 134),
            ("time.sleep(1)", 1, 134),
        ],
        default={("heartbeat.set_phase('finished'); heartbeat.stop()", 1, 0), ("time.sleep(1)", 1, 134)},
    ),
)
def test_an_abort_after_the_end_of_the_first_process_is_no_failure(report, rank, code, tmp_path):
    body = f"""
        from jaxscale.errors import Preempted
        if rank == {rank}:
            {report}
            os.abort()
        heartbeat.{"fail(Preempted('saved'))" if code == 75 else "set_phase('finished')"}
        heartbeat.stop()
        sys.exit({75 if code == 75 else 0})
    """
    assert _run(tmp_path, body, 2)[0] == code


def test_a_second_stop_signal_kills(tmp_path):
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)"
    watchdog = _watchdog(tmp_path, body, stepping=30)
    command = f"sleep 1; kill -TERM {os.getpid()}; sleep 0.5; kill -INT {os.getpid()}"
    timer = subprocess.Popen(["bash", "-c", command])
    start_time = time.monotonic()
    assert watchdog.run() == 130
    assert time.monotonic() - start_time < 10
    timer.wait()


def test_another_hosts_failure_ends_this_hosts_processes(tmp_path):
    watchdog = _watchdog(tmp_path, "block_until_ready()", stepping=30)
    watched = Watched(tmp_path / "processes", 5)
    (tmp_path / "processes").mkdir()
    write_ending(watched, Ending(4, "other", 1, "exit", -9))
    start_time = time.monotonic()
    assert watchdog.run() == 137
    assert time.monotonic() - start_time < 8
    assert "rank 4 on other was ended by SIGKILL before its first heartbeat" in str(watchdog.verdict())


def test_a_host_that_only_follows_reports_the_code_of_the_failure(tmp_path, monkeypatch):
    body = """
        from jaxscale.errors import UserError
        heartbeat.fail(UserError("another process failed and reports the reason"))
        sys.exit(2)
    """
    watchdog = _watchdog(tmp_path, body, 2)
    timer = threading.Timer(1.5, write_ending, (Watched(tmp_path / "processes", 5), Ending(4, "other", 1, "exit", 7)))
    with monkeypatch.context() as patch:
        patch.setattr("jaxscale.launch.watch.FAILURE_GRACE", 3)
        timer.start()
        assert watchdog.run() == 7
        timer.join()
    assert _watchdog(tmp_path / "alone", body, 2).run() == 2


def test_files_of_an_earlier_launch_do_not_count(tmp_path):
    watchdog = _watchdog(tmp_path, "heartbeat.set_phase('finished')", attempt=0)
    (tmp_path / "processes").mkdir()
    write_ending(Watched(tmp_path / "processes", 5, 0), Ending(4, "other", 0, "exit", -9))
    (tmp_path / "processes" / STOP).touch()
    assert watchdog.run() == 0


def test_processes_die_with_their_watchdog(tmp_path):
    script = tmp_path / "process.py"
    script.write_text(PROCESS + "time.sleep(60)")
    command = [sys.executable, "-m", "jaxscale", "watch", "--ranks", "2", "--out", str(tmp_path / "run"), "--"]
    watcher = subprocess.Popen([*command, sys.executable, str(script)])
    folder = tmp_path / "run" / "processes"
    deadline = time.monotonic() + 20
    while len(read_heartbeats(folder)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    pids = [beat.pid for beat in read_heartbeats(folder).values()]
    assert len(pids) == 2
    watcher.kill()
    watcher.wait()
    time.sleep(0.3)
    assert not any(_is_running(pid) for pid in pids)


def _is_running(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


# -- one host of several ----------------------------------------------------------------------------------------------


def test_the_processes_of_a_host_find_their_places(tmp_path):
    script = tmp_path / "process.py"
    script.write_text(PROCESS + "print(os.environ['JAXSCALE_RANK'], os.environ['JAXSCALE_COORDINATOR'])")
    slurm = {
        "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_PROCID": "1", "SLURM_LOCALID": "0",
    }  # fmt: skip
    variables = {**os.environ, **slurm}
    assert watch_host([sys.executable, str(script)], tmp_path, 2, FAST, variables) == 0
    assert log_file(tmp_path, 3).read_text().splitlines()[-1].split()[1:] == ["3", "n1:61501"]
    assert host_variables(None, 1, {"A": "b"}) == {0: {"A": "b"}}


def test_a_stopped_run_is_not_started_by_a_scheduler(tmp_path, capfd):
    (tmp_path / STOP).touch()
    assert watch_host(["no-such-program"], tmp_path, 1, FAST, {"JAXSCALE_ATTEMPT": "3"}) == 0
    assert "the run was stopped" in capfd.readouterr().err


def test_the_number_of_an_attempt_is_a_number(tmp_path):
    with pytest.raises(UserError, match="JAXSCALE_ATTEMPT: got 'x', expected a number"):
        watch_host(["true"], tmp_path, 1, FAST, {"JAXSCALE_ATTEMPT": "x"})


def test_restarts_by_a_scheduler_are_recorded_and_end_after_three_failures_at_one_step(tmp_path, capfd):
    script = tmp_path / "process.py"
    script.write_text(PROCESS + "heartbeat.fail(RuntimeError('no')); sys.exit(1)")
    codes = []
    for attempt in range(4):
        variables = {**os.environ, "JAXSCALE_RANK": "0", "JAXSCALE_PROCESSES": "1", "JAXSCALE_COORDINATOR": "a:1"}
        variables["JAXSCALE_ATTEMPT"] = str(attempt)
        codes.append(watch_host([sys.executable, str(script)], tmp_path / "run", 1, FAST, variables))
    assert codes == [1, 1, 1, 5]
    assert "gave up: three attempts in a row failed at step 4" in capfd.readouterr().err
    attempts = read_attempts(tmp_path / "run")
    assert [(attempt.number, attempt.code, attempt.step) for attempt in attempts] == [(0, 1, 4), (1, 1, 4), (2, 1, 4)]
    assert "RuntimeError: no" in attempts[0].verdict
    assert all(attempt.start_time < attempt.end_time for attempt in attempts)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steping=3", "unknown phase in --timeouts 'steping': .*did you mean 'stepping'"),
        ("stepping", "got 'stepping', expected PHASE=SECONDS"),
        ("stepping=-1", "expected PHASE=SECONDS"),
        ("stepping=nan", "expected PHASE=SECONDS"),
    ],
)
def test_timeouts_are_checked(text, message):
    with pytest.raises(UserError, match=message):
        parse_timeouts(text)


# -- status and stop --------------------------------------------------------------------------------------------------


def test_status_shows_each_process_and_stop_asks_the_watchdogs(tmp_path, capfd):
    script = tmp_path / "process.py"
    script.write_text(PROCESS + "wait()")
    program = [sys.executable, "-m", "jaxscale"]
    run_dir = tmp_path / "run"
    command = [*program, "retry", "--out", str(run_dir), "--", *program, "watch", "--ranks", "2"]
    launch = subprocess.Popen([*command, "--out", str(run_dir), "--", sys.executable, str(script)])
    folder = run_dir / "processes"
    deadline = time.monotonic() + 20
    while len(read_heartbeats(folder)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.6)
    lines = status(folder).splitlines()
    assert lines[0].split()[:5] == ["rank", "host", "process", "phase", "step"]
    assert [line.split()[3:5] for line in lines[1:]] == [["stepping", "4"]] * 2
    assert "wait" in lines[1]  # the line of code
    assert is_running(folder, 1)
    assert stop(folder) == "the run saves after its step and stops; start it again to continue it"
    assert launch.wait(timeout=20) == 75
    assert "the run was asked to stop" in status(folder)
    assert "attempt 1: code 75 after" in status(folder)
    show_log(folder, 1)
    assert "saved" in capfd.readouterr().out
    with pytest.raises(UserError, match="there is nothing to stop"):
        stop(folder)
    with pytest.raises(UserError, match=r"--log 7: .*expected one of 0, 1"):
        show_log(folder, 7)


def test_stop_signals_a_process_without_a_watchdog(tmp_path):
    script = tmp_path / "process.py"
    script.write_text(PROCESS + "wait()")
    folder = tmp_path / "processes"
    variables = {**os.environ, "JAXSCALE_RANK": "0", "JAXSCALE_HEARTBEATS": str(folder)}
    process = subprocess.Popen([sys.executable, str(script)], env=variables)
    deadline = time.monotonic() + 20
    while not read_heartbeats(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    assert str(process.pid) in stop(folder)
    assert process.wait(timeout=10) == 75
    beat_file = folder / "rank-00000.json"
    beat = json.loads(beat_file.read_text())
    beat_file.write_text(json.dumps(beat | {"host": "elsewhere"}))
    os.utime(beat_file)
    with pytest.raises(UserError, match="without a watchdog on elsewhere: call"):
        stop(folder)
    with pytest.raises(UserError, match="holds no heartbeats"):
        status(tmp_path / "nothing")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_process_that_jax_aborts_after_a_stop_is_no_failure(tmp_path):
    watchdog = _watchdog(tmp_path, "", count=2)
    stopped, aborted = SimpleNamespace(code=130), SimpleNamespace(code=-signal.SIGABRT)
    watchdog._processes = [stopped, aborted]
    assert watchdog._is_stop_code(-signal.SIGABRT)
    stopped.code = 1
    assert not watchdog._is_stop_code(-signal.SIGABRT)
