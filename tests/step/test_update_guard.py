"""A step whose update is not finite, or far larger than the parameters, is skipped under every plan.

By default on one device, over shards and by stage; streamed updates and weights on the host for what is estimated.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jaxscale.data.rows import Arrays
from jaxscale.models.foreign import ForeignModel
from jaxscale.optim.leaves import ParamInfo
from jaxscale.optim.optimizer import Optimizer
from jaxscale.optim.rules import RULES
from jaxscale.optim.update_guard import ZERO_RMS, UpdateGuard
from jaxscale.recipe.experiment import Experiment, Guard
from jaxscale.recipe.plan import Plan
from jaxscale.step.build import build
from jaxscale.step.host import is_judged_whole
from jaxscale.step.train_step import TrainStep
from jaxscale.step.update import _LARGEST_GROWTH
from jaxscale.values import override
from tests.plans import grouped
from tests.step.residual import Residual, Vectors, random_batch
from tests.tiers import variants

ROWS = 8
GUARD = Guard()
EXPERIMENT = Experiment("guard", Residual(), Vectors(), batch=ROWS, steps=6)
BATCH = random_batch(ROWS)


def step_of(text: str, guard: Guard = GUARD, **optimizer: Any) -> TrainStep:
    rule = Optimizer(**{"schedule": "constant", **optimizer})
    experiment = dataclasses.replace(EXPERIMENT, optimizer=rule, guard=guard)
    return build(experiment, override(Plan(), grouped(dict(part.split("=", 1) for part in text.split("; ")))))


def arrays(step: TrainStep, state: Any) -> dict[str, np.ndarray]:
    """All arrays of a state but the counts and what a pipeline has in flight."""
    canonical = step.to_canonical(state)
    return {n: np.array(a) for n, a in canonical.items() if not n.startswith(("watch", "step", "in_flight"))}


def ratio(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> float:
    """RMS of the change of all parameters over their own RMS."""
    names = [name for name in before if name.startswith("params/")]
    changes = sum(np.square(np.float64(after[name]) - before[name]).sum() for name in names)
    return float(np.sqrt(changes / sum(np.square(np.float64(before[name])).sum() for name in names)))


def test_the_condition_on_an_update() -> None:
    def allows(update: float, param: float, bound: float) -> bool:
        return bool(UpdateGuard(bound).allows({"a": jnp.full(3, update), "b": jnp.zeros(1)}, {"a": jnp.full(4, param)}))

    assert allows(5.7, 1.0, 5.0)  # sqrt(3/4) 5.7 = 4.94
    assert not allows(5.8, 1.0, 5.0)
    assert allows(1e6, 1.0, 0.0)
    assert not any(allows(bad, 1.0, bound) for bad in (np.nan, np.inf, -np.inf, 1e28) for bound in (0.0, 5.0, 1e30))
    assert not allows(0.1, np.nan, 5.0)
    assert allows(5.7 * ZERO_RMS, 0.0, 5.0), "parameters that start from zero"
    assert not allows(5.8 * ZERO_RMS, 0.0, 5.0)


@pytest.mark.parametrize(("bound", "allowed"), [(2.0, [True, True, False, False]), (0.0, [True, True, True, False])])
def test_a_learning_rate_is_judged_where_an_update_is_not(bound: float, allowed: list[bool]) -> None:
    guard, one, params = UpdateGuard(bound), jnp.float32(1.0), {"w": jnp.ones(4)}
    rates = (1e-3, 2.0, 2.1, np.inf)
    assert [bool(guard.allows_rate(jnp.float32(rate), "ones", one, params)) for rate in rates] == allowed
    # parameters on the host are not read, and count as 0.01
    rates = tuple(rate * ZERO_RMS for rate in rates)
    verdicts = [
        bool(guard.allows_rate(jnp.float32(rate), "ones", one, params, are_params_read=False)) for rate in rates
    ]
    assert verdicts == allowed


def test_devices_of_a_manual_region_agree() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("replica",))
    updates, params = jnp.array([0.0, 8.0]), jnp.ones(2)  # 8 / sqrt(2) = 5.7 over both
    bounds = (5.0, 6.0)
    verdicts = jax.jit(
        jax.shard_map(
            lambda update, param: [
                UpdateGuard(bound, ("replica",)).allows({"a": update}, {"a": param})[None] for bound in bounds
            ],
            mesh=mesh,
            in_specs=PartitionSpec("replica"),
            out_specs=PartitionSpec("replica"),
        )
    )(updates, params)
    assert [verdict.tolist() for verdict in verdicts] == [[False, False], [True, True]]


WHOLE = [
    ("mesh=1", {"ema": 0.9}),
    ("mesh=fsdp:4; zero=3", {"name": "muon"}),
    ("mesh=fsdp:2,tensor:2; zero=1; precision=bfloat16; state.moments=int8; state.master=split", {}),
    ("mesh=replica:2,fsdp:2; reduce=int8; zero=2", {"name": "lamb"}),
    ("mesh=replica:2; diloco=every=2", {}),
    ("mesh=1; pipeline=1f1b:2x2", {}),
    ("mesh=1; pipeline=2bw:2x2", {"name": "sgd"}),
    ("mesh=1; pipeline=2bw:2x2,synchronous_steps=2", {}),
]


@pytest.mark.parametrize(("text", "optimizer"), variants(WHOLE, (WHOLE[0], WHOLE[1], WHOLE[6])))
def test_an_update_beyond_numbers_leaves_everything_as_it_was(text: str, optimizer: dict[str, Any]) -> None:
    step = step_of(text, learning_rate=1e30, **optimizer)
    state = step.init()
    before = arrays(step, state)
    for _ in range(2 + 2 * ("2bw" in text)):
        state, metrics = step(state, step.place(BATCH))
        assert np.isfinite(float(metrics["grad_norm"]))
    for name, array in arrays(step, state).items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)
    assert int(metrics["skipped"]) == int(metrics["skipped_in_row"]) >= 2
    assert int(state.watch.good) == 0


@pytest.mark.parametrize("text", variants(["mesh=1", "mesh=fsdp:2,tensor:2; zero=3"], 1))
def test_the_bound_is_on_the_rms_of_the_update_over_that_of_the_parameters(text: str) -> None:
    step = step_of(text, Guard(update=0.0), learning_rate=0.05, custom=optax.adam)
    state = step.init()
    first = jax.tree.map(np.array, state)
    before = arrays(step, state)
    state, _ = step(state, step.place(BATCH))
    measured = ratio(before, arrays(step, state))
    for factor, skipped in ((1.001, 0), (0.999, 1)):
        step = step_of(text, Guard(update=factor * measured), learning_rate=0.05, custom=optax.adam)
        _, metrics = step(jax.device_put(first, step.layout.state_shardings), step.place(BATCH))
        assert int(metrics["skipped"]) == skipped


RATES = [
    # a rate that is allowed, one that is not, and the rule; the weights have a root mean square of about 0.1
    ("zero=0", 7.0, 30.0, {}),
    ("zero=0", 0.05, 0.2, {"weight_decay": 1e3, "decay": "all"}),
    ("zero=0", 90.0, 110.0, {"name": "lamb"}),
    ("offload.optimizer_state=streamed", 7.0, 30.0, {}),
    ("offload.optimizer_state=host", 0.9, 1.1, {}),
    ("offload.weights=host", 0.9, 1.1, {"name": "lion"}),
    ("offload.optimizer_state=streamed", 90.0, 110.0, {"name": "lamb"}),
    ("offload.optimizer_state=streamed", 600.0, 1e6, {"name": "sgd", "momentum": 0.5, "clip": 1.0}),
    (
        "offload.optimizer_state=streamed",
        600.0,
        1e6,
        {"custom": lambda rate: optax.sgd(rate, momentum=0.5), "clip": 1.0},
    ),
]


@pytest.mark.parametrize(
    ("text", "allowed_rate", "skipped_rate", "optimizer"), variants(RATES, (RATES[0], RATES[3], RATES[5]))
)
def test_the_size_of_an_update_that_is_bounded_or_never_whole_is_estimated(
    text: str, allowed_rate: float, skipped_rate: float, optimizer: dict[str, Any]
) -> None:
    for rate, skipped in ((allowed_rate, 0), (skipped_rate, 1)):
        step = step_of(f"mesh=1; {text}", learning_rate=rate, **optimizer)
        state = step.init()
        before = arrays(step, state)
        state, metrics = step(state, step.place(BATCH))
        assert int(metrics["skipped"]) == skipped, rate
        for name, array in arrays(step, state).items() if skipped else ():
            np.testing.assert_array_equal(array, before[name], err_msg=name)


@pytest.mark.parametrize(  # that a meeting moves the weights, `test_diloco.py` has by default
    ("outer_rate", "skipped"), variants([("1e30", 1), ("0.7", 0)], 1)
)
def test_an_outer_step_beyond_the_bound_is_skipped_and_counted(outer_rate: str, skipped: int) -> None:
    step = step_of(f"mesh=replica:2; diloco=every=2,lr={outer_rate}", learning_rate=0.01)
    state = step.init()
    before = {n: a for n, a in arrays(step, state).items() if n.startswith("params/")}
    for _ in range(2):
        state, metrics = step(state, step.place(BATCH))
    after = arrays(step, state)
    assert int(metrics["skipped"]) == skipped
    assert all((after[name] == before[name]).all() for name in before) == bool(skipped)
    assert np.isfinite(float(step(state, step.place(BATCH))[1]["loss"]))


class Averages(nnx.Module):
    """A model with a running sum that leaves float32 behind while its loss stays finite."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(2, 1, rngs=rngs)
        self.total = nnx.BatchStat(jnp.full((), 2e38))
        self.mask = nnx.BatchStat(jnp.full(2, -jnp.inf))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.total.set_value(self.total.get_value() + 1e38 * jnp.max(x))
        return self.dense(x)


