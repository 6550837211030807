import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.blocks import Context
from jaxscale.checkpoint.restore import restore_parameters
from jaxscale.errors import UserError
from jaxscale.recipe.plan import Plan
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.training.evaluate import evaluate, held_out_means
from jaxscale.training.loop import train
from jaxscale.training.run import Run

pytestmark = pytest.mark.usefixtures("shared_steps")


def test_the_held_out_loss_is_the_mean_over_all_targets(toy, whole):
    run = Run.open(whole)
    found = evaluate(whole)
    data = toy().data.open(4, 0)
    total = weight = 0.0
    model, module = toy().model, run.module
    loss_of = jax.jit(lambda batch: model.loss(module, batch, Context()))
    for batch in data.evaluation():
        loss = loss_of(batch)
        total, weight = total + float(loss.total), weight + float(loss.weight)
    assert found["step"] == 12
    assert found["targets"] == weight
    np.testing.assert_allclose(found["loss"], total / weight, rtol=1e-5)
    assert evaluate(whole, batches=2)["loss"] == pytest.approx(run.held_out_loss, rel=1e-5)
    assert evaluate(whole, best=True)["step"] == 12


def test_evaluation_holds_the_parameters_in_parts(toy, whole):
    trained = restore_parameters(whole, split=True)
    assert trained.step.plan.zero == 3
    assert trained.step.mesh.shape["fsdp"] == 4, "the rows of the batch"
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(trained.state.params))
    assert held < 1.1 * sum(x.nbytes for x in jax.tree.leaves(trained.state.params)) / 4


def test_evaluation_of_a_model_that_does_not_split(toy, tmp_path):
    from jaxscale.models.foreign import ForeignModel, language_model

    def make(rngs):
        return nnx.Sequential(nnx.Embed(255, 7, rngs=rngs), nnx.Linear(7, 255, rngs=rngs))

    experiment = toy(model=ForeignModel(make, language_model()), plan=Plan(mesh=MeshSpec(data=2), microbatches=2))
    run = train(experiment, steps=2, out=tmp_path / "run", quiet=True)
    trained = restore_parameters(tmp_path / "run", experiment=experiment, split=True)
    assert trained.step.plan.zero == 0
    assert trained.step.mesh.size == trained.step.plan.microbatches == 2
    found = held_out_means(trained.step, experiment.data.open(4, 0), trained.state, 2, one_at_a_time=True)
    assert found["loss"] == pytest.approx(run.held_out_loss, rel=1e-5)


def test_accuracy_where_the_model_tells_it(toy, tmp_path):
    from jaxscale.models.foreign import ForeignModel, language_model

    def make(rngs):
        return nnx.Sequential(nnx.Embed(256, 8, rngs=rngs), nnx.Linear(8, 256, rngs=rngs))

    experiment = toy(model=ForeignModel(make, language_model()))
    run = train(experiment, out=tmp_path / "run", quiet=True)
    right = targets = 0
    for number, batch in enumerate(experiment.data.open(4, 0).evaluation()):
        if number < 2:
            predicted = run.module(jnp.asarray(batch["tokens"])).argmax(-1)
            weights = np.asarray(batch.get("weights", np.ones(predicted.shape)))
            right += ((np.asarray(predicted) == batch["targets"]) * weights).sum()
            targets += weights.sum()
    assert run.evaluations[-1]["accuracy"] == pytest.approx(right / targets)
    assert run.evaluations[-1]["targets"] == targets
    assert not run.samples
    with pytest.raises(UserError, match="cannot generate text"):
        run.generate("a")


def test_nothing_held_out(toy, tmp_path):
    import dataclasses

    experiment = toy()
    experiment = dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, held_out=0.0))
    run = train(experiment, steps=2, out=tmp_path / "run", quiet=True)
    assert not run.evaluations
    assert np.isnan(run.held_out_loss)
    with pytest.raises(UserError, match="has nothing held out"):
        evaluate(tmp_path / "run")
