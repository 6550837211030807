"""The help at every level: it shows every flag and default, and fits into 80 columns."""

import dataclasses
from pathlib import Path

import pytest

from jaxscale.cli import main
from jaxscale.cli.commands import COMMANDS
from jaxscale.cli.usage import field_help
from jaxscale.records.source import load_file
from jaxscale.values import override, spell


def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(words) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    return text


def test_the_whole(capsys, monkeypatch):
    text = shown(capsys, monkeypatch, "--help")
    assert text == shown(capsys, monkeypatch)
    for name in COMMANDS:
        assert f"\n  {name} " in text


@pytest.mark.parametrize("name", COMMANDS)
def test_a_subcommand_shows_every_field_with_its_help(name, capsys, monkeypatch):
    text = shown(capsys, monkeypatch, name, "--help")
    told = field_help(COMMANDS[name])
    for field in dataclasses.fields(COMMANDS[name]):
        word = (
            field.metadata["metavar"] if {"word", "rest"} & set(field.metadata) else f"--{field.name.replace('_', '-')}"
        )
        assert word in text
        assert told[field.name].split()[0] in text
    assert "{None" not in text


def test_an_experiment_shows_its_fields_and_their_defaults(toy: Path, capsys, monkeypatch):
    text = shown(capsys, monkeypatch, "train", str(toy), "--help")
    for words in (
        "--model.embed INT",
        "width. (default: 8)",
        "--model.kind {plain,fancy}",
        "--plan.zero {0,1,2,3}",
        "--plan.mesh MeshSpec|none",
        "--steps INT",
        "(default: 3)",
        "wide  Twice as wide.",
        "A toy model.",
    ):
        assert words in text
    text = shown(capsys, monkeypatch, "train", str(toy), "wide", "--help", "--model.kind", "fancy")
    assert "width. (default: 16)" in text
    assert "(default: fancy)" in text


def test_a_field_of_several_types_has_a_placeholder_for_each(capsys, monkeypatch):
    text = shown(capsys, monkeypatch, "train", "experiments/shakespeare.py", "--help")
    assert "--data.path PATH|PATH,..." in text
    assert "UnionType" not in text


def test_what_the_help_spells_sets_the_same(toy: Path):
    experiment, _ = load_file(toy)
    for path, value in {"plan.mesh": experiment.plan.mesh, "plan.rules.seq": ("sequence", "tensor")}.items():
        again = override(experiment, {path: spell(value)})
        found = again
        for part in path.split("."):
            found = getattr(found, part)
        assert found == value
    assert override(experiment, {"plan.rules.batch": spell(())}).plan.rules.batch == ()
