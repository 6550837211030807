"""Reads a checkpoint, verifies it by checksums, and converts it to the requested layout and dtypes.

A checkpoint is damaged (`DamagedError`) if it was not committed, cannot be read, or does not match its checksums. A
checkpoint of a newer version or of another model is a user's mistake (`UserError`).
"""

import contextlib
import dataclasses
import functools
import gc
import hashlib
import json
import logging
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxscale.checkpoint.file_kinds import check_kinds
from jaxscale.checkpoint.late_messages import drop_late_messages
from jaxscale.checkpoint.mirror import COMMITTED, local_copy
from jaxscale.checkpoint.page_cache import drop_written_pages
from jaxscale.errors import UserError
from jaxscale.records.processes import call_on_all
from jaxscale.values.limits import MAX_INT64
from jaxscale.values.read_files import whole_number

_DTYPE_NAME = re.compile(r"[a-z]{3,16}[a-z0-9_]{0,16}")
MAX_DIMS = 64
"""Largest number of dims of an array, as in NumPy."""
FORMAT = 1
"""Version of the checkpoint format. `read_content` raises an error for a checkpoint of a newer format."""


@dataclasses.dataclass(frozen=True)
class Description:
    """The description that is stored in a checkpoint.

    Args:
        step: number of updates made.
        tokens: number of target tokens seen.
        data: state of the iterator over batches, as JSON.
        experiment: name of the experiment.
        loss: held-out loss at this step in nats per target; `None` if it was not measured.
        best: lowest held-out loss so far, including `loss`; `None` if none was measured.
        versions: version of each library that wrote the checkpoint, by the library's name.
        is_sound: whether parameters and optimizer state are finite and sane; `None` in checkpoints of earlier versions.
        skipped_in_row: number of consecutive steps that had just been skipped when the state was saved.
        first_rms: root mean square of the parameters in the run's first checkpoint; later checkpoints are compared
            with it.
        measure: the data on which `loss` was measured: "" for the held-out part of the run's data; otherwise the name
            and hash of a held-out set.
    """

    step: int
    tokens: int
    data: dict[str, Any] | None
    experiment: str
    loss: float | None = None
    best: float | None = None
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    is_sound: bool | None = None
    skipped_in_row: int = 0
    first_rms: float | None = None
    measure: str = ""

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "Description":
        """Return the description that a dict from `read_content` holds; newer fields may be missing from the dict."""
        later_field_names = ("is_sound", "skipped_in_row", "first_rms", "measure")
        field_names = [field.name for field in dataclasses.fields(cls)]
        return cls(
            **{
                field_name: content[field_name]
                for field_name in field_names
                if field_name in content or field_name not in later_field_names
            }
        )

    @property
    def is_good(self) -> bool:
        """Whether the state is not recorded as unsound, and no step was being skipped when it was saved."""
        return self.is_sound is not False and self.skipped_in_row == 0


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint that was read and matches its checksums.

    Args:
        description: description of the checkpoint.
        arrays: the canonical tree, as arrays by name.
        damaged: by step, the reason why a newer checkpoint was skipped as damaged.
        converted: a line of text for each kind of array that was saved in another number of bits or in other blocks.
        origin: text for the user on where the state was read; "" for the run directory.
    """

    description: Description
    arrays: dict[str, Any]
    damaged: dict[int, str] = dataclasses.field(default_factory=dict)
    converted: tuple[str, ...] = ()
    origin: str = ""


class DamagedError(Exception):
    """A checkpoint cannot be read or does not match its checksums."""


def restore_silently(path: Any, abstract_leaves: Mapping[str, Any]) -> tuple[Restored | None, str]:
    """Read the checkpoint in a folder, without messages from Orbax.

    Args:
        path: folder of the checkpoint.
        abstract_leaves: shape, dtype and sharding of each requested array, by name.

    Returns:
        The checkpoint and an empty string; or, if the checkpoint is damaged, `None` and the reason.

    Raises:
        UserError: the checkpoint is of a newer version or of another model.
    """
    with _silence_orbax():
        try:
            return _restore(path, abstract_leaves), ""
        except DamagedError as error:
            reason = str(error)
        gc.collect()  # end abandoned reads now, while their messages are dropped
    drop_late_messages()  # reads in other threads end later
    return None, reason


def _restore(path: Any, abstract_leaves: Mapping[str, Any]) -> Restored:
    """Read the checkpoint in a folder, in stages that all processes finish together.

    If a process fails in a stage, all processes raise an error; otherwise, collectives would wait for it forever.
    """
    from jaxscale.checkpoint.checksum import checksums
    from jaxscale.state.conversion import conversion

    def read_description() -> tuple[dict[str, Any], Any]:
        """Return the description as a dict, and the converter from the saved arrays to the requested ones."""
        content = read_content(path)
        converter = conversion(content["arrays"], abstract_leaves)
        _check_arrays(content["arrays"], converter.abstract, path)
        return content, converter

    content, converter = call_on_all(read_description, DamagedError)
    array_facts = content["arrays"]
    abstract_saved = {name: leaf for name, leaf in converter.abstract.items() if name in array_facts}
    arrays = call_on_all(lambda: _load(path, array_facts, abstract_saved), DamagedError)
    sums = checksums(arrays)  # equal on all processes
    mismatched_names = [name for name in abstract_saved if list(sums[name]) != array_facts[name][2:]]
    if mismatched_names:
        counts_text = f"{len(mismatched_names)} of {len(sums)} arrays do not"
        raise DamagedError(f"array {mismatched_names[0]!r} does not match its checksum ({counts_text})")
    return Restored(
        Description.of(content), converter.convert(_cast(arrays, abstract_saved)), converted=converter.lines
    )


def _load(path: Any, array_facts: Mapping[str, Any], abstract_leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Read the requested arrays of a checkpoint, in their saved dtypes and with the requested shardings.

    Args:
        path: folder of the checkpoint.
        array_facts: shape, dtype and two checksums of each saved array, by name.
        abstract_leaves: shape, dtype and sharding of each requested array, by name.
    """
    import jax
    from orbax.checkpoint import v1 as ocp

    abstract_arrays: dict[str, Any] = dict.fromkeys(array_facts, ocp.PLACEHOLDER)  # a placeholder is not read
    for name, leaf in abstract_leaves.items():
        # read in the saved dtype, because the checksum was computed in that dtype
        dtype = leaf.dtype if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key) else array_facts[name][1]
        abstract_arrays[name] = jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)
    try:
        with _single_process_context(), local_copy(path) as readable_path:
            loaded_arrays = ocp.load(readable_path, abstract_arrays)
        return jax.block_until_ready({name: loaded_arrays[name] for name in abstract_leaves})
    except Exception as error:
        if is_out_of_device_memory(error):
            raise
        raise DamagedError("the arrays cannot be read: a file is missing, incomplete or changed") from error


