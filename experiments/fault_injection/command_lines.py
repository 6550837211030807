"""Wild command lines, drawn from the table of the command line.

A draw has up to three flags, up to two wrong values, and sometimes a typing error.
"""

import dataclasses
import functools
import random
import typing
from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin

from fault_injection.command_folder import FILES
from fault_injection.value_pools import FLOATS, NUMBERS, STRINGS, TEXT_FORMS
from fault_injection.wild_values import mutated

from jaxscale.cli.commands import COMMANDS, TAKES_FIELDS
from jaxscale.values.annotations import alternatives

_PATHS = (
    *FILES,
    *(
        "missing.py",
        "folder",
        "folder/exp.py",
        "text.txt",
        "binary.txt",
        "empty.txt",
        "images.npz",
        "/dev/zero",
        "/dev/null",
    ),
    *(
        "run",
        "run/experiment.json",
        "run/checkpoints",
        "empty_run",
        "holds_json",
        "folder.py",
        "loop",
        ".",
        "",
        " ",
        "a\0b",
        "²",
    ),
    *(
        "x" * 300,
        "\ud800",
        "\udcff",
        "~",
        "~nobody/a",
        "gs://a/b",
        "s3://a/b",
        "http://a/b",
        "abc://a",
        "gs://",
        "run/",
        "run/text.txt/a",
    ),
    *("/proc/self/a", "/proc/self/mem", "\x1b[31m", "a\nb", "-", "--"),
)
_OUTS = (
    "out",
    "run",
    "out/a/b",
    "out.html",
    "out.svg",
    "text.txt",
    "text.txt/a",
    "/proc/a",
    "/dev/null",
    "/dev/null/a",
    "folder",
    "empty_run",
    "",
    " ",
    "a\0b",
    "x" * 300,
    "x" * 5000,
    "\ud800",
    "gs://a/b",
    "s3://a",
    "http://a/b",
    "abc://a",
    "²",
    "a\nb",
    "out.png",
    "loop",
    "loop/a",
    "exp.py",
    "missing/out.html",
    "~/out",
    "run/out",
    "folder.html",
)
_PLATFORMS = (*TEXT_FORMS[next(cls for cls in TEXT_FORMS if cls.__name__ == "Platform")], "local", "cpu", "tpu")
_SCHEDULES = (
    *TEXT_FORMS[next(cls for cls in TEXT_FORMS if cls.__name__ == "PipelinePlan")],
    "file:schedule.csv",
    "file:odd.csv",
    "file:/dev/zero",
    "file:folder",
    "1f1b:512x512",
    "zb-v:4x8",
    "1f1b:1x1",
    "gpipe:64x64",
)
RIGHT: dict[str, Sequence[str]] = {
    "file": ("exp.py",),
    "run_dir": ("run", "run", "piped_run", "chat"),
    "others": ("piped_run",),
    "variant": ("piped",),
    "out": ("out", "out.html", "out.svg"),
    "folder": ("out",),
    "pretrained": ("chat",),
    "data": ("chats.jsonl", "chats.jsonl", "text.txt"),
    "eval": ("chats.jsonl",),
    "lora": ("1", "2"),
    "epochs": ("0.1", "1"),
    "context": ("16", "64"),
    "plan_file": ("plan.json",),
    "plan": ("auto",),
    "platform": _PLATFORMS,
    "platforms": ("gpu h100,tpu v5e:2x2", "cpu,cpu x 2"),
    "forbid": ("pipeline", "offload,tensor", "loss_chunk, sequence"),
    "prices": ("plan.json",),
    "save": ("best.json",),
    "lock": ("plan.lock",),
    "verify": ("0",),
    "limit": ("1GiB", "14GiB", "20MB"),
    "host_limit": ("1GiB", "14GiB"),
    "profile": ("1:2",),
    "cluster": ("cluster.py", "local.py", "local:2"),
    "timeouts": ("stepping=120", "stepping=120,data=60"),
    "elastic": ("replica",),
    "picture": ("pipeline",),
    "schedule": _SCHEDULES,
    "compare": ("1f1b:2x4,gpipe:2x4", "1f1b:2x4,1f1b:2x4,1f1b:4x8", "file:schedule.csv,1f1b:2x2"),
    "cost": ("f=1,i=1.2,w=0.8", "f=1,b=2", "link=0.5", "u=3"),
    "experiment": ("exp.py",),
    "devices": ("gpu h100,gpu a100", "cpu,cpu", "gpu h100 x 4,gpu a100"),
    "measured": ("piped_run",),
    "prompt": ("line", "a"),
    "stop": ("a", "\n"),
    "page": ("index", "start/first_run", "pipe"),
    "command": ("true", "false"),
    "name": ("b", "a b"),
    "seed": ("1", "2147483647"),
    "steps": ("1", "2", "3"),
    "from_step": ("1", "2"),
    "init_from": ("run", "piped_run", "run/checkpoints/00000002"),
    "batch": ("8", "4", "16"),
    "ranks": ("1", "2"),
    "log": ("0",),
    "tokens": ("1", "5"),
    "samples": ("1", "2"),
    "top_k": ("1", "300"),
    "updates": ("1", "3"),
    "temperature": ("0", "0.5", "10"),
    "top_p": ("0.5", "1"),
    "min_p": ("0", "0.1"),
    "log_every": ("1", "2"),
}
"""Values of words and flags by name that are right in themselves."""
WRONG: dict[str, Sequence[str]] = {
    "file": _PATHS,
    "run_dir": _PATHS,
    "others": _PATHS,
    "variant": ("pipd", "", "²"),
    "out": _OUTS,
    "folder": _OUTS,
    "pretrained": (*_PATHS, "llama"),
    "data": (*_PATHS, "lines.jsonl"),
    "eval": (*_PATHS, "lines.jsonl"),
    "lora": ("0", "-1", "9999999"),
    "epochs": ("0", "nan", "inf", "1e300"),
    "context": ("0", "-1", "99999999999"),
    "plan_file": _PATHS,
    "plan": ("zero3", "", "Auto"),
    "platforms": (",", "", "gpu h100,", "tpu v5e"),
    "forbid": ("pipelines", ",", "memory,memory", "²", "mesh"),
    "prices": _PATHS,
    "save": _OUTS,
    "lock": _OUTS,
    "verify": ("-1", "²", "x"),
    "limit": ("100B", "0", "-1", "1e400GiB", "GiB", "²GiB", "1GiBGiB", "nan", "inf"),
    "host_limit": ("100B", "0", "-1", "x"),
    "profile": ("2:1", "0:0", ":", "1", "a:b", "1:²", "1:99999999999999999999"),
    "cluster": (*_PATHS, "local:0", "local:²", "local:999999"),
    "timeouts": ("stepping=0", "steping=1", "stepping=", "=", "stepping=nan,data=60", "data=1e999"),
    "elastic": ("data", ""),
    "picture": ("pipelin", "", "memory"),
    "compare": (",", "1f1b:2x4,v=2", "file:/dev/zero"),
    "cost": ("f=0", "f=-1", "f=nan", "x=1", "f", "f=1e308,b=1e308", "f=1e-320", "link=1e9"),
    "experiment": _PATHS,
    "devices": ("gpu h100", ",", "tpu v5e"),
    "measured": _PATHS,
    "init_from": _PATHS,
    "from_step": ("0", "-1", "7", "²", "five", "", "9" * 4000),
    "prompt": ("", "\0", "\ud800", "ä" * 300, "x" * 3000),
    "page": ("zzzz", "", "../README", "²", "\0"),
    "command": ("missing_command", "", "folder", "\0", "x" * 300),
    "name": ("", "..", "a/b", "x" * 300, "\0", "²", "\ud800"),
}
"""Values of words and flags by name that are wrong; each may also get a wild number or text."""


