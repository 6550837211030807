"""Differences between two JSON values, leaf by leaf."""

import enum
from typing import Any, Final, NamedTuple


class Absent(enum.Enum):
    """Marks a path that a JSON value does not have. The mark differs from every value that JSON can contain."""

    ABSENT = "absent"

    def __str__(self) -> str:
        return self.value


ABSENT: Final = Absent.ABSENT


class Difference(NamedTuple):
    """A dotted path at which two JSON values differ, and the two values.

    Args:
        path: the dotted path.
        first: value at this path in the first JSON value; `ABSENT` if there is none.
        second: value at this path in the second JSON value; `ABSENT` if there is none.
    """

    path: str
    first: Any
    second: Any

    def __str__(self) -> str:
        return f"{self.path} ({self.first} here, {self.second} there)"


def difference(first: Any, second: Any, path: str = "") -> list[Difference]:
    """Return the differences between two JSON values, leaf by leaf.

    Args:
        first: a JSON value.
        second: another JSON value.
        path: dotted path of both values. The paths of the differences begin with it.

    Example:
        >>> [str(change) for change in difference({"model": {"embed": 256}}, {"model": {"embed": 128}})]
        ['model.embed (256 here, 128 there)']
    """
    if isinstance(first, dict) and isinstance(second, dict):
        differences = []
        for name in [*first, *(name for name in second if name not in first)]:
            entry_path = f"{path}.{name}" if path else str(name)
            differences += difference(first.get(name, ABSENT), second.get(name, ABSENT), entry_path)
        return differences
    is_equal = first == second and isinstance(first, bool) == isinstance(second, bool)
    return [] if is_equal else [Difference(path, first, second)]
