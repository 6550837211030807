"""How the command line sets a field of a subcommand: by a word in its place, or by a flag.

A field that is declared with neither function is a flag with the field's type and default.
"""

import dataclasses
from typing import Any


def word(metavar: str, default: Any = dataclasses.MISSING) -> Any:
    """A field that a word in its place sets.

    Args:
        metavar: name of the word in the help.
        default: makes the word optional.
    """
    return dataclasses.field(default=default, metadata={"metavar": metavar, "word": True})


def flag(metavar: str, default_text: str | None = None, default: Any = None) -> Any:
    """A field that a flag sets.

    Args:
        metavar: name of the flag's value in the help.
        default_text: describes the default in the help; `None` shows the default itself.
        default: value of the field without the flag.
    """
    return dataclasses.field(default=default, metadata={"metavar": metavar, "default_text": default_text})


def words_of(command: type) -> list[dataclasses.Field[Any]]:
    """The fields of a subcommand that words set, in their order."""
    return [field for field in dataclasses.fields(command) if "word" in field.metadata]
