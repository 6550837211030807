"""A warm start: what is taken, what is not, on other meshes and plans, and what is refused."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from jaxscale.checkpoint.export import export
from jaxscale.checkpoint.init_from import Beginning, Match, WarmStart, read_record
from jaxscale.checkpoint.restore import restore_parameters
from jaxscale.checkpoint.store import Checkpoints
from jaxscale.errors import UserError
from jaxscale.models.lora import LoRA
from jaxscale.models.resnet import ResNet
from jaxscale.optim.optimizer import Optimizer
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.state.ema import with_average
from jaxscale.step.build import build
from jaxscale.training.loop import train
from tests.plans import plan_of
from tests.tiers import variants

pytestmark = pytest.mark.usefixtures("shared_steps")


def weights_of(run, *, average=True):
    """Parameters of a run's newest checkpoint, by name."""
    trained = restore_parameters(run)
    state = with_average(trained.state) if average else trained.state
    arrays = trained.step.to_canonical(state)
    return {name: np.array(array) for name, array in arrays.items() if name.startswith("params/")}


def started(experiment, path, **plan):
    """Parameters of the initial state of a run that starts from a path, by name."""
    step = build(experiment, plan_of(**plan))
    start = WarmStart.of(step, path)
    state = step.init(start.load(step, print))
    arrays = {name: np.array(array) for name, array in step.to_canonical(state).items()}
    return start, arrays, step


def drawn(experiment):
    step = build(experiment, Plan(mesh="1"))
    return {name: np.array(array) for name, array in step.to_canonical(step.init()).items()}


@pytest.mark.parametrize(
    "plan",
    variants(
        [
            {"mesh": "fsdp:4", "zero": 3},
            {"pipeline": "1f1b:1x2"},
            {"mesh": "replica:2", "diloco": "every=2"},
            {"mesh": "fsdp:2", "zero": 2, "weights": "host"},
            {"mesh": "tensor:2"},
        ],
        default=2,
    ),
    ids=str,
)
def test_every_plan_starts_from_the_same_weights(toy, whole, plan):
    expected = weights_of(whole)
    model = dataclasses.replace(toy().model, embed=8)
    start, arrays, _ = started(toy(model=model, seed=5), whole, **plan)
    assert start.match.shapes_by_unlike_name == {}
    assert start.match.new_names == ()
    assert set(start.match.taken_names) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(arrays[name], array)
    assert int(arrays["step"]) == 0
    assert int(arrays["watch/good"]) == 0


def test_split_weights_are_those_of_the_source_within_their_precision(toy, whole):
    _, arrays, _step = started(toy(), whole, mesh="fsdp:2", zero=3, precision="bfloat16", master="split")
    for name, array in weights_of(whole).items():
        bfloat16 = arrays[name].astype(np.float32)
        np.testing.assert_allclose(bfloat16, array, rtol=2**-8)
    corrections = [array for name, array in arrays.items() if "/correction/" in name]
    assert corrections
    assert any(np.any(array) for array in corrections)


@pytest.mark.variant
def test_split_weights_are_joined_where_they_are_taken(toy, tmp_path):
    plan = plan_of(mesh="1", precision="bfloat16", master="split")
    source = train(toy(steps=2), plan, out=tmp_path / "split", quiet=True)
    _, arrays, _ = started(toy(seed=4), source.dir, mesh="1")
    for name, array in weights_of(source.dir).items():
        np.testing.assert_array_equal(arrays[name], array)
    assert any(np.any(array != array.astype(jax.numpy.bfloat16)) for array in weights_of(source.dir).values())


