"""What a start finds in an earlier run's directory: whether the run is finished, what changed, where it continues.

The learning rate or the code of the experiment may have changed. Such changes are allowed, so they are printed and
logged. Code outside the experiment file is not compared.

With `--from STEP`, a run returns to one of its checkpoints, and goes on from there with other settings (`Rewind`). Once
that checkpoint has been read and verified, newer checkpoints are renamed to STEP.aside, and copies in the hosts' memory
are removed. returns.json in the run directory records each return. If a start has the step, the settings and the plan
of the last return, it continues the run instead of returning again, because a launcher repeats the command of a run
that was stopped.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxscale import values
from jaxscale.checkpoint.store import Checkpoints
from jaxscale.checkpoint.verified import Restored
from jaxscale.errors import UserError
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.records.directory import (
    CHECKPOINTS,
    MAY_CHANGE_ON_RETURN,
    check_same_experiment,
    explain_write_errors,
    may_change_on_return,
    write_json,
)
from jaxscale.records.processes import call_on_all, is_first, send_from_first, wait_for_all
from jaxscale.records.samples import append_return
from jaxscale.records.source import Source, written_sha256
from jaxscale.values.read_files import whole_number

RETURNS = "returns.json"
"""File in the run directory with a record of each return to a checkpoint."""


@dataclasses.dataclass(frozen=True)
class EarlierRun:
    """The record of an earlier run in its directory, read before the run is continued.

    Args:
        steps: number of updates that the run's experiment specified.
        sha256: SHA-256 of the run's experiment file; `None` if there is no such file.
        setting_changes: by the setting's path, the old and new value of each setting that changes when the run returns
            to a checkpoint.
    """

    steps: int
    sha256: str | None
    setting_changes: dict[str, list[Any]] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, run_dir: Any, experiment: Experiment, *, is_returning: bool = False) -> "EarlierRun | None":
        """Read the record of the run in a directory, before anything is written there.

        Args:
            run_dir: the run directory.
            experiment: the experiment that continues the run.
            is_returning: whether the run returns to a checkpoint; if so, learning rate and guard may change.

        Returns:
            The record; `None` if the directory holds no run.

        Raises:
            UserError: the directory holds a run of another experiment, or its experiment.json is damaged.
        """
        stored_json = check_same_experiment(run_dir, experiment, is_returning=is_returning)
        if stored_json is None:
            return None
        allowed_changes = [change for change in values.changes(experiment, stored_json) if may_change_on_return(change)]
        setting_changes = {change.path: [change.second, change.first] for change in allowed_changes}
        return cls(stored_json.get("steps", experiment.steps), written_sha256(run_dir), setting_changes)

    def change_lines_and_fields(
        self, experiment: Experiment, source: Source | None, step: int
    ) -> Iterator[tuple[str, dict[str, int | float | str]]]:
        """Yield the changes of a run that continues after `step`, as pairs of a line to print and fields for the log.

        The fields are empty for the changes in `setting_changes`, because the log of a return has them.

        The learning rate's schedule ends with the last step, so another number of steps changes the rate at once. If
        the experiment holds code (functions, or classes that its file defines), an edit of the file may change the
        results. Since an edit of a comment changes the file's hash, too, a new hash is reported but raises no error.
        """
        for path, (old_value, new_value) in self.setting_changes.items():
            yield f"{path} was {old_value} and is {new_value} after step {step:,}", {}
        if experiment.steps != self.steps:
            old_step_count, new_step_count = self.steps, experiment.steps
            old_lr_by_group, new_lr_by_group = (
                experiment.optimizer.learning_rates(step, step_count) for step_count in (old_step_count, new_step_count)
            )
            (old_lr, *old_group_lrs), (new_lr, *new_group_lrs) = (
                map(float, lr_by_group.values()) for lr_by_group in (old_lr_by_group, new_lr_by_group)
            )
            effect_text = _change_text(old_lr, new_lr)
            for pattern, old_group_lr, new_group_lr in zip(
                experiment.optimizer.groups, old_group_lrs, new_group_lrs, strict=True
            ):
                effect_text += f", that of group {pattern} {_change_text(old_group_lr, new_group_lr)}"
            yield (
                f"steps were {old_step_count:,} and are {new_step_count:,}: the learning rate of step {step + 1:,} "
                f"{effect_text}",
                {
                    "old_steps": old_step_count,
                    "steps": new_step_count,
                    "old_learning_rate": old_lr,
                    "learning_rate": new_lr,
                },
            )
        if source is None or source.path is None or None in (self.sha256, source.sha256):
            return
        if source.sha256 != self.sha256 and _holds_code(experiment, source):
            yield (
                f"{source.relative or source.path} has changed since this run was last started, and the experiment "
                f"uses code from it: the steps up to {step:,} ran the earlier code",
                {"old_sha256": str(self.sha256), "sha256": str(source.sha256)},
            )


def _change_text(old_lr: float, new_lr: float) -> str:
    """Return how a learning rate changes, as text."""
    return f"stays at {new_lr:.4g}" if old_lr == new_lr else f"changes from {old_lr:.4g} to {new_lr:.4g}"


def _holds_code(experiment: Experiment, source: Source) -> bool:
    """Return whether the experiment holds functions, or classes that its file defines."""
    experiment_json = values.to_json(experiment)
    return values.has_code(experiment_json) or f'"{source.module}:' in json.dumps(experiment_json)


def finished_counts(
    folder: Any, train_step: Any, step_count: int, say: Callable[[str], None]
) -> tuple[int, int] | None:
    """Return a finished run's last step and its number of skipped steps; `None` for a run that is not finished.

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
    restored_checkpoint = checkpoints.restore_arrays(train_step.canonical_abstract(), say=messages.append)
    if restored_checkpoint is None or restored_checkpoint.description.step < step_count:
        return None  # the loop sets the damaged checkpoints aside, and reports them
    for message in messages:
        say(message)
    return restored_checkpoint.description.step, int(restored_checkpoint.arrays["watch/skipped"])


