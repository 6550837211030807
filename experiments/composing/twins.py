"""A few steps of a combination, and of the twins that it is held to.

The plain twin trains the same model, batches and optimizer on one device with a plan of defaults. The lossy twin has in
addition those techniques that change the numbers by design (few bits, codecs, DiLoCo, stale weights), and no other.
Where these are several, each has a twin that has it alone.
"""

import dataclasses
import functools
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from composing.draws import LAYERS, WIDTH, Draw
from flax import nnx

from jaxscale.blocks import Context
from jaxscale.layers.mlp import MLP
from jaxscale.memory.plan import MemoryPlan
from jaxscale.models.decoder import Decoder
from jaxscale.optim.optimizer import Optimizer
from jaxscale.pipeline.plan import PipelinePlan
from jaxscale.planning.automatic_choices import resolve_choices
from jaxscale.planning.program import described_step
from jaxscale.platforms.platform import Platform
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.replicas.low_communication import Diloco
from jaxscale.sharding.mesh import MeshSpec
from jaxscale.state.batches import batch_shapes
from jaxscale.state.train_state import TrainState
from jaxscale.step.build import build
from jaxscale.step.train_step import TrainStep
from jaxscale.values import override

VOCAB = 90
"""No multiple of the devices, so that a vocabulary over an axis is padded."""
LOSSY = ("precision", "matmul", "reduce", "diloco", "state.moments", "state.master")
"""Fields of the plan that change the numbers by design. Every other field, a new one too, must not."""
EXACT_VALUES = {"matmul": ("high", "highest")}
"""Values of these that change no number on a CPU."""
NUDGES = {"float32": 1e-7, "bfloat16": 1e-4}
"""Relative sizes of nudges by the type computed in: an ulp, and what takes a few numbers in a hundred to the next."""
NUDGE_OF_BFLOAT16 = 1e-3
"""Of numbers that are kept in bfloat16, where it is so many that go to the next."""
ONE_BIT = {"one_bit_adam": "adamw", "one_bit_lamb": "lamb"}
"""Optimizers that change the numbers, and the rule that each begins as."""


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
    """What the steps showed, from the first that a full pipe makes.

    Args:
        losses: of each, nats a target.
        norms: of each, of the gradient before clipping.
        compile_seconds: of tracing, lowering and compiling.
        run_seconds: of making the state and of the steps.
    """

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    compile_seconds: float
    run_seconds: float


class OwnFeedForward(nnx.Module):
    """A user's feed-forward layer: the weights of one of jaxscale's, and products whose results nothing places."""

    def __init__(self, mlp: MLP) -> None:
        assert mlp.gate is not None, "the decoder's layers are gated"
        self.gate, self.up, self.down = mlp.gate.weight, mlp.up.weight, mlp.down.weight
        self.dropout = mlp.dropout

    def __call__(self, x: jax.Array, *, context: Context) -> jax.Array:
        """The layer's output, without the residual."""
        gate, up, down = (weight[...].astype(x.dtype) for weight in (self.gate, self.up, self.down))
        return self.dropout((jax.nn.silu(x @ gate) * (x @ up)) @ down, context)


