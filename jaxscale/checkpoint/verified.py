"""Reads a checkpoint, verifies it by checksums, and converts it to the requested layout and dtypes.

A folder that was not committed, cannot be read, or does not match its checksums is damaged (`DamagedError`); a
checkpoint of a newer version or of another model is a mistake of the user (`UserError`).
"""

import contextlib
import dataclasses
import gc
import hashlib
import json
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from jaxscale.checkpoint.mirror import COMMITTED, local_copy
from jaxscale.errors import UserError
from jaxscale.records.processes import call_on_all

FORMAT = 1
"""Version of the checkpoint format. For a newer one, `read_content` raises an error."""


@dataclasses.dataclass(frozen=True)
class Description:
    """The description inside a checkpoint.

    Args:
        step: number of updates made.
        tokens: number of target tokens seen.
        data: state of the iterator over batches, as JSON.
        experiment: name of the experiment.
        loss: held-out loss at this step in nats per target; `None` if it was not measured.
        best: least held-out loss so far, this one included.
        versions: version of each library that wrote the checkpoint.
    """

    step: int
    tokens: int
    data: dict[str, Any] | None
    experiment: str
    loss: float | None = None
    best: float | None = None
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "Description":
        """The description in the content of `read_content`."""
        return cls(**{field.name: content[field.name] for field in dataclasses.fields(cls)})


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint that was read and matches its checksums.

    Args:
        description: description of the checkpoint.
        arrays: the canonical tree, arrays by name.
        damaged: reason of each newer checkpoint that was skipped, by step.
        converted: a line for each kind of array that was saved in other bits or blocks.
    """

    description: Description
    arrays: dict[str, Any]
    damaged: dict[int, str] = dataclasses.field(default_factory=dict)
    converted: tuple[str, ...] = ()


class DamagedError(Exception):
    """A checkpoint cannot be read or does not match its checksums."""


def restore_quietly(path: Any, abstract: Mapping[str, Any]) -> tuple[Restored | None, str]:
    """Read the checkpoint in a folder, while Orbax prints nothing.

    Args:
        path: folder of the checkpoint.
        abstract: shape, dtype and sharding of each requested array, by name.

    Returns:
        The checkpoint and ""; or `None` and the reason that it is damaged.

    Raises:
        UserError: the checkpoint is of a newer version or of another model.
    """
    with _quietly():
        try:
            return _restore(path, abstract), ""
        except DamagedError as error:
            reason = str(error)
        gc.collect()  # abandoned reads end here, while their messages are dropped
        logging.getLogger("asyncio").addFilter(_is_retrieved)  # reads of other threads end later
        return None, reason


def _restore(path: Any, leaves: Mapping[str, Any]) -> Restored:
    """Read the checkpoint in a folder, in stages that all processes finish together.

    Without stages, a collective would wait forever for a process that failed.
    """
    from jaxscale.checkpoint.checksum import checksums
    from jaxscale.state.conversion import conversion

    def read() -> tuple[dict[str, Any], Any]:
        """The description, and the conversion to the requested arrays."""
        content = read_content(path)
        converter = conversion(content["arrays"], leaves)
        _check_arrays(content["arrays"], converter.abstract, path)
        return content, converter

    content, converter = call_on_all(read, DamagedError)
    entries = content["arrays"]
    leaves = {name: leaf for name, leaf in converter.abstract.items() if name in entries}
    arrays = call_on_all(lambda: _load(path, entries, leaves), DamagedError)
    sums = checksums(arrays)  # equal on all processes
    mismatches = [name for name in leaves if list(sums[name]) != entries[name][2:]]
    if mismatches:
        suffix = f" and {len(mismatches) - 1} more" if len(mismatches) > 1 else ""
        raise DamagedError(f"the checksum of array {mismatches[0]!r}{suffix} does not match its content")
    return Restored(Description.of(content), converter.convert(_cast(arrays, leaves)), converted=converter.lines)


def _load(path: Any, entries: Mapping[str, Any], abstract: Mapping[str, Any]) -> dict[str, Any]:
    """Read the arrays of a checkpoint, in the dtypes of the files and with the requested shardings."""
    import jax
    from orbax.checkpoint import v1 as ocp

    targets: dict[str, Any] = dict.fromkeys(entries, ocp.PLACEHOLDER)
    for name, leaf in abstract.items():
        # read in the saved dtype, which the checksum was computed in
        dtype = leaf.dtype if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key) else entries[name][1]
        targets[name] = jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)
    try:
        with _single_process(), local_copy(path) as source:
            contents = ocp.load(source, targets)
        return jax.block_until_ready({name: contents[name] for name in abstract})
    except Exception as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise
        raise DamagedError("its arrays cannot be read: a file is cut short, missing or changed") from error


def read_content(path: Any) -> dict[str, Any]:
    """Read the description of a checkpoint, with the shape, dtype and checksums of each array.

    Raises:
        DamagedError: the description cannot be read, or does not match its checksum.
        UserError: the checkpoint was written by a newer version.
    """
    from orbax.checkpoint import v1 as ocp

    if not (path / COMMITTED).exists():
        raise DamagedError(f"{path} has no {COMMITTED}: it was not written to its end, or files are missing")
    try:
        with _quietly(), _single_process(), local_copy(path, with_arrays=False) as source:
            metadata: Any = ocp.metadata(source).custom_metadata
        content, stored_digest = metadata["jaxscale"], metadata["sha256"]
    except Exception as error:
        raise DamagedError(f"its description cannot be read: {first_line(error)}") from error
    if digest(content) != stored_digest:
        raise DamagedError("the checksum of its description does not match")
    if content["format"] > FORMAT:
        raise UserError(
            f"{path} is a checkpoint of format {content['format']}, but this version of jaxscale reads "
            f"up to {FORMAT}: install a newer jaxscale"
        )
    return content


def _check_arrays(entries: Mapping[str, Any], abstract: Mapping[str, Any], path: Any) -> None:
    """Raise an error for a checkpoint that lacks an array of the model, or has one of another shape."""
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
                f"{path}: array {name!r} has shape {tuple(entries[name][0])}, but the model needs {tuple(leaf.shape)}: "
                "it was saved by another model"
            )


def _cast(arrays: dict[str, Any], abstract: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays in the requested dtypes."""
    import jax

    from jaxscale.sharding.memory_space import to_device

    cast_names = {name for name, array in arrays.items() if array.dtype != abstract[name].dtype}
    if not cast_names:
        return arrays
    shardings = {name: abstract[name].sharding for name in cast_names}

    def cast(tree: dict[str, Any]) -> dict[str, Any]:
        return {name: to_device(array).astype(abstract[name].dtype) for name, array in tree.items()}

    return arrays | jax.jit(cast, out_shardings=shardings)({name: arrays[name] for name in cast_names})


def digest(content: Any) -> str:
    """SHA-256 of a description."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def first_line(error: BaseException) -> str:
    """Type of an error, and the first line of its message."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:300]}" if text else type(error).__name__


def _ignore(*_: Any) -> None:
    """An exception hook that prints nothing."""


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """A context without Orbax's log lines about unreadable arrays, and without tracebacks of reads that it abandons."""
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    previous_hooks = sys.unraisablehook, sys.excepthook

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
        sys.unraisablehook, sys.excepthook = previous_hooks
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
    """Log filter that drops lines about failed reads whose error nobody retrieved."""
    return "never retrieved" not in record.getMessage()
