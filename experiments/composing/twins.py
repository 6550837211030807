"""Two steps of a combination, and of the twins that it is held to.

The plain twin trains the same model, batches and optimizer on one device with a plan of defaults. The lossy twin has in
addition those techniques that change the numbers by design (few bits, codecs, DiLoCo, stale weights), alone.
"""

import dataclasses
import functools
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from composing.draws import LAYERS, WIDTH, Draw

from jaxscale.models.decoder import Decoder
from jaxscale.optim.optimizer import Optimizer
from jaxscale.pipeline.plan import PipelinePlan
from jaxscale.planning.program import described_step
from jaxscale.planning.settle import settled
from jaxscale.platforms.platform import Platform
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.step.build import build
from jaxscale.step.experiment import Experiment
from jaxscale.step.plan import Plan
from jaxscale.step.rows import batch_shapes
from jaxscale.step.train_step import TrainStep
from jaxscale.values import override

VOCAB = 90
"""No multiple of the devices, so that a vocabulary over an axis is padded."""
LOSSY = (
    "precision", "matmul", "reduce", "diloco", "state", "master", "anneal", "correction", "synchronous_steps",
)  # fmt: skip
"""Fields of the plan that change the numbers by design. Every other field, a new one too, must not."""
REPLICATED = ("reduce", "diloco")
"""Of these, those that need replicas."""


