"""The subcommands that take an experiment file: train, fit and explain.

Each subcommand checks as much as possible before it imports JAX. The parameter `fields` of `run` holds texts of new
values for the experiment's fields, by dotted path.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from jaxscale.cli.flags import flag, word
from jaxscale.errors import UserError
from jaxscale.values import field_types

SPARED = 0.1
"""Share of the memory that `train --plan auto` leaves free, because estimates may be too low."""


@dataclasses.dataclass(frozen=True)
class Train:
    """Train an experiment, or continue its run.

    Fields of the experiment are set by path: --model.embed 256 --plan.zero 3
    (jaxscale train FILE --help lists them, with their defaults).

    Exit codes: 0 done, 2 a mistake in the arguments, 4 the loss diverged,
    6 done, but more than a tenth of the steps were skipped,
    75 interrupted and saved, 130 interrupted with nothing to save, 1 a crash.

    Args:
        file: Python file that defines experiment(), or the name of an example, such as shakespeare.
        variant: one of the file's VARIANTS.
        out: directory of the run, which may be in a bucket (gs://, s3://).
        plan: auto chooses the fastest plan that fits this machine, as jaxscale plan does; its fields can still be set.
        plan_file: plan.json file to take the plan from.
        resume: with auto, the run in the directory is continued; steps, evaluation, held-out sets, samples,
            checkpoint and plan may differ from those of the run. With never, that directory is renamed, and a new run
            starts.
        from_step: step of a checkpoint to return to, as in --from 1500; learning rate and guard may then change, and
            newer checkpoints are renamed. The same command again continues the run.
        init_from: a run, one of its checkpoints (RUN/checkpoints/00000500) or a folder of transformers, whose weights a
            new run starts from, as far as names and shapes are the same. The same command again continues the run.
        log_every: number of steps per line of the log.
        profile: steps to trace; 10:13 traces the steps 10, 11 and 12.
        steps: number of updates. The learning rate's schedule ends with the last update, so another number changes the
            learning rate of a continued run; the change is printed.
        batch: number of rows in the global batch.
        seed: seed of parameters, data order, dropout and samples.
        name: name of the run's folder.
        limit: device memory that the step may need, such as 14GiB; --plan.memory fit chooses what fits.
        recalibrate: after the run, store the ratio of measured to modeled seconds of a step, by which plan and fit
            multiply their seconds for this chip from then on.
    """

    file: str = word("FILE")
    variant: str | None = word("[VARIANT]", None)
    out: str | None = flag("DIR", "runs/NAME")
    plan: str | None = flag("auto", "the experiment's")
    plan_file: str | None = flag("PLAN.JSON", "the experiment's plan")
    resume: Literal["auto", "never"] = "auto"
    from_step: str | None = flag("STEP", "the newest")
    init_from: str | None = flag("RUN", "the model's own weights")
    log_every: int = 1
    profile: str | None = flag("FIRST:STOP", "no steps")
    steps: int | None = flag("INT", "the experiment's")
    batch: int | None = flag("INT", "the experiment's")
    seed: int | None = flag("INT", "the experiment's")
    name: str | None = flag("NAME", "the experiment's")
    limit: str | None = flag("BYTES", "what programs may use")
    recalibrate: bool = False

    def run(self, fields: Mapping[str, str]) -> int:
        """Check the flags, train the experiment, and return the exit code 0."""
        self.check()
        experiment, source = load_experiment(self, fields)
        if self.plan is not None:
            experiment = dataclasses.replace(experiment, plan=self.chosen_plan(experiment, fields))
        if self.recalibrate:
            from jaxscale.planning.search.calibration import check_step_count

            check_step_count(experiment.steps // self.log_every)
        from jaxscale.platforms.cpu_threads import limit_loop_depth
        from jaxscale.recipe.loop_depth import loop_depth_of
        from jaxscale.training.loop import train

        limit_loop_depth(loop_depth_of(experiment))
        default_name = "-".join(filter(None, (experiment.name, self.variant)))
        run_dir = str(Path("runs") / default_name) if self.out is None else self.out
        train(
            experiment,
            out=run_dir,
            limit=self.limit,
            resume=self.resume,
            from_step=self.from_step,
            init_from=self.init_from,
            log_every=self.log_every,
            profile=self.profile,
            source=source,
        )
        if self.recalibrate:
            self.store_calibration(experiment, run_dir)
        return 0

    def store_calibration(self, experiment: Any, run_dir: str) -> None:
        """Compute a calibration of this machine's chip from the steps of the run, store it, and print it."""
        import numpy as np

        from jaxscale.planning.search.calibration import calibrate
        from jaxscale.recipe.plan import read_plan
        from jaxscale.records.processes import is_first
        from jaxscale.records.record import RunRecord
        from jaxscale.records.storage import run_path

        if is_first():
            step_seconds = RunRecord.read(run_dir).rows("train").column("step_seconds")
            plan = read_plan(run_path(run_dir) / "plan.json")
            print(calibrate(experiment, plan, platform_of("local"), step_seconds[np.isfinite(step_seconds)].tolist()))

    def chosen_plan(self, experiment: Any, text_by_field_path: Mapping[str, str]) -> Any:
        """Choose the best plan for this machine, print the choice, and return the plan. All processes choose the same.

        Without a limit, a share of the memory (`SPARED`) is left free, because estimates may be too low.

        Raises:
            UserError: no plan fits.
        """
        from jaxscale.cli.plan_command import fixed_settings
        from jaxscale.compiler.usable import usable_bytes
        from jaxscale.planning.search.choice import choose_plan

        platform = platform_of("local")
        usable_byte_count, limit_byte_count = usable_bytes(platform), bytes_of(self.limit, "--limit")
        if limit_byte_count is None and usable_byte_count is not None:
            limit_byte_count = int((1 - SPARED) * usable_byte_count)
        choice = choose_plan(experiment, platform, fixed=fixed_settings(text_by_field_path), limit=limit_byte_count)
        print(choice, end="\n\n")
        if not choice.fits:
            raise UserError(f"plan auto: no plan of {experiment.name} fits {platform}: {choice.advice}")
        return choice.plan

    def check(self) -> None:
        """Raise UserError for an invalid value of a flag, without importing JAX."""
        _check_command(self)
        self.check_progress()

    def check_progress(self) -> None:
        """Raise UserError for an invalid value of --plan, --log-every, --from, --init-from or --profile."""
        if self.plan not in (None, "auto"):
            raise UserError(
                f"--plan: got {self.plan!r}, expected auto; fields of the plan are set by path, such as --plan.zero 3"
            )
        if self.log_every < 1:
            raise UserError(f"--log-every: got {self.log_every}, expected a whole number >= 1")
        if self.from_step is not None and self.resume == "never":
            raise UserError(
                f"--from {self.from_step} with --resume never, which starts a new run: leave one of them out"
            )
        if self.init_from is not None and self.from_step is not None:
            raise UserError(
                f"--init-from {self.init_from} with --from {self.from_step}: a run starts with the weights of another, "
                "or returns to a checkpoint of its own; leave one of them out"
            )
        if self.profile is not None:
            from jaxscale.training.profile import ProfileRange

            ProfileRange.parse(self.profile)  # raises UserError for a text that is not a range


@dataclasses.dataclass(frozen=True)
class Fit:
    """Check whether a step fits a platform, and what would help.

    Prints an estimate; with --verify, prints the compiler's figure.

    The platform need not be present.

    Fields of the experiment are set by path: --plan.memory full --model.layers 16

    Exit codes: 0 the step fits, 3 it does not fit, 2 a mistake in the arguments.

    Args:
        file: Python file that defines experiment(), such as experiments/llama_8b.py.
        variant: one of the file's VARIANTS.
        platform: platform to plan for, such as "tpu v5e:4x4" or "gpu h100 x 8"; local is this machine.
        cluster: file that describes a cluster, whose platform to plan for, such as tpu_configs/v6e_256.py.
        limit: device memory to plan for, such as 14GiB.
        host_limit: host memory per device to plan for, such as 32GiB.
        compile_block: whether to compile the part of the step that needs the most memory, for a closer estimate.
        verify: whether to compile the step for the platform and show the compiler's figures.
        plan_file: plan.json file to take the plan from.
        batch: number of rows in the global batch.
    """

    file: str = word("FILE")
    variant: str | None = word("[VARIANT]", None)
    platform: str = flag("PLATFORM", default="local")
    cluster: str | None = flag("CLUSTER", "none")
    limit: str | None = flag("BYTES", "what the platform's programs may use")
    host_limit: str | None = flag("BYTES", "an equal share of the host's")
    compile_block: bool = False
    verify: bool = False
    plan_file: str | None = flag("PLAN.JSON", "the experiment's plan")
    batch: int | None = flag("INT", "the experiment's")

    def run(self, fields: Mapping[str, str]) -> int:
        """Print the estimate, and return the exit code."""
        if self.cluster is not None:
            from jaxscale.launch.cluster import read_cluster

            if self.platform != "local":
                raise UserError("got --platform and --cluster, expected one of them")
            platform = read_cluster(self.cluster).platform
            return dataclasses.replace(self, platform=platform, cluster=None).run(fields)
        _check_command(self)
        bytes_of(self.host_limit, "--host-limit")  # raises UserError for an invalid size
        from jaxscale.planning.fit import fit

        experiment, source = load_experiment(self, fields)
        estimate = fit(
            experiment,
            platform_of(self.platform),
            limit=bytes_of(self.limit, "--limit"),
            host_limit=bytes_of(self.host_limit, "--host-limit"),
            compile_block=self.compile_block,
            verify=self.verify,
            make=source.remake,
        )
        print(estimate)
        return 0 if estimate.fits else 3


@dataclasses.dataclass(frozen=True)
class Explain:
    """Show a train step's memory by tensor, in the model's names.

    Fields of the experiment are set by path: --plan.memory full --model.layers 16

    Args:
        file: Python file that defines experiment(), such as experiments/llama_1b.py.
        variant: one of the file's VARIANTS.
        platform: platform to plan for, such as "tpu v5e:4x4" or "gpu h100 x 8"; local is this machine.
        out: file to write the page to, .html or .svg.
        limit: device memory to plan for, such as 14GiB.
        verify: whether to compile the step for the platform and show the tensors that the compiler keeps alive.
        plan_file: plan.json file to take the plan from.
        batch: number of rows in the global batch.
    """

    file: str = word("FILE")
    variant: str | None = word("[VARIANT]", None)
    platform: str = flag("PLATFORM", default="local")
    out: str | None = flag("PAGE.HTML", "the table alone")
    limit: str | None = flag("BYTES", "what the platform's programs may use")
    verify: bool = False
    plan_file: str | None = flag("PLAN.JSON", "the experiment's plan")
    batch: int | None = flag("INT", "the experiment's")

    def run(self, fields: Mapping[str, str]) -> None:
        """Print the table and, with --out, write the page."""
        _check_command(self)
        if self.out is not None:
            check_page(self.out)
        from jaxscale.planning.explain import explain

        experiment, source = load_experiment(self, fields)
        explanation = explain(
            experiment,
            platform_of(self.platform),
            limit=bytes_of(self.limit, "--limit"),
            verify=self.verify,
            make=source.remake,
        )
        print(explanation)
        if self.out is not None:
            explanation.write(self.out)
            print(f"written to {self.out}")


def _check_command(command: Train | Fit | Explain) -> None:
    """Raise UserError for an invalid value of a flag that the three subcommands share, without importing JAX."""
    from jaxscale.recipe.plan import read_plan
    from jaxscale.records.outline import outline

    # each of these calls raises UserError for an invalid value
    outline(command.file, command.variant)
    platform = None if isinstance(command, Train) else named_platform(command.platform)
    bytes_of(command.limit, "--limit")
    if command.plan_file is not None:
        read_plan(Path(command.plan_file))
    if not isinstance(command, Train) and command.verify and platform is not None:
        from jaxscale.compiler.target import target
        from jaxscale.platforms.detect import accelerators

        target(platform, accelerators())


def check_page(path: str) -> None:
    """Raise UserError if a page cannot be written to this path. Call this before the page is computed."""
    if not path.endswith((".html", ".svg")):
        raise UserError(f"--out {path}: expected a name that ends in .html or .svg")
    check_writable("--out", path)


def check_writable(flag_name: str, path: str) -> None:
    """Raise UserError if a flag's path cannot be written to. Call this before the content of the file is computed."""
    file = Path(path)
    try:
        is_new = not file.exists()
        file.open("ab").close()
        if is_new:
            file.unlink()
    except OSError as error:
        raise UserError(f"{flag_name} {path} cannot be written: {error.strerror}; give another path") from None
    except ValueError as error:  # a NUL, or half of a surrogate pair
        raise UserError(f"{flag_name} {path} cannot be the name of a file ({error}); give another path") from None


@runtime_checkable
class ExperimentCommand(Protocol):
    """A subcommand that reads an experiment file."""

    @property
    def file(self) -> str:
        """The file, or the name of an example."""
        ...

    @property
    def variant(self) -> str | None:
        """Name of one of the file's variants; `None` for `experiment()`."""
        ...

    @property
    def plan_file(self) -> str | None:
        """The plan.json file of a plan that replaces the experiment's plan."""
        ...


def load_experiment(command: ExperimentCommand, fields: Mapping[str, str]) -> Any:
    """Return the experiment of a subcommand's file, with the changes of the command line, and its `Source`."""
    from jaxscale.recipe.plan import read_plan
    from jaxscale.records.source import load_file

    value_by_flag = {name: getattr(command, name) for name in experiment_flags(type(command))}
    text_by_field = {name: str(value) for name, value in value_by_flag.items() if value is not None}
    plan = None if command.plan_file is None else read_plan(Path(command.plan_file))
    return load_file(command.file, command.variant, {**text_by_field, **fields}, plan)


def experiment_flags(command: type) -> list[str]:
    """Return the names of a subcommand's flags that are also fields of the experiment."""
    from jaxscale.recipe.experiment import Experiment

    return [
        field.name
        for field in dataclasses.fields(command)
        if field.name in field_types(Experiment) and field.name != "plan"
    ]


def named_platform(text: str) -> Any:
    """Return the platform that a text specifies; `None` for "local", because only JAX can detect that platform."""
    from jaxscale.platforms.platform import Platform

    return None if text.strip().lower() == "local" else Platform.parse(text)


def platform_of(text: str) -> Any:
    """Return the platform that a text specifies. For "local", start JAX's backend and detect the platform."""
    from jaxscale.platforms.detect import detect, hush_absent_gpus

    hush_absent_gpus()
    platform = named_platform(text)
    if platform is not None:
        return platform
    from jaxscale.training.backend import start_backend

    start_backend()
    return detect()


def bytes_of(text: str | None, flag_name: str) -> int | None:
    """Return the number of bytes that a flag specifies; `None` without the flag."""
    from jaxscale.values.byte_sizes import parse_bytes

    if text is None:
        return None
    byte_count = parse_bytes(text, flag_name)
    if not byte_count:
        raise UserError(f"{flag_name}: got {text}, expected at least 1B; to set no limit, omit the flag")
    return byte_count
