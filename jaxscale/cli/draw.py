"""The subcommand `draw`: a pipeline's schedule as a chart, or several on one scale, with the numbers beside them."""

import dataclasses
import os
import shutil
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from jaxscale.errors import UserError, near_miss, unknown

if TYPE_CHECKING:
    from jaxscale.pipeline.charts.draw import Chart
    from jaxscale.pipeline.clock.costs import Costs
    from jaxscale.pipeline.plan import PipelinePlan
    from jaxscale.pipeline.schedule import Schedule
    from jaxscale.recipe.experiment import Experiment

PICTURES = ("pipeline",)
PRICES = {"f": "forward", "i": "input", "w": "weight", "b": "backward", "u": "update", "link": "link"}
"""Letters of --cost, and their names in `Costs`."""


def _shown(metavar: str, default: str | None = None) -> dict[str, str]:
    return {"metavar": metavar} | ({} if default is None else {"default": default})


@dataclasses.dataclass(frozen=True)
class Draw:
    """Draw a pipeline schedule: which device runs which stage, when.

    For example:
      jaxscale draw pipeline zb-v:4x8
      jaxscale draw pipeline zb-v:4x8 --cost f=1,i=1.2,w=0.8 -o chart.svg
      jaxscale draw pipeline --compare 1f1b:8x32,lockstep:8x32,v=2,zb-h1:8x32
      jaxscale draw pipeline 1f1b:4x8 --experiment FILE --platform "tpu v5p:4x4x4"
      jaxscale draw pipeline --experiment FILE --devices "gpu h100,gpu a100"
      jaxscale draw pipeline --measured RUN_DIR

    SCHEDULE is NAME:PxM, P devices and M microbatches, or file:PATH, a CSV.
    (jaxscale draw pipeline, without one, lists the names)

    Times are those of one program, where devices wait for neighbours: --machine.

    Fields of the experiment are set by path: --model.layers 16

    Args:
        picture: the kind of picture: pipeline.
        schedule: the schedule, such as 1f1b:4x8.
        compare: several schedules, separated by commas, on one scale; options without a colon, as v=2, belong to the
            schedule before them.
        cost: time of one microbatch on a device, in any unit: f forward, i input gradient, w weight gradient; also b
            (a joint backward, by default i + w), u (update) and link (a message). 1 each by default.
        experiment: price the stages of this experiment's model, by roofline; draws its plan's pipeline, if no schedule
            is named.
        variant: one of the experiment's VARIANTS.
        platform: where it runs, such as "tpu v5e:4x4" or "gpu h100 x 8"; local is this machine.
        devices: unlike devices along the pipe: they receive the experiment's blocks by their speed, and the value for
            the option stages of --plan.pipeline is printed; a multiple of P makes that many pipelines side by side
            (HetPipe).
        measured: draw the pipeline of this run from the trace of its --profile steps, and below it a simulation with
            the measured seconds on the --machine.
        machine: how devices wait for one another: for their neighbours, as in jaxscale, or only for their inputs, as
            in separate programs and in papers.
        updates: number of updates to draw of an asynchronous schedule.
        out: write the chart here: .svg, .html (with a read-out under the pointer), or .csv in PyTorch's format.
    """

    positional: ClassVar[tuple[str, ...]] = ("picture", "schedule")
    takes_fields: ClassVar[bool] = True

    picture: str = dataclasses.field(metadata=_shown("pipeline"))
    schedule: str | None = dataclasses.field(default=None, metadata=_shown("[SCHEDULE]", ""))
    compare: str | None = dataclasses.field(default=None, metadata=_shown("SCHEDULE,SCHEDULE,...", "one schedule"))
    cost: str | None = dataclasses.field(default=None, metadata=_shown("f=1,i=1,w=1", "1 each"))
    experiment: str | None = dataclasses.field(default=None, metadata=_shown("FILE", "--cost"))
    variant: str | None = dataclasses.field(default=None, metadata=_shown("NAME", "the file's experiment()"))
    platform: str | None = dataclasses.field(default=None, metadata=_shown("PLATFORM", "local"))
    devices: str | None = dataclasses.field(default=None, metadata=_shown("PLATFORM,PLATFORM,...", "--platform"))
    measured: str | None = dataclasses.field(default=None, metadata=_shown("RUN_DIR", "--cost"))
    machine: Literal["neighbour", "dataflow"] = "neighbour"
    updates: int | None = dataclasses.field(default=None, metadata=_shown("INT", "as many as show the steady state"))
    out: str | None = dataclasses.field(default=None, metadata=_shown("CHART.SVG", "the terminal alone"))

    def check(self) -> None:
        """Check the arguments as far as possible without importing JAX."""
        if self.picture not in PICTURES:
            if ":" in self.picture:
                raise UserError(f"draw: got {self.picture!r} for the picture: jaxscale draw pipeline {self.picture}")
            raise unknown("picture", self.picture, PICTURES)
        if self.measured is not None:
            self._check_measured()
            return
        if self.schedule is not None and self.compare is not None:
            raise UserError(f"draw pipeline: got {self.schedule} and --compare: put all of them behind --compare")
        if self.schedule is None and self.compare is None and self.experiment is None:
            from jaxscale.pipeline.plan import FORMS

            forms = ", ".join(form for name, form in FORMS.items() if name != "auto")
            raise UserError(f"draw pipeline: got no schedule, expected one such as 1f1b:4x8; there are {forms}")
        if self.updates is not None and self.updates < 1:
            raise UserError(f"--updates: got {self.updates}, expected a whole number >= 1")
        if self.experiment is None:
            for name in ("variant", "platform", "devices"):
                if getattr(self, name) is not None:
                    raise UserError(f"--{name} needs --experiment FILE: add it, or leave --{name} out")
        elif self.cost is not None:
            raise UserError("--cost and --experiment both specify the costs of stages: leave one out")
        else:
            from jaxscale.platforms.platform import Platform
            from jaxscale.records.outline import outline

            outline(self.experiment, self.variant)
            if self.platform is not None and self.devices is not None:
                raise UserError("--platform and --devices both specify the devices: leave one out")
            if self.platform is not None and self.platform.strip().lower() != "local":
                Platform.parse(self.platform)
        prices_of(self.cost)
        schedules = [schedule for _, schedule in self._schedules(self._plans())]
        if self.out is not None:
            from jaxscale.pipeline.charts.draw import check_file

            check_file(self.out, schedules)

    def run(self, fields: Mapping[str, str]) -> None:
        """Draw the chart."""
        from jaxscale.pipeline.clock.costs import Costs

        if self.experiment is None and fields:
            raise UserError(f"--{next(iter(fields))} is a field of an experiment: add --experiment FILE")
        if self.measured is not None:
            chart = self._measured_chart()
        elif self.experiment is None:
            prices = prices_of(self.cost)
            pairs = self._schedules(self._plans())
            entries = [(str(plan), schedule, Costs.alike(schedule, **prices)) for plan, schedule in pairs]
            chart = self._simulated_chart(entries)
        else:
            chart = self._simulated_chart(self._priced(fields))
        print(
            chart.text(
                shutil.get_terminal_size((100, 24)).columns,
                color=sys.stdout.isatty() and "NO_COLOR" not in os.environ,
                unicode=(sys.stdout.encoding or "").lower().startswith("utf"),
            )
        )
        if self.out is not None:
            chart.write(self.out)
            print(f"written to {self.out}")

    def _simulated_chart(self, entries: "list[tuple[str, Schedule, Costs]]") -> "Chart":
        from jaxscale.pipeline.charts.draw import Chart
        from jaxscale.pipeline.clock.simulate import simulate

        simulations = tuple((name, simulate(schedule, costs, self.machine)) for name, schedule, costs in entries)
        return Chart(simulations, timed=self.experiment is not None)

    def _check_measured(self) -> None:
        from jaxscale.pipeline.charts.draw import check_file
        from jaxscale.training.traced_actions import traced_plan

        for name in ("schedule", "compare", "cost", "experiment", "variant", "platform", "devices", "updates"):
            if getattr(self, name) is not None:
                raise UserError(f"draw pipeline: got {name} beside --measured, whose run specifies it: leave it out")
        pipeline = traced_plan(self.measured).pipeline
        if self.out is not None and pipeline is not None:
            check_file(self.out, [pipeline.schedule()] * 2)

    def _measured_chart(self) -> "Chart":
        """The run's measured chart above a simulation with its mean seconds."""
        from jaxscale.pipeline.charts.draw import Chart
        from jaxscale.pipeline.clock.simulate import simulate
        from jaxscale.training.traced_actions import measured_run

        plan, measurement, steps = measured_run(self.measured)
        label = f"mean of {steps} steps" if steps > 1 else "one step"
        simulation = simulate(measurement.schedule, measurement.costs, self.machine)
        name = str(plan.pipeline)
        simulations = ((f"{name} measured, {label}", measurement), (f"{name} simulated with its means", simulation))
        return Chart(simulations, timed=True)

    def _plans(self) -> "list[PipelinePlan]":
        """The plans on the command line; none if the experiment's is meant."""
        from jaxscale.pipeline.plan import PipelinePlan

        texts = split_schedules(self.compare) if self.compare is not None else [self.schedule] if self.schedule else []
        return [PipelinePlan.parse(text) for text in texts]

    def _schedules(self, plans: "list[PipelinePlan]") -> "list[tuple[PipelinePlan, Schedule]]":
        """Each plan with its schedule."""
        from jaxscale.pipeline.charts.draw import drawable

        if plans and self.updates is not None and not any(plan.asynchronous for plan in plans):
            raise UserError("--updates is for asynchronous schedules: draw pipedream, pipemare or 2bw, or leave it out")
        return [(plan, drawable(plan, self.updates)) for plan in plans]

    def _priced(self, fields: Mapping[str, str]) -> "list[tuple[str, Schedule, Costs]]":
        """Name, schedule and costs of each plan, priced for the experiment."""
        from jaxscale.cli.commands import planned_platform
        from jaxscale.planning.stage_prices import stage_costs
        from jaxscale.records.source import load

        assert self.experiment is not None
        experiment, _ = load(self.experiment, self.variant, dict(fields))
        plans = self._plans() or [plan for plan in (experiment.plan.pipeline,) if plan is not None]
        if not plans:
            raise UserError(f"draw pipeline: {self.experiment} has no pipeline in its plan; name one, such as 1f1b:4x8")
        if self.devices is not None:
            return [(str(plan), *self._deal(experiment, plan, schedule)) for plan, schedule in self._schedules(plans)]
        platform = planned_platform(self.platform or "local")
        return [
            (str(plan), schedule, stage_costs(experiment, platform, plan, schedule))
            for plan, schedule in self._schedules(plans)
        ]

    def _deal(self, experiment: "Experiment", plan: "PipelinePlan", schedule: "Schedule") -> "tuple[Schedule, Costs]":
        """The schedule and its costs over unlike devices."""
        from jaxscale.planning.unlike_devices import assign, devices_of
        from jaxscale.platforms.detect import hush_absent_gpus

        hush_absent_gpus()
        assert self.devices is not None
        assignment = assign(experiment, devices_of(self.devices, schedule.ranks), plan, schedule)
        print(f"{plan}: {assignment}\n")
        return schedule, assignment.partition.costs


