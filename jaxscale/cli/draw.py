"""The subcommand `draw`: draw one pipeline schedule, or several on one time scale, and print their figures."""

import dataclasses
import os
import shutil
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from jaxscale.cli.experiment_commands import named_platform, platform_of
from jaxscale.cli.flags import flag, word
from jaxscale.errors import UserError, near_miss, unknown
from jaxscale.records.storage import check_location

if TYPE_CHECKING:
    from jaxscale.pipeline.clock.costs import Costs
    from jaxscale.pipeline.clock.simulate import Simulation
    from jaxscale.pipeline.orders import Schedule
    from jaxscale.pipeline.plan import PipelinePlan
    from jaxscale.recipe.experiment import Experiment

PICTURES = ("pipeline",)
COSTS = {"f": "forward", "i": "input", "w": "weight", "b": "backward", "u": "update", "link": "link"}
"""The parameter of `Costs.alike` for each letter of --cost."""


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

    SCHEDULE is NAME:PxM for P devices and M microbatches, or file:PATH (CSV).
    (jaxscale draw pipeline, without a schedule, lists the names)

    All devices run one program and wait for their neighbors; see --machine.

    Fields of the experiment are set by path: --model.layers 16

    Args:
        picture: the kind of picture: pipeline.
        schedule: the schedule, such as 1f1b:4x8.
        compare: several schedules, separated by commas, drawn on one scale. Options without a colon, such as v=2,
            belong to the preceding schedule.
        cost: time of one microbatch on a device, in any unit: f for the forward pass, i for the input gradient, w for
            the weight gradient; also b (a joint backward pass, by default i + w), u (update) and link (a message).
        experiment: experiment file; its model determines the costs of the stages, by roofline. Without a schedule, the
            pipeline of the experiment's plan is drawn.
        variant: one of the experiment's VARIANTS.
        platform: platform of the experiment, such as "tpu v5e:4x4" or "gpu h100 x 8"; local is this machine.
        devices: devices of several kinds along the pipe. A device receives blocks of the experiment in proportion to
            its speed, and the value for the option stages of --plan.pipeline is printed. With a multiple of P devices,
            several pipelines run side by side (HetPipe).
        measured: directory of a run; the run's pipeline is drawn as measured by --profile of jaxscale train, above a
            simulation on the --machine with the measured times.
        machine: what a device waits for: with neighbour, for its neighbors, as in jaxscale; with dataflow, only for its
            inputs, as in separate programs and in papers.
        updates: number of updates to draw for an asynchronous schedule.
        out: file to write the chart to: .svg, .html (with a read-out at the pointer), or .csv in PyTorch's format.
    """

    picture: str = word("pipeline")
    schedule: str | None = word("[SCHEDULE]", None)
    compare: str | None = flag("SCHEDULE,SCHEDULE,...", "one schedule")
    cost: str | None = flag("f=1,i=1,w=1", "1 each")
    experiment: str | None = flag("FILE", "--cost")
    variant: str | None = flag("NAME", "the file's experiment()")
    platform: str | None = flag("PLATFORM", "local")
    devices: str | None = flag("PLATFORM,PLATFORM,...", "--platform")
    measured: str | None = flag("RUN_DIR", "--cost")
    machine: Literal["neighbour", "dataflow"] = "neighbour"
    updates: int | None = flag("INT", "as many as show the steady state")
    out: str | None = flag("CHART.SVG", "the terminal alone")

    def run(self, fields: Mapping[str, str]) -> None:
        """Check the flags, print the chart and, with --out, write it to a file."""
        self._check_flags()
        if self.experiment is None and fields:
            raise UserError(f"--{next(iter(fields))} is a field of an experiment: add --experiment FILE")
        from jaxscale.pipeline.charts.draw import Chart

        names_and_simulations = (
            self._names_and_simulations(fields)
            if self.measured is None
            else self._names_and_measurements(self.measured)
        )
        chart = Chart(tuple(names_and_simulations), timed=self.measured is not None or self.experiment is not None)
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

    def _check_flags(self) -> None:
        """Raise UserError if flags exclude one another, or if one requires a missing flag, without importing JAX."""
        if self.picture not in PICTURES:
            if ":" in self.picture:
                raise UserError(f"draw: {self.picture!r} is not a picture: use jaxscale draw pipeline {self.picture}")
            raise unknown("picture", self.picture, PICTURES)
        if self.measured is not None:
            check_location(self.measured)
            for name in ("schedule", "compare", "cost", "experiment", "variant", "platform", "devices", "updates"):
                if getattr(self, name) is not None:
                    raise UserError(
                        f"draw pipeline: got {name}, which the run of --measured already specifies: omit it"
                    )
            return
        if self.schedule is not None and self.compare is not None:
            raise UserError(f"draw pipeline: got {self.schedule} and --compare: put all schedules after --compare")
        if self.schedule is None and self.compare is None and self.experiment is None:
            from jaxscale.pipeline.plan import forms

            forms_text = ", ".join(form for name, form in forms().items() if name != "auto")
            raise UserError(f"draw pipeline: got no schedule, expected one such as 1f1b:4x8; there are {forms_text}")
        if self.updates is not None and self.updates < 1:
            raise UserError(f"--updates: got {self.updates}, expected a whole number >= 1")
        if self.experiment is None:
            for name in ("variant", "platform", "devices"):
                if getattr(self, name) is not None:
                    raise UserError(f"--{name} needs --experiment FILE: add it, or leave --{name} out")
            return
        if self.cost is not None:
            raise UserError("--cost and --experiment both specify the costs of stages: leave one out")
        from jaxscale.records.outline import outline

        outline(self.experiment, self.variant)  # raises UserError for a file or variant that does not exist
        if self.platform is not None and self.devices is not None:
            raise UserError("--platform and --devices both specify the devices: leave one out")
        if self.platform is not None:
            named_platform(self.platform)  # raises UserError for an unknown platform

    def _names_and_measurements(self, run_dir: str) -> "list[tuple[str, Simulation]]":
        """Return two pairs (name, `Simulation`): the run's measurement, and a simulation with the mean times."""
        from jaxscale.pipeline.charts.draw import check_file
        from jaxscale.pipeline.clock.simulate import simulate
        from jaxscale.training.traced_actions import measured_run, traced_plan

        pipeline = traced_plan(run_dir).pipeline
        if self.out is not None and pipeline is not None:
            check_file(self.out, [pipeline.schedule()] * 2)
        plan, measurement, step_count = measured_run(run_dir)
        steps_text = f"mean of {step_count} steps" if step_count > 1 else "one step"
        simulation = simulate(measurement.schedule, measurement.costs, self.machine)
        name = str(plan.pipeline)
        return [(f"{name} measured, {steps_text}", measurement), (f"{name} simulated with its means", simulation)]

    def _names_and_simulations(self, fields: Mapping[str, str]) -> "list[tuple[str, Simulation]]":
        """Return a pair (name, simulation) for each schedule."""
        from jaxscale.pipeline.charts.draw import check_file
        from jaxscale.pipeline.clock.costs import Costs
        from jaxscale.pipeline.clock.simulate import simulate
        from jaxscale.pipeline.plan import PipelinePlan

        price_by_parameter = prices_of(self.cost)
        plan_texts = split_schedules(self.compare) if self.compare is not None else [*filter(None, [self.schedule])]
        plans_and_schedules = self._plans_and_schedules([PipelinePlan.parse(text) for text in plan_texts])
        if self.out is not None:
            check_file(self.out, [schedule for _, schedule in plans_and_schedules])
        if self.experiment is not None:
            names_schedules_and_costs = self._names_schedules_and_costs(self.experiment, fields, plans_and_schedules)
        else:
            names_schedules_and_costs = [
                (str(plan), schedule, Costs.alike(schedule, **price_by_parameter))
                for plan, schedule in plans_and_schedules
            ]
        return [(name, simulate(schedule, costs, self.machine)) for name, schedule, costs in names_schedules_and_costs]

    def _plans_and_schedules(self, plans: "list[PipelinePlan]") -> "list[tuple[PipelinePlan, Schedule]]":
        """Return a pair (plan, schedule) for each plan."""
        from jaxscale.pipeline.charts.draw import schedule_to_draw

        if plans and self.updates is not None and not any(plan.asynchronous for plan in plans):
            raise UserError("--updates is for asynchronous schedules: draw pipedream, pipemare or 2bw, or leave it out")
        return [(plan, schedule_to_draw(plan, self.updates)) for plan in plans]

    def _names_schedules_and_costs(
        self, file: str, fields: Mapping[str, str], plans_and_schedules: "list[tuple[PipelinePlan, Schedule]]"
    ) -> "list[tuple[str, Schedule, Costs]]":
        """Return (name, schedule, costs) for each plan. The costs are those of the experiment's stages.

        Args:
            file: the experiment file.
            fields: texts of new values for the experiment's fields, by dotted path.
            plans_and_schedules: (plan, schedule) for each plan; if this is empty, the experiment's plan is used.
        """
        from jaxscale.planning.stage_prices import stage_costs
        from jaxscale.records.source import load_file

        experiment, _ = load_file(file, self.variant, dict(fields))
        if not plans_and_schedules:
            if experiment.plan.pipeline is None:
                raise UserError(f"draw pipeline: {file} has no pipeline in its plan; give a schedule, such as 1f1b:4x8")
            plans_and_schedules = self._plans_and_schedules([experiment.plan.pipeline])
        if self.devices is not None:
            return [
                (str(plan), schedule, _assigned_costs(experiment, self.devices, plan, schedule))
                for plan, schedule in plans_and_schedules
            ]
        platform = platform_of(self.platform or "local")
        return [
            (str(plan), schedule, stage_costs(experiment, platform, plan, schedule))
            for plan, schedule in plans_and_schedules
        ]


