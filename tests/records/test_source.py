"""An experiment made again from its run directory is the experiment that ran, wherever things have moved since."""

import dataclasses
import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest

from jaxscale import values
from jaxscale.errors import UserError
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import PLAN_VERSION, Plan
from jaxscale.records.moved_modules import MOVED
from jaxscale.records.outline import outline
from jaxscale.records.source import Source, load_experiment, load_file, trust_run, versions

FILE = '''
"""Reads its text beside itself, and a neighbour."""
import dataclasses
from pathlib import Path

import neighbour_of_source_test
from jaxscale.recipe.experiment import Experiment

TEXT = (Path(__file__).parent / "text.txt").read_text()


@dataclasses.dataclass(frozen=True)
class Net:
    embed: int = 8
    text: str = ""

    def build(self, rngs, *, vocab_multiple=1): ...
    def loss(self, module, batch, context): ...
    def logical_sizes(self): return {}


def experiment():
    return Experiment(name="n", model=Net(neighbour_of_source_test.EMBED, TEXT), data=None)


def small():
    return dataclasses.replace(experiment(), model=Net(2, TEXT))


VARIANTS = {"small": small}
'''


@dataclasses.dataclass(frozen=True)
class Plain:
    embed: int = 8
    function: object = None

    def build(self, rngs, *, vocab_multiple=1): ...

    def loss(self, module, batch, context): ...

    def logical_sizes(self):
        return {}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    here = tmp_path / "repository"
    (here / "experiments").mkdir(parents=True)
    (here / "experiments" / "text.txt").write_text("a text")
    (here / "experiments" / "neighbour_of_source_test.py").write_text("EMBED = 32\n")
    (here / "experiments" / "net.py").write_text(FILE)
    monkeypatch.chdir(here)
    monkeypatch.delitem(sys.modules, "neighbour_of_source_test", raising=False)
    return Path("experiments/net.py")


def run_of(experiment: Experiment, source: Source, folder: str = "runs/n") -> Path:
    """A run directory as the loop leaves it, with the record that its file is trusted."""
    run = Path(folder)
    run.mkdir(parents=True)
    source.write(run)
    (run / "experiment.json").write_text(json.dumps(values.to_json(experiment)))
    (run / "plan.json").write_text(json.dumps({"version": PLAN_VERSION, **values.to_json(experiment.plan)}))
    return run


def test_load(file: Path):
    path = list(sys.path)
    experiment, source = load_file(file, "small", {"steps": "5", "plan.microbatches": "2"}, Plan(zero=1))
    assert sys.path == path
    assert (experiment.model.embed, experiment.model.text, experiment.steps) == (2, "a text", 5)
    assert experiment.plan == Plan(zero=1, microbatches=2)
    assert source.path == str(file.absolute())
    assert source.relative == "experiments/net.py"
    assert source.versions == versions()
    assert {"python", "jax", "flax", "optax", "jaxscale"} == set(versions())


def test_an_experiment_may_be_a_value(tmp_path: Path):
    (tmp_path / "value.py").write_text(
        "from jaxscale import Experiment\nfrom jaxscale.models import Decoder\n"
        "experiment = Experiment('value', Decoder(vocab=8, context=4, layers=1, embed=8, heads=1), None)\n"
    )
    assert load_file(tmp_path / "value.py")[0].name == "value"


def test_source_round_trip(file: Path):
    experiment, source = load_file(file, "small", {"steps": "5"}, Plan(zero=1))
    run = run_of(experiment, source)
    assert Source.read(run) == source
    assert (run / "source" / "net.py").read_bytes() == file.read_bytes()
    facts = json.loads((run / "source" / "source.json").read_text())
    assert facts["sha256"] == source.sha256
    assert len(facts["sha256"]) == 64


@pytest.mark.parametrize("variant", [None, "small"])
def test_rebuilt_is_what_ran(file: Path, variant):
    experiment, source = load_file(file, variant, {"steps": "5", "plan.kernels": "loss_chunk=4"}, Plan(zero=1))
    run = run_of(experiment, source)
    file.write_text("raise RuntimeError('the file has changed since')")
    assert values.to_json(load_experiment(run)) == values.to_json(experiment)


def test_the_plan_that_ran_wins(file: Path):
    experiment, source = load_file(file)
    run = run_of(dataclasses.replace(experiment, plan=Plan(microbatches=3)), source)
    assert load_experiment(run).plan == Plan(microbatches=3)


def test_the_file_of_an_earlier_run_may_set_fields_that_have_moved(tmp_path: Path):
    path = tmp_path / "earlier.py"
    plan = 'plan=Plan(zero=1, state="int8", loss_chunk=4)'
    text = FILE.replace("import neighbour_of_source_test\n", "").replace("neighbour_of_source_test.EMBED", "16")
    text = text.replace("import Experiment\n", "import Experiment\nfrom jaxscale.recipe.plan import Plan\n", 1)
    path.write_text(text.replace("data=None)", "data=None, plan=Plan(zero=1))", 1))
    (tmp_path / "text.txt").write_text("x")
    experiment, source = load_file(path)
    old = path.read_text().replace("plan=Plan(zero=1)", plan)
    assert old != path.read_text()
    run = run_of(experiment, dataclasses.replace(source, text=old), str(tmp_path / "run"))
    assert load_experiment(run).plan == Plan(zero=1)
    path.write_text(old)
    with pytest.raises(UserError, match=r"has moved: set plan\.state"):
        load_file(path)


