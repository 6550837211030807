"""A small language model cut into stages, the same on one device without any pipeline, and the way to run a schedule.

Embedding and head are tied and shared by all stages; dropout draws from the microbatch and the layer; every stage may
have an auxiliary loss; stages may have unequal numbers of layers.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale.pipeline.orders import Schedule
from jaxscale.pipeline.run.execute import At, DeviceSums, execute
from jaxscale.pipeline.run.tables import tabulate


@dataclasses.dataclass(frozen=True)
class Model:
    """What to compute."""

    stages: int
    layers: int = 1
    unequal: bool = False
    dropout: float = 0.0
    auxiliary: float = 0.0
    remat: bool = False
    scan: bool = False
    width: int = 8
    vocab: int = 11
    rows: int = 2
    length: int = 4

    def count(self, stage: Any) -> Any:
        """Layers of a stage."""
        return self.layers - (stage % 2) * (self.layers > 1) if self.unequal else self.layers + 0 * stage

    def weights(self) -> Any:
        """Leaves (stages, layers, ...)."""
        up, down = jax.random.split(jax.random.key(1))
        shape = self.stages, self.layers, self.width, 2 * self.width
        scale = self.width**-0.5
        return {
            "up": jax.random.normal(up, shape) * scale,
            "down": jax.random.normal(down, (*shape[:2], shape[3], shape[2])) * scale / 2,
        }

    def shared(self) -> Any:
        """What all stages share."""
        return {
            "embed": jax.random.normal(jax.random.key(2), (self.vocab, self.width)),
            "gain": jnp.ones(self.width),
        }

    def batch(self, microbatches: int) -> Any:
        """Leaves (m, rows, length)."""
        shape = microbatches, self.rows, self.length
        return {
            "tokens": jax.random.randint(jax.random.key(3), shape, 0, self.vocab),
            "targets": jax.random.randint(jax.random.key(4), shape, 0, self.vocab),
        }

    def message(self) -> Any:
        """Shapes of what goes from stage to stage: the activations, and how large they have been."""
        rows = jax.ShapeDtypeStruct((self.rows, self.length, self.width), jnp.float32)
        return {"hidden": rows, "size": jax.ShapeDtypeStruct((self.rows,), jnp.float32)}

    def stage(self, weights: Any, shared: Any, x: Any, microbatch: Any, at: At, key: Any) -> tuple[Any, Any, Any]:
        """One stage, the first and the last included."""
        first, last = at.stage == 0, at.stage == self.stages - 1
        hidden = jnp.where(first, shared["embed"][microbatch["tokens"]], x["hidden"])

        def layer(hidden: Any, over: Any) -> Any:
            weight, number = over
            inner = jnp.tanh(hidden @ weight["up"])
            if self.dropout:
                own = jax.random.fold_in(jax.random.fold_in(key, at.microbatch), at.stage * self.layers + number)
                inner = jnp.where(jax.random.bernoulli(own, 1 - self.dropout, inner.shape), inner, 0.0)
            return jnp.where(number < self.count(at.stage), hidden + inner @ weight["down"], hidden), None

        if self.remat:
            layer = jax.checkpoint(layer, prevent_cse=not self.scan)
        if self.scan:
            hidden, _ = lax.scan(layer, hidden, (weights, jnp.arange(self.layers)))
        else:
            for number in range(self.layers):
                hidden, _ = layer(hidden, (jax.tree.map(lambda leaf, n=number: leaf[n], weights), number))
        size = x["size"] + jnp.square(hidden).mean((1, 2))
        logits = (hidden * shared["gain"][None, None]) @ shared["embed"].T
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), microbatch["targets"][..., None], 2)
        loss = jnp.where(last, -chosen.mean() + 0.01 * size.mean(), 0.0)
        objective = loss + self.auxiliary * jnp.abs(hidden).mean()
        return {"hidden": hidden, "size": size}, objective, {"loss": loss, "tokens": jnp.where(last, 8.0, 0.0)}

    def reference(self, microbatches: int, key: Any) -> Any:
        """(loss, gradients of weights and of what is shared), on one device, by `jax.grad` of the whole."""
        batch = self.batch(microbatches)

        def objective(weights: Any, shared: Any) -> Any:
            def one(number: Any) -> Any:
                microbatch = jax.tree.map(lambda leaf: leaf[number], batch)
                x = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.message())
                total = loss = jnp.float32(0)
                for stage in range(self.stages):
                    own = jax.tree.map(lambda leaf, s=stage: leaf[s], weights)
                    x, part, sums = self.stage(own, shared, x, microbatch, At(jnp.int32(stage), number), key)
                    total, loss = total + part, loss + sums["loss"]
                return total, loss

            totals, losses = lax.map(one, jnp.arange(microbatches))
            return totals.sum(), losses.sum()

        run = jax.jit(jax.value_and_grad(objective, argnums=(0, 1), has_aux=True))
        (_, loss), gradients = run(self.weights(), self.shared())
        return loss, gradients


def to_chunks(schedule: Schedule, tree: Any) -> Any:
    """Leaves (stages, ...) as (ranks, chunks, ...), a stage on every rank that does it."""
    stages = np.array([[*held, *held[:1] * (schedule.chunks - len(held))] for held in _held(schedule)])
    return jax.tree.map(lambda leaf: leaf[stages], tree)


def to_stages(schedule: Schedule, tree: Any) -> Any:
    """Leaves (ranks, chunks, ...) summed into (stages, ...)."""
    places = [(rank, chunk, stage) for rank, held in enumerate(_held(schedule)) for chunk, stage in enumerate(held)]
    ranks, chunks, stages = map(np.array, zip(*places, strict=True))
    return jax.tree.map(
        lambda leaf: jnp.zeros((schedule.stages, *leaf.shape[2:]), leaf.dtype).at[stages].add(leaf[ranks, chunks]), tree
    )


def _held(schedule: Schedule) -> list[tuple[int, ...]]:
    return [schedule.stages_of(rank) for rank in range(schedule.ranks)]


def program(
    model: Any, schedule: Schedule, *, stash: Any = "input", forward_only: bool = False, **settings: Any
) -> Any:
    """`f(weights, shared, batch, key) -> DeviceSums`, with weights as `to_chunks` gives them and gradients alike."""
    mesh = Mesh(np.array(jax.devices()[: schedule.ranks]), ("pipe",), axis_types=(AxisType.Auto,))
    tables = tabulate(schedule, stash, forward_only=forward_only)

    def body(weights: Any, shared: Any, batch: Any, key: Any) -> DeviceSums:
        own = jax.tree.map(lambda leaf: leaf[0], weights)
        found = execute(tables, model.stage, own, shared, batch, key, model.message(), **settings)
        everywhere = functools.partial(lax.psum, axis_name="pipe")
        gradients = jax.tree.map(lambda leaf: leaf[None], found.weight_gradients)
        return DeviceSums(
            jax.tree.map(everywhere, found.sums), gradients, jax.tree.map(everywhere, found.shared_gradients)
        )

    sums = jax.tree.map(lambda _: P(), {"loss": 0, "tokens": 0})
    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(P("pipe"), P(), P(), P()),
        out_specs=DeviceSums(sums, P("pipe"), P()),
        axis_names={"pipe"},
    )
    spread, same = NamedSharding(mesh, P("pipe")), NamedSharding(mesh, P())
    return jax.jit(mapped, in_shardings=(spread, same, same, same))


def run(model: Model, schedule: Schedule, **settings: Any) -> Any:
    """(loss, gradients of weights by stage and of what is shared) of a schedule."""
    key = jax.random.key(7)
    batch = model.batch(schedule.microbatches)
    found = program(model, schedule, **settings)(to_chunks(schedule, model.weights()), model.shared(), batch, key)
    found = jax.block_until_ready(found)
    if found.weight_gradients is None:
        return found.sums["loss"], None
    weights = jax.tree.map(np.asarray, found.weight_gradients)
    return found.sums["loss"], (to_stages(schedule, weights), found.shared_gradients)


def distance(found: Any, expected: Any) -> float:
    """The largest max|a-b| / max|b| of any leaf."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(np.asarray(b)).max()) for a, b in pairs)
