"""Faults that are planted in five readers, to show that the fuzzer finds such faults in a bounded number of runs."""

import contextlib
import dataclasses
import json
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class PlantedFault:
    """A fault in a reader.

    Args:
        target: name of the target that reads with it.
        error: regular expression of the start of the error that shows it.
        plant: puts it into this process.
    """

    target: str
    error: str
    plant: Callable[[], None]


def _plant_negative_shapes() -> None:
    """Leave out that sizes are not negative: two negative dims have a positive product."""
    from jaxscale.models import safetensors_folder

    safetensors_folder._are_counts = lambda numbers: isinstance(numbers, list) and all(type(n) is int for n in numbers)


def _plant_no_bound() -> None:
    """Leave out the bound of the number of layers, for each of which a list has an entry."""
    from jaxscale.models import huggingface_config

    huggingface_config.MAX_LAYERS = 2**63


def _plant_unicode_digits() -> None:
    """Take every digit of Unicode for a digit: `int` raises an error for superscripts."""
    from jaxscale.training import traced_actions

    traced_actions.whole_number = lambda text: int(text) if text.isdigit() else None


def _plant_unguarded_key() -> None:
    """Read the map of an index without a look whether it is there."""
    from jaxscale.models import safetensors_folder

    read_index = safetensors_folder._read_index

    def read(index: Any) -> dict[str, str]:
        with contextlib.suppress(ValueError, RecursionError):
            values = json.loads(index.read_bytes())
            if isinstance(values, dict):
                _ = values["weight_map"]
        return read_index(index)

    safetensors_folder._read_index = read


def _plant_recursion() -> None:
    """Parse JSON of any depth."""
    from jaxscale.errors import UserError
    from jaxscale.values import as_json

    def parse(text: Any, place: str) -> Any:
        try:
            return json.loads(text)
        except ValueError as error:
            raise UserError(f"{place}: {error}") from None

    as_json.parse_json = parse


PLANTED = {
    "negative shape": PlantedFault("safetensors", "ValueError at safetensors_folder.py", _plant_negative_shapes),
    "no bound": PlantedFault("config.json", "out-of-memory|timeout", _plant_no_bound),
    "unicode digit": PlantedFault("actions.json", "ValueError at traced_actions.py", _plant_unicode_digits),
    "unguarded key": PlantedFault("safetensors index", "KeyError at safetensors_folder.py", _plant_unguarded_key),
    "deep recursion": PlantedFault("plan.json", "RecursionError at as_json.py", _plant_recursion),
}
"""The planted faults by name."""
