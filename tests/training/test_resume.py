"""What may have changed since a run was last started: allowed and said, or no change at all, or refused by name."""

import json
import math
from pathlib import Path

import optax
import pytest

from jaxscale.data.images import Images
from jaxscale.data.text import Mixture, Text
from jaxscale.errors import UserError
from jaxscale.models.huggingface import Pretrained
from jaxscale.optim.optimizer import Optimizer
from jaxscale.recipe.experiment import Guard
from jaxscale.records.metrics import read_metrics
from jaxscale.records.source import Source, load_file
from jaxscale.training.loop import train
from jaxscale.training.resume import EarlierRun
from jaxscale.training.run import Run
from jaxscale.values import changes, to_json


def resumed(run):
    return [row for row in read_metrics(run, "event") if row["name"] == "resume"][-1]


@pytest.mark.slow
def test_other_steps_say_where_the_learning_rate_goes(toy, tmp_path, capsys):
    slow = toy(optimizer=Optimizer(learning_rate=1e-3, final_learning_rate=1e-4, warmup=2, schedule="cosine"))
    train(slow, steps=6, out=tmp_path / "run", quiet=True)
    train(slow, steps=10, out=tmp_path / "run")
    # step 7 is update number 6: 4 of the 8 updates after the warm-up, by the definition of the cosine schedule
    new = 1e-4 + (1e-3 - 1e-4) * (1 + math.cos(math.pi * 4 / 8)) / 2
    event = resumed(tmp_path / "run")
    assert (event["step"], event["old_steps"], event["steps"]) == (6, 6, 10)
    assert event["old_learning_rate"] == pytest.approx(1e-4, rel=1e-5)
    assert event["learning_rate"] == pytest.approx(new, rel=1e-5)
    assert (
        "steps were 6 and are 10: the learning rate of step 7 changes from 0.0001 to 0.00055\n"
        in capsys.readouterr().out
    )
    rows = read_metrics(tmp_path / "run", "train")
    assert rows[6]["learning_rate"] == pytest.approx(new, rel=1e-5), "and there it goes"


def test_a_constant_rate_stays(toy):
    constant = toy(optimizer=Optimizer(learning_rate=0.01, schedule="constant"))
    ((line, _),) = EarlierRun(steps=7, sha256=None).change_lines_and_fields(constant, None, 7)
    assert line == "steps were 7 and are 12: the learning rate of step 8 stays at 0.01"


def test_the_same_steps_say_nothing(toy):
    assert (
        list(
            EarlierRun(steps=12, sha256="a").change_lines_and_fields(toy(), Source("toy", text="b", path="/toy.py"), 7)
        )
        == []
    )


FILE = """
import dataclasses
from jaxscale import Experiment
from jaxscale.optim.optimizer import Optimizer

@dataclasses.dataclass(frozen=True)
class Net:
    embed: int = 8
    def build(self, rngs, *, vocab_multiple=1): ...
    def loss(self, module, batch, context): return 1
    def logical_sizes(self): return {}

def experiment():
    return Experiment(name="n", model=Net(), data=None)

def elsewhere():
    import coded_elsewhere
    return Experiment(name="n", model=coded_elsewhere.Net(), data=None)

def with_lambda():
    import coded_elsewhere
    made = coded_elsewhere.Net()
    return Experiment(name="n", model=made, data=None, optimizer=Optimizer(custom=lambda rate: rate))

VARIANTS = {"elsewhere": elsewhere, "with_lambda": with_lambda}
"""


@pytest.mark.parametrize(("variant", "holds_code"), [(None, True), ("elsewhere", False), ("with_lambda", True)])
def test_an_edited_file_is_said_where_the_experiment_holds_code(tmp_path, monkeypatch, variant, holds_code):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "net.py"
    (tmp_path / "coded_elsewhere.py").write_text(FILE)
    file.write_text(FILE)
    experiment, source = load_file(file, variant)
    earlier = EarlierRun(experiment.steps, source.sha256)
    assert list(earlier.change_lines_and_fields(experiment, source, 5)) == []
    file.write_text(FILE.replace("return 1", "return 2"))
    experiment, edited = load_file(file, variant)
    lines_and_fields = list(earlier.change_lines_and_fields(experiment, edited, 5))
    assert len(lines_and_fields) == holds_code
    for line, fields in lines_and_fields:
        assert f"{file} has changed since this run was last started" in line
        assert fields == {"old_sha256": source.sha256, "sha256": edited.sha256}


