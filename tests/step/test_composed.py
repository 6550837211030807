"""Everything at once: axes in threes and all four, states and weights in few bits, codes on the slow axis, remat.

By default three axes of which one is a pipeline.

python tests/step/test_composed.py CHANGES...  (JSON each, with 16 devices: trains, prints held-out losses)
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.compiler.collectives import collectives
from jaxscale.lowbit.quantize import is_quantized
from jaxscale.models.decoder import Decoder
from jaxscale.optim.optimizer import Optimizer
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.step.build import build
from jaxscale.step.compiled_checks import bytes_over
from jaxscale.step.train_step import TrainStep
from jaxscale.values import override
from tests.plans import grouped
from tests.step.residual import Residual, random_batch
from tests.tiers import variants

ROWS, VOCAB = 16, 16
BATCH = random_batch(ROWS)
FEW_BITS = {"precision": "bfloat16", "master": "split", "state": "int8", "memory": "full"}
CODES = {**FEW_BITS, "reduce": "int8"}


def run(changes: dict[str, str]) -> tuple[TrainStep, Any, list[list[float]]]:
    optimizer = Optimizer(learning_rate=0.01)
    experiment = Experiment("composed", Residual(), None, optimizer=optimizer, steps=20, batch=ROWS)
    step = build(experiment, override(Plan(), grouped(changes)))
    step.compile(BATCH)
    state, found = step.init(), []
    for _ in range(3):
        state, metrics = step(state, step.place(BATCH))
        found.append([float(metrics[name]) for name in ("loss", "grad_norm")])
    return step, state, found


@functools.cache
def alone() -> list[list[float]]:
    """The same on one device, everything in float32."""
    return run({"mesh": "1"})[2]


@pytest.mark.parametrize(
    "changes",
    variants(
        [
            {"mesh": "replica:2,fsdp:2", "pipeline": "1f1b:2x2", "zero": "2", **CODES},
            {"mesh": "replica:2,fsdp:2,tensor:2", "zero": "2", **CODES},
            {"mesh": "replica:2,tensor:2", "pipeline": "1f1b:2x2", **CODES},
            {"mesh": "fsdp:2,tensor:2", "pipeline": "1f1b:2x2", "zero": "2", **FEW_BITS},
        ],
        1,
    ),
    ids=lambda changes: changes["mesh"] + ",pipe:2" * ("pipeline" in changes),
)
def test_three_axes_train_as_one_device_does(changes: dict[str, str]) -> None:
    """The norms of gradients too: Adam does not see a gradient of the wrong scale."""
    step, state, found = run(changes)
    np.testing.assert_allclose(found, alone(), rtol=0.01)
    assert found[2][0] < 0.6 * found[0][0]
    moments = [leaf for leaf in jax.tree.leaves(state.optimizer, is_leaf=is_quantized) if is_quantized(leaf)]
    assert len(moments) == 4
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.bfloat16)}
    if step.gradient_exchange is None:
        return
    assert not step.gradient_exchange.plain_names
    assert step.gradient_exchange.exact_bytes > 3.8 * step.gradient_exchange.wire_bytes
    # that no replica has what another has not: each computes the same mean
    for leaf in jax.tree.leaves(state.params):
        by_index: dict[str, bytes] = {}
        for shard in leaf.addressable_shards:
            mine = np.asarray(shard.data).tobytes()
            assert by_index.setdefault(str(shard.index), mine) == mine


ALL_FOUR = {"mesh": "replica:2,fsdp:2,tensor:2", "pipeline": "1f1b:2x4", "zero": "2", "precision": "bfloat16"}


@pytest.mark.slow
def test_all_four_axes_train_as_their_uncompressed_twin_does() -> None:
    """16 devices, so in a process of its own."""
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    flags.append("--xla_force_host_platform_device_count=16")
    cases = [{**ALL_FOUR, **CODES}, ALL_FOUR]
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, __file__, *map(json.dumps, cases)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "XLA_FLAGS": " ".join(flags), "PYTHONPATH": str(root)},
        timeout=1200,
    )
    assert ended.returncode == 0, ended.stderr
    few, twin = json.loads(ended.stdout.splitlines()[-1])
    assert few["loss"] == pytest.approx(twin["loss"], abs=0.02)
    for found in (few, twin):
        assert found["loss"] < found["start"] - 1
    # what crosses the replica axis is what the codec says, and a third of what its twin sends
    assert few["sent"] == pytest.approx(few["told"], rel=0.05)
    assert twin["sent"] > 3 * few["sent"]


def sentences(rows: int, seed: int) -> dict[str, np.ndarray]:
    """Each token says the next but for one in ten, which are drawn: 0.56 nats a token at the least."""
    rng = np.random.default_rng(seed)
    found = np.empty((rows, 9), np.int32)
    found[:, 0] = rng.integers(0, VOCAB, rows)
    for at in range(8):
        found[:, at + 1] = np.where(
            rng.random(rows) < 0.1, rng.integers(0, VOCAB, rows), (5 * found[:, at] + 3) % VOCAB
        )
    return {"tokens": found[:, :-1], "targets": found[:, 1:]}


def main(cases: list[str]) -> None:
    """Train each plan on the same sentences; print what each came to."""
    told = []
    for case in cases:
        model = Decoder(vocab=VOCAB, context=8, layers=4, embed=32, heads=4, mlp=64)
        experiment = Experiment("four", model, None, optimizer=Optimizer(learning_rate=0.01), steps=60, batch=32)
        step = build(experiment, override(Plan(), grouped(json.loads(case))))
        step.compile(sentences(32, 0))
        state, losses = step.init(), []
        for number in range(60):
            state, metrics = step(state, step.place(sentences(32, number)))
            losses.append(float(metrics["loss"]))
        held = step.evaluate(state, step.place(sentences(256, 1000)))
        sent = [c for c in collectives(step.program or "", step.mesh) if c.axes is None or "replica" in c.axes]
        stage = step.gradient_exchange
        told.append(
            {
                "start": losses[0],
                "loss": float(held.total) / float(held.weight),
                "sent": sum(c.bytes * c.count for c in sent)
                if stage is None
                else bytes_over(sent, stage.axis, stage.replicas),
                "told": None if stage is None else stage.wire_bytes,
            }
        )
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1:])
