"""Checkpoints of a run: atomic, written in the background by Orbax, verified by checksums when read.

A checkpoint is a folder `checkpoints/STEP` with a canonical tree (whole arrays by name, the same for every mesh, ZeRO
stage and memory plan) and a description: format, step, tokens, state of the data, held-out loss, and the shape, dtype
and two checksums of each array. A folder is a checkpoint once Orbax has committed it. Half-written folders of a killed
run are removed; in place of a damaged checkpoint, the one before is restored. A checkpoint is never overwritten.
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxscale.checkpoint.mirror import COMMITTED, is_mirrored, staging, upload
from jaxscale.checkpoint.verified import (
    FORMAT,
    DamagedError,
    Description,
    Restored,
    digest,
    first_line,
    read_content,
    restore_quietly,
)
from jaxscale.errors import UserError
from jaxscale.records.processes import is_first, send_from_first, wait_for_all
from jaxscale.records.storage import is_remote, run_path

_UNFINISHED = ".orbax-checkpoint-tmp"


class Checkpoints:
    """The checkpoints of one run. Every process of a run makes such an object and calls it at the same steps.

    Args:
        folder: folder of the checkpoints, local or gs://, or s3:// for a single process.
        keep: number of newest checkpoints to keep.
        best: whether to keep the checkpoint with the least held-out loss too.
        write: whether to remove half-written checkpoints; false for readers of a run that may still be running.
    """

    def __init__(self, folder: Any, *, keep: int = 3, best: bool = True, write: bool = True) -> None:
        self.folder = _path(folder)
        self._keep, self._best = keep, best
        self._running_save: tuple[Description, Any] | None = None
        self._descriptions: dict[int, Description] = {}
        if write:
            _check_reachable(self.folder)
            with self._disk_errors():
                if is_first():
                    self.folder.mkdir(parents=True, exist_ok=True)
                    self._clean()
                wait_for_all("checkpoints are clean")

    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, the oldest first."""
        if not self.folder.is_dir():
            return []
        paths = (path for path in self.folder.iterdir() if path.name.isdigit())
        return sorted(int(path.name) for path in paths if not is_remote(path) or (path / COMMITTED).exists())

    def describe(self, step: int) -> Description:
        """The description of a step's checkpoint.

        Raises:
            DamagedError: the description cannot be read.
            UserError: the checkpoint was written by a newer version.
        """
        if step not in self._descriptions:
            self._descriptions[step] = Description.of(read_content(self._folder(step)))
        return self._descriptions[step]

    def best(self) -> int | None:
        """Step of the checkpoint with the least held-out loss; `None` if none was measured."""
        loss_of_step = {}
        for step in self.steps():
            try:
                loss = self.describe(step).loss
            except DamagedError:
                continue
            if loss is not None and loss == loss:
                loss_of_step[step] = loss
        return min(loss_of_step, key=loss_of_step.__getitem__) if loss_of_step else None

    def save(self, arrays: Mapping[str, Any], description: Description, *, wait: bool = False) -> bool:
        """Save in the background, after the previous save has finished; the caller may donate the arrays afterwards.

        Args:
            arrays: the canonical tree.
            description: description of the checkpoint.
            wait: whether to return only when the checkpoint is committed.

        Returns:
            True; false if the step was saved before.

        Raises:
            UserError: this save (with `wait`) or the previous one failed; older checkpoints are intact.
        """
        from orbax.checkpoint import v1 as ocp

        from jaxscale.checkpoint.checksum import checksums

        self.wait()
        if description.step in self.steps():
            return False
        sums = checksums(arrays)
        entries = {name: [list(array.shape), str(array.dtype), *sums[name]] for name, array in arrays.items()}
        content = json.loads(json.dumps({"format": FORMAT, **dataclasses.asdict(description), "arrays": entries}))
        with self._disk_errors():
            metadata = {"jaxscale": content, "sha256": digest(content)}
            target = self._folder(description.step)
            path = staging(target) if is_mirrored(target) else target
            response: Any = ocp.save_async(str(path), dict(arrays), custom_metadata=metadata)
            self._running_save = (description, upload(response, path, target) if path is not target else response)
        if wait:
            self.wait()
        return True

    def poll(self) -> Description | None:
        """The description of a checkpoint committed since the last call, or `None`; never waits.

        Raises:
            UserError: the save failed.
        """
        if self._running_save is None:
            return None
        try:
            self._running_save[1].result(timeout=0)
        except TimeoutError:
            return None
        except Exception:
            pass  # `wait` raises it again, with an explanation
        return self.wait()

    def wait(self) -> Description | None:
        """Wait for the running save, and delete the checkpoints that need not be kept.

        Returns:
            Description of the saved checkpoint; `None` if no save was running.

        Raises:
            UserError: the save failed.
        """
        if self._running_save is None:
            return None
        (description, response), self._running_save = self._running_save, None
        with self._disk_errors():
            response.result()
            self._descriptions[description.step] = description
            if is_first():
                self._prune()
        return description

    def restore(
        self,
        abstract: Mapping[str, Any],
        *,
        step: int | None = None,
        set_aside: bool = False,
        say: Callable[[str], None] = lambda message: None,
    ) -> Restored | None:
        """Restore the newest checkpoint that is not damaged, in the requested layout and dtypes.

        Args:
            abstract: shape, dtype and sharding of each array to read, by name. The checkpoint may lack arrays that
                are in flight in a pipeline, and may hold optimizer state in another number of bits.
            step: restore the checkpoint of this step only.
            set_aside: rename damaged checkpoints to STEP.damaged, so that their steps can be saved again.
            say: function called with a message about each damaged checkpoint.

        Returns:
            The restored checkpoint; None if the run has no checkpoint.

        Raises:
            UserError: all checkpoints are damaged, or one is of a newer version or of another model.
        """
        steps = send_from_first(self.steps()) if step is None else [step]
        damage_of_step: dict[int, str] = {}
        for candidate in reversed(steps):
            restored, reason = restore_quietly(self._folder(candidate), abstract)
            if restored is None:
                damage_of_step[candidate] = reason
                say(f"checkpoint of step {candidate} is damaged and skipped: {reason}")
                continue
            if set_aside:
                self._set_aside(damage_of_step)
            return dataclasses.replace(restored, damaged=damage_of_step)
        if not damage_of_step:
            return None
        reasons = "; ".join(f"step {number}: {cause}" for number, cause in damage_of_step.items())
        raise UserError(
            f"no checkpoint in {self.folder} can be used ({reasons}): restore one from a copy, "
            "or start again in another directory (--out), or with --resume never"
        )

    def _prune(self) -> None:
        """Delete the checkpoints that need not be kept."""
        steps = self.steps()
        survivors = set(steps[-max(self._keep, 1) :])
        if self._best:
            survivors.add(self.best() or 0)
        for step in steps:
            if step not in survivors:
                self._folder(step).rmtree(missing_ok=True)
                self._descriptions.pop(step, None)

    def _clean(self) -> None:
        """Remove half-written checkpoints of a killed run."""
        for path in self.folder.iterdir() if self.folder.is_dir() else ():  # a bucket has no empty folders
            is_partial = _UNFINISHED in path.name
            if is_remote(path) and path.name.isdigit():  # in a bucket, a file marks the commit
                is_partial = not (path / COMMITTED).exists()
            if is_partial and path.is_dir():
                path.rmtree(missing_ok=True)

    def _set_aside(self, damaged: Mapping[int, str]) -> None:
        """Rename damaged checkpoints to STEP.damaged."""
        if damaged and is_first():
            for step in damaged:
                target = self.folder / f"{self._folder(step).name}.damaged"
                if target.exists():
                    target.rmtree()
                self._folder(step).rename(target)
        if damaged:
            wait_for_all("damaged checkpoints are aside")

    def _folder(self, step: int) -> Any:
        """Path of the checkpoint of a step."""
        return self.folder / f"{step:08d}"

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """Turn a disk error into a UserError that names the folder and the newest intact checkpoint."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            if "RESOURCE_EXHAUSTED" in str(error):
                raise
            try:
                steps = self.steps()
            except OSError:
                steps = []
            status = f"the checkpoint of step {steps[-1]} is intact" if steps else "there is no earlier checkpoint"
            raise UserError(
                f"cannot write checkpoints to {self.folder}: {first_line(error)}; {status}: "
                "free space, or make the folder writable, and start the run again"
            ) from error


def save_memory_warning(state_bytes: int, copy_bytes: int, device: Any) -> str | None:
    """A warning if a save needs more memory than a device has; `None` if it fits, or if the limit is unknown.

    Args:
        state_bytes: bytes per device that live between steps.
        copy_bytes: bytes per device of the copy of the state that a save makes.
        device: a device of the run.
    """
    limit = (device.memory_stats() or {}).get("bytes_limit") if device is not None else None
    if not limit or state_bytes + copy_bytes <= limit:
        return None
    return (
        "a checkpoint copies the state on the device before it goes to the host: both need "
        f"{(state_bytes + copy_bytes) / 1e9:.1f} GB, but the device has {limit / 1e9:.1f} GB, so saving will fail; "
        "shard the state over more devices (zero 3)"
    )


def _check_reachable(folder: Any) -> None:
    """Raise an error for a bucket that several processes cannot save to together."""
    import jax

    if is_mirrored(folder) and jax.process_count() > 1:
        raise UserError(
            f"{folder}: {jax.process_count()} processes cannot save checkpoints there together: "
            "give a directory in a gs:// bucket, or on a disk that all of them share (--out)"
        )


def _path(folder: Any) -> Any:
    """The absolute path object of a folder, as Orbax requires."""
    from etils import epath

    return epath.Path(run_path(folder) if is_remote(folder) else run_path(folder).absolute())
