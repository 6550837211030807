"""Runs killed with SIGKILL at chosen and at random moments, compared bit for bit with an undisturbed twin.

Every attempt is a fork of a process that has imported everything and started no backend. The child announces each phase
of its heartbeat, and further moments, through a pipe; the parent waits for a moment, then for a random delay, and kills
it. The last log line of every step, and the arrays and the state of the data in the last checkpoint, must equal the
twin's. The subject "layouts" continues after each kill on another mesh and ZeRO stage: its arrays must be the
checkpoint's after each restore, and its twin changes the layout at the same steps.
"""

import contextlib
import functools
import importlib
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

FLAGS = (
    "--xla_force_host_platform_device_count=4 --xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=0 "
    "--xla_disable_hlo_passes=all-reduce-promotion"
)
PLANS: dict[str, dict[str, str]] = {
    "plain": {"mesh": "data:2"},
    "stream": {"mesh": "data:2"},
    "shuffled text": {"mesh": "data:2"},
    "arrays": {"mesh": "data:2"},
    "int8 state": {"mesh": "data:2", "state.moments": "int8"},
    "PowerSGD": {"mesh": "replica:2", "reduce": "powersgd:2"},
    "DiLoCo": {"mesh": "replica:2", "diloco": "every=3"},
    "1F1B": {"pipeline": "1f1b:2x2"},
    "PipeDream-2BW": {"pipeline": "2bw:2x2"},
    "layouts": {"mesh": "data:2"},
}
"""Fields of the plan by the name of a subject."""
LAYOUTS = (
    {"mesh": "data:2"},
    {"mesh": "fsdp:4", "zero": "3"},
    {"mesh": "data:2,fsdp:2", "zero": "1"},
    {"mesh": "1"},
    {"mesh": "fsdp:2", "zero": "2"},
)
"""Plans that the subject "layouts" takes in turn."""
MOMENTS = ("stepping", "saving", "prune", "compiling", "any", "evaluating", "restoring", "cache", "saving", "any")
"""Moments in turn; "any" is a uniformly random time. The last kill of a run waits for its report."""
EXACT = ("step", "loss", "grad_norm", "learning_rate", "tokens")
"""Fields of a log line that an interruption must not change."""
EVERY = 4
"""Steps between checkpoints."""
CHILD_SECONDS = 300.0
"""Longest time of an attempt; afterwards it counts as hung."""


class Counting:
    """Batches by number, with a state, for `Stream`."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> "Counting":
        return self

    def __next__(self) -> dict[str, Any]:
        self.number += 1
        return batch_of(self.number)

    def get_state(self) -> dict[str, int]:
        """Return the number of batches read."""
        return {"number": self.number}

    def set_state(self, state: dict[str, int]) -> None:
        """Go to a number of batches read."""
        self.number = state["number"]


def batch_of(number: int, rows: int = 4) -> dict[str, Any]:
    """Return random tokens as a batch [rows, 16], by the number of the batch."""
    import numpy as np

    tokens = np.random.default_rng(number).integers(0, 256, (rows, 17), dtype=np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def experiment_of(subject: str, folder: Path, steps: int) -> Any:
    """Return the tiny experiment of a subject, whose text lies in a folder."""
    from jaxscale.data.rows import Arrays
    from jaxscale.data.stream import Stream
    from jaxscale.data.text import Text
    from jaxscale.models.decoder import Decoder
    from jaxscale.optim.optimizer import Optimizer
    from jaxscale.recipe.experiment import Checkpointing, Evaluation, Experiment, Samples

    text = folder / "text.txt"
    if not text.exists():
        text.write_text("\n\n".join(f"line {i * i % 97} of the text." for i in range(300)))
    data: Any = Text(text, context=16)
    if subject == "stream":
        data = Stream(Counting, [batch_of(-number % 1000) for number in (1, 2)])
    elif subject == "arrays":
        data = Arrays(batch_of(0, rows=100))
    elif subject == "shuffled text":
        data = Text(text, context=16, layout="packed", separator="\n\n")
    embed = 64 if subject == "int8 state" else 8  # states of fewer than 4,096 numbers stay float32
    return Experiment(
        name="killed",
        model=Decoder(
            vocab=256, context=16, layers=2, embed=embed, heads=2, mlp=2 * embed, dropout=0.1 * (subject == "plain")
        ),
        data=data,
        optimizer=Optimizer(warmup=5, learning_rate=1e-2),
        steps=steps,
        batch=4,
        evaluation=Evaluation(every=6, batches=1),
        samples=Samples(prompts=()),
        checkpoint=Checkpointing(every=EVERY, keep=2, minutes=None),
    )


def warm_up() -> None:
    """Import what a run needs; the backend stays unstarted."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS, "NPROC": "8"}
    for name in ("grain", "orbax.checkpoint", "jaxscale.models.decoder_module", "jaxscale.report.page"):
        importlib.import_module(name)
    importlib.import_module("jaxscale.training.loop")


