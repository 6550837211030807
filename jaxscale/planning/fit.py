"""fit: whether an experiment's train step fits a platform, what takes the memory, and which changes would save most.

The result is an estimate (`estimate.py`), and its text says so. `verify` compiles the step for the platform;
`compile_block` compiles one piece of it.
"""

import dataclasses
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path

from jaxscale.compiler.compile import compile_report
from jaxscale.compiler.report import CompileReport
from jaxscale.compiler.usable import host_share, usable_bytes
from jaxscale.errors import UserError
from jaxscale.figures.markup import framed, write_figure
from jaxscale.pipeline.clock.simulate import Simulation
from jaxscale.planning import accuracy
from jaxscale.planning.automatic_choices import resolve_choices
from jaxscale.planning.estimate import Estimate, estimate
from jaxscale.planning.memory_search import NothingFits
from jaxscale.planning.network_traffic import sent_by_axes
from jaxscale.planning.pictures import page, stacked, table
from jaxscale.planning.program import step_recipe
from jaxscale.planning.stage_prices import simulation_of
from jaxscale.platforms.platform import Platform
from jaxscale.recipe.experiment import Experiment, plan_of
from jaxscale.recipe.kernels import lines_of
from jaxscale.recipe.plan import Plan
from jaxscale.values import override
from jaxscale.values.byte_sizes import limit_bytes
from jaxscale.values.units import size

MOST_CHANGES = 4
"""Maximum number of changes to the plan that are estimated."""


@dataclasses.dataclass(frozen=True)
class Help:
    """A change to the plan and what it would save.

    Args:
        flags: command-line flags of the change.
        saves: bytes of device memory per device that the change saves.
        needs: bytes of device memory per device that the step needs with the change.
        fits: whether the step fits device and host with the change, by estimate.
    """

    flags: str
    saves: int
    needs: int
    fits: bool


