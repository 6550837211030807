"""What jaxscale costs over the same model and step written by hand in plain JAX.

    python experiments/benchmarks/overhead.py [--tiny] [--idle]

Three figures on one device, for the default experiment against `plain_loop.py`: time per step (medians of interleaved
steps, an identical second copy of the hand-written program as control), FLOP and temporary bytes of the compiled
programs. One figure on the host: what a step of the training loop, batches, placement, log and all, adds to the bare
jitted call, for a model of 200 parameter arrays; and what the loop adds to a step that does nothing (`--idle`).

Measured on 2 cores, JAX 0.10.2: time 0.75x (control 1.00x; `layers/linear.py` says why), FLOP 0.996x, temporary bytes
0.987x; 0.77 ms on the host. Of the loop around an idle step, 31 us of processor time, measured beside other work.
"""

import argparse
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import plain_loop
from figures import Figure, show

from jaxscale.recipe.plan import Plan
from jaxscale.records.source import load_file
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.step.build import build

EXPERIMENTS = Path(__file__).resolve().parent.parent
UNROLL = load_file(EXPERIMENTS / "shakespeare.py")[0].plan.unroll


def timed(run: Callable[[], Any]) -> float:
    """Seconds until the result of `run` is there."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


class HandWritten:
    """The hand-written loop, compiled, with its state."""

    def __init__(self, devices: list[Any], batch: dict[str, np.ndarray]) -> None:
        start, step, rows = plain_loop.make_step(devices, UNROLL)
        self.state, self.batch = start(), jax.device_put(batch, rows)
        self.compiled = step.lower(self.state, self.batch).compile()

    def __call__(self) -> Any:
        """One step."""
        self.state, metrics = self.compiled(self.state, self.batch)
        return metrics


class Ours:
    """jaxscale's step of the default experiment, compiled, with its state."""

    def __init__(self, plan: Plan, batch: dict[str, np.ndarray]) -> None:
        experiment, _ = load_file(EXPERIMENTS / "shakespeare.py")
        self.step = build(experiment, plan)
        self.step.compile(batch)
        self.compiled = self.step.step_fn.lower(self.step.layout.abstract, self.step.abstract_batch(batch)).compile()
        self.state, self.batch = self.step.init(), self.step.place(batch)

    def __call__(self) -> Any:
        """One step."""
        self.state, metrics = self.step(self.state, self.batch)
        return metrics


def step_figures(steps: int) -> list[Figure]:
    """Time, FLOP and temporary bytes on one device."""
    shape = (plain_loop.BATCH, plain_loop.CONTEXT)
    rng = np.random.default_rng(0)
    batch = {k: rng.integers(0, plain_loop.VOCAB, shape, dtype=np.int32) for k in ("tokens", "targets")}
    device = jax.devices()[:1]
    plain, control = HandWritten(device, batch), HandWritten(device, batch)
    ours = Ours(Plan(mesh=MeshSpec(), unroll=UNROLL), batch)
    seconds: dict[str, list[float]] = {"plain": [], "control": [], "ours": []}
    programs = [("plain", plain), ("ours", ours), ("control", control)]
    for i in range(steps + 5):
        programs = programs[1:] + programs[:1]  # so that none always runs behind the same other one
        for name, run in programs:
            taken = timed(run)
            if i >= 5:
                seconds[name].append(taken)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    programs: list[Any] = [ours.compiled, plain.compiled]
    flop = [program.cost_analysis()["flops"] for program in programs]
    temp = [program.memory_analysis().temp_size_in_bytes for program in programs]
    return [
        Figure("time per step / hand-written", median["ours"] / median["plain"], "x", 1.03, "<="),
        Figure("control: hand-written / itself", median["control"] / median["plain"], "x", None),
        Figure("compiled FLOP / hand-written", flop[0] / flop[1], "x", 1.005, "<="),
        Figure("temporary bytes / hand-written", temp[0] / temp[1], "x", 1.005, "<="),
    ]


def host_figures(steps: int, rounds: int) -> list[Figure]:
    """Milliseconds that the training loop adds to the bare jitted call, with 200 parameter arrays."""
    from many_leaves import many_leaves

    from jaxscale.training.loop import train

    experiment = dataclasses.replace(many_leaves(leaves=200), steps=steps)
    step = build(experiment)
    opened = experiment.data.open(experiment.batch, experiment.seed)
    with opened.train() as batches:
        placed = step.place(next(batches))
    step.compile(placed)
    state, added = step.init(), []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds):  # in turns: a busy machine spoils both
            run = train(experiment, out=Path(folder) / f"run{turn}", quiet=True)
            looped = [row["step_seconds"] for row in run.metrics if row["kind"] == "train"]
            bare = []
            for _ in range(steps):
                start = time.perf_counter()
                state, metrics = step(state, placed)
                jax.block_until_ready(metrics)
                bare.append(time.perf_counter() - start)
            added.append(1e3 * (statistics.median(looped[5:]) - statistics.median(bare[5:])))
    return [Figure("host work per step, 200 arrays", statistics.median(added), "ms", 1.0, "<=")]


