"""Every update rule by name, through the train step: it trains, and alike whether one device or four hold the state."""

import numpy as np
import pytest

from jaxscale.models.decoder import Decoder
from jaxscale.optim.optimizer import Optimizer
from jaxscale.optim.rules import RULES
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.step.build import build

ROWS, LENGTH, VOCAB, STEPS = 8, 8, 13, 4
MODEL = Decoder(vocab=VOCAB, context=LENGTH, layers=3, embed=16, heads=2, mlp=32, tied=True)
BATCH = {name: np.random.default_rng(0).integers(0, VOCAB, (ROWS, LENGTH), np.int32) for name in ("tokens", "targets")}
OPTIONS = {
    "sgd": {"learning_rate": 0.5, "momentum": 0.9},
    "lars": {"learning_rate": 1.0},
    "lamb": {"learning_rate": 0.02},
    "muon": {"precision": "float32"},
    "soap": {"every": 2},
    "galore": {"rank": 4, "every": 2},
}
ALONE = [name for name, rule in RULES.items() if not rule.takes_mean_messages]
"""Those that one device takes; `test_one_bit.py` has the others."""


def trained(name, mesh, zero):
    """Losses of some steps of one batch."""
    optimizer = Optimizer(name=name, **{"learning_rate": 0.01, **OPTIONS.get(name, {})})
    experiment = Experiment("names", MODEL, None, optimizer=optimizer, steps=10, batch=ROWS)
    step = build(experiment, Plan(mesh=MeshSpec.parse(mesh), zero=zero))
    state, batch = step.init(), step.place(BATCH)
    step.compile(batch)
    losses = []
    for _ in range(STEPS):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert int(state.watch.good) == STEPS
    return losses


@pytest.mark.slow  # `test_optimizer_battery.py` has some of them by default
@pytest.mark.parametrize("name", ALONE)
def test_a_rule_trains_and_its_devices_agree(name):
    """Three layers over four devices: they do not divide."""
    alone = trained(name, "1", 0)
    assert alone[-1] < alone[0] - 0.005, alone
    np.testing.assert_allclose(trained(name, "fsdp:4", 3), alone, rtol=2e-5)
