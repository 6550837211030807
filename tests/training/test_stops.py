"""Signals to processes of the command line: in each phase before the first step, during a save, and by a terminal.

By default: while XLA compiles, signals during a save under `nohup`, and a closed terminal, whose run ends with 75 and a
checkpoint. Variants: the other phases, which `test_loop.py` interrupts within one process, and a save that ends.
"""

import json
import os
import pty
import signal
import subprocess
import sys
import time

import pytest
from quick import environment

from tests.tiers import variants

SECONDS = 5.0  # two on a machine with nothing else to do

FILE = """
import os, time
import jaxscale as jx
from jaxscale.checkpoint.store import Checkpoints
from jaxscale.data.text import Text
from jaxscale.step.train_step import TrainStep

PHASE = os.environ["PHASE"]

def mark():
    open(os.environ["MARK"], "w").close()

def sleeping(owner, name):
    real = getattr(owner, name)
    def wait(self, *arguments, **options):
        mark()
        for _ in range(600):
            time.sleep(0.1)
        return real(self, *arguments, **options)
    setattr(owner, name, wait)

def compiling(self, batch):
    import jax, jax.numpy as jnp
    def unrolled(x):
        for number in range(1000):
            x = jnp.sin(x) @ x + number
        return x
    lowered = jax.jit(unrolled).lower(jnp.ones((8, 8)))
    mark()
    start = time.monotonic()
    lowered.compile()
    print("compiled in", time.monotonic() - start, flush=True)

def saving(self):
    if self._running_save is None:
        return None
    mark()
    time.sleep(float(os.environ["SAVE_SECONDS"]))
    return real_wait(self)

real_wait = Checkpoints.wait
if PHASE == "data":
    sleeping(Text, "open")
elif PHASE == "allocation":
    sleeping(TrainStep, "init")
elif PHASE == "trace":
    sleeping(TrainStep, "compile")
elif PHASE == "restore":
    sleeping(Checkpoints, "restore_arrays")
elif PHASE == "compile":
    TrainStep.compile = compiling
elif PHASE == "save":
    Checkpoints.wait = saving
elif PHASE == "steps":
    real_call = TrainStep.__call__
    def call(self, state, batch):
        if int(state.step) == 2:
            mark()
            time.sleep(1)
        return real_call(self, state, batch)
    TrainStep.__call__ = call

experiment = jx.Experiment(
    name="stopped",
    model=jx.models.Decoder(vocab=256, context=16, layers=1, embed=8, heads=2, mlp=16),
    data=jx.data.Text(os.environ["TEXT"], context=16),
    steps=int(os.environ.get("STEPS", "40")), batch=4,
    evaluation=jx.Evaluation(every=0, batches=1), samples=jx.Samples(every=0, prompts=()),
    optimizer=jx.Optimizer(schedule="constant", warmup=0),  # one program, whatever the number of steps
    checkpoint=jx.Checkpointing(every=4, minutes=None), plan=jx.Plan(mesh="data:1"),
)
"""


