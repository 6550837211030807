"""Checkpoints of a run: atomic, written in the background by Orbax, verified by checksums when read.

A checkpoint is a folder `checkpoints/STEP` with one canonical tree (names to whole arrays, no trace of mesh, ZeRO or
memory plan) and a description of it: format, step, tokens, state of the data, held-out loss, and per array its shape,
dtype and two checksums. A folder counts once Orbax has committed it; what a killed run left half-written is cleaned up,
and what does not verify is passed over for the one before. Nothing is ever saved over a checkpoint that exists.
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

from jaxscale.errors import UserError
from jaxscale.training.mirror import COMMITTED, Upload, is_mirrored, local_copy, staging
from jaxscale.training.processes import is_first, of_first, on_all, wait_for_all
from jaxscale.training.storage import is_remote, run_path

FORMAT = 1
"""Version of the form of checkpoints. A newer one is refused by name."""

_UNFINISHED = ".orbax-checkpoint-tmp"


@dataclasses.dataclass(frozen=True)
class Description:
    """What a checkpoint says of itself.

    Args:
        step: updates made.
        tokens: target tokens seen.
        data: state of the iterator over batches, as JSON.
        experiment: its name.
        loss: held-out loss at this step in nats per token; `None` where it was not measured.
        best: least held-out loss so far, this one included.
        versions: of the libraries that wrote it.
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
        description: what it says of itself.
        arrays: the canonical tree.
        damaged: newer checkpoints that were passed over, and why.
        converted: what was kept in other bits or blocks, a line each.
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
        folder: where they are, local or gs:// or, of one process alone, s3://.
        keep: how many of the newest to keep.
        best: keep the one with the least held-out loss too.
        write: clean up what a killed run left; readers of a run that may still be going leave it alone.
    """

    def __init__(self, folder: Any, *, keep: int = 3, best: bool = True, write: bool = True) -> None:
        self.folder = _path(folder)
        self._keep, self._best, self._write = keep, best, write
        self._running: tuple[Description, Any] | None = None
        self._known: dict[int, Description] = {}
        if write:
            _reachable(self.folder)
            with _explained(self):
                if is_first():
                    self.folder.mkdir(parents=True, exist_ok=True)
                    self._clean()
                wait_for_all("checkpoints are clean")

    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, the oldest first."""
        if not self.folder.is_dir():
            return []
        found = (item for item in self.folder.iterdir() if item.name.isdigit() and not item.name.endswith(_UNFINISHED))
        return sorted(int(item.name) for item in found if not is_remote(item) or (item / COMMITTED).exists())

    def describe(self, step: int) -> Description:
        """What the checkpoint of a step says of itself.

        Raises:
            DamagedError: it cannot be read.
            UserError: it was written by a newer version.
        """
        if step not in self._known:
            self._known[step] = _description(self._read(step))
        return self._known[step]

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
        """Save in the background, after the save before has finished; the arrays may be donated on return.

        Args:
            arrays: the canonical tree.
            description: what to say of it.
            wait: come back only when it is committed.

        Returns:
            False where the step was saved before.

        Raises:
            UserError: this save (with `wait`) or the one before failed; older checkpoints are intact.
        """
        from orbax.checkpoint import v1 as ocp

        from jaxscale.training.checksum import checksums

        self.wait()
        if description.step in self.steps():
            return False
        sums = checksums(arrays)
        entries = {name: [list(x.shape), str(x.dtype), *sums[name]] for name, x in arrays.items()}
        content = json.loads(json.dumps({"format": FORMAT, **dataclasses.asdict(description), "arrays": entries}))
        with _explained(self):
            metadata = {"jaxscale": content, "sha256": _digest(content)}
            there = self._at(description.step)
            at = staging(there) if is_mirrored(there) else there
            running: Any = ocp.save_async(str(at), dict(arrays), custom_metadata=metadata)
            self._running = (description, Upload(running, at, there) if at is not there else running)
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
            pass  # `wait` meets it again, and explains it
        return self.wait()

    def wait(self) -> Description | None:
        """Wait for the save that is running, if any, and drop what need not be kept.

        Raises:
            UserError: the save failed.
        """
        if self._running is None:
            return None
        (description, response), self._running = self._running, None
        with _explained(self):
            response.result()
            self._known[description.step] = description
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
        """The newest checkpoint that verifies, in the layout and dtypes asked for.

        Args:
            abstract: name to shape, dtype and sharding; names of the checkpoint that are missing here are not read. A
                checkpoint may lack what a pipeline of this plan would have in flight, and have state in other bits.
            step: take this one and no other.
            set_aside: rename damaged ones to STEP.damaged, so that their steps can be saved again.
            say: told about each damaged checkpoint.

        Returns:
            None where there is no checkpoint at all.

        Raises:
            UserError: there are checkpoints and none verifies, or one is of a newer version or of another model.
        """
        steps = of_first(self.steps()) if step is None else [step]
        damaged: dict[int, str] = {}
        for candidate in reversed(steps):
            result, problem = self._attempt(candidate, abstract)
            if result is None:
                damaged[candidate] = problem
                say(f"checkpoint of step {candidate} is damaged and passed over: {problem}")
                continue
            if set_aside:
                self._set_aside(damaged)
            return dataclasses.replace(result, damaged=damaged)
        if not damaged:
            return None
        reasons = "; ".join(f"step {at}: {why}" for at, why in damaged.items())
        raise UserError(
            f"no checkpoint in {self.folder} can be used ({reasons}): restore one from a copy, "
            "or start again in another directory (--out), or with --resume never"
        )

    def _attempt(self, step: int, abstract: Mapping[str, Any]) -> tuple[Restored | None, str]:
        """The checkpoint of a step, or why it is damaged."""
        with _quietly():
            try:
                return self._restore(step, abstract), ""
            except DamagedError as caught:
                problem = str(caught)
            gc.collect()  # reads that were abandoned end here, and not when they would be heard
            logging.getLogger("asyncio").addFilter(_retrieved)  # those of other threads end later
            return None, problem

    def _restore(self, step: int, abstract: Mapping[str, Any]) -> Restored:
        """In stages, each of which every process has passed before any begins the next: those to come are collective,
        and a process that failed would be waited for without end.
        """
        from jaxscale.training.checksum import checksums

        content, change = on_all(lambda: self._matching(step, abstract), DamagedError)
        abstract = {name: leaf for name, leaf in change.abstract.items() if name in content["arrays"]}
        arrays = on_all(lambda: self._load(step, content["arrays"], abstract), DamagedError)
        sums = checksums(arrays)  # equal on all processes
        wrong = [name for name in abstract if list(sums[name]) != content["arrays"][name][2:]]
        if wrong:
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise DamagedError(f"the checksum of array {wrong[0]!r}{more} does not match its content")
        return Restored(_description(content), change.convert(_cast(arrays, abstract)), {}, change.lines)

    def _matching(self, step: int, abstract: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        from jaxscale.step.conversion import conversion

        content = self._read(step)
        change = conversion(content["arrays"], abstract)
        _same_arrays(content["arrays"], change.abstract, self._at(step))
        return content, change

    def _load(self, step: int, entries: Mapping[str, Any], abstract: Mapping[str, Any]) -> dict[str, Any]:
        import jax
        from orbax.checkpoint import v1 as ocp

        wanted: dict[str, Any] = dict.fromkeys(entries, ocp.PLACEHOLDER)
        for name, leaf in abstract.items():
            # read in the dtype it was saved in: the checksum is of that
            dtype = leaf.dtype if _is_key(leaf.dtype) else entries[name][1]
            wanted[name] = jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)
        try:
            with _alone(), local_copy(self._at(step)) as path:
                loaded = ocp.load(path, wanted)
            return jax.block_until_ready({name: loaded[name] for name in abstract})
        except Exception as problem:
            if "RESOURCE_EXHAUSTED" in str(problem):
                raise
            raise DamagedError("its arrays cannot be read: a file is cut short, missing or changed") from problem

    def _read(self, step: int) -> dict[str, Any]:
        from orbax.checkpoint import v1 as ocp

        path = self._at(step)
        if not (path / COMMITTED).exists():
            raise DamagedError(f"{path} has no {COMMITTED}: it was not written to its end, or is incomplete")
        try:
            with _quietly(), _alone(), local_copy(path, arrays=False) as here:
                metadata: Any = ocp.metadata(here).custom_metadata
            content, digest = metadata["jaxscale"], metadata["sha256"]
        except Exception as problem:
            raise DamagedError(f"its description cannot be read: {_first_line(problem)}") from problem
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
        kept = set(steps[-max(self._keep, 1) :])
        if self._best:
            kept.add(self.best() or 0)
        for step in steps:
            if step not in kept:
                self._at(step).rmtree(missing_ok=True)
                self._known.pop(step, None)

    def _clean(self) -> None:
        for item in self.folder.iterdir() if self.folder.is_dir() else ():  # no folder without an object, in a bucket
            dead = _UNFINISHED in item.name
            if is_remote(item) and item.name.isdigit():  # written in place there, and committed by a file
                dead = not (item / COMMITTED).exists()
            if dead and item.is_dir():
                item.rmtree(missing_ok=True)

    def _set_aside(self, damaged: Mapping[int, str]) -> None:
        if damaged and is_first():
            for step in damaged:
                aside = self.folder / f"{self._at(step).name}.damaged"
                if aside.exists():
                    aside.rmtree()
                self._at(step).rename(aside)
        if damaged:
            wait_for_all("damaged checkpoints are aside")

    def _at(self, step: int) -> Any:
        return self.folder / f"{step:08d}"


