"""The command line read once, before anything heavy: every name that is unknown and every value that does not fit is
answered here, with its near miss. What passes is handed to tyro (`usage.py`) for good.
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
"""Fields of the experiment that the name of their group sets: `--optimizer muon`."""


@dataclasses.dataclass(frozen=True)
class Arguments:
    """A checked command line.

    Args:
        command: name of the subcommand; `None` asks for the help of all.
        own: words for the subcommand itself.
        fields: fields of the experiment to set: text by dotted path.
        help: help is asked for.
        early: the subcommand's fields as read here, so that it can check them before tyro is imported.
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
    name, *rest = argv
    if name not in COMMANDS:
        raise unknown("subcommand", name, COMMANDS)
    cls = COMMANDS[name]
    hints = typing.get_type_hints(cls)
    flags = {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.name not in cls.positional}
    takes_fields = getattr(cls, "takes_fields", False)
    own: list[str] = []
    placed: list[str] = []
    early: dict[str, Any] = {}
    fields: dict[str, str] = {}
    asked = False
    words = list(rest)
    while words:
        word = words.pop(0)
        word = SHORT.get(word, word)
        if word in HELP:
            asked = True
        elif word == "--":
            raise UserError("'--' stands alone: give words by place, and flags as --name value")
        elif not word.startswith("--"):
            if word.startswith("-") and len(word) > 1 and not _is_number(word):
                raise UserError(f"unknown flag {word!r}{_near_flag(word, flags)}")
            placed.append(word)
        else:
            flag, equals, text = word[2:].partition("=")
            path = flag.replace("-", "_")
            path = NAMED.get(path, path) if takes_fields else path
            dotted = takes_fields and "." in path
            if path not in flags and not dotted:
                paths = "; fields of the experiment are set by path, such as --model.embed 256" if takes_fields else ""
                raise UserError(f"unknown flag '--{flag}' of {name}{_near_flag('--' + flag, flags)}{paths}")
            if path in early or path in fields:
                raise UserError(f"--{flag} is given twice: give it once")
            if not dotted and flags[path] is bool:
                if equals:
                    raise UserError(f"--{flag} takes no value: give it, or leave it out")
                own.append(f"--{flag}")
                early[path] = True
                continue
            if not equals:
                if not words or (words[0].startswith("--") and len(words[0]) > 2):
                    expected = "" if dotted else f": expected {values.describe(flags[path])}"
                    raise UserError(f"--{flag} lacks its value{expected}")
                text = words.pop(0)
            if dotted:
                fields[path] = text
            else:
                early[path] = values.parse(text, flags[path], f"--{flag}")
                own.append(f"--{flag}={early[path]}")
    if not asked:
        _check_places(name, cls, placed)
    early |= dict(zip(cls.positional, placed, strict=False))
    return Arguments(name, (*placed, *own), fields, asked, early)


def _check_places(name: str, cls: type[Command], placed: Sequence[str]) -> None:
    needed = [
        field.name
        for field in dataclasses.fields(cls)
        if field.name in cls.positional and field.default is dataclasses.MISSING
    ]
    for missing in needed[len(placed) :]:
        raise UserError(f"{name} lacks its {missing.upper()}: {synopsis(name)}")
    if len(placed) > len(cls.positional):
        surplus = " ".join(map(repr, placed[len(cls.positional) :]))
        raise UserError(f"{name} does not take {surplus}: {synopsis(name)}")


def synopsis(name: str) -> str:
    """How a subcommand is called.

    Example:
        >>> synopsis("generate")
        'jaxscale generate RUN_DIR [flags]'
    """
    places = [field.metadata["metavar"] for field in dataclasses.fields(COMMANDS[name]) if "metavar" in field.metadata]
    places = places[: len(COMMANDS[name].positional)]
    return " ".join(["jaxscale", name, *places, "[flags]"])


def _near_flag(word: str, flags: Iterable[str]) -> str:
    known = [f"--{flag.replace('_', '-')}" for flag in flags]
    return near_miss(word, known) or f"; there are {', '.join([*known, '--help'])}"


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