def test_the_file_of_an_earlier_run_may_import_modules_that_have_moved(tmp_path: Path, monkeypatch):
    path = tmp_path / "earlier.py"
    text = FILE.replace("import neighbour_of_source_test\n", "").replace("neighbour_of_source_test.EMBED", "16")
    path.write_text(text)
    (tmp_path / "text.txt").write_text("x")
    experiment, source = load_file(path)
    old = text.replace("jaxscale.recipe.experiment", "jaxscale.step.experiment")
    assert old != text
    path.write_text(old)
    with pytest.raises(UserError, match=r"line 6: jaxscale\.step\.experiment has moved: import jaxscale\.recipe\."):
        load_file(path)
    run = run_of(experiment, dataclasses.replace(source, text=old), str(tmp_path / "run"))
    monkeypatch.setitem(sys.modules, "jaxscale.step.experiment", None)
    assert values.to_json(load_experiment(run)) == values.to_json(experiment)


@pytest.mark.parametrize(("earlier", "now"), MOVED.items())
def test_moved_modules_are_where_the_table_has_them(earlier: str, now: str):
    assert importlib.util.find_spec(now) is not None
    assert not (Path(*earlier.split(".")).with_suffix(".py")).exists()


def test_a_repository_moved_with_its_run(file: Path, tmp_path: Path, monkeypatch):
    experiment, source = load_file(file)
    run_of(experiment, source)
    monkeypatch.chdir(tmp_path)
    shutil.move(tmp_path / "repository", tmp_path / "elsewhere")
    (tmp_path / "elsewhere/experiments/text.txt").write_text("moved text")
    with pytest.raises(UserError, match="was not trained here by you"):  # other modules lie beside the file now
        load_experiment("elsewhere/runs/n")
    trust_run("elsewhere/runs/n")
    assert load_experiment("elsewhere/runs/n").model.text == "moved text"


def test_a_run_moved_away_from_its_data_says_so(file: Path, tmp_path: Path, monkeypatch):
    experiment, source = load_file(file)
    shutil.move(run_of(experiment, source), tmp_path / "alone")
    monkeypatch.chdir(tmp_path)
    shutil.rmtree(tmp_path / "repository")
    with pytest.raises(UserError) as error:
        load_experiment(tmp_path / "alone")
    assert "net.py, line 9: importing the file raised FileNotFoundError" in str(error.value)
    assert "repository/experiments/net.py, which is no longer there" in str(error.value)


def test_a_run_that_needs_nothing_beside_its_file_only_warns(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a").mkdir()
    text = FILE.replace("import neighbour_of_source_test\n", "").replace("neighbour_of_source_test.EMBED", "4")
    Path("a/net.py").write_text(text.replace('(Path(__file__).parent / "text.txt").read_text()', '""'))
    experiment, source = load_file("a/net.py")
    run = run_of(experiment, source)
    shutil.rmtree("a")
    with pytest.warns(UserWarning, match=r"a/net\.py, which is no longer there"):
        assert values.to_json(load_experiment(run)) == values.to_json(experiment)


def test_a_changed_copy_is_refused(file: Path):
    experiment, source = load_file(file)
    run = run_of(experiment, source)
    copy = run / "source" / "net.py"
    copy.write_text(copy.read_text() + "\n")
    with pytest.raises(UserError, match=r"net\.py was changed since the run"):
        load_experiment(run)
    copy.unlink()
    with pytest.raises(UserError, match=r"net\.py is missing"):
        load_experiment(run)


def test_from_python_plain_values_come_back(tmp_path: Path):
    experiment = Experiment(name="p", model=Plain(4), data=None, plan=Plan(zero=1))
    source = Source(name="p", seed=experiment.seed)
    run = run_of(experiment, source, str(tmp_path / "run"))
    assert Source.read(run) == source
    assert load_experiment(run) == experiment
    shutil.rmtree(run / "source")
    assert load_experiment(run) == experiment


def test_from_python_code_does_not_come_back(tmp_path: Path):
    experiment = Experiment(name="p", model=Plain(4, function=len), data=None)
    run = run_of(experiment, Source(name="p"), str(tmp_path / "run"))
    with pytest.raises(UserError, match=r"holds code, which cannot be restored from experiment\.json"):
        load_experiment(run)


def test_no_run(tmp_path: Path):
    with pytest.raises(UserError, match="there is no file"):
        load_experiment(tmp_path)


def test_outline_reads_without_running(tmp_path: Path):
    file = tmp_path / "a.py"
    file.write_text(
        '"""Sums up.\n\nMore."""\nraise RuntimeError\nexperiment = b = 1\ndef f():\n    """One."""\nVARIANTS = {"f": f}'
    )
    seen = outline(file)
    assert (seen.summary, seen.variants) == ("Sums up.", {"f": "One."})
    file.write_text("from other import experiment\nVARIANTS = make()")
    assert outline(file, "anything").variants is None
    file.write_text("experiment: int = 3\nVARIANTS = {**others}")
    assert outline(file).variants is None
    file.write_text("def experiment(): ...")
    with pytest.raises(UserError, match="no variant 'x': it has no VARIANTS; omit the name"):
        outline(file, "x")