def lacking_room(lasting: int, copy: int, device: Any) -> str | None:
    """What to say where a save needs more memory than a device has; `None` where it fits, or nobody can tell.

    Args:
        lasting: bytes per device that live between steps.
        copy: bytes per device of the copy of the state that a save makes.
        device: one of those of the run.
    """
    room = (device.memory_stats() or {}).get("bytes_limit") if device is not None else None
    if not room or lasting + copy <= room:
        return None
    return (
        f"a checkpoint copies the state on the device before it goes to the host: {(lasting + copy) / 1e9:.1f} GB in "
        f"all, and the device has {room / 1e9:.1f} GB: saving will fail; shard the state over more of them (zero 3)"
    )


class _explained:  # noqa: N801
    """Turns what goes wrong with the disk into an error that names the folder and what is left."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, problem: BaseException | None, trace: Any) -> None:
        if problem is None or isinstance(problem, UserError) or not isinstance(problem, Exception):
            return
        if "RESOURCE_EXHAUSTED" in str(problem):
            return
        folder = self._checkpoints.folder
        try:
            steps = self._checkpoints.steps()
        except OSError:
            steps = []
        left = f"the checkpoint of step {steps[-1]} is intact" if steps else "there is no earlier checkpoint"
        raise UserError(
            f"cannot write checkpoints to {folder}: {_first_line(problem)}; {left}: "
            "free space, or make the folder writable, and start the run again"
        ) from problem


def _nothing(*told: Any) -> None:
    """Say nothing of what was told."""


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Orbax logs every array that it cannot read, and abandons the reads of the others, whose tracebacks Python prints:
    one message of ours is enough.
    """
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    hooks = sys.unraisablehook, sys.excepthook

    def drop(record: Any) -> bool:  # one of its own each time, for the filters of two may be nested
        return False

    for logger in loggers:
        logger.addFilter(drop)
    sys.unraisablehook = sys.excepthook = _nothing
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # coroutines that were never awaited
            yield
    finally:
        sys.unraisablehook, sys.excepthook = hooks
        for logger in loggers:
            logger.removeFilter(drop)