def _announce_moments(write: Callable[[str], object]) -> None:
    """Make this process announce the phases of its heartbeat and further moments."""
    from jaxscale import heartbeat
    from jaxscale.checkpoint.store import Checkpoints
    from jaxscale.data import cache
    from jaxscale.report import page

    def announce(owner: Any, name: str, moment_of: Callable[..., str]) -> None:
        """Announce a moment, which depends on the arguments, before each call of a function of a module or class."""

        def call(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            write(moment_of(*args))
            return inner(*args, **kwargs)

        _wrap(owner, name, call)

    announce(Checkpoints, "_prune", lambda *_: "prune")
    announce(cache, "_encode", lambda *_: "cache")
    announce(page, "write_report", lambda *_: "report")
    announce(heartbeat.Writer, "set", lambda writer, phase, *_: phase)


def _check_restored_arrays() -> None:
    """Make this process fail if the arrays of a restored state are not those that were read, bit for bit."""
    from jaxscale.checkpoint.checksum import checksums
    from jaxscale.step.train_step import TrainStep

    def call(from_canonical: Callable[..., Any], step: Any, arrays: Any) -> Any:
        sums = checksums(dict(arrays))
        state = from_canonical(step, arrays)
        assert checksums(step.to_canonical(state)) == sums, "the restored state differs from the checkpoint"
        return state

    _wrap(TrainStep, "from_canonical", call)


def _wrap(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Replace a function of a module or class by `call`, whose first argument is the function itself."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return call(inner, *args, **kwargs)

    setattr(owner, name, wrapper)


class Attempt:
    """A forked process that trains.

    Args:
        subject: name of the subject.
        folder: holds the text, the caches and the runs of the subject.
        out: the run directory.
        steps: number of updates of the experiment.
        plan: fields of the plan, as text.
        stop_step: step after which the run stops; `None` for the last one.
    """

    def __init__(
        self, subject: str, folder: Path, out: Path, steps: int, plan: dict[str, str], stop_step: int | None = None
    ) -> None:
        read_end, write_end = os.pipe()
        self.output = folder / "output.txt"
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(read_end)
            self._train(subject, folder, out, steps, plan, stop_step, write_end)
        os.close(write_end)
        self._pipe, self._pending = read_end, b""

    def _train(
        self,
        subject: str,
        folder: Path,
        out: Path,
        steps: int,
        plan: dict[str, str],
        stop_step: int | None,
        pipe: int,
    ) -> None:
        """Train in the child, and end it."""
        code = 1
        try:
            with self.output.open("w") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            import jax

            from jaxscale.compiler.kept_programs import keep_ordered_programs
            from jaxscale.recipe.plan import Plan
            from jaxscale.training.loop import train
            from jaxscale.values import override

            os.environ["JAXSCALE_CACHE"] = str(folder / "cache")
            jax.config.update("jax_compilation_cache_dir", str(folder / "programs"))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
            jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
            keep_ordered_programs()
            _announce_moments(lambda moment: os.write(pipe, f"{moment}\n".encode()))
            _check_restored_arrays()
            experiment = experiment_of(subject, folder, steps)
            callbacks = [] if stop_step is None else [lambda event: event.step >= stop_step]
            train(experiment, override(Plan(), plan), out=out, quiet=True, callbacks=callbacks)
            code = 0
        except Exception:
            traceback.print_exc()
        finally:  # the child of a fork must not go on in its parent's program
            sys.stderr.flush()
            os._exit(code)

    def moments(self, seconds: float) -> Iterator[str]:
        """Yield the announced moments, until the process ends or `seconds` have passed."""
        deadline = time.monotonic() + seconds
        while (remaining := deadline - time.monotonic()) > 0:
            if not select.select([self._pipe], [], [], remaining)[0]:
                return
            chunk = os.read(self._pipe, 4096)
            if not chunk:
                return
            *lines, self._pending = (self._pending + chunk).split(b"\n")
            yield from (line.decode() for line in lines)

    def end(self) -> int | None:
        """Wait for the process, and return its exit code; `None` if it hung."""
        for _ in self.moments(CHILD_SECONDS):
            pass
        code = self._reap(time.monotonic() + 5.0)
        if code is None:
            self.kill()
        return code

    def kill(self) -> int:
        """Kill the process, and return its exit code: -9 if it was killed, or what it ended with before."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        self._close()
        return os.waitstatus_to_exitcode(status)

    def _reap(self, deadline: float) -> int | None:
        """Return the exit code once the process has ended; `None` after the deadline."""
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._close()
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        return None

    def _close(self) -> None:
        os.close(self._pipe)


def kill_at(attempt: Attempt, moment: str, chance: random.Random, seconds: float) -> int:
    """Kill a process at a moment, and return its exit code: -9 if it was killed, or what it ended with before.

    Args:
        attempt: the process.
        moment: the moment to wait for; "any" for a uniformly random time.
        chance: source of random numbers.
        seconds: largest time at "any".
    """
    if moment == "any":
        for _ in attempt.moments(chance.uniform(0, seconds)):
            pass
        return attempt.kill()
    wanted_count = chance.randint(1, 6) if moment == "stepping" else 1
    seen_count = 0
    for announced in attempt.moments(CHILD_SECONDS):
        seen_count += announced == moment or (moment, announced) == ("restoring", "initializing")
        if seen_count == wanted_count:
            time.sleep(chance.uniform(0, 0.06 if moment in ("saving", "compiling", "restoring") else 0.004))
            break
    return attempt.kill()


def last_lines(run: Path) -> dict[int, dict[str, Any]]:
    """Return the last log line of each step, read without jaxscale."""
    line_by_step = {}
    for text in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(text)
        if row["kind"] == "train":
            line_by_step[row["step"]] = {name: row[name] for name in EXACT}
    return line_by_step


def resume_steps(run: Path) -> list[int]:
    """Return the step of each resume event of a run."""
    path = run / "metrics.jsonl"
    texts = path.read_text().splitlines() if path.exists() else []
    return [json.loads(text)["step"] for text in texts if '"name": "resume"' in text and text.endswith("}")]


def described(run: Path, step: int) -> dict[str, Any]:
    """Return shapes, checksums and the state of the data of a checkpoint, read without jaxscale."""
    path = run / "checkpoints" / f"{step:08d}" / "_CHECKPOINT_METADATA"
    content = json.loads(path.read_text())["custom_metadata"]["jaxscale"]
    return {name: content[name] for name in ("step", "tokens", "data", "arrays")}


def differences(run: Path, twin: Path, steps: int) -> str:
    """Return how a run differs from its twin; "" if it does not."""
    lines, twin_lines = last_lines(run), last_lines(twin)
    wrong_steps = [step for step in range(1, steps + 1) if lines.get(step) != twin_lines.get(step)]
    texts = [f"{len(wrong_steps)} log lines from step {wrong_steps[0]} on"] if wrong_steps else []
    facts, twin_facts = described(run, steps), described(twin, steps)
    texts += [f"{name} of the last checkpoint" for name in facts if facts[name] != twin_facts[name]]
    texts += [f"{path.name} is left" for path in (run / "checkpoints").iterdir() if "tmp" in path.name]
    return ", ".join(texts)


def _train_twin(subject: str, folder: Path, steps: int, segments: Sequence[tuple[int, int]]) -> tuple[Path, str]:
    """Train the undisturbed twin, and return its directory and its failure.

    Args:
        subject: name of the subject.
        folder: folder of the subject.
        steps: number of updates.
        segments: first step and number of the layout of each segment.
    """
    twin = folder / "twin"
    shutil.rmtree(twin, ignore_errors=True)
    for (start_step, layout), (stop_step, _) in zip(segments, [*segments[1:], (steps, 0)], strict=True):
        if start_step == stop_step:
            continue
        plan = LAYOUTS[layout] if subject == "layouts" else PLANS[subject]
        attempt = Attempt(subject, folder, twin, steps, plan, stop_step if stop_step < steps else None)
        if (code := attempt.end()) != 0:
            return twin, f"the twin ended with {code}: {attempt.output.read_text()[-600:]}"
        for path in (twin / "checkpoints").iterdir():  # the run stops one step late
            if path.name.isdigit() and int(path.name) > stop_step:
                shutil.rmtree(path)
    return twin, ""


def run_subject(subject: str, count: int, chance: random.Random, folder: Path) -> dict[str, Any]:
    """Kill one subject's run `count` times, finish it, and return the row about it."""
    steps = 8 * count + 2 * EVERY
    run, start_time = folder / "killed", time.monotonic()
    has_cache = subject not in ("stream", "arrays")
    is_varied = subject == "layouts"
    counts: dict[str, int] = {}
    segments: list[tuple[int, int]] = []
    failure, attempt_count, seconds = "", 0, 2.0
    moments = [moment for moment in MOMENTS if has_cache or moment != "cache"]
    first_moment = chance.randrange(len(moments))

    def start() -> Attempt:
        layout = attempt_count % len(LAYOUTS)
        return Attempt(subject, folder, run, steps, LAYOUTS[layout] if is_varied else PLANS[subject])

    def has_checkpoint() -> bool:
        return any(path.name.isdigit() for path in (run / "checkpoints").glob("*"))

    def record_segment(resume_count: int, is_new: bool) -> None:
        resumed = resume_steps(run)[resume_count:]
        if resumed:
            segments.append((resumed[-1], attempt_count % len(LAYOUTS)))
        elif is_new:  # it began at step 0; an attempt that was killed before it restored trained nothing
            segments[:] = [(0, attempt_count % len(LAYOUTS))]

    while sum(counts.values()) < count and attempt_count < 3 * count:
        is_last_kill = sum(counts.values()) == count - 1
        moment = "report" if is_last_kill else moments[(first_moment + attempt_count) % len(moments)]
        if moment == "cache":
            shutil.rmtree(folder / "cache", ignore_errors=True)
        resume_count, is_new, attempt_start = len(resume_steps(run)), not has_checkpoint(), time.monotonic()
        attempt = start()
        code = kill_at(attempt, moment, chance, 1.5 * seconds)
        if code == -signal.SIGKILL:
            counts[moment] = counts.get(moment, 0) + 1
            seconds = 0.5 * seconds + 0.5 * (time.monotonic() - attempt_start)
        elif code != 0:
            failure = f"attempt {attempt_count} ended with {code} before {moment}: {attempt.output.read_text()[-600:]}"
            break
        record_segment(resume_count, is_new)
        if code == 0:  # the run finished before the kill, so that fewer kills are reported
            break
        attempt_count += 1
    if not failure:
        resume_count, is_new = len(resume_steps(run)), not has_checkpoint()
        attempt = start()
        code = attempt.end()
        record_segment(resume_count, is_new)
        if code != 0:
            failure = f"the killed run ended with {code}: {attempt.output.read_text()[-600:]}"
    if not failure:
        twin, failure = _train_twin(subject, folder, steps, segments if is_varied else [(0, 0)])
        failure = failure or differences(run, twin, steps)
    moments_text = ", ".join(f"{name} {number}" for name, number in sorted(counts.items()))
    kill_count = sum(counts.values())
    if not failure and kill_count < count - 1:  # a run may end just before its last kill
        failure = f"only {kill_count} of {count} kills were made: the run ended before the others"
    return {
        "name": subject,
        "tried": kill_count,
        "outcome": "failed" if failure else "equal bit for bit",
        "detail": failure or moments_text,
        "is_sound": not failure,
        "seconds": round(time.monotonic() - start_time, 1),
    }


def run_kills(count: int, seed: int, only: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Kill runs `count` times in all, and yield a row for each subject.

    Args:
        count: number of kills; subjects get equal shares of at least 2.
        seed: of the moments.
        only: names of subjects; empty for all.
    """
    warm_up()
    subjects = list(only or PLANS)
    subjects = subjects[: max(1, count // 2)]
    for number, subject in enumerate(subjects):
        share = count // len(subjects) + (number < count % len(subjects))
        with tempfile.TemporaryDirectory(prefix="kills-") as name:
            row = run_subject(subject, share, random.Random(f"{seed}/{subject}"), Path(name))
        yield {**row, "replay": f"--part kills --only '{subject}' --count {share} --seed {seed}"}
