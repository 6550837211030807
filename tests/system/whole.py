"""A whole run through the command line: fit, train, stopped or killed in the middle, resumed, and all that comes after.

Commands run in this process, which is fast; a run that is killed with SIGKILL is one of its own.
"""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxscale.step.build
import jaxscale.training.loop
from jaxscale.cli.main import main
from jaxscale.errors import UserError
from jaxscale.models.huggingface import describe
from jaxscale.records.source import load_experiment
from jaxscale.step.train_step import TrainStep
from jaxscale.values import to_json
from tests.training.watching import described, last_lines, newest

STEPS, MIDDLE = 4, 2
"""Updates of a run, and those before it is interrupted: a checkpoint is saved there."""
EVENTS = ("compile", "predicted")
"""Of a run's log: the bytes of its compiled step, and those of its state by kind."""
STATE = ("parameters", "optimizer state", "model state", "batch", "residuals", "outer state")
"""Rows of `fit` that are arguments of the step; what an asynchronous pipeline has in flight it counts as its stash."""

BOUND, LOSSY_BOUND = 1e-4, 0.02
"""Relative differences of losses between layouts: of sums, and of techniques that round blocks or have replicas."""
_FIELDS = (f"--plan.{name} " for name in ("precision", "matmul", "reduce", "state", "master", "diloco"))
LOSSY = (*_FIELDS, "one_bit", "pipedream", "2bw", "pipemare")


class Ended(AssertionError):
    """A command that ended with another exit code than it should have."""

    def __init__(self, words: Sequence[str], code: int, said: str) -> None:
        super().__init__(f"jaxscale {shlex.join(words)}: exit code {code}\n{said[-3000:]}")
        self.code, self.said = code, said


