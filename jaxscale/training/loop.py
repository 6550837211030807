"""train: a run from an Experiment to its last step, with its log, evaluations, samples, checkpoints and report.

The loop is the same for every plan: take a batch, dispatch a step, read the metrics of the previous one. Files are
written in an order that a restart can rely on after a kill: the line of a step is in the log before its state is in a
checkpoint, and a checkpoint holds the state of the data beside the model's, so that a continued run repeats every bit.
"""

import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxscale.checkpoint.restore import write_tokenizer
from jaxscale.checkpoint.store import Checkpoints, save_memory_warning
from jaxscale.compiler.kept_programs import count_excluded
from jaxscale.errors import Preempted, UserError
from jaxscale.planning.automatic_choices import resolve_choices
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.kernels import fields_of, lines_of
from jaxscale.recipe.plan import Plan
from jaxscale.records import directory as run_files
from jaxscale.records.processes import is_first, wait_for_all
from jaxscale.records.source import Source
from jaxscale.records.storage import run_path
from jaxscale.training import endings
from jaxscale.training.backend import start_backend
from jaxscale.training.check_data import check_data
from jaxscale.training.display import Display
from jaxscale.training.journal import Journal
from jaxscale.training.meter import Meter, peak_of
from jaxscale.training.pauses import Pauses
from jaxscale.training.profile import Profiler, ProfileRange
from jaxscale.training.resume import Earlier
from jaxscale.training.run import Run
from jaxscale.training.signals import Agreement, Stop
from jaxscale.training.traced_actions import trace_files
from jaxscale.values import to_json


def train(
    experiment: Experiment,
    plan: Plan | None = None,
    *,
    steps: int | None = None,
    out: Any = None,
    resume: Literal["auto", "never"] = "auto",
    log_every: int = 1,
    profile: str | None = None,
    source: Source | None = None,
    quiet: bool = False,
    devices: Sequence[Any] | None = None,
) -> Run:
    """Train an experiment, continue it from its newest checkpoint, or show its result if it has finished.

    Args:
        experiment: the experiment to train.
        plan: the plan to train by; the experiment's by default.
        steps: number of updates, in place of the experiment's. The schedule ends with the last update, so a run that is
            continued with another number changes its learning rate, and prints and logs that change.
        out: the run directory, a local, gs:// or s3:// path; `runs/NAME` by default.
        resume: "auto" continues the run in the directory, whose experiment may differ in steps, evaluation, samples,
            checkpoint and plan; "never" renames that directory and starts a new run.
        log_every: number of steps per line of the log; a line's tokens and seconds are those of all its steps.
        profile: range of steps to trace, such as "10:13" (the three from 10 to 12).
        source: origin of the experiment, so that commands can rebuild it.
        quiet: print nothing.
        devices: devices to run on; all by default.

    Returns:
        The run, with its metrics and its last state.

    Raises:
        UserError: an argument is not valid, which is checked before anything is traced; or the disk failed, and older
            checkpoints are intact.
        Preempted: a signal stopped the run, after which it saved, or before its first step with older checkpoints
            intact.
        KeyboardInterrupt: a signal stopped the run before its first step, with no checkpoint saved.
        Diverged: too many steps in a row were skipped; the message names the last good checkpoint.
    """
    if steps is not None:
        experiment = dataclasses.replace(experiment, steps=steps)
    if resume not in ("auto", "never"):
        raise UserError(f"resume: got {resume!r}, expected auto or never")
    if log_every < 1:
        raise UserError(f"log_every: got {log_every!r}, expected a whole number >= 1")
    profiler = Profiler(None if profile is None else ProfileRange.parse(profile).within(experiment.steps))
    start_backend()
    plan = resolve_choices(experiment, experiment.plan if plan is None else plan)
    folder = run_path(run_files.default_directory(experiment) if out is None else out)
    display = Display(experiment.steps, quiet=quiet or not is_first(), name=experiment.name)
    journal = Journal(folder, display)
    return _Training(experiment, plan, journal, resume, log_every, profiler, source, devices).run()


