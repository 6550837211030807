"""Declare how the command line sets a field of a subcommand: by a positional word, or by a flag.

If a field is declared without these functions, a flag sets it, with the field's type and default.
"""

import dataclasses
from typing import Any


def word(metavar: str, default: Any = dataclasses.MISSING) -> Any:
    """Declare a field that a positional word sets, and return the dataclass field.

    Args:
        metavar: placeholder for the word in the help.
        default: value of the field if the word is omitted; without a default, the word is required.
    """
    return dataclasses.field(default=default, metadata={"metavar": metavar, "word": True})


def words(metavar: str) -> Any:
    """Declare a field that all further positional words set, as a tuple, and return the dataclass field.

    Args:
        metavar: placeholder for the words in the help.
    """
    return dataclasses.field(default=(), metadata={"metavar": metavar, "word": True, "many": True})


def flag(metavar: str, default_text: str | None = None, default: Any = None) -> Any:
    """Declare a field that a flag sets, and return the dataclass field.

    Args:
        metavar: placeholder for the flag's value in the help.
        default_text: description of the default in the help; with `None`, the help shows the default itself.
        default: value of the field if the flag is omitted.
    """
    return dataclasses.field(default=default, metadata={"metavar": metavar, "default_text": default_text})


def rest(metavar: str) -> Any:
    """Declare a field that all words after "--" set, and return the dataclass field.

    Args:
        metavar: placeholder of the words in the help.
    """
    return dataclasses.field(metadata={"metavar": f"-- {metavar}", "rest": True})


def rest_of(command: type) -> dataclasses.Field[Any] | None:
    """Return the field of a subcommand that the words after "--" set; `None` if the subcommand has no such field."""
    return next((field for field in dataclasses.fields(command) if "rest" in field.metadata), None)


def words_of(command: type) -> list[dataclasses.Field[Any]]:
    """Return the fields of a subcommand that positional words set, in the order of the words."""
    return [field for field in dataclasses.fields(command) if "word" in field.metadata]
