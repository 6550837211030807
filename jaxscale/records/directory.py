"""The run directory: its files, its lock, and the check that it belongs to an experiment.

experiment.json plan.json     the experiment and the plan, from which the step can be rebuilt
source/                       the experiment file and the overrides of the command line
memory.json                   the decision of the plan's memory rule, block by block; `--plan.memory file:PATH` reads it
metrics.jsonl tensorboard/    the measurements
checkpoints/ samples.txt report.html
lock                          the process that writes to the run; the system releases it when the process ends
"""

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxscale import values
from jaxscale.errors import UserError
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import PLAN_VERSION, Plan
from jaxscale.records.storage import is_remote, run_path

EXPERIMENT, PLAN, CHECKPOINTS, LOCK = "experiment.json", "plan.json", "checkpoints", "lock"

MAY_CHANGE = ("steps", "evaluation", "samples", "checkpoint", "plan")
"""Fields of an experiment in which a resumed run may differ from the one it continues."""


def default_directory(experiment: Experiment) -> Path:
    """The run directory of an experiment without --out."""
    return Path("runs") / experiment.name


@contextlib.contextmanager
def claimed(directory: Any) -> Iterator[None]:
    """A context that locks the run directory for this process; a directory in a bucket cannot be locked.

    Raises:
        UserError: another process has locked the directory, or it cannot be written.
    """
    path = run_path(directory)
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        if is_remote(path):
            yield
            return
        file = (path / LOCK).open("a+")
    with file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass  # Windows has no such locks
        except OSError:
            file.seek(0)
            raise UserError(
                f"{path} is in use by {file.read().strip() or 'another process'}: wait until that run ends, "
                "or give this one another directory (--out)"
            ) from None
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


@contextlib.contextmanager
def writing(directory: Any) -> Iterator[None]:
    """A context that turns an OSError, as of a full or read-only disk, into a UserError that names the path."""
    try:
        yield
    except OSError as error:
        path = error.filename or directory
        raise UserError(
            f"cannot write {path}: {error.strerror or error}; checkpoints saved before are intact: free space, "
            "or give another directory (--out), and start again"
        ) from error


def existing_run(directory: Any) -> Any:
    """The path of a directory that holds a run.

    Raises:
        UserError: the directory holds no run.
    """
    path = run_path(directory)
    if not (path / EXPERIMENT).exists():
        raise UserError(f"{path} holds no run: expected {EXPERIMENT} there; give the directory of a run")
    return path


def check_same_experiment(directory: Any, experiment: Experiment) -> dict[str, Any] | None:
    """Check that the run in a directory is of the same experiment, and return its experiment.json.

    New fields with a default, and paths of files, do not count as differences (`values.changes`).

    Returns:
        Content of experiment.json; `None` if the directory holds no run.

    Raises:
        UserError: the run differs in more than `MAY_CHANGE`, or its experiment.json is damaged.
    """
    path = run_path(directory) / EXPERIMENT
    if not path.exists():
        return None
    try:
        stored_json = values.read_json(path)
    except UserError as error:
        raise UserError(f"{error}; restore it from a copy, or give another directory (--out)") from error
    changes = values.changes(experiment, stored_json)
    changes = [change for change in changes if change.path.split(".")[0] not in MAY_CHANGE]
    if changes:
        listing = "; ".join(map(str, changes[:8])) + (f"; and {len(changes) - 8} more" if len(changes) > 8 else "")
        raise UserError(
            f"{run_path(directory)} holds a run of another experiment: {listing}. A run that is continued may change "
            f"{', '.join(MAY_CHANGE)}; give this one another directory (--out)"
        )
    return stored_json


def set_aside(directory: Any) -> Any:
    """Rename the directory of a run to the first free name of NAME.1, NAME.2, ..., and return the new path.

    Returns `None` if it holds no run.
    """
    path = run_path(directory)
    if not (path / EXPERIMENT).exists():
        return None
    number = 1
    while (target := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    with writing(path):
        path.rename(target)
    return target


def write_values(directory: Any, experiment: Experiment, plan: Plan) -> None:
    """Write experiment.json and plan.json."""
    write_json(run_path(directory) / EXPERIMENT, values.to_json(experiment))
    write_json(run_path(directory) / PLAN, {"version": PLAN_VERSION, **values.to_json(plan)})


def write_json(path: Any, content: Any) -> None:
    """Write a JSON file, so that a kill leaves the old file or the new one."""
    text = json.dumps(content, indent=2) + "\n"
    if is_remote(path):
        path.write_text(text)  # a bucket stores an object whole
        return
    temporary = path.with_name(f"{path.name}.half")
    temporary.write_text(text)
    temporary.replace(path)