@dataclasses.dataclass(frozen=True)
class Fit:
    """Whether a train step fits a platform; prints as text, draws as SVG and HTML.

    Args:
        name: name of the experiment.
        platform: platform that the step should run on.
        estimate: itemised estimate of the step's bytes.
        limit: available bytes of device memory per device; `None` if unknown.
        host_limit: available bytes of host memory per device; `None` if unknown.
        report: the compiler's report, if the step was compiled.
        helps: changes to the plan, the largest saving first.
        clock: simulation of a pipelined step; `None` if the chip's rates are unknown.
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
        """Whether the compiler reported the bytes."""
        return self.report is not None and self.report.device_bytes is not None

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory per device, from the compiler if it reported them, otherwise by estimate."""
        compiler_bytes = None if self.report is None else self.report.device_bytes
        return self.estimate.device_bytes if compiler_bytes is None else compiler_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory per device, the larger of the estimate and the compiler's number."""
        compiler_bytes = None if self.report is None else self.report.host_bytes
        return max(self.estimate.host_bytes, compiler_bytes or 0)

    @property
    def fits(self) -> bool:
        """Whether device and host have enough memory; an unknown limit counts as enough."""
        if self.report is not None and (self.report.oom is not None or self.report.crashed is not None):
            return False
        device_fits = self.limit is None or self.device_bytes <= self.limit
        return device_fits and (self.host_limit is None or self.host_bytes <= self.host_limit)

    @property
    def close(self) -> bool:
        """Whether the bytes are an estimate, and too near the limit to decide whether the step fits."""
        if self.verified or self.limit is None:
            return False
        return abs(self.device_bytes - self.limit) <= self.margin * self.limit

    @property
    def margin(self) -> float:
        """Least difference from the limit at which an estimate decides whether a step fits, as a share of the limit."""
        compiled, pipelined = bool(self.estimate.compiled), self.estimate.plan.pipeline is not None
        return accuracy.margin(self.platform.chip.kind, compiled=compiled, pipelined=pipelined)

    @property
    def verdict(self) -> str:
        """Whether the step fits and whether that is estimated or compiled, in one sentence."""
        evidence = "according to the compiler" if self.verified else "by estimate"
        if self.estimate.compiled and not self.verified:
            evidence += f", {' and '.join(self.estimate.compiled)} compiled"
        if self.report is not None and self.report.crashed is not None:
            return f"unknown: {self.report.crashed}"
        if self.report is not None and self.report.oom is not None and self.report.oom.memory == "on-chip":
            return f"does not fit: {self.report.oom}, according to the compiler"
        if self.limit is None:
            return f"{size(self.device_bytes)} per device, {evidence}; the platform's memory is unknown: set --limit"
        usage = f"{size(self.device_bytes)} of {size(self.limit)} per device, {evidence}"
        if self.host_limit is not None and self.host_bytes > self.host_limit:
            return (
                f"does not fit: needs {size(self.host_bytes)} of host memory per device, but the limit is "
                f"{size(self.host_limit)}, {evidence}; keep more on the device, or use more hosts"
            )
        answer = "fits" if self.fits else "does not fit"
        if self.close:
            return f"{answer}, narrowly: {usage}\n(may be off by {self.margin:.0%}; --verify asks the compiler)"
        return f"{answer}: {usage}"

    @property
    def remedy(self) -> str:
        """A change that makes the step fit, in one sentence; "" if the step fits or no estimated change is enough."""
        option = next((option for option in self.helps if option.fits), None)
        if self.fits or option is None or self.limit is None:
            return ""
        narrowly = ", narrowly" if option.needs > (1 - self.margin) * self.limit else ""
        return f"it fits with {option.flags}{narrowly}: {size(option.needs)} by estimate; --verify asks the compiler"

    def __str__(self) -> str:
        plan = self.estimate.plan
        settings = [f"mesh {plan.mesh}", f"zero {plan.zero}", plan.precision, f"memory {plan.memory}"]
        settings += [f"{plan.microbatches} microbatches"] * (plan.microbatches > 1)
        settings += [f"loss in chunks of {plan.kernels.loss_chunk}"] * (plan.kernels.loss_chunk is not None)
        lines = [
            f"{self.name} on {self.platform}: {', '.join(settings)}",
            *self.estimate.notes,
            *lines_of(self.estimate.kernels),
            *([_clock_line(self.clock)] if self.clock is not None else []),
            self.verdict,
            *([self.remedy] if self.remedy else []),
            "",
            str(self.estimate),
        ]
        if self.report is not None and self.report.device_bytes is not None:
            relative_error = self.estimate.device_bytes / self.report.device_bytes - 1
            lines.append(
                f"{'the compiler':18}{size(self.report.device_bytes):>12}{size(self.report.host_bytes or 0):>12}"
            )
            lines.append(f"the estimate is off by {relative_error:+.1%}")
        elif (known_accuracy := self._known_accuracy()) is not None:
            lines.append(str(known_accuracy))
        lines.append(f"optimizer state: {self.estimate.state_bytes:.3g} bytes a parameter")
        lines += self._wire_lines()
        if self.helps:
            flags_width = max(len(option.flags) for option in self.helps)
            lines += ["", "changes that save the most (flags of fit and train):"]
            lines += [
                f"  {option.flags:{flags_width}}  saves {size(option.saves):>8}{', and fits' if option.fits else ''}"
                for option in self.helps
            ]
        return "\n".join(lines)

    def _wire_lines(self) -> list[str]:
        """Lines with the bytes that a device sends in a step: over the slow axis; if it is compiled, over all axes."""
        traffic, plan, report = self.estimate.wire, self.estimate.plan, self.report
        lines = [] if traffic is None else [f"on the wire, {traffic}"]
        if report is not None and report.collectives:
            assert plan.mesh is not None, "the plan of an estimate has a mesh"
            bytes_by_axes = sent_by_axes(report.collectives, plan.mesh, self.platform.slices)
            totals = ", ".join(f"{axes} {size(sent_bytes)}" for axes, sent_bytes in bytes_by_axes.items())
            lines.append(f"on the wire, according to the compiler, per device and step: {totals}")
        return lines

    def _known_accuracy(self) -> accuracy.Accuracy | None:
        """The recorded errors of estimates like this one."""
        compiled, pipelined = bool(self.estimate.compiled), self.estimate.plan.pipeline is not None
        return accuracy.recorded(self.platform.chip.kind, compiled=compiled, pipelined=pipelined)

    def svg(self) -> str:
        """Live bytes by kind through a step, by estimate, with the limit, as an SVG image."""
        return stacked(self.estimate.moments, self.limit, self.estimate.turn)

    def html(self) -> str:
        """A self-contained page: verdict and table, live bytes through a step, arrays alive at the peak."""
        sections = [
            ("", f"<pre>{escape(str(self))}</pre>"),
            ("Live bytes per device through a step, by estimate", self.svg()),
            ("Alive at the peak, by estimate", table(self.estimate.alive)),
        ]
        return page(f"{self.name} on {self.platform}", sections)

    def _repr_html_(self) -> str:
        return framed(self.html(), 600)

    def write(self, path: str | Path) -> None:
        """Write the page, or only the picture if the name ends in .svg.

        Raises:
            UserError: the file cannot be written.
        """
        write_figure(path, self.svg, self.html)