def draw_line(number: int, seed: int) -> tuple[str, list[str]]:
    """Return the subcommand and the words of the line of a number."""
    chance = random.Random(f"{seed}/{number}")
    command = chance.choice(
        [name for name in COMMANDS if name not in ("watch", "retry", "doctor")] * 3 + list(COMMANDS)
    )
    cls = COMMANDS[command]
    hints = typing.get_type_hints(cls)
    fields = dataclasses.fields(cls)
    words = [field for field in fields if "word" in field.metadata]
    words = [field for field in words if field.default is dataclasses.MISSING or chance.random() < 0.4]
    flags = [field for field in fields if not {"word", "rest"} & set(field.metadata)]
    flags = chance.sample(flags, min(len(flags), chance.choice((0, 1, 1, 2, 3))))
    flags += [field for field in fields if field.name in _REQUIRED.get(command, ()) and field not in flags]
    settings: list[Any] = [*words, *flags]
    if command == "draw" and chance.random() < 0.8:
        names = chance.choice(_PICTURES)
        settings = [field for field in fields if field.name in names]
    has_experiment = command != "draw" or any(field.name == "experiment" for field in settings)
    if issubclass(cls, TAKES_FIELDS) and has_experiment:
        settings += ["field"] * chance.choice((0, 1, 1, 2))
    wrong_count = min(len(settings), chance.choice((0, 1, 1, 1, 1, 2) if command in _SLOW else (0, 0, 1, 1, 2)))
    wrong_places = set(chance.sample(range(len(settings)), wrong_count))
    positional, options = [], []
    for place, setting in enumerate(settings):
        is_wrong = place in wrong_places
        is_wrong = is_wrong and (getattr(setting, "name", "") != "picture" or chance.random() < 0.2)
        if setting == "field":
            options += _experiment_field(chance, is_wrong)
        elif "word" in setting.metadata:
            positional.append(_value(setting.name, hints[setting.name], chance, is_wrong))
        else:
            options += _flag(setting.name, hints[setting.name], chance, is_wrong)
    line = [command, *positional, *options] if chance.random() < 0.8 else [command, *options, *positional]
    slip = chance.random()
    if slip < 0.05:
        place = chance.randrange(len(line))
        if line[place] != "--dry-run":
            line[place] = mutated(line[place], chance)
    elif slip < 0.07 and len(line) > 1 and command != "launch":
        del line[chance.randrange(1, len(line))]
    elif slip < 0.1:
        line.append(
            chance.choice(("--help", "-h", "--", "--zzz", "-x", "extra", "--=", "--.", "--model", "--plan", "-1"))
        )
    if command in ("watch", "retry"):  # a retry waits between attempts that fail
        commands = ("true",) if command == "retry" else (*RIGHT["command"], *WRONG["command"])
        line += ["--", chance.choice(commands)]
    return command, line