def read_content(path: Any) -> dict[str, Any]:
    """Read the description of a checkpoint as a dict.

    In addition to the fields of `Description`, the dict has "format", and "arrays" with the shape, dtype and two
    checksums of each array.

    Raises:
        DamagedError: the description cannot be read, or does not match its checksum.
        UserError: the checkpoint was written by a newer version.
    """
    from orbax.checkpoint import v1 as ocp

    try:
        if not (path / COMMITTED).exists():
            raise DamagedError(f"{path} has no {COMMITTED}: the checkpoint is incomplete")
        check_kinds(path)
    except (OSError, UserError) as error:
        raise DamagedError(f"it cannot be read: {error}") from error
    try:
        with _silence_orbax(), _single_process_context(), local_copy(path, with_arrays=False) as readable_path:
            metadata: Any = ocp.metadata(readable_path).custom_metadata
        content, stored_digest = metadata["jaxscale"], metadata["sha256"]
    except Exception as error:
        raise DamagedError(f"the description cannot be read: {first_line(error)}") from error
    if digest(content) != stored_digest:
        raise DamagedError("the description does not match its checksum")
    if not isinstance(content, dict) or type(content.get("format")) is not int:
        raise DamagedError("the description has no format number")
    if content["format"] > FORMAT:
        raise UserError(
            f"{path} is a checkpoint of format {content['format']}, but this version of jaxscale reads only formats "
            f"up to {FORMAT}: install a newer jaxscale"
        )
    array_facts = content.get("arrays")
    invalid_names = invalid_fields(content)
    if not isinstance(array_facts, dict) or not all(map(_are_array_facts, array_facts.values())):
        invalid_names.append("arrays")
    if invalid_names:
        raise DamagedError(f"the description has no valid {', '.join(invalid_names)}")
    if is_step_name(path.name) and int(path.name) != content["step"]:
        raise DamagedError(f"the folder's name is {path.name}, but its content is of step {content['step']}")
    return content