@dataclasses.dataclass(frozen=True)
class OwnDecoder(Decoder):
    """A decoder with a user's own feed-forward layers."""

    def build(self, rngs: nnx.Rngs, *, vocab_multiple: int = 1) -> Any:
        """The decoder's module, with these layers."""
        module = super().build(rngs, vocab_multiple=vocab_multiple)
        for name in module.blocks.group_names:
            layers = getattr(module.blocks, name)
            layers.mlp = OwnFeedForward(layers.mlp)
        return module


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
    make = OwnDecoder if draw.has_own_layers else Decoder
    model = make(
        vocab=VOCAB,
        context=draw.length,
        layers=LAYERS,
        embed=WIDTH,
        heads=2 if draw.length > 64 and MeshSpec.parse(draw.plan["mesh"]).tensor < 4 else 4,
        mlp=2 * WIDTH,
        dropout=draw.dropout,
        init_std=0.2,
        windows=(draw.length // 4, None) if draw.has_windows else (None,),
    )
    optimizer = override(Optimizer(), draw.optimizer)
    if draw.has_own_schedule:
        falling = functools.partial(_falling, optimizer.learning_rate)
        optimizer = dataclasses.replace(optimizer, learning_rate=Optimizer().learning_rate, schedule=falling)
    data = Batches(draw.length, draw.packed)
    return Experiment("composition", model, data, optimizer, steps=32, batch=rows_of(draw))


def _falling(first_rate: float, update: Any) -> Any:
    """A learning rate of the user's own, which falls with the updates made."""
    return first_rate / (1 + update / 10)


def plan_of(changes: Mapping[str, str]) -> Plan:
    """The plan of some changes."""
    return override(Plan(), changes)


def stale(draw: Draw) -> dict[str, str]:
    """The changes of an asynchronous pipeline, if the combination has one.

    What a memory rule recomputes is among them where it reads newer weights than its forward, and is the same on every
    layout.

    Example:
        >>> stale(Draw((("plan.memory", "dots"), ("plan.pipeline", "pipemare:2"))))
        {'memory': 'dots', 'pipeline': 'pipemare:2'}
    """
    pipeline = draw.plan.get("pipeline")
    if pipeline is None or not PipelinePlan.parse(pipeline).asynchronous:
        return {}
    rule = MemoryPlan.parse(draw.plan.get("memory", "none"))
    fields = ("pipeline", "memory") if recomputes_newer(draw) and rule.budget is None else ("pipeline",)
    return {name: text for name, text in draw.plan.items() if name in fields}


def recomputes_newer(draw: Draw) -> bool:
    """Whether a memory rule recomputes from newer weights than a forward read: PipeMare keeps no older ones."""
    plan = PipelinePlan.parse(draw.plan["pipeline"]) if "pipeline" in draw.plan else None
    versions = plan.schedule().versions if plan is not None and plan.asynchronous else None
    return versions is not None and versions.backward == "newest" and draw.plan.get("memory", "none") != "none"


def lossy(draw: Draw) -> dict[str, dict[str, str]]:
    """Techniques of the combination that change the numbers, by name: the changes of each, with what it needs.

    Example:
        >>> lossy(Draw((("plan.mesh", "fsdp:2"), ("plan.precision", "bfloat16"), ("plan.state.master", "split"))))
        {'state.master': {'precision': 'bfloat16', 'state.master': 'split'}}
    """
    plan = draw.plan
    exact = EXACT_VALUES if "precision" in plan else {**EXACT_VALUES, "reduce": ("float32",)}
    names = [name for name in plan if name in LOSSY and plan[name] not in exact.get(name, ())]
    rounded = [name for name in names if name == "state.master" or plan[name] in ("float32", "bfloat16")]
    computed = {"precision": plan["precision"]} if "precision" in plan else {}
    techniques = {
        name: {**(computed if name in rounded else {}), name: plan[name]}
        for name in names
        if name != "precision" or rounded == ["precision"]
    }
    if draw.optimizer.get("name") in ONE_BIT:
        techniques["optimizer"] = {}
    return techniques


def on_replicas(draw: Draw, changes: Mapping[str, str], *, sends: bool = False) -> dict[str, str]:
    """The changes of a twin, on the combination's replicas where they send anything else than a mean.

    Args:
        draw: the combination.
        changes: the twin's, without a mesh.
        sends: its optimizer sends momenta.
    """
    replicas = MeshSpec.parse(draw.plan["mesh"]).replica
    codec = changes.get("reduce") not in (None, "float32", "bfloat16")
    split = replicas > 1 and (codec or sends or "diloco" in changes)
    return {**changes, "mesh": f"replica:{replicas}" if split else "1"}


def built(draw: Draw) -> TrainStep:
    """The combination's train step, checked, neither traced nor compiled.

    Raises:
        UserError: the combination is refused.
    """
    return _built(experiment_of(draw), tuple(sorted(draw.plan.items())))


@functools.lru_cache(maxsize=1)
def _built(experiment: Experiment, changes: tuple[tuple[str, str], ...]) -> TrainStep:
    return build(experiment, resolve_choices(experiment, plan_of(dict(changes))))


@functools.lru_cache(maxsize=16)
def compiled(experiment: Experiment, changes: tuple[tuple[str, str], ...]) -> TrainStep:
    """The train step of an experiment under the sorted changes of a plan, traced, checked and compiled."""
    step = _built(experiment, changes)
    step.compile(batch_shapes(experiment))
    return step


@functools.lru_cache(maxsize=16)
def _first_state(experiment: Experiment, changes: tuple[tuple[str, str], ...]) -> TrainState:
    """Which takes longer to compile than to copy: a twin starts from it several times."""
    return compiled(experiment, changes).init()


def plain_twin(draw: Draw) -> Draw:
    """The draw whose optimizer sends nothing in few bits: the rule that it begins as."""
    rule = ONE_BIT.get(draw.optimizer.get("name", ""))
    if rule is None:
        return draw
    techniques = {path: text for path, text in draw.techniques if path != "optimizer.freeze"}
    return dataclasses.replace(draw, techniques=tuple({**techniques, "optimizer.name": rule}.items()))


def steps_of(draw: Draw) -> tuple[int, int]:
    """Steps until gradients are as old as they get, and those that are compared, until all techniques have an effect.

    What the second update reads (momenta in few bits, residuals) shows in the third loss; what replicas of DiLoCo keep
    of one meeting, behind the next; what the first message in one bit leaves, two steps on. SOAP only gathers
    statistics in its first step. Gradients in one bit have one magnitude, which momenta in few bits hold exactly: only
    the second momenta are rounded, and Lion, which takes signs, shows that in the fifth loss.
    """
    plan = draw.plan
    waiting = 0
    if stale(draw):
        pipeline = PipelinePlan.parse(plan["pipeline"])
        waiting = pipeline.synchronous_steps + 2 * (pipeline.ranks or 1)
    codec = plan.get("reduce", "")
    exact_at_first = codec.startswith("onebit") and "state.moments" in plan
    shown = 3
    if "diloco" in plan:
        shown = 1 + 2 * Diloco.parse(plan["diloco"]).every
    elif exact_at_first:
        shown = 5
    elif draw.optimizer.get("name") in (*ONE_BIT, "soap") or ",start=1" in codec:
        shown = 4
    return waiting, shown


def train(
    draw: Draw, changes: Mapping[str, str], *, steps: tuple[int, int] | None = None, nudge: int | None = None
) -> Trained:
    """A few steps under a plan.

    Args:
        draw: model, batches and optimizer.
        changes: of the plan.
        steps: those that fill a pipe, and those that are shown; as many as the draw takes by default.
        nudge: a seed: the first state is off by about an ulp, and what that changes is what rounding may change.

    Raises:
        UserError: the plan is refused.
    """
    experiment = experiment_of(draw)
    start = time.perf_counter()
    which = experiment, tuple(sorted(changes.items()))
    step = compiled(*which)
    compiled_at = time.perf_counter()
    first = _first_state(*which)
    if nudge is None:
        state = jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding, may_alias=False), first)
    else:
        state = _nudged(first, nudge, NUDGES[changes.get("precision", "float32")])
    losses, norms = [], []
    waiting, shown = steps or steps_of(draw)
    for number in range(waiting + shown):
        state, metrics = step(state, step.place(batch_of(draw, experiment.batch, number)))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    ended = time.perf_counter()
    return Trained(tuple(losses[waiting:]), tuple(norms[waiting:]), compiled_at - start, ended - compiled_at)


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
    step = described_step(experiment, target, resolve_choices(experiment, plan_of(draw.plan)))
    traced = step.step_fn.trace(step.layout.abstract, step.abstract_batch(batch_shapes(experiment)))
    step.check_kernels()
    traced.lower(lowering_platforms=({"gpu": "cuda"}.get(target.chip.kind, target.chip.kind),))
    return time.perf_counter() - start


def _nudged(state: Any, seed: int, size: float) -> Any:
    """A state whose numbers are a little off: weights, replicas' own, those that a pipe keeps."""

    def nudged(path: Any, leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jax.device_put(leaf, leaf.sharding, may_alias=False)
        noise = np.random.default_rng((seed, len(jax.tree_util.keystr(path)))).standard_normal(leaf.shape)
        noise *= NUDGE_OF_BFLOAT16 if leaf.dtype == jnp.bfloat16 else size
        return jax.device_put((np.asarray(leaf) * (1 + noise)).astype(leaf.dtype), leaf.sharding)

    return jax.tree_util.tree_map_with_path(nudged, state)
