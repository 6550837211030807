"""train: runs an Experiment to its last step, with a log, evaluations, samples, checkpoints and a report.

The loop is the same for every plan: take a batch, dispatch a step, read the metrics of the previous step. A run that
was killed at any time can be continued bit for bit: the log receives the line of a step before a checkpoint receives
the state after that step, and a checkpoint holds the state of the data as well as the state of the model.
"""

import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from jaxscale import heartbeat
from jaxscale.checkpoint.init_from import Beginning, check_init_from
from jaxscale.checkpoint.restore import write_text_files
from jaxscale.checkpoint.store import Checkpoints
from jaxscale.data.held_out_sets import check_same_arrays
from jaxscale.errors import Preempted, UserError
from jaxscale.planning.automatic_choices import resolve_choices
from jaxscale.recipe.experiment import Experiment, plan_of
from jaxscale.recipe.plan import Plan
from jaxscale.records import directory as run_files
from jaxscale.records.metrics import last_logged_step
from jaxscale.records.processes import (
    check_processes_agree,
    check_shared_folder,
    is_first,
    process_index,
    wait_for_all,
)
from jaxscale.records.skip_causes import Causes, warn_of_no_gradient
from jaxscale.records.source import Source
from jaxscale.records.storage import check_location, run_path
from jaxscale.training import endings
from jaxscale.training.backend import start_backend
from jaxscale.training.callbacks import Callback
from jaxscale.training.check_data import check_data, check_evaluation, checked_metrics, open_data, open_sets
from jaxscale.training.compile_step import compile_step
from jaxscale.training.display import Display
from jaxscale.training.host_memory import check_host_holds, state_bytes
from jaxscale.training.journal import Journal, logged_metrics
from jaxscale.training.meter import Meter, host_scalars
from jaxscale.training.pauses import Pauses, measure_of
from jaxscale.training.profile import Profiler, ProfileRange
from jaxscale.training.resume import EarlierRun, Rewind, check_return, describe_return, finished_counts, log_fields
from jaxscale.training.run import Run
from jaxscale.training.signals import Agreement, Stop
from jaxscale.training.traced_actions import trace_files
from jaxscale.values.byte_sizes import limit_bytes
from jaxscale.values.user_frames import add_place

if TYPE_CHECKING:
    from jaxscale.models.scores import Metric


