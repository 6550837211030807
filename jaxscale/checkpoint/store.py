"""Checkpoints of a run: atomic, written in the background by Orbax, verified by checksums when read.

A checkpoint is a folder `checkpoints/STEP` with one canonical tree (names to whole arrays, whatever mesh, ZeRO and
memory plan) and a description: format, step, tokens, state of the data, held-out loss, and per array its shape, dtype
and two checksums. A folder counts once Orbax has committed it. Half-written folders of a killed run are removed; a
checkpoint that does not verify is skipped for the one before. An existing checkpoint is never overwritten.
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
from jaxscale.records.processes import from_first_process, is_first, wait_for_all
from jaxscale.records.storage import is_remote, run_path

_UNFINISHED = ".orbax-checkpoint-tmp"


class Checkpoints:
    """The checkpoints of one run. Every process of a run makes one and calls it at the same steps.

    Args:
        folder: their folder, local or gs://, or s3:// for a single process.
        keep: how many of the newest to keep.
        best: keep the one with the least held-out loss too.
        write: remove half-written checkpoints; false for readers of a run that may still be going.
    """

    def __init__(self, folder: Any, *, keep: int = 3, best: bool = True, write: bool = True) -> None:
        self.folder = _path(folder)
        self._keep, self._best = keep, best
        self._running: tuple[Description, Any] | None = None
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
            DamagedError: it cannot be read.
            UserError: it was written by a newer version.
        """
        if step not in self._descriptions:
            self._descriptions[step] = Description.of(read_content(self._folder(step)))
        return self._descriptions[step]

    def best(self) -> int | None:
        """Step of the checkpoint with the least held-out loss; `None` where none was measured."""
        losses = {}
        for step in self.steps():
            try:
                loss = self.describe(step).loss
            except DamagedError:
                continue
            if loss is not None and loss == loss:
                losses[step] = loss
        return min(losses, key=losses.__getitem__) if losses else None

    def save(self, arrays: Mapping[str, Any], description: Description, *, wait: bool = False) -> bool:
        """Save in the background, after the previous save has finished; the arrays may be donated on return.

        Args:
            arrays: the canonical tree.
            description: its description.
            wait: return only when it is committed.

        Returns:
            False where the step is saved already.

        Raises:
            UserError: this save (with `wait`) or the previous one failed; older checkpoints are intact.
        """
        from orbax.checkpoint import v1 as ocp

        from jaxscale.checkpoint.checksum import checksums

        self.wait()
        if description.step in self.steps():
            return False
        sums = checksums(arrays)
        entries = {name: [list(x.shape), str(x.dtype), *sums[name]] for name, x in arrays.items()}
        content = json.loads(json.dumps({"format": FORMAT, **dataclasses.asdict(description), "arrays": entries}))
        with self._disk_errors():
            metadata = {"jaxscale": content, "sha256": digest(content)}
            final = self._folder(description.step)
            path = staging(final) if is_mirrored(final) else final
            response: Any = ocp.save_async(str(path), dict(arrays), custom_metadata=metadata)
            self._running = (description, upload(response, path, final) if path is not final else response)
        if wait:
            self.wait()
        return True

    def poll(self) -> Description | None:
        """The checkpoint that was committed since the last call, if any; never waits.

        Raises:
            UserError: the save failed.
        """
        if self._running is None:
            return None
        try:
            self._running[1].result(timeout=0)
        except TimeoutError:
            return None
        except Exception:
            pass  # `wait` raises it again, with an explanation
        return self.wait()

    def wait(self) -> Description | None:
        """Wait for the running save, if any, and delete the checkpoints that need not be kept.

        Raises:
            UserError: the save failed.
        """
        if self._running is None:
            return None
        (description, response), self._running = self._running, None
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
        """The newest checkpoint that verifies, in the requested layout and dtypes.

        Args:
            abstract: name to shape, dtype and sharding; other arrays of the checkpoint are not read. The checkpoint may
                lack the arrays that a pipeline of this plan has in flight, and hold state in other bits.
            step: restore this one and no other.
            set_aside: rename damaged ones to STEP.damaged, so that their steps can be saved again.
            say: called with a message about each damaged checkpoint.

        Returns:
            None where there is no checkpoint at all.

        Raises:
            UserError: there are checkpoints and none verifies, or one is of a newer version or of another model.
        """
        steps = from_first_process(self.steps()) if step is None else [step]
        damaged: dict[int, str] = {}
        for candidate in reversed(steps):
            restored, reason = restore_quietly(self._folder(candidate), abstract)
            if restored is None:
                damaged[candidate] = reason
                say(f"checkpoint of step {candidate} is damaged and passed over: {reason}")
                continue
            if set_aside:
                self._set_aside(damaged)
            return dataclasses.replace(restored, damaged=damaged)
        if not damaged:
            return None
        reasons = "; ".join(f"step {number}: {cause}" for number, cause in damaged.items())
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
        for item in self.folder.iterdir() if self.folder.is_dir() else ():  # a bucket has no empty folders
            is_partial = _UNFINISHED in item.name
            if is_remote(item) and item.name.isdigit():  # in a bucket, a file marks the commit
                is_partial = not (item / COMMITTED).exists()
            if is_partial and item.is_dir():
                item.rmtree(missing_ok=True)

    def _set_aside(self, damaged: Mapping[int, str]) -> None:
        """Rename damaged checkpoints to STEP.damaged."""
        if damaged and is_first():
            for step in damaged:
                aside = self.folder / f"{self._folder(step).name}.damaged"
                if aside.exists():
                    aside.rmtree()
                self._folder(step).rename(aside)
        if damaged:
            wait_for_all("damaged checkpoints are aside")

    def _folder(self, step: int) -> Any:
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
    """A warning if a save needs more memory than a device has; `None` where it fits, or the limit is unknown.

    Args:
        state_bytes: bytes per device that live between steps.
        copy_bytes: bytes per device of the copy of the state that a save makes.
        device: a device of the run.
    """
    limit = (device.memory_stats() or {}).get("bytes_limit") if device is not None else None
    if not limit or state_bytes + copy_bytes <= limit:
        return None
    return (
        "a checkpoint copies the state on the device before it goes to the host: "
        f"{(state_bytes + copy_bytes) / 1e9:.1f} GB in all, and the device has {limit / 1e9:.1f} GB: saving will fail; "
        "shard the state over more devices (zero 3)"
    )


def _check_reachable(folder: Any) -> None:
    """Refuse a bucket that several processes cannot save to together."""
    import jax

    if is_mirrored(folder) and jax.process_count() > 1:
        raise UserError(
            f"{folder}: {jax.process_count()} processes cannot save there together: "
            "give a directory in a gs:// bucket, or on a disk that all of them share (--out)"
        )


def _path(folder: Any) -> Any:
    """The absolute path object of a folder, as Orbax requires."""
    from etils import epath

    # Orbax requires absolute paths
    return epath.Path(run_path(folder) if is_remote(folder) else run_path(folder).absolute())
