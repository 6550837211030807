"""A warm start: a new run begins with the weights of another run. An array is taken if its name and shape match.

Only weights and running statistics are taken: the optimizer's state is new, the step is 0, and the data starts from the
beginning. All other arrays start as they do without a warm start. init_from.json in the run directory records what was
taken. If a run was stopped before its first checkpoint, it starts from the same weights again. After its first
checkpoint, a run no longer needs the source.
"""

import collections
import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxscale import values
from jaxscale.checkpoint.weights import WeightSource
from jaxscale.errors import UserError
from jaxscale.records.directory import write_json
from jaxscale.records.processes import call_on_all
from jaxscale.records.storage import is_remote, run_path
from jaxscale.state.canonical import PARAMS, REST

FILE = "init_from.json"
"""File in the run directory that records the source of the initial weights, and the arrays that were taken from it."""
_SHOWN = 6
"""Largest number of names in a line for the user."""


@dataclasses.dataclass(frozen=True)
class Match:
    """The names of the arrays that a model takes from a source, and of those that it does not take.

    Args:
        taken_names: names of the arrays that are taken.
        shapes_by_unlike_name: (shape in the source, shape in the model) of each array whose shapes differ, by name.
        new_names: names of the model's arrays that the source lacks.
        left_names: names of the source's parameters that the model lacks.
        frozen_names: names of the model's arrays that are neither taken nor trained.
    """

    taken_names: tuple[str, ...]
    shapes_by_unlike_name: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    new_names: tuple[str, ...]
    left_names: tuple[str, ...]
    frozen_names: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        source_shapes: Mapping[str, tuple[int, ...]],
        model_shapes: Mapping[str, tuple[int, ...]],
        is_frozen: Callable[[str], bool] = lambda name: False,
    ) -> "Match":
        """Match a source's arrays with a model's arrays, by name and shape.

        Args:
            source_shapes: shape of each array of the source, by name.
            model_shapes: shape of each array of the model, by name.
            is_frozen: function that returns whether the model's array with this name is a parameter that is not
                trained.

        Example:
            >>> match = Match.of({"params/a": (2,), "params/b": (3,)}, {"params/a": (2,), "params/b": (4,)})
            >>> match.taken_names, match.shapes_by_unlike_name
            (('params/a',), {'params/b': ((3,), (4,))})
        """
        return cls(
            tuple(name for name, shape in model_shapes.items() if source_shapes.get(name) == shape),
            {
                name: (source_shapes[name], shape)
                for name, shape in model_shapes.items()
                if source_shapes.get(name, shape) != shape
            },
            tuple(name for name in model_shapes if name not in source_shapes),
            tuple(name for name in source_shapes if name not in model_shapes and name.startswith(f"{PARAMS}/")),
            tuple(name for name, shape in model_shapes.items() if source_shapes.get(name) != shape and is_frozen(name)),
        )

    def lines(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Return lines of text for the user that list the arrays that are not taken.

        Args:
            shapes: shape of each array of the model, by name.
        """
        text_lines = []
        if self.shapes_by_unlike_name:
            unlike_text = _list_text(
                f"{name} ({' x '.join(map(str, source_shape))} there, {' x '.join(map(str, model_shape))} here)"
                for name, (source_shape, model_shape) in self.shapes_by_unlike_name.items()
            )
            text_lines.append(f"not taken, since shapes differ: {unlike_text}")
        if self.new_names:
            text_lines.append(f"not in the source, so as without it: {_list_text(self.new_names)}")
        if self.frozen_names:
            text_lines.append(f"neither taken nor trained, so they stay as they are: {_list_text(self.frozen_names)}")
        if self.left_names:
            text_lines.append(f"in the source alone, so left out: {_list_text(self.left_names)}")
        return text_lines


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """The weights that a run starts from, and which of them its model takes.

    Args:
        source: the weights.
        match: the match of the source's arrays with the model's.
        shapes: shape of each array of the model, by name.
    """

    source: WeightSource
    match: Match
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, step: Any, path: Any, checkpoint_step: int | None = None) -> "WarmStart":
        """Open the weights at a path, and match them with the model of a train step.

        Args:
            step: the train step.
            path: a run, a checkpoint or a folder of transformers.
            checkpoint_step: step of the run's checkpoint; `None` for the newest.

        Raises:
            UserError: there are no weights, or none of them fits the model.
        """
        source = WeightSource.open(path, checkpoint_step)
        shapes = {name: tuple(leaf.shape) for name, leaf in _weights_of(step).items()}
        match = Match.of(source.shapes, shapes, _frozen_test(step))
        if not match.taken_names:
            _refuse(path, source, match, shapes)
        return cls(source, match, shapes)

    def load(self, step: Any, say: Callable[[str], None]) -> dict[str, Any]:
        """Read the taken arrays in the layout of a train step, and return them by name."""
        abstract_leaves = {
            name: leaf for name, leaf in _weights_of(step).items() if name in set(self.match.taken_names)
        }
        return self.source.load(abstract_leaves, say)

    def lines(self) -> list[str]:
        """Return lines of text for the user: how much is taken, and the arrays that are not."""
        return [f"initial weights of {self.source}: {self.summary}", *self.match.lines(self.shapes)]

    @property
    def summary(self) -> str:
        """Text for the user on how many elements and arrays are taken."""
        number_counts = [
            sum(math.prod(self.shapes[name]) for name in names) for names in (self.match.taken_names, self.shapes)
        ]
        return (
            f"{number_counts[0]:,} of {number_counts[1]:,} numbers, in {len(self.match.taken_names)} of "
            f"{len(self.shapes)} arrays"
        )

    @property
    def record(self) -> dict[str, Any]:
        """The content of init_from.json."""
        return {
            "source": _absolute(self.source.path),
            "step": self.source.step,
            "is_average": self.source.is_average,
            "summary": self.summary,
            "taken": list(self.match.taken_names),
            "unlike": {
                name: [list(source_shape), list(model_shape)]
                for name, (source_shape, model_shape) in self.match.shapes_by_unlike_name.items()
            },
            "new": list(self.match.new_names),
            "left": list(self.match.left_names),
        }


class Beginning:
    """Creates the initial state of a run, with the model's own initial weights or with those of a source.

    Args:
        path: path of the source; `None` to start without a source.
        checkpoint_step: step of the source's checkpoint; `None` for the newest checkpoint.
    """

    def __init__(self, path: Any = None, checkpoint_step: int | None = None) -> None:
        self._path, self._checkpoint_step = path, checkpoint_step
        self._warm_start: WarmStart | None = None

    @classmethod
    def of(cls, folder: Any, init_from: Any, has_run: bool) -> "Beginning":
        """Return the `Beginning` of a new run, or the one recorded in an existing run's directory.

        The arguments are those of `recorded_source`.
        """
        return cls(*recorded_source(folder, init_from, has_run))

    def match(self, step: Any) -> None:
        """Open the source, and match it with the model of a train step. Call this before anything is written.

        Raises:
            UserError: there are no weights, or none of them fits the model.
        """
        if self._path is not None and self._warm_start is None:
            self._warm_start = WarmStart.of(step, self._path, self._checkpoint_step)

    def write(self, folder: Any) -> None:
        """Write the record of a new run to its directory."""
        if self._warm_start is not None:
            write_json(folder / FILE, self._warm_start.record)

    def state(self, step: Any, say: Callable[[str], None], log_event: Callable[..., None]) -> Any:
        """Return a new initial state of a train step; report the weights that it starts from, and log them."""
        self.match(step)
        if self._warm_start is None:
            return step.init()
        state = step.init(self._warm_start.load(step, say))
        for line in self._warm_start.lines():
            say(line)
        log_event("init_from", source=str(self._warm_start.source), summary=self._warm_start.summary)
        return state


def recorded_source(folder: Any, init_from: Any, has_run: bool) -> tuple[Any, int | None]:
    """Return (path of the weights that a run starts from, step of the checkpoint there).

    Both are `None` if the run starts without a source. The step is `None` for the newest checkpoint. For an existing
    run, both come from the run's record, so the command that started the run also continues it.

    Args:
        folder: the run directory.
        init_from: path that this start names; `None` if it names none.
        has_run: whether the directory holds a run.

    Raises:
        UserError: `init_from` is a path, but the run already exists and did not start from this path.
    """
    if not has_run:
        return init_from, None
    record = call_on_all(lambda: read_record(folder), LookupError)
    if init_from is not None and (record is None or record["source"] != _absolute(init_from)):
        start_text = "from its own initial weights" if record is None else f"from {record['source']}"
        raise UserError(
            f"init_from {init_from}: {folder} holds a run that started {start_text}; leave it out to continue that run,"
            " or choose another directory with --out"
        )
    return (None, None) if record is None else (record["source"], record.get("step"))


def read_record(folder: Any) -> dict[str, Any] | None:
    """Return the content of a run's init_from.json; `None` if the run has no such file.

    Raises:
        UserError: the file is damaged.
    """
    path = run_path(folder) / FILE
    if not path.exists():
        return None
    record = values.read_json(path)
    has_step = isinstance(record, dict) and (record.get("step") is None or type(record.get("step")) is int)
    if not has_step or not isinstance(record.get("source"), str):
        raise UserError(f"{path}: expected the source and step of initial weights; restore it from a copy")
    return record


def check_init_from(init_from: Any, from_step: Any, run_dir: Any) -> None:
    """Check the argument `init_from` before anything is done.

    Args:
        init_from: path of the weights; `None` if the run starts without any.
        from_step: step of a checkpoint to which the run returns; `None` for the newest.
        run_dir: the directory of the run that starts.

    Raises:
        UserError: the run is to return to a checkpoint of its own, or the path lies in the run's own directory.
    """
    if init_from is None:
        return
    if from_step is not None:
        raise UserError(
            f"init_from {init_from} with from step {from_step}: a run starts with the weights of another, or returns "
            "to a checkpoint of its own; leave one of them out"
        )
    if not str(init_from):
        raise UserError("init_from: got an empty text, expected a run, a checkpoint or a folder of transformers")
    if f"{_absolute(init_from)}/".startswith(f"{_absolute(run_dir)}/"):
        raise UserError(f"init_from {init_from}: this is the run's own directory; give another one with --out")


def _weights_of(step: Any) -> dict[str, Any]:
    """Return the abstract float32 parameters and statistics of a train step, by their names in a checkpoint."""
    import jax
    import jax.numpy as jnp

    from jaxscale.layers.stack import in_one_stack

    statistics = {f"{REST}/{in_one_stack(name)[0]}" for name in step.pure_model.statistics}
    leaves = step.canonical_abstract()
    return {
        name: jax.ShapeDtypeStruct(
            leaf.shape, jnp.float32 if name not in statistics else leaf.dtype, sharding=leaf.sharding
        )
        for name, leaf in leaves.items()
        if name.startswith(f"{PARAMS}/") or name in statistics
    }


def _frozen_test(step: Any) -> Callable[[str], bool]:
    """Return a function from an array's name to whether the array is a parameter that is not trained."""
    from jaxscale.layers.stack import in_one_stack

    frozen_param_names = {f"{PARAMS}/{in_one_stack(name)[0]}" for name in step.pure_model.frozen}
    return lambda name: (
        name in frozen_param_names or re.sub(r"(^|/)layers/\d+(?=/|$)", r"\1layers", name) in frozen_param_names
    )


def _refuse(path: Any, source: WeightSource, match: Match, shapes: Mapping[str, Any]) -> None:
    """Raise the error for a source none of whose arrays fits the model."""
    reason = f"it has {_list_text(source.shapes)}, and the model has {_list_text(shapes)}"
    if match.shapes_by_unlike_name:
        reason = match.lines(shapes)[0]
    raise UserError(f"init_from {path}: nothing there fits the model: {reason}; take a run of such a model")


def _list_text(names: Iterable[str]) -> str:
    """Return a text that lists up to six names without their prefix; the layers of a stack count as one name."""
    short_names = (re.sub(r"(^|/)layers/\d+(?=/|\s|$)", r"\1layers/*", name.partition("/")[2]) for name in names)
    layer_counts = collections.Counter(short_names)
    name_texts = [
        name if layer_count == 1 else f"{name} ({layer_count} layers)" for name, layer_count in layer_counts.items()
    ]
    return ", ".join(name_texts[:_SHOWN]) + (
        f" and {len(name_texts) - _SHOWN} more" if len(name_texts) > _SHOWN else ""
    )


def _absolute(path: Any) -> str:
    """Return a path as text that does not depend on the current folder."""
    path_text = str(path)
    return path_text.rstrip("/") if is_remote(run_path(path)) else os.path.abspath(path_text)