def test_running_statistics_are_taken_and_random_streams_are_not(tmp_path):
    """The source is a folder of checkpoints that a loop of one's own wrote."""
    model = ResNet(classes=2, channels=1, stages=(1,), width=8, stem="small")
    rng = np.random.default_rng(0)
    batch = {"images": rng.normal(size=(4, 8, 8, 1)).astype(np.float32), "labels": np.arange(4, dtype=np.int32) % 2}
    step = build(Experiment("statistics", model, None, batch=4, steps=2), Plan(mesh="1"))
    state, _ = step(step.init(), step.place(batch))
    saved = {name: np.array(array) for name, array in step.to_canonical(state).items()}
    Checkpoints(tmp_path).save(step, state, wait=True)
    start, arrays, other = started(
        Experiment("other", dataclasses.replace(model, classes=3), None, batch=4, steps=2, seed=6),
        tmp_path / "00000001",
        mesh="data:2",
    )
    statistics = [name for name in start.match.taken_names if name.startswith("rest/")]
    assert statistics
    for name in start.match.taken_names:
        np.testing.assert_array_equal(arrays[name], saved[name])
    assert any(
        np.any(np.array(array) != saved[name])
        for name, array in other.to_canonical(other.init()).items()
        if name in statistics
    )
    assert all("head" in name for name in start.match.shapes_by_unlike_name)


def test_a_deeper_model_with_another_head_takes_what_fits_and_draws_the_rest(toy, whole):
    """The source has one layer and 256 tokens."""
    model = dataclasses.replace(toy().model, layers=3, vocab=250, mlp=16)
    experiment = toy(model=model, seed=3)
    start, arrays, step = started(experiment, whole, mesh="fsdp:2", zero=3)
    expected, fresh = weights_of(whole), drawn(experiment)
    assert set(start.match.shapes_by_unlike_name) == {
        name for name in expected if "embedding" in name or "head" in name
    }
    assert start.match.new_names
    assert all("layers/1" in name or "layers/2" in name for name in start.match.new_names)
    for name in start.match.taken_names:
        np.testing.assert_array_equal(arrays[name], expected[name])
    for name in (*start.match.shapes_by_unlike_name, *start.match.new_names):
        np.testing.assert_array_equal(arrays[name], fresh[name])
    text = "\n".join(start.lines())
    assert "not taken, since shapes differ: embedding/weight (256 x 8 there, 250 x 8 here)" in text
    assert "not in the source, so as without it: blocks/layers/*/attention" in text
    assert "(2 layers)" in text
    state, _ = step(
        step.from_canonical(
            {name: jax.device_put(a, step.canonical_abstract()[name].sharding) for name, a in arrays.items()}
        ),
        step.place(next(iter(toy().data.open(4, 0).train()))),
    )
    assert int(state.step) == 1


@pytest.mark.variant  # by default: what is new and what is left out of a deeper model, and adapters that are named
def test_adapters_are_new_over_a_base_that_is_taken_and_the_other_way_round(toy, whole, tmp_path):
    adapted = toy(name="adapted", model=LoRA(toy().model, rank=2), steps=2)
    run = train(adapted, out=tmp_path / "adapted", init_from=whole, quiet=True)
    record, expected = read_record(run.dir), weights_of(whole)
    assert record is not None
    assert sorted(record["taken"]) == sorted(expected)
    assert all("/lora/" in name for name in record["new"])
    after = weights_of(run.dir)
    for name, array in expected.items():  # they are frozen
        np.testing.assert_array_equal(after[name], array)
    start, arrays, _ = started(toy(seed=9), run.dir, mesh="1")
    assert start.match.left_names
    assert all("/lora/" in name for name in start.match.left_names)
    assert "in the source alone, so left out: " in "\n".join(start.lines())
    np.testing.assert_array_equal(arrays["params/embedding/weight"], expected["params/embedding/weight"])


def test_an_average_of_weights_is_what_is_taken(toy, tmp_path):
    source = train(toy(optimizer=Optimizer(learning_rate=0.05, ema=0.9), steps=4), out=tmp_path / "ema", quiet=True)
    start, arrays, _ = started(toy(optimizer=Optimizer(ema=0.9)), source.dir, mesh="1")
    averages, weights = weights_of(source.dir), weights_of(source.dir, average=False)
    assert str(start.source) == f"{source.dir} after step 4, the average of weights (ema)"
    for name, array in averages.items():
        np.testing.assert_array_equal(arrays[name], array)
        np.testing.assert_array_equal(arrays[name.replace("params/", "ema/", 1)], array)
    assert any(np.any(weights[name] != array) for name, array in averages.items())


