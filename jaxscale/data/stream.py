"""The user's own batches, from an iterable or from a function that returns one."""

import base64
import dataclasses
import inspect
import json
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxscale.data.arrays import Listed, checked_batch, common_row_count, with_row_weights
from jaxscale.data.loader import NumpyBatch
from jaxscale.data.rows import Arrays
from jaxscale.data.text import check_share
from jaxscale.errors import UserError
from jaxscale.values import check_types
from jaxscale.values.functions import check_parameters
from jaxscale.values.short_repr import short_repr
from jaxscale.values.user_frames import place_of

_STATE_METHOD_NAMES = (("get_state", "set_state"), ("state_dict", "load_state_dict"))
"""Names of the methods that return and set the state of an iterator: those of Grain, and those of torchdata."""


@dataclasses.dataclass(frozen=True, eq=False)
class Stream:
    """An iterable of batches, or a function that returns one; each batch is a dict of arrays with the same shapes.

    Each batch is the global batch, from which every process takes its rows. If a function has the parameters `process`
    and `processes`, its batches hold only the rows of that process. When the iterable ends, it is iterated again. An
    iterator, such as a generator, can be iterated only once; give a function that returns the iterator instead.

    A continued run restores the state of the iterator or of the iterable, if one of them has `get_state()` and
    `set_state(state)`, or `state_dict()` and `load_state_dict(state)`. The state consists of JSON values or bytes.
    Otherwise, the run reads the batches that it was trained on again and drops them. The result is exact if the batches
    are the same every time.

    Args:
        batches: the iterable, or a function that returns it.
        held_out: iterable of batches to evaluate on, or a function that returns one; the last batch may be shorter.

    Raises:
        UserError: `batches` is not an iterable; or, while batches are read, a batch is not as described, or an iterator
            ends.

    Example:
        >>> def batches():
        ...     rng = np.random.default_rng(0)
        ...     while True:
        ...         x = rng.normal(size=(4, 3)).astype("float32")
        ...         yield {"x": x, "y": x.sum(1)}
        >>> sorted(next(Stream(batches).open(4, seed=0).train()))
        ['x', 'y']
    """

    batches: Any
    held_out: Any = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_types(self)
        if isinstance(self.held_out, Iterator):
            raise UserError(
                "held_out: got an iterator, which can be evaluated on only once: give a list, or a function that "
                "returns the iterator"
            )
        for name in ("batches", "held_out"):
            source = getattr(self, name)
            if source is None and name == "held_out":
                continue
            if isinstance(source, str | bytes | Mapping) or not (callable(source) or isinstance(source, Iterable)):
                raise UserError(
                    f"{name}: got a {type(source).__name__}, expected an iterable of batches, each a dict of arrays, "
                    "or a function that returns one"
                )
            if isinstance(source, list | tuple):
                object.__setattr__(self, name, Listed(source))
            elif isinstance(source, Iterator) and not isinstance(source, OnePass):
                object.__setattr__(self, name, OnePass(source))

    def open(self, batch: int, seed: int, *, process: int = 0, processes: int = 1) -> "OpenedStream":
        """Return the opened batches.

        Args:
            batch: number of rows in the global batch.
            seed: not used: the order is the iterable's own.
            process: index of this process.
            processes: number of processes that share the batch.
        """
        check_share(batch, process, processes)
        return OpenedStream(self, batch, process, processes)

    def shapes(self, batch: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return the shape and dtype of each array in a batch, by name; an iterator's first batch is not consumed."""
        if isinstance(self.batches, OnePass):
            first_batch = checked_batch(self.batches.peek(), "batch 0")
        else:
            first_batch = next(self.open(batch, 0).train())
        return {name: ((batch, *array.shape[1:]), str(array.dtype)) for name, array in first_batch.items()}


@dataclasses.dataclass(frozen=True)
class OpenedStream:
    """The opened batches of a `Stream`.

    Args:
        stream: the stream.
        batch: number of rows in the global batch.
        process: index of this process.
        processes: number of processes that share the batch.
    """

    stream: Stream
    batch: int
    process: int
    processes: int
    tokenizer: None = None
    facts: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"kind": "stream"})

    def train(self, start: dict[str, Any] | None = None) -> "StreamBatches":
        """Return the endless training batches, starting at the first one or at a state from `get_state`."""
        return StreamBatches(self, start)

    def evaluation(self) -> Iterator[NumpyBatch]:
        """Yield the held-out batches, with weights; a shorter batch is padded with rows of weight 0."""
        if self.stream.held_out is None:
            return
        iterable, is_local = self.iterable_and_is_local("held_out")
        row_count = self.batch // (self.processes if is_local else 1)
        for index, batch in enumerate(iterable):
            place = f"{place_of(self.stream.held_out)}batch {index} of held_out"
            weighted_batch = with_row_weights(checked_batch(batch, place))
            missing_row_count = row_count - common_row_count(weighted_batch, place)
            if missing_row_count < 0:
                raise UserError(f"{place} has {row_count - missing_row_count} rows, expected at most {row_count}")
            padded_batch = {
                name: np.pad(array, [(0, missing_row_count)] + [(0, 0)] * (array.ndim - 1))
                for name, array in weighted_batch.items()
            }
            yield padded_batch if is_local else self.own_rows(padded_batch)

    def iterable_and_is_local(self, name: str) -> tuple[Any, bool]:
        """Return the iterable of "batches" or "held_out", and whether its batches have only this process's rows."""
        source = getattr(self.stream, name)
        if isinstance(source, Iterable):
            return source, False
        is_local = {"process", "processes"} <= _parameter_names(source)
        if is_local:
            iterable = source(process=self.process, processes=self.processes)
        else:
            check_parameters(source, f"{place_of(source)}{name}", 0, "lambda: my_batches")
            iterable = source()
        if not isinstance(iterable, Iterable) or isinstance(iterable, Mapping):
            raise UserError(
                f"{place_of(source)}{name}: the function returned a {type(iterable).__name__}, expected an iterable of "
                "batches: yield each batch"
            )
        return iterable, is_local

    def own_rows(self, batch: NumpyBatch) -> NumpyBatch:
        """Return this process's rows of a global batch."""
        row_count = self.batch // self.processes
        first_row = self.process * row_count
        return {name: array[first_row : first_row + row_count] for name, array in batch.items()}