def invalid_fields(content: Mapping[str, Any]) -> list[str]:
    """Return the names of a description's fields, or groups of fields, that are missing or have a wrong type."""
    count_values = [content.get("step"), content.get("tokens"), content.get("skipped_in_row", 0)]
    loss_values = [content.get("loss", ""), content.get("best", ""), content.get("first_rms")]
    versions = content.get("versions")
    validity_by_name = {
        "step, tokens or skipped_in_row": all(
            type(count_value) is int and 0 <= count_value <= MAX_INT64 for count_value in count_values
        ),
        "loss, best or first_rms": all(
            loss_value is None or type(loss_value) in (int, float) for loss_value in loss_values
        ),
        "data": isinstance(content.get("data", ""), dict | None),
        "experiment": isinstance(content.get("experiment"), str),
        "measure": isinstance(content.get("measure", ""), str),
        "versions": isinstance(versions, dict) and all(isinstance(version, str) for version in versions.values()),
        "is_sound": content.get("is_sound") in (None, True, False),
    }
    return [name for name, is_valid in validity_by_name.items() if not is_valid]


def _are_array_facts(facts: Any) -> bool:
    """Return whether a JSON value is the list [shape, name of the dtype, two checksums] of an array."""
    if not (isinstance(facts, list) and len(facts) == 4 and isinstance(facts[0], list) and len(facts[0]) <= MAX_DIMS):
        return False
    numbers = [*facts[0], *facts[2:]]
    is_key = isinstance(facts[1], str) and facts[1].startswith("key<")  # a random key's dtype
    return (is_key or dtype_of(facts[1]) is not None) and all(
        type(number) is int and 0 <= number <= MAX_INT64 for number in numbers
    )


def dtype_of(name: Any) -> np.dtype | None:
    """Return the dtype with a name from a file; `None` if no numeric dtype has this name.

    Example:
        >>> dtype_of("bfloat16"), dtype_of("object"), dtype_of("1,")
        (dtype(bfloat16), None, None)
    """
    if not isinstance(name, str) or not _DTYPE_NAME.fullmatch(name):  # numpy evaluates other texts
        return None
    try:
        dtype = np.dtype(getattr(ml_dtypes, name, name))
    except (TypeError, ValueError):
        return None
    return dtype if dtype.name == name and dtype.itemsize and dtype.kind not in "OSUMm" else None


def is_step_name(name: str) -> bool:
    """Return whether the name of a folder is that of a checkpoint: 8 digits, or more for a larger number.

    Example:
        >>> [is_step_name(name) for name in ("00000500", "500", "00000500.damaged", "\\N{SUPERSCRIPT TWO}")]
        [True, False, False, False]
    """
    step = whole_number(name)
    return step is not None and name == f"{step:08d}"


def _check_arrays(array_facts: Mapping[str, Any], abstract_leaves: Mapping[str, Any], path: Any) -> None:
    """Raise UserError if a checkpoint lacks an array that the model needs, or has one of another shape.

    If a whole state is read, parameters in the checkpoint that the model lacks are an error, too.
    """
    from jaxscale.state.canonical import OPTIONAL

    for name, leaf in abstract_leaves.items():
        if name not in array_facts and name.startswith(OPTIONAL):
            continue
        if name not in array_facts:
            raise UserError(
                f"{path} has no array {name!r}, which the model needs: use the model and optimizer that saved the "
                "checkpoint"
            )
        saved_shape, model_shape = tuple(array_facts[name][0]), tuple(leaf.shape)
        if saved_shape != model_shape:
            raise UserError(
                f"{path}: array {name!r} has shape {saved_shape}, but the model needs {model_shape}: use the model "
                "that saved the checkpoint"
            )
    is_whole_state = "step" in abstract_leaves
    unread_names = [name for name in array_facts if name.startswith("params/") and name not in abstract_leaves]
    if is_whole_state and unread_names:
        raise UserError(
            f"{path} has parameters that the model lacks, such as {unread_names[0]!r} ({len(unread_names)} in all): "
            "use the model that saved the checkpoint, or start a run from its weights (jaxscale train --init-from)"
        )


