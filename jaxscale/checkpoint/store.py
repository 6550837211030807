"""Checkpoints of a run: atomic, written in the background by Orbax, and verified by checksums when they are read.

A checkpoint is a folder `checkpoints/STEP` with a canonical tree and a description. The canonical tree holds whole
arrays by name, the same for every mesh, ZeRO stage and memory plan. The description gives the format, step, tokens,
state of the data and held-out loss, and the shape, dtype and two checksums of each array. A folder is a checkpoint once
Orbax has committed it; half-written folders of a killed run are removed. If a checkpoint is damaged, the previous one
is restored. A checkpoint is never overwritten.
"""

import contextlib
import dataclasses
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxscale.checkpoint.file_kinds import remove
from jaxscale.checkpoint.host_copies import HostCopies, forget_copies
from jaxscale.checkpoint.late_messages import drop_late_messages
from jaxscale.checkpoint.mirror import COMMITTED, UNFINISHED_MARK, is_mirrored, make_staging_path, upload
from jaxscale.checkpoint.verified import (
    FORMAT,
    DamagedError,
    Description,
    Restored,
    first_line,
    has_ended,
    is_out_of_device_memory,
    is_step_name,
    read_content,
    restore_silently,
    start_save,
)
from jaxscale.errors import UserError
from jaxscale.records.processes import is_first, send_from_first, wait_for_all
from jaxscale.records.source import versions
from jaxscale.records.storage import is_remote, run_path
from jaxscale.state.train_state import TrainState

if TYPE_CHECKING:
    from jaxscale.recipe.experiment import Experiment
    from jaxscale.step.train_step import TrainStep


class RestoredState(NamedTuple):
    """A train state that was read from a checkpoint.

    Args:
        state: the train state.
        step: number of updates made.
        data: state of the data, as the training loop saved it.
    """

    state: TrainState
    step: int
    data: Any