def prices_of(text: str | None) -> dict[str, float]:
    """The prices of a text such as "f=1,i=1.2,w=0.8".

    Raises:
        UserError: an unknown letter, one given twice, or a price that is no number >= 0.

    Example:
        >>> prices_of("f=1,b=2.5")
        {'forward': 1.0, 'backward': 2.5}
    """
    prices: dict[str, float] = {}
    for item in filter(None, map(str.strip, (text or "").split(","))):
        name, separator, value = (word.strip() for word in item.partition("="))
        if name.lower() not in PRICES:
            raise UserError(
                f"--cost {text!r}: unknown price {name!r}: expected some of {', '.join(PRICES)}, such as f=1,i=1,w=1"
                f"{near_miss(name.lower(), PRICES)}"
            )
        if PRICES[name.lower()] in prices:
            raise UserError(f"--cost {text!r}: {name} is given twice; give it once")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not separator or not 0 <= number < float("inf"):
            raise UserError(f"--cost {text!r}: got {item!r}, expected a number >= 0, such as {name}=1")
        prices[PRICES[name.lower()]] = number
    if prices.get("forward") == 0:
        raise UserError(f"--cost {text!r}: a forward that takes no time leaves nothing to draw; give f=1")
    return prices


def split_schedules(text: str) -> list[str]:
    """The schedules of --compare: split at commas, except those before an option, which has no colon.

    Example:
        >>> split_schedules("1f1b:8x32, interleaved:8x32,v=2,zb-v:8x32")
        ['1f1b:8x32', 'interleaved:8x32,v=2', 'zb-v:8x32']
    """
    schedules: list[str] = []
    for item in filter(None, map(str.strip, text.split(","))):
        if schedules and "=" in item and ":" not in item:
            schedules[-1] += f",{item}"
        else:
            schedules.append(item)
    if not schedules:
        raise UserError(f"--compare {text!r}: got no schedule, expected some, such as 1f1b:8x32,zb-h1:8x32")
    return schedules
