"""Checks of the fields of model values, and of the arrays that models read; this file imports neither JAX nor Flax."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxscale.errors import UserError
from jaxscale.values.limits import MAX_OF_FIELD, check_at_most


def check_batch(batch: Mapping[str, Any], array_names: Sequence[str], model_kind: str) -> None:
    """Raise UserError if a batch lacks an array that a model reads.

    Args:
        batch: the arrays of a batch, by name.
        array_names: names of the arrays that the model reads.
        model_kind: kind of the model with its article, such as "a decoder", for the message.

    Example:
        >>> check_batch({"tokens": 0, "targets": 1}, ("tokens", "targets"), "a decoder")
    """
    if not set(array_names) <= set(batch):
        raise UserError(
            f"data: a batch holds {', '.join(sorted(batch)) or 'nothing'}, but {model_kind} reads "
            f"{' and '.join(array_names)}: give the arrays these names, or train a model that reads yours"
        )


def check_counts(model: Any, field_names: Iterable[str]) -> None:
    """Raise UserError if one of these fields is less than 1 or above its bound. `None` is allowed."""
    for name in field_names:
        count = getattr(model, name)
        if count is not None and count < 1:
            raise UserError(f"{name}: got {count!r}, expected a whole number >= 1")
        if count is not None and name in MAX_OF_FIELD:
            check_at_most(name, count, MAX_OF_FIELD[name])


def check_positive(model: Any, field_names: Iterable[str], prefix: str = "") -> None:
    """Raise UserError if one of these fields is not a finite number above 0. `None` is allowed.

    Args:
        model: the model value.
        field_names: names of the fields to check.
        prefix: text to put before the field's name in the error message.
    """
    for name in field_names:
        field_value = getattr(model, name)
        if field_value is not None and not (field_value > 0 and math.isfinite(field_value)):
            raise UserError(f"{prefix}{name}: got {field_value!r}, expected a number > 0")


def check_rates(model: Any, field_names: Iterable[str]) -> None:
    """Raise UserError if one of these fields is outside [0, 1)."""
    for name in field_names:
        rate = getattr(model, name)
        if not 0 <= rate < 1:
            raise UserError(f"{name}: got {rate!r}, expected a rate of at least 0 and less than 1")