class Checkpoints:
    """The checkpoints of one run.

    Every process of a run creates a `Checkpoints`, and calls the same methods at the same steps.

    Args:
        folder: folder of the checkpoints: a local folder, or one in gs://; a single process may also use s3://.
        keep: number of the newest checkpoints to keep. The last good one is kept, too, if it is older.
        best: whether to keep the checkpoint with the lowest held-out loss, too.
        write: whether to create the folder and remove half-written checkpoints. A reader must pass false, because the
            run may still be writing.

    Attributes:
        folder: the folder of the checkpoints, as an absolute path object.
    """

    def __init__(self, folder: Any, *, keep: int = 3, best: bool = True, write: bool = True) -> None:
        if keep < 1:
            raise UserError(f"keep: got {keep}, expected at least 1, the newest checkpoint")
        self.folder = _absolute_path(folder)
        self._keep, self._is_best_kept = keep, best
        self._running_save: tuple[Description, Any] | None = None  # a description, and the future of its save
        self._descriptions: dict[int, Description] = {}  # those read or saved so far, by step
        self._host_copies: HostCopies | None = None
        self._newest_step = 0  # of the restored checkpoint, or of the newest one that was saved since then
        self._first_rms: float | None = None  # of the parameters in the run's first checkpoint
        self._step_count = 0
        if write:
            _check_reachable(self.folder)
            with self._explain_disk_errors():
                if is_first():
                    self.folder.mkdir(parents=True, exist_ok=True)
                    self._remove_partial()
                wait_for_all("checkpoints are clean")

    def steps(self) -> list[int]:
        """Return the steps of the committed checkpoints, in increasing order."""
        if not self.folder.is_dir():
            return []
        paths = (path for path in self.folder.iterdir() if is_step_name(path.name))
        return sorted(int(path.name) for path in paths if not is_remote(path) or (path / COMMITTED).exists())

    def describe(self, step: int) -> Description:
        """Read the description of a step's checkpoint.

        Raises:
            DamagedError: the description cannot be read.
            UserError: the checkpoint was written by a newer version.
        """
        if step not in self._descriptions:
            self._descriptions[step] = Description.of(read_content(self._folder(step)))
        return self._descriptions[step]

    def best(self) -> int | None:
        """Return the step of the checkpoint with the lowest held-out loss; `None` if no checkpoint has such a loss.

        Only losses on the same held-out data as the newest loss are compared.
        """
        rows = []  # (loss, description) of each checkpoint
        for step in self.steps():
            with contextlib.suppress(DamagedError):
                rows.append((self.describe(step).loss, self.describe(step)))
        loss_rows = [(loss, facts) for loss, facts in rows if loss is not None and loss == loss]  # without NaN
        return (
            min((loss, facts.step) for loss, facts in loss_rows if facts.measure == loss_rows[-1][1].measure)[1]
            if loss_rows
            else None
        )

    def last_good(self) -> int | None:
        """Return the step of the newest checkpoint that is not recorded as bad (`Description.is_good`), or `None`."""
        for step in reversed(self.steps()):
            with contextlib.suppress(DamagedError):
                if self.describe(step).is_good:
                    return step
        return None

    # -- a train state, in a custom training loop ----------------------------------------------------------------------

    def save(
        self, step: "TrainStep", state: TrainState, *, data: Any = None, loss: float | None = None, wait: bool = False
    ) -> bool:
        """Save a train state in the background, under the number of its updates.

        Every process calls this method at the same step. The state may be donated afterwards. A save waits for the
        previous save to finish; call `wait` after the last save.

        Args:
            step: the train step.
            state: the train state.
            data: state of the data, as JSON values, which `restore` returns to the training loop.
            loss: held-out loss of the state in nats per target. If the checkpoints have `best` set, the state with the
                lowest loss is kept.
            wait: whether to return only when the checkpoint is committed.

        Returns:
            True if the save was started; false if the step already has a checkpoint, which stays unchanged.

        Raises:
            UserError: the previous save failed or, with `wait`, this save; older checkpoints are intact.
        """
        try:
            json.dumps(data)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"data: got {type(data).__name__}, expected JSON values, such as a dict of numbers: {error}"
            ) from None
        experiment_name = step.experiment.name
        description = Description(int(state.step), 0, {"loop": data}, experiment_name, loss=loss, versions=versions())
        return self.save_arrays(step.to_canonical(state), description, wait=wait)

    def restore(self, step: "TrainStep", *, number: int | None = None) -> "RestoredState | None":
        """Restore the newest undamaged train state, in the layout of a train step.

        The checkpoint may have been saved on another mesh, under another plan, by any number of processes.

        Args:
            step: the train step.
            number: number of updates of the state to restore; by default, the newest state.

        Returns:
            The state, its step, and the data that was saved with it; `None` if there is no checkpoint.

        Raises:
            UserError: all checkpoints are damaged, or a checkpoint comes from a newer version or another model.

        Example:
            >>> import jaxscale, tempfile
            >>> model, data = jaxscale.models.Decoder(vocab=8, context=8, layers=1, heads=1, embed=8), None
            >>> step = jaxscale.build(jaxscale.Experiment("tiny", model, data), jaxscale.Plan(mesh="1"))
            >>> checkpoints = Checkpoints(tempfile.mkdtemp())
            >>> checkpoints.restore(step) is None
            True
            >>> checkpoints.save(step, step.init(), data={"row": 40}, wait=True)
            True
            >>> checkpoints.restore(step).data
            {'row': 40}
        """
        steps = self.steps()
        if number is not None and number not in steps:
            raise UserError(f"number: got {number}, but {self.folder} has checkpoints of {steps or 'no'} updates")
        restored = self.restore_arrays(step.canonical_abstract(), step=number, set_aside=number is None)
        if restored is None:
            return None
        data = (restored.description.data or {}).get("loop")
        return RestoredState(step.from_canonical(restored.arrays), restored.description.step, data)

    # -- arrays --------------------------------------------------------------------------------------------------------

    def save_arrays(self, arrays: Mapping[str, Any], description: Description, *, wait: bool = False) -> bool:
        """Save a canonical tree in the background, after the previous save has finished.

        The caller may donate the arrays once this method has returned.

        Args:
            arrays: the canonical tree.
            description: description of the checkpoint.
            wait: whether to return only when the checkpoint is committed.

        Returns:
            True if the save was started; false if the step already has a checkpoint, which stays unchanged.

        Raises:
            UserError: the previous save failed or, with `wait`, this save; older checkpoints are intact.
        """
        from jaxscale.checkpoint.checksum import checksums

        self.wait()
        if description.step in self.steps():
            return False
        description, sums = self._with_verdict(description, arrays), checksums(arrays)
        array_facts = {name: [list(array.shape), str(array.dtype), *sums[name]] for name, array in arrays.items()}
        content = json.loads(json.dumps({"format": FORMAT, **dataclasses.asdict(description), "arrays": array_facts}))
        logging.getLogger("absl").addFilter(_is_not_about_save)  # adding it again changes nothing
        drop_late_messages()
        with self._explain_disk_errors():
            checkpoint_path = self._folder(description.step)
            write_path = make_staging_path(checkpoint_path) if is_mirrored(checkpoint_path) else checkpoint_path
            is_staged = write_path is not checkpoint_path
            orbax_save = start_save(write_path, arrays, content, is_read_soon=is_staged)
            save = upload(orbax_save, write_path, checkpoint_path) if is_staged else orbax_save
            self._running_save = (description, save)
        if wait:
            self.wait()
        return True

    def poll(self) -> Description | None:
        """Return the description of the checkpoint that was committed since the last call, without waiting.

        Returns:
            The description; `None` if no checkpoint was committed since the last call.

        Raises:
            UserError: the save failed.
        """
        if self._running_save is None or not has_ended(self._running_save[1]):
            return None
        return self.wait()

    def wait(self) -> Description | None:
        """Wait for the running save, and delete the checkpoints that need not be kept.

        Returns:
            The description of the saved checkpoint; `None` if no save was running.

        Raises:
            UserError: the save failed.
        """
        if self._running_save is None:
            return None
        (description, save), self._running_save = self._running_save, None
        with self._explain_disk_errors():
            save.result()
            self._descriptions[description.step] = description
            self._newest_step = max(self._newest_step, description.step)
            if is_first():
                self._prune()
        return description

    def settle(self, seconds: float) -> int:
        """Wait up to `seconds` for another thread's save; return the newest checkpoint's step, or 0 if there is none.

        The thread that saves may wait at the same time. Only that thread raises an error of the save.
        """
        running_save = self._running_save
        if running_save is not None:
            with contextlib.suppress(Exception):
                running_save[1].result(timeout=seconds)
        return max(self.steps(), default=0)

    def restore_arrays(
        self,
        leaves: Mapping[str, Any],
        *,
        step: int | None = None,
        set_aside: bool = False,
        say: Callable[[str], None] = lambda message: None,
    ) -> Restored | None:
        """Restore the newest undamaged checkpoint, in the requested layout and dtypes.

        Args:
            leaves: shape, dtype and sharding of each array to read, by name. The checkpoint may lack arrays that are in
                flight in a pipeline, and may have optimizer state in another number of bits.
            step: step of the checkpoint to restore; by default, the newest one.
            set_aside: whether to rename damaged checkpoints to STEP.damaged, so that their steps can be saved again.
            say: function that is called with a message about each damaged checkpoint.

        Returns:
            The restored checkpoint; `None` if the run has no checkpoint.

        Raises:
            UserError: all checkpoints are damaged, or a checkpoint comes from a newer version or another model.
        """
        steps = send_from_first(self.steps()) if step is None else [step]
        if step is None and self._host_copies is not None:
            newest_step = max(steps, default=0)
            newer_copy = self._host_copies.restore_arrays(leaves, newest_step, self._step_count)
            if newer_copy is not None:
                self._newest_step, self._first_rms = newest_step, newer_copy.description.first_rms
                return newer_copy
        reason_by_step: dict[int, str] = {}  # why each damaged checkpoint is damaged
        for checkpoint_step in reversed(steps):
            restored, reason = restore_silently(self._folder(checkpoint_step), leaves)
            if restored is None:
                reason_by_step[checkpoint_step] = reason
                say(f"checkpoint of step {checkpoint_step} is damaged and skipped: {reason}")
                continue
            self._newest_step, self._first_rms = checkpoint_step, restored.description.first_rms
            if set_aside:
                self._set_aside(list(reason_by_step))
            return dataclasses.replace(restored, damaged=reason_by_step)
        if not reason_by_step:
            return None
        reasons_text = "; ".join(f"step {damaged_step}: {reason}" for damaged_step, reason in reason_by_step.items())
        raise UserError(
            f"no checkpoint in {self.folder} can be used ({reasons_text}): restore a checkpoint from a copy, "
            "or start again with --resume never, or with --out and another directory"
        )

    # -- copies in the hosts' memory -----------------------------------------------------------------------------------

    def keep_host_copies(self, run_dir: Any, leaves: Mapping[str, Any], experiment: "Experiment") -> None:
        """Let `copy_to_hosts` keep copies in the hosts' memory; `restore_arrays` reads them if they are the newest.

        If the experiment takes no such copies, copies of the run's earlier starts are never read again.

        Args:
            run_dir: the run directory.
            leaves: shape, dtype and sharding of each array of the canonical tree, by name.
            experiment: the experiment that is trained.

        Raises:
            UserError: there is no file system in memory, or it is too small.
        """
        if experiment.checkpoint.memory_every:
            self._host_copies, self._step_count = HostCopies(run_dir, leaves), experiment.steps
        else:
            forget_copies(run_dir)

    def copy_to_hosts(self, arrays: Mapping[str, Any], description: Description) -> None:
        """If a canonical tree is good, copy it to the hosts' memory in the background; it may be donated afterwards."""
        if self._host_copies is not None:
            description = self._with_verdict(description, arrays)
            if description.is_good:
                self._host_copies.save_arrays(arrays, description, self._newest_step)

    def drop_host_copies(self) -> None:
        """Remove the copies in this host's memory."""
        if self._host_copies is not None:
            self._host_copies.clear()

    def _with_verdict(self, description: Description, arrays: Mapping[str, Any]) -> Description:
        """Return the description with the verdict on the state, from `soundness.with_verdict`."""
        from jaxscale.checkpoint.soundness import with_verdict

        new_description = with_verdict(dataclasses.replace(description, first_rms=self._first_rms), arrays)
        self._first_rms = new_description.first_rms
        return new_description

    def _prune(self) -> None:
        """Delete the checkpoints that need not be kept."""
        steps = self.steps()
        steps_to_keep = {*steps[-max(self._keep, 1) :], self.last_good()}
        if self._is_best_kept:
            steps_to_keep.add(self.best() or 0)
        for step in steps:
            if step not in steps_to_keep:
                remove(self._folder(step))
                self._descriptions.pop(step, None)

    def _remove_partial(self) -> None:
        """Remove half-written checkpoints of a killed run."""
        for path in self.folder.iterdir() if self.folder.is_dir() else ():  # a bucket has no empty folders
            is_partial = UNFINISHED_MARK in path.name
            if is_remote(path) and is_step_name(path.name):  # in a bucket, a committed folder has the file COMMITTED
                is_partial = not (path / COMMITTED).exists()
            if is_partial and path.is_dir():
                remove(path)

    def _set_aside(self, damaged_steps: list[int]) -> None:
        """Rename the damaged checkpoints of these steps to STEP.damaged."""
        if damaged_steps and is_first():
            for step in damaged_steps:
                new_path = self.folder / f"{self._folder(step).name}.damaged"
                remove(new_path)
                self._folder(step).rename(new_path)
        if damaged_steps:
            wait_for_all("damaged checkpoints are aside")

    def put_newer_aside(self, step: int) -> list[str]:
        """Rename the checkpoints of later steps to STEP.aside, so that they are not read; return their new names.

        If that name is in use, a number is added: STEP.aside-2. Processes other than the first return no names.
        """
        new_names: list[str] = []
        if is_first():
            with self._explain_disk_errors():
                for newer_step in reversed([saved_step for saved_step in self.steps() if saved_step > step]):
                    path, number = self._folder(newer_step), 1
                    while (new_path := self.folder / f"{path.name}.aside{f'-{number}' * (number > 1)}").exists():
                        number += 1
                    path.rename(new_path)
                    new_names.insert(0, new_path.name)
        wait_for_all("newer checkpoints are aside")
        self._descriptions = {key: description for key, description in self._descriptions.items() if key <= step}
        return new_names

    def _folder(self, step: int) -> Any:
        """Return the path of a step's checkpoint, whether or not it exists."""
        return self.folder / f"{step:08d}"

    @contextlib.contextmanager
    def _explain_disk_errors(self) -> Iterator[None]:
        """Open a context that turns a disk error into a UserError that names the newest intact checkpoint."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            if is_out_of_device_memory(error):
                raise
            try:
                steps = self.steps()
            except OSError:
                steps = []
            earlier_text = (
                f"The checkpoint of step {steps[-1]} is intact" if steps else "There is no earlier checkpoint"
            )
            raise UserError(
                f"cannot write checkpoints to {self.folder}: {first_line(error)}. {earlier_text}. "
                "Free space, or make the folder writable, and start the run again"
            ) from error


def _is_not_about_save(record: logging.LogRecord) -> bool:
    """Return whether to log a record; drop Orbax's traceback of a failed save, because `wait` raises that error."""
    return "_SignalingThread.run()" not in str(record.msg)


