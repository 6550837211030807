"""Blocks that a user's own scan runs: pipelines, rules of several blocks, unrolling and weights on the host.

By default: a pipeline under ZeRO 3 with weights on the host.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale import Experiment, Optimizer, blocks, build
from jaxscale.errors import UserError
from jaxscale.layers.stack import Chain, Stack
from jaxscale.models import ForeignModel, language_model
from jaxscale.programs.walk import equations_with_runs
from jaxscale.state.pure_model import PureModel
from tests.models.public_language_models import VOCAB, WIDTH, Mlp, ScannedPytree, ScannedRemat, text
from tests.plans import plan_of

PIPELINE = {"pipeline": "1f1b:2x4", "stash": "input"}


def figures_of(model, **plan_fields):
    """Losses and gradient norms of two steps, and the step."""
    if not dataclasses.is_dataclass(model):
        model = ForeignModel(model, language_model())
    optimizer = Optimizer("sgd", learning_rate=0.1)
    step = build(Experiment("scanned", model, text(), optimizer, steps=2, batch=8), plan_of(**plan_fields))
    step.compile(text())
    state, figures = step.init(), []
    for _ in range(2):
        state, metrics = step(state, step.place(text()))
        figures.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return np.array(figures), step, state


def variant(*values):
    return pytest.param(*values, marks=pytest.mark.variant)


def nightly(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


plain = functools.cache(lambda make: figures_of(make, mesh="1")[0])


class Plain(ScannedRemat):
    """The blocks of `ScannedRemat`, without a checkpoint of the user's."""

    def __call__(self, tokens):
        return self.head(scanned(self.embed(tokens), self.blocks))


@nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
def scanned(x, block):
    return block(x, 1.0)


class Twice(Plain):
    def __call__(self, tokens):
        return self.head(scanned(scanned(self.embed(tokens), self.blocks), self.blocks))


class Several(ScannedRemat):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.more = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: Mlp(WIDTH, rngs)))(rngs)

    def __call__(self, tokens):
        x, _ = jax.lax.scan(lambda x, layer: (layer(x), None), self.embed(tokens), self.more)
        return self.head(scanned(x, self.blocks))


class Outputs(ScannedRemat):
    def __call__(self, tokens):
        x, means = jax.lax.scan(lambda x, block: (block(x, 1.0), x.mean()), self.embed(tokens), self.blocks)
        return self.head(x * means.sum())


class Outside(ScannedRemat):
    def __call__(self, tokens):
        return self.head(scanned(self.embed(tokens), self.blocks)) * self.blocks.norm.scale[...].sum()


class Keys(ScannedRemat):
    def __call__(self, tokens):
        def run(carry, block):
            x, key = carry
            return (block(x, jax.random.uniform(key)), jax.random.split(key)[0]), None

        (x, _), _ = jax.lax.scan(run, (self.embed(tokens), jax.random.key(0)), self.blocks)
        return self.head(x)


class Reversed(ScannedRemat):
    def __call__(self, tokens):
        x, _ = jax.lax.scan(lambda x, block: (block(x, 1.0), None), self.embed(tokens), self.blocks, reverse=True)
        return self.head(x)


class Experts(nnx.Module):
    """Stacked parameters that no scan reads."""

    def __init__(self, rngs):
        self.embed, self.head = nnx.Embed(VOCAB, WIDTH, rngs=rngs), nnx.Linear(WIDTH, VOCAB, rngs=rngs)
        self.experts = nnx.split_rngs(splits=4)(nnx.vmap(lambda rngs: Mlp(WIDTH, rngs)))(rngs)

    def __call__(self, tokens):
        run = nnx.vmap(lambda expert, x: expert(x), in_axes=(0, None))
        return self.head(run(self.experts, self.embed(tokens)).mean(0))


class OurBlock(nnx.Module):
    def __init__(self, rngs, rate=None):
        self.mlp = Mlp(WIDTH, rngs)
        self.dropout = None if rate is None else nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x, context=None):
        y = self.mlp(x)
        return x + (y if self.dropout is None else self.dropout(y))


