"""The best plan for an experiment on a platform, with its seconds and bytes, its rivals and why each of them lost."""

import dataclasses
import json
import shlex
from collections.abc import Callable, Collection
from html import escape
from pathlib import Path

from jaxscale.compiler.usable import host_share, usable_bytes
from jaxscale.errors import UserError
from jaxscale.figures import markup
from jaxscale.figures.markup import framed, write_figure, write_text
from jaxscale.planning.pictures import Point, page, plans_svg
from jaxscale.planning.search.advice import advice_for
from jaxscale.planning.search.calibration import Calibration, calibration_of
from jaxscale.planning.search.compiler_seconds import clock_text
from jaxscale.planning.search.machines import first_that_fits, smaller_machines
from jaxscale.planning.search.model_costs import has_rates, rated
from jaxscale.planning.search.ranked import JudgedPlan, Outcome
from jaxscale.planning.search.search import Search
from jaxscale.planning.search.space import Choices
from jaxscale.planning.search.step_seconds import NOTICEABLE, StepSeconds
from jaxscale.platforms.compiler_options import DEFAULT
from jaxscale.platforms.platform import Platform
from jaxscale.recipe.experiment import Experiment, plan_of
from jaxscale.recipe.plan import PLAN_VERSION, Plan
from jaxscale.values import field_types, is_record, to_json
from jaxscale.values.as_text import spell
from jaxscale.values.byte_sizes import limit_bytes
from jaxscale.values.units import duration, size

MAX_ROWS = 6
"""Maximum number of plans in a table."""


