"""Rewind: a run returns to one of its checkpoints (`--from STEP`), and goes on from there with other settings.

Newer checkpoints are renamed to STEP.aside once the named one has been read and verified, and copies in the hosts'
memory are removed. returns.json in the run directory records each return. A start with the step and the
settings of the last return does not return again but continues the run: a launcher repeats the command of a run that
was stopped.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxscale import values
from jaxscale.checkpoint.store import Checkpoints
from jaxscale.checkpoint.verified import Restored
from jaxscale.errors import UserError
from jaxscale.recipe.experiment import Experiment
from jaxscale.records.directory import MAY_CHANGE_ON_RETURN, explain_write_errors, write_json
from jaxscale.records.processes import call_on_all, is_first, send_from_first, wait_for_all
from jaxscale.values.read_files import whole_number

FILE = "returns.json"


@dataclasses.dataclass(frozen=True)
class Rewind:
    """A return to a checkpoint that a start of a run is to make.

    Args:
        folder: the run directory.
        step: step of the checkpoint.
        settings: JSON of each setting that may change on a return, by its path in the experiment.
    """

    folder: Any
    step: int
    settings: Mapping[str, Any]

    @classmethod
    def of(
        cls, folder: Any, from_step: int | str | None, experiment: Experiment, say: Callable[[str], None]
    ) -> "Rewind | None":
        """Return the return to make; `None` if no step is given, or if the run has returned there already.

        Args:
            folder: the run directory, which holds a run.
            from_step: step of the checkpoint.
            experiment: the experiment, with the settings of this start.
            say: function that is called with a message for the user.

        Raises:
            UserError: there is no such checkpoint, or no step is left to do after it.
        """
        if from_step is None:
            return None
        step = whole_number(str(from_step))
        if step is not None and step >= experiment.steps:
            raise UserError(f"from step {step}: the run has {experiment.steps} steps, so no step is left after it")
        settings = _settings(experiment)
        records = call_on_all(lambda: _read_records(folder), LookupError)
        if records and (records[-1].get("step"), records[-1].get("settings")) == (step, settings):
            say(f"the run has already returned to step {step} with these settings, so it is continued")
            return None
        steps = _saved_steps(folder)
        if step is None or step not in steps:
            raise UserError(f"from step {from_step}: {_checkpoints_text(folder, steps)}")
        return cls(folder, step, settings)

    def restore(
        self, checkpoints: Checkpoints, leaves: Mapping[str, Any], changes: Mapping[str, Any]
    ) -> tuple[Restored, dict[str, Any]]:
        """Restore the checkpoint, set the newer ones aside, and record the return.

        Args:
            checkpoints: the run's checkpoints.
            leaves: shape, dtype and sharding of each array of the canonical tree, by name.
            changes: old and new value of each setting that changes, by its path.

        Returns:
            The checkpoint, and fields for the log.

        Raises:
            UserError: the checkpoint is damaged, or it is from a newer version or another model.
        """
        try:
            restored = checkpoints.restore_arrays(leaves, step=self.step)
        except UserError as error:
            others = [step for step in _saved_steps(self.folder) if step != self.step]
            raise UserError(f"from step {self.step}: {error}; {_checkpoints_text(self.folder, others)}") from error
        assert restored is not None
        aside = checkpoints.put_newer_aside(self.step)
        checkpoints.drop_host_copies()
        fields = {"changes": dict(changes), "aside": aside}
        if is_first():
            record = {"time": round(time.time(), 3), "step": self.step, "settings": self.settings, **fields}
            with explain_write_errors(self.folder):
                write_json(self.folder / FILE, [*_read_records(self.folder), record])
        wait_for_all("the run has returned")
        return restored, {"returned": True, **fields}


def check_return(folder: Any, from_step: int | str | None, resume: str, has_run: bool) -> None:
    """Check the argument `from_step` before anything is done in the run directory.

    Raises:
        UserError: there is no run to return in, or `resume` is "never".
    """
    if from_step is None:
        return
    if resume == "never":
        raise UserError(f"from step {from_step}: resume is never, which starts a new run; leave one of them out")
    if not has_run:
        raise UserError(f"from step {from_step}: {folder} holds no run; leave it out, or give another directory")


def describe_return(fields: Mapping[str, Any]) -> list[str]:
    """Return a line for the user on the checkpoints that a return has set aside, from its fields for the log."""
    if not fields.get("aside"):
        return []
    return [f"newer checkpoints are now {', '.join(fields['aside'])}; remove them if you do not need them any more"]


def _settings(experiment: Experiment) -> dict[str, Any]:
    """Return the JSON of each setting that may change on a return, by its path."""
    experiment_json = json.loads(json.dumps(values.to_json(experiment)))
    settings = {}
    for path in MAY_CHANGE_ON_RETURN:
        value = experiment_json
        for name in path.split("."):
            value = value[name]
        settings[path] = value
    return settings


def _read_records(folder: Any) -> list[dict[str, Any]]:
    """Return the records of the returns of a run, the oldest first."""
    path = folder / FILE
    records = values.read_json(path) if path.exists() else []
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise UserError(f"{path}: expected a list of returns; remove that file, which is only a record")
    return records


def _saved_steps(folder: Any) -> list[int]:
    """Return the steps of the checkpoints of the run in a folder."""
    return send_from_first(Checkpoints(folder / "checkpoints", write=False).steps())


def _checkpoints_text(folder: Any, steps: list[int]) -> str:
    """Return which checkpoints there are, as text."""
    if not steps:
        return f"{folder} has no other checkpoint"
    return f"{folder} has checkpoints of the steps {', '.join(map(str, steps))}"
