"""Nothing in a run directory is executed or imported unless this user trained with it, or trusts it."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from jaxscale import values
from jaxscale.cli.main import main
from jaxscale.errors import UserError
from jaxscale.recipe.experiment import Experiment
from jaxscale.records import trusted_sources
from jaxscale.records.source import Source, load_experiment, load_file, trust_run
from jaxscale.records.trusted_sources import VARIABLE, check_trust, is_below, record_trust
from jaxscale.training.run import Run

FILE = """
from pathlib import Path
import beside_the_file
from jaxscale import Experiment
from jaxscale.models import Decoder

Path(MARK).touch()
experiment = Experiment("mine", Decoder(vocab=8, context=4, layers=1, embed=8, heads=1), None)
"""
COMMANDS = (("generate",), ("evaluate",), ("export", "exported"), ("convert-state", "--to", "int8"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the user's, without records in this process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(trusted_sources, "_recorded_names", set())
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache" / "jaxscale" / "trusted"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stranger's run, whose file touches `mark`, and so does the module beside it."""
    (tmp_path / "theirs").mkdir()
    mark = tmp_path / "mark"
    (tmp_path / "theirs/file.py").write_text(FILE.replace("MARK", repr(str(mark))))
    (tmp_path / "theirs/beside_the_file.py").write_text(f"open({str(mark)!r}, 'w')\n")
    experiment, source = load_file("theirs/file.py")
    folder = tmp_path / "runs" / "theirs"
    source.write(folder)
    (folder / "experiment.json").write_text(json.dumps(values.to_json(experiment)))
    for trace in (mark, tmp_path / "cache"):
        shutil.rmtree(trace) if trace.is_dir() else trace.unlink()
    trusted_sources._recorded_names.clear()
    monkeypatch.delitem(sys.modules, "beside_the_file")
    return folder


def forget() -> None:
    """Go on as another process of this user would, with the records in files alone."""
    trusted_sources._recorded_names.clear()


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_a_command_names_what_it_would_execute(run, words, tmp_path, capsys):
    assert main([words[0], str(run), *words[1:]]) == 2
    out = capsys.readouterr().err
    assert f"would execute {str(run / 'source' / 'file.py')!r}" in " ".join(out.split())
    assert "--trust" in out
    assert not (tmp_path / "mark").exists()
    assert not (tmp_path / "cache").exists()


def test_measurements_and_reports_execute_nothing(run, tmp_path):
    assert Run.open(run).metrics == []
    assert main(["report", str(run)]) in (0, 2)
    assert not (tmp_path / "mark").exists()


def test_trust_is_recorded(run, tmp_path, cache):
    with pytest.raises(UserError, match="was not trained here by you"):
        _ = Run.open(run).experiment
    assert main(["evaluate", str(run), "--trust"]) == 2  # the stranger's run has no checkpoint
    assert (tmp_path / "mark").exists()
    forget()
    assert Run.open(run).experiment.name == "mine"
    (record,) = cache.iterdir()
    assert json.loads(record.read_text())["folder"] == str(tmp_path / "theirs")
    record.unlink()
    with pytest.raises(UserError, match="was not trained here by you"):
        load_experiment(run)
    assert Run.open(run, trust=True).experiment.name == "mine"


def test_training_trusts_the_file(run):
    load_file("theirs/file.py")[1].write(run)
    forget()
    assert load_experiment(run).name == "mine"


def test_another_text_is_another_file(run, tmp_path):
    trust_run(run)
    load_experiment(run)
    text = (run / "source/file.py").read_text() + "Path('second').touch()\n"
    source = Source.read(run)
    Source(**{**source.__dict__, "text": text, "path": str(tmp_path / "elsewhere/file.py")}).write(tmp_path / "forged")
    forged = json.loads((tmp_path / "forged/source/source.json").read_text())
    (run / "source/file.py").write_text(text)
    (run / "source/source.json").write_text(json.dumps({**forged, "path": source.path}))
    forget()
    with pytest.raises(UserError, match="was not trained here by you"):
        load_experiment(run)
    assert not Path("second").exists()


def test_the_same_text_beside_other_modules_is_not_trusted(run, tmp_path, monkeypatch):
    trust_run(run)
    unpacked = tmp_path / "unpacked"
    shutil.move(tmp_path / "theirs", unpacked / "theirs")
    shutil.move(run, unpacked / "runs" / "theirs")
    monkeypatch.chdir(unpacked)
    with pytest.raises(UserError, match="was not trained here by you"):
        load_experiment("runs/theirs")
    assert not (tmp_path / "mark").exists()


def test_the_variable_trusts_a_folder_of_runs(run, tmp_path, monkeypatch):
    for folder in (tmp_path / "run", f"{run}s", "1", "", "gs://bucket"):
        monkeypatch.setenv(VARIABLE, str(folder))
        with pytest.raises(UserError, match=VARIABLE):
            load_experiment(run)
    (tmp_path / "trusted").mkdir()
    (tmp_path / "trusted/link").symlink_to(run)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "trusted"))
    with pytest.raises(UserError, match=VARIABLE):  # the link leads out of the folder
        load_experiment(tmp_path / "trusted/link")
    for folder in (run, "runs", f"{tmp_path}/runs/"):
        monkeypatch.setenv(VARIABLE, str(folder))
        assert load_experiment(run).name == "mine"