@dataclasses.dataclass(frozen=True)
class PlanChoice:
    """The best plan for an experiment on a platform, for display as text, SVG and HTML.

    Args:
        name: name of the experiment.
        platform: platform that was planned for.
        outcome: the plans that the search compared.
        limit: available bytes of device memory per device; `None` if unknown.
        rows: number of rows in the batch.
        positions: number of positions in a row, such as tokens; 1 for images.
        flop: FLOP of the model in a step without recomputation, summed over all devices.
        advice: sentences on what would make a plan fit; "" if one fits.
        calibration: the calibration by which the seconds are scaled; `None` if there is none.
    """

    name: str
    platform: Platform
    outcome: Outcome
    limit: int | None
    rows: int
    positions: int
    flop: float
    advice: str = ""
    calibration: Calibration | None = None

    @property
    def best(self) -> JudgedPlan:
        """The best plan, with its seconds and bytes; if none fits, the plan that needs the least memory."""
        return self.outcome.plans[0]

    @property
    def plan(self) -> Plan:
        """The best plan."""
        return self.best.plan

    @property
    def fits(self) -> bool:
        """Whether the best plan fits: according to the compiler if the plan was compiled, otherwise by estimate."""
        return self.best.fits

    @property
    def is_timed(self) -> bool:
        """Whether modeled seconds are absolute, because the chip's rates are known or there is a calibration."""
        return has_rates(self.platform) or self.calibration is not None

    @property
    def mfu(self) -> float | None:
        """The model's FLOP per modeled second, divided by the chips' peak FLOP/s; `None` if the peak is unknown."""
        peak = rated(self.platform).peak("bfloat16" if self.plan.precision == "bfloat16" else "float32")
        return None if peak is None or not has_rates(self.platform) else self.flop / (self.best.seconds.total * peak)

    @property
    def rows_per_second(self) -> float:
        """The rows of the batch that are processed per modeled second."""
        return self.rows / self.best.seconds.total

    @property
    def positions_per_second(self) -> float:
        """The positions in the batch (tokens, or else rows) that are processed per modeled second."""
        return self.positions * self.rows_per_second

    @property
    def devices(self) -> int:
        """The number of devices that the best plan uses."""
        return 1 if self.plan.mesh is None else self.plan.mesh.devices

    @property
    def verdict(self) -> str:
        """Whether the best plan fits, and its bytes, as text."""
        report = self.best.report
        evidence = "by estimate" if report is None or report.device_bytes is None else "according to the compiler"
        if self.limit is None:
            return f"{size(self.best.device_bytes)} per device, {evidence}; the platform's memory is unknown"
        answer = "fits" if self.fits else "does not fit"
        verdict_text = f"{answer}: {size(self.best.device_bytes)} of {size(self.limit)} per device, {evidence}"
        if not self.fits and self.best.device_bytes <= self.limit:
            verdict_text += f", and {size(self.best.estimate.host_bytes)} of host memory, which is too much"
        margin = self.best.estimate.margin
        if report is None and abs(self.best.device_bytes - self.limit) <= margin * self.limit:
            verdict_text += f" (may be off by {margin:.0%}; --verify 1 asks the compiler)"
        return verdict_text

    def __str__(self) -> str:
        best = self.best
        lines = [f"{self.name} on {self.platform}: {plan_summary(self.plan)}", self.verdict]
        if self.is_timed:
            unit = "tokens" if self.positions > 1 else "rows"
            mfu_text = "" if self.mfu is None else f", {self.mfu:.0%} of the peak"
            lines.append(f"modeled: {best.seconds}; {self.positions_per_second:,.0f} {unit}/s{mfu_text}")
        else:
            lines.append(
                "the rates of this platform are unknown: plans are ordered by assumed rates, and no seconds are shown"
            )
        if self.calibration is not None:
            lines.append(f"seconds are {self.calibration}")
        is_compiled = best.report is not None and best.report.crashed is None
        lines += [clock_text(best.compiler_seconds, best.plan, self.platform)] if is_compiled else []
        used_device_count, device_count = self.devices, self.platform.devices
        if used_device_count < device_count:
            lines.append(
                f"uses {used_device_count} of {device_count} devices: no allowed mesh of more devices divides "
                f"{self.rows} rows"
            )
        lines += [self.advice] if self.advice else []
        lines += ["", f"{'train it with' if self.fits else 'its flags'}: {flags_of(self.plan)}"]
        rivals = self._rivals()
        if rivals:
            summary_width = max(len(plan_summary(judged_plan.plan)) for judged_plan in rivals)
            lines += ["", f"the best of {self.outcome.candidate_count} plans; the next ones:"]
            lines += [
                f"  {plan_summary(judged_plan.plan):{summary_width}}  {size(judged_plan.device_bytes):>9}  "
                f"{self._seconds_ratio(judged_plan):5.2f}x  {self.loss_of(judged_plan)}"
                for judged_plan in rivals
            ]
        if self.outcome.refusals:
            lines += ["", "refused:"] + [f"  {reason}" for reason in self.outcome.refusals[:MAX_ROWS]]
        return "\n".join(lines)

    __repr__ = __str__

    def _rivals(self) -> tuple[JudgedPlan, ...]:
        """Return the plans to show beside the best one: those that fit, then the first of each mesh that does not."""
        first_by_mesh: dict[str, JudgedPlan] = {}  # plans that do not fit
        for judged_plan in self.outcome.rejected:
            first_by_mesh.setdefault(str(judged_plan.plan.mesh), judged_plan)
        rejected_rivals = [judged_plan for judged_plan in first_by_mesh.values() if judged_plan is not self.best]
        return (*self.outcome.plans[1:], *rejected_rivals)[:MAX_ROWS]

    def _seconds_ratio(self, judged_plan: JudgedPlan) -> float:
        """Return the ratio of a plan's seconds to those of the best plan."""
        seconds, best_seconds = self._comparable_seconds(judged_plan)
        return seconds.total / best_seconds.total

    def _comparable_seconds(self, judged_plan: JudgedPlan) -> tuple[StepSeconds, StepSeconds]:
        """Return the seconds of a plan and of the best plan: the compiler's if both have them, otherwise modeled."""
        if judged_plan.compiler_seconds is None or self.best.compiler_seconds is None:
            return judged_plan.seconds, self.best.seconds
        return judged_plan.compiler_seconds, self.best.compiler_seconds

    def loss_of(self, judged: JudgedPlan) -> str:
        """Return why a plan lost to the best: its bytes above the limit, or the item with the most extra seconds."""
        if not judged.fits:
            has_excess = self.limit is not None and judged.device_bytes > self.limit
            return f"takes {size(judged.device_bytes - (self.limit or 0))} too much" if has_excess else "does not fit"
        seconds, best_seconds = self._comparable_seconds(judged)
        best_seconds_by_item, seconds_by_item = best_seconds.items, seconds.items
        excess_seconds_by_item = {
            item: seconds_by_item.get(item, 0.0) - best_seconds_by_item.get(item, 0.0)
            for item in {*seconds_by_item, *best_seconds_by_item}
        }
        slowest_item = max(excess_seconds_by_item, key=lambda item: (excess_seconds_by_item[item], item))
        is_noticeable = excess_seconds_by_item[slowest_item] > NOTICEABLE * best_seconds.total
        excess_text = (
            duration(excess_seconds_by_item[slowest_item])
            if self.is_timed
            else f"{excess_seconds_by_item[slowest_item] / best_seconds.total:.0%}"
        )
        return f"{excess_text} more for {slowest_item}" if is_noticeable else "about as fast"

    def svg(self) -> str:
        """Return an SVG image of the compared plans by bytes and by modeled seconds, with the limit."""
        judged_plans = [
            *self.outcome.plans,
            *(judged_plan for judged_plan in self.outcome.rejected if judged_plan is not self.best),
        ]
        least_seconds = min(judged_plan.seconds.total for judged_plan in judged_plans)
        points = [
            Point(
                plan_summary(judged_plan.plan),
                judged_plan.device_bytes,
                judged_plan.seconds.total / least_seconds,
                judged_plan is self.best,
            )
            for judged_plan in judged_plans
        ]
        return plans_svg(points, self.limit)

    def html(self) -> str:
        """Return a self-contained HTML page: the choice, the compared plans, and seconds and bytes of the best plan."""
        best = self.best
        headings_and_contents = [
            ("", f"<pre>{escape(str(self))}</pre>"),
            ("Plans by bytes and modeled seconds", self.svg()),
            ("Seconds of a step, modeled", _seconds_table(best.seconds, self.is_timed)),
            ("Bytes per device, by estimate", f"<pre>{escape(str(best.estimate))}</pre>"),
        ]
        if best.compiler_seconds is not None:
            headings_and_contents.insert(
                3, ("Seconds of a step, by the compiler", _seconds_table(best.compiler_seconds))
            )
        return page(f"{self.name} on {self.platform}", headings_and_contents)

    def _repr_html_(self) -> str:
        return framed(self.html(), 600)

    def save_plan(self, path: str | Path) -> None:
        """Write the best plan to a JSON file, for `jaxscale train --plan-file` and `read_plan`.

        Raises:
            UserError: the file cannot be written.
        """
        write_text(path, json.dumps({"version": PLAN_VERSION, **to_json(self.plan)}, indent=2) + "\n")

    def write(self, path: str | Path) -> None:
        """Write the page to a file, or only the picture if the file's name ends in .svg.

        Raises:
            UserError: the file cannot be written.
        """
        write_figure(path, self.svg, self.html)


