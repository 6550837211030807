"""Named held-out sets of an experiment: data that is evaluated beside the held-out part of the training data.

A set is a data object such as `Text`, whose held-out part is evaluated. If all of a set is held out, the set may also
be a path of files, which are read like the training data, a dict of arrays, or an iterable of batches.
"""

import os
import re
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxscale.data.loader import NumpyBatch
from jaxscale.data.rows import Arrays
from jaxscale.data.stream import Stream
from jaxscale.data.text import Mixture, Text
from jaxscale.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""Pattern of the names of held-out sets; the names are parts of metric names."""


def as_held_out_sets(sources: Mapping[str, Any], data: Any) -> dict[str, Any]:
    """Return the data of each held-out set, by name.

    Args:
        sources: by name, a data object such as `Text`, or a path, a dict of arrays or an iterable of batches.
        data: the training data; files at a path are read with its settings.

    Raises:
        UserError: a name cannot be part of a metric's name, or a source has another type.

    Example:
        >>> as_held_out_sets({"news": "/corpus/news.txt"}, Text("a.txt", context=8))["news"].paths
        ('/corpus/news.txt',)
    """
    if not isinstance(sources, Mapping):
        raise UserError(
            f"held_out: got a {type(sources).__name__}, expected a dict of sets by name, such as {{'news': 'news.txt'}}"
        )
    if all(hasattr(source, "dtype") for source in sources.values()):
        raise UserError(
            f"held_out: got the arrays {', '.join(map(str, sources))} themselves, expected a dict of sets by name: "
            "{'test': {...}} with these arrays inside"
        )
    sets: dict[str, Any] = {}
    for name, source in sources.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UserError(f"held_out: got the name {name!r}, expected letters, digits, _, - and ., such as news")
        try:
            sets[name] = as_held_out(source, data)
        except UserError as error:
            raise UserError(f"held_out.{name}: {error}") from None
    return sets


def as_held_out(source: Any, training_data: Any) -> Any:
    """Return the data of one held-out set; for the parameters and errors, see `as_held_out_sets`."""
    if isinstance(source, str | os.PathLike) or _are_paths(source):
        path_or_paths = source if isinstance(source, str | os.PathLike) else tuple(map(Path, source))
        if not hasattr(training_data, "held_out_at"):
            raise UserError(
                f"got the path {_paths_text(path_or_paths)}, but the training data, a "
                f"{type(training_data).__name__}, reads no files: give data such as "
                "jaxscale.data.Text(path, held_out=1.0)"
            )
        return training_data.held_out_at(path_or_paths)
    if isinstance(source, Mapping):
        return Arrays(source, held_out=1.0)
    if not hasattr(source, "open"):
        if not callable(source) and not isinstance(source, Iterable):
            raise UserError(
                f"got {reprlib.repr(source)}, expected data such as jaxscale.data.Text, a path, a dict of arrays, or "
                "an iterable of batches"
            )
        return Stream((), held_out=source)
    if (
        isinstance(source, Text | Mixture)
        and isinstance(training_data, Text | Mixture)
        and source.tokenizer != training_data.tokenizer
    ):
        raise UserError(
            f"its tokenizer is {source.tokenizer}, expected that of the training data, "
            f"{training_data.tokenizer}: a model reads the tokens of one tokenizer"
        )
    return source


def _are_paths(source: Any) -> bool:
    """Return whether `source` is a list or tuple of paths."""
    return isinstance(source, list | tuple) and bool(source) and all(isinstance(p, str | os.PathLike) for p in source)


def _paths_text(path_or_paths: Any) -> str:
    """Return one path, or several, as text."""
    return (
        os.fspath(path_or_paths)
        if isinstance(path_or_paths, str | os.PathLike)
        else ", ".join(map(os.fspath, path_or_paths))
    )


def open_held_out_sets(
    sets: Mapping[str, Any], batch: int, seed: int, *, process: int, processes: int, tokenizer: Any
) -> dict[str, Any]:
    """Open held-out sets, and check that something is held out in each.

    Args:
        sets: the data of each set, by name.
        batch: number of rows in the global batch.
        seed: seed of the experiment.
        process: index of this process.
        processes: number of processes that share the batch.
        tokenizer: tokenizer of the training data, which encodes the texts of the sets; `None` if there is none.

    Returns:
        The opened data by name.

    Raises:
        UserError: a set cannot be opened, or holds nothing out.
    """
    opened_sets: dict[str, Any] = {}
    for name, data in sets.items():
        settings = {"tokenizer": tokenizer} if tokenizer is not None and isinstance(data, Text | Mixture) else {}
        try:
            opened_set = data.open(batch, seed, process=process, processes=processes, **settings)
            if next(iter(opened_set.evaluation()), None) is None:
                raise UserError("nothing is held out, expected rows to evaluate: set held_out above 0; 1 holds out all")
        except UserError as error:
            raise UserError(f"held_out.{name}: {error}") from None
        opened_sets[name] = opened_set
    return opened_sets


def check_same_arrays(sets: Mapping[str, Any], batch: NumpyBatch) -> None:
    """Check that the batches of held-out sets have the same arrays as a training batch; weights are optional.

    Args:
        sets: the opened sets by name.
        batch: this process's rows of a training batch.

    Raises:
        UserError: an array is missing or superfluous, or differs in shape or dtype.
    """
    expected_descriptions = _array_descriptions(batch)
    for name, opened_set in sets.items():
        descriptions = _array_descriptions(next(iter(opened_set.evaluation())))
        differences = [
            f"{array_name} is {descriptions.get(array_name, 'missing')}, expected "
            f"{expected_descriptions.get(array_name, 'no such array')}"
            for array_name in sorted(expected_descriptions.keys() | descriptions.keys())
            if descriptions.get(array_name) != expected_descriptions.get(array_name)
        ]
        if differences:
            raise UserError(
                f"held_out.{name}: {'; '.join(differences)}: a held-out set has the arrays of the training data"
            )


def _array_descriptions(batch: NumpyBatch) -> dict[str, str]:
    """Return the dtype and shape of each array in a batch as text, without weights, which any batch may have."""
    return {name: f"{array.dtype}{list(array.shape)}" for name, array in batch.items() if name != "weights"}
