"""The subcommand `draw`: chart the schedule of a pipeline, or of several on one scale, and print their figures."""

import dataclasses
import os
import shutil
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from jaxscale.cli.experiment_commands import named_platform, platform_of
from jaxscale.cli.flags import flag, word
from jaxscale.errors import UserError, near_miss, unknown

if TYPE_CHECKING:
    from jaxscale.pipeline.clock.costs import Costs
    from jaxscale.pipeline.clock.simulate import Simulation
    from jaxscale.pipeline.orders import Schedule
    from jaxscale.pipeline.plan import PipelinePlan
    from jaxscale.recipe.experiment import Experiment

PICTURES = ("pipeline",)
COSTS = {"f": "forward", "i": "input", "w": "weight", "b": "backward", "u": "update", "link": "link"}
"""The letters of --cost, and the parameters of `Costs.alike` for which they stand."""


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

    Devices run one program and wait for their neighbours; see --machine.

    Fields of the experiment are set by path: --model.layers 16

    Args:
        picture: the kind of picture: pipeline.
        schedule: the schedule, such as 1f1b:4x8.
        compare: several schedules, separated by commas, on one scale. Options without a colon, such as v=2, belong to
            the schedule before them.
        cost: time of one microbatch on a device, in any unit: f for the forward, i for the input gradient, w for the
            weight gradient; also b (a joint backward, by default i + w), u (update) and link (a message).
        experiment: take the costs of stages from this experiment's model, by roofline. Without a schedule, draw the
            pipeline of its plan.
        variant: one of the experiment's VARIANTS.
        platform: platform of the experiment, such as "tpu v5e:4x4" or "gpu h100 x 8"; local is this machine.
        devices: devices of several kinds along the pipe. Each receives blocks of the experiment by its speed, and the
            value for the option stages of --plan.pipeline is printed. With a multiple of P devices, several pipelines
            run side by side (HetPipe).
        measured: draw the pipeline of this run from the trace of its --profile steps, and below it a simulation with
            the measured seconds on the --machine.
        machine: what devices wait for. With neighbour, for their neighbours, as in jaxscale; with dataflow, only for
            their inputs, as in separate programs and in papers.
        updates: number of updates to draw of an asynchronous schedule.
        out: file to write the chart to: .svg, .html (with a read-out under the pointer), or .csv in PyTorch's format.
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

        simulations = self._simulations(fields) if self.measured is None else self._measurements(self.measured)
        chart = Chart(tuple(simulations), timed=self.measured is not None or self.experiment is not None)
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
        """Raise an error if flags exclude one another, or lack one that they need, without importing JAX."""
        if self.picture not in PICTURES:
            if ":" in self.picture:
                raise UserError(f"draw: {self.picture!r} is not a picture: use jaxscale draw pipeline {self.picture}")
            raise unknown("picture", self.picture, PICTURES)
        if self.measured is not None:
            for name in ("schedule", "compare", "cost", "experiment", "variant", "platform", "devices", "updates"):
                if getattr(self, name) is not None:
                    raise UserError(
                        f"draw pipeline: got {name}, which the run of --measured specifies already: omit it"
                    )
            return
        if self.schedule is not None and self.compare is not None:
            raise UserError(f"draw pipeline: got {self.schedule} and --compare: put all of them after --compare")
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

        outline(self.experiment, self.variant)
        if self.platform is not None and self.devices is not None:
            raise UserError("--platform and --devices both specify the devices: leave one out")
        if self.platform is not None:
            named_platform(self.platform)

    def _measurements(self, run_dir: str) -> "list[tuple[str, Simulation]]":
        """Return the name and `Simulation` of the run's measurement, and of a simulation with its mean seconds."""
        from jaxscale.pipeline.charts.draw import check_file
        from jaxscale.pipeline.clock.simulate import simulate
        from jaxscale.training.traced_actions import measured_run, traced_plan

        pipeline = traced_plan(run_dir).pipeline
        if self.out is not None and pipeline is not None:
            check_file(self.out, [pipeline.schedule()] * 2)
        plan, measurement, steps = measured_run(run_dir)
        steps_text = f"mean of {steps} steps" if steps > 1 else "one step"
        simulation = simulate(measurement.schedule, measurement.costs, self.machine)
        name = str(plan.pipeline)
        return [(f"{name} measured, {steps_text}", measurement), (f"{name} simulated with its means", simulation)]

    def _simulations(self, fields: Mapping[str, str]) -> "list[tuple[str, Simulation]]":
        """Return the name and the simulation of each schedule."""
        from jaxscale.pipeline.charts.draw import check_file
        from jaxscale.pipeline.clock.costs import Costs
        from jaxscale.pipeline.clock.simulate import simulate
        from jaxscale.pipeline.plan import PipelinePlan

        prices = prices_of(self.cost)
        texts = split_schedules(self.compare) if self.compare is not None else [*filter(None, [self.schedule])]
        pairs = self._schedule_pairs([PipelinePlan.parse(text) for text in texts])
        if self.out is not None:
            check_file(self.out, [schedule for _, schedule in pairs])
        if self.experiment is not None:
            priced_schedules = self._priced_schedules(self.experiment, fields, pairs)
        else:
            priced_schedules = [(str(plan), schedule, Costs.alike(schedule, **prices)) for plan, schedule in pairs]
        return [(name, simulate(schedule, costs, self.machine)) for name, schedule, costs in priced_schedules]

    def _schedule_pairs(self, plans: "list[PipelinePlan]") -> "list[tuple[PipelinePlan, Schedule]]":
        """Return pairs of each plan and its schedule."""
        from jaxscale.pipeline.charts.draw import drawable

        if plans and self.updates is not None and not any(plan.asynchronous for plan in plans):
            raise UserError("--updates is for asynchronous schedules: draw pipedream, pipemare or 2bw, or leave it out")
        return [(plan, drawable(plan, self.updates)) for plan in plans]

    def _priced_schedules(
        self, file: str, fields: Mapping[str, str], pairs: "list[tuple[PipelinePlan, Schedule]]"
    ) -> "list[tuple[str, Schedule, Costs]]":
        """Return the name, schedule and costs of each plan, with the costs of the experiment's stages.

        Args:
            file: the experiment file.
            fields: text of each field of the experiment to set, by the field's dotted path.
            pairs: pairs of a plan and its schedule; if there are none, the experiment's own plan is used.
        """
        from jaxscale.planning.stage_prices import stage_costs
        from jaxscale.records.source import load_file

        experiment, _ = load_file(file, self.variant, dict(fields))
        if not pairs:
            if experiment.plan.pipeline is None:
                raise UserError(f"draw pipeline: {file} has no pipeline in its plan; give a schedule, such as 1f1b:4x8")
            pairs = self._schedule_pairs([experiment.plan.pipeline])
        if self.devices is not None:
            return [(str(plan), *_assign_devices(experiment, self.devices, plan, schedule)) for plan, schedule in pairs]
        platform = platform_of(self.platform or "local")
        return [(str(plan), schedule, stage_costs(experiment, platform, plan, schedule)) for plan, schedule in pairs]


