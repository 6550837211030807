"""Find whether a run in a directory is finished, and what has changed since it was last started.

Its learning rate may have changed, or the code of its experiment. Such changes are allowed, so they are printed and
logged. Code outside the experiment file is not compared.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

from jaxscale import values
from jaxscale.checkpoint.store import Checkpoints
from jaxscale.recipe.experiment import Experiment
from jaxscale.records.directory import CHECKPOINTS, MAY_CHANGE_ON_RETURN, check_same_experiment, is_within
from jaxscale.records.processes import send_from_first
from jaxscale.records.source import Source, written_sha256


@dataclasses.dataclass(frozen=True)
class EarlierRun:
    """The record of an earlier run in its directory, read before the run is continued.

    Args:
        steps: number of updates that the run's experiment specified.
        sha256: SHA-256 of the run's experiment file; `None` if there is no such file.
        settings: old and new value of each setting that changes as the run returns to a checkpoint, by its path.
    """

    steps: int
    sha256: str | None
    settings: dict[str, list[Any]] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, run_dir: Any, experiment: Experiment, *, is_returning: bool = False) -> "EarlierRun | None":
        """Read the record of the run in a directory, before anything is written there.

        Args:
            run_dir: the run directory.
            experiment: the experiment that continues the run.
            is_returning: whether the run returns to a checkpoint, so that learning rate and guard may change.

        Returns:
            The record; `None` if the directory holds no run.

        Raises:
            UserError: the directory holds a run of another experiment, or its experiment.json is damaged.
        """
        stored_json = check_same_experiment(run_dir, experiment, is_returning=is_returning)
        if stored_json is None:
            return None
        differences = [d for d in values.changes(experiment, stored_json) if is_within(d.path, MAY_CHANGE_ON_RETURN)]
        settings = {change.path: [change.second, change.first] for change in differences}
        return cls(stored_json.get("steps", experiment.steps), written_sha256(run_dir), settings)

    def changes(
        self, experiment: Experiment, source: Source | None, step: int
    ) -> Iterator[tuple[str, dict[str, int | float | str]]]:
        """Yield the changes of a run that continues after `step`, as pairs of a line to print and fields for the log.

        Changes of `settings` have no fields, because the log of a return has them.

        The learning rate's schedule ends with the last step, so another number of steps changes the rate at once. If
        the experiment holds code (functions, or classes that its file defines), an edit of the file may change the
        results. Since an edit of a comment changes the file's hash, too, a new hash is reported but raises no error.
        """
        for path, (old_value, new_value) in self.settings.items():
            yield f"{path} was {old_value} and is {new_value} after step {step:,}", {}
        if experiment.steps != self.steps:
            old_steps, new_steps = self.steps, experiment.steps
            old_lr, new_lr = (experiment.optimizer.learning_rate_at(step, steps) for steps in (old_steps, new_steps))
            effect_text = f"stays at {new_lr:.4g}" if old_lr == new_lr else f"changes from {old_lr:.4g} to {new_lr:.4g}"
            yield (
                f"steps were {old_steps:,} and are {new_steps:,}: the learning rate of step {step + 1:,} {effect_text}",
                {"old_steps": old_steps, "steps": new_steps, "old_learning_rate": old_lr, "learning_rate": new_lr},
            )
        if source is None or source.path is None or None in (self.sha256, source.sha256):
            return
        if source.sha256 != self.sha256 and _holds_code(experiment, source):
            yield (
                f"{source.relative or source.path} has changed since this run was last started, and the experiment "
                f"uses code from it: the steps up to {step:,} ran the earlier code",
                {"old_sha256": str(self.sha256), "sha256": str(source.sha256)},
            )


def _holds_code(experiment: Experiment, source: Source) -> bool:
    """Return whether the experiment holds functions, or classes that its file defines."""
    experiment_json = values.to_json(experiment)
    return values.has_code(experiment_json) or f'"{source.module}:' in json.dumps(experiment_json)


def finished_run(folder: Any, train_step: Any, step_count: int, say: Callable[[str], None]) -> tuple[int, int] | None:
    """Return step and number of skipped steps of a finished run; `None` for a run of which steps are left to do.

    The arrays of the newest undamaged checkpoint are read and compared with their checksums, because the name of a
    folder proves nothing.

    Args:
        folder: the run directory.
        train_step: the train step.
        step_count: number of steps of the run.
        say: function that is called with a message about each damaged checkpoint of a finished run.
    """
    checkpoints = Checkpoints(folder / CHECKPOINTS, write=False)
    if max(send_from_first(checkpoints.steps()), default=0) < step_count:
        return None
    messages: list[str] = []
    restored = checkpoints.restore_arrays(train_step.canonical_abstract(), say=messages.append)
    if restored is None or restored.description.step < step_count:
        return None  # the loop sets the damaged checkpoints aside, and reports them
    for message in messages:
        say(message)
    return restored.description.step, int(restored.arrays["watch/skipped"])
