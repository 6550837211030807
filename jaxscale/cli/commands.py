"""The subcommands, each a frozen dataclass of its own flags with a `run`. Nothing heavy is imported until it runs.

Field metadata is for the help: `metavar`, and `default` where its text differs from the value. The fields named in
`positional` are positional arguments. A new subcommand is a class here and a line in `COMMANDS`.
"""

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from jaxscale.cli.convert import ConvertState
from jaxscale.cli.draw import Draw
from jaxscale.errors import UserError


def _shown(metavar: str, default: str | None = None) -> dict[str, str]:
    return {"metavar": metavar} | ({} if default is None else {"default": default})


@dataclasses.dataclass(frozen=True)
class Train:
    """Train an experiment, or continue it from its newest checkpoint.

    Fields of the experiment are set by path: --model.embed 256 --plan.zero 3
    (jaxscale train FILE --help lists them, with their defaults).

    Exit codes: 0 done, 2 a mistake in the arguments, 4 the loss diverged,
    75 interrupted and saved, 130 interrupted with nothing to save, else a crash.

    Args:
        file: Python file that defines experiment(), such as experiments/shakespeare.py.
        variant: one of the file's VARIANTS.
        out: run directory; gs:// and s3:// too.
        plan_file: take the plan from this plan.json.
        resume: auto continues the run in the directory, which may change steps, evaluation, samples, checkpoint
            and plan; never renames that directory and starts a new run.
        log_every: steps per line of the log.
        profile: steps to trace: 10:13 traces 10, 11 and 12.
        steps: updates. The learning rate falls until the last one: a run that is continued with other steps goes on
            at another rate, and prints it.
        batch: rows of the global batch.
        seed: seed of parameters, data order, dropout and samples.
        name: name of the run's folder.
        limit: device memory that --plan.memory fit plans for, such as 14GiB.
    """

    positional: ClassVar[tuple[str, ...]] = ("file", "variant")
    of_experiment: ClassVar[tuple[str, ...]] = ("steps", "batch", "seed", "name")
    """Flags that are fields of the experiment."""
    takes_fields: ClassVar[bool] = True

    file: str = dataclasses.field(metadata=_shown("FILE"))
    variant: str | None = dataclasses.field(default=None, metadata=_shown("[VARIANT]", ""))
    out: str | None = dataclasses.field(default=None, metadata=_shown("DIR", "runs/NAME"))
    plan_file: str | None = dataclasses.field(default=None, metadata=_shown("PLAN.JSON", "the experiment's plan"))
    resume: Literal["auto", "never"] = "auto"
    log_every: int = 1
    profile: str | None = dataclasses.field(default=None, metadata=_shown("FIRST:LAST", "no steps"))
    steps: int | None = dataclasses.field(default=None, metadata=_shown("INT", "the experiment's"))
    batch: int | None = dataclasses.field(default=None, metadata=_shown("INT", "the experiment's"))
    seed: int | None = dataclasses.field(default=None, metadata=_shown("INT", "the experiment's"))
    name: str | None = dataclasses.field(default=None, metadata=_shown("NAME", "the experiment's"))
    limit: str | None = dataclasses.field(default=None, metadata=_shown("BYTES", "what programs may use"))

    def check(self) -> None:
        """Check the arguments as far as possible without importing JAX."""
        from jaxscale.recipe.plan import read_plan
        from jaxscale.records.outline import outline

        outline(self.file, self.variant)
        bytes_of(self.limit, "--limit")
        if self.plan_file is not None:
            read_plan(Path(self.plan_file))
        if self.log_every < 1:
            raise UserError(f"--log-every: got {self.log_every}, expected a whole number >= 1")
        if self.profile is not None:
            from jaxscale.training.profile import ProfileRange

            ProfileRange.parse(self.profile)

    def load(self, fields: Mapping[str, str]) -> Any:
        """The experiment and its source, with the fields set on the command line."""
        from jaxscale.recipe.plan import read_plan
        from jaxscale.records.source import load

        flags = {name: str(getattr(self, name)) for name in self.of_experiment if getattr(self, name) is not None}
        plan = None if self.plan_file is None else read_plan(Path(self.plan_file))
        return load(self.file, self.variant, {**flags, **fields}, plan)

    def run(self, fields: Mapping[str, str]) -> None:
        """Train."""
        from jaxscale.training.backend import start_backend

        experiment, source = self.load(fields)
        pipeline = experiment.plan.pipeline
        automatic = pipeline is not None and pipeline.name == "auto"
        if self.limit is not None and experiment.plan.memory.rule != "fit" and not automatic:
            raise UserError("--limit applies to --plan.memory fit: add it, or leave --limit out")
        start_backend()
        from jaxscale.planning.automatic_choices import resolve_choices
        from jaxscale.training.loop import train

        plan = resolve_choices(experiment, experiment.plan, bytes_of(self.limit, "--limit"))
        experiment = dataclasses.replace(experiment, plan=plan)
        out = self.out or str(Path("runs") / "-".join(filter(None, (experiment.name, self.variant))))
        train(
            experiment,
            out=out,
            resume=self.resume,
            log_every=self.log_every,
            profile=self.profile,
            source=source,
        )


