"""A first reading of the command line, before heavy imports: it refuses unknown names and values that do not fit, with
the near miss. A valid command line goes to tyro (`usage.py`).
"""

import dataclasses
import typing
from collections.abc import Iterable, Sequence
from typing import Any

from jaxscale import values
from jaxscale.cli.commands import COMMANDS, Command
from jaxscale.errors import UserError, near_miss, unknown

HELP = ("-h", "--help")
SHORT = {"-o": "--out"}
"""Flags of one letter."""
NAMED = {"optimizer": "optimizer.name"}
"""Fields of the experiment that a flag of their group's name sets: `--optimizer muon`."""


@dataclasses.dataclass(frozen=True)
class Arguments:
    """A checked command line.

    Args:
        command: name of the subcommand; `None` for the help of the whole program.
        own: words for the subcommand itself.
        fields: fields of the experiment to set: text by dotted path.
        help: show help.
        early: the subcommand's fields, for its checks before tyro is imported.
    """

    command: str | None
    own: tuple[str, ...] = ()
    fields: dict[str, str] = dataclasses.field(default_factory=dict)
    help: bool = False
    early: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)


def read(argv: Sequence[str]) -> Arguments:
    """Check a command line.

    Raises:
        UserError: an unknown subcommand or flag, a missing or surplus word, a value of the wrong type.

    Example:
        >>> read(["train", "a.py", "--steps", "5", "--model.embed=256"])
        Arguments(command='train', own=('a.py', '--steps=5'), fields={'model.embed': '256'}, help=False)
        >>> read(["train", "a.py", "--optimizer", "muon", "--optimizer.rank", "4"]).fields
        {'optimizer.name': 'muon', 'optimizer.rank': '4'}
        >>> read(["tarin"])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        jaxscale.errors.UserError: unknown subcommand 'tarin': expected one of convert-state, ...; did you mean 'train'?
    """
    if not argv or argv[0] in HELP:
        return Arguments(None, help=True)
    name, *words = argv
    if name not in COMMANDS:
        raise unknown("subcommand", name, COMMANDS)
    cls = COMMANDS[name]
    hints = typing.get_type_hints(cls)
    flags = {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.name not in cls.positional}
    takes_fields = getattr(cls, "takes_fields", False)
    options: list[str] = []
    positionals: list[str] = []
    early: dict[str, Any] = {}
    fields: dict[str, str] = {}
    wants_help = False
    while words:
        word = words.pop(0)
        word = SHORT.get(word, word)
        if word in HELP:
            wants_help = True
        elif word == "--":
            raise UserError("'--' stands alone: give words by place, and flags as --name value")
        elif not word.startswith("--"):
            if word.startswith("-") and len(word) > 1 and not _is_number(word):
                raise UserError(f"unknown flag {word!r}{_near_flag(word, flags)}")
            positionals.append(word)
        else:
            flag, equals, text = word[2:].partition("=")
            path = flag.replace("-", "_")
            path = NAMED.get(path, path) if takes_fields else path
            is_field = takes_fields and "." in path
            if path not in flags and not is_field:
                paths = "; fields of the experiment are set by path, such as --model.embed 256" if takes_fields else ""
                raise UserError(f"unknown flag '--{flag}' of {name}{_near_flag('--' + flag, flags)}{paths}")
            if path in early or path in fields:
                raise UserError(f"--{flag} is given twice: give it once")
            if not is_field and flags[path] is bool:
                if equals:
                    raise UserError(f"--{flag} takes no value: give it, or leave it out")
                options.append(f"--{flag}")
                early[path] = True
                continue
            if not equals:
                if not words or (words[0].startswith("--") and len(words[0]) > 2):
                    type_text = "" if is_field else f": expected {values.describe(flags[path])}"
                    raise UserError(f"--{flag} lacks its value{type_text}")
                text = words.pop(0)
            if is_field:
                fields[path] = text
            else:
                early[path] = values.parse(text, flags[path], f"--{flag}")
                options.append(f"--{flag}={early[path]}")
    if not wants_help:
        _check_positionals(name, cls, positionals)
    early |= dict(zip(cls.positional, positionals, strict=False))
    return Arguments(name, (*positionals, *options), fields, wants_help, early)


def _check_positionals(name: str, cls: type[Command], positionals: Sequence[str]) -> None:
    required = [
        field.name
        for field in dataclasses.fields(cls)
        if field.name in cls.positional and field.default is dataclasses.MISSING
    ]
    for missing in required[len(positionals) :]:
        raise UserError(f"{name} lacks its {missing.upper()}: {synopsis(name)}")
    if len(positionals) > len(cls.positional):
        surplus = " ".join(map(repr, positionals[len(cls.positional) :]))
        raise UserError(f"{name} does not take {surplus}: {synopsis(name)}")


def synopsis(name: str) -> str:
    """The usage line of a subcommand.

    Example:
        >>> synopsis("generate")
        'jaxscale generate RUN_DIR [flags]'
    """
    words = [field.metadata["metavar"] for field in dataclasses.fields(COMMANDS[name]) if "metavar" in field.metadata]
    words = words[: len(COMMANDS[name].positional)]
    return " ".join(["jaxscale", name, *words, "[flags]"])


def _near_flag(word: str, flags: Iterable[str]) -> str:
    flag_names = [f"--{flag.replace('_', '-')}" for flag in flags]
    return near_miss(word, flag_names) or f"; there are {', '.join([*flag_names, '--help'])}"


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
