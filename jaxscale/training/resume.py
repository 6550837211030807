"""What a continued run tells of what has changed since it was last started: its learning rate and its code.

Both changes are allowed, so they are said and logged. Left out: code of modules beside the experiment file.
"""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from jaxscale import values
from jaxscale.step.experiment import Experiment
from jaxscale.training.directory import check_same_experiment
from jaxscale.training.source import Source, written_sha256


@dataclasses.dataclass(frozen=True)
class Earlier:
    """The run that a directory held before it is continued.

    Args:
        steps: its updates.
        sha256: of its experiment file; `None` where it had none.
    """

    steps: int
    sha256: str | None

    @classmethod
    def read(cls, run_dir: Any, experiment: Experiment) -> "Earlier | None":
        """The run that the directory holds; `None` where it holds none. Read it before anything is written there.

        Raises:
            UserError: it is a run of another experiment, or its experiment.json is damaged.
        """
        there = check_same_experiment(run_dir, experiment)
        return None if there is None else cls(there.get("steps", experiment.steps), written_sha256(run_dir))

    def changes(
        self, experiment: Experiment, source: Source | None, step: int
    ) -> Iterator[tuple[str, dict[str, int | float | str]]]:
        """What is different when the run goes on after `step`: a line that says it, and fields for the log.

        The schedule falls until the last step, so other steps move the learning rate at once. Where the experiment
        holds code (functions, or classes of its own file), its values do not show an edit, and the hash of the file
        cannot tell an edited loss from an edited comment or variant: refusing would forbid those, so it is said.
        """
        if experiment.steps != self.steps:
            old, new = self.steps, experiment.steps
            before, now = (experiment.optimizer.learning_rate_at(step, steps) for steps in (old, new))
            told = f"stays at {now:.4g}" if before == now else f"goes from {before:.4g} to {now:.4g}"
            yield (
                f"steps were {old:,} and are {new:,}: the learning rate of step {step + 1:,} {told}",
                {"old_steps": old, "steps": new, "old_learning_rate": before, "learning_rate": now},
            )
        if source is None or source.path is None or None in (self.sha256, source.sha256):
            return
        if source.sha256 != self.sha256 and _holds_code(experiment, source):
            yield (
                f"{source.relative or source.path} has changed since this run was last started, and the experiment "
                f"holds code of it: up to step {step:,} another text was trained",
                {"old_sha256": str(self.sha256), "sha256": str(source.sha256)},
            )


def _holds_code(experiment: Experiment, source: Source) -> bool:
    """Whether the experiment holds functions, or classes that its own file defines."""
    data = values.to_json(experiment)
    return values.has_code(data) or f'"{source.module}:' in json.dumps(data)
