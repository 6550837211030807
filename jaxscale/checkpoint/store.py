"""Checkpoints of a run: atomic, written in the background by Orbax, verified by checksums when read.

A checkpoint is a folder `checkpoints/STEP` with one canonical tree (names to whole arrays, whatever mesh, ZeRO and
memory plan) and a description: format, step, tokens, state of the data, held-out loss, and per array its shape, dtype
and two checksums. A folder counts once Orbax has committed it. Half-written folders of a killed run are removed; a
checkpoint that does not verify is skipped for the one before. An existing checkpoint is never overwritten.
"""

import contextlib
import dataclasses
import gc
import hashlib
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxscale.checkpoint.mirror import COMMITTED, Upload, is_mirrored, local_copy, staging
from jaxscale.errors import UserError
from jaxscale.records.processes import from_first_process, is_first, on_all, wait_for_all
from jaxscale.records.storage import is_remote, run_path

FORMAT = 1
"""Version of the checkpoint format. A newer one is refused, with both versions in the message."""

_UNFINISHED = ".orbax-checkpoint-tmp"


@dataclasses.dataclass(frozen=True)
class Description:
    """The description inside a checkpoint.

    Args:
        step: updates made.
        tokens: target tokens seen.
        data: state of the iterator over batches, as JSON.
        experiment: name of the experiment.
        loss: held-out loss at this step in nats per token; `None` where it was not measured.
        best: least held-out loss so far, this one included.
        versions: versions of the libraries that wrote it.
    """

    step: int
    tokens: int
    data: dict[str, Any] | None
    experiment: str
    loss: float | None = None
    best: float | None = None
    versions: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint that verified.

    Args:
        description: its description.
        arrays: the canonical tree.
        damaged: step of each newer checkpoint that was skipped, and the reason.
        converted: a line for each kind of array that was saved in other bits or blocks.
    """

    description: Description
    arrays: dict[str, Any]
    damaged: dict[int, str]
    converted: tuple[str, ...] = ()


class DamagedError(Exception):
    """A checkpoint that cannot be read or does not verify."""


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
        self._keep, self._best, self._write = keep, best, write
        self._running: tuple[Description, Any] | None = None
        self._descriptions: dict[int, Description] = {}
        if write:
            _check_reachable(self.folder)
            with _disk_errors(self):
                if is_first():
                    self.folder.mkdir(parents=True, exist_ok=True)
                    self._clean()
                wait_for_all("checkpoints are clean")

    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, the oldest first."""
        if not self.folder.is_dir():
            return []
        paths = (path for path in self.folder.iterdir() if path.name.isdigit() and not path.name.endswith(_UNFINISHED))
        return sorted(int(path.name) for path in paths if not is_remote(path) or (path / COMMITTED).exists())

    def describe(self, step: int) -> Description:
        """The description of a step's checkpoint.

        Raises:
            DamagedError: it cannot be read.
            UserError: it was written by a newer version.
        """
        if step not in self._descriptions:
            self._descriptions[step] = _description(self._read(step))
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
        with _disk_errors(self):
            metadata = {"jaxscale": content, "sha256": _digest(content)}
            final = self._folder(description.step)
            path = staging(final) if is_mirrored(final) else final
            response: Any = ocp.save_async(str(path), dict(arrays), custom_metadata=metadata)
            self._running = (description, Upload(response, path, final) if path is not final else response)
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
        with _disk_errors(self):
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
            restored, reason = self._attempt(candidate, abstract)
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

    def _attempt(self, step: int, abstract: Mapping[str, Any]) -> tuple[Restored | None, str]:
        """The checkpoint of a step, or the reason that it is damaged."""
        with _quietly():
            try:
                return self._restore(step, abstract), ""
            except DamagedError as error:
                reason = str(error)
            gc.collect()  # abandoned reads end here, where their messages are dropped
            logging.getLogger("asyncio").addFilter(_is_retrieved)  # reads of other threads end later
            return None, reason

    def _restore(self, step: int, abstract: Mapping[str, Any]) -> Restored:
        """Restore in stages that all processes finish together: a collective would wait for a failed process."""
        from jaxscale.checkpoint.checksum import checksums

        content, conversion = on_all(lambda: self._read_conversion(step, abstract), DamagedError)
        abstract = {name: leaf for name, leaf in conversion.abstract.items() if name in content["arrays"]}
        arrays = on_all(lambda: self._load(step, content["arrays"], abstract), DamagedError)
        sums = checksums(arrays)  # equal on all processes
        mismatches = [name for name in abstract if list(sums[name]) != content["arrays"][name][2:]]
        if mismatches:
            suffix = f" and {len(mismatches) - 1} more" if len(mismatches) > 1 else ""
            raise DamagedError(f"the checksum of array {mismatches[0]!r}{suffix} does not match its content")
        return Restored(_description(content), conversion.convert(_cast(arrays, abstract)), {}, conversion.lines)

    def _read_conversion(self, step: int, abstract: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        from jaxscale.state.conversion import conversion

        content = self._read(step)
        change = conversion(content["arrays"], abstract)
        _check_arrays(content["arrays"], change.abstract, self._folder(step))
        return content, change

    def _load(self, step: int, entries: Mapping[str, Any], abstract: Mapping[str, Any]) -> dict[str, Any]:
        import jax
        from orbax.checkpoint import v1 as ocp

        targets: dict[str, Any] = dict.fromkeys(entries, ocp.PLACEHOLDER)
        for name, leaf in abstract.items():
            # read in the saved dtype, which the checksum was computed in
            dtype = leaf.dtype if _is_key(leaf.dtype) else entries[name][1]
            targets[name] = jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)
        try:
            with _single_process(), local_copy(self._folder(step)) as path:
                contents = ocp.load(path, targets)
            return jax.block_until_ready({name: contents[name] for name in abstract})
        except Exception as error:
            if "RESOURCE_EXHAUSTED" in str(error):
                raise
            raise DamagedError("its arrays cannot be read: a file is cut short, missing or changed") from error

    def _read(self, step: int) -> dict[str, Any]:
        from orbax.checkpoint import v1 as ocp

        path = self._folder(step)
        if not (path / COMMITTED).exists():
            raise DamagedError(f"{path} has no {COMMITTED}: it was not written to its end, or is incomplete")
        try:
            with _quietly(), _single_process(), local_copy(path, arrays=False) as source:
                metadata: Any = ocp.metadata(source).custom_metadata
            content, digest = metadata["jaxscale"], metadata["sha256"]
        except Exception as error:
            raise DamagedError(f"its description cannot be read: {_first_line(error)}") from error
        if _digest(content) != digest:
            raise DamagedError("the checksum of its description does not match")
        if content["format"] > FORMAT:
            raise UserError(
                f"{path} is a checkpoint of format {content['format']}, and this version of jaxscale reads "
                f"up to {FORMAT}: install a newer jaxscale"
            )
        return content

    def _prune(self) -> None:
        steps = self.steps()
        survivors = set(steps[-max(self._keep, 1) :])
        if self._best:
            survivors.add(self.best() or 0)
        for step in steps:
            if step not in survivors:
                self._folder(step).rmtree(missing_ok=True)
                self._descriptions.pop(step, None)

    def _clean(self) -> None:
        for item in self.folder.iterdir() if self.folder.is_dir() else ():  # a bucket has no empty folders
            is_partial = _UNFINISHED in item.name
            if is_remote(item) and item.name.isdigit():  # in a bucket, a file marks the commit
                is_partial = not (item / COMMITTED).exists()
            if is_partial and item.is_dir():
                item.rmtree(missing_ok=True)

    def _set_aside(self, damaged: Mapping[int, str]) -> None:
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


