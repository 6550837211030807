"""metrics.jsonl: a run's measurements, one JSON object (a row) per line, appended and never rewritten.

Every line has `step`, `kind` (`train`, `eval` or `event`) and `time` (seconds since 1970). Floats are written with all
digits, so reading returns the same values, bit for bit. JSON has neither NaN nor infinity. For such a value, the field
is `null`, and `nonfinite` holds the value: `{"loss": null, "nonfinite": {"loss": "nan"}}`. `read_metrics` restores it.

A continued run writes the lines of some steps again. If a step has several lines of one kind, only the last one is
valid. A `resume` event at step n makes earlier lines for steps after n invalid: train rows, eval rows, and events named
`skipped`. Other events stay valid.

The same scalars are written to TensorBoard's event files, in the record format of tensorboardX. Hundreds of rows are
encoded at once, one event per row. tensorboardX's own writer would send each scalar separately through a queue.
"""

import json
import math
import os
import re
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, get_args, overload

from jaxscale.errors import UserError
from jaxscale.records.storage import Appender, is_remote, open_append, run_path
from jaxscale.records.tensorboard import encode_records
from jaxscale.values.limits import MAX_INT32, MAX_LINE_BYTES, MAX_LOG_BYTES
from jaxscale.values.read_files import check_own_file, check_regular, parse_json, read_bytes

if TYPE_CHECKING:
    import numpy as np

FILE = "metrics.jsonl"
RowKind = Literal["train", "eval", "event"]

# rows for TensorBoard are buffered until there are this many, or until this many seconds have passed
_FLUSH_ROWS = 200
_FLUSH_SECONDS = 20.0

_MAX_SECONDS = 1e11  # since 1970: the year 5138


class MetricsRows(list[dict[str, Any]]):
    """Rows of metrics: a list of dicts, with a method that returns one column of all rows.

    Example:
        >>> MetricsRows([{"step": 1, "loss": 2.0}, {"step": 2}]).column("loss")
        array([ 2., nan])
    """

    def column(self, name: str) -> "np.ndarray":
        """Return the field `name` of every row, float64 [rows]. Where a row lacks the field as a number, it is NaN."""
        import numpy as np

        cells = (row.get(name) for row in self)
        numbers = [_as_float(cell) if isinstance(cell, int | float) else math.nan for cell in cells]
        return np.array(numbers, dtype=np.float64)

    @overload
    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> "MetricsRows": ...
    def __getitem__(self, index: Any) -> Any:
        selection = super().__getitem__(index)
        return MetricsRows(selection) if isinstance(index, slice) else selection


