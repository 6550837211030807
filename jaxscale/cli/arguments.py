"""The parser of the command line. It rejects unknown names and values of a wrong type before JAX is imported.

A parser from a library would need all flags in advance. But fields of the experiment, as in `--model.embed 256`, are
known only after the experiment's file has been imported, along with JAX. A field of a subcommand is set either by a
flag or by a positional word, which is a word without a flag (`cli.flags`).
"""

import dataclasses
import typing
from collections.abc import Iterable, Sequence
from typing import Any

from jaxscale import values
from jaxscale.cli.commands import COMMANDS, TAKES_FIELDS
from jaxscale.cli.flags import rest_of, words_of
from jaxscale.errors import UserError, near_miss, unknown
from jaxscale.values.read_files import whole_number

HELP = ("-h", "--help")
LONG_FLAG = {"-o": "--out"}
"""The long form of each one-letter flag."""
COMMON_FIELDS = (
    "model.embed", "model.layers", "optimizer.learning_rate", "optimizer.weight_decay", "plan.memory", "plan.mesh",
    "plan.microbatches", "plan.pipeline", "plan.precision", "plan.zero",
)  # fmt: skip
"""Fields that most experiments have. An unknown flag without a path may be a typo of one of these."""
FIELD_OF_FLAG = {"optimizer": "optimizer.name", "from": "from_step"}
"""The field that a flag sets if its name differs: `--optimizer muon` sets `optimizer.name`. (`from` is a keyword.)"""


@dataclasses.dataclass(frozen=True)
class Arguments:
    """A checked command line.

    Args:
        command: name of the subcommand; `None` for the help of the whole program.
        values: values of the subcommand's fields, by name.
        fields: texts of new values for the experiment's fields, by dotted path.
        is_help: whether to show help instead of running the subcommand.
    """

    command: str | None
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    fields: dict[str, str] = dataclasses.field(default_factory=dict)
    is_help: bool = False


def read(argv: Sequence[str]) -> Arguments:
    """Parse the words of a command line.

    Raises:
        UserError: a subcommand or flag is unknown, a word is missing or superfluous, or a value has the wrong type.

    Example:
        >>> read(["train", "a.py", "--steps", "5", "--model.embed=256"])
        Arguments(command='train', values={'steps': 5, 'file': 'a.py'}, fields={'model.embed': '256'}, is_help=False)
        >>> read(["train", "a.py", "--optimizer", "muon", "--optimizer.rank", "4"]).fields
        {'optimizer.name': 'muon', 'optimizer.rank': '4'}
        >>> read(["tarin"])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        jaxscale.errors.UserError: unknown subcommand 'tarin': expected one of check, ...; did you mean 'train'?
    """
    if not argv or argv[0] in HELP:
        return Arguments(None, is_help=True)
    command_name, *remaining_words = argv
    if command_name not in COMMANDS:
        raise unknown("subcommand", command_name, COMMANDS)
    if command_name == "launch" and remaining_words[:1] in (["finetune"], ["train"]):
        raise UserError(_launch_mistake_text(remaining_words))
    flag_types = typing.get_type_hints(COMMANDS[command_name])
    for field in words_of(COMMANDS[command_name]):
        del flag_types[field.name]
    rest_field = rest_of(COMMANDS[command_name])
    if rest_field is not None:
        del flag_types[rest_field.name]
    has_experiment_fields = issubclass(COMMANDS[command_name], TAKES_FIELDS)
    positional_words: list[str] = []
    flag_values: dict[str, Any] = {}
    field_texts: dict[str, str] = {}
    is_help = False
    while remaining_words:
        next_word = remaining_words.pop(0)
        word = LONG_FLAG.get(next_word, next_word)
        if word in HELP:
            is_help = True
        elif word == "--" and rest_field is not None:
            flag_values[rest_field.name] = tuple(remaining_words)
            remaining_words = []
        elif word == "--":
            raise UserError("'--' stands alone: expected the name of a flag, as in --name value")
        elif not word.startswith("--"):
            if word.startswith("-") and len(word) > 1 and whole_number(word[1:].replace(".", "", 1)) is None:
                raise UserError(f"unknown flag {word!r}{_near_flag(word, flag_types)}")
            positional_words.append(word)
        else:
            flag_name, equals_sign, value_text = word[2:].partition("=")
            field_path = flag_name.replace("-", "_")
            field_path = FIELD_OF_FLAG.get(field_path, field_path) if has_experiment_fields else field_path
            is_field = has_experiment_fields and "." in field_path
            if field_path not in flag_types and not is_field:
                hint_text = (
                    "; fields of the experiment are set by path, such as --model.embed 256"
                    if has_experiment_fields
                    else ""
                )
                is_group_name = has_experiment_fields and flag_name in (
                    "plan",
                    "model",
                    "data",
                    "evaluation",
                    "checkpoint",
                    "guard",
                )
                if flag_name == "plan":
                    hint_text = "; fields of the plan are set by path, such as --plan.zero 3"
                common_fields = COMMON_FIELDS if has_experiment_fields else ()
                near_text = "" if is_group_name else _near_flag(f"--{flag_name}", flag_types, common_fields)
                raise UserError(f"unknown flag '--{flag_name}' of {command_name}{near_text}{hint_text}")
            if field_path in flag_values or field_path in field_texts:
                raise UserError(f"--{flag_name} is given twice: give it once")
            if not is_field and flag_types[field_path] is bool:
                if equals_sign:
                    raise UserError(f"--{flag_name} takes no value: write the flag alone, or omit it")
                flag_values[field_path] = True
                continue
            if not equals_sign:
                if not remaining_words or (remaining_words[0].startswith("--") and len(remaining_words[0]) > 2):
                    type_text = "" if is_field else f": expected {values.describe(flag_types[field_path])}"
                    raise UserError(f"--{flag_name} lacks its value{type_text}")
                value_text = remaining_words.pop(0)
            if is_field:
                field_texts[field_path] = value_text
            else:
                flag_values[field_path] = values.parse(value_text, flag_types[field_path], f"--{flag_name}")
    flag_values |= _positional_values(command_name, positional_words, is_help)
    if rest_field is not None and not flag_values.get(rest_field.name):
        if not is_help:
            raise UserError(f"{command_name} lacks the command to run: {synopsis(command_name)}")
        flag_values[rest_field.name] = ()
    return Arguments(command_name, flag_values, field_texts, is_help)