@pytest.mark.parametrize(
    ("path", "folder", "expected"),
    [
        ("gs://b/runs/a", "gs://b/runs", True),
        ("gs://b/runs/a/", "gs://b/runs/a", True),
        ("gs://b/runs-of-others/a", "gs://b/runs", False),
        ("gs://b/runs/../a", "gs://b/runs", False),
        ("runs/a", "gs://b/runs", False),
        ("runs/a", "/", True),
        ("runs/a", "\0", False),
    ],
)
def test_is_below(path, folder, expected):
    assert is_below(path, folder) is expected


def test_records_that_others_could_write_are_not_read(cache):
    here = Path("file.py").absolute()
    record_trust("a" * 64, here)
    forget()
    check_trust("a" * 64, here, "run", "copy")
    for path in (cache, *cache.iterdir()):
        mode = path.stat().st_mode
        path.chmod(mode | 0o020)
        with pytest.raises(UserError, match="was not trained"):
            check_trust("a" * 64, here, "run", "copy")
        path.chmod(mode)
    check_trust("a" * 64, here, "run", "copy")


def test_without_a_place_for_records_trust_holds_in_the_process(run, monkeypatch):
    Path("file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", os.path.abspath("file"))
    assert Run.open(run, trust=True).experiment.name == "mine"
    forget()
    with pytest.raises(UserError, match="was not trained"):
        load_experiment(run)


@pytest.mark.parametrize("file", ["../experiment.json", "/etc/passwd", "..", "", "a/b.py", 3, ["file.py"]])
def test_the_copy_lies_in_the_folder_of_the_source(run, file):
    path = run / "source/source.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "file": file}))
    with pytest.raises(UserError, match=r"source\.json: file: got .*, expected the name of a file"):
        load_experiment(run)


@pytest.mark.parametrize("mask", [0o002, 0o022, 0o077])
def test_a_record_is_the_users_own_under_any_umask(cache, mask):
    earlier_mask = os.umask(mask)
    try:
        record_trust("a" * 64, Path("file.py").absolute())
    finally:
        os.umask(earlier_mask)
    forget()
    check_trust("a" * 64, Path("file.py").absolute(), "run", "copy")


def test_a_relative_cache_is_not_read(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")  # an unpacked archive could bring one
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    record_trust("a" * 64, Path("file.py").absolute())
    assert (tmp_path / "home/.cache/jaxscale/trusted").is_dir()
    assert not (tmp_path / "cache").exists()


def test_the_refusal_names_the_file_that_would_be_executed(run):
    path = run / "source/source.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, "path": str(Path(facts["path"]).with_name("benign.py"))}))
    with pytest.raises(UserError, match=r"file: got 'file\.py', expected 'benign\.py', the name in path"):
        load_experiment(run)
    path.write_text(json.dumps({**facts, "path": "/nowhere\njaxscale: all is well/file.py"}))
    with pytest.raises(UserError) as error:
        load_experiment(run)
    assert len(str(error.value).splitlines()) == 1


def test_types_of_installed_packages_are_refused(tmp_path, monkeypatch):
    import etils.epy.lazy_imports_utils as lazy_imports

    (tmp_path / "payload_of_a_type.py").write_text("open('mark', 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    record = {"type": "etils.epy.lazy_imports_utils:LazyModule", "module_name": "payload_of_a_type"}
    record |= dict.fromkeys(("adhoc_kwargs", "error_callback", "success_callback"))
    model = {"type": "models.Decoder", "vocab": 8, "context": 4, "layers": 1, "embed": 8, "heads": 1}
    held = f"{__name__}:lazy_imports.LazyModule"  # a module of the user's that holds the other one
    monkeypatch.setitem(globals(), "lazy_imports", lazy_imports)
    for name in (record["type"], held, "jaxscale.launch.cluster:Cluster", "argparse:Namespace"):
        with pytest.raises(UserError, match=r"data\.type: got"):
            values.from_json(Experiment, {"name": "a", "model": model, "data": {**record, "type": name}})
    assert not (tmp_path / "mark").exists()


def test_types_import_nothing(tmp_path, monkeypatch):
    (tmp_path / "imported_by_a_type.py").write_text(
        "import dataclasses\nopen('mark', 'w')\n@dataclasses.dataclass(frozen=True)\nclass Net: pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lazy_for_a_type.py").write_text("def __getattr__(name):\n    open('mark', 'w')\n")
    import lazy_for_a_type  # pyright: ignore[reportMissingImports]

    for name in ("imported_by_a_type:Net", "lazy_for_a_type:Net", "os:path", "os", ":", "a:", ":a"):
        with pytest.raises(UserError, match=r"model\.type: got"):
            values.from_json(Experiment, {"name": "a", "model": {"type": name}, "data": None})
    assert "imported_by_a_type" not in sys.modules
    assert not (tmp_path / "mark").exists()
    assert lazy_for_a_type.anything is None  # a plain `getattr` leaves the mark
    assert (tmp_path / "mark").exists()