def _as_float(number: int | float) -> float:
    """Return a number as a float. An int beyond the range of floats becomes infinity or minus infinity."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


class MetricsLog:
    """Appends to a run's metrics.jsonl and TensorBoard events. Only one process of a run may create this object.

    Args:
        directory: the run's folder, local or in a bucket.
        tensorboard: whether to also write TensorBoard events, to the subfolder `tensorboard`.

    Raises:
        OSError: a file cannot be written; `filename` is the file's path. All methods may raise this error.
        UserError: metrics.jsonl is a folder, a device or a pipe, or the file is damaged.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> with MetricsLog(folder, tensorboard=False) as log:
        ...     _ = log.append(1, "train", loss=2.5)
        ...     _ = log.append(1, "event", name="checkpoint", seconds=0.1)
        >>> [row["loss"] for row in read_metrics(folder, "train")]
        [2.5]
    """

    def __init__(self, directory: Any, *, tensorboard: bool = True):
        path = run_path(directory) / FILE
        drop_torn_line(path)
        self._file = open_append(path)
        self._event_file = _EventFile(directory) if tensorboard else None

    def append(self, step: int, kind: RowKind, **fields: Any) -> dict[str, Any]:
        """Append a row, and return it.

        Args:
            step: number of updates so far.
            kind: "train" for metrics of the last update; "eval" for held-out metrics after that update; "event" for an
                event with a `name`, such as compile, checkpoint, resume, preempted or skipped.
            fields: the measurements.
        """
        row: dict[str, Any] = {"step": int(step), "kind": kind, "time": round(time.time(), 3)}
        # a NumPy or JAX scalar becomes a Python number with the same value
        row |= {name: value.item() if hasattr(value, "item") else value for name, value in fields.items()}
        self._file.write(encode(row))
        if self._event_file is not None:
            self._event_file.add(row)
        return row

    def flush(self) -> None:
        """Write the buffered TensorBoard events, and the buffered lines of a file in a bucket."""
        self._file.flush()
        if self._event_file is not None:
            self._event_file.flush()

    def close(self) -> None:
        """Write all buffered data, and close the files."""
        if self._event_file is not None:
            self._event_file.close()
        self._file.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_encode_json = json.JSONEncoder(allow_nan=False).encode


def encode(row: dict[str, Any]) -> bytes:
    """Return a row as one line of strict JSON.

    Example:
        >>> encode({"step": 1, "loss": float("inf")})
        b'{"step": 1, "loss": null, "nonfinite": {"loss": "inf"}}\\n'
    """
    nonfinite_texts = {
        name: repr(value) for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)
    }
    strict_row = {**row, **dict.fromkeys(nonfinite_texts), "nonfinite": nonfinite_texts} if nonfinite_texts else row
    return (_encode_json(strict_row) + "\n").encode()


def decode(line: bytes) -> dict[str, Any]:
    """Return the row in a line of JSON, as the inverse of `encode`.

    Raises:
        ValueError: the line is not a JSON object with `step`, `kind` and, in an event, `name`.
    """
    row = parse_json(line, "the line")
    if not isinstance(row, dict) or type(row.get("step")) is not int or row.get("kind") not in get_args(RowKind):
        raise ValueError("not a JSON object with step and kind")
    if not 0 <= row["step"] <= MAX_INT32:
        raise ValueError("its step is not a number of updates")
    if "time" in row and not (_is_number(row["time"]) and abs(row["time"]) <= _MAX_SECONDS):
        raise ValueError("its time is not a number of seconds since 1970")
    if row["kind"] == "event" and not isinstance(row.get("name"), str):
        raise ValueError("an event without a name")
    nonfinite_texts = row.pop("nonfinite", None) or {}
    if not isinstance(nonfinite_texts, dict) or not all(isinstance(text, str) for text in nonfinite_texts.values()):
        raise ValueError("its nonfinite is not a JSON object of texts")
    return row | {name: float(text) for name, text in nonfinite_texts.items()}


def _is_number(value: Any) -> bool:
    """Return whether a JSON value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_metrics(directory: Any, kind: RowKind | None = None) -> MetricsRows:
    """Read a run's metrics.

    Args:
        directory: the run's folder.
        kind: kind of the rows to return; `None` returns all rows.

    Returns:
        The valid rows, in the order in which they were written. Train rows are in the order of their steps, and so are
        eval rows. Without a file, there are no rows. Unreadable lines are left out (see `unreadable_lines_note`).

    Raises:
        UserError: the file is not a regular file, is too large or cannot be read.
    """
    return MetricsRows(row for row in _valid_rows(read_rows(directory)) if kind is None or row["kind"] == kind)


def read_rows(directory: Any) -> list[dict[str, Any]]:
    """Return all rows of a run in the order in which they were written, including rows that are no longer valid.

    Lines that cannot be read are left out.
    """
    return _read(directory)[0]


def unreadable_lines_note(directory: Any) -> str:
    """Return a sentence about the lines of metrics.jsonl that cannot be read; "" if all of them can be read.

    If the last line is incomplete, it is not counted, because a run in progress may be writing it.

    Example:
        >>> import pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / FILE).write_text("torn\\n" + 3 * '{"step": 1, "kind": "train"}\\n')
        >>> unreadable_lines_note(folder)
        'metrics.jsonl: 1 of 4 lines cannot be read (line 1) and is left out'
    """
    _, line_numbers, line_count = _read(directory)
    if not line_numbers:
        return ""
    places_text = ", ".join(map(str, line_numbers[:8])) + (", ..." if len(line_numbers) > 8 else "")
    is_one = len(line_numbers) == 1
    return (
        f"{FILE}: {len(line_numbers)} of {line_count} lines cannot be read "
        f"(line{'s' * (not is_one)} {places_text}) and {'is' if is_one else 'are'} left out"
    )


def _read(directory: Any) -> tuple[list[dict[str, Any]], list[int], int]:
    """Return all rows of a run, the numbers of the lines that cannot be read, and the number of lines."""
    path = run_path(directory) / FILE
    if not path.exists():
        return [], [], 0
    lines = read_bytes(path, MAX_LOG_BYTES).split(b"\n")
    rows: list[dict[str, Any]] = []
    unreadable_numbers: list[int] = []
    for line_number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(decode(line))
        except ValueError:
            if line_number < len(lines):
                unreadable_numbers.append(line_number)
    return rows, unreadable_numbers, len(lines) - (not lines[-1])


def last_logged_step(directory: Any) -> int:
    """Return the largest step of all train rows since the run last returned to a checkpoint; 0 without such rows.

    Rows that are no longer valid also count.
    """
    path = run_path(directory) / FILE
    if not path.exists():
        return 0
    if not is_remote(path):
        check_regular(path)
    step = 0
    with path.open("rb") as file:
        for line in iter(lambda: file.readline(MAX_LINE_BYTES), b""):
            if len(line) == MAX_LINE_BYTES:
                raise _long_line_error(path)
            match = re.match(rb'\{"step": (\d{1,10}), "kind": "train"', line)
            step = max(step, int(match[1])) if match else step
            step = 0 if b'"returned": true' in line else step
    return step