def _seconds_table(seconds: StepSeconds, is_timed: bool = True) -> str:
    """Return an HTML table with the seconds and the share of each item; unless `is_timed`, seconds are left out."""
    rows = [
        (item, duration(item_seconds) if is_timed else "", f"{item_seconds / seconds.total:.1%}")
        for item, item_seconds in seconds.items.items()
    ]
    return markup.table(rows, ("item", "seconds", "share"), numeric=(1, 2))


def choose_plan(
    experiment: Experiment,
    platform: Platform | str = "local",
    plan: Plan | None = None,
    *,
    fixed: Collection[str] = (),
    forbidden: Collection[str] = (),
    limit: int | str | None = None,
    host_limit: int | str | None = None,
    objective: str = "time",
    verify: int = 0,
    make: Callable[[], Experiment] | None = None,
) -> PlanChoice:
    """Choose the best plan for an experiment on a platform.

    By default, the best plan is the one with the least modeled seconds per step among the plans that fit. An estimate
    decides whether a plan fits, or the compiler if `verify` is set. Number formats, codecs and DiLoCo are not searched,
    because they change results.

    Args:
        experiment: the experiment to plan for.
        platform: platform to plan for, such as "tpu v5e:4x4"; its devices need not be present.
        plan: plan that holds the fixed settings and those that are not searched; the experiment's plan by default.
        fixed: names of the settings that keep their values in `plan`: mesh, zero, sequence_parallel, microbatches,
            pipeline, memory, offload, loss_chunk, or one of the mesh axes tensor, sequence and replica.
        forbidden: names of the settings that keep their defaults.
        limit: bytes of device memory per device to plan for, or a text such as "12GiB"; by default the bytes that the
            platform's programs may use.
        host_limit: bytes of host memory per device, or a text such as "64GiB"; by default an equal share of the host's
            memory.
        objective: "time", the fastest plan that fits; "memory", the plan that takes the least memory; "chips", the
            fastest plan on the smallest machine on which a plan fits. With "chips", machines of the platform's kind are
            tried, up to the platform's size.
        verify: number of plans to compile, the best first; the best of those that fit is chosen. A plan with ZeRO 3
            for a TPU v5e or v6e is compiled with and without products around a ring until one of the two fits; after
            that, plans are compiled with the better options alone.
        make: function that returns the experiment, called in the process that compiles; required with `verify` if the
            experiment is not picklable.

    Raises:
        UserError: a setting is unknown, or every plan is refused.

    Example:
        >>> from jaxscale.models import Decoder
        >>> from jaxscale.data import Text
        >>> model = Decoder(vocab=256, context=64, layers=2, embed=64, heads=4)
        >>> choice = choose_plan(Experiment("tiny", model, Text("text.txt"), batch=8), "tpu v5e:2x2")
        >>> choice.fits, choice.plan.mesh.devices
        (True, 4)
    """
    search = search_for(
        experiment, platform, plan, fixed=fixed, forbidden=forbidden, limit=limit, host_limit=host_limit,
        objective=objective,
    )  # fmt: skip
    check_verify(verify)
    if objective == "chips":
        platform_and_plan = first_that_fits(search, smaller_machines(search.platform))
        smallest_platform = search.platform if platform_and_plan is None else platform_and_plan[0]
        search = dataclasses.replace(
            search, platform=smallest_platform, objective="time", refusal_by_kind={}, estimates=[]
        )
    choice = choice_of(search, verify, make)
    return choice if choice.fits else dataclasses.replace(choice, advice=advice_for(search, choice.best))