def _cast(arrays: dict[str, Any], abstract_leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays, by name, converted to the dtypes of `abstract_leaves`."""
    import jax

    from jaxscale.sharding.memory_space import to_device

    names_to_cast = {name for name, array in arrays.items() if array.dtype != abstract_leaves[name].dtype}
    if not names_to_cast:
        return arrays
    shardings = {name: abstract_leaves[name].sharding for name in names_to_cast}

    def cast(saved_arrays: dict[str, Any]) -> dict[str, Any]:
        return {name: to_device(array).astype(abstract_leaves[name].dtype) for name, array in saved_arrays.items()}

    return arrays | jax.jit(cast, out_shardings=shardings)({name: arrays[name] for name in names_to_cast})


def digest(content: Any) -> str:
    """Return the SHA-256 of a description in JSON, as hexadecimal text."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def is_out_of_device_memory(error: BaseException) -> bool:
    """Return whether an error reports a full device memory, rather than a full disk, which has the same status.

    Example:
        >>> is_out_of_device_memory(ValueError("RESOURCE_EXHAUSTED: Failed to write [os_error_code='28']"))
        False
    """
    text = str(error)
    return "RESOURCE_EXHAUSTED" in text and "os_error_code" not in text


def first_line(error: BaseException) -> str:
    """Return the name of an error's type and the first line of its message, as text."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:300]}" if text else type(error).__name__


def _ignore_exception(*_: Any) -> None:
    """Do nothing, as an exception hook."""


@contextlib.contextmanager
def _silence_orbax() -> Iterator[None]:
    """Open a context in which Orbax does not log unreadable arrays or print tracebacks of reads that it abandons."""
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    unraisable_hook, exception_hook = sys.unraisablehook, sys.excepthook

    def drop(record: Any) -> bool:  # a new function each time: filters may be nested
        return False

    for logger in loggers:
        logger.addFilter(drop)
    sys.unraisablehook = sys.excepthook = _ignore_exception
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # about coroutines that were never awaited
            yield
    finally:
        sys.unraisablehook, sys.excepthook = unraisable_hook, exception_hook
        for logger in loggers:
            logger.removeFilter(drop)


def _single_process_context() -> Any:
    """Return Orbax's context for a read by this process alone.

    In other contexts, a load waits at a barrier for all processes, so a failed process would block the others forever.
    """
    import jax
    from orbax.checkpoint import v1 as ocp

    context, process_index = ocp.Context(), jax.process_index()
    context.multiprocessing.primary_host = process_index
    context.multiprocessing.active_processes = {process_index}
    context.multiprocessing.barrier_sync_key_prefix = f"process_{process_index}"
    return context


def start_save(path: Any, arrays: Mapping[str, Any], content: Mapping[str, Any], *, is_read_soon: bool) -> Any:
    """Start to write a checkpoint in the background, and return the future of the save.

    Files are not compressed. Compression would save 8 % of the bytes of a train state, but a restore of 0.93 GB would
    take 2.9 to 3.7 processor seconds instead of 1.9 to 2.5 (two cores of an Intel Xeon, 2026-11-28).

    Args:
        path: folder of the checkpoint.
        arrays: the canonical tree.
        content: description of the checkpoint, as JSON values.
        is_read_soon: whether the files are read right after the save, and so stay in the page cache.
    """
    from orbax.checkpoint import v1 as ocp

    context: Any = ocp.Context()
    context.array.saving.use_compression = False
    metadata: Any = {"jaxscale": content, "sha256": digest(content)}
    with context:
        save = ocp.save_async(str(path), dict(arrays), custom_metadata=metadata)
    if not is_read_soon:
        drop_written_pages(functools.partial(has_ended, save), path, _written_byte_count(arrays))
    return save


def has_ended(save: Any) -> bool:
    """Return whether a save has ended, with or without an error; `result` of the future raises the error."""
    try:
        save.result(timeout=0)
    except TimeoutError:
        return False
    except Exception:
        return True
    return True


def _written_byte_count(arrays: Mapping[str, Any]) -> int:
    """Return the bytes that this process writes: its devices' share, since Orbax divides replicas' work among them.

    NumPy arrays, which a single process saves, count as a whole.
    """
    byte_count = 0
    for array in arrays.values():
        sharding = getattr(array, "sharding", None)
        share = (len(sharding.addressable_devices), len(sharding.device_set)) if sharding is not None else (1, 1)
        byte_count += array.nbytes * share[0] // share[1]
    return byte_count