def _valid_rows(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the valid rows: all events, and the last row of each step and kind.

    Rows that a later `resume` makes invalid are left out. Events of skipped steps are treated as a separate kind.
    """
    index_by_key: dict[tuple[str, int], int] = {}  # keys are (kind, step)
    row_by_index: dict[int, dict[str, Any]] = {}
    for index, row in enumerate(rows):
        row_by_index[index] = row
        kind = "skipped" if row.get("name") == "skipped" else row["kind"]
        if kind != "event":
            row_by_index.pop(index_by_key.get((kind, row["step"]), -1), None)
            index_by_key[kind, row["step"]] = index
        elif row.get("name") == "resume":
            stale_keys = [(kind, step) for kind, step in index_by_key if step > row["step"]]
            for key in stale_keys:
                del row_by_index[index_by_key.pop(key)]
    return list(row_by_index.values())


def drop_torn_line(path: Any) -> int:
    """Remove an incomplete last line from a file of JSON lines. A killed process may leave such a line.

    Returns:
        The number of removed bytes.

    Raises:
        UserError: the path is not a regular file, or the last line is longer than any line of a log.
    """
    if is_remote(path) or not path.exists():
        return 0  # an object in a bucket is stored whole or not at all
    check_own_file(path)
    with path.open("r+b") as file:
        file_byte_count = file.seek(0, os.SEEK_END)
        tail_offset, tail = file_byte_count, b""
        while tail_offset and b"\n" not in tail[:-1]:
            if len(tail) > MAX_LINE_BYTES:
                raise _long_line_error(path)
            tail_offset = max(0, tail_offset - max(65536, len(tail)))
            file.seek(tail_offset)
            tail = file.read(file_byte_count - tail_offset)
        last_line = tail[tail[:-1].rfind(b"\n") + 1 :]
        try:
            if not last_line or (last_line.endswith(b"\n") and decode(last_line)):
                return 0
        except ValueError:
            pass
        file.truncate(file_byte_count - len(last_line))
        return len(last_line)


def _long_line_error(path: Any) -> UserError:
    """Return the error for a file with a line that is longer than any line that a run writes."""
    return UserError(f"{path} is damaged: a line has over {MAX_LINE_BYTES:,} bytes. Move it away, and start again")


_SECTION_BY_FIELD = {"step_seconds": "speed", "tokens_per_second": "speed", "flop_per_second": "speed", "mfu": "speed"}
"""The TensorBoard section of some fields. Any other field is in a section named after the kind of its row."""


class _EventFile:
    """The TensorBoard event file of one process, a sequence of records (length, crc, event, crc).

    Args:
        directory: the run's folder.
    """

    def __init__(self, directory: Any):
        self._folder = run_path(directory) / "tensorboard"
        self._rows: list[dict[str, Any]] = []  # the buffered rows
        self._last_flush_time = time.monotonic()
        self._purge_step: int | None = None  # TensorBoard must drop earlier events from this step on, if it is set
        self._file: Appender | None = None

    def add(self, row: dict[str, Any]) -> None:
        """Add a row to the buffer. Flush the buffer if it holds many rows, or old ones."""
        if row["kind"] == "event":
            if row["name"] == "resume":
                self.flush()
                self._purge_step = row["step"] + 1
            return
        self._rows.append(row)
        if len(self._rows) >= _FLUSH_ROWS or time.monotonic() - self._last_flush_time > _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Encode and write the buffered rows."""
        self._last_flush_time = time.monotonic()
        if not self._rows and self._purge_step is None:
            return
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        encoded_events: list[bytes] = []
        if self._file is None:
            file_name = f"events.out.tfevents.{int(time.time())}.{os.getpid()}.{time.monotonic_ns()}"
            self._file = open_append(self._folder / file_name)
            encoded_events.append(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        if self._purge_step is not None:
            # make TensorBoard drop its events from this step on, because they will be written again
            session_log = SessionLog(status=SessionLog.START)
            event = Event(wall_time=time.time(), step=self._purge_step, session_log=session_log)
            encoded_events.append(event.SerializeToString())
            self._purge_step = None
        for row in self._rows:
            summary_values = [
                Summary.Value(tag=f"{_SECTION_BY_FIELD.get(name, row['kind'])}/{name}", simple_value=value)
                for name, value in row.items()
                if name not in ("step", "time") and isinstance(value, int | float) and not isinstance(value, bool)
            ]
            event = Event(wall_time=row["time"], step=row["step"], summary=Summary(value=summary_values))
            encoded_events.append(event.SerializeToString())
        self._rows.clear()
        self._file.write(encode_records(encoded_events))

    def close(self) -> None:
        """Flush the buffer and close the file."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None