@dataclasses.dataclass
class _Training:
    """A run in progress: the arguments of `train`, and the counts so far.

    Args:
        n: number of updates made.
        tokens: number of target tokens seen.
        skipped: number of updates that the guard skipped.
        best: the least held-out loss so far; `None` before the first.
        data_state: state of the iterator over batches, after the newest batch that was taken.
        earlier: the run that this one continues; `None` for a new one.
    """

    experiment: Experiment
    plan: Plan
    journal: Journal
    resume: str
    log_every: int
    profiler: Profiler
    source: Source | None
    devices: Sequence[Any] | None
    n: int = 0
    tokens: int = 0
    skipped: int = 0
    best: float | None = None
    data_state: Any = None
    earlier: Earlier | None = None

    @property
    def folder(self) -> Any:
        """The run directory."""
        return self.journal.folder

    # -- before the first step -----------------------------------------------------------------------------------------

    def run(self) -> Run:
        """Check, train and return the result."""
        run_exists = (self.folder / run_files.EXPERIMENT).exists()
        if run_exists and self.resume == "never":
            if is_first():
                with run_files.claimed(self.folder):
                    self.journal.say(f"the run that was in {self.folder} is now {run_files.set_aside(self.folder)}")
            run_exists = False
        wait_for_all("the directory is set")
        if not run_exists:
            self._prepare()  # reports mistakes before the directory is made
        with run_files.claimed(self.folder) if is_first() else contextlib.nullcontext():
            policy = self.experiment.checkpoint
            self.earlier = Earlier.read(self.folder, self.experiment)
            if self.earlier is not None:
                steps = Checkpoints(self.folder / run_files.CHECKPOINTS, write=False).steps()
                if steps and steps[-1] >= self.experiment.steps:
                    return self._finished_before(steps[-1])
            wait_for_all("the directory is checked")
            if run_exists:
                self._prepare()
            if self.earlier is None:
                self._write_values()
            self.journal.open()
            self.checkpoints = Checkpoints(self.folder / run_files.CHECKPOINTS, keep=policy.keep, best=policy.best)
            try:
                return self._train()
            finally:
                self.journal.close()
                self.profiler.close()

    def _write_values(self) -> None:
        """Write experiment, plan, tokenizer and source; a continued run does so once state and data are restored."""
        if not is_first():
            return
        with run_files.writing(self.folder):
            run_files.write_values(self.folder, self.experiment, self.step.plan)
            write_tokenizer(self.folder, self.data.tokenizer)
            source = self.source or Source(name=self.experiment.name, seed=self.experiment.seed)
            source.write(self.folder)

    def _finished_before(self, step: int) -> Run:
        """Show the summary of a run that already has a checkpoint of its last step, and return the run."""
        run = Run(self.folder, self.experiment, self.plan, devices=self.devices)
        if is_first() and not (self.folder / "report.html").exists():
            self.journal.report()
        self.journal.conclude()
        self.journal.say(
            f"the run is complete: raise steps beyond {step} to train on, or give another directory (--out)"
        )
        return run

    def _prepare(self) -> None:
        """Build the step and open the data, with every check that needs no compilation."""
        import jax

        from jaxscale.state.layout import check_model
        from jaxscale.step.build import build
        from jaxscale.step.resolve import resolve_mesh

        devices = list(jax.devices() if self.devices is None else self.devices)
        plan, _ = resolve_mesh(self.plan, self.experiment.batch, devices)
        check_model(plan, self.experiment.model)
        single_process = jax.process_count() == 1
        if single_process:  # a mistake in the data shows before the step is built
            self._open_data(0, 1)
        self.step = build(self.experiment, self.plan, devices=self.devices)
        if not single_process:
            self._open_data(*self.step.data_shard())
        # on the CPU, steps in flight starve each other's collectives: wait for each step
        self.one_at_a_time = devices[0].platform == "cpu"

    def _open_data(self, process: int, processes: int) -> None:
        """Open this process's shard of the data, and check that the model can take it."""
        experiment = self.experiment
        self.data = experiment.data.open(experiment.batch, experiment.seed, process=process, processes=processes)
        check_data(experiment, self.data)

    def _start(self) -> Any:
        """Restore the newest checkpoint that is not damaged, and log that; returns its state, or the initial state."""
        restored = self.checkpoints.restore(self.step.canonical_abstract(), set_aside=True, say=self.journal.say)
        if restored is None:
            return self.step.init()
        description = restored.description
        self.n, self.tokens, self.best = description.step, description.tokens, description.best
        self.data_state = description.data
        state = self.step.from_canonical(restored.arrays)
        self.skipped = int(state.watch.skipped)
        resume_fields: dict[str, Any] = {}
        if restored.damaged:
            resume_fields["damaged"] = {str(step): reason for step, reason in restored.damaged.items()}
        if restored.converted:
            resume_fields["converted"] = list(restored.converted)
        self.journal.say(f"continuing {self.folder} after step {self.n}{self.step.describe_restored(restored.arrays)}")
        for line in restored.converted:
            self.journal.say(line)
        assert self.earlier is not None
        for line, change_fields in self.earlier.changes(self.experiment, self.source, self.n):
            self.journal.say(line)
            resume_fields |= change_fields
        self.event("resume", tokens=self.tokens, **resume_fields)
        if self.profiler.missed(self.n):
            self.journal.say(
                f"profile {self.profiler.steps}: the run continues after step {self.n}, so these steps are not traced"
            )
        return state

    # -- the steps -----------------------------------------------------------------------------------------------------

    def _train(self) -> Run:
        """Train from the newest checkpoint, or from the initial state, to the last step."""
        with Stop() as stop:
            state = self._start()
            self.agreement = Agreement(self.step.mesh)
            self._stop_before_the_first_step(stop)  # compiling takes longer than a platform's grace period
            batches = self.data.train(self.data_state)
            with contextlib.ExitStack() as cleanup:
                # end the threads that read data ahead, if there are any
                cleanup.callback(getattr(batches, "close", lambda: None))
                batch = self.step.place(next(batches))
                self.data_state = batches.get_state()
                if self.earlier is not None:
                    self._write_values()
                self._compile(batch)
                self._stop_before_the_first_step(stop)
                start = time.monotonic()
                pauses = Pauses(
                    self.experiment, self.step, self.data, self.checkpoints, self.journal, self.best, self.one_at_a_time
                )
                try:
                    state = self._steps(state, batches, batch, stop, pauses)
                except (UserError, Preempted):
                    raise
                except Exception:
                    # a step or a batch failed: the running save may still become the checkpoint to restart from
                    with contextlib.suppress(Exception):
                        self.checkpoints.wait()
                    raise
        self.event("finished", loss=pauses.held_out, best=pauses.best, seconds=time.monotonic() - start)
        self.journal.report()
        self.journal.conclude()
        live_state = {"train_step": self.step, "state": state, "data": self.data}
        return Run(self.folder, self.experiment, self.plan, devices=self.devices, **live_state)

    def _steps(self, state: Any, batches: Any, batch: Any, stop: Stop, pauses: Pauses) -> Any:
        """Run all steps from a state and the first batch; returns the last state.

        Except on the CPU, the metrics of a step are read once the next one is dispatched; `pending_step` is the step
        in flight.
        """
        pending_step: tuple[int, Any, Any] | None = None
        self.meter.resume()
        while self.n < self.experiment.steps:
            self.profiler.before(self.n + 1, self.folder)
            state, metrics = self.step.run(state, batch)
            self.n += 1
            data_state = self.data_state
            if self.n < self.experiment.steps:
                batch = self.step.place(next(batches))
                self.data_state = batches.get_state()
            if self.one_at_a_time:
                self._settle(self.n, metrics)
                stop_now, save_now = self.agreement.answer(self.agreement.ask(bool(stop.signal_name), pauses.late()))
            else:
                question = self.agreement.ask(bool(stop.signal_name), pauses.late())
                previous_step, pending_step = pending_step, (self.n, metrics, question)
                stop_now, save_now = self._settle_pending(previous_step)
            is_last = self.n == self.experiment.steps
            pause_due = is_last or stop_now or save_now or pauses.due(self.n)
            if pause_due and pending_step is not None:
                pending_answer = self._settle_pending(pending_step)
                stop_now, pending_step = stop_now or pending_answer[0], None
            if self.profiler.running and (is_last or stop_now or self.profiler.ends(self.n)):
                self.profiler.after(self.n, self.folder, state, self.event, self.journal.say, trace_files(self.step))
                self.meter.resume()
            if pause_due:
                stop_early = stop_now and not is_last
                pauses(self.n, self.tokens, state, data_state, stopping=stop_early, save_now=save_now)
                self.meter.resume()
                if stop_early:
                    endings.preempted(self.journal, self.n, stop.signal_name, saved=True)
            pauses.poll()
        return state

    def _compile(self, batch: Mapping[str, Any]) -> None:
        """Compile the step; show and log its memory, FLOP and kernels."""
        for line in self.step.describe():
            self.journal.say(line)
        excluded_count = count_excluded()
        facts = self.step.compile(batch)
        self.event("compile", **dataclasses.asdict(facts))
        for line in lines_of(self.step.kernels):
            self.journal.say(line)
            self.event("kernels", **fields_of(self.step.kernels))
        flop = int(self.step.model_flop(batch))
        memory = self.step.memory(batch)
        host_memory = self.step.host_memory()
        copy_bytes = self.step.canonical_copy_bytes
        bytes_by_name = memory | {f"host {kind}": kind_bytes for kind, kind_bytes in host_memory.items()}
        bytes_by_name["checkpoint copy"] = copy_bytes
        prediction = {f"{kind.replace(' ', '_')}_bytes": kind_bytes for kind, kind_bytes in bytes_by_name.items()}
        self.event("predicted", model_flop=flop, parameters=self.step.parameters, **prediction)
        if is_first():
            bytes_by_kind = {**memory, "gradients and activations": facts.temp_bytes}
            with run_files.writing(self.folder):
                layout = {**self.step.layout.table(), "memory": bytes_by_kind, "host_memory": host_memory}
                run_files.write_json(self.folder / "layout.json", layout)
                if self.step.decision is not None:
                    run_files.write_json(self.folder / "memory.json", to_json(self.step.decision))
        device = None if self.one_at_a_time else self.step.mesh.local_devices[0]  # pyright: ignore[reportOptionalSubscript]
        self.meter = Meter(flop, peak_of(self.step), device)
        if (warning := save_memory_warning(sum(memory.values()), copy_bytes, device)) is not None:
            self.journal.say(warning)
        self.journal.say(f"{self.step.parameters:,} parameters, compiled in {facts.seconds:.1f} s")
        if count_excluded() > excluded_count:
            self.journal.say(
                f"the step is compiled at every start ({facts.seconds:.1f} s) and not kept: it has collectives in a "
                "loop, and on several CPU devices such a program may hang once it is loaded from the compile cache"
            )

    def _settle_pending(self, pending_step: tuple[int, Any, Any] | None) -> tuple[bool, bool]:
        """Settle a step in flight (number, metrics, question); returns whether to stop, and whether to save."""
        if pending_step is None:
            return False, False
        self._settle(pending_step[0], pending_step[1])
        return self.agreement.answer(pending_step[2])

    def _settle(self, n: int, metrics: Mapping[str, Any]) -> None:
        """Wait for the metrics of step `n`, and log them."""
        import jax

        scalars = {name: scalar.item() for name, scalar in jax.device_get(dict(metrics)).items()}
        self.tokens += (tokens := round(scalars["weight"]))
        self.meter.add(tokens)
        if scalars["skipped"] > self.skipped:
            self.skipped = scalars["skipped"]
            skip_fields = {"loss": scalars["loss"], "grad_norm": scalars["grad_norm"], "skipped": self.skipped}
            self.journal.event(n, "skipped", **skip_fields)
        if n % self.log_every == 0 or n == self.experiment.steps:
            # the last two are metrics of a codec
            names = ("loss", "grad_norm", "learning_rate", "residual_norm", "wire_bytes")
            row = {name: scalars[name] for name in names if name in scalars}
            self.journal.step(n, row | {"tokens": self.tokens, **self.meter.row()})
        if scalars["skipped_in_row"] >= self.experiment.guard.patience:
            endings.diverged(self.journal, self.checkpoints, n, scalars)

    def _stop_before_the_first_step(self, stop: Stop) -> None:
        """Stop the run if any process received a signal."""
        stop_now, _ = self.agreement.answer(self.agreement.ask(bool(stop.signal_name), False))
        if stop_now:
            endings.preempted(self.journal, self.n, stop.signal_name, saved=False)

    def event(self, name: str, **fields: Any) -> None:
        """Log an event after the newest step."""
        self.journal.event(self.n, name, **fields)
