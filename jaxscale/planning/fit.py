"""fit: whether an experiment's train step fits a platform, what takes the memory, and which changes would save most.

The result is an estimate (`estimate.py`), and is labeled as one. With `verify`, the step is compiled for the
platform; with `compile_block`, only one piece of the step is compiled.
"""

import dataclasses
import functools
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
from jaxscale.planning.network_traffic import sent_bytes_by_axes
from jaxscale.planning.pictures import items_table, live_bytes_svg, page
from jaxscale.planning.program import step_recipe
from jaxscale.planning.search.calibration import calibrated_seconds, is_timed
from jaxscale.planning.search.compiler_seconds import clock_text, compiler_seconds
from jaxscale.planning.search.step_seconds import StepSeconds, modeled_seconds
from jaxscale.planning.stage_prices import simulation_of
from jaxscale.platforms.platform import Platform
from jaxscale.recipe.experiment import Experiment, plan_of
from jaxscale.recipe.kernels import lines_of
from jaxscale.recipe.plan import Plan
from jaxscale.values import override
from jaxscale.values.byte_sizes import limit_bytes
from jaxscale.values.units import size

MAX_CHANGES = 4
"""Maximum number of changes to the plan that are estimated."""


@dataclasses.dataclass(frozen=True)
class PlanChange:
    """A change to the plan, and the bytes that it would save.

    Args:
        flags: command-line flags of the change.
        saved_bytes: bytes of device memory per device that the change saves.
        needed_bytes: bytes of device memory per device that the step needs with the change.
        fits: whether the step fits device and host with the change, by estimate.
        margin: least difference between these bytes and a limit that decides whether the step fits, as a share.
    """

    flags: str
    saved_bytes: int
    needed_bytes: int
    fits: bool
    margin: float = accuracy.MARGIN