def fit(
    experiment: Experiment,
    platform: Platform | str,
    plan: Plan | None = None,
    *,
    limit: int | str | None = None,
    host_limit: int | str | None = None,
    compile_block: bool = False,
    verify: bool = False,
    make: Callable[[], Experiment] | None = None,
) -> Fit:
    """Estimate whether an experiment's train step fits a platform, and which changes to the plan would help.

    Args:
        experiment: what to train.
        platform: platform to run on, such as "tpu v5e:4x4"; its devices need not be present.
        plan: the plan; the experiment's by default.
        limit: bytes of device memory per device to plan for, or a text such as "12GiB"; by default the bytes that the
            platform's programs may use.
        host_limit: bytes of host memory per device, or a text; by default an equal share of the host's memory.
        compile_block: compile the piece of the step that needs the most memory (the passes of one block, or the loss)
            for the platform, and use its temporaries in the estimate.
        verify: compile the step for the platform, and report the compiler's bytes beside the estimate.
        make: function that returns the experiment, called in the process that compiles; required if the experiment
            does not pickle.

    Raises:
        UserError: the plan is not valid for the model, the batch or the platform, or `compile_block` or `verify` is set
            and the platform has no compiler.

    Example:
        >>> from jaxscale.models import Decoder
        >>> from jaxscale.data import Text
        >>> model = Decoder(vocab=256, context=64, layers=2, embed=64, heads=4)
        >>> tiny_fit = fit(Experiment("tiny", model, Text("text.txt")), "tpu v5e:1x1")
        >>> tiny_fit.fits, tiny_fit.verified, tiny_fit.close
        (True, False, False)
    """
    plan = plan_of(experiment, plan)
    platform = Platform.parse(platform) if isinstance(platform, str) else platform
    device_limit, host_limit = limit_bytes(limit, "limit"), limit_bytes(host_limit, "host_limit")
    limit = usable_bytes(platform) if device_limit is None else device_limit
    host_limit = host_share(platform) if host_limit is None else host_limit
    try:
        plan = resolve_choices(experiment, plan, limit, platform, host_limit)
    except NothingFits as error:
        plan = error.least
    step_estimate = estimate(experiment, platform, plan, compile_block=compile_block, make=make)
    clock = None if plan.pipeline is None else simulation_of(experiment, platform, step_estimate.plan)
    step_fit = Fit(experiment.name, platform, step_estimate, limit, host_limit, clock=clock)
    if verify:
        step_fit = dataclasses.replace(step_fit, report=compile_report(step_recipe(experiment, plan, make), platform))
    device_fits = step_fit.limit is None or step_fit.device_bytes <= step_fit.limit
    if device_fits and not step_fit.close:  # a change that saves device memory would not help
        return step_fit
    return dataclasses.replace(step_fit, helps=helps(experiment, platform, step_fit))


