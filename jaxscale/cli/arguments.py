"""The parser of the command line. It rejects unknown names (and suggests near ones) and values of a wrong type, before
anything heavy is imported.

A library's parser would need every flag in advance, and fields of the experiment (`--model.embed 256`) are
known only after the experiment's file has been imported, with JAX.
"""

import dataclasses
import typing
from collections.abc import Iterable, Sequence
from typing import Any

from jaxscale import values
from jaxscale.cli.commands import COMMANDS, TAKES_FIELDS
from jaxscale.cli.flags import words_of
from jaxscale.errors import UserError, near_miss, unknown

HELP = ("-h", "--help")
SHORT = {"-o": "--out"}
"""The flag for which each flag of one letter stands."""
NAMED = {"optimizer": "optimizer.name"}
"""The field of the experiment that a flag with the name of the field's group sets: `--optimizer muon`."""


@dataclasses.dataclass(frozen=True)
class Arguments:
    """A checked command line.

    Args:
        command: name of the subcommand; `None` for the help of the whole program.
        values: values of the subcommand's fields, by name.
        fields: fields of the experiment to set, as text by dotted path.
        shows_help: whether to show help.
    """

    command: str | None
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    fields: dict[str, str] = dataclasses.field(default_factory=dict)
    shows_help: bool = False


def read(argv: Sequence[str]) -> Arguments:
    """Parse a command line.

    Raises:
        UserError: an unknown subcommand or flag, a missing or surplus word, a value of the wrong type.

    Example:
        >>> read(["train", "a.py", "--steps", "5", "--model.embed=256"])
        Arguments(command='train', values={'steps': 5, 'file': 'a.py'}, fields={'model.embed': '256'}, shows_help=False)
        >>> read(["train", "a.py", "--optimizer", "muon", "--optimizer.rank", "4"]).fields
        {'optimizer.name': 'muon', 'optimizer.rank': '4'}
        >>> read(["tarin"])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        jaxscale.errors.UserError: unknown subcommand 'tarin': expected one of convert-state, ...; did you mean 'train'?
    """
    if not argv or argv[0] in HELP:
        return Arguments(None, shows_help=True)
    name, *words = argv
    if name not in COMMANDS:
        raise unknown("subcommand", name, COMMANDS)
    flags = typing.get_type_hints(COMMANDS[name])
    for field in words_of(COMMANDS[name]):
        del flags[field.name]
    takes_fields = issubclass(COMMANDS[name], TAKES_FIELDS)
    positionals: list[str] = []
    flag_values: dict[str, Any] = {}
    fields: dict[str, str] = {}
    wants_help = False
    while words:
        word = words.pop(0)
        word = SHORT.get(word, word)
        if word in HELP:
            wants_help = True
        elif word == "--":
            raise UserError("'--' stands alone: expected the name of a flag after it, as in --name value")
        elif not word.startswith("--"):
            if word.startswith("-") and len(word) > 1 and not word[1:].replace(".", "", 1).isdigit():
                raise UserError(f"unknown flag {word!r}{_near_flag(word, flags)}")
            positionals.append(word)
        else:
            flag, separator, text = word[2:].partition("=")
            path = flag.replace("-", "_")
            path = NAMED.get(path, path) if takes_fields else path
            is_field = takes_fields and "." in path
            if path not in flags and not is_field:
                hint = "; fields of the experiment are set by path, such as --model.embed 256" if takes_fields else ""
                raise UserError(f"unknown flag '--{flag}' of {name}{_near_flag('--' + flag, flags)}{hint}")
            if path in flag_values or path in fields:
                raise UserError(f"--{flag} is given twice: give it once")
            if not is_field and flags[path] is bool:
                if separator:
                    raise UserError(f"--{flag} takes no value: write the flag alone, or leave it out")
                flag_values[path] = True
                continue
            if not separator:
                if not words or (words[0].startswith("--") and len(words[0]) > 2):
                    type_text = "" if is_field else f": expected {values.describe(flags[path])}"
                    raise UserError(f"--{flag} lacks its value{type_text}")
                text = words.pop(0)
            if is_field:
                fields[path] = text
            else:
                flag_values[path] = values.parse(text, flags[path], f"--{flag}")
    return Arguments(name, flag_values | _word_values(name, positionals, wants_help), fields, wants_help)


def _word_values(name: str, positionals: Sequence[str], wants_help: bool) -> dict[str, str]:
    """Values of the fields that words set; with `wants_help`, words may be missing."""
    fields = words_of(COMMANDS[name])
    missing = [field.name for field in fields[len(positionals) :] if field.default is dataclasses.MISSING]
    if missing and not wants_help:
        raise UserError(f"{name} lacks its {missing[0].upper()}: {synopsis(name)}")
    if len(positionals) > len(fields) and not wants_help:
        surplus = " ".join(map(repr, positionals[len(fields) :]))
        raise UserError(f"{name} does not take {surplus}: {synopsis(name)}")
    return {field.name: word for field, word in zip(fields, positionals, strict=False)}


def synopsis(name: str) -> str:
    """The usage line of a subcommand.

    Example:
        >>> synopsis("generate")
        'jaxscale generate RUN_DIR [flags]'
    """
    words = [field.metadata["metavar"] for field in words_of(COMMANDS[name])]
    return " ".join(["jaxscale", name, *words, "[flags]"])


def _near_flag(word: str, flags: Iterable[str]) -> str:
    """The nearest flag as a suggestion, or the list of all."""
    flag_names = [f"--{flag.replace('_', '-')}" for flag in flags]
    return near_miss(word, flag_names) or f"; there are {', '.join([*flag_names, '--help'])}"