@dataclasses.dataclass(frozen=True)
class Rewind:
    """The return of a run to one of its checkpoints, which is to be made at this start.

    Args:
        folder: the run directory.
        step: step of the checkpoint.
        settings: a dict with the JSON of each setting that may change on a return, by the setting's path in the
            experiment; the entry "plan" has the JSON of the plan.
    """

    folder: Any
    step: int
    settings: Mapping[str, Any]

    @classmethod
    def of(
        cls, folder: Any, from_step: int | str | None, experiment: Experiment, plan: Plan, say: Callable[[str], None]
    ) -> "Rewind | None":
        """Return the rewind to make; `None` if no step is given, or if the run's last return was the same.

        Args:
            folder: the run directory, which holds a run.
            from_step: step of the checkpoint.
            experiment: the experiment, with the settings of this start.
            plan: the plan that this start requests, before automatic choices.
            say: function that is called with a message for the user.

        Raises:
            UserError: there is no such checkpoint, or no step is left to do after it.
        """
        if from_step is None:
            return None
        step = whole_number(str(from_step))
        if step is not None and step >= experiment.steps:
            raise UserError(f"from step {step}: the run has {experiment.steps} steps, so no step is left after it")
        settings = {**_setting_json_by_path(experiment), "plan": json.loads(json.dumps(values.to_json(plan)))}
        records = call_on_all(lambda: _read_records(folder), LookupError)
        if records and (records[-1].get("step"), records[-1].get("settings")) == (step, settings):
            say(f"the run has already returned to step {step} with these settings and this plan, so it is continued")
            return None
        saved_steps = _saved_steps(folder)
        if step is None or step not in saved_steps:
            raise UserError(f"from step {from_step}: {_checkpoints_text(folder, saved_steps)}")
        return cls(folder, step, settings)

    def restore(
        self, checkpoints: Checkpoints, abstract_arrays: Mapping[str, Any], changes: Mapping[str, Any]
    ) -> tuple[Restored, dict[str, Any]]:
        """Restore the checkpoint, set newer checkpoints aside, and record the return.

        Args:
            checkpoints: the run's checkpoints.
            abstract_arrays: shape, dtype and sharding of each array of the canonical tree, by name.
            changes: by the setting's path, the old and new value of each setting that changes.

        Returns:
            The restored checkpoint, and the fields of the log's event about this return.

        Raises:
            UserError: the checkpoint is damaged, or it is from a newer version or another model.
        """
        try:
            restored_checkpoint = checkpoints.restore_arrays(abstract_arrays, step=self.step)
        except UserError as error:
            other_steps = [step for step in _saved_steps(self.folder) if step != self.step]
            raise UserError(f"from step {self.step}: {error}; {_checkpoints_text(self.folder, other_steps)}") from error
        assert restored_checkpoint is not None
        aside_names = checkpoints.put_newer_aside(self.step)
        checkpoints.drop_host_copies()
        return_fields = {"changes": dict(changes), "aside": aside_names}
        if is_first():
            record = {"time": round(time.time(), 3), "step": self.step, "settings": self.settings, **return_fields}
            with explain_write_errors(self.folder):
                write_json(self.folder / RETURNS, [*_read_records(self.folder), record])
                append_return(self.folder, self.step)
        wait_for_all("the run has returned")
        return restored_checkpoint, {"returned": True, **return_fields}