def helps(experiment: Experiment, platform: Platform, step_fit: Fit) -> tuple[Help, ...]:
    """Changes to the plan and what each would save, by estimate, the largest saving first.

    If no single change is enough, the last entry combines several.

    Args:
        experiment: what to train.
        platform: platform that the step should run on.
        step_fit: verdict for the present plan.
    """
    plan = step_fit.estimate.plan
    estimate_before = estimate(experiment, platform, plan) if step_fit.estimate.compiled else step_fit.estimate
    bytes_before = estimate_before.device_bytes

    def help_of(change: Mapping[str, str]) -> Help | None:
        """What a change saves; `None` if it is not valid. The change has new texts by field of the plan."""
        try:
            new_estimate = estimate(experiment, platform, override(plan, change))
        except UserError:  # the change is not valid for this model or batch
            return None
        flags = " ".join(f"--plan.{field} {text}" for field, text in change.items())
        fits = dataclasses.replace(step_fit, estimate=new_estimate, report=None).fits
        return Help(flags, saves=bytes_before - new_estimate.device_bytes, needs=new_estimate.device_bytes, fits=fits)

    helps_and_changes: list[tuple[Help, dict[str, str]]] = []
    for change in _changes(experiment, estimate_before):
        option = help_of(change)
        while option and not option.fits and "microbatches" in change:
            microbatch_count = _next_microbatches(experiment, plan, int(change["microbatches"]))
            if microbatch_count is None:
                break
            change = {"microbatches": str(microbatch_count)}
            option = help_of(change)
        if option is not None and option.saves > 0.01 * bytes_before:
            helps_and_changes.append((option, change))
    helps_and_changes.sort(key=lambda pair: -pair[0].saves)
    single_helps = tuple(option for option, _ in helps_and_changes)
    if step_fit.fits or any(option.fits for option in single_helps):
        return single_helps
    combined_change: dict[str, str] = {}
    combination = None
    for _, change in helps_and_changes:
        combined_change |= change
        if len(combined_change) > 1:
            combination = help_of(combined_change)
            if combination is not None and combination.fits:
                break
    return single_helps if combination is None else (*single_helps, combination)


def _changes(experiment: Experiment, step_estimate: Estimate) -> list[dict[str, str]]:
    """The changes that affect the largest kinds of tensor, each as the new text of a field of the plan, by its name."""
    plan, bytes_by_kind = step_estimate.plan, step_estimate.device
    assert plan.mesh is not None
    state_bytes = sum(bytes_by_kind.get(kind, 0) for kind in ("parameters", "optimizer state", "gradients"))
    activation_bytes = bytes_by_kind.get("kept activations", 0) + bytes_by_kind.get("transients", 0)
    options: list[tuple[int, str, str]] = []  # affected bytes, field of the plan, new text
    if plan.memory.rule != "full":
        options.append((bytes_by_kind.get("kept activations", 0), "memory", "full"))
    if plan.zero < 3 and plan.mesh.fsdp > 1:
        options.append((state_bytes, "zero", "3"))
    if plan.offload.optimizer_state == "device" and plan.offload.weights == "device":
        options.append((bytes_by_kind.get("optimizer state", 0), "offload.optimizer-state", "streamed"))
    if plan.precision == "float32":
        options.append((activation_bytes // 2, "precision", "bfloat16"))
    if plan.kernels.loss_chunk is None and plan.kernels.scores == "auto" and "loss" in bytes_by_kind:
        options.append((bytes_by_kind["loss"], "kernels", str(dataclasses.replace(plan.kernels, loss_chunk=256))))
    microbatch_count = _next_microbatches(experiment, plan, plan.microbatches)
    if microbatch_count is not None:
        options.append(((activation_bytes + bytes_by_kind.get("loss", 0)) // 2, "microbatches", str(microbatch_count)))
    options.sort(key=lambda option: -option[0])
    return [{field: text} for _, field, text in options[:MOST_CHANGES]]


def _next_microbatches(experiment: Experiment, plan: Plan, microbatches: int) -> int | None:
    """The least number that divides a shard's rows and is at least twice `microbatches`; `None` if there is none."""
    assert plan.mesh is not None
    shard_rows = experiment.batch // plan.mesh.batch_shards
    return next((count for count in range(microbatches * 2, shard_rows + 1) if shard_rows % count == 0), None)


def _clock_line(clock: Simulation) -> str:
    """Seconds and bubble of a pipelined step, in one line."""
    seconds, unit = (clock.seconds, "step") if clock.period is None else (clock.period, "update")
    return f"simulated: {seconds:.3g} s a {unit} at the chip's rates, bubble {clock.bubble:.0%}, without reductions"