class Runs:
    """Processes that train in one folder."""

    def __init__(self, folder, cache):
        self.folder, self.mark, self.cache = folder, folder / "mark", str(cache)
        self.processes = []
        (folder / "exp.py").write_text(FILE)
        (folder / "text.txt").write_text("the cat sat on the mat. " * 60)

    def environment(self, phase, **variables):
        """Return the environment of a process."""
        files = {"MARK": str(self.mark), "TEXT": str(self.folder / "text.txt"), "JAXSCALE_CACHE": self.cache}
        # the program whose compilation takes long is compiled as usual
        flags = {"XLA_FLAGS": ""} if phase == "compile" else {}
        return environment(PHASE=phase, JAX_NUM_CPU_DEVICES="1", **files, **flags, **variables)

    def start(self, phase, *prefix, **variables):
        self.mark.unlink(missing_ok=True)
        command = [*prefix, sys.executable, "-u", "-m", "jaxscale", "train", "exp.py", "--out", "run"]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.processes.append(
            subprocess.Popen(command, cwd=self.folder, env=self.environment(phase, **variables), **streams)
        )
        return self.processes[-1]

    def wait_for_mark(self, process=None):
        deadline = time.monotonic() + 100
        while not self.mark.exists():
            assert time.monotonic() < deadline
            assert process is None or process.poll() is None, process.stdout.read()
            time.sleep(0.02)

    def events(self, name):
        lines = (self.folder / "run" / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if row.get("name") == name]

    @property
    def saved_steps(self):
        return sorted(int(path.name) for path in (self.folder / "run" / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A folder of compiled programs: those of the model are compiled once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def runs(tmp_path, cache):
    all_runs = Runs(tmp_path, cache)
    yield all_runs
    for process in all_runs.processes:  # a failed test must not leave one that trains a million steps
        process.kill()
        process.wait()


def end(process, number=signal.SIGTERM):
    """Send a signal; return the code, the output and the seconds until the process has ended."""
    start_time = time.monotonic()
    process.send_signal(number)
    code = process.wait(60)
    seconds = time.monotonic() - start_time
    return code, process.stdout.read(), seconds


@pytest.mark.parametrize("phase", variants(["compile", "data", "allocation", "trace"], default=1))
def test_before_the_first_step_a_signal_ends_at_once(runs, phase):
    process = runs.start(phase)
    runs.wait_for_mark(process)
    time.sleep(1)  # XLA is at work by now
    code, output, seconds = end(process)
    assert (code, "compiled in" in output) == (130, False), output
    assert output.count("jaxscale: stopped by SIGTERM before the first step: nothing is lost; start the run again") == 1
    print(f"{phase}: {seconds:.2f} s")
    assert seconds < SECONDS
    if phase in ("compile", "allocation", "trace"):
        assert [row["by"] for row in runs.events("preempted")] == ["SIGTERM"]


@pytest.mark.slow
def test_what_the_signal_does_not_wait_for_takes_long(runs):
    """The program whose compilation the test above interrupts."""
    process = runs.start("compile")
    line = next(line for line in process.stdout if line.startswith("compiled in"))
    process.kill()
    process.wait()
    assert float(line.split()[-1]) > 5


@pytest.mark.parametrize("phase", variants(["restore", "compile"]))
def test_a_continued_run_ends_with_75_and_names_its_checkpoint(runs, phase):
    assert runs.start("none", STEPS="4").wait(100) == 0
    process = runs.start(phase)
    runs.wait_for_mark(process)
    time.sleep(0.3)
    code, output, seconds = end(process)
    assert code == 75, output
    assert "stopped by SIGTERM before step 5. The checkpoint of step 4 is intact: start the run again" in output
    print(f"{phase}: {seconds:.2f} s")
    assert seconds < SECONDS
    assert runs.saved_steps == [4]


@pytest.mark.parametrize("number", variants([signal.SIGTERM, signal.SIGHUP]))
def test_a_signal_during_a_save_waits_for_it(runs, number):
    process = runs.start("save", SAVE_SECONDS="2", STEPS="1000000")
    runs.wait_for_mark(process)
    code, output, _ = end(process, number)
    assert code == 75, output
    assert f"stopped by {number.name} after step" in output
    assert runs.saved_steps[-1] == runs.events("preempted")[0]["step"]


def test_nohup_ignores_a_hangup_and_a_second_signal_during_a_save_ends_at_once(runs):
    process = runs.start("save", "nohup", SAVE_SECONDS="60", STEPS="1000000")
    runs.wait_for_mark(process)
    for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM):  # a second hangup would end it
        process.send_signal(number)
        time.sleep(0.5)
        assert process.poll() is None
    code, output, seconds = end(process)
    assert code in (-signal.SIGTERM, 128 + signal.SIGTERM), output
    assert seconds < SECONDS


@pytest.mark.variant  # by default: two hangups, above
def test_a_run_under_nohup_goes_on_to_its_end(runs):
    process = runs.start("steps", "nohup", STEPS="6")
    runs.wait_for_mark(process)
    code, output, _ = end(process, signal.SIGHUP)
    assert code == 0, output


def code_within(pid, seconds):
    """Return the exit code of a child; if it runs on after this time, kill it first."""
    deadline = time.monotonic() + seconds
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    if ended[0] == 0:
        os.kill(pid, signal.SIGKILL)
        ended = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(ended[1])


def test_a_closed_terminal_does_not_keep_a_run_from_saving(runs):
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(runs.folder)
        words = ["-u", "-m", "jaxscale", "train", "exp.py", "--out", "run"]
        os.execve(sys.executable, [sys.executable, *words], runs.environment("steps", STEPS="1000000"))
    runs.wait_for_mark()
    os.close(terminal)
    assert code_within(pid, 60) == 75
    assert [row["by"] for row in runs.events("preempted")] == ["SIGHUP"]
    assert runs.saved_steps[-1] == runs.events("preempted")[0]["step"]
