"""Models in the shapes of public ones train unchanged: under ZeRO 3, remat, states in few bits, and in a pipeline."""

import functools
import pathlib
import random
import re

import numpy as np
import optax
import pytest

from jaxscale import Experiment, Optimizer, build
from jaxscale.errors import UserError
from jaxscale.lowbit.quantized import StatePolicy
from jaxscale.optim import quantize_state
from tests.models.public_language_models import ROWS
from tests.models.public_models import PUBLIC_MODELS
from tests.plans import plan_of
from tests.tiers import variants

SOWS = pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
"""Gemma sows as its public form does, outside of `nnx.capture`, which Flax has deprecated since."""
DEFAULT = ("lm1b (flax/examples/lm1b_nnx)", "WaveNet", "U-Net (diffusion)", "two towers (CLIP)")
"""The models of CI; the others run nightly. By default one trains under ZeRO 3; `test_foreign_chain.py` has
pipelines of models in these shapes."""
MODELS = [
    pytest.param(
        name, id=name, marks=[*([] if name in DEFAULT else [pytest.mark.slow]), *([SOWS] if "Gemma" in name else [])]
    )
    for name in PUBLIC_MODELS
]


def trajectory(name, **plan_fields):
    """Losses and gradient norms of two steps."""
    public = PUBLIC_MODELS[name]
    optimizer = plan_fields.pop("optimizer", None) or Optimizer("sgd", learning_rate=0.05)
    experiment = Experiment("public", public.model, public.batch(), optimizer, steps=2, batch=ROWS)
    step = build(experiment, plan_of(**plan_fields))
    step.compile(public.batch())
    state, figures = step.init(), []
    for _ in range(2):
        state, metrics = step(state, step.place(public.batch()))
        figures.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return np.array(figures)


plain = functools.cache(trajectory)


@pytest.mark.parametrize("name", variants(MODELS, default=["two towers (CLIP)"]))
def test_zero_3_and_remat_give_the_losses_of_one_device(name):
    np.testing.assert_allclose(trajectory(name, mesh="fsdp:2", zero="3", memory="full"), plain(name), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_states_in_few_bits_train(name):
    policy = StatePolicy(skip="^$", least=16)  # these matrices are too small for the states of a plan
    adam = Optimizer(custom=lambda rate: quantize_state(optax.adamw(rate), "int8", policy), learning_rate=1e-3)
    figures = trajectory(name, optimizer=adam, mesh="data:2")
    np.testing.assert_allclose(figures[0], plain(name)[0], rtol=1e-5)
    assert np.isfinite(figures).all()


@pytest.mark.parametrize("name", variants(MODELS, default=DEFAULT[2:]))
def test_a_pipeline_gives_the_losses_of_one_device_or_is_refused_by_name(name):
    refusal = PUBLIC_MODELS[name].refusal
    if refusal:
        with pytest.raises(UserError, match=re.escape(refusal)):
            trajectory(name, pipeline="1f1b:2x4", stash="input")
    else:
        figures = trajectory(name, pipeline="1f1b:2x4", stash="input")
        np.testing.assert_allclose(figures, plain(name), rtol=1e-5)


def drawn_plan(rng):
    """A random plan that runs blocks in sequence."""
    fields = {"mesh": rng.choice(["1", "data:2", "fsdp:2"])}
    if rng.random() < 0.6:
        pipelines = ["1f1b:2x4", "gpipe:2x2", "zb-h1:2x4", "interleaved:2x4,v=2", "chimera:2x4", "dualpipe-v:2x4"]
        fields |= {"pipeline": rng.choice(pipelines), "stash": "input", "memory": rng.choice(["none", "full", "dots"])}
    else:
        fields["memory"] = rng.choice(["sqrt", "periodic:2", "revolve:2", "chain:64KiB"])
        fields["microbatches"] = rng.choice(["1", "2"])
    return fields | ({"zero": rng.choice(["2", "3"])} if "fsdp" in fields["mesh"] else {})


@SOWS
@pytest.mark.slow
def test_random_plans_of_blocks_in_sequence_equal_their_plain_twins():
    seed = random.SystemRandom().randrange(10**6)
    rng, equal_count = random.Random(seed), 0
    for draw in range(12):
        name = rng.choice([name for name, public in PUBLIC_MODELS.items() if not public.refusal])
        plan_fields = drawn_plan(rng)
        try:
            figures = trajectory(name, **plan_fields)
        except UserError as error:
            if "separate submodules" not in str(error) and "budget" not in str(error):
                raise AssertionError((seed, draw, name, plan_fields)) from error
        else:
            np.testing.assert_allclose(figures, plain(name), rtol=3e-5, err_msg=str((seed, draw, name, plan_fields)))
            equal_count += 1
    assert equal_count >= 4, seed


def table():
    """The models, as rows of the table in the docs."""
    answers = [f"refused: {public.refusal}" if public.refusal else "trains" for public in PUBLIC_MODELS.values()]
    rows = [f"| {name} | {answer} |" for name, answer in zip(PUBLIC_MODELS, answers, strict=True)]
    return "\n".join(["| a model in the shape of | in a pipeline |", "|---|---|", *rows])


def test_the_table_in_the_docs_is_that_of_these_models():
    page = pathlib.Path(__file__).parents[2] / "docs/start/own_model.md"
    assert table() in page.read_text(), f"expected this table in {page.name}:\n{table()}"