def test_a_whole_run_records_its_start_and_continues_without_its_source(toy, whole, tmp_path, capsys):
    """Killed before its first checkpoint, it starts from the same weights; later it needs the source no more."""
    source = shutil.copytree(whole, tmp_path / "source")
    experiment = toy(optimizer=Optimizer(learning_rate=0.01, groups={"embed|head": Optimizer("lion", 1e-3)}), steps=6)
    run = train(experiment, out=tmp_path / "run", init_from=source)
    shown = capsys.readouterr().out
    assert f"initial weights of {source} after step 12: " in shown
    assert "group embed|head: lion" in shown
    record = json.loads((tmp_path / "run" / "init_from.json").read_text())
    assert (record["source"], record["step"], record["new"]) == (str(source), 12, [])
    assert [row["source"] for row in run.events if row["name"] == "init_from"] == [f"{source} after step 12"]
    assert "init_from" in (tmp_path / "run" / "report.html").read_text()
    assert run.metrics.column("loss")[0] < 5.0  # that of drawn weights is 5.5
    assert list(run.metrics.column("learning_rate/embed|head"))[:1] == [pytest.approx(1e-3)]
    assert (export(run.dir, tmp_path / "exported") / "model.safetensors").exists()
    # the same, stopped before any checkpoint: the record alone brings the source back
    again = tmp_path / "again"
    again.mkdir()
    for name in ("experiment.json", "plan.json", "init_from.json", "source"):
        origin = tmp_path / "run" / name
        (shutil.copytree if origin.is_dir() else shutil.copy)(origin, again / name)
    twin = train(experiment, out=again, quiet=True)
    assert list(twin.metrics.column("loss")) == list(run.metrics.column("loss"))
    # stopped after step 5, and continued by the same command and by one without the flag, the source gone
    shutil.rmtree(source)
    for number, path in enumerate((source, None)):
        copy = shutil.copytree(tmp_path / "run", tmp_path / f"copy{number}")
        shutil.rmtree(copy / "checkpoints" / "00000006")
        resumed = train(experiment, out=copy, init_from=path, quiet=True)
        assert list(resumed.metrics.column("loss"))[-1:] == list(run.metrics.column("loss"))[-1:]
        for name, array in weights_of(tmp_path / "run").items():
            np.testing.assert_array_equal(weights_of(copy)[name], array)
    shutil.rmtree(again / "checkpoints")
    with pytest.raises(UserError, match=f"{source} holds no weights"):
        train(experiment, out=again, quiet=True)


def test_other_groups_are_another_experiment(toy, tmp_path):
    def grouped(**groups):
        return toy(optimizer=Optimizer(learning_rate=0.01, groups=groups), steps=2)

    lion, sgd = Optimizer("lion", 1e-3), Optimizer("sgd", 0.1)
    first = grouped(embed=lion, head=sgd)
    folder = tmp_path / "run"
    train(first, out=folder, quiet=True)
    for other, says in (
        (grouped(embed=lion, head=Optimizer("sgd", 0.2)), r"optimizer\.groups\.head\.learning_rate \(0\.2 here, 0\.1"),
        (grouped(embed=lion), r"optimizer\.groups\.head\.name \(absent here|optimizer\.groups\.head \(absent here"),
        (grouped(head=sgd, embed=lion), r"order of optimizer\.groups \(head, embed here, embed, head there\)"),
    ):
        with pytest.raises(UserError, match=says):
            train(dataclasses.replace(other, steps=4), out=folder, quiet=True)
    slower = grouped(embed=dataclasses.replace(lion, learning_rate=1e-4), head=sgd)
    with pytest.raises(UserError, match=r"groups\.embed\.learning_rate"):
        train(dataclasses.replace(slower, steps=4), out=folder, quiet=True)


def test_an_exported_folder_is_a_source(toy, whole, tmp_path):
    folder = export(whole, tmp_path / "exported")
    start, arrays, _ = started(toy(seed=2), folder, mesh="fsdp:2", zero=3)
    assert start.match.new_names == ()
    assert start.match.shapes_by_unlike_name == {}
    assert str(start.source) == str(folder)
    for name, array in weights_of(whole).items():
        np.testing.assert_array_equal(arrays[name], array)


