"""A warm start: a new run begins with the weights of another, as far as names and shapes are the same.

Only weights and running statistics are taken: the optimizer's state is new, the step is 0, and the data starts anew.
What is not taken starts as it does without a warm start. init_from.json in the run directory records what was taken,
and lets a run that was stopped before its first checkpoint start from the same weights again; later, the run needs the
source no more.
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
"""File in the run directory with the source of the initial weights, and what was taken of it."""
_SHOWN = 6
"""Number of names in a line for the user."""


@dataclasses.dataclass(frozen=True)
class Match:
    """The arrays of a source beside those of a model, by name.

    Args:
        taken: names of the arrays that are taken.
        unlike: shape in the source and in the model of each array whose shapes differ.
        new: names of the model's arrays that the source lacks.
        left: names of the source's parameters that the model lacks.
        frozen: those of `unlike` and `new` that are not trained.
    """

    taken: tuple[str, ...]
    unlike: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    new: tuple[str, ...]
    left: tuple[str, ...]
    frozen: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        source: Mapping[str, tuple[int, ...]],
        model: Mapping[str, tuple[int, ...]],
        is_frozen: Callable[[str], bool] = lambda name: False,
    ) -> "Match":
        """Return the match of a source's arrays with a model's.

        Args:
            source: shape of each array of the source, by name.
            model: shape of each array of the model, by name.
            is_frozen: function that returns whether the model's array of a name is not trained.

        Example:
            >>> match = Match.of({"params/a": (2,), "params/b": (3,)}, {"params/a": (2,), "params/b": (4,)})
            >>> match.taken, match.unlike
            (('params/a',), {'params/b': ((3,), (4,))})
        """
        return cls(
            tuple(name for name, shape in model.items() if source.get(name) == shape),
            {name: (source[name], shape) for name, shape in model.items() if source.get(name, shape) != shape},
            tuple(name for name in model if name not in source),
            tuple(name for name in source if name not in model and name.startswith(f"{PARAMS}/")),
            tuple(name for name, shape in model.items() if source.get(name) != shape and is_frozen(name)),
        )

    def lines(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Return lines for the user on what is not taken.

        Args:
            shapes: shape of each array of the model, by name.
        """
        lines = []
        if self.unlike:
            unlike_text = _list_text(
                f"{name} ({' x '.join(map(str, there))} there, {' x '.join(map(str, here))} here)"
                for name, (there, here) in self.unlike.items()
            )
            lines.append(f"not taken, since shapes differ: {unlike_text}")
        if self.new:
            lines.append(f"not in the source, so as without it: {_list_text(self.new)}")
        if self.frozen:
            lines.append(f"neither taken nor trained, so they stay as they are: {_list_text(self.frozen)}")
        if self.left:
            lines.append(f"in the source alone, so left out: {_list_text(self.left)}")
        return lines


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """The weights that a run starts from, and those of them that its model takes.

    Args:
        source: the weights.
        match: what is taken.
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
        if not match.taken:
            _refuse(path, source, match, shapes)
        return cls(source, match, shapes)

    def load(self, step: Any, say: Callable[[str], None]) -> dict[str, Any]:
        """Read the arrays that are taken, by name, in the layout of a train step."""
        abstract = {name: leaf for name, leaf in _weights_of(step).items() if name in set(self.match.taken)}
        return self.source.load(abstract, say)

    def lines(self) -> list[str]:
        """Return lines for the user on what is taken, and what is not."""
        return [f"initial weights of {self.source}: {self.summary}", *self.match.lines(self.shapes)]

    @property
    def summary(self) -> str:
        """How much is taken, as text."""
        counts = [sum(math.prod(self.shapes[name]) for name in names) for names in (self.match.taken, self.shapes)]
        return f"{counts[0]:,} of {counts[1]:,} numbers, in {len(self.match.taken)} of {len(self.shapes)} arrays"

    @property
    def record(self) -> dict[str, Any]:
        """The content of init_from.json."""
        return {
            "source": _absolute(self.source.path),
            "step": self.source.step,
            "is_average": self.source.is_average,
            "summary": self.summary,
            "taken": list(self.match.taken),
            "unlike": {name: [list(there), list(here)] for name, (there, here) in self.match.unlike.items()},
            "new": list(self.match.new),
            "left": list(self.match.left),
        }


class Beginning:
    """The initial state of a run: that of its model, or with weights of a source.

    Args:
        path: path of the source; `None` without one.
        checkpoint_step: step of the source's checkpoint; `None` for the newest.
    """

    def __init__(self, path: Any = None, checkpoint_step: int | None = None) -> None:
        self._path, self._checkpoint_step = path, checkpoint_step
        self._warm_start: WarmStart | None = None

    @classmethod
    def of(cls, folder: Any, init_from: Any, has_run: bool) -> "Beginning":
        """Return how a run starts or has started; the arguments are those of `recorded_source`."""
        return cls(*recorded_source(folder, init_from, has_run))

    def match(self, step: Any) -> None:
        """Open the source, and match it with the model of a train step, before anything is written.

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
        """Create and return the initial state of a train step, and report and log what it starts from."""
        self.match(step)
        if self._warm_start is None:
            return step.init()
        state = step.init(self._warm_start.load(step, say))
        for line in self._warm_start.lines():
            say(line)
        log_event("init_from", source=str(self._warm_start.source), summary=self._warm_start.summary)
        return state


def recorded_source(folder: Any, init_from: Any, has_run: bool) -> tuple[Any, int | None]:
    """Return the path of the weights that a run starts from, and the step of a checkpoint there, or (`None`, `None`).

    For a run that exists, its record decides, so that the command that started it also continues it.

    Args:
        folder: the run directory.
        init_from: path that this start names; `None` if it names none.
        has_run: whether the directory holds a run.

    Raises:
        UserError: the run started otherwise.
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
        init_from: path of the weights; `None` without any.
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
    """Return the function that returns whether an array of a checkpoint is a parameter that is not trained."""
    from jaxscale.layers.stack import in_one_stack

    names = {f"{PARAMS}/{in_one_stack(name)[0]}" for name in step.pure_model.frozen}
    return lambda name: name in names or re.sub(r"(^|/)layers/\d+(?=/|$)", r"\1layers", name) in names


def _refuse(path: Any, source: WeightSource, match: Match, shapes: Mapping[str, Any]) -> None:
    """Raise the error for a source of which nothing fits the model."""
    reason = f"it has {_list_text(source.shapes)}, and the model has {_list_text(shapes)}"
    if match.unlike:
        reason = match.lines(shapes)[0]
    raise UserError(f"init_from {path}: nothing there fits the model: {reason}; take a run of such a model")


def _list_text(names: Iterable[str]) -> str:
    """Return names without their prefix as text, with one name for all layers of a stack; the first few of many."""
    short_names = (re.sub(r"(^|/)layers/\d+(?=/|\s|$)", r"\1layers/*", name.partition("/")[2]) for name in names)
    counts = collections.Counter(short_names)
    texts = [name if count == 1 else f"{name} ({count} layers)" for name, count in counts.items()]
    return ", ".join(texts[:_SHOWN]) + (f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else "")


def _absolute(path: Any) -> str:
    """Return a path as text that does not depend on the current folder."""
    text = str(path)
    return text.rstrip("/") if is_remote(run_path(path)) else os.path.abspath(text)