def test_a_batch_statistic_that_ceases_to_be_finite_is_not_applied() -> None:
    model = ForeignModel(lambda rngs: Averages(rngs), lambda module, batch: jnp.sum(module(batch["x"]) ** 2, -1))
    data = Arrays({"x": np.ones((8, 2), np.float32)})
    experiment = Experiment("statistics", model, data, batch=4, steps=6)
    step = build(experiment, override(Plan(), {"mesh": "1"}))
    state = step.init()
    batch = {"x": np.ones((4, 2), np.float32)}
    totals = []
    for _ in range(3):
        state, metrics = step(state, step.place(batch))
        totals.append(float(state.rest["total"]))
    assert totals[0] == totals[1] == totals[2] == pytest.approx(3e38)
    assert int(metrics["skipped"]) == 2
    assert np.isneginf(np.asarray(state.rest["mask"])).all()


@pytest.mark.parametrize("text", variants(["mesh=1", "mesh=fsdp:2; zero=1"], 1))
def test_the_guard_changes_no_bit_of_a_good_run(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def losses() -> list[str]:
        step = step_of(text, learning_rate=0.01)
        state, found = step.init(), []
        for _ in range(6):
            state, metrics = step(state, step.place(BATCH))
            found += [float(metrics["loss"]).hex(), float(metrics["grad_norm"]).hex()]
        return found

    guarded = losses()
    monkeypatch.setattr(UpdateGuard, "_allows_squares", lambda self, *sums: jnp.array(True))
    assert losses() == guarded


def test_a_fused_kernel_has_no_whole_update() -> None:
    step = step_of("mesh=1", name="muon")
    bounded, fused = (
        dataclasses.replace(step.update, **changes)
        for changes in ({"is_bounded": True}, {"fused_advance": lambda *trees: trees[2:0:-1]})
    )
    assert [is_judged_whole(step.plan, update) for update in (step.update, bounded, fused)] == [True, False, False]


@pytest.mark.parametrize(
    ("optimizer", "moments", "is_bounded"),
    [
        ({}, "float32", True),
        ({"eps": 0.0}, "float32", False),
        ({}, "int8", False),
        ({"name": "muon"}, "float32", False),
        ({"name": "sgd"}, "float32", True),
        ({"name": "sgd", "momentum": 0.99}, "float32", False),
        ({"name": "sgd", "momentum": 1.0}, "float32", False),
        ({"b1": 0.0, "b2": 0.9999}, "float32", False),
        ({"custom": optax.adamw}, "float32", False),
    ],
)
def test_rules_that_bound_their_updates_need_no_second_reading(
    optimizer: dict[str, Any], moments: str, is_bounded: bool
) -> None:
    assert step_of(f"mesh=1; state.moments={moments}", **optimizer).update.is_bounded is is_bounded


@pytest.mark.parametrize("name", [name for name, entry in RULES.items() if entry.is_bounded])
def test_the_updates_of_a_bounded_rule_are_at_most_a_few_dozen_units(name: str) -> None:
    """Gradients that change by eight orders of magnitude, with zeros, are the worst that these rules get."""
    rule = Optimizer(name=name, learning_rate=1.0, schedule="constant", weight_decay=0.0, clip=None).build(
        60, {"w": ParamInfo((8, 8), "matrix")}
    )
    params = {"w": jnp.full((8, 8), 0.5)}
    state, rng, largest = rule.init(params), np.random.default_rng(0), 0.0
    largest_gradient = 0.0
    for number in range(60):
        scale = (1e-4, 1e4)[number > 40] * (number % 7 != 3)
        gradients = {"w": jnp.asarray(rng.normal(0, scale, (8, 8)), jnp.float32)}
        updates, state = rule.update(gradients, state, params)
        largest = max(largest, float(jnp.sqrt(jnp.mean(jnp.square(updates["w"])))))
        largest_gradient = max(largest_gradient, float(jnp.sqrt(jnp.mean(jnp.square(gradients["w"])))))
    unit = {"ones": 1.0, "weights": 0.5, "gradients": largest_gradient}[RULES[name].update_unit]
    assert 0 < largest <= _LARGEST_GROWTH * unit
