"""metrics.jsonl: a run's measurements, one JSON object a line, appended and never rewritten.

Every line has `step`, `kind` (`train`, `eval` or `event`) and `time` (seconds since 1970). Floats are written with all
their digits, so that they read back equal in every bit. JSON has no NaN and no infinity: such a field is `null`, and
`nonfinite` holds its value, as in `{"loss": null, "nonfinite": {"loss": "nan"}}`; `read_metrics` restores it.

A run that resumes writes some steps again. The last line of a step is valid, and a `resume` event at step n voids all
earlier lines for steps past n.

The same scalars go to TensorBoard's event files, in the record format of tensorboardX. They are encoded by the hundred,
one event a step, since tensorboardX's writer sends each scalar separately through a queue between processes.
"""

import json
import math
import os
import struct
import time
from collections.abc import Iterable
from typing import Any, Literal, SupportsIndex, overload

import numpy as np

from jaxscale.errors import UserError
from jaxscale.records.storage import Appender, is_remote, open_append, run_path

FILE = "metrics.jsonl"
RowKind = Literal["train", "eval", "event"]

_FLUSH_ROWS = 200
_FLUSH_SECONDS = 20.0


class MetricsRows(list[dict[str, Any]]):
    """Rows of metrics, a list of dicts that also returns columns.

    Example:
        >>> MetricsRows([{"step": 1, "loss": 2.0}, {"step": 2}]).column("loss")
        array([ 2., nan])
    """

    def column(self, name: str) -> np.ndarray:
        """The field `name` of every row as float64; NaN for a row without the field."""
        values = (row.get(name) for row in self)
        return np.array([float(v) if isinstance(v, int | float) else math.nan for v in values], dtype=np.float64)

    @overload
    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> "MetricsRows": ...
    def __getitem__(self, index: Any) -> Any:
        selection = super().__getitem__(index)
        return MetricsRows(selection) if isinstance(index, slice) else selection


class MetricsLog:
    """Appends to a run's metrics.jsonl and TensorBoard events. Only one process of a run makes one.

    Args:
        directory: the run's folder, local or in a bucket.
        tensorboard: write TensorBoard events to its folder `tensorboard` too.

    Raises:
        OSError: the file, which the error names, cannot be written. Later calls may raise it too.

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
        self._lines = open_append(path)
        self._board = _Board(directory) if tensorboard else None

    def append(self, step: int, kind: RowKind, **fields: Any) -> dict[str, Any]:
        """Appends a row, and returns it.

        Args:
            step: number of updates so far.
            kind: "train" for the metrics of the last update; "eval" for held-out metrics of the parameters after it;
                "event" with a `name`: compile, checkpoint, resume, preempted, skipped, ...
            fields: the measurements.
        """
        row: dict[str, Any] = {"step": int(step), "kind": kind, "time": round(time.time(), 3)}
        # a Python number for a scalar of numpy or JAX: a float32 becomes the float of the same value
        row |= {name: value.item() if hasattr(value, "item") else value for name, value in fields.items()}
        self._lines.write(encode(row))
        if self._board is not None:
            self._board.add(row)
        return row

    def flush(self) -> None:
        """Writes TensorBoard events, and the lines of a file in a bucket, which are buffered."""
        self._lines.flush()
        if self._board is not None:
            self._board.flush()

    def close(self) -> None:
        """Writes out everything and closes the files."""
        if self._board is not None:
            self._board.close()
        self._lines.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def encode(row: dict[str, Any]) -> bytes:
    """A row as one line of strict JSON.

    Example:
        >>> encode({"step": 1, "loss": float("inf")})
        b'{"step": 1, "loss": null, "nonfinite": {"loss": "inf"}}\\n'
    """
    nonfinite = {name: repr(v) for name, v in row.items() if isinstance(v, float) and not math.isfinite(v)}
    if nonfinite:
        row = {**row, **dict.fromkeys(nonfinite), "nonfinite": nonfinite}
    return (json.dumps(row, allow_nan=False) + "\n").encode()


def decode(line: bytes) -> dict[str, Any]:
    """The row in a line of JSON; the inverse of `encode`.

    Raises:
        ValueError: the line is no JSON object with `step` and `kind`.
    """
    row = json.loads(line)
    if not isinstance(row, dict) or not isinstance(row.get("step"), int) or "kind" not in row:
        raise ValueError("no JSON object with step and kind")
    for name, text in (row.pop("nonfinite", None) or {}).items():
        row[name] = float(text)
    return row


def read_metrics(directory: Any, kind: RowKind | None = None) -> MetricsRows:
    """Reads a run's metrics.

    Args:
        directory: the run's folder.
        kind: return only rows of this kind.

    Returns:
        The valid rows in the order they were written, which is the order of their steps except for events; empty if
        there is no file.

    Raises:
        UserError: a line other than the last one is not JSON.
    """
    path = run_path(directory) / FILE
    if not path.exists():
        return MetricsRows()
    lines = path.read_bytes().split(b"\n")
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(decode(line))
        except ValueError as error:
            if any(later.strip() for later in lines[number:]):
                raise UserError(f"{path}, line {number}: expected a JSON object ({error}); delete that line") from None
    return MetricsRows(row for row in _valid_rows(rows) if kind is None or row["kind"] == kind)


def _valid_rows(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """All events, and the last row of each step and kind that no later `resume` voids."""
    position_of: dict[tuple[str, int], int] = {}
    row_at: dict[int, dict[str, Any]] = {}
    for position, row in enumerate(rows):
        row_at[position] = row
        if row["kind"] != "event":
            row_at.pop(position_of.get((row["kind"], row["step"]), -1), None)
            position_of[row["kind"], row["step"]] = position
        elif row.get("name") == "resume":
            stale = [key for key in position_of if key[1] > row["step"]]
            for key in stale:
                del row_at[position_of.pop(key)]
    return list(row_at.values())


def drop_torn_line(path: Any) -> int:
    """Removes a half-written last line, which a kill may leave, from a file of JSON lines.

    Returns:
        Number of removed bytes.
    """
    if is_remote(path) or not path.exists():
        return 0  # an object in a bucket is stored whole or not at all
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        start, tail = end, b""
        while start and b"\n" not in tail[:-1]:
            start = max(0, start - 65536)
            file.seek(start)
            tail = file.read(end - start)
        line = tail[tail[:-1].rfind(b"\n") + 1 :]
        try:
            if not line or (line.endswith(b"\n") and decode(line)):
                return 0
        except ValueError:
            pass
        file.truncate(end - len(line))
        return len(line)


_TRAIN_TAGS = {"step_seconds": "speed", "tokens_per_second": "speed", "flop_per_second": "speed", "mfu": "speed"}
"""Section of TensorBoard for fields that are not in the section of their row's kind."""


