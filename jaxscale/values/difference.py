"""Differences between two JSON values, leaf by leaf."""

import enum
from typing import Any, Final, NamedTuple


class Absent(enum.Enum):
    """Marks a path that a JSON value lacks; no string of a user can be mistaken for it."""

    ABSENT = "absent"

    def __str__(self) -> str:
        return self.value


ABSENT: Final = Absent.ABSENT


class Difference(NamedTuple):
    """One dotted path at which two JSON values differ.

    Args:
        path: the dotted path.
        here: value at this path in the first JSON value; `ABSENT` if there is none.
        there: value at this path in the second JSON value; `ABSENT` if there is none.
    """

    path: str
    here: Any
    there: Any

    def __str__(self) -> str:
        return f"{self.path} ({self.here} here, {self.there} there)"


def difference(here: Any, there: Any, path: str = "") -> list[Difference]:
    """Differences between two JSON values, leaf by leaf; `path` is put in front of their paths.

    Example:
        >>> [str(change) for change in difference({"model": {"embed": 256}}, {"model": {"embed": 128}})]
        ['model.embed (256 here, 128 there)']
    """
    if isinstance(here, dict) and isinstance(there, dict):
        differences = []
        for name in [*here, *(name for name in there if name not in here)]:
            entry_path = f"{path}.{name}" if path else str(name)
            differences += difference(here.get(name, ABSENT), there.get(name, ABSENT), entry_path)
        return differences
    is_equal = here == there and isinstance(here, bool) == isinstance(there, bool)
    return [] if is_equal else [Difference(path, here, there)]