def command(*words: str, codes: Sequence[int] = (0,)) -> str:
    """What a command printed; its exit code must be one of `codes`."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        code = main(words)
    if code not in codes:
        raise Ended(words, code, told.getvalue())
    return told.getvalue()


@contextlib.contextmanager
def compiled_once(
    steps: dict[str, TrainStep] | None = None, done: dict[tuple[TrainStep, str], Any] | None = None
) -> Iterator[None]:
    """Within it, runs of one experiment and plan share their compiled step, as if it were loaded from a cache.

    Experiments whose JSON has functions or objects by their names alone share nothing.

    Args:
        steps: by experiment and plan, those to begin with; those that are built are added.
        done: by step and shapes of batches, what its compilation returned; the same.
    """
    steps = {} if steps is None else steps
    done = {} if done is None else done
    build, compile = jaxscale.step.build.build, TrainStep.compile

    def built(experiment: Any, plan: Any = None, *, devices: Any = None) -> TrainStep:
        key = json.dumps([to_json(experiment), to_json(plan), str(devices)], sort_keys=True)
        if '{"callable": ' in key or '{"object": ' in key:
            return build(experiment, plan, devices=devices)
        if key not in steps:
            steps[key] = build(experiment, plan, devices=devices)
        return steps[key]

    def compiled(self: TrainStep, batch: Any) -> Any:
        key = self, str(jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), batch))
        if key not in done:
            done[key] = compile(self, batch)
        return done[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxscale.step.build.build", built)
        patch.setattr(TrainStep, "compile", compiled)
        yield


@contextlib.contextmanager
def _acting_after(step: int, act: Callable[[], None]) -> Iterator[None]:
    """Within it, a function is called as soon as a run in this process has a step behind it."""
    real = jaxscale.training.loop._Training._settle

    def settle(self: Any, n: int, metrics: Any) -> None:
        real(self, n, metrics)
        if n == step:
            act()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxscale.training.loop._Training, "_settle", settle)
        yield


def stopped_after(step: int) -> contextlib.AbstractContextManager[None]:
    """A run in this process gets a SIGTERM as soon as it has this step behind it."""
    return _acting_after(step, lambda: os.kill(os.getpid(), signal.SIGTERM))


def failing_after(step: int) -> contextlib.AbstractContextManager[None]:
    """A run in this process fails once it has this step behind it, before anything is saved after it."""

    def fail() -> None:
        raise RuntimeError("made by the test")

    return _acting_after(step, fail)


def from_memory(folder: Path, variant: str, flags: str, layout: str) -> None:
    """A run that fails without a checkpoint goes on from the copy in memory, as one that nothing disturbed.

    Args:
        folder: with the experiment file and its data; runs are made there.
        variant: of the experiment.
        flags: of the techniques.
        layout: flags of the mesh.
    """
    run, undisturbed = folder / "run", folder / "undisturbed"
    subject = [str(folder / "tiny.py"), *filter(None, [variant])]
    copies = ["--checkpoint.every", "0", "--checkpoint.best", "false", "--checkpoint.memory_every", "1"]
    training = ["train", *subject, "--steps", str(STEPS), *shlex.split(flags), *shlex.split(layout), *copies, "--out"]
    command(*training, str(undisturbed))
    with failing_after(STEPS - 1):
        command(*training, str(run), codes=(1,))
    assert newest(run) == 0
    output = command(*training, str(run))
    assert f"after step {STEPS - 2}, from the copy in the hosts' memory" in output, output
    assert last_lines(run) == last_lines(undisturbed)
    for name in ("arrays", "data"):
        assert described(run, STEPS)[name] == described(undisturbed, STEPS)[name]


def killed_after(step: int, out: Path, *words: str) -> None:
    """A run of its own process that gets a SIGKILL once the checkpoint of this step is saved."""
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxscale", *words],
        env={**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 300
    while newest(out) < step and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.0005)
    process.kill()
    said, _ = process.communicate()
    assert newest(out) >= step, said[-3000:]
    assert process.returncode == -signal.SIGKILL, said[-3000:]


def whole_run(
    folder: Path, variant: str, flags: str, layout: str, *, kill: bool = False, onto: str = "", steps: int = STEPS
) -> dict[str, Any]:
    """A run from `fit` to its report, compared with one that nothing disturbed.

    Args:
        folder: with the experiment file and its data; runs are made there.
        variant: of the experiment.
        flags: of the techniques.
        layout: flags of the mesh.
        kill: with SIGKILL, not told to stop.
        onto: flags of another layout, which a copy of the interrupted run is continued on.
        steps: updates.

    Returns:
        Bytes per device and kind that `fit` estimated, of the device and the host, and those of the compiled step.

    Raises:
        Ended: a command ended with another exit code than it should have.
    """
    run, undisturbed, moved = (folder / name for name in ("run", "undisturbed", "moved"))
    subject = [str(folder / "tiny.py"), *filter(None, [variant])]
    given, there = shlex.split(flags), shlex.split(layout)
    estimate = command("fit", *subject, *given, *there, codes=(0, 3))
    anywhere = ["train", *subject, "--steps", str(steps), *given]
    training = [*anywhere, *there, "--out"]
    command(*training, str(undisturbed))
    expected = last_lines(undisturbed)
    assert list(expected) == list(range(1, steps + 1))
    assert np.isfinite([row["loss"] for row in expected.values()]).all()

    if kill:
        killed_after(MIDDLE, run, *training, str(run))
    else:
        with stopped_after(MIDDLE):
            command(*training, str(run), codes=(75,))
    assert MIDDLE <= newest(run) < steps
    if onto:
        _resumed_elsewhere(run, moved, [*anywhere, *shlex.split(onto), "--out", str(moved)], expected)
    command(*training, str(run))
    assert last_lines(run) == expected, "the resumed run and the undisturbed one differ"
    for name in ("arrays", "data"):  # parameters, optimizer state, what is in flight; the next batch
        assert described(run, steps)[name] == described(undisturbed, steps)[name]
    _afterwards(folder, run)
    estimated, compiled = _estimated(estimate), _compiled(run)
    state = sum(estimated.get(kind, 0) for kind in STATE)
    np.testing.assert_allclose(compiled["state"], state, rtol=0.01, err_msg="the state as fit estimates it")
    return {"estimate": estimated, "compiled": compiled}


def _resumed_elsewhere(run: Path, moved: Path, words: list[str], expected: Any) -> None:
    """A copy of the run goes on under another layout, whose losses are those of before as nearly as sums allow."""
    shutil.copytree(run, moved)
    command(*words)
    after = last_lines(moved)
    assert list(after) == list(expected)
    bound = LOSSY_BOUND if any(word in " ".join(words) for word in LOSSY) else BOUND
    for step, row in after.items():
        np.testing.assert_allclose(row["loss"], expected[step]["loss"], rtol=bound, err_msg=f"step {step}: {words}")


def _estimated(said: str) -> dict[str, float]:
    """The bytes per kind of the table that `fit` prints."""
    units = {unit: 1024**power for power, unit in enumerate(("B", "KiB", "MiB", "GiB"))}
    found = {}
    for line in said.splitlines():
        if row := re.fullmatch(r"(\S+(?: \S+)*?) {2,}(\S.*? [KMG]?i?B.*)", line):
            found[row[1]] = sum(float(n) * units[unit] for n, unit in re.findall(r"([\d.]+) ([KMG]?i?B)", row[2]))
    assert found["total"] > 0, said
    return found


def _compiled(run: Path) -> dict[str, int]:
    """The bytes of the compiled step, as the run's log has them for comparison with `fit`."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (*_, compiled), (*_, predicted) = ([row for row in rows if row.get("name") == name] for name in EVENTS)
    assert compiled["temp_bytes"] > 0
    return {
        "state": compiled["argument_bytes"] - predicted.get("in_flight_bytes", 0),
        "temporary": compiled["temp_bytes"],
    }


def _afterwards(folder: Path, run: Path) -> None:
    """What is done with a run that is over: evaluated, sampled, exported, reported."""
    assert "loss" in command("evaluate", str(run))
    with_text = (run / "tokenizer.json").exists()
    command("generate", str(run), "--prompt", "ab", "--tokens", "12", codes=(0,) if with_text else (2,))
    page = run / "report.html"
    page.unlink()
    command("report", str(run))
    assert "<html" in page.read_text()
    model = load_experiment(run).model
    try:
        describe(getattr(model, "model", model))
        has_form = True
    except UserError:
        has_form = False
    command("export", str(run), str(folder / "exported"), codes=(0,) if has_form else (2,))
    assert (folder / "exported" / "config.json").exists() == has_form
