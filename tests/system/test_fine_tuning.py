"""Adapters of a pretrained model through a whole run: trained, cut and continued, evaluated, and exported merged."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxscale as jx
from jaxscale.blocks import Context
from jaxscale.checkpoint.export import export
from jaxscale.lowbit.few_bit_weight import FORMATS
from jaxscale.models import LoRA, Pretrained
from jaxscale.models.huggingface import load
from jaxscale.training.evaluate import evaluate
from tests.models.goldens import GOLDEN
from tests.system.whole import compiled_once


@pytest.fixture(scope="module", autouse=True)
def _one_step_each():
    """Runs of one experiment and plan share their compiled step."""
    with compiled_once():
        yield


def loss_of(experiment, module, batch):
    """The loss of a model that has been trained, or was read from a folder."""
    return jax.jit(lambda batch: experiment.model.loss(module, batch, Context()).total)(batch)


def flat(params, prefix=""):
    """Parameters by path."""
    for name, value in params.items():
        path = f"{prefix}/{name}" if prefix else name
        yield from flat(value, path) if isinstance(value, dict) else [(path, value)]


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """Function of a plan and a number of steps to a finished run of adapters on a small Llama."""
    folder = tmp_path_factory.mktemp("fine_tuning")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog.\n" * 50)

    @functools.cache
    def run(name: str, plan: jx.Plan, stop_after: int | None = None, base: str | None = None) -> Path:
        experiment = jx.Experiment(
            name="adapters",
            model=LoRA(Pretrained(GOLDEN / "llama"), rank=4, base=base),
            data=jx.data.Text(folder / "text.txt", tokenizer="char", context=16),
            optimizer=jx.Optimizer(learning_rate=1e-2),
            steps=6,
            batch=8,
            samples=jx.Samples(prompts=()),
        )
        stop = [lambda event: event.kind == "step" and event.step == stop_after]
        jx.train(experiment, plan, out=folder / name, quiet=True, callbacks=stop)
        return folder / name

    return run


@pytest.mark.variant  # by default: over a base in few bits below, and the merged weights in `test_finetune.py`
def test_the_base_is_the_folder_and_merged_weights_are_the_adapted_model(run_of, tmp_path):
    run = jx.Run.open(run_of("whole", jx.Plan(mesh="1")))
    base = {path: np.asarray(array[...], np.float32) for path, array in flat(load(GOLDEN / "llama")[1])}
    frozen = dict(flat(run.state.rest))
    assert base.keys() <= frozen.keys()
    for path, array in base.items():
        np.testing.assert_array_equal(np.asarray(frozen[path]), array)
    folder = export(run.dir, tmp_path / "merged")
    merged = jx.Experiment("merged", Pretrained(folder), None, steps=1, batch=8)
    step = jx.build(merged, jx.Plan(mesh="1"))
    tokens = jnp.arange(8 * 16, dtype=jnp.int32).reshape(8, 16) % 30
    batch = {"tokens": tokens, "targets": jnp.roll(tokens, -1, 1)}
    expected = loss_of(run.experiment, run.module, batch)
    np.testing.assert_allclose(loss_of(merged, step.module(step.init()), batch), expected, rtol=1e-5)
    assert evaluate(run.dir)["loss"] == pytest.approx(run.held_out_loss, rel=1e-6)
    assert len(run.generate("the", tokens=4)) >= 4


@pytest.mark.variant  # by default: cut on one device below, over few bits; on meshes in `tests/step/test_frozen.py`
def test_a_cut_run_continues_on_another_mesh(run_of):
    plan = jx.Plan(mesh="fsdp:2", zero=3)
    run_of("cut", plan, stop_after=3)
    continued = jx.Run.open(run_of("cut", plan))
    assert continued.step == 6
    whole = jx.Run.open(run_of("whole", jx.Plan(mesh="1")))
    np.testing.assert_allclose(continued.held_out_loss, whole.held_out_loss, rtol=1e-4)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(Pretrained, marks=pytest.mark.variant, id="all"),
        pytest.param(lambda folder: LoRA(Pretrained(folder), rank=2), id="lora"),
    ],
)
def test_a_vit_of_a_folder_trains_and_is_exported(tmp_path, make):
    rng = np.random.default_rng(0)
    images = rng.normal(size=(32, 32, 32, 3)).astype("float32")
    np.savez(tmp_path / "images.npz", x=images, y=rng.integers(0, 10, 32))
    data = jx.data.Images(tmp_path / "images.npz")
    optimizer = jx.Optimizer(learning_rate=1e-2)
    experiment = jx.Experiment("vit", make(GOLDEN / "vit"), data, optimizer, steps=3, batch=8)
    run = jx.train(experiment, jx.Plan(mesh="1"), out=tmp_path / "run", quiet=True)
    folder = export(run.dir, tmp_path / "out")
    again = jx.Experiment("again", Pretrained(folder), None, steps=1, batch=8)
    step = jx.build(again, jx.Plan(mesh="1"))
    batch = {"images": jnp.asarray(images[:8]), "labels": jnp.zeros(8, jnp.int32)}
    expected = loss_of(run.experiment, run.module, batch)
    exported_loss = loss_of(again, step.module(step.init()), batch)
    np.testing.assert_allclose(exported_loss, expected, rtol=1e-5)
    original = jx.Experiment("first", Pretrained(GOLDEN / "vit"), None, steps=1, batch=8)
    step = jx.build(original, jx.Plan(mesh="1"))
    assert abs(loss_of(original, step.module(step.init()), batch) - exported_loss) > 1e-2


def test_a_base_in_few_bits_is_the_folders_and_goes_through_a_whole_run(run_of, tmp_path):
    run = jx.Run.open(run_of("few bits", jx.Plan(mesh="1"), base="nf4"))
    frozen, nf4, stored_names = dict(flat(run.state.rest)), FORMATS["nf4"], set()
    for path, array in flat(load(GOLDEN / "llama")[1]):
        numbers = jnp.asarray(array[...], jnp.float32)
        if path in frozen:
            np.testing.assert_array_equal(np.asarray(frozen[path]), numbers)
            continue
        stored_names.add(path.rsplit("/", 2)[1])
        block = nf4.block_of(numbers.shape[-2], 64)
        for part, expected in zip(("codes", "scale"), nf4.encode(numbers, block), strict=True):
            np.testing.assert_array_equal(frozen[f"{path}/{part}"], expected)
    assert stored_names == {"q", "k", "v", "out", "up", "gate", "down"}

    plan = jx.Plan(mesh="1")
    run_of("few bits, cut", plan, stop_after=3, base="nf4")
    continued = jx.Run.open(run_of("few bits, cut", plan, base="nf4"))
    assert continued.step == 6
    pairs = zip(jax.tree.leaves(continued.state.params), jax.tree.leaves(run.state.params), strict=True)
    assert all(np.array_equal(ours, theirs) for ours, theirs in pairs)
    assert evaluate(run.dir)["loss"] == pytest.approx(run.held_out_loss, rel=1e-6)
    assert len(run.generate("the", tokens=4)) >= 4

    merged = jx.Experiment("merged", Pretrained(export(run.dir, tmp_path / "merged")), None, steps=1, batch=8)
    step = jx.build(merged, jx.Plan(mesh="1"))
    tokens = jnp.arange(8 * 16, dtype=jnp.int32).reshape(8, 16) % 30
    batch = {"tokens": tokens, "targets": jnp.roll(tokens, -1, 1)}
    expected = loss_of(run.experiment, run.module, batch)
    np.testing.assert_allclose(loss_of(merged, step.module(step.init()), batch), expected, rtol=1e-5)