def _assign_devices(
    experiment: "Experiment", devices: str, plan: "PipelinePlan", schedule: "Schedule"
) -> "tuple[Schedule, Costs]":
    """Assign the experiment's blocks to devices of several kinds, and print the assignment.

    Returns:
        The plan's schedule, and its costs with this assignment.
    """
    from jaxscale.planning.unlike_devices import assign, devices_of
    from jaxscale.platforms.detect import hush_absent_gpus

    hush_absent_gpus()
    assignment = assign(experiment, devices_of(devices, schedule.ranks), plan, schedule)
    print(f"{plan}: {assignment}\n")
    return schedule, assignment.partition.costs


def prices_of(text: str | None) -> dict[str, float]:
    """Return the costs in a text such as "f=1,i=1.2,w=0.8", by their parameter of `Costs.alike`.

    Raises:
        UserError: a letter is unknown or occurs twice, or a cost is not a number >= 0.

    Example:
        >>> prices_of("f=1,b=2.5")
        {'forward': 1.0, 'backward': 2.5}
    """
    prices: dict[str, float] = {}
    for entry in filter(None, map(str.strip, (text or "").split(","))):
        letter, separator, price_text = (word.strip() for word in entry.partition("="))
        if letter.lower() not in COSTS:
            raise UserError(
                f"--cost {text!r}: unknown price {letter!r}: expected some of {', '.join(COSTS)}, such as f=1,i=1,w=1"
                f"{near_miss(letter.lower(), COSTS)}"
            )
        if COSTS[letter.lower()] in prices:
            raise UserError(f"--cost {text!r}: {letter} is given twice: give it once")
        try:
            price = float(price_text)
        except ValueError:
            price = -1.0
        if not separator or not 0 <= price < float("inf"):
            raise UserError(f"--cost {text!r}: got {entry!r}, expected a number >= 0, such as {letter}=1")
        prices[COSTS[letter.lower()]] = price
    if prices.get("forward") == 0:
        raise UserError(
            f"--cost {text!r}: a forward that takes no time leaves nothing to draw: give it a time, such as f=1"
        )
    return prices


def split_schedules(text: str) -> list[str]:
    """Split the text of --compare at commas into schedules; an entry without a colon belongs to the schedule before it.

    Example:
        >>> split_schedules("1f1b:8x32, interleaved:8x32,v=2,zb-v:8x32")
        ['1f1b:8x32', 'interleaved:8x32,v=2', 'zb-v:8x32']
    """
    schedules: list[str] = []
    for entry in filter(None, map(str.strip, text.split(","))):
        if schedules and "=" in entry and ":" not in entry:
            schedules[-1] += f",{entry}"
        else:
            schedules.append(entry)
    if not schedules:
        raise UserError(f"--compare {text!r}: got no schedule, expected some, such as 1f1b:8x32,zb-h1:8x32")
    return schedules