def _parameter_names(function: Callable[..., Any]) -> set[str]:
    """Return the names of a function's parameters; an empty set for a C function without a signature."""
    try:
        return set(inspect.signature(function).parameters)
    except ValueError:
        return set()


class StreamBatches(Iterator[NumpyBatch]):
    """The endless batches of a `Stream`.

    Args:
        opened: the opened stream.
        start: initial state; `None` for the first batch.

    Attributes:
        note: a line that tells the user what a continued run does; `None` if the data has a state.
    """

    def __init__(self, opened: OpenedStream, start: dict[str, Any] | None) -> None:
        self._opened = opened
        self._batch_count = 0  # in all epochs
        self._shapes_and_dtypes: dict[str, Any] | None = None
        self._iterable, self._is_local = opened.iterable_and_is_local("batches")
        self._iterator = iter(self._iterable)
        self.note = (
            None if self._state_owner() else "the data has no state: a continued run reads batches and drops them"
        )
        if start is not None:
            self._continue_from(start)

    def __next__(self) -> NumpyBatch:
        place = f"{place_of(self._opened.stream.batches)}batch {self._batch_count}"
        batch = checked_batch(self._next_batch(), place)
        row_count = self._opened.batch // (self._opened.processes if self._is_local else 1)
        if (batch_row_count := common_row_count(batch, place)) != row_count:
            global_row_count = batch_row_count * (self._opened.processes if self._is_local else 1)
            process_text = " for each process" if self._is_local else ""
            advice_text = f"; set batch={global_row_count}" if not self._batch_count and batch_row_count else ""
            raise UserError(
                f"{place} has {batch_row_count} rows, expected {row_count}{process_text}: the experiment's batch is "
                f"{self._opened.batch}{advice_text}"
            )
        shapes_and_dtypes = {name: (array.shape, str(array.dtype)) for name, array in batch.items()}
        if self._shapes_and_dtypes not in (None, shapes_and_dtypes):
            raise UserError(
                f"{place} has {shapes_and_dtypes}, but the first batch {self._shapes_and_dtypes}: expected one shape "
                "and dtype"
            )
        self._shapes_and_dtypes = shapes_and_dtypes
        self._batch_count += 1
        return batch if self._is_local else self._opened.own_rows(batch)

    def _next_batch(self) -> Any:
        """Return the next batch of the iterable, unchecked; when the iterable ends, iterate it again."""
        for batch in self._iterator:
            return batch
        if isinstance(self._iterable, OnePass):
            raise UserError(
                f"the data ended after {self._iterable.taken_count} batches, as an iterator can be read only once: "
                "give a function that returns the iterator, or set fewer steps"
            )
        self._iterable, _ = self._opened.iterable_and_is_local("batches")
        self._iterator = iter(self._iterable)
        for batch in self._iterator:
            return batch
        raise UserError(
            f"{place_of(self._opened.stream.batches)}batches: the iterable has no batch, expected at least one"
        )

    def get_state(self) -> dict[str, Any]:
        """Return the state after the last batch, for `OpenedStream.train`, as JSON values."""
        state_owner = self._state_owner()
        state_fields = {} if state_owner is None else {"state": _to_json(state_owner.get())}
        return {"next": self._batch_count, **state_fields}

    def _continue_from(self, start: dict[str, Any]) -> None:
        """Restore a state from `get_state`; iteration continues with the batch after that state."""
        state_owner = self._state_owner()
        if state_owner is not None and "state" in start:
            state_owner.set(_from_json(start["state"]))
            if state_owner.iterable is self._iterable:
                self._iterator = iter(self._iterable)
            elif isinstance(self._iterator, OnePass):
                self._iterator.forget()
        else:
            if isinstance(self._iterable, OnePass) and self._iterable.taken_count:
                raise UserError(
                    "the run cannot continue with an iterator that has been read: give a function that returns "
                    "a new one"
                )
            for _ in range(start["next"]):
                self._next_batch()
            self.note = f"the data has no state: read {start['next']:,} batches and dropped them"
        self._batch_count = start["next"]

    def _state_owner(self) -> "StateOwner | None":
        """Return the owner of the state: the iterator or, if it has no state, the iterable; `None` if there is none."""
        iterator = self._iterator.iterator if isinstance(self._iterator, OnePass) else self._iterator
        for candidate in (iterator, self._iterable):
            for get_name, set_name in _STATE_METHOD_NAMES:
                if hasattr(candidate, get_name) and hasattr(candidate, set_name):
                    return StateOwner(candidate, getattr(candidate, get_name), getattr(candidate, set_name))
        return None


