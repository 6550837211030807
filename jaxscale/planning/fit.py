"""fit: does an experiment's train step fit a platform, who takes the space, and what would help most.

The answer is an estimate (`estimate.py`) and says so, until `verify` asks the platform's own compiler; `compile_block`
asks it about one piece of the step.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from jaxscale.errors import UserError
from jaxscale.memory.plan import MemoryPlan
from jaxscale.pipeline.simulate import Simulation
from jaxscale.planning import accuracy
from jaxscale.planning.cheapest import NothingFits, cheapest_fit
from jaxscale.planning.estimate import Estimate, estimate
from jaxscale.planning.pictures import framed, page, stacked, table, write_picture
from jaxscale.planning.pipeline_choice import pipeline_choice
from jaxscale.planning.program import lowered_step
from jaxscale.planning.stage_prices import simulated
from jaxscale.planning.wire import sent_by_axes
from jaxscale.platforms.platform import Platform
from jaxscale.platforms.report import CompileReport
from jaxscale.platforms.usable import host_share, usable_bytes
from jaxscale.step.experiment import Experiment
from jaxscale.step.kernels import lines_of
from jaxscale.step.plan import Plan
from jaxscale.values.units import size

TRIED = 4
"""Changes of the plan that are weighed to say what would help most."""


@dataclasses.dataclass(frozen=True)
class Help:
    """A change of the plan and what it would save.

    Args:
        flags: as the command line takes it.
        saves: bytes of device memory per device.
        needs: what it then takes.
        fits: whether the step then fits device and host, by estimate.
    """

    flags: str
    saves: int
    needs: int
    fits: bool


@dataclasses.dataclass(frozen=True)
class Fit:
    """Whether a train step fits, as a value that prints and draws itself.

    Args:
        name: of the experiment.
        platform: where it should run.
        estimate: itemised bytes.
        limit: bytes of device memory that there are; `None` where nothing says.
        host_limit: bytes of host memory per device, likewise.
        report: what the compiler says, once it was asked.
        helps: changes of the plan, the one that saves most first.
        clock: a pipelined step's schedule with the seconds of its stages; `None` where nothing tells the chip's rates.
    """

    name: str
    platform: Platform
    estimate: Estimate
    limit: int | None
    host_limit: int | None
    report: CompileReport | None = None
    helps: tuple[Help, ...] = ()
    clock: Simulation | None = None

    @property
    def verified(self) -> bool:
        """Whether the compiler's word is in."""
        return self.report is not None and self.report.device_bytes is not None

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory per device: the compiler's, else the estimate."""
        said = None if self.report is None else self.report.device_bytes
        return self.estimate.device_bytes if said is None else said

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory per device, of the plan and of what the compiler adds."""
        said = None if self.report is None else self.report.host_bytes
        return max(self.estimate.host_bytes, said or 0)

    @property
    def fits(self) -> bool:
        """Whether device and host have the room; where no limit is known, they are taken to have."""
        if self.report is not None and (self.report.oom is not None or self.report.crashed is not None):
            return False
        device = self.limit is None or self.device_bytes <= self.limit
        return device and (self.host_limit is None or self.host_bytes <= self.host_limit)

    @property
    def close(self) -> bool:
        """Whether this is an estimate too near to the limit to call."""
        if self.verified or self.limit is None:
            return False
        return abs(self.device_bytes - self.limit) <= self.margin * self.limit

    @property
    def margin(self) -> float:
        """An estimate nearer to the limit than this share of it is too close to call."""
        compiled, pipelined = bool(self.estimate.compiled), self.estimate.plan.pipeline is not None
        return accuracy.margin(self.platform.chip.kind, compiled=compiled, pipelined=pipelined)

    @property
    def verdict(self) -> str:
        """One sentence."""
        said = "the compiler says" if self.verified else "by estimate"
        if self.estimate.compiled and not self.verified:
            said += f", {' and '.join(self.estimate.compiled)} compiled"
        if self.report is not None and self.report.crashed is not None:
            return f"unknown: {self.report.crashed}"
        if self.report is not None and self.report.oom is not None and self.report.oom.memory == "on-chip":
            return f"does not fit: {self.report.oom}, the compiler says"
        if self.limit is None:
            return f"{size(self.device_bytes)} per device, {said}; nothing says how much there is: give --limit"
        room = f"{size(self.device_bytes)} of {size(self.limit)} per device, {said}"
        if self.host_limit is not None and self.host_bytes > self.host_limit:
            return (
                f"does not fit: {size(self.host_bytes)} of host memory per device, of {size(self.host_limit)}, {said}; "
                "keep more on the device, or spread it over more hosts"
            )
        word = "fits" if self.fits else "does not fit"
        if self.close:
            return f"{word}, narrowly: {room}\n(may be off by {self.margin:.0%}; --verify asks the compiler)"
        return f"{word}: {room}"

    @property
    def way(self) -> str:
        """How it would fit, one sentence; empty where it does, or where no change that was weighed is enough."""
        found = next((one for one in self.helps if one.fits), None)
        if self.fits or found is None or self.limit is None:
            return ""
        narrowly = ", narrowly" if found.needs > (1 - self.margin) * self.limit else ""
        return f"it fits with {found.flags}{narrowly}: {size(found.needs)} by estimate; --verify asks the compiler"

    def __str__(self) -> str:
        plan = self.estimate.plan
        told = [f"mesh {plan.mesh}", f"zero {plan.zero}", plan.precision, f"memory {plan.memory}"]
        told += [f"{plan.microbatches} microbatches"] * (plan.microbatches > 1)
        told += [f"loss in chunks of {plan.kernels.loss_chunk}"] * (plan.kernels.loss_chunk is not None)
        lines = [
            f"{self.name} on {self.platform}: {', '.join(told)}",
            *self.estimate.said,
            *lines_of(self.estimate.kernels),
            *([_told(self.clock)] if self.clock is not None else []),
            self.verdict,
            *([self.way] if self.way else []),
            "",
            str(self.estimate),
        ]
        if self.report is not None and self.report.device_bytes is not None:
            off = self.estimate.device_bytes / self.report.device_bytes - 1
            lines.append(
                f"{'the compiler':18}{size(self.report.device_bytes):>12}{size(self.report.host_bytes or 0):>12}"
            )
            lines.append(f"the estimate is off by {off:+.1%}")
        elif (known := self._known()) is not None:
            lines.append(str(known))
        lines.append(f"optimizer state: {self.estimate.state_bytes:.3g} bytes a parameter")
        lines += self._wires()
        if self.helps:
            wide = max(len(one.flags) for one in self.helps)
            lines += ["", "what would help most (of fit and train alike):"]
            lines += [
                f"  {one.flags:{wide}}  saves {size(one.saves):>8}{', and fits' if one.fits else ''}"
                for one in self.helps
            ]
        return "\n".join(lines)

    def _wires(self) -> list[str]:
        """What a device sends in a step: by the plan over the slow axis, and by the compiler over all."""
        wire, plan, report = self.estimate.wire, self.estimate.plan, self.report
        lines = [] if wire is None else [f"on the wire, {wire}"]
        if report is not None and report.collectives:
            assert plan.mesh is not None, "an estimate's is settled"
            sums = sent_by_axes(report.collectives, plan.mesh, self.platform.slices)
            told = ", ".join(f"{axes} {size(sent)}" for axes, sent in sums.items())
            lines.append(f"on the wire, the compiler says, per device and step: {told}")
        return lines

    def _known(self) -> accuracy.Accuracy | None:
        compiled, pipelined = bool(self.estimate.compiled), self.estimate.plan.pipeline is not None
        return accuracy.recorded(self.platform.chip.kind, compiled=compiled, pipelined=pipelined)

    def svg(self) -> str:
        """Live bytes by kind through a step, by estimate, and the limit."""
        return stacked(self.estimate.moments, self.limit, self.estimate.turn)

    def html(self) -> str:
        """A page that stands alone: verdict and table, live bytes through a step, who is alive at the peak."""
        parts = [
            ("", f"<pre>{escape(str(self))}</pre>"),
            ("Live bytes per device through a step, by estimate", self.svg()),
            ("Alive at the peak, by estimate", table(self.estimate.alive)),
        ]
        return page(f"{self.name} on {self.platform}", parts)

    def _repr_html_(self) -> str:
        return framed(self.html(), 600)

    def write(self, path: str | Path) -> None:
        """Write the page, or the picture alone where the name ends in .svg.

        Raises:
            UserError: the file cannot be written.
        """
        write_picture(path, self.svg, self.html)


def fit(
    experiment: Experiment,
    platform: Platform | str,
    plan: Plan | None = None,
    *,
    limit: int | None = None,
    host_limit: int | None = None,
    compile_block: bool = False,
    verify: bool = False,
    make: Callable[[], Experiment] | None = None,
) -> Fit:
    """Whether an experiment's train step fits a platform.

    Args:
        experiment: what to train.
        platform: where, such as "tpu v5e:4x4"; it need not be here.
        plan: how; the experiment's own by default.
        limit: bytes of device memory to plan for; what the platform's programs may use by default.
        host_limit: bytes of host memory per device; an equal share of the host's by default.
        compile_block: compile the piece of the step that needs the most memory (the passes of one block, or the loss)
            for the platform, and take its temporaries into the estimate.
        verify: compile the step for the platform, and show what the compiler says beside the estimate.
        make: makes the experiment anew in the process that compiles; needed where the experiment does not pickle.

    Raises:
        UserError: the plan does not fit the model, the batch or the platform; no compiler for `compile_block` or
            `verify`.

    Example:
        >>> from jaxscale.models import Decoder
        >>> from jaxscale.data import Text
        >>> model = Decoder(vocab=256, context=64, layers=2, embed=64, heads=4)
        >>> found = fit(Experiment("tiny", model, Text("text.txt")), "tpu v5e:1x1")
        >>> found.fits, found.verified, found.close
        (True, False, False)
    """
    platform = Platform.parse(platform) if isinstance(platform, str) else platform
    for name, value in (("limit", limit), ("host_limit", host_limit)):
        if value is not None and value < 1:
            raise UserError(f"{name}: got {value} bytes, expected at least 1")
    limit = usable_bytes(platform) if limit is None else limit
    host_limit = host_share(platform) if host_limit is None else host_limit
    plan = experiment.plan if plan is None else plan
    if plan.pipeline is not None and plan.pipeline.name == "auto":
        plan, _ = pipeline_choice(experiment, platform, limit, plan)
    if plan.memory.rule == "fit":
        try:
            plan = cheapest_fit(experiment, platform, limit, plan, host_limit=host_limit)
        except NothingFits as nothing:
            plan = nothing.least
    guess = estimate(experiment, platform, plan, compile_block=compile_block, make=make)
    clock = None if plan.pipeline is None else simulated(experiment, platform, guess.plan)
    found = Fit(experiment.name, platform, guess, limit, host_limit, clock=clock)
    if verify:
        from jaxscale.platforms.compile import compile_report

        recipe = partial(lowered_step, make=make or partial(_same, experiment), plan=plan)
        found = dataclasses.replace(found, report=compile_report(recipe, platform))
    roomy = found.limit is None or found.device_bytes <= found.limit
    if roomy and not found.close:  # it fits, or lacks what less device memory would not bring
        return found
    return dataclasses.replace(found, helps=helps(experiment, platform, found))


def helps(experiment: Experiment, platform: Platform, found: Fit) -> tuple[Help, ...]:
    """What changes of the plan would save, by estimate, the one that saves most first.

    Where none of them is enough, the last entry is as many of them together as are.
    """
    plan = found.estimate.plan
    formula = estimate(experiment, platform, plan) if found.estimate.compiled else found.estimate
    now = formula.device_bytes

    def weigh(flags: str, changed: Plan) -> Help | None:
        try:
            other = estimate(experiment, platform, changed)
        except UserError:  # this model or batch does not take it
            return None
        fits = dataclasses.replace(found, estimate=other, report=None).fits
        return Help(flags, now - other.device_bytes, other.device_bytes, fits)

    weighed = []
    for flags, fields in _changes(experiment, formula):
        one = weigh(flags, dataclasses.replace(plan, **fields))
        while one is not None and not one.fits and (more := _more(experiment, plan, fields.get("microbatches"))):
            fields = {"microbatches": more}
            one = weigh(f"--plan.microbatches {more}", dataclasses.replace(plan, **fields))
        if one is not None and one.saves > 0.01 * now:
            weighed.append((one, fields))
    weighed.sort(key=lambda pair: -pair[0].saves)
    singles = tuple(one for one, _ in weighed)
    if found.fits or any(one.fits for one in singles):
        return singles
    together: dict[str, Any] = {}
    words: dict[str, str] = {}
    one = None
    for single, fields in weighed:
        together = fields | together  # where two change one field, the one that saves more
        words[single.flags.split()[0]] = single.flags
        if len(together) > 1:
            one = weigh(" ".join(words.values()), dataclasses.replace(plan, **together))
            if one is not None and one.fits:
                return (*singles, one)
    return singles if one is None else (*singles, one)


def _changes(experiment: Experiment, now: Estimate) -> list[tuple[str, dict[str, Any]]]:
    """Changes worth weighing, as flags and fields, those that bear on the biggest kinds of tensor."""
    plan, kinds = now.plan, now.device
    assert plan.mesh is not None
    states = kinds.get("parameters", 0) + kinds.get("optimizer state", 0) + kinds.get("gradients", 0)
    activations = kinds.get("kept activations", 0) + kinds.get("transients", 0)
    changes: list[tuple[int, str, dict[str, Any]]] = []
    if plan.memory.rule != "full":
        changes.append((kinds.get("kept activations", 0), "--plan.memory full", {"memory": MemoryPlan("full")}))
    if plan.zero < 3 and plan.mesh.fsdp > 1:
        changes.append((states, "--plan.zero 3", {"zero": 3}))
    if plan.offload.optimizer_state == "device" and plan.offload.weights == "device":
        offload = {"offload": dataclasses.replace(plan.offload, optimizer_state="streamed")}
        changes.append((kinds.get("optimizer state", 0), "--plan.offload.optimizer-state streamed", offload))
    if plan.precision == "float32":
        changes.append((activations // 2, "--plan.precision bfloat16", {"precision": "bfloat16"}))
    if plan.kernels.loss_chunk is None and plan.kernels.scores == "auto" and "loss" in kinds:
        chunked = dataclasses.replace(plan.kernels, loss_chunk=256)
        changes.append((kinds["loss"], f"--plan.kernels {chunked}", {"kernels": chunked}))
    more = _more(experiment, plan, plan.microbatches)
    if more is not None:
        weight = (activations + kinds.get("loss", 0)) // 2
        changes.append((weight, f"--plan.microbatches {more}", {"microbatches": more}))
    changes.sort(key=lambda one: -one[0])
    return [(flags, fields) for _, flags, fields in changes[:TRIED]]


def _more(experiment: Experiment, plan: Plan, now: int | None) -> int | None:
    """The next number of microbatches that is at least twice as many; `None` where there are no more rows."""
    assert plan.mesh is not None
    rows = experiment.batch // plan.mesh.batch_shards
    return None if now is None else next((n for n in range(now * 2, rows + 1) if rows % n == 0), None)


def _told(clock: Simulation) -> str:
    """Seconds and bubble of a pipelined step, one line."""
    seconds, of = (clock.seconds, "step") if clock.period is None else (clock.period, "update")
    return f"simulated: {seconds:.3g} s a {of} at the chip's rates, bubble {clock.bubble:.0%}, without reductions"


def _same(experiment: Experiment) -> Experiment:
    return experiment