def train(
    experiment: Experiment,
    plan: Plan | None = None,
    *,
    steps: int | None = None,
    out: Any = None,
    limit: int | str | None = None,
    resume: Literal["auto", "never"] = "auto",
    from_step: int | str | None = None,
    init_from: Any = None,
    log_every: int = 1,
    profile: str | None = None,
    source: Source | None = None,
    quiet: bool = False,
    devices: Sequence[Any] | None = None,
    callbacks: Sequence[Callback] = (),
    metrics: Mapping[str, "Metric"] = {},
) -> Run:
    """Train an experiment, continue its run from the newest checkpoint, or show the result of a finished run.

    Args:
        experiment: the experiment to train.
        plan: the plan to train by; by default, the experiment's plan.
        steps: number of updates; by default, the experiment's number. The learning rate's schedule ends with the last
            update, so another number changes the learning rate of a continued run; the change is printed and logged.
        out: the run directory, a local, gs:// or s3:// path; `runs/NAME` by default.
        limit: device memory in bytes, or a text such as "12GiB". A step that needs more is refused once it is compiled;
            the plans `memory="fit"` and `pipeline="auto:P"` choose what fits. The default is the memory JAX may use.
        resume: "auto" continues the run in the directory; the run's experiment may differ from `experiment` in steps,
            evaluation, held_out, samples, checkpoint and plan. "never" renames that directory and starts a new run.
        from_step: step of a checkpoint to which the run returns. Learning rate and guard may then change, too. Newer
            checkpoints are renamed to STEP.aside. If the same call is repeated, it continues the run.
        init_from: run, checkpoint (RUN/checkpoints/STEP) or folder of transformers whose weights a new run starts from,
            as far as names and shapes are the same. If the same call is repeated, it continues the run.
        log_every: number of steps per line of the log; the speeds in a line are means over these steps.
        profile: range of steps to trace, such as "10:13" for the steps 10, 11 and 12.
        source: origin of the experiment, which is stored so that commands can rebuild the experiment.
        quiet: whether to print nothing.
        devices: devices to run on; all by default.
        callbacks: functions that are called with an `Event` after each step, evaluation and save. If one returns True,
            such as an `EarlyStopping`, the run saves a checkpoint after the next step and ends.
        metrics: functions that are evaluated on held-out batches beside the loss, by name. `metric(module, batch)`
            returns one number per row or per target, or a pair of such numbers and weights; the weighted mean is
            shown, logged and passed to callbacks.

    Returns:
        The run, with its metrics and its last state.

    Raises:
        UserError: an argument is not valid, which is checked before anything is traced; or a file could not be written,
            in which case older checkpoints are intact.
        Preempted: a signal stopped the run, and the run has a checkpoint to continue from.
        KeyboardInterrupt: a signal stopped a new run before its first step, so the run has no checkpoint.
        Diverged: too many steps in a row were skipped; the message names the last good checkpoint.
        MostlySkipped: the run has ended, but more than a tenth of its steps were skipped.
    """
    plan = plan_of(experiment, plan)
    if steps is not None:
        experiment = dataclasses.replace(experiment, steps=steps)
    if resume not in ("auto", "never"):
        raise UserError(f"resume: got {resume!r}, expected auto or never")
    if log_every < 1:
        raise UserError(f"log_every: got {log_every!r}, expected a whole number >= 1")
    metrics = checked_metrics(metrics)
    profiler = Profiler(None if profile is None else ProfileRange.parse(profile).within(experiment.steps))
    device_limit = limit_bytes(limit, "limit")
    run_dir = run_files.default_directory(experiment) if out is None else out
    check_location(run_dir)
    check_init_from(init_from, from_step, run_dir)
    start_backend(is_watched=True)
    folder = run_path(run_dir)
    heartbeat.set_phase("preparing")
    display = Display(experiment.steps, quiet=quiet or not is_first(), name=experiment.name)
    journal = Journal(folder, display, callbacks)
    stop = Stop(lambda name: endings.end_process_early(journal, stop.saved_step, name))
    try:
        with stop, endings.explain_stop(journal, stop), run_files.explain_file_errors(folder):
            stop.saved_step = endings.newest_step(folder) if resume == "auto" else 0
            resolved_plan = resolve_choices(experiment, experiment.plan if plan is None else plan, device_limit)
            training = _Training(
                experiment, resolved_plan, journal, stop, resume, log_every, profiler, source, devices, device_limit,
                metrics, from_step, init_from,
            )  # fmt: skip
            return training.run()
    except BaseException as error:
        heartbeat.fail(error)
        add_place(error)
        raise
    finally:
        heartbeat.stop()