class _Board:
    """TensorBoard's event file of one process, a sequence of records (length, crc, event, crc)."""

    def __init__(self, directory: Any):
        self._folder = run_path(directory) / "tensorboard"
        self._rows: list[dict[str, Any]] = []
        self._flushed_at = time.monotonic()
        self._purge_step: int | None = None
        self._file: Appender | None = None

    def add(self, row: dict[str, Any]) -> None:
        """Buffers a row, and flushes the buffer if it is long or old."""
        if row["kind"] == "event":
            if row["name"] == "resume":
                self.flush()
                self._purge_step = row["step"] + 1
            return
        self._rows.append(row)
        if len(self._rows) >= _FLUSH_ROWS or time.monotonic() - self._flushed_at > _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Encodes and writes the buffered rows."""
        self._flushed_at = time.monotonic()
        if not self._rows and self._purge_step is None:
            return
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        records: list[bytes] = []
        if self._file is None:
            name = f"events.out.tfevents.{int(time.time())}.{os.getpid()}.{time.monotonic_ns()}"
            self._file = open_append(self._folder / name)
            records.append(_record(Event(wall_time=time.time(), file_version="brain.Event:2")))
        if self._purge_step is not None:
            # makes TensorBoard drop its events of these and later steps, which are written again
            session = SessionLog(status=SessionLog.START)
            records.append(_record(Event(wall_time=time.time(), step=self._purge_step, session_log=session)))
            self._purge_step = None
        for row in self._rows:
            values = [
                Summary.Value(tag=f"{_TRAIN_TAGS.get(name, row['kind'])}/{name}", simple_value=value)
                for name, value in row.items()
                if name not in ("step", "time") and isinstance(value, int | float) and not isinstance(value, bool)
            ]
            event = Event(wall_time=row["time"], step=row["step"], summary=Summary(value=values))
            records.append(_record(event))
        self._rows.clear()
        self._file.write(b"".join(records))

    def close(self) -> None:
        """Flushes the buffer and closes the file."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None


def _record(event: Any) -> bytes:
    """An event as a record of a TensorBoard file."""
    from tensorboardX.record_writer import masked_crc32c

    payload = event.SerializeToString()
    length = struct.pack("<Q", len(payload))
    return length + struct.pack("<I", masked_crc32c(length)) + payload + struct.pack("<I", masked_crc32c(payload))