def save_memory_warning(state_bytes: int, copy_bytes: int, device: Any) -> str | None:
    """Return a warning if a save needs more memory than a device has; `None` if the memory suffices or is unknown.

    Args:
        state_bytes: bytes per device of everything that is kept between steps.
        copy_bytes: bytes per device of the copy of the state that a save creates.
        device: a device of the run; `None` if it is unknown.
    """
    limit_bytes = (device.memory_stats() or {}).get("bytes_limit") if device is not None else None
    if not limit_bytes or state_bytes + copy_bytes <= limit_bytes:
        return None
    return (
        "a save first copies the state on the device. The state and its copy need "
        f"{(state_bytes + copy_bytes) / 1e9:.1f} GB, but the device has {limit_bytes / 1e9:.1f} GB, so saving will "
        "fail: shard the state over more devices (--plan.zero 3)"
    )


def _check_reachable(folder: Any) -> None:
    """Raise UserError if the run has several processes that cannot all save to the folder."""
    import jax

    if is_mirrored(folder) and jax.process_count() > 1:
        raise UserError(
            f"{folder}: {jax.process_count()} processes cannot save checkpoints there together: "
            "give a directory in a gs:// bucket, or on a disk that all of them share (--out)"
        )


def _absolute_path(folder: Any) -> Any:
    """Return a folder as the absolute path object that Orbax requires."""
    from etils import epath

    return epath.Path(run_path(folder) if is_remote(folder) else run_path(folder).absolute())
