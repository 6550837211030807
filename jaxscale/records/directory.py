"""The run directory: its files, its lock, and the check that it holds a run of the same experiment.

experiment.json plan.json     the experiment and the plan, from which the train step can be rebuilt
source/                       the experiment file and the overrides of the command line
init_from.json                the origin of the initial weights, if the run started from weights of another run
returns.json                  the returns to an earlier checkpoint, with the settings that changed
memory.json                   the memory rule's choice for each block, which `--plan.memory file:PATH` reads
tokenizer.json                the tokenizer of the data, and chat_template.json the template of its chats
metrics.jsonl tensorboard/    the measurements
checkpoints/                  the saved train states
samples.txt report.html       the texts that the model generated, and the report
processes/                    heartbeats of the run's processes
lock                          names the process that writes to the run; that process keeps the file locked until it ends
"""

import contextlib
import errno
import json
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxscale import values
from jaxscale.errors import UserError
from jaxscale.records.storage import check_location, is_remote, run_path, write_whole
from jaxscale.values.read_files import check_own_file, whole_number

if TYPE_CHECKING:
    from jaxscale.recipe.experiment import Experiment
    from jaxscale.recipe.plan import Plan

EXPERIMENT, PLAN, CHECKPOINTS, LOCK = "experiment.json", "plan.json", "checkpoints", "lock"
PROCESSES = "processes"

MAY_CHANGE = ("steps", "evaluation", "held_out", "samples", "checkpoint", "plan")
"""Fields of an experiment that may change when a run is continued."""
MAY_CHANGE_ON_RETURN = (
    "guard", "optimizer.learning_rate", "optimizer.final_learning_rate", "optimizer.warmup", "optimizer.schedule",
)  # fmt: skip
"""Fields that may also change when a run returns to a checkpoint. No array of the train state depends on them."""
_GROUPS = "optimizer.groups."
"""Prefix of the paths of optimizer groups' settings. The learning rate and the schedule of a group may change, too."""


def default_directory(experiment: "Experiment") -> Path:
    """Return the run directory of an experiment that is trained without --out."""
    return Path("runs") / experiment.name


def heartbeat_folder(directory: Any) -> Path | None:
    """Return the folder of a run's heartbeat files. For a run in a bucket, which has no such folder, return `None`."""
    path = run_path(directory)
    return None if is_remote(path) else Path(path) / PROCESSES


@contextlib.contextmanager
def lock_run(directory: Any) -> Iterator[None]:
    """Create a run directory, and lock it for this process while the context is open.

    A directory in a bucket or on Windows is not locked.

    Raises:
        UserError: another process has locked the directory, or the directory cannot be written to.
    """
    path = run_path(directory)
    with explain_write_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        if is_remote(path):
            yield
            return
        check_own_file(path / LOCK)
        lock_file = (path / LOCK).open("ab+", buffering=0)
    with lock_file:
        try:
            import fcntl

            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass  # Windows has no such locks
        except OSError:
            lock_file.seek(0)
            owner = lock_file.read(1000).decode(errors="replace").strip() or "another process"
            raise UserError(
                f"{path} is in use by {owner}: wait until that run ends, or choose another directory with --out"
            ) from None
        with explain_write_errors(path / LOCK):
            lock_file.truncate(0)
            lock_file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield


def is_locked(directory: Path) -> bool:
    """Return whether a process has locked a local directory."""
    try:
        import fcntl

        with (directory / LOCK).open("r") as lock_file:
            fcntl.flock(lock_file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):
        return False
    return False


@contextlib.contextmanager
def explain_write_errors(directory: Any) -> Iterator[None]:
    """Turn an OSError inside the context, for example about a full disk, into a UserError that names the path.

    Args:
        directory: the path to name if the OSError has no path.
    """
    try:
        yield
    except OSError as error:
        raise write_error(error, directory) from error


def write_error(error: OSError, directory: Any) -> UserError:
    """Return the UserError for an OSError, for example about a full disk. It names the error's path or `directory`.

    Example:
        >>> str(write_error(OSError(errno.ENOSPC, "no space"), "runs/a"))[:30]
        'cannot write runs/a: no space.'
    """
    return UserError(
        f"cannot write {error.filename or directory}: {error.strerror or error}. Earlier checkpoints are intact. "
        f"{_remedy(error)}, or choose another directory with --out, and start again"
    )


@contextlib.contextmanager
def explain_file_errors(directory: Any) -> Iterator[None]:
    """Turn an OSError inside the context into a UserError if it is about a file of a run directory.

    Such an error is never the program's fault. An example is a file that cannot be read, or a link to itself.

    Args:
        directory: the run directory.
    """
    try:
        yield
    except OSError as error:
        folder_path, file_path = os.fspath(directory), error.filename
        if not isinstance(file_path, str) or not os.path.abspath(file_path).startswith(
            os.path.abspath(folder_path) + os.sep
        ):
            raise
        raise UserError(
            f"cannot use {file_path}: {error.strerror or error}. {_remedy(error)}, or restore it from a copy"
        ) from error


def _remedy(error: OSError) -> str:
    """Return the advice for an error about a file, as the start of a sentence."""
    return "Free some space" if is_disk_full(error) else "Check that you may read and write there, or move it away"


