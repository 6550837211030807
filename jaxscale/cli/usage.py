"""Print the help. The library tyro generates it from the subcommands' dataclasses and their docstrings.

`train FILE --help` lists the subcommand's flags and also the fields of the experiment, each with its type and default.
For these fields, tyro reads a dataclass whose defaults are the values in the file.
"""

import collections.abc
import dataclasses
import types
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
    lines += [f"  {name:{width}}  {_first_line(command_class)}" for name, command_class in COMMANDS.items()]
    lines += ["", "  jaxscale COMMAND --help shows a command's flags and their defaults.", "", "First steps:"]
    lines += ["  jaxscale train shakespeare --steps 200"]
    lines += ['  jaxscale generate runs/shakespeare --prompt "ROMEO:"']
    print("\n".join(lines))


def show(command_name: str, experiment: Any = None, variants: dict[str, str] | None = None) -> None:
    """Print the help of a subcommand, and exit.

    Args:
        command_name: name of the subcommand.
        experiment: experiment whose fields are listed, too, with their values as defaults; `None` for no experiment.
        variants: description of each variant in the experiment's file, by the variant's name.
    """
    help_class = _help_class(COMMANDS[command_name], experiment)
    if variants:
        width = max(map(len, variants))
        lines = [f"  {variant:{width}}  {description}".rstrip() for variant, description in variants.items()]
        print("\n".join(["", "variants of this file:", *lines]))
    # tyro prints the help, and raises SystemExit with the code 0
    tyro.cli(help_class, prog=f"jaxscale {command_name}", args=["--help"], config=(tyro.conf.FlagCreatePairsOff,))


def _first_line(cls: type) -> str:
    """Return the first line of a class's docstring."""
    return (cls.__doc__ or "").partition("\n")[0]


def _help_class(command_class: type[Command], experiment: Any) -> type[Any]:
    """Return a dataclass from which tyro prints a subcommand's help. Its annotations contain the help of the fields."""
    type_by_field, description_by_field = typing.get_type_hints(command_class), field_help(command_class)
    experiment_types = values.field_types(type(experiment))
    field_specs: list[Any] = []
    for field in dataclasses.fields(command_class):
        if field.name in experiment_types:
            continue
        is_rest = "rest" in field.metadata
        is_word, default_text = is_rest or "word" in field.metadata, field.metadata.get("default_text")
        note_text = (
            "(optional)" if is_word and field.default in (None, ()) else default_text and f"(default: {default_text})"
        )
        metavar = field.metadata.get("metavar")
        argument = tyro.conf.arg(help=description_by_field[field.name], metavar=metavar, help_behavior_hint=note_text)
        field_type = Annotated[str if is_rest else type_by_field[field.name], argument]
        field_type = tyro.conf.Positional[field_type] if is_word else field_type
        field_specs.append((field.name, field_type, dataclasses.field(default=field.default)))
    if experiment is not None:
        field_specs += _experiment_field_specs(experiment)
    help_class = dataclasses.make_dataclass(command_class.__name__, field_specs, frozen=True)
    help_class.__doc__ = (command_class.__doc__ or "").partition("\n\n    Args:")[0]
    return help_class


def _experiment_field_specs(record: Any) -> list[Any]:
    """Return fields for `make_dataclass`, as triples (name, type, default).

    If a field of `record` holds a dataclass value, its type is a nested dataclass. The type of any other field is
    `str`, annotated with the field's help.
    """
    description_by_field, field_specs = field_help(type(record)), []
    for name, field_type in values.field_types(type(record)).items():
        value, description = getattr(record, name), description_by_field.get(name, "")
        if values.is_record(value):
            nested_specs = _experiment_field_specs(value)
            nested_class = dataclasses.make_dataclass(type(value).__name__, nested_specs, frozen=True)
            nested_class.__doc__ = _help_text(_first_line(type(value)) or description)
            field_specs.append((name, nested_class, dataclasses.field(default_factory=nested_class)))
        elif not _is_code(field_type):
            default_text = getattr(value, "__qualname__", "code") if callable(value) else values.spell(value)
            metavar, note_text = _metavar(field_type), f"(default: {default_text})"
            argument = tyro.conf.arg(metavar=metavar, help=_help_text(description), help_behavior_hint=note_text)
            field_specs.append((name, Annotated[str, argument], dataclasses.field(default=default_text)))
    return field_specs


def _is_code(hint: Any) -> bool:
    """Return whether a type hint allows only classes or functions. Only an experiment file can set such a field."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    member_types = (
        [member_type for member_type in typing.get_args(hint) if member_type is not type(None)] if is_union else [hint]
    )
    return all(
        any(
            (typing.get_origin(type_part) or type_part) in (type, collections.abc.Callable)
            for type_part in (member_type, *typing.get_args(member_type))
        )
        for member_type in member_types
    )


def _help_text(text: str) -> str:
    """Return a docstring's text as help, without backquotes; "`None`" becomes "none", as on the command line."""
    return text.replace("`None`", "none").replace("`", "")


def _metavar(hint: Any) -> str:
    """Return the placeholder for a field's value in the help, given its type hint: a type in capitals, or literals."""
    if typing.get_origin(hint) is typing.Literal:
        return "{" + ",".join(map(str, typing.get_args(hint))) + "}"
    member_types = [member for member in typing.get_args(hint) if member is not type(None) and not _is_code(member)]
    origin = typing.get_origin(hint) or hint
    if origin in (typing.Union, types.UnionType):
        if Path in member_types and str in member_types:
            member_types.remove(str)  # on the command line, paths are also texts
        return "|".join([*map(_metavar, member_types), *["none"] * (type(None) in typing.get_args(hint))])
    if origin in (tuple, list):
        return f"{_metavar(member_types[0])},..." if member_types else "LIST"
    if origin in (dict, collections.abc.Mapping):
        return "JSON"
    metavar_by_type = {int: "INT", float: "FLOAT", str: "TEXT", bool: "true|false", Any: "VALUE", Path: "PATH"}
    return metavar_by_type.get(origin, getattr(origin, "__name__", "VALUE"))


def field_help(cls: type) -> dict[str, str]:
    """Return the description of each field from the "Args:" section of a class's docstring, by the field's name.

    Example:
        >>> from jaxscale.sharding.mesh import MeshSpec
        >>> field_help(MeshSpec)["pipe"]
        'pipeline stages.'
    """
    arguments = [argument for base in cls.__mro__ for argument in docstring_parser.parse(base.__doc__ or "").params]
    return {argument.arg_name: " ".join((argument.description or "").split()) for argument in reversed(arguments)}