class StateOwner(NamedTuple):
    """An iterator or iterable that has a state, and its methods that return and set the state."""

    iterable: Any
    get: Callable[[], Any]
    set: Callable[[Any], Any]


class OnePass(Iterator[Any]):
    """An iterator that can return its next batch without consuming it.

    Args:
        iterator: the iterator.

    Attributes:
        taken_count: number of batches consumed.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.iterator = iterator
        self._peeked_batches: list[Any] = []
        self.taken_count = 0

    def peek(self) -> Any:
        """Return the next batch without consuming it."""
        if not self._peeked_batches:
            self._peeked_batches = [next(self.iterator)]
        return self._peeked_batches[0]

    def forget(self) -> None:
        """Drop the batch that `peek` returned; call this after the iterator's state is set."""
        self._peeked_batches.clear()

    def __next__(self) -> Any:
        batch = self._peeked_batches.pop() if self._peeked_batches else next(self.iterator)
        self.taken_count += 1
        return batch


def _to_json(state: Any) -> dict[str, Any]:
    """Return the state of a user's data as JSON values."""
    if isinstance(state, bytes):
        return {"bytes": base64.b64encode(state).decode()}
    try:
        return {"json": json.loads(json.dumps(state))}
    except (TypeError, ValueError) as error:
        raise UserError(f"the state of the data cannot be stored: {error}; expected JSON values or bytes") from None


def _from_json(state_json: dict[str, Any]) -> Any:
    """Return the state that `_to_json` stored."""
    return base64.b64decode(state_json["bytes"]) if "bytes" in state_json else state_json["json"]


def as_data(source: Any) -> Any:
    """Return the data of an experiment: a dict of arrays becomes `Arrays`, and an iterable of batches `Stream`.

    `None` and values that have `open` or `shapes` are returned unchanged.

    Raises:
        UserError: `source` has another type.

    Example:
        >>> type(as_data({"x": np.zeros((8, 2))})).__name__, type(as_data([{"x": np.zeros((4, 2))}])).__name__
        ('Arrays', 'Stream')
    """
    if source is None or hasattr(source, "open") or hasattr(source, "shapes"):
        return source
    if isinstance(source, Mapping):
        return Arrays(source)
    elements = source if isinstance(source, list | tuple) else [source]
    if elements and all(hasattr(element, "dtype") for element in elements):
        count_text = f"{len(elements)} arrays without names" if len(elements) > 1 else "an array without a name"
        raise UserError(
            f"data: got {count_text}, expected a dict of arrays, such as {{'x': x, 'y': y}}, with the names that the "
            "score reads"
        )
    if callable(source) or (isinstance(source, Iterable) and not isinstance(source, str | bytes)):
        return Stream(source)
    raise UserError(
        f"data: got {reprlib.repr(source)}, expected data such as jaxscale.data.Text, a dict of arrays, or an "
        f"iterable of batches{_advice_on_path(source)}"
    )


def _advice_on_path(source: Any) -> str:
    """Return the end of an error message, which names the class that reads the path; "" if `source` is not a path."""
    if not isinstance(source, str | Path):
        return ""
    suffix = Path(source).suffix
    class_name = "Images" if suffix == ".npz" else "ImageFolder" if not suffix else "Text"
    return f": jaxscale.data.{class_name}({str(source)!r}) reads a path"
