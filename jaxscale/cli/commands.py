"""The table of the subcommands. A subcommand is a frozen dataclass with a field for each word or flag, and a `run`.

JAX is imported only when a subcommand runs. To add a subcommand, write a class and add it to `COMMANDS`.
"""

import dataclasses

from jaxscale.cli.docs import Docs
from jaxscale.cli.draw import Draw
from jaxscale.cli.experiment_commands import Explain, Fit, Train
from jaxscale.cli.finetune_command import Finetune
from jaxscale.cli.launch_commands import Launch, Retry, ShowStatus, StopRun, WatchHost
from jaxscale.cli.plan_command import CheckLock, ChoosePlan
from jaxscale.cli.run_commands import ConvertState, Evaluate, Export, Generate, Report


@dataclasses.dataclass(frozen=True)
class Doctor:
    """Show versions, devices, memory, disk, and what is missing.

    Exits with 1 if something that a run needs is missing, and otherwise with 0.
    """

    def run(self) -> int:
        """Print the report, and return the exit code."""
        from jaxscale.training.backend import start_backend

        start_backend()
        from rich.console import Console

        from jaxscale.training.doctor import doctor

        report = doctor()
        Console().print(report)
        return report.status


Command = (
    Train | Finetune | Launch | ChoosePlan | CheckLock | Fit | Explain | Draw | Generate | Evaluate | Export
    | ConvertState | Report | ShowStatus | StopRun | WatchHost | Retry | Doctor | Docs
)  # fmt: skip
COMMANDS: dict[str, type[Command]] = {
    "train": Train,
    "finetune": Finetune,
    "launch": Launch,
    "plan": ChoosePlan,
    "check": CheckLock,
    "fit": Fit,
    "explain": Explain,
    "draw": Draw,
    "generate": Generate,
    "evaluate": Evaluate,
    "export": Export,
    "convert-state": ConvertState,
    "report": Report,
    "status": ShowStatus,
    "stop": StopRun,
    "watch": WatchHost,
    "retry": Retry,
    "doctor": Doctor,
    "docs": Docs,
}
TAKES_FIELDS = (Train, Finetune, Launch, ChoosePlan, Fit, Explain, Draw)
"""The subcommands that can set fields of an experiment. Their method `run` takes `Arguments.fields`."""
