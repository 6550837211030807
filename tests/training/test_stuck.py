"""A step that waits without end: by a clock of the test's own, and in a process that sits in XLA's rendezvous."""

import json
import subprocess
import sys

import pytest
from quick import environment

from jaxscale import heartbeat
from jaxscale.training.stuck import StuckWatch


class Times:
    def __init__(self):
        self.now = 100.0
        self.ends = []
        self.watch = StuckWatch(lambda *waiting: self.ends.append(waiting), clock=lambda: self.now)

    def step(self, seconds):
        self.now += seconds
        self.watch.note_step()

    def look(self, seconds, every=1.0):
        for _ in range(round(seconds / every)):
            self.now += every
            self.watch.look()


@pytest.fixture
def times():
    return Times()


def test_the_first_step_has_no_limit(times):
    with heartbeat.awaiting(1):
        times.look(10_000)
    assert times.watch.limit_seconds() is None
    assert times.ends == []


@pytest.mark.parametrize(("step_seconds", "limit"), [(0.1, 30.0), (1.5, 30.0), (10.0, 200.0)])
def test_the_limit_is_30_s_or_20_median_steps(times, step_seconds, limit):
    for seconds in [60.0, *[step_seconds] * 4]:
        times.step(seconds)
    assert times.watch.limit_seconds() == limit
    with heartbeat.awaiting(6):
        times.look(limit)
        assert times.ends == []
        times.look(3)
    assert times.ends[0][0] == 6
    assert times.ends[0][1] == pytest.approx(limit, abs=2)


def test_waits_for_several_steps_and_what_is_between_them_do_not_add_up(times):
    times.step(0.1)
    for step in range(2, 5):
        with heartbeat.awaiting(step):
            times.look(25)
        times.look(500)  # an evaluation, a save or a callback
    assert times.ends == []


def test_a_pause_of_the_process_does_not_count(times):
    times.step(0.1)
    with heartbeat.awaiting(2):
        times.look(20)
        times.look(36_000, every=36_000)  # stopped for ten hours, and continued
        times.look(6)
        assert times.ends == []
        times.look(5)
    assert times.ends


def test_with_several_processes_all_must_be_in_the_step(tmp_path, monkeypatch):
    ends, now = [], [0.0]
    watch = StuckWatch(lambda *waiting: ends.append(waiting), process_count=2, clock=lambda: now[0])
    peers = {0: ("stepping", True), 1: ("saving", False)}
    is_alive = {0: True, 1: True}
    beats = {0: 0, 1: 0}

    def read():
        for rank in beats:
            beats[rank] += is_alive[rank]
        return {
            rank: heartbeat.Heartbeat(rank, "h", 1, 1, phase, 2, 1.0, 9.0, beats[rank], {}, is_in_step=is_in_step)
            for rank, (phase, is_in_step) in peers.items()
        }

    def look(seconds):
        for _ in range(seconds):
            now[0] += 1
            watch.look()

    monkeypatch.setattr(heartbeat, "peer_heartbeats", read)
    watch.note_step()
    with heartbeat.awaiting(2):
        look(100)
        assert ends == []  # the other one saves
        peers[1], is_alive[1] = ("stepping", True), False
        look(100)
        assert ends == []  # it is frozen
        is_alive[1] = True
        look(40)
        assert ends
        del peers[1], beats[1]
        ends.clear()
        look(100)
        assert ends == []  # it is not seen


PROGRAM = """
import sys, threading, time
import jax, numpy as np
from jax.sharding import PartitionSpec as P
import jaxscale as jx
from jaxscale.step.train_step import TrainStep
from jaxscale.training import stuck
from jaxscale.training.loop import train
folder, case = sys.argv[1:]
open(folder + "/text.txt", "w").write("the cat sat on the mat. " * 60)
stuck.LEAST_SECONDS, stuck.LOOK_SECONDS = 2.0, 0.2
real, calls, is_blocked = TrainStep.__call__, [], [False]

def slow(x, device):
    if is_blocked[0] and int(device) == 0:
        threading.Event().wait(3600)
    return np.asarray(x)

def total(x):
    device = jax.lax.axis_index("data")
    y = jax.pure_callback(slow, jax.ShapeDtypeStruct(x.shape, x.dtype), x, device)
    return jax.lax.psum(y, "data")

def step(self, state, batch):
    calls.append(1)
    if len(calls) == 4 and case == "stuck":
        is_blocked[0] = True
        x = jax.device_put(np.arange(4.0), jax.sharding.NamedSharding(self.mesh, P("data")))
        jax.jit(jax.shard_map(total, mesh=self.mesh, in_specs=P("data"), out_specs=P()))(x).block_until_ready()
    return real(self, state, batch)

TrainStep.__call__ = step

def callback(event):
    if case == "callback" and event.step == 8:  # by then the limit is LEAST_SECONDS
        time.sleep(6)
        print("the callback is over")

experiment = jx.Experiment(
    name="stuck",
    model=jx.models.Decoder(vocab=256, context=16, layers=1, embed=8, heads=2, mlp=16),
    data=jx.data.Text(folder + "/text.txt", context=16),
    steps=9, batch=4,
    evaluation=jx.Evaluation(every=0, batches=1), samples=jx.Samples(every=0, prompts=()),
    checkpoint=jx.Checkpointing(every=3, minutes=None), plan=jx.Plan(mesh="data:2"),
)
train(experiment, out=folder + "/run", callbacks=[callback])
print("DONE", flush=True)
"""


def _ended(tmp_path, case):
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), case],
        capture_output=True, text=True, timeout=120, check=False,
        env=environment(JAX_NUM_CPU_DEVICES="2"),
    )  # fmt: skip


def test_a_stuck_collective_ends_the_process_with_a_word_and_a_long_callback_does_not(tmp_path):
    ended = _ended(tmp_path, "stuck")
    assert ended.returncode == 7, ended.stderr
    assert "step 4 is stuck: it has waited" in ended.stderr
    assert "the step's collectives: all-reduce over data (" in ended.stderr
    assert "in slow" in ended.stderr  # the stack of the callback that blocks the device
    assert "the checkpoint of step 3 is intact: start the run again" in ended.stderr
    assert "Check failure" not in ended.stderr  # of XLA's own abort
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (row,) = [row for row in rows if row.get("name") == "stuck"]
    assert (row["step"], row["limit"]) == (3, pytest.approx(2.0, abs=30))
    assert row["seconds"] > row["limit"]
    assert any("all-reduce" in text for text in row["by_op_id"].values())
    again = _ended(tmp_path, "callback")
    assert (again.returncode, again.stdout.splitlines()[-1]) == (0, "DONE"), again.stderr
    assert "after step 3" in again.stdout
    assert "the callback is over" in again.stdout


def test_xla_waits_longer_than_the_watcher_where_the_environment_sets_no_limit():
    code = "import os; from jaxscale.training.backend import start_backend; start_backend(is_watched=True); "
    code += "import jax; jax.devices(); print(os.environ.get('XLA_FLAGS', ''))"
    flag = "--xla_cpu_collective_call_terminate_timeout_seconds"
    for flags, expected in {"": f"{flag}=3600", f"{flag}=50": f"{flag}=50"}.items():
        variables = environment(JAX_NUM_CPU_DEVICES="2", XLA_FLAGS=flags)
        if not flags:
            del variables["XLA_FLAGS"]
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables, check=True)
        assert ended.stdout.strip() == expected