@dataclasses.dataclass(frozen=True)
class Fit:
    """Whether a train step fits a platform, for display as text, SVG and HTML.

    Args:
        name: name of the experiment.
        platform: platform that the step should run on.
        estimate: itemized estimate of the step's bytes.
        limit: available bytes of device memory per device; `None` if unknown.
        host_limit: available bytes of host memory per device; `None` if unknown.
        report: the compiler's report; `None` if the step was not compiled.
        changes: changes to the plan that would save memory, the largest saving first.
        simulation: simulation of a pipelined step; `None` for other steps, or if the chip's rates are unknown.
        model_seconds: function that traces the model once more and returns the modeled seconds of a step, or `None`.
    """

    name: str
    platform: Platform
    estimate: Estimate
    limit: int | None
    host_limit: int | None
    report: CompileReport | None = None
    changes: tuple[PlanChange, ...] = ()
    simulation: Simulation | None = None
    model_seconds: Callable[[], StepSeconds | None] = dataclasses.field(default=lambda: None, repr=False, compare=False)

    @functools.cached_property
    def seconds(self) -> StepSeconds | None:
        """The modeled seconds of a step; `None` if the chip's rates, or the costs of the memory rule, are unknown."""
        return self.model_seconds()

    @property
    def verified(self) -> bool:
        """Whether the compiler reported the bytes."""
        return self.report is not None and self.report.device_bytes is not None

    @property
    def is_compiled(self) -> bool:
        """Whether the compiler produced a program for the step."""
        return self.report is not None and self.report.temp_bytes is not None

    @property
    def compiler_seconds(self) -> StepSeconds | None:
        """The seconds of the compiled step, as its compiler estimates them; `None` if there is no such estimate."""
        if self.report is None:
            return None
        return compiler_seconds(self.report.schedule, self.estimate.plan, self.platform)

    @property
    def device_bytes(self) -> int:
        """The bytes of device memory per device: the compiler's number, or the estimate if there is none."""
        compiler_bytes = None if self.report is None else self.report.device_bytes
        return self.estimate.device_bytes if compiler_bytes is None else compiler_bytes

    @property
    def host_bytes(self) -> int:
        """The bytes of host memory per device: the estimate or the compiler's number, whichever is larger."""
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
        """Whether the bytes are an estimate that is too close to the limit to decide whether the step fits."""
        if self.verified or self.limit is None:
            return False
        return abs(self.device_bytes - self.limit) <= self.margin * self.limit

    @property
    def margin(self) -> float:
        """The least difference between estimate and limit that decides whether a step fits, as a share of the limit."""
        return self.estimate.margin

    @property
    def verdict(self) -> str:
        """Whether the step fits, and its bytes, as text: by estimate or, with `verify`, according to the compiler."""
        evidence = "according to the compiler" if self.verified else "by estimate"
        if self.estimate.compiled_piece_names and not self.verified:
            evidence += f", {' and '.join(self.estimate.compiled_piece_names)} compiled"
        if self.report is not None and self.report.crashed is not None:
            return f"unknown: {self.report.crashed}"
        if self.report is not None and self.report.added_options and self.is_compiled:
            options = self.estimate.plan.compiler.with_single(self.report.added_options)
            evidence += f" with --plan.compiler {options}, without which it fails"
        if self.report is not None and self.report.oom is not None and self.report.oom.memory == "on-chip":
            return f"does not fit: {self.report.oom}, according to the compiler"
        if self.limit is None:
            return f"{size(self.device_bytes)} per device, {evidence}; the platform's memory is unknown: set --limit"
        usage_text = f"{size(self.device_bytes)} of {size(self.limit)} per device, {evidence}"
        if self.host_limit is not None and self.host_bytes > self.host_limit:
            return (
                f"does not fit: needs {size(self.host_bytes)} of host memory per device, but the limit is "
                f"{size(self.host_limit)}, {evidence}; keep more on the device, or use more hosts"
            )
        answer = "fits" if self.fits else "does not fit"
        if self.close:
            return f"{answer}, narrowly: {usage_text}\n(may be off by {self.margin:.0%}; --verify asks the compiler)"
        return f"{answer}: {usage_text}"

    @property
    def remedy(self) -> str:
        """A change that makes the step fit, in one sentence; "" if the step fits or no estimated change is enough."""
        change = next((change for change in self.changes if change.fits), None)
        if self.fits or change is None or self.limit is None:
            return ""
        narrowly_text = ", narrowly" if change.needed_bytes > (1 - change.margin) * self.limit else ""
        needed_text = size(change.needed_bytes)
        return f"it fits with {change.flags}{narrowly_text}: {needed_text} by estimate; --verify asks the compiler"

    def __str__(self) -> str:
        plan = self.estimate.plan
        setting_texts = [f"mesh {plan.mesh}", f"zero {plan.zero}", plan.precision, f"memory {plan.memory}"]
        setting_texts += [f"{plan.microbatches} microbatches"] * (plan.microbatches > 1)
        setting_texts += [f"loss in chunks of {plan.kernels.loss_chunk}"] * (plan.kernels.loss_chunk is not None)
        lines = [
            f"{self.name} on {self.platform}: {', '.join(setting_texts)}",
            *self.estimate.notes,
            *lines_of(self.estimate.kernels),
            *([f"modeled: {self.seconds}"] if self.seconds is not None else []),
            *([clock_text(self.compiler_seconds, plan, self.platform)] if self.is_compiled else []),
            *([_simulation_line(self.simulation)] if self.simulation is not None else []),
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
        elif self.estimate.is_partly_trained:
            lines.append(
                "no errors are recorded for estimates of steps that train only some parameters; --verify asks the "
                "compiler"
            )
        elif self.estimate.known_accuracy is not None:
            lines.append(str(self.estimate.known_accuracy))
        lines.append(f"optimizer state: {self.estimate.state_bytes_per_parameter:.3g} bytes a parameter")
        lines += self._traffic_lines()
        if self.changes:
            flags_width = max(len(change.flags) for change in self.changes)
            lines += ["", "changes that save the most (flags of fit and train):"]
            for change in self.changes:
                fits_text = ", and fits" if change.fits else ""
                lines.append(f"  {change.flags:{flags_width}}  saves {size(change.saved_bytes):>8}{fits_text}")
        return "\n".join(lines)

    __repr__ = __str__

    def _traffic_lines(self) -> list[str]:
        """Return lines with the bytes that a device sends per step: over the slow axis and, if compiled, each axis."""
        traffic, plan, report = self.estimate.slow_axis_traffic, self.estimate.plan, self.report
        lines = [] if traffic is None else [f"on the wire, {traffic}"]
        if report is not None and report.collectives:
            assert plan.mesh is not None, "the plan of an estimate has a mesh"
            bytes_by_axes = sent_bytes_by_axes(report.collectives, plan.mesh, self.platform.slices)
            bytes_text = ", ".join(f"{axes} {size(sent_bytes)}" for axes, sent_bytes in bytes_by_axes.items())
            lines.append(f"on the wire, according to the compiler, per device and step: {bytes_text}")
        return lines

    def svg(self) -> str:
        """Return an SVG image of the estimated live bytes through a step, by kind of tensor, and the limit."""
        return live_bytes_svg(self.estimate.moments, self.limit, self.estimate.backward_start)

    def html(self) -> str:
        """Return a self-contained HTML page with verdict, live bytes through a step, and arrays alive at the peak."""
        headings_and_contents = [
            ("", f"<pre>{escape(str(self))}</pre>"),
            ("Live bytes per device through a step, by estimate", self.svg()),
            ("Alive at the peak, by estimate", items_table(self.estimate.live_items)),
        ]
        return page(f"{self.name} on {self.platform}", headings_and_contents)

    def _repr_html_(self) -> str:
        return framed(self.html(), 600)

    def write(self, path: str | Path) -> None:
        """Write the page to a file, or only the picture if the file's name ends in .svg.

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
        experiment: the experiment to plan for.
        platform: platform to run on, such as "tpu v5e:4x4"; its devices need not be present.
        plan: plan of the step; the experiment's plan by default.
        limit: bytes of device memory per device to plan for, or a text such as "12GiB"; by default the bytes that the
            platform's programs may use.
        host_limit: bytes of host memory per device, or a text such as "64GiB"; by default an equal share of the host's
            memory.
        compile_block: whether to compile the piece of the step that needs the most memory (the passes of one block, or
            the loss) for the platform, and to use the bytes of temporaries that the compiler reports.
        verify: whether to compile the step for the platform, and to report the compiler's bytes beside the estimate.
        make: function that returns the experiment, called in the process that compiles; required if the experiment
            is not picklable.

    Raises:
        UserError: the plan is not valid for the model, the batch or the platform; or `compile_block` or `verify` is
            set, but the platform has no compiler.

    Example:
        >>> from jaxscale.models import Decoder
        >>> from jaxscale.data import Text
        >>> model = Decoder(vocab=256, context=64, layers=2, embed=64, heads=4)
        >>> tiny_fit = fit(Experiment("tiny", model, Text("text.txt")), "tpu v5e:1x1")
        >>> tiny_fit.fits, tiny_fit.verified, tiny_fit.close
        (True, False, False)
    """
    plan = plan_of(experiment, plan)
    parsed_platform = Platform.parse(platform) if isinstance(platform, str) else platform
    limit_argument, host_limit_argument = limit_bytes(limit, "limit"), limit_bytes(host_limit, "host_limit")
    device_limit = usable_bytes(parsed_platform) if limit_argument is None else limit_argument
    host_memory_limit = host_share(parsed_platform) if host_limit_argument is None else host_limit_argument
    try:
        plan = resolve_choices(experiment, plan, device_limit, parsed_platform, host_memory_limit)
    except NothingFits as error:
        plan = error.smallest_plan
    step_estimate = estimate(experiment, parsed_platform, plan, compile_block=compile_block, make=make)
    simulation = None if plan.pipeline is None else simulation_of(experiment, parsed_platform, step_estimate.plan)
    step_fit = Fit(
        experiment.name,
        parsed_platform,
        step_estimate,
        device_limit,
        host_memory_limit,
        simulation=simulation,
        model_seconds=functools.partial(seconds_of, experiment, parsed_platform, step_estimate.plan),
    )
    if verify:
        report = compile_report(step_recipe(experiment, plan, make), parsed_platform)
        step_fit = dataclasses.replace(step_fit, report=report)
    device_fits = step_fit.limit is None or step_fit.device_bytes <= step_fit.limit
    if device_fits and not step_fit.close:  # a change that saves device memory would not help
        return step_fit
    return dataclasses.replace(step_fit, changes=helpful_changes(experiment, parsed_platform, step_fit))


def seconds_of(experiment: Experiment, platform: Platform, plan: Plan) -> StepSeconds | None:
    """Return the modeled seconds of a step; `None` if the chip's rates, or the costs of the memory rule, are unknown.

    Args:
        experiment: the experiment to plan for.
        platform: platform that the step should run on.
        plan: a resolved plan, as in an `Estimate`.
    """
    if not is_timed(platform):
        return None
    try:
        return calibrated_seconds(modeled_seconds(experiment, platform, plan), platform)
    except UserError:  # the costs of the memory rule are unknown, such as those of JAX's policies
        return None


def helpful_changes(experiment: Experiment, platform: Platform, step_fit: Fit) -> tuple[PlanChange, ...]:
    """Return the changes to the plan that save memory, with the bytes that each would save, the largest saving first.

    If no single change is enough, the last entry combines several changes.

    Args:
        experiment: the experiment to plan for.
        platform: platform that the step should run on.
        step_fit: the `Fit` of the current plan.
    """
    plan = step_fit.estimate.plan
    old_estimate = estimate(experiment, platform, plan) if step_fit.estimate.compiled_piece_names else step_fit.estimate
    old_bytes = old_estimate.device_bytes

    def change_of(text_by_field: Mapping[str, str]) -> PlanChange | None:
        """Return the change that sets fields of the plan to new texts; `None` if the new plan is not valid."""
        try:
            new_estimate = estimate(experiment, platform, override(plan, text_by_field))
        except UserError:
            return None
        flags = " ".join(f"--plan.{field} {text}" for field, text in text_by_field.items())
        fits = dataclasses.replace(step_fit, estimate=new_estimate, report=None).fits
        new_bytes = new_estimate.device_bytes
        return PlanChange(flags, old_bytes - new_bytes, new_bytes, fits, new_estimate.margin)

    changes_and_texts: list[tuple[PlanChange, dict[str, str]]] = []  # change, new texts by field of the plan
    for text_by_field in _candidate_changes(experiment, old_estimate):
        change = change_of(text_by_field)
        while change and not change.fits and "microbatches" in text_by_field:
            microbatch_count = _next_microbatch_count(experiment, plan, int(text_by_field["microbatches"]))
            if microbatch_count is None:
                break
            text_by_field = {"microbatches": str(microbatch_count)}
            change = change_of(text_by_field)
        if change is not None and change.saved_bytes > 0.01 * old_bytes:
            changes_and_texts.append((change, text_by_field))
    changes_and_texts.sort(key=lambda pair: -pair[0].saved_bytes)
    single_changes = tuple(change for change, _ in changes_and_texts)
    if step_fit.fits or any(change.fits for change in single_changes):
        return single_changes
    combined_text_by_field: dict[str, str] = {}
    combined_change = None
    for _, text_by_field in changes_and_texts:
        combined_text_by_field |= text_by_field
        if len(combined_text_by_field) > 1:
            combined_change = change_of(combined_text_by_field)
            if combined_change is not None and combined_change.fits:
                break
    return single_changes if combined_change is None else (*single_changes, combined_change)


def _candidate_changes(experiment: Experiment, step_estimate: Estimate) -> list[dict[str, str]]:
    """Return the changes that affect the most bytes, each as a dict from a field of the plan to its new text."""
    plan, bytes_by_kind = step_estimate.plan, step_estimate.device_bytes_by_kind
    assert plan.mesh is not None
    state_bytes = sum(bytes_by_kind.get(kind, 0) for kind in ("parameters", "optimizer state", "gradients"))
    activation_bytes = bytes_by_kind.get("kept activations", 0) + bytes_by_kind.get("transients", 0)
    changes_with_bytes: list[tuple[int, str, str]] = []  # affected bytes, field of the plan, new text
    if plan.memory.rule != "full":
        changes_with_bytes.append((bytes_by_kind.get("kept activations", 0), "memory", "full"))
    if plan.zero < 3 and plan.mesh.fsdp > 1:
        changes_with_bytes.append((state_bytes, "zero", "3"))
    if plan.offload.optimizer_state == "device" and plan.offload.weights == "device":
        changes_with_bytes.append((bytes_by_kind.get("optimizer state", 0), "offload.optimizer-state", "streamed"))
    if plan.precision == "float32":
        changes_with_bytes.append((activation_bytes // 2, "precision", "bfloat16"))
    if plan.kernels.loss_chunk is None and plan.kernels.scores == "auto" and "loss" in bytes_by_kind:
        changes_with_bytes.append(
            (bytes_by_kind["loss"], "kernels", str(dataclasses.replace(plan.kernels, loss_chunk=256)))
        )
    microbatch_count = _next_microbatch_count(experiment, plan, plan.microbatches)
    if microbatch_count is not None:
        changes_with_bytes.append(
            ((activation_bytes + bytes_by_kind.get("loss", 0)) // 2, "microbatches", str(microbatch_count))
        )
    changes_with_bytes.sort(key=lambda change_with_bytes: -change_with_bytes[0])
    return [{field: text} for _, field, text in changes_with_bytes[:MAX_CHANGES]]


def _next_microbatch_count(experiment: Experiment, plan: Plan, microbatch_count: int) -> int | None:
    """Return the next possible number of microbatches, at least twice `microbatch_count`; `None` if there is none."""
    assert plan.mesh is not None
    row_count = experiment.batch // plan.mesh.batch_shards  # rows of one batch shard
    return next((count for count in range(microbatch_count * 2, row_count + 1) if row_count % count == 0), None)


def _simulation_line(simulation: Simulation) -> str:
    """Return one line with the simulated seconds and the bubble of a pipelined step."""
    is_asynchronous = simulation.period is not None
    seconds, unit = (simulation.period, "update") if is_asynchronous else (simulation.seconds, "step")
    bubble_text = f"bubble {simulation.bubble:.0%}"
    return f"simulated: {seconds:.3g} s a {unit} at the chip's rates, {bubble_text}, without reductions"
