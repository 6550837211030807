"""train: a run from an Experiment to its last step, with its log, evaluations, samples, checkpoints and report.

The loop is the same for every plan: take a batch, dispatch a step, look at what came of the one before. What must
survive a kill is written in an order that a restart can rely on: the line of a step is in the log before its state is
in a checkpoint, and a checkpoint holds the state of the data beside that of the model, so that what follows is the same
to the last bit.
"""

import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxscale.errors import Preempted, UserError
from jaxscale.planning.settle import settled
from jaxscale.platforms.kept_programs import left_out
from jaxscale.step.experiment import Experiment
from jaxscale.step.kernels import fields_of, lines_of
from jaxscale.step.plan import Plan
from jaxscale.training import directory as place
from jaxscale.training import endings
from jaxscale.training.backend import start_backend
from jaxscale.training.check_data import check_data
from jaxscale.training.checkpoint import Checkpoints, lacking_room
from jaxscale.training.display import Display
from jaxscale.training.journal import Journal
from jaxscale.training.meter import Meter, peak_of
from jaxscale.training.pauses import Pauses
from jaxscale.training.processes import is_first, wait_for_all
from jaxscale.training.profile import Profiler, ProfileRange
from jaxscale.training.restore import write_tokenizer
from jaxscale.training.resume import Earlier
from jaxscale.training.run import Run
from jaxscale.training.signals import Agreement, Stop
from jaxscale.training.source import Source
from jaxscale.training.storage import run_path
from jaxscale.training.traced_actions import described
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
    """Train an experiment, or continue it from its newest checkpoint, or show its result where it has finished.

    Args:
        experiment: what to train.
        plan: how; the experiment's own by default.
        steps: updates, instead of the experiment's. The schedule ends with them: a run that is continued with other
            steps goes on at another learning rate, which it says and logs.
        out: the run directory, local or gs:// or s3://; `runs/NAME` by default.
        resume: "auto" continues a run that is there, whose experiment may differ in steps, evaluation, samples,
            checkpoint and plan; "never" renames its directory and starts anew.
        log_every: steps per line of the log; the tokens and seconds of a line are of all of them.
        profile: steps to trace, as "10:13" (the three from 10 to 12).
        source: where the experiment came from, so that commands can rebuild it.
        quiet: print nothing.
        devices: to run on; all by default.

    Returns:
        The run, with its metrics and its last state.

    Raises:
        UserError: something given does not fit, before anything is traced; or the disk failed, and older checkpoints
            are intact.
        Preempted: told to stop, and saved; or told before the first step, and what was saved before is intact.
        KeyboardInterrupt: told to stop before the first step of a run that has saved nothing.
        Diverged: steps kept being skipped; names the last good checkpoint.
    """
    if steps is not None:
        experiment = dataclasses.replace(experiment, steps=steps)
    if resume not in ("auto", "never"):
        raise UserError(f"resume: got {resume!r}, expected auto or never")
    if log_every < 1:
        raise UserError(f"log_every: got {log_every!r}, expected a whole number >= 1")
    traced = None if profile is None else Profiler(ProfileRange.parse(profile).within(experiment.steps))
    start_backend()
    plan = settled(experiment, experiment.plan if plan is None else plan)
    folder = run_path(place.default_directory(experiment) if out is None else out)
    display = Display(experiment.steps, quiet=quiet or not is_first(), name=experiment.name)
    journal = Journal(folder, display)
    return _Training(experiment, plan, journal, resume, log_every, traced, source, devices).run()