@dataclasses.dataclass(frozen=True)
class Fit:
    """Check whether a step fits a platform, and what would help.

    An estimate, or the compiler's figure with --verify; the platform may be absent.

    Fields of the experiment are set by path: --plan.memory full --model.layers 16

    Exit codes: 0 it fits, 3 it does not, 2 a mistake in the arguments.

    Args:
        file: Python file that defines experiment(), such as experiments/llama_8b.py.
        variant: one of the file's VARIANTS.
        platform: such as "tpu v5e:4x4" or "gpu h100 x 8"; local is this machine.
        limit: device memory to plan for, such as 14GiB.
        host_limit: host memory for each device.
        compile_block: compile only the part of the step that needs most memory, for a closer estimate.
        verify: compile the step for the platform, and show the compiler's figures.
        plan_file: take the plan from this plan.json.
        batch: rows of the global batch.
    """

    positional: ClassVar[tuple[str, ...]] = ("file", "variant")
    of_experiment: ClassVar[tuple[str, ...]] = ("batch",)
    takes_fields: ClassVar[bool] = True

    file: str = dataclasses.field(metadata=_shown("FILE"))
    variant: str | None = dataclasses.field(default=None, metadata=_shown("[VARIANT]", ""))
    platform: str = dataclasses.field(default="local", metadata=_shown("PLATFORM"))
    limit: str | None = dataclasses.field(
        default=None, metadata=_shown("BYTES", "what the platform's programs may use")
    )
    host_limit: str | None = dataclasses.field(default=None, metadata=_shown("BYTES", "an equal share of the host's"))
    compile_block: bool = False
    verify: bool = False
    plan_file: str | None = dataclasses.field(default=None, metadata=_shown("PLAN.JSON", "the experiment's plan"))
    batch: int | None = dataclasses.field(default=None, metadata=_shown("INT", "the experiment's"))

    def check(self) -> None:
        """Check the arguments as far as possible without importing JAX."""
        check_planned(self)

    def load(self, fields: Mapping[str, str]) -> Any:
        """The experiment and its source, with the fields set on the command line."""
        return load_planned(self, fields)

    def run(self, fields: Mapping[str, str]) -> int:
        """Print the estimate; returns the exit code."""
        from jaxscale.planning.fit import fit

        experiment, source = self.load(fields)
        estimate = fit(
            experiment,
            planned_platform(self.platform),
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
        platform: such as "tpu v5e:4x4" or "gpu h100 x 8"; local is this machine.
        out: write the page here.
        limit: device memory to plan for, such as 14GiB.
        verify: compile the step for the platform, and show the tensors that the compiler keeps alive.
        plan_file: take the plan from this plan.json.
        batch: rows of the global batch.
    """

    positional: ClassVar[tuple[str, ...]] = ("file", "variant")
    of_experiment: ClassVar[tuple[str, ...]] = ("batch",)
    takes_fields: ClassVar[bool] = True

    file: str = dataclasses.field(metadata=_shown("FILE"))
    variant: str | None = dataclasses.field(default=None, metadata=_shown("[VARIANT]", ""))
    platform: str = dataclasses.field(default="local", metadata=_shown("PLATFORM"))
    out: str | None = dataclasses.field(default=None, metadata=_shown("PAGE.HTML", "the table alone"))
    limit: str | None = dataclasses.field(
        default=None, metadata=_shown("BYTES", "what the platform's programs may use")
    )
    verify: bool = False
    plan_file: str | None = dataclasses.field(default=None, metadata=_shown("PLAN.JSON", "the experiment's plan"))
    batch: int | None = dataclasses.field(default=None, metadata=_shown("INT", "the experiment's"))

    def check(self) -> None:
        """Check the arguments as far as possible without importing JAX."""
        check_planned(self)
        if self.out is not None and not self.out.endswith((".html", ".svg")):
            raise UserError(f"--out {self.out}: expected a name that ends in .html or .svg")
        if self.out is not None:
            check_writable(self.out, "--out")

    def load(self, fields: Mapping[str, str]) -> Any:
        """The experiment and its source, with the fields set on the command line."""
        return load_planned(self, fields)

    def run(self, fields: Mapping[str, str]) -> None:
        """Print the table."""
        from jaxscale.planning.explain import explain

        experiment, source = self.load(fields)
        explanation = explain(
            experiment,
            planned_platform(self.platform),
            limit=bytes_of(self.limit, "--limit"),
            verify=self.verify,
            make=source.remake,
        )
        print(explanation)
        if self.out is not None:
            explanation.write(self.out)
            print(f"written to {self.out}")


@dataclasses.dataclass(frozen=True)
class Generate:
    """Continue a prompt with the model of a run.

    Args:
        run_dir: directory of a run.
        prompt: text to continue.
        tokens: how many tokens to add.
        temperature: logits are divided by it; 0 takes the most likely token.
        seed: seed of the draws.
        best: take the checkpoint with the least held-out loss, not the newest.
    """

    positional: ClassVar[tuple[str, ...]] = ("run_dir",)

    run_dir: str = dataclasses.field(metadata=_shown("RUN_DIR"))
    prompt: str = dataclasses.field(default="\n", metadata=_shown("TEXT", "a new line"))
    tokens: int = 200
    temperature: float = 0.8
    seed: int = 0
    best: bool = False

    def check(self) -> None:
        """Check the arguments as far as possible without importing JAX."""
        check_run(self.run_dir)
        if self.tokens < 1:
            raise UserError(f"--tokens: got {self.tokens}, expected a whole number >= 1")
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"--temperature: got {self.temperature}, expected a number >= 0; 0 is greedy")
        if not -(2**31) <= self.seed < 2**31:
            raise UserError(f"--seed: got {self.seed}, expected a whole number from -2**31 up to, not including, 2**31")

    def run(self) -> None:
        """Generate."""
        from jaxscale.training.backend import start_backend

        start_backend()
        from jaxscale.training.generate import generate

        text = generate(
            self.run_dir, self.prompt, self.tokens, temperature=self.temperature, seed=self.seed, best=self.best
        )
        print(f"{self.prompt}{text}")


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Measure the held-out loss of a run's newest checkpoint.

    Args:
        run_dir: directory of a run.
        best: take the checkpoint with the least held-out loss, not the newest.
    """

    positional: ClassVar[tuple[str, ...]] = ("run_dir",)

    run_dir: str = dataclasses.field(metadata=_shown("RUN_DIR"))
    best: bool = False

    def check(self) -> None:
        """Check the arguments as far as possible without importing JAX."""
        check_run(self.run_dir)

    def run(self) -> None:
        """Evaluate."""
        from jaxscale.training.backend import start_backend

        start_backend()
        from jaxscale.training.evaluate import evaluate

        for name, value in evaluate(self.run_dir, best=self.best).items():
            print(f"{name:10} {value:.6g}" if isinstance(value, float) else f"{name:10} {value}")


@dataclasses.dataclass(frozen=True)
class Export:
    """Write the model of a run as a Hugging Face folder.

    Args:
        run_dir: directory of a run.
        folder: folder to create.
        best: take the checkpoint with the least held-out loss, not the newest.
        dtype: type of the weights in the files: float32, bfloat16 or float16.
    """

    positional: ClassVar[tuple[str, ...]] = ("run_dir", "folder")

    run_dir: str = dataclasses.field(metadata=_shown("RUN_DIR"))
    folder: str = dataclasses.field(metadata=_shown("DIR"))
    best: bool = False
    dtype: Literal["float32", "bfloat16", "float16"] = dataclasses.field(default="float32", metadata=_shown("TYPE"))

    def check(self) -> None:
        """Check the arguments as far as possible without importing JAX."""
        check_run(self.run_dir)
        if Path(self.folder).is_file():
            raise UserError(f"{self.folder} is a file: expected a folder to create")
        if (Path(self.folder) / "experiment.json").exists():
            raise UserError(f"{self.folder} is the directory of a run: give a folder to create beside it")

    def run(self) -> None:
        """Export."""
        from jaxscale.training.backend import start_backend

        start_backend()
        from jaxscale.checkpoint.export import export

        print(export(self.run_dir, self.folder, best=self.best, dtype=self.dtype))


@dataclasses.dataclass(frozen=True)
class Report:
    """Write a run's report.html again, from the run's files alone.

    Args:
        run_dir: directory of a run.
    """

    positional: ClassVar[tuple[str, ...]] = ("run_dir",)

    run_dir: str = dataclasses.field(metadata=_shown("RUN_DIR"))

    def check(self) -> None:
        """Check the arguments as far as possible without importing JAX."""
        check_run(self.run_dir)

    def run(self) -> None:
        """Write the report."""
        from jaxscale.report.page import write_report
        from jaxscale.report.summary import summary

        write_report(self.run_dir)
        print(summary(self.run_dir, color=sys.stdout.isatty()))


@dataclasses.dataclass(frozen=True)
class Doctor:
    """Show versions, devices, memory, disk, and what is missing.

    Exits with 1 where something is missing that a run needs, else with 0.
    """

    positional: ClassVar[tuple[str, ...]] = ()

    def check(self) -> None:
        """Accept: there are no arguments."""

    def run(self) -> int:
        """Print the report; returns the exit code."""
        from jaxscale.training.backend import start_backend

        start_backend()
        from rich.console import Console

        from jaxscale.training.doctor import doctor

        report = doctor()
        Console().print(report)
        return report.status


Command = Train | Fit | Explain | Draw | Generate | Evaluate | Export | ConvertState | Report | Doctor
COMMANDS: dict[str, type[Command]] = {
    "train": Train,
    "fit": Fit,
    "explain": Explain,
    "draw": Draw,
    "generate": Generate,
    "evaluate": Evaluate,
    "export": Export,
    "convert-state": ConvertState,
    "report": Report,
    "doctor": Doctor,
}


def check_planned(command: Fit | Explain) -> None:
    """Check the arguments of a command about a platform, as far as possible without importing JAX."""
    from jaxscale.platforms.platform import Platform
    from jaxscale.recipe.plan import read_plan
    from jaxscale.records.outline import outline

    outline(command.file, command.variant)
    platform = None if command.platform.strip().lower() == "local" else Platform.parse(command.platform)
    bytes_of(command.limit, "--limit")
    bytes_of(getattr(command, "host_limit", None), "--host-limit")
    if command.plan_file is not None:
        read_plan(Path(command.plan_file))
    if command.verify and platform is not None:
        from jaxscale.compiler.target import target
        from jaxscale.platforms.detect import accelerators

        target(platform, accelerators())


def load_planned(command: Fit | Explain, fields: Mapping[str, str]) -> Any:
    """The experiment and its source, with the fields set on the command line."""
    from jaxscale.recipe.plan import read_plan
    from jaxscale.records.source import load

    plan = None if command.plan_file is None else read_plan(Path(command.plan_file))
    flags = {} if command.batch is None else {"batch": str(command.batch)}
    return load(command.file, command.variant, flags | dict(fields), plan)


def planned_platform(text: str) -> Any:
    """The platform of a text; JAX's backend is started for the local one alone."""
    from jaxscale.platforms.detect import hush_absent_gpus
    from jaxscale.platforms.platform import Platform

    hush_absent_gpus()
    if text.strip().lower() == "local":
        from jaxscale.training.backend import start_backend

        start_backend()
    return Platform.parse(text)


def bytes_of(text: str | None, flag: str) -> int | None:
    """The bytes that a flag specifies."""
    from jaxscale.values.byte_sizes import parse_bytes

    if text is None:
        return None
    count = parse_bytes(text, flag)
    if not count:
        raise UserError(f"{flag} {text}: expected at least 1B, or leave it out")
    return count


def check_writable(path: str, flag: str) -> None:
    """Refuse a file that cannot be written, before its content is computed."""
    file = Path(path)
    is_new = not file.exists()
    try:
        file.open("ab").close()
        if is_new:
            file.unlink()
    except OSError as error:
        raise UserError(f"{flag} {path} cannot be written: {error.strerror}; give another name") from None


def check_run(run_dir: str) -> None:
    """Refuse a directory that is no run; the error names the nearest run."""
    from jaxscale.errors import near_miss

    path = Path(run_dir)
    if "://" in run_dir or (path / "experiment.json").is_file():
        return
    runs = [str(file.parent) for base in {path.parent, Path("runs")} for file in base.glob("*/experiment.json")]
    problem = "holds no run (no experiment.json)" if path.exists() else "does not exist"
    choices = f"; there are {', '.join(sorted(runs)[:8])}" if runs else "; make one with: jaxscale train FILE"
    raise UserError(f"run directory {run_dir} {problem}{near_miss(run_dir, runs) or choices}")