def _positional_values(command_name: str, positional_words: Sequence[str], is_help: bool) -> dict[str, Any]:
    """Return the values that positional words give to fields, by name. With `is_help`, any number of words is valid."""
    fields = words_of(COMMANDS[command_name])
    missing_names = [field.name for field in fields[len(positional_words) :] if field.default is dataclasses.MISSING]
    if missing_names and not is_help:
        raise UserError(f"{command_name} lacks its {missing_names[0].upper()}: {synopsis(command_name)}")
    if fields and "many" in fields[-1].metadata:
        single_count = len(fields) - 1
        value_by_name = dict(zip((field.name for field in fields[:-1]), positional_words, strict=False))
        further_words = tuple(positional_words[single_count:])
        return value_by_name | ({fields[-1].name: further_words} if further_words else {})
    if len(positional_words) > len(fields) and not is_help:
        superfluous_text = " ".join(map(repr, positional_words[len(fields) :]))
        raise UserError(f"{command_name} does not take {superfluous_text}: {synopsis(command_name)}")
    return {field.name: word for field, word in zip(fields, positional_words, strict=False)}


def _launch_mistake_text(words: Sequence[str]) -> str:
    """Return the error message for the mistake `launch train` or `launch finetune`."""
    if words[0] == "train":
        return f"launch runs train by itself: leave the word out, as in jaxscale launch {(*words[1:2], 'FILE')[0]} ..."
    return (
        "launch takes an experiment file, and has no finetune; write a file that defines def experiment(): return "
        "jaxscale.fine_tuning(FOLDER, CHATS, lora=16), with the other settings as arguments, and launch that file"
    )


def synopsis(command_name: str) -> str:
    """Return the usage line of a subcommand.

    Example:
        >>> synopsis("generate")
        'jaxscale generate RUN_DIR [flags]'
    """
    metavars = [field.metadata["metavar"] for field in words_of(COMMANDS[command_name])]
    rest_field = rest_of(COMMANDS[command_name])
    rest_metavars = [] if rest_field is None else [rest_field.metadata["metavar"]]
    return " ".join(["jaxscale", command_name, *metavars, "[flags]", *rest_metavars])


def _near_flag(word: str, field_names: Iterable[str], common_fields: Sequence[str] = ()) -> str:
    """Return text that suggests the flag or common field most similar to a word, or else lists all flags."""
    flag_texts, common_texts = (
        [f"--{field_name.replace('_', '-')}" for field_name in names] for names in (field_names, common_fields)
    )
    return near_miss(word, [*flag_texts, *common_texts]) or f"; there are {', '.join([*flag_texts, '--help'])}"