class InStack(nnx.Module):
    """A `layers.Stack` of blocks whose parameters have no names."""

    def __init__(self, rngs, make=OurBlock):
        self.embed, self.head = nnx.Embed(VOCAB, WIDTH, rngs=rngs), nnx.Linear(WIDTH, VOCAB, rngs=rngs)
        self.stack = Stack(make, 4, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.stack(self.embed(tokens)))


class InChain(InStack):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.stack = Chain([OurBlock(rngs) for _ in range(3)])


@pytest.mark.parametrize(
    ("make", "plan"),
    [
        variant(ScannedRemat, {"pipeline": "zb-h1:3x4", "stash": "input", "mesh": "1"}),  # padding rows
        (ScannedRemat, {"pipeline": "1f1b:2x4", "mesh": "fsdp:2", "zero": "3", "weights": "host"}),
        nightly(ScannedRemat, {"pipeline": "interleaved:2x4,v=2", "mesh": "tensor:2"}),
        variant(ScannedRemat, {"weights": "host", "gradients": "host", "memory": "full"}),
        nightly(ScannedPytree, {"memory": "sqrt"}),
        variant(ScannedPytree, {"unroll": "2", "pipeline": "gpipe:2x2", "memory": "none"}),
        nightly(ScannedPytree, {"memory": "chain:4KiB", "mesh": "fsdp:2", "zero": "3"}),
        variant(InStack, PIPELINE),
        nightly(InStack, {"memory": "sqrt", "mesh": "fsdp:2", "zero": "3"}),
        nightly(InChain, PIPELINE),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_blocks_of_a_scan_give_the_numbers_of_one_device(make, plan):
    np.testing.assert_allclose(figures_of(make, **plan)[0], plain(make), rtol=1e-5)


@pytest.mark.slow
def test_dropout_of_scanned_blocks_in_a_pipeline_is_that_of_its_microbatches():
    def make(rngs):
        return ScannedRemat(rngs, rate=0.5)

    figures = figures_of(make, mesh="1", microbatches="4")[0]
    np.testing.assert_allclose(figures_of(make, mesh="1", **PIPELINE)[0], figures, rtol=1e-5)
    assert np.abs(figures / plain(ScannedRemat) - 1).max() > 1e-3


def test_a_plan_wraps_the_block_inside_of_the_scan_and_keeps_the_checkpoint_of_the_user():
    wrapped = []

    def wrapper(block, rolled):
        wrapped.append(rolled)
        return jax.checkpoint(block, policy=blocks.keep_nothing, prevent_cse=not rolled)

    model = ForeignModel(ScannedRemat, language_model()).with_scans(text())
    module = model.build(nnx.Rngs(0))
    with blocks.wrapping(wrapper):
        program = jax.make_jaxpr(lambda batch: model.loss(module, batch, blocks.Context()).total)(text())
    assert wrapped == [True]
    remats = [
        (eqn.params["policy"], runs) for eqn, runs in equations_with_runs(program) if "remat" in eqn.primitive.name
    ]
    assert remats == [(blocks.keep_nothing, 4), (None, 4)]  # the plan's around the user's, in each of four layers


def test_segments_are_those_of_a_stack():
    experiment = Experiment(
        "scanned", ForeignModel(Plain, language_model()), text(), Optimizer("sgd"), steps=1, batch=8
    )
    decision = build(experiment, plan_of(mesh="1", memory="sqrt")).decision
    assert decision.stack.segment == 2
    assert decision.layers == 4


def test_names_of_axes_and_of_arrays_in_a_checkpoint():
    models = {
        name: ForeignModel(lambda rngs, name=name: ScannedRemat(rngs, name=name), language_model())
        for name in ("layers", "depth", None)
    }
    for name, model in models.items():
        pure_model = PureModel.of(model.with_scans(text()), 0)
        assert pure_model.axis_names["blocks/up/kernel"] == ("layers", "embed", "mlp"), name
        assert pure_model.axis_names["blocks/norm/scale"] == ("layers", None), name
        # arrays keep the names that a checkpoint had before scans were found
        before = PureModel.of(model, 0)
        assert ("blocks/up/kernel" in pure_model.unnamed_stacks) == (not before.is_stacked("blocks/up/kernel")), name
    assert ForeignModel(Experts, language_model()).with_scans(text()).scanned == ()
    assert ForeignModel(Plain, language_model(), blocks=()).with_scans(text()).scanned == ()
    of_one = ForeignModel(Several, language_model(), blocks="more").with_scans(text())
    assert {name.partition("/")[0] for name in of_one.scanned} == {"more"}
    stack = PureModel.of(ForeignModel(InStack, language_model()), 0)
    assert stack.is_stacked("stack/layers/mlp/up/kernel")
    assert not stack.is_stacked("head/kernel")


def test_a_state_goes_from_a_pipeline_with_padding_to_one_device_and_back():
    model = ForeignModel(ScannedRemat, language_model())
    experiment = Experiment("scanned", model, text(), Optimizer("sgd", momentum=0.9), steps=2, batch=8)
    pipelined = build(experiment, plan_of(pipeline="1f1b:3x4", stash="input", mesh="1"))
    rng, arrays = np.random.default_rng(0), pipelined.to_canonical(pipelined.init())
    assert arrays["params/blocks/down/kernel"].shape == (4, 2 * WIDTH, WIDTH)
    saved = {name: np.asarray(array) for name, array in arrays.items()}
    for name, array in saved.items():
        if array.dtype == np.float32:  # as after some steps: momenta start from zeros
            saved[name] = rng.normal(size=array.shape).astype(np.float32)
    single = build(pipelined.experiment, plan_of(mesh="1"))
    on_one = single.from_canonical(jax.tree.map(jnp.asarray, saved))
    back = pipelined.from_canonical(
        jax.tree.map(jnp.asarray, {k: np.asarray(v) for k, v in single.to_canonical(on_one).items()})
    )
    for name, array in pipelined.to_canonical(back).items():
        np.testing.assert_array_equal(np.asarray(array), saved[name], err_msg=name)


@pytest.mark.parametrize(
    ("make", "plan", "words"),
    [
        (Twice, PIPELINE, "scans over several stacks of blocks"),
        (Several, PIPELINE, "a stack of 3 blocks and a stack of 4 blocks"),
        (Outputs, PIPELINE, "return outputs of each layer"),
        (Outside, PIPELINE, "reads the stacked parameter blocks/norm/scale outside of the scan"),
        (Keys, PIPELINE, "pass on a random key"),
        (Reversed, PIPELINE, "no blocks to cut into stages"),
        (Experts, PIPELINE, "no blocks to cut into stages"),
        (Experts, {"weights": "host"}, "weights are streamed to blocks that a scan runs"),
        (Experts, {"unroll": "2"}, "unroll 2: this model runs its own layers without a scan"),
        (lambda rngs: InStack(rngs, lambda rngs: OurBlock(rngs, 0.5)), PIPELINE, "random streams of their own"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_cannot_be_cut_into_stages_is_refused_by_name(make, plan, words):
    with pytest.raises(UserError, match=re.escape(words)):
        figures_of(make, **plan)


@pytest.mark.slow
def test_one_of_several_stacks_is_named():
    model = ForeignModel(Several, language_model(), blocks="blocks")
    np.testing.assert_allclose(figures_of(model, **PIPELINE)[0], plain(Several), rtol=1e-5)


@pytest.mark.parametrize("make", [variant(Twice), *map(nightly, (Several, Outputs, Outside, Keys))])
def test_without_a_pipeline_they_train_under_every_rule(make):
    np.testing.assert_allclose(figures_of(make, memory="full", mesh="1")[0], plain(make), rtol=1e-5)