def test_a_checkpoint_of_a_run_is_a_source(toy, whole):
    start, arrays, _ = started(toy(seed=2), whole / "checkpoints" / "00000005", mesh="1")
    assert start.source.step == 5
    assert any(np.any(arrays[name] != array) for name, array in weights_of(whole).items())


def test_what_cannot_start_a_run_is_refused(toy, whole, tmp_path):
    (tmp_path / "empty").mkdir()
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(whole / "experiment.json", bare)
    step = build(toy(model=dataclasses.replace(toy().model, embed=16, mlp=32)), Plan(mesh="1"))
    with pytest.raises(UserError, match=r"nothing there fits the model: not taken, since shapes differ: blocks/layers"):
        WarmStart.of(step, whole)
    step = build(toy(), Plan(mesh="1"))
    for path, says in (
        (tmp_path / "empty", "holds no weights: expected the directory of a run, the folder of a checkpoint"),
        (tmp_path / "missing", "holds no weights"),
        (bare, "has no checkpoint yet"),
        (whole / "checkpoints" / "00000007", "holds no weights"),
    ):
        with pytest.raises(UserError, match=says):
            WarmStart.of(step, path)
    with pytest.raises(UserError, match="has no checkpoint of step 7 any more; there are 5, 10, 12"):
        WarmStart.of(step, whole, 7)


def test_a_damaged_source_is_named_with_the_other_checkpoints(toy, whole):
    for file in (whole / "checkpoints" / "00000012").rglob("d/*"):
        file.write_bytes(b"x" * file.stat().st_size)
    step = build(toy(), Plan(mesh="1"))
    start = WarmStart.of(step, whole)
    with pytest.raises(UserError, match=r"or give another checkpoint: .*/checkpoints/00000005, .*/00000010"):
        start.load(step, print)


def test_arguments_that_contradict_the_run_are_refused(toy, whole, tmp_path):
    with pytest.raises(UserError, match="holds a run that started from its own initial weights; leave it out to"):
        train(toy(steps=20), out=whole, init_from=tmp_path, quiet=True)
    for path in (f"{whole}/", whole / "checkpoints" / "00000012"):
        with pytest.raises(UserError, match=r"this is the run's own directory; give another one with --out"):
            train(toy(), out=whole, init_from=path, resume="never", quiet=True)
    assert (whole / "experiment.json").exists()  # it was not set aside
    with pytest.raises(UserError, match="a run starts with the weights of another, or returns to"):
        train(toy(), out=tmp_path / "a", init_from=whole, from_step=5, quiet=True)
    with pytest.raises(UserError, match="init_from: got an empty text"):
        train(toy(), out=tmp_path / "a", init_from="", quiet=True)
    with pytest.raises(UserError, match="holds no weights"):
        train(toy(), out=tmp_path / "a", init_from=tmp_path, quiet=True)
    assert not (tmp_path / "a").exists()
    for text in ("[]", '{"source": 3, "step": 1}', '{"source": "a", "step": true}'):
        (whole / "init_from.json").write_text(text)
        with pytest.raises(UserError, match=r"init_from\.json: expected the source and step of initial weights"):
            Beginning.of(whole, None, True)
    (whole / "init_from.json").write_text('{"source": "/b", "step": 1}')
    with pytest.raises(UserError, match="holds a run that started from /b; leave it out"):
        Beginning.of(whole, "/c", True)


def test_frozen_parameters_that_are_not_taken_are_named(toy, whole):
    model = LoRA(dataclasses.replace(toy().model, layers=2, vocab=250), rank=2)
    start = WarmStart.of(build(toy(model=model), Plan(mesh="1")), whole)
    line = next(
        line for line in start.lines() if line.startswith("neither taken nor trained, so they stay as they are")
    )
    assert "params/embedding/weight" in start.match.frozen_names
    assert "blocks/layers/*/attention/k/weight" in line
    assert "lora" not in line


def test_a_match_is_by_name_and_shape():
    match = Match.of({"params/a": (2,), "params/c": (1,), "rest/d": (1,)}, {"params/a": (2,), "params/b": (4,)})
    assert (match.taken_names, match.shapes_by_unlike_name, match.new_names, match.left_names) == (
        ("params/a",),
        {},
        ("params/b",),
        ("params/c",),
    )