class IdleStep:
    """A step that does nothing: it returns the same metrics, and notes when it is called.

    Attributes:
        wall: time of each call, in seconds of the wall clock.
        processor: time of each call, in seconds of this process's processors.
    """

    def __init__(self, mesh: Any) -> None:
        self.mesh, self.program, self.async_pipeline = mesh, None, None
        self.wall: list[float] = []
        self.processor: list[float] = []
        self._metrics = {"loss": 2.5, "grad_norm": 0.5, "learning_rate": 1e-3, "weight": 64.0}
        self._metrics = {name: np.float32(value) for name, value in self._metrics.items()}
        self._metrics |= {"skipped": np.int32(0), "skipped_in_row": np.int32(0)}

    def __call__(self, state: Any, batch: Any) -> Any:
        """Return the state and the metrics."""
        self.wall.append(time.perf_counter())
        self.processor.append(time.process_time())
        return state, self._metrics

    def place(self, batch: Any) -> Any:
        """Return the batch."""
        return batch


class IdleBatches:
    """Batches that are always there."""

    def __next__(self) -> dict[str, Any]:
        return {}

    def get_state(self) -> dict[str, Any]:
        """Return the state of the data."""
        return {"next": 0}


def loop_seconds(steps: int, *, is_cpu: bool, callbacks: Any = ()) -> tuple[float, float]:
    """Return the median seconds that the loop takes around a step that does nothing, by wall clock and processors.

    The log of every step is written to a file, as in a run.

    Args:
        steps: number of steps.
        is_cpu: whether the loop waits for each step at once, as on CPU devices, instead of after the next one.
        callbacks: functions of an event.
    """
    from many_leaves import many_leaves

    from jaxscale.records.skip_causes import Causes
    from jaxscale.training import loop
    from jaxscale.training.display import Display
    from jaxscale.training.endings import watch_steps
    from jaxscale.training.journal import Journal
    from jaxscale.training.meter import Meter
    from jaxscale.training.pauses import Pauses
    from jaxscale.training.profile import Profiler
    from jaxscale.training.signals import Agreement, Stop

    experiment = dataclasses.replace(many_leaves(leaves=4), steps=steps + 1)
    step: Any = IdleStep(jax.make_mesh((1,), ("data",), devices=jax.devices()[:1]))
    checkpoints: Any = None
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder), Display(steps, quiet=True, name="idle"), callbacks)
        journal.open()
        training = loop._Training(
            experiment, experiment.plan, journal, Stop(), "auto", 1, Profiler(None), None, None, None, {}
        )
        training.step, training.is_cpu, training.meter = step, is_cpu, Meter(10**6, None, None)
        training.causes = Causes(training.step)
        training.agreement = Agreement(step.mesh)
        pauses: Any = Pauses(experiment, step, None, {}, checkpoints, journal, None, is_cpu, {})
        pauses.is_due = lambda updates: False
        pauses.poll = lambda: None
        pauses.__class__ = type("Idle", (Pauses,), {"__call__": lambda *_, **__: None})
        with watch_steps(journal, checkpoints, step) as training.stuck_watch:
            training._run_steps(None, IdleBatches(), {}, Stop(), pauses)
        journal.close()
    wall, processor = (float(np.median(np.diff(times)[5:])) for times in (step.wall, step.processor))
    return wall, processor


def idle_figures(steps: int, rounds: int) -> list[Figure]:
    """Microseconds of the loop around a step that does nothing, without and with a callback.

    Of the medians of several rounds the least counts, since other work on the machine only adds to them.
    """
    figures = []
    for note, callbacks in (("", ()), (", one callback", (lambda event: None,))):
        medians = [loop_seconds(steps, is_cpu=False, callbacks=callbacks) for _ in range(rounds)]
        wall, processor = (1e6 * min(column) for column in zip(*medians, strict=True))
        figures.append(
            Figure(f"loop around an idle step{note}, processor", processor, "us", 50.0 if not note else None, "<=")
        )
        figures.append(Figure(f"loop around an idle step{note}", wall, "us", None))
    return figures


def main() -> None:
    """Print the table; exit with 1 if a bar does not hold at full size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="few steps: shows that it works, not the figures")
    parser.add_argument("--idle", action="store_true", help="only the loop around a step that does nothing")
    arguments = parser.parse_args()
    tiny = arguments.tiny
    jax.config.update("jax_platforms", "cpu")
    figures = (
        [] if arguments.idle else step_figures(6 if tiny else 80) + host_figures(12 if tiny else 200, 1 if tiny else 3)
    )
    figures += idle_figures(50 if tiny else 10_000, 1 if tiny else 5)
    show(figures, "Overhead of jaxscale over plain JAX")
    if not tiny and not all(f.holds is not False for f in figures):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