def _assigned_costs(experiment: "Experiment", devices_text: str, plan: "PipelinePlan", schedule: "Schedule") -> "Costs":
    """Assign the experiment's blocks to devices of several kinds, print the assignment, and return the stage costs."""
    from jaxscale.planning.unlike_devices import assign, parse_groups
    from jaxscale.platforms.detect import hush_absent_gpus

    hush_absent_gpus()
    assignment = assign(experiment, parse_groups(devices_text, schedule.ranks), plan, schedule)
    print(f"{plan}: {assignment}\n")
    return assignment.partition.costs


def prices_of(text: str | None) -> dict[str, float]:
    """Return the costs in a text such as "f=1,i=1.2,w=0.8", by the name of the parameter of `Costs.alike`.

    Raises:
        UserError: a letter is unknown or occurs twice, or a cost is not a number >= 0.

    Example:
        >>> prices_of("f=1,b=2.5")
        {'forward': 1.0, 'backward': 2.5}
    """
    price_by_parameter: dict[str, float] = {}
    for entry in filter(None, map(str.strip, (text or "").split(","))):
        letter, separator, price_text = (part.strip() for part in entry.partition("="))
        if letter.lower() not in COSTS:
            raise UserError(
                f"--cost {text!r}: unknown letter {letter!r}: expected some of {', '.join(COSTS)}, such as f=1,i=1,w=1"
                f"{near_miss(letter.lower(), COSTS)}"
            )
        if COSTS[letter.lower()] in price_by_parameter:
            raise UserError(f"--cost {text!r}: {letter} is given twice: give it once")
        try:
            price = float(price_text)
        except ValueError:
            price = -1.0
        if not separator or not 0 <= price < float("inf"):
            raise UserError(f"--cost {text!r}: got {entry!r}, expected a number >= 0, such as {letter}=1")
        price_by_parameter[COSTS[letter.lower()]] = price
    if price_by_parameter.get("forward") == 0:
        raise UserError(
            f"--cost {text!r}: got no time for the forward pass, so there is nothing to draw: give a time, such as f=1"
        )
    return price_by_parameter


def split_schedules(text: str) -> list[str]:
    """Return the schedules in the text of --compare. An option without a colon belongs to the preceding schedule.

    Example:
        >>> split_schedules("1f1b:8x32, interleaved:8x32,v=2,zb-v:8x32")
        ['1f1b:8x32', 'interleaved:8x32,v=2', 'zb-v:8x32']
    """
    schedule_texts: list[str] = []
    for entry in filter(None, map(str.strip, text.split(","))):
        if schedule_texts and "=" in entry and ":" not in entry:
            schedule_texts[-1] += f",{entry}"
        else:
            schedule_texts.append(entry)
    if not schedule_texts:
        raise UserError(f"--compare {text!r}: got no schedule, expected one or more, such as 1f1b:8x32,zb-h1:8x32")
    return schedule_texts