def check_return(folder: Any, from_step: int | str | None, resume: str, has_run: bool) -> None:
    """Check the argument `from_step` before anything is done in the run directory.

    Raises:
        UserError: the directory holds no run, or `resume` is "never".
    """
    if from_step is None:
        return
    if resume == "never":
        raise UserError(f"from step {from_step}: resume is never, which starts a new run; leave one of them out")
    if not has_run:
        raise UserError(f"from step {from_step}: {folder} holds no run; leave it out, or give another directory")


def log_fields(restored_checkpoint: Any, return_fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the event "resume" for a restored checkpoint.

    Args:
        restored_checkpoint: the checkpoint (`Restored`), with the damaged checkpoints and the converted kinds of array.
        return_fields: fields about the return to this checkpoint; {} if the run only continues.
    """
    fields: dict[str, Any] = {"from_memory": True} if restored_checkpoint.origin else dict(return_fields)
    if restored_checkpoint.damaged:
        fields["damaged"] = {str(step): reason for step, reason in restored_checkpoint.damaged.items()}
    if restored_checkpoint.converted:
        fields["converted"] = list(restored_checkpoint.converted)
    return fields


def describe_return(return_fields: Mapping[str, Any]) -> list[str]:
    """Return a list with a line that names the checkpoints that a return has set aside; empty if there are none."""
    if not return_fields.get("aside"):
        return []
    return [
        f"newer checkpoints are now {', '.join(return_fields['aside'])}; remove them if you do not need them any more"
    ]


def _setting_json_by_path(experiment: Experiment) -> dict[str, Any]:
    """Return, by the setting's path, the JSON of each setting that may change on a return."""
    experiment_json = json.loads(json.dumps(values.to_json(experiment)))
    settings = {}
    for path in MAY_CHANGE_ON_RETURN:
        json_value = experiment_json
        for name in path.split("."):
            json_value = json_value[name]
        settings[path] = json_value
    if experiment.optimizer.groups:  # records of runs without groups have no such entry
        settings["optimizer.groups"] = experiment_json["optimizer"]["groups"]
    return settings


def _read_records(folder: Any) -> list[dict[str, Any]]:
    """Return the records of the returns of a run, the oldest first."""
    path = folder / RETURNS
    records = values.read_json(path) if path.exists() else []
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise UserError(f"{path}: expected a list of returns; remove that file, which is only a record")
    return records


def _saved_steps(folder: Any) -> list[int]:
    """Return the steps of the checkpoints of the run in a folder."""
    return send_from_first(Checkpoints(folder / CHECKPOINTS, write=False).steps())


def _checkpoints_text(folder: Any, steps: list[int]) -> str:
    """Return the text of an error message that lists the steps of the run's checkpoints."""
    if not steps:
        return f"{folder} has no other checkpoint"
    return f"{folder} has checkpoints of the steps {', '.join(map(str, steps))}"
