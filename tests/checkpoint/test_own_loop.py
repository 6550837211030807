"""A loop of one's own that is saved and resumed: on another mesh, under another plan, past a damaged checkpoint."""

import os

import chex
import jax
import numpy as np
import pytest
from flax import nnx

import jaxscale as jx

EXPERIMENT = jx.Experiment(
    "own loop", jx.models.Decoder(vocab=16, context=8, layers=2, heads=2, embed=16), data=None, steps=4, batch=4
)


def batches(first):
    """Batches from number `first` on."""
    for number in range(first, EXPERIMENT.steps):
        tokens = np.random.default_rng(number).integers(0, 16, (4, 9), dtype=np.int32)
        yield {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def test_a_resumed_loop_is_the_loop_that_never_stopped(tmp_path):
    step = jx.build(EXPERIMENT, jx.Plan(mesh="data:2"), devices=jax.devices()[:2])
    checkpoints = jx.Checkpoints(tmp_path, keep=2)
    assert checkpoints.restore(step) is None
    state = step.init()
    for number, batch in enumerate(batches(0), 1):
        state, _ = step(state, step.place(batch))
        checkpoints.save(step, state, data={"next": number})
    checkpoints.wait()
    assert checkpoints.steps() == [3, 4]
    # the newest checkpoint is damaged: the loop goes on from the one before, and saves its step anew
    largest = max((tmp_path / "00000004").rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    os.truncate(largest, largest.stat().st_size // 2)

    other = jx.build(EXPERIMENT, jx.Plan(mesh="fsdp:2", zero=3, memory="full"), devices=jax.devices()[:2])
    resumed_checkpoints = jx.Checkpoints(tmp_path, keep=2)
    restored = resumed_checkpoints.restore(other)
    assert (restored.step, restored.data) == (3, {"next": 3})
    resumed = restored.state
    for batch in batches(restored.data["next"]):
        resumed, _ = other(resumed, other.place(batch))
    assert resumed_checkpoints.save(other, resumed, wait=True)
    chex.assert_trees_all_close(
        jax.tree.map(np.asarray, resumed.params), jax.tree.map(np.asarray, state.params), rtol=1e-5, atol=1e-6
    )
    assert resumed_checkpoints.restore(step).step == 4
    assert resumed_checkpoints.restore(step, number=3).data == {"next": 3}


def test_what_cannot_be_saved_or_restored_is_refused(tmp_path):
    step = jx.build(EXPERIMENT, jx.Plan(mesh="data:2"), devices=jax.devices()[:2])
    with pytest.raises(jx.UserError, match="keep: got 0, expected at least 1"):
        jx.Checkpoints(tmp_path, keep=0)
    checkpoints = jx.Checkpoints(tmp_path)
    with pytest.raises(jx.UserError, match="data: got set, expected JSON values"):
        checkpoints.save(step, step.init(), data={1, 2})
    with pytest.raises(jx.UserError, match=r"number: got 7, but .* has checkpoints of no updates"):
        checkpoints.restore(step, number=7)


def test_a_checkpoint_of_a_deeper_or_shallower_model_is_refused(tmp_path):
    class Layers(nnx.Module):
        def __init__(self, depth, rngs):
            self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(depth)])

    def step_of(depth):
        model = jx.models.ForeignModel(lambda rngs: Layers(depth, rngs), lambda module, batch: batch["x"])
        return jx.build(jx.Experiment("layers", model, data=None, steps=4, batch=4), jx.Plan(mesh="1"))

    checkpoints, step = jx.Checkpoints(tmp_path), step_of(2)
    checkpoints.save(step, step.init(), wait=True)
    assert checkpoints.restore(step) is not None
    with pytest.raises(
        jx.UserError, match=r"parameters that the model lacks, such as 'params/layers/1/.* \(2 in all\)"
    ):
        checkpoints.restore(step_of(1))
    with pytest.raises(jx.UserError, match=r"has no array '.*layers/2/"):
        checkpoints.restore(step_of(3))