def search_for(
    experiment: Experiment,
    platform: Platform | str,
    plan: Plan | None = None,
    *,
    fixed: Collection[str] = (),
    forbidden: Collection[str] = (),
    limit: int | str | None = None,
    host_limit: int | str | None = None,
    objective: str = "time",
) -> Search:
    """Check the arguments of `choose_plan`, and return the search that they specify.

    Args:
        experiment: the experiment to plan for.
        platform: platform to plan for.
        plan: plan that holds the fixed settings; the experiment's plan by default.
        fixed: names of the settings that keep their values in `plan`.
        forbidden: names of the settings that keep their defaults.
        limit: bytes of device memory per device, or a text such as "12GiB"; by default the bytes that the platform's
            programs may use.
        host_limit: bytes of host memory per device, or a text such as "64GiB"; by default an equal share of the host's
            memory.
        objective: "time", "memory" or "chips".

    Raises:
        UserError: an argument is invalid.
    """
    base_plan = plan_of(experiment, plan)
    parsed_platform = Platform.parse(platform) if isinstance(platform, str) else platform
    if objective not in ("time", "memory", "chips"):
        raise UserError(f"objective: got {objective!r}, expected 'time', 'memory' or 'chips'")
    for parameter_name, setting_names in (("fixed", fixed), ("forbidden", forbidden)):
        if isinstance(setting_names, str):
            raise UserError(
                f"{parameter_name}: got the text {setting_names!r}, expected names of settings, such as "
                f"({setting_names!r},)"
            )
    if "compiler" in forbidden:
        base_plan = dataclasses.replace(base_plan, compiler=DEFAULT)
    choices = Choices(base_plan, frozenset(fixed), frozenset(forbidden))
    limit_argument, host_limit_argument = limit_bytes(limit, "limit"), limit_bytes(host_limit, "host_limit")
    device_limit = usable_bytes(parsed_platform) if limit_argument is None else limit_argument
    host_memory_limit = host_share(parsed_platform) if host_limit_argument is None else host_limit_argument
    return Search(experiment, parsed_platform, choices, device_limit, host_memory_limit, objective)


