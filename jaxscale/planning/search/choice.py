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
from jaxscale.planning import accuracy
from jaxscale.planning.pictures import Point, curve, page
from jaxscale.planning.search.advice import advice_for
from jaxscale.planning.search.calibration import Calibration, calibration_of
from jaxscale.planning.search.compiler_seconds import clock_text
from jaxscale.planning.search.machines import first_that_fits, smaller
from jaxscale.planning.search.model_costs import has_rates, rated
from jaxscale.planning.search.ranked import JudgedPlan, Outcome
from jaxscale.planning.search.search import Search
from jaxscale.planning.search.space import Choices
from jaxscale.planning.search.step_seconds import NOTICEABLE, StepSeconds
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
        rows: rows of the batch.
        positions: positions of a row, such as tokens; 1 for images.
        flop: FLOP of the model in a step without recomputation, all devices together.
        advice: what would make a plan fit; "" if one fits.
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
        """Whether the best plan fits: according to the compiler if it was asked, otherwise by estimate."""
        return self.best.fits

    @property
    def is_timed(self) -> bool:
        """Whether the rates of the chip are known, or calibrated, so that seconds are more than proportions."""
        return has_rates(self.platform) or self.calibration is not None

    @property
    def mfu(self) -> float | None:
        """The share of the chips' peak that the model's FLOP take in the modeled seconds; `None` if it is unknown."""
        peak = rated(self.platform).peak("bfloat16" if self.plan.precision == "bfloat16" else "float32")
        return None if peak is None or not has_rates(self.platform) else self.flop / (self.best.seconds.total * peak)

    @property
    def rows_per_second(self) -> float:
        """Rows of the batch over the modeled seconds of a step."""
        return self.rows / self.best.seconds.total

    @property
    def positions_per_second(self) -> float:
        """Positions (tokens of a language model, otherwise rows) of the batch over the modeled seconds of a step."""
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
        line = f"{answer}: {size(self.best.device_bytes)} of {size(self.limit)} per device, {evidence}"
        if not self.fits and self.best.device_bytes <= self.limit:
            line += f", and {size(self.best.estimate.host_bytes)} of host memory, which is too much"
        pipelined = self.plan.pipeline is not None
        margin = accuracy.margin(self.platform.chip.kind, pipelined=pipelined)
        if report is None and abs(self.best.device_bytes - self.limit) <= margin * self.limit:
            line += f" (may be off by {margin:.0%}; --verify 1 asks the compiler)"
        return line

    def __str__(self) -> str:
        best = self.best
        lines = [f"{self.name} on {self.platform}: {summary(self.plan)}", self.verdict]
        if self.is_timed:
            unit = "tokens" if self.positions > 1 else "rows"
            mfu_text = "" if self.mfu is None else f", {self.mfu:.0%} of the peak"
            lines.append(f"modeled: {best.seconds}; {self.positions_per_second:,.0f} {unit}/s{mfu_text}")
        else:
            lines.append("the rates of this platform are unknown: plans are ordered by assumed ones, without seconds")
        if self.calibration is not None:
            lines.append(f"seconds are {self.calibration}")
        is_compiled = best.report is not None and best.report.crashed is None
        lines += [clock_text(best.compiler_seconds, best.plan, self.platform)] if is_compiled else []
        used_count, device_count = self.devices, self.platform.devices
        if used_count < device_count:
            lines.append(
                f"uses {used_count} of {device_count} devices: no allowed mesh of more divides {self.rows} rows"
            )
        lines += [self.advice] if self.advice else []
        lines += ["", f"{'train it with' if self.fits else 'its flags'}: {flags_of(self.plan)}"]
        rivals = self._rivals()
        if rivals:
            width = max(len(summary(judged.plan)) for judged in rivals)
            lines += ["", f"the best of {self.outcome.candidate_count} plans; the next ones:"]
            lines += [
                f"  {summary(judged.plan):{width}}  {size(judged.device_bytes):>9}  "
                f"{self._ratio(judged):5.2f}x  {self.loss_of(judged)}"
                for judged in rivals
            ]
        if self.outcome.refusals:
            lines += ["", "refused:"] + [f"  {reason}" for reason in self.outcome.refusals[:MAX_ROWS]]
        return "\n".join(lines)

    __repr__ = __str__

    def _rivals(self) -> tuple[JudgedPlan, ...]:
        """The plans beside the best one: those that fit, then those that do not."""
        first_of_mesh: dict[str, JudgedPlan] = {}  # of the plans that do not fit
        for judged in self.outcome.rejected:
            first_of_mesh.setdefault(str(judged.plan.mesh), judged)
        others = [judged for judged in first_of_mesh.values() if judged is not self.best]
        return (*self.outcome.plans[1:], *others)[:MAX_ROWS]

    def _ratio(self, judged: JudgedPlan) -> float:
        """The seconds of a plan over those of the best one."""
        seconds, best_seconds = self._comparable(judged)
        return seconds.total / best_seconds.total

    def _comparable(self, judged: JudgedPlan) -> tuple[StepSeconds, StepSeconds]:
        """The seconds of a plan and of the best one: by the compiler's clock if both were compiled, or else modeled."""
        if judged.compiler_seconds is None or self.best.compiler_seconds is None:
            return judged.seconds, self.best.seconds
        return judged.compiler_seconds, self.best.compiler_seconds

    def loss_of(self, judged: JudgedPlan) -> str:
        """Why a plan lost against the best one, in a few words."""
        if not judged.fits:
            has_excess = self.limit is not None and judged.device_bytes > self.limit
            return f"takes {size(judged.device_bytes - (self.limit or 0))} too much" if has_excess else "does not fit"
        seconds, best_seconds = self._comparable(judged)
        best_items, items = best_seconds.items, seconds.items
        excess = {name: items.get(name, 0.0) - best_items.get(name, 0.0) for name in {*items, *best_items}}
        name = max(excess, key=lambda item: (excess[item], item))
        is_noticeable = excess[name] > NOTICEABLE * best_seconds.total
        excess_text = duration(excess[name]) if self.is_timed else f"{excess[name] / best_seconds.total:.0%}"
        return f"{excess_text} more for {name}" if is_noticeable else "about as fast"

    def svg(self) -> str:
        """The compared plans by bytes and by modeled seconds, with the limit, as an SVG image."""
        every = [*self.outcome.plans, *(judged for judged in self.outcome.rejected if judged is not self.best)]
        least_seconds = min(judged.seconds.total for judged in every)
        points = [
            Point(summary(judged.plan), judged.device_bytes, judged.seconds.total / least_seconds, judged is self.best)
            for judged in every
        ]
        return curve(points, self.limit)

    def html(self) -> str:
        """A self-contained HTML page with the choice, the compared plans and the seconds and bytes of the best one."""
        best = self.best
        sections = [
            ("", f"<pre>{escape(str(self))}</pre>"),
            ("Plans by bytes and modeled seconds", self.svg()),
            ("Seconds of a step, modeled", _seconds_table(best.seconds, self.is_timed)),
            ("Bytes per device, by estimate", f"<pre>{escape(str(best.estimate))}</pre>"),
        ]
        if best.compiler_seconds is not None:
            sections.insert(3, ("Seconds of a step, by the compiler", _seconds_table(best.compiler_seconds)))
        return page(f"{self.name} on {self.platform}", sections)

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
    """Return an HTML table of the seconds of a step by item; of their shares alone if the chip's rates are unknown."""
    rows = [
        (name, duration(item_seconds) if is_timed else "", f"{item_seconds / seconds.total:.1%}")
        for name, item_seconds in seconds.items.items()
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

    The plan has the least modeled seconds of a step among the plans whose step fits, by estimate or, with `verify`,
    according to the compiler. Number formats, codecs and DiLoCo are not searched, because they change results.

    Args:
        experiment: the experiment to plan for.
        platform: platform to plan for, such as "tpu v5e:4x4"; its devices need not be present.
        plan: plan with the fixed settings, and the settings that are not searched; the experiment's by default.
        fixed: names of the settings that keep their values in `plan`: mesh, zero, sequence_parallel, microbatches,
            pipeline, memory, offload, loss_chunk, or one of the mesh axes tensor, sequence and replica.
        forbidden: names of the settings that keep their defaults.
        limit: bytes of device memory per device to plan for, or a text such as "12GiB"; by default the bytes that the
            platform's programs may use.
        host_limit: bytes of host memory per device, or a text; by default an equal share of the host's memory.
        objective: "time", the fastest plan that fits; "memory", the plan that takes the least memory; "chips", the
            fastest plan on the smallest machine that it fits, of the platform's kind and up to its size.
        verify: number of plans that are compiled, the best first; the best of those that fit is chosen.
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
        smallest = first_that_fits(search, smaller(search.platform))
        fewest = search.platform if smallest is None else smallest[0]
        search = dataclasses.replace(search, platform=fewest, objective="time", refusals={}, estimates=[])
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
        plan: plan with the fixed settings; the experiment's by default.
        fixed: names of the settings that keep their values in `plan`.
        forbidden: names of the settings that keep their defaults.
        limit: bytes of device memory per device, or a text; by default what the platform's programs may use.
        host_limit: bytes of host memory per device, or a text; by default an equal share of the host's memory.
        objective: "time", "memory" or "chips".

    Raises:
        UserError: an argument is invalid.
    """
    base = plan_of(experiment, plan)
    parsed_platform = Platform.parse(platform) if isinstance(platform, str) else platform
    if objective not in ("time", "memory", "chips"):
        raise UserError(f"objective: got {objective!r}, expected 'time', 'memory' or 'chips'")
    for name, settings in (("fixed", fixed), ("forbidden", forbidden)):
        if isinstance(settings, str):
            raise UserError(f"{name}: got the text {settings!r}, expected names of settings, such as ({settings!r},)")
    choices = Choices(base, frozenset(fixed), frozenset(forbidden))
    limit_argument, host_limit_argument = limit_bytes(limit, "limit"), limit_bytes(host_limit, "host_limit")
    device_limit = usable_bytes(parsed_platform) if limit_argument is None else limit_argument
    host_memory_limit = host_share(parsed_platform) if host_limit_argument is None else host_limit_argument
    return Search(experiment, parsed_platform, choices, device_limit, host_memory_limit, objective)


def check_verify(verify: object) -> None:
    """Raise UserError unless `verify` is a number of plans to compile."""
    if isinstance(verify, bool) or not isinstance(verify, int) or verify < 0:
        raise UserError(f"verify: got {verify!r}, expected a whole number of plans to compile, from 0 on")


def choice_of(search: Search, verify: int = 0, make: Callable[[], Experiment] | None = None) -> PlanChoice:
    """Run a search, and return its choice, without advice.

    Args:
        search: the search, whose objective is "time" or "memory".
        verify: number of plans that are compiled.
        make: function that returns the experiment, called in the process that compiles.

    Raises:
        UserError: every plan is refused.
    """
    outcome, calibration = search.run(verify, make), calibration_of(search.platform)
    if calibration is not None:
        outcome = outcome.scaled(calibration.factor)
    best = outcome.plans[0]
    costs = search.costs_of(best.plan)
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


def summary(plan: Plan) -> str:
    """Return the mesh of a plan, and its settings that are not the defaults, in one line.

    Example:
        >>> summary(Plan(mesh="fsdp:4", zero=3, memory="full", microbatches=2))
        'fsdp:4, zero 3, memory full, 2 microbatches'
    """
    parts = [str(plan.mesh), *([f"zero {plan.zero}"] if plan.zero else [])]
    parts += [f"pipeline {plan.pipeline}"] if plan.pipeline is not None else []
    parts += [f"memory {plan.memory}"] if plan.memory.rule != "none" else []
    parts += [f"{plan.microbatches} microbatches"] if plan.microbatches > 1 and plan.pipeline is None else []
    parts += [f"loss in chunks of {plan.kernels.loss_chunk}"] if plan.kernels.loss_chunk is not None else []
    parts += [str(plan.offload)] if str(plan.offload) else []
    return ", ".join(parts)


def flags_of(plan: Plan) -> str:
    """Return the command-line flags of all settings of a plan that differ from the defaults.

    Example:
        >>> flags_of(Plan(mesh="fsdp:4", zero=3))
        '--plan.mesh fsdp:4 --plan.zero 3'
    """
    flags: list[str] = []

    def add(value: object, default: object, path: str) -> None:
        """Add the flags of a value, field by field if it has no text form."""
        if value == default:
            return
        if is_record(value):
            for name in field_types(type(value)):
                add(getattr(value, name), getattr(default, name), f"{path}.{name.replace('_', '-')}")
        else:
            flags.append(f"--{path} {shlex.quote(spell(value))}")

    default_plan = Plan()
    for name in field_types(Plan):
        is_implied = name == "microbatches" and plan.pipeline is not None
        if not is_implied:
            add(getattr(plan, name), getattr(default_plan, name), f"plan.{name.replace('_', '-')}")
    return " ".join(flags)
