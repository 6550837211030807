"""A layout changes speed and memory, never the training: every plan gives what a plain single device gives.

The optimizer makes one SGD step and AdamW steps after it: Adam alone does not see a gradient of the wrong scale. By
default two layouts have each axis, of data, tensor and sequence, and ZeRO 3; ZeRO 1 has dropout. `test_custom_rules.py`
has ZeRO 2 and `test_composed.py` bfloat16 by default.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale.memory.plan import MemoryPlan
from jaxscale.models.decoder import Decoder
from jaxscale.optim.optimizer import Optimizer
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.step.build import build
from tests.plans import plan_of
from tests.tiers import variants

ROWS, LENGTH, VOCAB, STEPS = 8, 16, 67, 6  # a prime vocabulary: it is padded under tensor parallelism
SINGLE = Plan(mesh=MeshSpec(), matmul="highest")


def sgd_then_adamw(rate):
    adamw = optax.adamw(3e-3, 0.9, 0.95, weight_decay=0.1)

    def update(grads, state, params):
        count, inner = state
        updates, inner = adamw.update(grads, inner, params)
        return jax.tree.map(lambda u, g: jnp.where(count == 0, -0.5 * g, u), updates, grads), (count + 1, inner)

    return optax.GradientTransformation(lambda params: (jnp.zeros((), jnp.int32), adamw.init(params)), update)


def an_experiment(**model):
    sizes = {"vocab": VOCAB, "context": LENGTH, "layers": 2, "embed": 32, "heads": 4, "kv_heads": 4, "mlp": 48}
    return Experiment(
        name="equal",
        model=Decoder(**{**sizes, **model}),
        data=None,
        optimizer=Optimizer(custom=sgd_then_adamw, clip=None),
        steps=STEPS,
        batch=ROWS,
    )


def windows():
    tokens = np.random.default_rng(0).integers(0, VOCAB, (ROWS, LENGTH + 1), dtype=np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def packed():
    """Rows with very different numbers of targets: a mean of means would show."""
    batch = windows()
    lengths = np.array([1, 16, 3, 9, 2, 16, 5, 12])
    inside = np.arange(LENGTH)[None, :] < lengths[:, None]
    second = (np.arange(LENGTH)[None, :] >= 4) & inside
    return {
        **batch,
        "weights": (inside & (batch["tokens"] % 5 != 0)).astype(np.float32),
        "segments": np.where(inside, 1 + second, 0).astype(np.int32),
        "positions": np.where(second, np.arange(LENGTH)[None, :] - 4, np.arange(LENGTH)[None, :]).astype(np.int32),
    }


def trajectory(experiment, plan, batch):
    """Loss and gradient norm of every step, and all parameters after the first."""
    step = build(experiment, plan)
    state = step.init()
    step.compile(batch)
    placed = step.place(batch)
    numbers, first = [], None
    for i in range(STEPS):
        state, metrics = step(state, placed)
        numbers.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        if i == 0:
            canonical = step.to_canonical(state)
            first = {k: np.asarray(v) for k, v in canonical.items() if k.startswith("params/")}
    return np.array(numbers), first


BATCHES = {"windows": windows, "packed": packed}


@functools.cache
def plain(kind):
    return trajectory(an_experiment(), SINGLE, BATCHES[kind]())


def layout(mesh, **fields):
    return plan_of(mesh=mesh, matmul="highest", **fields)


LAYOUTS = {
    "data": ("windows", layout("data:8")),
    "zero 1": ("windows", layout("fsdp:8", zero=1)),
    "zero 2": ("windows", layout("fsdp:8", zero=2)),
    "zero 3": ("packed", layout("fsdp:8", zero=3)),
    "tensor": ("windows", layout("tensor:4")),
    "tensor, sequence-sharded norms": ("packed", layout("data:2,tensor:4", sequence_parallel=True)),
    "context parallel": ("packed", layout("data:2,sequence:4")),
    "context parallel, chunked": (
        "packed",
        layout("sequence:4", attention="chunked", memory=MemoryPlan("full")),
    ),
    "zero 3 x context x tensor": ("packed", layout("fsdp:2,sequence:2,tensor:2", zero=3, attention="chunked")),
    "HSDP": ("packed", layout("replica:2,fsdp:4", zero=3)),
    "zero 3 x tensor": ("windows", layout("fsdp:2,tensor:4", zero=3)),
    "HSDP x tensor": ("windows", layout("data:2,fsdp:2,tensor:2", zero=3)),
    "2 microbatches": ("packed", layout("1", microbatches=2)),
    "4 microbatches, zero 2": ("packed", layout("fsdp:2", zero=2, microbatches=4)),
    "remat full": ("packed", layout("data:2", memory=MemoryPlan("full"))),
    "remat dots, unrolled, chunked": (
        "packed",
        layout("data:2", memory=MemoryPlan("dots"), unroll=2, loss_chunk=5, attention="chunked"),
    ),
}


TOGETHER = (
    "remat dots, unrolled, chunked",
    "HSDP",
    "HSDP x tensor",
    "zero 3 x tensor",
    "2 microbatches",
    "remat full",
    "context parallel, chunked",
    "zero 1",
    "zero 2",
    "zero 3",
    "tensor",
    "4 microbatches, zero 2",
)
"""Layouts whose parts the others have; the slow suite trains them as well."""
TIERS = {
    **dict.fromkeys(TOGETHER, pytest.mark.slow),
    **dict.fromkeys(("data", "context parallel"), pytest.mark.variant),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=TIERS.get(name, ())) for name in LAYOUTS])
def test_every_layout_trains_as_one_device_does(name):
    kind, plan = LAYOUTS[name]
    numbers, first = trajectory(an_experiment(), plan, BATCHES[kind]())
    expected, params = plain(kind)
    np.testing.assert_allclose(numbers, expected, rtol=1e-5)
    assert first.keys() == params.keys()
    for key, value in params.items():
        np.testing.assert_allclose(first[key], value, rtol=1e-5, atol=1e-5 * np.abs(value).max(), err_msg=key)


@functools.cache
def plain_with_dropout():
    return trajectory(an_experiment(dropout=0.3), SINGLE, packed())


@pytest.mark.parametrize("zero", variants([1, 2], 1))
def test_dropout_does_not_depend_on_the_layout(zero):
    expected, params = plain_with_dropout()
    plan = layout("data:2,fsdp:2", zero=zero, microbatches=2)
    numbers, first = trajectory(an_experiment(dropout=0.3), plan, packed())
    np.testing.assert_allclose(numbers, expected, rtol=1e-5)
    for key, value in params.items():
        np.testing.assert_allclose(first[key], value, rtol=1e-5, atol=1e-5 * np.abs(value).max(), err_msg=key)
    assert not np.allclose(numbers, plain("packed")[0], rtol=1e-3)


@pytest.mark.parametrize(
    ("zero", "reduce"),
    [
        *(pytest.param(zero, "float32", marks=pytest.mark.slow) for zero in (0, 1, 3)),
        pytest.param(2, None, marks=pytest.mark.variant),
    ],
)
def test_bfloat16_stays_near_float32(zero, reduce):
    plan = layout("data:4" if zero == 0 else "fsdp:4", zero=zero, precision="bfloat16", reduce=reduce)
    numbers, _ = trajectory(an_experiment(), plan, windows())
    np.testing.assert_allclose(numbers, plain("windows")[0], rtol=2e-2)
    assert np.abs(numbers / plain("windows")[0] - 1).max() > 1e-6, "bfloat16 had no effect"


def test_a_plan_is_a_value():
    plan = layout("fsdp:8", zero=2)
    assert dataclasses.replace(plan) == plan
    assert hash(plan) == hash(dataclasses.replace(plan))