@dataclasses.dataclass
class _Training:
    """A run in progress: the arguments of `train`, and the counts so far.

    Args:
        experiment: the experiment, with the number of steps to train.
        plan: the plan, with automatic choices resolved.
        journal: the run's output to the screen and to files.
        stop: catches stop signals.
        resume: "auto" or "never".
        log_every: number of steps per line of the log.
        profiler: traces the steps that the argument `profile` of `train` specifies.
        source: origin of the experiment; `None` if it was given as an object.
        devices: devices to run on; `None` for all.
        device_limit: bytes of device memory that the compiled step may need; `None` if there is no limit.
        metrics: functions that are evaluated beside the held-out loss, by name.
        from_step: step of a checkpoint to which the run returns; `None` for the newest.
        init_from: path of the initial weights of a new run; `None` for the model's own initialization.
        updates: number of updates made.
        tokens: number of target tokens seen.
        skip_count: number of updates that the guard skipped.
        best_loss: the lowest held-out loss so far; `None` before the first evaluation.
        data_state: state of the iterator over batches, after the last batch that was taken.
        earlier_run: the record of the run that this one continues; `None` for a new run.
        rewind: the return to a checkpoint at this start; `None` if this start makes no return.

    Attributes set while the run is prepared:
        beginning: creates the initial state.
        step: the train step.
        data: the opened data.
        sets: the opened held-out sets by name.
        checkpoints: the run's checkpoints.
        agreement: makes all processes stop or save after the same step.
        meter: measures the speed of the steps.
        causes: finds the causes of skipped steps.
        stuck_watch: ends the process if a step waits endlessly for the devices.
        is_cpu: whether the devices are CPU devices.
    """

    experiment: Experiment
    plan: Plan
    journal: Journal
    stop: Stop
    resume: str
    log_every: int
    profiler: Profiler
    source: Source | None
    devices: Sequence[Any] | None
    device_limit: int | None
    metrics: Mapping[str, "Metric"]
    from_step: int | str | None = None
    init_from: Any = None
    updates: int = 0
    tokens: int = 0
    skip_count: int = 0
    best_loss: float | None = None
    data_state: Any = None
    earlier_run: EarlierRun | None = None
    rewind: Rewind | None = None
    _last_earlier_step: int | None = None  # last step of earlier attempts; `None` once this attempt went beyond it

    @property
    def folder(self) -> Any:
        """The run directory."""
        return self.journal.folder

    def run(self) -> Run:
        """Check the directory, train from the newest checkpoint or from the start, and return the run."""
        check_processes_agree(self.experiment, self.plan, self.source, self.from_step, self.init_from)
        has_run = (self.folder / run_files.EXPERIMENT).exists()
        check_return(self.folder, self.from_step, self.resume, has_run)
        if has_run and self.resume == "never":
            if is_first():
                with run_files.lock_run(self.folder):
                    self.journal.say(f"the earlier run in {self.folder} is now in {run_files.set_aside(self.folder)}")
            has_run = False
        wait_for_all("the directory is set")
        self.beginning = Beginning.of(self.folder, self.init_from, has_run)
        if not has_run:
            self._prepare()  # reports mistakes before the directory is created
            self.beginning.match(self.step)
        with run_files.lock_run(self.folder) if is_first() else contextlib.nullcontext():
            heartbeat.start(process_index(), run_files.heartbeat_folder(self.folder))
            check_shared_folder(self.folder)
            settings = self.experiment.checkpoint
            self.earlier_run = EarlierRun.read(self.folder, self.experiment, is_returning=self.from_step is not None)
            wait_for_all("the directory is checked")
            self.rewind = Rewind.of(self.folder, self.from_step, self.experiment, self.plan, self.journal.say)
            if has_run:
                self._prepare()
            if self.earlier_run is not None and self.rewind is None:
                step_and_skips = finished_counts(self.folder, self.step, self.experiment.steps, self.journal.say)
                if step_and_skips is not None:
                    return self._show_finished(*step_and_skips)
            if self.earlier_run is None:
                self._write_values()
            self._last_earlier_step = last_logged_step(self.folder) if is_first() and self.rewind is None else 0
            self.journal.open()
            self.checkpoints = Checkpoints(self.folder / run_files.CHECKPOINTS, keep=settings.keep, best=settings.best)
            try:
                return self._train()
            finally:
                with contextlib.suppress(UserError):
                    self.journal.log_hours(self.updates, "end")
                self.journal.close()
                self.profiler.close()

    def _write_values(self) -> None:
        """Write the files of the experiment, plan, tokenizer and source.

        For a continued run, this method is called only after the run's state and data are restored.
        """
        if not is_first():
            return
        with run_files.explain_write_errors(self.folder):
            run_files.write_values(self.folder, self.experiment, self.step.plan)
            write_text_files(self.folder, self.data)
            self.beginning.write(self.folder)
            (self.source or Source(name=self.experiment.name, seed=self.experiment.seed)).write(self.folder)

    def _show_finished(self, step: int, skip_count: int) -> Run:
        """Show the summary of a run that already has a checkpoint of its last step, `step`, and return the run."""
        heartbeat.set_phase("finished")
        run = Run(self.folder, self.experiment, self.plan, devices=self.devices)
        if is_first() and not (self.folder / "report.html").exists():
            self.journal.write_report()
        self.journal.conclude()
        self.journal.say(
            f"the run is complete: set steps above {step} to continue it, or choose another directory with --out"
        )
        endings.check_skipped(self.folder, step, skip_count)
        return run

    def _prepare(self) -> None:
        """Build the train step and open the data, and make every check that needs no compilation."""
        import jax

        from jaxscale.state.layout import check_model
        from jaxscale.step.build import build
        from jaxscale.step.resolve import resolve_mesh

        devices = list(jax.devices() if self.devices is None else self.devices)
        plan, _ = resolve_mesh(self.plan, self.experiment, devices)
        check_model(plan, self.experiment.model)
        is_single_process = jax.process_count() == 1
        if is_single_process:  # report a mistake in the data before the step is built
            self._open_data(0, 1)
        self.step = build(self.experiment, self.plan, devices=self.devices)
        if not is_single_process:
            self._open_data(*self.step.data_shard())
        check_evaluation(self.step, self.data, self.sets, self.metrics, self.journal.callbacks)
        # on the CPU, steps in flight starve each other's collectives, so `_run_steps` waits for each step
        self.is_cpu = devices[0].platform == "cpu"
        if self.is_cpu:
            check_host_holds(state_bytes(self.step), self.journal.say)

    def _open_data(self, process_index: int, process_count: int) -> None:
        """Open one process's shard of the data, and check that the model can be trained on it."""
        self.data = open_data(self.experiment, process_index, process_count)
        check_data(self.experiment, self.data)
        self.sets = open_sets(self.experiment, self.data, process_index, process_count)

    def _restore_state(self) -> Any:
        """Restore the newest undamaged checkpoint, log it, and return its state; if none exists, the initial state."""
        heartbeat.set_phase("initializing" if self.earlier_run is None else "restoring")
        abstract_arrays = self.step.canonical_abstract()
        self.checkpoints.keep_host_copies(self.folder, abstract_arrays, self.experiment)
        return_fields: dict[str, Any] = {}
        if self.rewind is None:
            restored_checkpoint = self.checkpoints.restore_arrays(abstract_arrays, set_aside=True, say=self.journal.say)
        else:
            assert self.earlier_run is not None
            restored_checkpoint, return_fields = self.rewind.restore(
                self.checkpoints, abstract_arrays, self.earlier_run.setting_changes
            )
        if restored_checkpoint is None:
            if self._last_earlier_step:
                self.journal.say(f"{self.checkpoints.folder} holds no checkpoint: the run starts again at step 1")
            return self.beginning.state(self.step, self.journal.say, self.log_event)
        description = restored_checkpoint.description
        self.updates, self.tokens = description.step, description.tokens
        if description.measure == measure_of(self.experiment, self.data, self.sets):
            self.best_loss = description.best
        self.stop.saved_step = self.updates
        self.data_state = description.data
        state = self.step.from_canonical(restored_checkpoint.arrays)
        self.skip_count = int(state.watch.skipped)
        resume_fields = log_fields(restored_checkpoint, return_fields)
        extras_note = self.step.describe_restored(restored_checkpoint.arrays)
        self.journal.say(f"continuing {self.folder} after step {self.updates}{restored_checkpoint.origin}{extras_note}")
        for line in (*restored_checkpoint.converted, *describe_return(return_fields)):
            self.journal.say(line)
        assert self.earlier_run is not None
        for line, change_fields in self.earlier_run.change_lines_and_fields(self.experiment, self.source, self.updates):
            self.journal.say(line)
            resume_fields |= change_fields
        self.log_event("resume", tokens=self.tokens, **resume_fields)
        if missed_text := self.profiler.missed_text(self.updates):
            self.journal.say(missed_text)
        return state

    def _train(self) -> Run:
        """Train from the newest checkpoint, or from the initial state, to the last step, and return the run."""
        with endings.explain_stop(self.journal, self.stop):
            state = self._restore_state()
            self.agreement = Agreement(self.step.mesh)
            self._stop_before_first_step()  # compiling takes longer than a platform's grace period
            batches = self.data.train(self.data_state)
            with contextlib.ExitStack() as cleanup:
                # end the threads that prefetch data, if there are any
                cleanup.callback(getattr(batches, "close", lambda: None))
                if (note := getattr(batches, "note", None)) is not None:
                    self.journal.say(note)
                with heartbeat.in_phase("data"):
                    first_batch = next(batches)
                check_same_arrays(self.sets, first_batch)
                batch = self.step.place(first_batch)
                self.data_state = batches.get_state()
                if self.earlier_run is not None:
                    self._write_values()
                compile_step(self.step, batch, self.journal, self.updates, self.device_limit)
                self.meter, self.causes = Meter.of(self.step, batch, self.is_cpu), Causes(self.step)
                self.stop.is_early = False  # from now on there is something to save
                self._stop_before_first_step()
                start_time = time.monotonic()
                run_parts = self.experiment, self.step, self.data, self.sets, self.checkpoints, self.journal
                pauses = Pauses(*run_parts, self.best_loss, self.is_cpu, self.metrics)
                if self.updates == 0 and self.experiment.evaluation.at_start:
                    pauses.evaluate_start(state)
                try:
                    with endings.watch_steps(self.journal, self.checkpoints, self.step) as self.stuck_watch:
                        state = self._run_steps(state, batches, batch, self.stop, pauses)
                except (UserError, Preempted):
                    raise
                except Exception:
                    # a step or a batch failed: a restart may need the checkpoint that is being saved, so let it finish
                    with contextlib.suppress(Exception):
                        self.checkpoints.wait()
                    raise
        losses = {"loss": pauses.held_out_loss, "best": pauses.best_loss}
        self.log_event("finished", **losses, seconds=time.monotonic() - start_time)
        heartbeat.set_phase("finished")
        self.journal.write_report()
        self.journal.conclude()
        endings.check_skipped(self.folder, self.updates, self.skip_count, self.causes)
        run_arguments = {"train_step": self.step, "state": state, "data": self.data}
        return Run(self.folder, self.experiment, self.plan, devices=self.devices, **run_arguments)

    def _run_steps(self, state: Any, batches: Any, batch: Any, stop: Stop, pauses: Pauses) -> Any:
        """Run all steps from a train state and the first batch, and return the last train state.

        Except on the CPU, the metrics of a step are read only after the next step is dispatched. `pending_step` holds
        the number of the step whose metrics are not read yet, its metrics on the devices, and its combined flags.
        """
        pending_step: tuple[int, Any, Any] | None = None
        self.meter.resume()
        callbacks = self.journal.callbacks

        def is_stop_asked() -> bool:
            """Return whether this process received a signal, or a callback asked to stop."""
            return bool(stop.signal_name or callbacks.stop_cause)

        while self.updates < self.experiment.steps:
            self.profiler.start_before(self.updates + 1, self.folder)
            heartbeat.set_phase("stepping", self.updates + 1)
            with heartbeat.awaiting():
                state, metrics = self.step(state, batch)
            self.updates += 1
            self.causes.note(self.updates, batch, state)
            data_state = self.data_state
            if self.updates < self.experiment.steps:
                with heartbeat.in_phase("data"):
                    next_batch = next(batches)
                batch = self.step.place(next_batch)
                self.data_state = batches.get_state()
            if self.is_cpu:
                self._settle(self.updates, metrics)
                combined_flags = self.agreement.combine(is_stop_asked(), pauses.is_save_due())
                is_stop_due, is_save_due = self.agreement.decision(combined_flags)
            else:
                combined_flags = self.agreement.combine(is_stop_asked(), pauses.is_save_due())
                earlier_pending_step, pending_step = pending_step, (self.updates, metrics, combined_flags)
                is_stop_due, is_save_due = self._settle_pending(earlier_pending_step)
            is_last = self.updates == self.experiment.steps
            is_pause_due = is_last or is_stop_due or is_save_due or pauses.is_due(self.updates)
            if is_pause_due and pending_step is not None:
                is_pending_stop_due, _ = self._settle_pending(pending_step)
                is_stop_due, pending_step = is_stop_due or is_pending_stop_due, None
            if self.profiler.is_running and (is_last or is_stop_due or self.profiler.is_last_step(self.updates)):
                extra_files, say = trace_files(self.step), self.journal.say
                self.profiler.stop_after(self.updates, self.folder, state, self.log_event, say, extra_files=extra_files)
                self.meter.resume()
            if is_pause_due:
                is_early_stop = is_stop_due and not is_last
                pauses(self.updates, self.tokens, state, data_state, is_stopping=is_early_stop, is_save_due=is_save_due)
                self.meter.resume()
                if is_early_stop and callbacks.stop_cause is not None and not stop.signal_name:
                    self.log_event("stopped", by=callbacks.stop_cause)
                    self.journal.say(f"stopped by the callback {callbacks.stop_cause} after step {self.updates}")
                    break
                if is_early_stop:
                    endings.stop_preempted(self.journal, self.updates, stop.signal_name, is_saved=True)
            pauses.poll()
        return state

    def _settle_pending(self, pending_step: tuple[int, Any, Any] | None) -> tuple[bool, bool]:
        """Wait for a step in flight and log it; return whether to stop, and whether to save.

        Args:
            pending_step: number, metrics and combined flags of the step; `None` if no step is in flight.
        """
        if pending_step is None:
            return False, False
        step, metrics, combined_flags = pending_step
        self._settle(step, metrics)
        return self.agreement.decision(combined_flags)

    def _settle(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Wait for the metrics of a step and log them; stop the run if too many steps in a row were skipped."""
        with heartbeat.awaiting(step):
            scalars = host_scalars(metrics)
        self.stuck_watch.note_step()
        with heartbeat.in_phase("logging"):
            self._log(step, scalars)
        if scalars["skipped_in_row"] >= self.experiment.guard.patience:
            endings.stop_diverged(self.journal, self.checkpoints, step, scalars, self.causes)

    def _log(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Count the tokens of a step, call the callbacks, and log its metrics and whether it was skipped."""
        if self._last_earlier_step is not None and step > self._last_earlier_step:
            self._last_earlier_step = None
            self.journal.log_hours(step, "first new step")
        step_token_count = round(scalars["weight"])
        self.tokens += step_token_count
        self.meter.add(step_token_count)
        self.journal.report("step", step, scalars)
        if self.step.async_pipeline is None:  # in an asynchronous pipeline, the first step applies no gradient
            warn_of_no_gradient(step, scalars, self.experiment.model)
        if scalars["skipped"] > self.skip_count:
            self.skip_count = scalars["skipped"]
            self.journal.log_skip(step, scalars, **self.causes.cause_fields(step, scalars))
        if step % self.log_every == 0 or step == self.experiment.steps:
            self.journal.log_step(step, logged_metrics(scalars) | {"tokens": self.tokens, **self.meter.row()})

    def _stop_before_first_step(self) -> None:
        """Stop the run if any process has received a signal."""
        if self.agreement.decision(self.agreement.combine(bool(self.stop.signal_name), False))[0]:
            endings.stop_preempted(self.journal, self.updates, self.stop.signal_name, is_saved=False)

    def log_event(self, name: str, **fields: Any) -> None:
        """Log an event after the newest step, by its name and with further fields."""
        self.journal.log_event(self.updates, name, **fields)
