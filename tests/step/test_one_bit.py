"""1-bit Adam and LAMB in the train step: exact first, then momenta in a bit a number; carried on; refusals."""

from typing import Any

import jax
import numpy as np
import pytest

from jaxscale.compiler.collectives import collectives
from jaxscale.errors import UserError
from jaxscale.models.decoder import Decoder
from jaxscale.optim.optimizer import Optimizer
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.replicas import OneBit
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.step.build import build
from jaxscale.step.compiled_checks import NoEffect, bytes_over, check_codec
from jaxscale.values import override
from tests.plans import grouped

MODEL = Decoder(vocab=12, context=8, layers=2, embed=16, heads=2)
RNG = np.random.default_rng(0)
BATCHES = [{name: RNG.integers(0, 12, (8, 8), np.int32) for name in ("tokens", "targets")} for _ in range(4)]
FREEZE = 2


def experiment(name: Any, **changes: Any) -> Experiment:
    given = {"learning_rate": 0.01, "schedule": "constant", "weight_decay": 0.1, **changes}
    return Experiment("one_bit", MODEL, None, batch=8, steps=8, optimizer=Optimizer(name, **given))


def run(step: Any, state: Any, batches: Any = BATCHES) -> tuple[Any, list[dict[str, float]]]:
    found = []
    for batch in batches:
        state, metrics = step(state, step.place(batch))
        found.append({name: float(value) for name, value in metrics.items()})
    return state, found


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param("one_bit_adam", {"mesh": "replica:2,fsdp:2", "zero": "2"}, marks=pytest.mark.slow),
        pytest.param(
            "one_bit_adam",
            {"mesh": "replica:2,fsdp:2,tensor:2", "zero": "2", "microbatches": "2"},
            marks=pytest.mark.slow,
        ),
        pytest.param("one_bit_adam", {"mesh": "replica:8"}, marks=pytest.mark.slow),
        pytest.param("one_bit_lamb", {"mesh": "replica:4,fsdp:2", "zero": "3"}, marks=pytest.mark.slow),
        pytest.param("one_bit_lamb", {"mesh": "replica:2,fsdp:2", "pipeline": "1f1b:2x2"}, marks=pytest.mark.slow),
    ],
)
def test_exact_then_in_bits_and_on_from_a_checkpoint(name: str, plan: dict[str, str]) -> None:
    step = build(experiment(name, freeze=FREEZE), override(Plan(), grouped(plan)))
    step.compile(BATCHES[0])
    assert step.gradient_exchange is not None
    assert step.plan.reduce == OneBit(start=FREEZE)
    state, found = run(step, step.init(), BATCHES[:FREEZE])
    # the warm-up is that of Adam or LAMB on all rows at once
    plain = {"one_bit_adam": "adamw", "one_bit_lamb": "lamb"}[name]
    alone = build(experiment(plain), Plan(mesh=MeshSpec()))
    wanted, rows = run(alone, alone.init(), BATCHES[:FREEZE])
    for row, other in zip(found, rows, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        assert row["residual_norm"] == 0
        assert row["wire_bytes"] == step.gradient_exchange.exact_bytes
    ours, theirs = (
        {n: np.asarray(a) for n, a in s.to_canonical(x).items()} for s, x in ((step, state), (alone, wanted))
    )
    for key in (n for n in theirs if n.startswith("params/")):
        np.testing.assert_allclose(ours[key], theirs[key], atol=3e-4, err_msg=key)
    # from then on matrices go in a bit a number, and a restored state repeats it to the bit
    abstract = step.canonical_abstract()
    again = step.from_canonical({n: jax.device_put(a, abstract[n].sharding) for n, a in ours.items()})
    state, found = run(step, state, BATCHES[FREEZE:])
    other, _ = run(step, again, BATCHES[FREEZE:])
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), state, other)
    for row in found:
        assert np.isfinite(row["loss"])
        assert row["residual_norm"] > 0
        assert row["wire_bytes"] == step.gradient_exchange.wire_bytes < step.gradient_exchange.exact_bytes / 3
        assert row["skipped"] == 0
    for leaf in jax.tree.leaves(state.params):
        shards: dict[str, bytes] = {}
        for shard in leaf.addressable_shards:
            data = np.asarray(shard.data).tobytes()
            assert shards.setdefault(str(shard.index), data) == data


@pytest.mark.slow
def test_gradients_sent_in_full_are_found() -> None:
    step = build(experiment("one_bit_adam", freeze=FREEZE), Plan(mesh=MeshSpec(replica=2)))
    assert step.gradient_exchange is not None
    whole = build(experiment("adamw"), Plan(mesh=MeshSpec(replica=2)))
    whole.compile(BATCHES[0])
    sent = bytes_over(
        collectives(whole.program or "", whole.mesh), step.gradient_exchange.axis, step.gradient_exchange.replicas
    )
    with pytest.raises(NoEffect, match="onebit"):
        check_codec(step.gradient_exchange, sent)


@pytest.mark.parametrize(
    ("options", "plan", "message"),
    [
        ({}, {"mesh": "fsdp:2", "zero": "2"}, "momenta cross the replica axis, but mesh fsdp:2 has none"),
        ({"freeze": 8}, {"mesh": "replica:2"}, "after 8 updates, but the run has 8.*or take adamw"),
        ({}, {"mesh": "replica:2", "reduce": "int8"}, "with reduce int8: replicas send momenta in one bit"),
        ({}, {"mesh": "replica:2", "optimizer_state": "streamed"}, "optimizer_state streamed: replicas send"),
        ({}, {"mesh": "replica:2", "weights": "host"}, "optimizer one_bit_adam with offload.weights host"),
    ],
)
def test_refusals(options: dict[str, Any], plan: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(experiment("one_bit_adam", **options), override(Plan(), grouped(plan)))
