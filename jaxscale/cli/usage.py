"""The help, which tyro lays out from the subcommands' dataclasses and their docstrings.

For `train FILE --help` the experiment's fields join the subcommand's flags: as dataclasses with the file's values as
defaults, each leaf shown with its type and its default.
"""

import collections.abc
import dataclasses
import typing
from pathlib import Path
from typing import Annotated, Any

import docstring_parser
import tyro

from jaxscale import values
from jaxscale.cli.commands import COMMANDS, Command


def show_all() -> None:
    """Print the help of the whole program."""
    width = max(map(len, COMMANDS))
    lines = ["usage: jaxscale COMMAND ...", "", "Train models on JAX: your model, your platform, every technique.", ""]
    lines += [f"  {name:{width}}  {_summary(cls)}" for name, cls in COMMANDS.items()]
    lines += ["", "  jaxscale COMMAND --help shows a command's flags and their defaults.", "", "First steps:"]
    lines += ["  jaxscale train experiments/shakespeare.py --steps 200"]
    lines += ['  jaxscale generate runs/shakespeare --prompt "ROMEO:"']
    print("\n".join(lines))


def show(name: str, experiment: Any = None, variants: dict[str, str] | None = None) -> None:
    """Print the help of a subcommand, and with an experiment the help of the experiment's fields too."""
    typed_class = _tyro_class(COMMANDS[name], experiment)
    if variants:
        width = max(map(len, variants))
        lines = [f"  {variant:{width}}  {summary}".rstrip() for variant, summary in variants.items()]
        print("\n".join(["", "variants of this file:", *lines]))
    # does not return: tyro prints the help and exits with 0
    tyro.cli(typed_class, prog=f"jaxscale {name}", args=["--help"], config=(tyro.conf.FlagCreatePairsOff,))


def _summary(cls: type) -> str:
    """The first line of a class's docstring."""
    return (cls.__doc__ or "").partition("\n")[0]


def _tyro_class(cls: type[Command], experiment: Any) -> type[Any]:
    """A dataclass from which tyro prints a subcommand's help: its annotations have the names of values and the help."""
    hints, descriptions = typing.get_type_hints(cls), field_help(cls)
    experiment_types = values.field_types(type(experiment))
    fields: list[Any] = []
    for field in dataclasses.fields(cls):
        if field.name in experiment_types:
            continue
        is_word, note = "word" in field.metadata, field.metadata.get("default_text")
        note = "(optional)" if is_word and field.default is None else note and f"(default: {note})"
        argument = tyro.conf.arg(
            help=descriptions[field.name], metavar=field.metadata.get("metavar"), help_behavior_hint=note
        )
        hint = Annotated[hints[field.name], argument]
        hint = tyro.conf.Positional[hint] if is_word else hint
        fields.append((field.name, hint, dataclasses.field(default=field.default)))
    if experiment is not None:
        fields += _fields(experiment)
    typed_class = dataclasses.make_dataclass(cls.__name__, fields, frozen=True)
    typed_class.__doc__ = (cls.__doc__ or "").partition("\n\n    Args:")[0]
    return typed_class


def _fields(record: Any) -> list[Any]:
    """Fields for `make_dataclass`: text for each plain field of a record, a nested dataclass for each record in it."""
    descriptions, fields = field_help(type(record)), []
    for name, hint in values.field_types(type(record)).items():
        value, description = getattr(record, name), descriptions.get(name, "")
        if values.is_record(value):
            nested = dataclasses.make_dataclass(type(value).__name__, _fields(value), frozen=True)
            nested.__doc__ = _plain(_summary(type(value)) or description)
            fields.append((name, nested, dataclasses.field(default_factory=nested)))
        elif not _is_code(hint):
            text = values.spell(value)
            argument = tyro.conf.arg(
                metavar=_metavar(hint), help=_plain(description), help_behavior_hint=f"(default: {text})"
            )
            fields.append((name, Annotated[str, argument], dataclasses.field(default=text)))
    return fields


def _is_code(hint: Any) -> bool:
    """Whether only an experiment file can set a field of this type, because it holds a class or a function."""
    members = (hint, *typing.get_args(hint))
    return any((typing.get_origin(member) or member) in (type, collections.abc.Callable) for member in members)


def _plain(text: str) -> str:
    """A docstring's text as help: `None` is spelled none on the command line."""
    return text.replace("`None`", "none").replace("`", "")


def _metavar(hint: Any) -> str:
    """The type of a field in capitals, or its literals, as a placeholder for the value in the help."""
    if typing.get_origin(hint) is typing.Literal:
        return "{" + ",".join(map(str, typing.get_args(hint))) + "}"
    members = [member for member in typing.get_args(hint) if member is not type(None)]
    if type(None) in typing.get_args(hint):
        return "|".join([*map(_metavar, members), "none"])
    origin = typing.get_origin(hint) or hint
    if origin in (tuple, list):
        return f"{_metavar(members[0])},..." if members else "LIST"
    names = {int: "INT", float: "FLOAT", str: "TEXT", bool: "true|false", Any: "VALUE", Path: "PATH"}
    return names.get(origin, getattr(origin, "__name__", "VALUE"))


def field_help(cls: type) -> dict[str, str]:
    """The description of each field in the "Args:" of a class's docstring.

    Example:
        >>> from jaxscale.sharding.mesh import MeshSpec
        >>> field_help(MeshSpec)["pipe"]
        'pipeline stages.'
    """
    params = docstring_parser.parse(cls.__doc__ or "").params
    return {param.arg_name: " ".join((param.description or "").split()) for param in params}