_PICTURES = (
    ("picture", "schedule"),
    ("picture", "schedule", "cost", "out"),
    ("picture", "compare", "cost", "machine"),
    ("picture", "schedule", "updates"),
    ("picture", "measured", "out"),
    ("picture", "measured", "machine"),
    ("picture", "experiment", "schedule", "platform"),
    ("picture", "experiment", "compare", "platform", "out"),
    ("picture", "experiment", "schedule", "devices"),
    ("picture", "experiment", "variant"),
)
"""Fields of `draw` that go together."""
_SLOW = ("train", "finetune", "plan", "fit", "explain", "generate", "evaluate", "export", "convert-state")
"""Subcommands that take seconds if nothing is wrong."""
_REQUIRED = {"finetune": ("data",), "launch": ("dry_run", "cluster"), "retry": ("out",), "watch": ("out",)}
"""Flags that a line of a subcommand always has; a launch only prints its document."""


def _flag(name: str, hint: Any, chance: random.Random, is_wrong: bool) -> list[str]:
    """Return the words that set a flag."""
    word = "--from" if name == "from_step" else f"--{name.replace('_', '-')}"
    if hint is bool:
        return [f"{word}=1"] if is_wrong and name != "dry_run" else [word]
    value = _value(name, hint, chance, is_wrong)
    return [f"{word}={value}"] if chance.random() < 0.6 else [word, value]


