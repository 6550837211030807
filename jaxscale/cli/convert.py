"""jaxscale convert-state: a run's checkpoint with its optimizer state in other bits."""

import dataclasses
from typing import ClassVar, Literal


@dataclasses.dataclass(frozen=True)
class ConvertState:
    """Convert a run's optimizer state to other bits.

    A run continued under another --plan.state.moments converts by itself.

    Args:
        run_dir: directory of a run.
        to: bits of the moments: float32, int8, dynamic8, int4 or fp8.
        out: directory to create.
    """

    positional: ClassVar[tuple[str, ...]] = ("run_dir",)

    run_dir: str = dataclasses.field(metadata={"metavar": "RUN_DIR"})
    to: Literal["float32", "int8", "dynamic8", "int4", "fp8"] = dataclasses.field(
        default="float32", metadata={"metavar": "BITS"}
    )
    out: str | None = dataclasses.field(default=None, metadata={"metavar": "DIR", "default": "RUN_DIR-TO"})

    def check(self) -> None:
        """Check the arguments as far as possible without importing JAX."""
        from jaxscale.cli.commands import check_run

        check_run(self.run_dir)

    def run(self) -> None:
        """Convert."""
        from jaxscale.training.backend import start_backend

        start_backend()
        from jaxscale.checkpoint.convert import convert_state

        print(convert_state(self.run_dir, self.to, self.out))