@dataclasses.dataclass(frozen=True)
class Batches:
    """Shapes of a draw's batches: rows of tokens, targets with uneven weights, documents where they are packed."""

    length: int
    packed: bool

    def shapes(self, rows: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and type of each array."""
        names = {"tokens": "int32", "targets": "int32", "weights": "float32"}
        names |= {"segments": "int32", "positions": "int32"} if self.packed else {}
        return {name: ((rows, self.length), dtype) for name, dtype in names.items()}


def batch_of(draw: Draw, rows: int, step: int) -> dict[str, np.ndarray]:
    """Tokens of a Markov chain, with weights that differ from row to row and are zero in places."""
    rng = np.random.default_rng((draw.seed, step))
    tokens = np.empty((rows, draw.length + 1), np.int32)
    tokens[:, 0] = rng.integers(0, VOCAB, rows)
    for at in range(draw.length):
        noise = rng.integers(0, VOCAB, rows)
        tokens[:, at + 1] = np.where(rng.random(rows) < 0.3, noise, (5 * tokens[:, at] + 3) % VOCAB)
    weights = rng.random((rows, draw.length)) * rng.uniform(0.2, 2.0, (rows, 1))
    weights *= rng.random((rows, draw.length)) > rng.uniform(0.0, 0.7, (rows, 1))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights.astype(np.float32)}
    if draw.packed:
        starts = np.sort(rng.integers(1, draw.length, (rows, 3)), axis=1)
        places = np.arange(draw.length)
        segments = 1 + (places[None, :, None] >= starts[:, None, :]).sum(-1)
        first = np.concatenate([np.zeros((rows, 1), int), starts], axis=1)
        batch["segments"] = segments.astype(np.int32)
        batch["positions"] = (places - np.take_along_axis(first, segments - 1, axis=1)).astype(np.int32)
    return batch


@dataclasses.dataclass(frozen=True)
class Trained:
    """What the last two steps showed.

    Args:
        losses: of each, nats a target.
        norms: of each, of the gradient before clipping.
        compile_seconds: of tracing, lowering and compiling.
        run_seconds: of making the state and two steps.
    """

    losses: tuple[float, float]
    norms: tuple[float, float]
    compile_seconds: float
    run_seconds: float


def rows_of(draw: Draw) -> int:
    """Rows of the global batch: so many of each device and microbatch."""
    if draw.batch is not None:
        return draw.batch
    plan = draw.plan
    mesh = MeshSpec.parse(plan.get("mesh", "1"))
    microbatches = int(plan.get("microbatches", 1))
    if "pipeline" in plan:
        pipeline = PipelinePlan.parse(plan["pipeline"])
        microbatches = 8 if pipeline.name == "auto" else pipeline.shape()[1]
    return draw.rows * mesh.batch_shards * microbatches


def experiment_of(draw: Draw) -> Experiment:
    """What every twin of a draw trains."""
    model = Decoder(
        vocab=VOCAB,
        context=draw.length,
        layers=LAYERS,
        embed=WIDTH,
        heads=2 if draw.length > 64 and MeshSpec.parse(draw.plan["mesh"]).tensor < 4 else 4,
        mlp=2 * WIDTH,
        dropout=draw.dropout,
        init_std=0.2,
    )
    optimizer = override(Optimizer(), draw.optimizer)
    data = Batches(draw.length, draw.packed)
    return Experiment("composition", model, data, optimizer, steps=32, batch=rows_of(draw))


def plan_of(changes: Mapping[str, str]) -> Plan:
    """The plan of some changes."""
    return override(Plan(), changes)


def lossy_changes(draw: Draw) -> dict[str, str]:
    """The changes of the lossy twin: techniques that change the numbers, with the replicas or stages they need."""
    plan = draw.plan
    changes = {name: text for name, text in plan.items() if name in LOSSY}
    pipeline = plan.get("pipeline")
    if pipeline is not None and PipelinePlan.parse(pipeline).asynchronous:
        changes["pipeline"] = pipeline
        if "stages" in plan:
            changes["stages"] = plan["stages"]
    replicas = MeshSpec.parse(plan["mesh"]).replica
    codec = changes.get("reduce") not in (None, "float32", "bfloat16")
    split = codec or "diloco" in changes or draw.optimizer["name"].startswith("one_bit")
    changes["mesh"] = f"replica:{replicas}" if split and replicas > 1 else "1"
    return changes


def asynchronous(draw: Draw) -> bool:
    """Whether the combination's pipeline never drains."""
    pipeline = draw.plan.get("pipeline")
    return pipeline is not None and PipelinePlan.parse(pipeline).asynchronous


@functools.lru_cache(maxsize=16)
def compiled(experiment: Experiment, changes: tuple[tuple[str, str], ...]) -> TrainStep:
    """The train step of an experiment under the changes of a plan, traced, checked and compiled."""
    step = build(experiment, settled(experiment, plan_of(dict(changes))))
    step.compile(batch_shapes(experiment))
    return step


def plain_twin(draw: Draw) -> Draw:
    """The draw whose optimizer sends nothing in few bits: the rule that it begins as."""
    names = {"one_bit_adam": "adamw", "one_bit_lamb": "lamb"}
    changed = ((path, names.get(text, text) if path == "optimizer.name" else text) for path, text in draw.techniques)
    return dataclasses.replace(draw, techniques=tuple(changed))


def steps_of(draw: Draw) -> int:
    """Two steps; where a pipe has to fill, as many more as it takes until gradients are as old as they get."""
    pipeline = draw.plan.get("pipeline")
    plan = None if pipeline is None else PipelinePlan.parse(pipeline)
    if plan is None or not plan.asynchronous:
        return 2
    waiting = int(draw.plan.get("synchronous_steps", 0))
    return 2 + waiting + 2 * (plan.ranks or 1)


def train(draw: Draw, changes: Mapping[str, str], *, nudged: bool = False) -> Trained:
    """Two steps under a plan.

    Args:
        draw: model, batches and optimizer.
        changes: of the plan.
        nudged: the first weights are off by about an ulp: what that changes is what rounding may change.

    Raises:
        UserError: the plan is refused.
    """
    experiment = experiment_of(draw)
    start = time.perf_counter()
    step = compiled(experiment, tuple(sorted(changes.items())))
    compiled_at = time.perf_counter()
    state = step.init()
    if nudged:
        state = dataclasses.replace(state, params=_nudged(state.params))
    losses, norms = [], []
    for number in range(steps_of(draw)):
        state, metrics = step.run(state, step.place(batch_of(draw, experiment.batch, number)))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    ended = time.perf_counter()
    return Trained((losses[-2], losses[-1]), (norms[-2], norms[-1]), compiled_at - start, ended - compiled_at)


def lower(draw: Draw, platform: str) -> float:
    """Seconds that a combination takes to be traced and lowered for devices that need not be here.

    Args:
        draw: the combination.
        platform: such as "tpu v5e:2x4".

    Raises:
        UserError: the plan is refused there.
    """
    start = time.perf_counter()
    target = Platform.parse(platform)
    experiment = experiment_of(draw)
    step = described_step(experiment, target, settled(experiment, plan_of(draw.plan)))
    traced = step.step_fn.trace(step.layout.abstract, step.abstract_batch(batch_shapes(experiment)))
    step.check_kernels()
    traced.lower(lowering_platforms=({"gpu": "cuda"}.get(target.chip.kind, target.chip.kind),))
    return time.perf_counter() - start


def _nudged(params: Any) -> Any:
    """Weights whose last bit is drawn again, where they lie."""

    def nudge(path: Any, leaf: Any) -> Any:
        key = jax.random.key(len(jax.tree_util.keystr(path)))
        noise = 1 + 1e-7 * jax.random.normal(key, leaf.shape)
        return jax.device_put((leaf * noise).astype(leaf.dtype), leaf.sharding)

    return jax.tree_util.tree_map_with_path(nudge, params)