def _alone() -> Any:
    """What is read within is read by this process without a word to the others: `on_all` speaks for them.

    Orbax has the processes meet in the middle of a load, and those that come there wait for one that failed.
    """
    import jax
    from orbax.checkpoint import v1 as ocp

    context, me = ocp.Context(), jax.process_index()
    context.multiprocessing.primary_host = me
    context.multiprocessing.active_processes = {me}
    context.multiprocessing.barrier_sync_key_prefix = f"process_{me}"
    return context


def _retrieved(record: Any) -> bool:
    return "never retrieved" not in record.getMessage()


def _reachable(folder: Any) -> None:
    import jax

    if is_mirrored(folder) and jax.process_count() > 1:
        raise UserError(
            f"{folder}: {jax.process_count()} processes cannot save there together: "
            "give a directory in a gs:// bucket, or on a disk that all of them share (--out)"
        )


def _path(folder: Any) -> Any:
    from etils import epath

    # orbax wants whole paths
    return epath.Path(run_path(folder) if is_remote(folder) else run_path(folder).absolute())


def _same_arrays(entries: Mapping[str, Any], abstract: Mapping[str, Any], path: Any) -> None:
    from jaxscale.step.canonical import OPTIONAL

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

    other = {name for name, x in arrays.items() if x.dtype != abstract[name].dtype}
    if not other:
        return arrays
    shardings = {name: abstract[name].sharding for name in other}

    def cast(tree: dict[str, Any]) -> dict[str, Any]:
        return {name: to_device(x).astype(abstract[name].dtype) for name, x in tree.items()}

    return arrays | jax.jit(cast, out_shardings=shardings)({name: arrays[name] for name in other})


def _description(content: Mapping[str, Any]) -> Description:
    return Description(**{field.name: content[field.name] for field in dataclasses.fields(Description)})


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _is_key(dtype: Any) -> bool:
    import jax

    return jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


def _first_line(problem: BaseException) -> str:
    text = str(problem).strip()
    return f"{type(problem).__name__}: {text.splitlines()[0][:300]}" if text else type(problem).__name__
