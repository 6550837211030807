"""The run directory: who may write to it, and whether it belongs to this experiment.

experiment.json plan.json     what runs, and how: enough to rebuild the step
source/                       the experiment file and what was changed on the command line
memory.json                   what the plan's memory rule came to, block by block; `--plan.memory file:PATH` reads it
metrics.jsonl tensorboard/    what was measured
checkpoints/ samples.txt report.html
lock                          the process that writes here; released by the system when it ends, however it ends
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
from jaxscale.step.experiment import Experiment
from jaxscale.step.plan import PLAN_VERSION, Plan
from jaxscale.training.storage import is_remote, run_path

EXPERIMENT, PLAN, CHECKPOINTS, LOCK = "experiment.json", "plan.json", "checkpoints", "lock"

MAY_CHANGE = ("steps", "evaluation", "samples", "checkpoint", "plan")
"""Fields of an experiment in which a resumed run may differ from the one it continues."""


def default_directory(experiment: Experiment) -> Path:
    """Where a run goes that was told nothing."""
    return Path("runs") / experiment.name


@contextlib.contextmanager
def claimed(directory: Any) -> Iterator[None]:
    """Hold the run directory for this process alone; a directory in a bucket cannot be held.

    Raises:
        UserError: another process writes there, or the place cannot be written to.
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
            pass  # no such locks on Windows
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
    """Says which place cannot be written to: a full disk, one that is read-only, a file where the folder should be."""
    try:
        yield
    except OSError as problem:
        where = problem.filename or directory
        raise UserError(
            f"cannot write {where}: {problem.strerror or problem}; checkpoints saved before are intact: free space, "
            "or give another directory (--out), and start again"
        ) from problem


def check_same_experiment(directory: Any, experiment: Experiment) -> dict[str, Any] | None:
    """The experiment.json of the run that the directory holds, which must be of the same experiment.

    Fields that have come since with a default, and where files lie, make no difference (`values.changes`).

    Returns:
        `None` where the directory holds no run.

    Raises:
        UserError: the run there differs in more than `MAY_CHANGE`, or its experiment.json is damaged.
    """
    path = run_path(directory) / EXPERIMENT
    if not path.exists():
        return None
    try:
        there = values.read_json(path)
    except UserError as error:
        raise UserError(f"{error}; restore it from a copy, or give another directory (--out)") from error
    found = [d for d in values.changes(experiment, there) if d.path.split(".")[0] not in MAY_CHANGE]
    if found:
        shown = "; ".join(map(str, found[:8])) + (f"; and {len(found) - 8} more" if len(found) > 8 else "")
        raise UserError(
            f"{run_path(directory)} holds a run of another experiment: {shown}. A run that is continued may change "
            f"{', '.join(MAY_CHANGE)}; give this one another directory (--out)"
        )
    return there


def set_aside(directory: Any) -> Any:
    """Rename a directory that holds a run to the first free of NAME.1, NAME.2, ...; gives back where it went."""
    path = run_path(directory)
    if not (path / EXPERIMENT).exists():
        return None
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    with writing(path):
        path.rename(aside)
    return aside


def write_values(directory: Any, experiment: Experiment, plan: Plan) -> None:
    """Write experiment.json and plan.json."""
    write_json(run_path(directory) / EXPERIMENT, values.to_json(experiment))
    write_json(run_path(directory) / PLAN, {"version": PLAN_VERSION, **values.to_json(plan)})


def write_json(path: Any, content: Any) -> None:
    """Write a JSON file whole or not at all."""
    text = json.dumps(content, indent=2) + "\n"
    if is_remote(path):
        path.write_text(text)  # an object is stored whole
        return
    half = path.with_name(f"{path.name}.half")
    half.write_text(text)
    half.replace(path)