@pytest.mark.slow
def test_a_run_goes_on_with_edited_code_and_logs_it(toy, tmp_path, capsys):
    custom = toy(optimizer=Optimizer(custom=lambda rate: optax.sgd(rate), schedule="constant"))
    sources = [Source("toy", text=text, path=str(tmp_path / "toy.py")) for text in ("first", "second")]
    train(custom, steps=2, out=tmp_path / "run", source=sources[0], quiet=True)
    train(custom, steps=3, out=tmp_path / "run", source=sources[1])
    assert "toy.py has changed since this run was last started" in capsys.readouterr().out
    event = resumed(tmp_path / "run")
    assert (event["old_sha256"], event["sha256"]) == tuple(source.sha256 for source in sources)
    assert event["old_steps"] == 2
    assert Source.read(tmp_path / "run").text == "second"


LATER = ("guard", "guard.patience", "model.windows", "optimizer.eps", "data.prompt_end", "seed")


@pytest.mark.parametrize("field", LATER)
def test_an_experiment_from_before_a_field_existed_is_the_same(toy, whole, field):
    file = whole / "experiment.json"
    *parents, name = field.split(".")
    data = json.loads(file.read_text())
    inner = data
    for parent in parents:
        inner = inner[parent]
    del inner[name]
    file.write_text(json.dumps(data))
    assert EarlierRun.read(whole, toy()) is not None
    if field == "guard.patience":
        with pytest.raises(UserError, match=r"another experiment: guard\.patience \(3 here, 20 there\)"):
            EarlierRun.read(whole, toy(guard=Guard(patience=3)))


def test_moved_files_are_the_same_and_others_are_not(toy, whole, tmp_path):
    before = (whole / "experiment.json").read_bytes()
    text = Path(toy().data.path).read_text()
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "here.txt").write_text(text)
    (tmp_path / "moved" / "other.txt").write_text(text.replace("cat", "dog"))
    moved, other = (Text(tmp_path / "moved" / name, context=16) for name in ("here.txt", "other.txt"))
    with pytest.raises(UserError, match="the data has changed since this run was last started"):
        train(toy(data=other, steps=13), out=whole, quiet=True)
    assert (whole / "experiment.json").read_bytes() == before, "a refusal leaves the run as it was"
    train(toy(data=moved, steps=13), out=whole, quiet=True)
    assert Run.open(whole).experiment.data.path == moved.path
    assert Run.open(whole).step == 13
    with pytest.raises(UserError, match=r"another experiment: data\.tokenizer \(char here, byte there\)"):
        train(toy(data=Text(moved.path, tokenizer="char", context=16)), out=whole, quiet=True)


GOLDEN = Path(__file__).parents[1] / "golden" / "gpt2"


def test_which_fields_are_places(tmp_path):
    for name in ("a/gpt2", "b/gpt2", "b/other"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_bytes((GOLDEN / "config.json").read_bytes())
    first, moved, other = (Pretrained(str(tmp_path / name)) for name in ("a/gpt2", "b/gpt2", "b/other"))
    assert changes(moved, to_json(first)) == []
    assert [found.path for found in changes(other, to_json(first))] == ["folder"], "no hash tells the weights"
    assert changes(Images(tmp_path / "a.npz"), to_json(Images("b.npz"))) == []
    mixed = [Mixture((Text(f"{at}/a.txt"), Text((f"{at}/b.txt", f"{at}/c.txt"))), (1.0, 2.0)) for at in "xy"]
    assert changes(mixed[0], to_json(mixed[1])) == []
