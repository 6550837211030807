"""Paths at which no run directory can be: one sentence and exit code 2, before anything is traced."""

import pytest

from jaxscale.cli.main import main
from jaxscale.errors import UserError
from jaxscale.models.decoder import Decoder
from jaxscale.models.huggingface import save

EXPERIMENT = """
from jaxscale import Experiment
from jaxscale.data import Text
from jaxscale.models import Decoder


def experiment():
    return Experiment("tiny", Decoder(vocab=256, context=16, layers=1, embed=16, heads=2), Text("text.txt", context=16))
"""
LOCATIONS = [
    ("", "got the path '', expected the path of a folder"),
    ("  ", "got the path '  '"),
    ("http://host/run", "got the scheme 'http', expected a local path, gs:// or s3://"),
    ("gc://bucket/run", "got the scheme 'gc'"),
    ("gs://bucket/run", "a package is missing (Please install gcsfs to access Google Storage): pip install"),
    ("s3://bucket/run", "a package is missing (Install s3fs to access S3): pip install 'jaxscale[remote]'"),
    ("file.txt", "file.txt is a file, expected a folder"),
    ("file.txt/runs/a", "file.txt is a file, expected a folder"),
    ("a/" + "n" * 300, "a name in the path has 300 bytes, expected at most 255"),
    ("é" * 128, "a name in the path has 256 bytes"),
    ("a\0b", "got the path 'a\\x00b', expected the path of a folder"),
    ("\ud800", "got the path '\\ud800', which has a character that no file name can have"),
]
COMMANDS = ["train", "generate", "evaluate", "report", "export"]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("location", "message"), LOCATIONS)
def test_a_path_at_which_no_run_can_be_is_one_sentence(tmp_path, monkeypatch, capsys, command, location, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").write_text("text")
    (tmp_path / "text.txt").write_text("a text of some words " * 100)
    (tmp_path / "e.py").write_text(EXPERIMENT)
    words = {"train": ["e.py", "--out", location], "export": [location, "folder"]}.get(command, [location])
    assert main([command, *words]) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert output.err.count("\n") == 1
    assert not output.out


def test_a_model_is_not_exported_to_what_is_no_folder(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    for name, message in [
        ("loop", "is not a folder"),
        ("file", "is not a folder"),
        ("file/a", "cannot be created: Not a"),
    ]:
        with pytest.raises(UserError, match=f"{name} {message}"):
            save(tmp_path / name, Decoder(vocab=256, context=16, layers=1, embed=16, heads=2), {})


IMPOSSIBLE = [*LOCATIONS[:4], *LOCATIONS[6:9]]
"""Locations for which the commands of launched runs have the same sentences as the others."""


@pytest.mark.parametrize("command", ["launch", "watch", "retry", "status", "stop"])
@pytest.mark.parametrize(("location", "message"), IMPOSSIBLE)
def test_no_launched_run_can_be_there_either(tmp_path, monkeypatch, capsys, command, location, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").write_text("text")
    (tmp_path / "text.txt").write_text("a text of some words " * 100)
    (tmp_path / "e.py").write_text(EXPERIMENT)
    words = {"launch": ["e.py", "--cluster", "local:2", "--out", location]}.get(
        command, ["--out", location, "--", "true"]
    )
    words = [location] if command in ("status", "stop") else words
    assert main([command, *words]) == 2
    error = capsys.readouterr().err
    assert message in error or (command, location) == ("retry", "")
    assert error.count("\n") == 1


ODD_NAMES = ["n" * 300, "a\0b", "\ud800"]
"""Names that no file can have: the operating system raises other errors for them than for a missing file."""


@pytest.mark.parametrize("name", ODD_NAMES)
@pytest.mark.parametrize(
    "words",
    [
        ["status", "NAME"],
        ["stop", "NAME"],
        ["watch", "--out", "NAME", "--", "true"],
        ["watch", "--", "NAME"],
        ["retry", "--out", "NAME", "--", "true"],
        ["export", "run", "NAME"],
        ["convert-state", "NAME"],
        ["train", "NAME"],
        ["train", "e.py", "--plan-file", "NAME"],
        ["launch", "e.py", "--dry-run", "--cluster", "NAME"],
        ["explain", "e.py", "--out", "NAME.html"],
        ["draw", "pipeline", "1f1b:2x2", "--out", "NAME.svg"],
        ["draw", "pipeline", "1f1b:2x2", "--out", "NAME/a.svg"],
        ["draw", "pipeline", "--measured", "NAME"],
        ["docs", "NAME"],
    ],
    ids=" ".join,
)
def test_a_name_that_no_file_can_have_is_one_sentence(tmp_path, monkeypatch, capsys, words, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "e.py").write_text(EXPERIMENT)
    (tmp_path / "text.txt").write_text("a text of some words " * 100)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "experiment.json").write_text("{}")
    assert main([word.replace("NAME", name) for word in words]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("jaxscale: ")
    assert errors.count("\n") == 1
