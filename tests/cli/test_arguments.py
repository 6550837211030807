"""Every mistake that the words alone show, and what is read from right ones."""

import contextlib
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxscale.cli.arguments import Arguments, read, synopsis
from jaxscale.cli.commands import COMMANDS, Train
from jaxscale.cli.experiment_commands import experiment_flags
from jaxscale.cli.flags import rest_of, words_of
from jaxscale.errors import UserError
from jaxscale.recipe.experiment import Experiment


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("tarin a.py", "unknown subcommand 'tarin'"),
        ("tarin a.py", "did you mean 'train'?"),
        ("--steps 3", "unknown subcommand '--steps'"),
        (
            "fit a.py --plan zero3",
            "unknown flag '--plan' of fit; fields of the plan are set by path, such as --plan.zero",
        ),
        ("launch finetune FOLDER --data a.jsonl", "launch takes an experiment file, and has no finetune; write a file"),
        (
            "launch train a.py --cluster local:2",
            "launch runs train by itself: leave the word out, as in jaxscale launch",
        ),
        ("train a.py --lgo-every 3", "unknown flag '--lgo-every' of train; did you mean '--log-every'?"),
        ("train a.py --zzz", "unknown flag '--zzz' of train; there are --out, --plan, --plan-file"),
        ("train a.py -s 3", "unknown flag '-s'"),
        ("fit a.py -o b", "unknown flag '--out' of fit"),
        ("train a.py --resume nevr", "--resume: got 'nevr', expected auto or never; did you mean 'never'?"),
        ("train a.py --steps many", "--steps: got 'many', expected a whole number, or none"),
        ("train a.py --steps 1.5", "--steps: got '1.5', expected a whole number"),
        ("train a.py --steps", "--steps lacks its value: expected a whole number"),
        ("train a.py --steps --out b", "--steps lacks its value"),
        ("train a.py --model.embed", "--model.embed lacks its value"),
        ("train a.py --steps 3 --steps 4", "--steps is given twice"),
        ("train a.py --model.embed 3 --model.embed=4", "--model.embed is given twice"),
        ("train", "train lacks its FILE: jaxscale train FILE [VARIANT] [flags]"),
        ("train a.py tiny more", "train does not take 'more'"),
        ("generate runs/x -5", "generate does not take '-5'"),
        ("train a.py -- b", "'--' stands alone"),
        ("generate", "generate lacks its RUN_DIR"),
        ("generate runs/a --prmopt x", "did you mean '--prompt'?"),
        ("generate runs/a --model.embed 3", "unknown flag '--model.embed' of generate"),
        ("generate runs/a --temperature hot", "--temperature: got 'hot', expected a number"),
        ("generate runs/a --tokens 1e400", "--tokens: got '1e400', expected a whole number"),
        ("evaluate runs/a --best=yes", "--best takes no value"),
        ("export runs/a", "export lacks its FOLDER: jaxscale export RUN_DIR DIR [flags]"),
        ("export runs/a b --dtype float", "did you mean 'float32'?"),
        ("doctor who", "doctor does not take 'who'"),
    ],
)
def test_mistakes(words, message):
    with pytest.raises(UserError) as error:
        read(words.split())
    assert message in str(error.value)


def test_right_words():
    assert read([]) == read(["--help"]) == Arguments(None, is_help=True)
    assert read(["train", "--help"]) == Arguments("train", is_help=True)
    assert read(["train", "a.py", "tiny", "--log_every=2", "--plan.loss-chunk", "-1"]) == Arguments(
        "train", {"file": "a.py", "variant": "tiny", "log_every": 2}, {"plan.loss_chunk": "-1"}
    )
    assert read(["explain", "a.py", "-o", "memory.html"]) == read(["explain", "a.py", "--out", "memory.html"])
    assert read(["generate", "r", "--prompt", "-", "--best"]).values == {"run_dir": "r", "prompt": "-", "best": True}


def test_every_plain_field_of_an_experiment_is_a_flag_of_train():
    """Else `--FIELD` would be called unknown before the experiment is there to ask."""
    plain = {field.name for field in dataclasses.fields(Experiment) if field.type in (int, str, float, bool)}
    assert plain == set(experiment_flags(Train))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("train a.py", {"file": "a.py"}),
        (
            "train a.py tiny --out=b --resume never --log-every 1e1 --steps 3 --plan-file p.json --profile 1:2",
            {
                "file": "a.py",
                "variant": "tiny",
                "out": "b",
                "resume": "never",
                "log_every": 10,
                "steps": 3,
                "plan_file": "p.json",
                "profile": "1:2",
            },
        ),
        (
            "generate r --prompt -x --tokens 3 --temperature 1 --seed -1 --best",
            {"run_dir": "r", "prompt": "-x", "tokens": 3, "temperature": 1.0, "seed": -1, "best": True},
        ),
        ("generate r --prompt=none", {"run_dir": "r", "prompt": "none"}),
        ("train a.py --steps none", {"file": "a.py", "steps": None}),
        ("evaluate r --best", {"run_dir": "r", "best": True}),
        ("export r d --dtype bfloat16", {"run_dir": "r", "folder": "d", "dtype": "bfloat16"}),
        ("doctor", {}),
    ],
)
def test_values_are_of_their_fields_types(words, expected):
    arguments = read(words.split())
    assert arguments.values == expected
    assert arguments.command is not None
    command = COMMANDS[arguments.command](**arguments.values)
    for field in dataclasses.fields(command):
        assert getattr(command, field.name) == expected.get(field.name, field.default)
    for name, value in expected.items():
        assert type(arguments.values[name]) is type(value)


@pytest.mark.parametrize("name", COMMANDS)
def test_synopsis_names_every_place(name):
    rest_words = 0 if rest_of(COMMANDS[name]) is None else 2  # "-- CMD"
    assert len(synopsis(name).split()) == 3 + len(words_of(COMMANDS[name])) + rest_words


@given(
    st.lists(st.sampled_from([*COMMANDS, "--steps", "3", "--help", "--", "-", "", "--=", "--x.y", "a=b"]) | st.text())
)
def test_any_words_are_read_or_refused(words):
    with contextlib.suppress(UserError):
        assert isinstance(read(words), Arguments)