class _disk_errors:  # noqa: N801
    """Turns a disk error into a UserError that names the folder and the newest intact checkpoint."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, UserError) or not isinstance(error, Exception):
            return
        if "RESOURCE_EXHAUSTED" in str(error):
            return
        folder = self._checkpoints.folder
        try:
            steps = self._checkpoints.steps()
        except OSError:
            steps = []
        status = f"the checkpoint of step {steps[-1]} is intact" if steps else "there is no earlier checkpoint"
        raise UserError(
            f"cannot write checkpoints to {folder}: {_first_line(error)}; {status}: "
            "free space, or make the folder writable, and start the run again"
        ) from error


def _ignore(*_: Any) -> None:
    """An exception hook that prints nothing."""


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Drops Orbax's log lines about unreadable arrays, and the tracebacks of the reads that it abandons."""
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    hooks = sys.unraisablehook, sys.excepthook

    def drop(record: Any) -> bool:  # a new function each time: filters may be nested
        return False

    for logger in loggers:
        logger.addFilter(drop)
    sys.unraisablehook = sys.excepthook = _ignore
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # about coroutines that were never awaited
            yield
    finally:
        sys.unraisablehook, sys.excepthook = hooks
        for logger in loggers:
            logger.removeFilter(drop)


def _single_process() -> Any:
    """Orbax's context for a read by this process alone: its barrier within a load would wait for a failed process."""
    import jax
    from orbax.checkpoint import v1 as ocp

    context, process = ocp.Context(), jax.process_index()
    context.multiprocessing.primary_host = process
    context.multiprocessing.active_processes = {process}
    context.multiprocessing.barrier_sync_key_prefix = f"process_{process}"
    return context


def _is_retrieved(record: Any) -> bool:
    return "never retrieved" not in record.getMessage()


def _check_reachable(folder: Any) -> None:
    import jax

    if is_mirrored(folder) and jax.process_count() > 1:
        raise UserError(
            f"{folder}: {jax.process_count()} processes cannot save there together: "
            "give a directory in a gs:// bucket, or on a disk that all of them share (--out)"
        )


def _path(folder: Any) -> Any:
    from etils import epath

    # Orbax requires absolute paths
    return epath.Path(run_path(folder) if is_remote(folder) else run_path(folder).absolute())


def _check_arrays(entries: Mapping[str, Any], abstract: Mapping[str, Any], path: Any) -> None:
    from jaxscale.state.canonical import OPTIONAL

    for name, leaf in abstract.items():
        if name not in entries and name.startswith(OPTIONAL):
            continue
        if name not in entries:
            raise UserError(
                f"{path} has no array {name!r}, which the model needs: it was saved by another model or optimizer"
            )
        if tuple(entries[name][0]) != tuple(leaf.shape):
            raise UserError(
                f"{path}: array {name!r} is {tuple(entries[name][0])}, and the model needs {tuple(leaf.shape)}: "
                "it was saved by another model"
            )


def _cast(arrays: dict[str, Any], abstract: Mapping[str, Any]) -> dict[str, Any]:
    import jax

    from jaxscale.sharding.memory_space import to_device

    names = {name for name, array in arrays.items() if array.dtype != abstract[name].dtype}
    if not names:
        return arrays
    shardings = {name: abstract[name].sharding for name in names}

    def cast(tree: dict[str, Any]) -> dict[str, Any]:
        return {name: to_device(array).astype(abstract[name].dtype) for name, array in tree.items()}

    return arrays | jax.jit(cast, out_shardings=shardings)({name: arrays[name] for name in names})


def _description(content: Mapping[str, Any]) -> Description:
    return Description(**{field.name: content[field.name] for field in dataclasses.fields(Description)})


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _is_key(dtype: Any) -> bool:
    import jax

    return jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:300]}" if text else type(error).__name__