def check_verify(verify: object) -> None:
    """Raise UserError unless `verify` is a whole number of at least 0."""
    if isinstance(verify, bool) or not isinstance(verify, int) or verify < 0:
        raise UserError(f"verify: got {verify!r}, expected a whole number of plans to compile, from 0 on")


def choice_of(search: Search, compile_count: int = 0, make: Callable[[], Experiment] | None = None) -> PlanChoice:
    """Run a search, and return its choice. The choice has no advice.

    Args:
        search: the search, whose objective is "time" or "memory".
        compile_count: number of plans to compile, the best first.
        make: function that returns the experiment, called in the process that compiles.

    Raises:
        UserError: every plan is refused.
    """
    outcome, calibration = search.run(compile_count, make), calibration_of(search.platform)
    if calibration is not None:
        outcome = outcome.scaled(calibration.factor)
    best_plan = outcome.plans[0]
    costs = search.costs_of(best_plan.plan)
    assert costs is not None, "the plan was chosen by these costs"
    return PlanChoice(
        search.experiment.name,
        search.platform,
        outcome,
        search.limit,
        rows=search.experiment.batch,
        positions=costs.row_positions,
        flop=costs.step_flop,
        calibration=calibration,
    )


def plan_summary(plan: Plan) -> str:
    """Return one line with the mesh of a plan and the settings that differ from the defaults.

    Example:
        >>> plan_summary(Plan(mesh="fsdp:4", zero=3, memory="full", microbatches=2))
        'fsdp:4, zero 3, memory full, 2 microbatches'
    """
    setting_texts = [str(plan.mesh), *([f"zero {plan.zero}"] if plan.zero else [])]
    setting_texts += [f"pipeline {plan.pipeline}"] if plan.pipeline is not None else []
    setting_texts += [f"memory {plan.memory}"] if plan.memory.rule != "none" else []
    setting_texts += [f"{plan.microbatches} microbatches"] if plan.microbatches > 1 and plan.pipeline is None else []
    setting_texts += [f"loss in chunks of {plan.kernels.loss_chunk}"] if plan.kernels.loss_chunk is not None else []
    setting_texts += [str(plan.offload)] if str(plan.offload) else []
    setting_texts += [f"compiler {plan.compiler}"] if plan.compiler != DEFAULT else []
    return ", ".join(setting_texts)


def flags_of(plan: Plan) -> str:
    """Return the command-line flags of all settings of a plan that differ from the defaults.

    Example:
        >>> flags_of(Plan(mesh="fsdp:4", zero=3))
        '--plan.mesh fsdp:4 --plan.zero 3'
    """
    flags: list[str] = []

    def add_flags(value: object, default: object, path: str) -> None:
        """Add the flag of a value, or the flags of its fields if it is a record."""
        if value == default:
            return
        if is_record(value):
            for name in field_types(type(value)):
                add_flags(getattr(value, name), getattr(default, name), f"{path}.{name.replace('_', '-')}")
        else:
            flags.append(f"--{path} {shlex.quote(spell(value))}")

    default_plan = Plan()
    for name in field_types(Plan):
        is_implied = name == "microbatches" and plan.pipeline is not None
        if not is_implied:
            add_flags(getattr(plan, name), getattr(default_plan, name), f"plan.{name.replace('_', '-')}")
    return " ".join(flags)