class _Training:
    """One run while it goes on."""

    def __init__(
        self,
        experiment: Experiment,
        plan: Plan,
        journal: Journal,
        resume: str,
        log_every: int,
        profile: Profiler | None,
        source: Source | None,
        devices: Sequence[Any] | None,
    ) -> None:
        self.experiment, self.plan, self.folder, self.resume = experiment, plan, journal.folder, resume
        self.log_every, self.profile, self.source = log_every, profile, source
        self.journal, self.devices = journal, devices
        self.n = 0
        self.tokens = 0
        self.skipped = 0
        self.best: float | None = None
        self.earlier: Earlier | None = None

    # -- before the first step -----------------------------------------------------------------------------------------

    def run(self) -> Run:
        """Everything from the checks to the result."""
        known = (self.folder / place.EXPERIMENT).exists()
        if known and self.resume == "never":
            if is_first():
                with place.claimed(self.folder):
                    self.journal.say(f"the run that was in {self.folder} is now {place.set_aside(self.folder)}")
            known = False
        wait_for_all("the directory is set")
        if not known:
            self._prepare()  # a mistake leaves no directory behind
        with place.claimed(self.folder) if is_first() else contextlib.nullcontext():
            checkpoint = self.experiment.checkpoint
            self.earlier = Earlier.read(self.folder, self.experiment)
            if self.earlier is not None:
                last = Checkpoints(self.folder / place.CHECKPOINTS, write=False).steps()
                if last and last[-1] >= self.experiment.steps:
                    return self._finished_before(last[-1])
            wait_for_all("the directory is checked")
            if known:
                self._prepare()
            if self.earlier is None:
                self._write_values()
            self.journal.open()
            self.checkpoints = Checkpoints(self.folder / place.CHECKPOINTS, keep=checkpoint.keep, best=checkpoint.best)
            try:
                return self._train()
            finally:
                self.journal.close()
                if self.profile is not None:
                    self.profile.close()

    def _write_values(self) -> None:
        """Those of a run that is continued stay until its state is restored and its data are known to be the same."""
        if not is_first():
            return
        with place.writing(self.folder):
            place.write_values(self.folder, self.experiment, self.step.plan)
            write_tokenizer(self.folder, self.data.tokenizer)
            source = self.source or Source(name=self.experiment.name, seed=self.experiment.seed)
            source.write(self.folder)

    def _finished_before(self, step: int) -> Run:
        result = Run(self.folder, self.experiment, self.plan, devices=self.devices)
        if is_first() and not (self.folder / "report.html").exists():
            self.journal.report()
        self.journal.conclude()
        self.journal.say(
            f"nothing is left to do: raise steps beyond {step} to train on, or give another directory (--out)"
        )
        return result

    def _prepare(self) -> None:
        """Build the step and open the data: every check that needs no compilation."""
        import jax

        from jaxscale.step.build import build
        from jaxscale.step.layout import check_model
        from jaxscale.step.resolve import resolve_mesh

        devices = list(jax.devices() if self.devices is None else self.devices)
        resolved, _ = resolve_mesh(self.plan, self.experiment.batch, devices)
        check_model(resolved, self.experiment.model)
        alone = jax.process_count() == 1
        if alone:
            self.data = self._open(0, 1)
        self.step = build(self.experiment, self.plan, devices=self.devices)
        if not alone:
            self.data = self._open(*self.step.data_shard())
        # on the CPU, steps in flight starve the collectives of one another: each is waited for
        self.one_at_a_time = devices[0].platform == "cpu"

    def _open(self, process: int, processes: int) -> Any:
        wanted = self.experiment
        opened = wanted.data.open(wanted.batch, wanted.seed, process=process, processes=processes)
        check_data(self.experiment, opened)
        return opened

    def _start(self) -> Any:
        """The state to start from: the newest checkpoint that verifies, or the initial one."""
        restored = self.checkpoints.restore(self.step.canonical_abstract(), set_aside=True, say=self.journal.say)
        self.data_state: Any = None
        if restored is None:
            return self.step.init()
        description = restored.description
        self.n, self.tokens, self.best = description.step, description.tokens, description.best
        self.data_state = description.data
        state = self.step.from_canonical(restored.arrays)
        self.skipped = int(state.watch.skipped)
        damaged = {str(at): why for at, why in restored.damaged.items()}
        fields: dict[str, Any] = {"damaged": damaged} if damaged else {}
        fields |= {"converted": list(restored.converted)} if restored.converted else {}
        self.journal.say(f"continuing {self.folder} after step {self.n}{self.step.describe_restored(restored.arrays)}")
        for line in restored.converted:
            self.journal.say(line)
        assert self.earlier is not None
        for line, more in self.earlier.changes(self.experiment, self.source, self.n):
            self.journal.say(line)
            fields |= more
        self.event("resume", tokens=self.tokens, **fields)
        if self.profile is not None and self.profile.missed(self.n):
            self.journal.say(
                f"profile {self.profile.steps}: the run goes on after step {self.n}, and these are not traced"
            )
        return state

    # -- the steps -----------------------------------------------------------------------------------------------------

    def _train(self) -> Run:
        with Stop() as stop:
            state = self._start()
            self.agreement = Agreement(self.step.mesh)
            self._stop_before_the_first_step(stop)  # compiling takes longer than a platform waits
            batches = self.data.train(self.data_state)
            with contextlib.ExitStack() as ending:
                # threads that read ahead, where the data has some
                ending.callback(getattr(batches, "close", lambda: None))
                batch = self.step.place(next(batches))
                self.data_state = batches.get_state()
                if self.earlier is not None:
                    self._write_values()
                self._compile(batch)
                self._stop_before_the_first_step(stop)
                begun = time.monotonic()
                modes = {"best": self.best, "one_at_a_time": self.one_at_a_time}
                pauses = Pauses(self.experiment, self.step, self.data, self.checkpoints, self.journal, **modes)
                try:
                    state = self._steps(state, batches, batch, stop, pauses)
                except (UserError, Preempted):
                    raise
                except Exception:
                    # a step or a batch failed: what is being saved may still become the checkpoint to restart from
                    with contextlib.suppress(Exception):
                        self.checkpoints.wait()
                    raise
        self.event("finished", loss=pauses.held_out, best=pauses.best, seconds=time.monotonic() - begun)
        self.journal.report()
        live = {"train_step": self.step, "state": state, "data": self.data}
        self.journal.conclude()
        return Run(self.folder, self.experiment, self.plan, devices=self.devices, **live)

    def _steps(self, state: Any, batches: Any, batch: Any, stop: Stop, pauses: Pauses) -> Any:
        """From the state and the batch of the first step to the state after the last."""
        pending: tuple[int, Any, Any] | None = None
        self.meter.resume()
        while self.n < self.experiment.steps:
            if self.profile is not None:
                self.profile.before(self.n + 1, self.folder)
            state, metrics = self.step.run(state, batch)
            self.n += 1
            saved_data_state = self.data_state
            if self.n < self.experiment.steps:
                batch = self.step.place(next(batches))
                self.data_state = batches.get_state()
            if self.one_at_a_time:
                self._settle(self.n, metrics)
                told_to_stop, save_now = self.agreement.answer(self.agreement.ask(bool(stop.requested), pauses.late()))
            else:
                asked = self.agreement.ask(bool(stop.requested), pauses.late())
                before, pending = pending, (self.n, metrics, asked)
                told_to_stop, save_now = self._settle_pending(before)
            last = self.n == self.experiment.steps
            pausing = last or told_to_stop or save_now or pauses.due(self.n)
            if pausing and pending is not None:
                more = self._settle_pending(pending)
                told_to_stop, pending = told_to_stop or more[0], None
            if self.profile is not None and (last or told_to_stop or self.profile.ends(self.n)):
                self.profile.after(self.n, self.folder, state, self.event, self.journal.say, described(self.step))
                self.meter.resume()
            if pausing:
                stopping = told_to_stop and not last
                pauses(self.n, self.tokens, state, saved_data_state, stopping=stopping, save_now=save_now)
                self.meter.resume()
                if stopping:
                    endings.preempted(self.journal, self.n, stop.requested)
            pauses.poll()
        return state

    def _compile(self, batch: Mapping[str, Any]) -> None:
        for line in self.step.describe():
            self.journal.say(line)
        before = left_out()
        facts = self.step.compile(batch)
        self.event("compile", **dataclasses.asdict(facts))
        for line in lines_of(self.step.kernels):
            self.journal.say(line)
            self.event("kernels", **fields_of(self.step.kernels))
        flop = int(self.step.model_flop(batch))
        memory = self.step.memory(batch)
        hosted = self.step.host_memory()
        lasting = {f"{kind.replace(' ', '_')}_bytes": size for kind, size in memory.items()}
        lasting |= {f"host_{kind.replace(' ', '_')}_bytes": size for kind, size in hosted.items()}
        copy = self.step.canonical_copy_bytes
        lasting["checkpoint_copy_bytes"] = copy
        self.event("predicted", model_flop=flop, parameters=self.step.parameters, **lasting)
        if is_first():
            kinds = {**memory, "gradients and activations": facts.temp_bytes}
            with place.writing(self.folder):
                table = {**self.step.layout.table(), "memory": kinds, "host_memory": hosted}
                place.write_json(self.folder / "layout.json", table)
                if self.step.decision is not None:
                    place.write_json(self.folder / "memory.json", to_json(self.step.decision))
        device = None if self.one_at_a_time else self.step.mesh.local_devices[0]
        self.meter = Meter(flop, peak_of(self.step), device)
        if (lacking := lacking_room(sum(memory.values()), copy, device)) is not None:
            self.journal.say(lacking)
        self.journal.say(f"{self.step.parameters:,} parameters, compiled in {facts.seconds:.1f} s")
        if left_out() > before:
            self.journal.say(
                f"the step is compiled at every start ({facts.seconds:.1f} s) and not kept: it has collectives in a "
                "loop, and on several CPU devices such a program may hang once it is loaded from the compile cache"
            )

    def _settle_pending(self, pending: tuple[int, Any, Any] | None) -> tuple[bool, bool]:
        if pending is None:
            return False, False
        self._settle(pending[0], pending[1])
        return self.agreement.answer(pending[2])

    def _settle(self, n: int, metrics: Mapping[str, Any]) -> None:
        """Wait for what step `n` measured, and log it."""
        import jax

        found = {name: value.item() for name, value in jax.device_get(dict(metrics)).items()}
        self.tokens += (tokens := round(found["weight"]))
        self.meter.add(tokens)
        if found["skipped"] > self.skipped:
            self.skipped = found["skipped"]
            facts = {"loss": found["loss"], "grad_norm": found["grad_norm"], "skipped": self.skipped}
            self.journal.event(n, "skipped", **facts)
        if n % self.log_every == 0 or n == self.experiment.steps:
            names = ("loss", "grad_norm", "learning_rate", "residual_norm", "wire_bytes")  # the last two with a codec
            row = {name: found[name] for name in names if name in found}
            self.journal.step(n, row | {"tokens": self.tokens, **self.meter.row()})
        if found["skipped_in_row"] >= self.experiment.guard.patience:
            endings.diverged(self.journal, self.checkpoints, n, found)

    def _stop_before_the_first_step(self, stop: Stop) -> None:
        """Stop if any process was told to."""
        told_to_stop, _ = self.agreement.answer(self.agreement.ask(bool(stop.requested), False))
        if told_to_stop:
            endings.stopped_before_the_first_step(self.journal, self.n, stop.requested)

    def event(self, name: str, **fields: Any) -> None:
        """Log something that happened after the newest step."""
        self.journal.event(self.n, name, **fields)