def is_disk_full(error: BaseException) -> bool:
    """Return whether an error reports a full disk, an exhausted quota, or a file at its size limit.

    Example:
        >>> is_disk_full(OSError(errno.ENOSPC, "")), is_disk_full(OSError(errno.EACCES, ""))
        (True, False)
    """
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def existing_run(directory: Any) -> Any:
    """Return the path object of a run directory that holds a run.

    Raises:
        UserError: the directory does not contain a run.
    """
    check_location(directory)
    path = run_path(directory)
    if not (path / EXPERIMENT).exists():
        raise UserError(f"{path} holds no run: expected {EXPERIMENT} there; give the directory of a run")
    return path


def check_same_experiment(
    directory: Any, experiment: "Experiment", *, is_returning: bool = False
) -> dict[str, Any] | None:
    """Check that a directory does not contain a run of another experiment, and return the content of experiment.json.

    Folders of files do not count as differences. Neither do new fields that have their default values.

    Args:
        directory: the run directory.
        experiment: the experiment.
        is_returning: whether the run returns to a checkpoint, so that the fields in `MAY_CHANGE_ON_RETURN` may differ.

    Returns:
        The content of experiment.json; `None` if the directory does not contain a run.

    Raises:
        UserError: the run's experiment differs in a field that may not change, or experiment.json is damaged.
    """
    path = run_path(directory) / EXPERIMENT
    if not path.exists():
        checkpoint_folder = run_path(directory) / CHECKPOINTS
        if checkpoint_folder.is_dir() and any(
            whole_number(step_folder.name) for step_folder in checkpoint_folder.iterdir()
        ):
            raise UserError(
                f"{run_path(directory)} has checkpoints, but no {EXPERIMENT}: restore "
                "that file from a copy, or choose another directory with --out"
            )
        return None
    try:
        stored_json = values.read_json(path)
    except UserError as error:
        raise UserError(f"{error}; restore that file from a copy, or choose another directory with --out") from error
    changes = [
        change
        for change in [*values.changes(experiment, stored_json), *_group_order_differences(experiment, stored_json)]
        if not is_within(change.path, MAY_CHANGE) and not (is_returning and may_change_on_return(change))
    ]
    if changes:
        more_text = f"; and {len(changes) - 8} more" if len(changes) > 8 else ""
        raise UserError(
            f"{run_path(directory)} holds a run of another experiment: {'; '.join(map(str, changes[:8]))}{more_text}. "
            "A run that is continued may change only "
            f"{', '.join(MAY_CHANGE)}, and one that returns to a checkpoint with --from STEP also "
            f"{', '.join(MAY_CHANGE_ON_RETURN)}. Choose another directory with --out"
        )
    return stored_json


def may_change_on_return(change: values.Difference) -> bool:
    """Return whether a run that returns to a checkpoint may change a setting."""
    setting_name = change.path.rpartition(".")[2]
    if not change.path.startswith(_GROUPS) or values.ABSENT in (change.first, change.second):
        return is_within(change.path, MAY_CHANGE_ON_RETURN)
    return f"optimizer.{setting_name}" in MAY_CHANGE_ON_RETURN


def _group_order_differences(experiment: "Experiment", stored_json: Any) -> list[values.Difference]:
    """Return the difference in the order of the optimizer's groups, or an empty list if the order is the same.

    The order matters because it decides which group a parameter belongs to if several groups match.
    """
    optimizer_json = stored_json.get("optimizer") if isinstance(stored_json, dict) else None
    stored_groups = optimizer_json.get("groups") if isinstance(optimizer_json, dict) else None
    group_names, stored_group_names = list(experiment.optimizer.groups), list(stored_groups or ())
    if group_names == stored_group_names or sorted(group_names) != sorted(map(str, stored_group_names)):
        return []
    return [values.Difference("order of optimizer.groups", ", ".join(group_names), ", ".join(stored_group_names))]


def is_within(path: str, paths: Iterable[str]) -> bool:
    """Return whether a dotted path is one of `paths`, or lies below one of them.

    Example:
        >>> is_within("guard.spike", ("guard", "optimizer.warmup")), is_within("optimizer", ("optimizer.warmup",))
        (True, False)
    """
    return any(f"{path}.".startswith(f"{outer_path}.") for outer_path in paths)


def set_aside(directory: Any) -> Any:
    """Rename the directory of a run to the first of NAME.1, NAME.2, ... that does not exist.

    Returns:
        The new path. If the directory does not contain a run, it is not renamed, and the result is `None`.
    """
    path = run_path(directory)
    if not (path / EXPERIMENT).exists():
        return None
    suffix = 1
    while (new_path := path.with_name(f"{path.name}.{suffix}")).exists():
        suffix += 1
    with explain_write_errors(path):
        path.rename(new_path)
    return new_path


def write_values(directory: Any, experiment: "Experiment", plan: "Plan") -> None:
    """Write experiment.json and plan.json to a run directory."""
    from jaxscale.recipe.plan import PLAN_VERSION

    write_json(run_path(directory) / EXPERIMENT, values.to_json(experiment))
    write_json(run_path(directory) / PLAN, {"version": PLAN_VERSION, **values.to_json(plan)})


def write_json(path: Any, content: Any) -> None:
    """Write a JSON file atomically: if the process is killed, the file has either its old or its new content."""
    write_whole(path, json.dumps(content, indent=2) + "\n")