def _value(name: str, hint: Any, chance: random.Random, is_wrong: bool) -> str:
    """Return a right or wrong value of a word or flag."""
    kind = chance.choice([kind for kind in alternatives(hint) if kind is not type(None)])
    if get_origin(kind) is Literal:
        right: Sequence[str] = tuple(map(str, get_args(kind)))
    else:
        right = RIGHT[name]
    if not is_wrong:
        return chance.choice(right)
    wrong = WRONG.get(name, ())
    if wrong and chance.random() < 0.6:
        return chance.choice(wrong)
    return chance.choice(
        (mutated(chance.choice(right), chance), chance.choice(_wild_texts()), _text_of(chance.choice(NUMBERS)))
    )


@functools.cache
def _wild_texts() -> tuple[str, ...]:
    """Return the wild texts of at most 5,000 characters, as a command line may hold them."""
    return tuple(text for text in map(eval, STRINGS) if len(text) <= 5000)


def _text_of(number: str) -> str:
    """Return the text of a number's source."""
    return "9" * 400 if "**" in number and len(number) > 6 else number.replace(" ", "")


def _experiment_field(chance: random.Random, is_wrong: bool) -> list[str]:
    """Return the words that set a field of the experiment."""
    fields = (
        *(
            f"model.{name}"
            for name in ("vocab", "context", "layers", "embed", "heads", "mlp", "norm", "windows", "dropout")
        ),
        *(
            f"optimizer.{name}"
            for name in (
                "name",
                "learning_rate",
                "warmup",
                "clip",
                "rank",
                "freeze",
                "train",
                "ema",
                "moments",
                "groups",
            )
        ),
        *(
            f"plan.{name}"
            for name in ("mesh", "zero", "microbatches", "pipeline", "precision", "matmul", "reduce", "diloco")
        ),
        *(
            f"plan.{name}"
            for name in ("memory", "offload.weights", "offload.optimizer_state", "state.moments", "kernels")
        ),
        *(
            "plan.unroll",
            "plan.compiler",
            "plan.rules.batch",
            "plan.state.master",
            "data.context",
            "data.path",
            "data.tokenizer",
        ),
        *(
            "steps",
            "guard.spike",
            "evaluation.every",
            "samples.prompts",
            "checkpoint.every",
            "checkpoint.keep",
            "data.layout",
        ),
    )
    forms = {cls.__name__: texts for cls, texts in TEXT_FORMS.items()}
    by_field = {
        "plan.mesh": forms["MeshSpec"],
        "plan.pipeline": forms["PipelinePlan"],
        "plan.memory": forms["MemoryPlan"],
    }
    by_field |= {"plan.reduce": forms["NamedCodec"], "plan.diloco": forms["Diloco"], "plan.kernels": forms["Kernels"]}
    by_field |= {
        "plan.compiler": forms["CompilerOptions"],
        "optimizer.name": ("muon", "soap", "lion", "sgd", "adafactor"),
    }
    by_field |= {
        "optimizer.groups": ('{"embed": {"name": "lion"}}', '{"mlp|head": {"learning_rate": 0.1}, "norm": {}}', "{}"),
        "optimizer.moments": ("float32", "plan"),
        "plan.precision": ("bfloat16",),
        "plan.matmul": ("fp8", "int8"),
        "plan.state.moments": ("int8", "int4"),
    }
    by_field |= {"plan.offload.optimizer_state": ("streamed", "host"), "plan.offload.weights": ("host",)}
    by_field |= {
        "data.path": ("text.txt", "missing.txt", "/dev/zero", "*.txt"),
        "data.tokenizer": ("char", "list.json"),
    }
    field = chance.choice(fields)
    value = chance.choice(by_field.get(field, ("1", "2", "4", "8", "0.5", "none", "true")))
    if is_wrong:
        wild_number = _text_of(chance.choice((*NUMBERS, *FLOATS)))
        value = chance.choice(
            (mutated(value, chance), mutated(value, chance), chance.choice(_wild_texts()), wild_number)
        )
        field = field if chance.random() < 0.93 else mutated(field, chance)
    return [f"--{field}={value}"] if chance.random() < 0.6 else [f"--{field}", value]
