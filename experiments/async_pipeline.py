"""Asynchronous pipelines beside synchronous training: what stale weights cost, and what mends it.

    python experiments/async_pipeline.py [-o curves.html] [--steps 2000] [--seeds 0 1] [--rules 2bw pipedream ...]
        [--half] [--tiny]

The default recipe (`shakespeare.py`) without tied weights, its 4 layers on 4 stages, an update per batch of 12 rows;
2BW cuts a batch into 4 microbatches. `synchronous` is the same on one device; both clip gradients by stage.
With `--half` the first half of the steps is synchronous, and the pipe fills then. Learning curves are of training
batches, the table of the held-out text.
"""

import argparse
import dataclasses
import functools
import importlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")
# twice the devices used: XLA:CPU has a thread for each, and those that wait in an exchange would starve the others
jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp  # noqa: E402 (after the number of devices)
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import AxisType, Mesh  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from jaxscale.layers.loss import cross_entropy  # noqa: E402
from jaxscale.models import Decoder  # noqa: E402
from jaxscale.pipeline.asynchronous import Advanced, Asynchronous  # noqa: E402
from jaxscale.pipeline.passes import At  # noqa: E402
from jaxscale.pipeline.pipemare import Remedies  # noqa: E402
from jaxscale.pipeline.schedules import METHODS  # noqa: E402
from jaxscale.pipeline.stream import stream  # noqa: E402

STAGES = 4
CHUNK = 50
"""Updates of one call."""
RULES = {
    "synchronous": ("", Remedies()),
    "2bw": ("2bw", Remedies()),
    "pipedream": ("pipedream", Remedies()),
    "pipedream, rescheduled": ("pipedream", Remedies(anneal=500)),
    "pipemare, no remedy": ("pipemare", Remedies()),
    "pipemare, rescheduled": ("pipemare", Remedies(anneal=500)),
    "pipemare, corrected": ("pipemare", Remedies(correction=0.135)),
    "pipemare": ("pipemare", Remedies(anneal=500, correction=0.135)),
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is trained.

    Args:
        model: the whole, untied.
        optimizer: of one stage.
        rows: of a batch.
        steps: updates.
        open: the data of a seed.
    """

    model: Decoder
    optimizer: optax.GradientTransformation
    rows: int
    steps: int
    open: Any

    @functools.cached_property
    def one(self) -> Any:
        """The graph of a decoder of one layer: a stage with embedding and head, of which most use neither."""
        return nnx.split(nnx.eval_shape(lambda: dataclasses.replace(self.model, layers=1).build(nnx.Rngs(0))))[0]

    def parameters(self, seed: int) -> Any:
        """(weights, shared): leaves (stages, ...), each stage with its own copy of what is shared."""
        whole = nnx.to_pure_dict(nnx.split(self.model.build(nnx.Rngs(seed)))[1])
        weights = jax.tree.map(lambda leaf: leaf[:, None], whole.pop("blocks"))
        return weights, jax.tree.map(lambda leaf: jnp.repeat(leaf[None], STAGES, 0), whole)

    def stage(self, weights: Any, shared: Any, x: Any, microbatch: Any, at: At, key: Any) -> Any:
        """One layer; before the first the embedding, behind the last the loss, a share of the batch's mean."""
        del key

        def module() -> Any:
            return nnx.merge(self.one, {**shared, "blocks": weights}, copy=True)

        def scored(y: Any) -> Any:
            whole = module()
            loss = cross_entropy(whole.norm(y), whole.table, microbatch["targets"], vocab=self.model.vocab)
            return loss.total / (self.rows * self.model.context)

        x = jax.lax.cond(at.stage == 0, lambda x: module().embed(microbatch["tokens"]), lambda x: x, x)
        y = module().blocks(x)
        loss = jax.lax.cond(at.stage == STAGES - 1, scored, lambda y: 0.0 * y.sum(), y)
        return y, loss, {"loss": loss, "rows": jnp.where(at.stage == STAGES - 1, 1.0 * len(y), 0.0)}

    def loss(self, parameters: Any, batch: Any) -> Any:
        """Of the whole model, mean nats per target."""
        x, total = self.message(batch["tokens"].shape[0]), jnp.float32(0)
        x = jnp.zeros(x.shape, x.dtype)
        for number in range(STAGES):
            weights, shared = jax.tree.map(lambda leaf, n=number: leaf[n], parameters)
            x, part, _ = self.stage(weights, shared, x, batch, At(jnp.int32(number), jnp.int32(0)), None)
            total += part
        return total

    def message(self, rows: int) -> jax.ShapeDtypeStruct:
        """What goes from stage to stage."""
        return jax.ShapeDtypeStruct((rows, self.model.context, self.model.embed), jnp.float32)

    def update(self, parameters: Any, gradients: Any, optimizer: Any, at: Any = None) -> tuple[Any, Any]:
        """One update of each stage there is, leaves (any, ...)."""
        del at

        def one(parameters: Any, gradients: Any, optimizer: Any) -> tuple[Any, Any]:
            updates, optimizer = self.optimizer.update(gradients, optimizer, parameters)
            return optax.apply_updates(parameters, updates), optimizer

        return jax.vmap(one)(parameters, gradients, optimizer)

    def calls(self, seed: int, steps: int, skip: int) -> Iterator[Any]:
        """Batches of so many updates, stacked, leaves (chunk, rows, context)."""
        with self.open(seed).train() as batches:
            for _ in range(skip):
                next(batches)
            for _ in range(steps // CHUNK):
                part = [next(batches) for _ in range(CHUNK)]
                yield {name: np.stack([one[name] for one in part]) for name in ("tokens", "targets")}


def setting(steps: int, tiny: bool) -> Setting:
    """The default recipe, untied."""
    recipe = importlib.import_module("shakespeare").experiment()
    model = dataclasses.replace(recipe.model, tied=False, **({"embed": 32, "context": 16} if tiny else {}))
    data = dataclasses.replace(recipe.data, context=model.context)

    def decays(parameters: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: "norm" not in jax.tree_util.keystr(path), parameters)

    rule = recipe.optimizer.build(steps, decays)
    return Setting(model, rule, recipe.batch, steps, lambda seed: data.open(recipe.batch, seed))


class Curve(list[tuple[int, float]]):
    """(updates, loss of training since the point before)."""


def synchronous(it: Setting, state: Any, seed: int, steps: int, curve: Curve) -> Any:
    """The state after so many steps on one device."""

    @jax.jit
    def run(state: Any, batches: Any) -> Any:
        def step(state: Any, batch: Any) -> Any:
            loss, gradients = jax.value_and_grad(it.loss)(state[0], batch)
            return it.update(state[0], gradients, state[1]), loss

        return jax.lax.scan(step, state, batches)

    for batches in it.calls(seed, steps, 0):
        state, losses = run(state, batches)
        curve.append(((curve[-1][0] if curve else 0) + CHUNK, float(losses.mean())))
    return state


def asynchronous(it: Setting, rule: str, remedies: Remedies, state: Any, seed: int, done: int, curve: Curve) -> Any:
    """The state after the rest of the steps, in a pipe that is filled now and drained at the end."""
    parts = STAGES if rule == "2bw" else 1
    table = stream(METHODS[rule], STAGES, parts, "residuals")
    pipe = Asynchronous(table, it.stage, it.update, it.message(it.rows // parts), remedies=remedies)
    mesh = Mesh(np.array(jax.devices()[:STAGES]), ("pipe",), axis_types=(AxisType.Auto,))
    mapped = functools.partial(jax.shard_map, mesh=mesh, axis_names={"pipe"})
    each, same = P("pipe"), P()
    specs: Any = (each, each, each, same)
    out = Advanced(*specs)

    def summed(found: Advanced) -> Advanced:
        return found._replace(sums=jax.lax.psum(found.sums, "pipe"))

    fill = jax.jit(
        mapped(lambda parameters, batch: pipe.fill(parameters, batch, None), in_specs=(each, same), out_specs=each)
    )
    advance = jax.jit(
        mapped(lambda *given: summed(pipe.advance(*given, key=None)), in_specs=(each, each, each, same), out_specs=out),
        donate_argnums=(0, 1, 2),
    )
    drain = jax.jit(mapped(lambda *given: summed(pipe.drain(*given)), in_specs=(each, each, each), out_specs=out))
    in_flight: Any = None
    parameters, optimizer = state
    for batches in it.calls(seed, it.steps - done, done):
        batch = jax.tree.map(lambda leaf: leaf.reshape(CHUNK * parts, it.rows // parts, *leaf.shape[2:]), batches)
        in_flight = fill(parameters, batch) if in_flight is None else in_flight
        parameters, optimizer, in_flight, sums = jax.block_until_ready(advance(parameters, optimizer, in_flight, batch))
        mean = float(sums["loss"]) * it.rows / float(sums["rows"])
        curve.append(((curve[-1][0] if curve else 0) + CHUNK, mean))
    parameters, optimizer, *_ = jax.block_until_ready(drain(parameters, optimizer, in_flight))
    return parameters, optimizer


def held_out(it: Setting, parameters: Any, seed: int) -> float:
    """Mean nats per target of the held-out text."""
    score = jax.jit(it.loss)
    batches = [{name: one[name] for name in ("tokens", "targets")} for one in it.open(seed).evaluation()]
    return float(np.mean([score(parameters, one) for one in batches if len(one["tokens"]) == it.rows]))


def main() -> None:
    """Train by every rule and show what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=list(RULES))
    parser.add_argument("--half", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    it = setting(given.steps, given.tiny)
    done = given.steps // 2 // CHUNK * CHUNK if given.half else 0
    found: dict[str, list[float]] = {}
    curves: dict[str, Curve] = {}
    for seed in given.seeds:
        parameters = it.parameters(seed)
        start = parameters, jax.vmap(it.optimizer.init)(parameters)
        first = Curve()
        warm = synchronous(it, start, seed, done, first) if done else start
        for name in given.rules:
            rule, remedies = RULES[name]
            curve, began = Curve(first), time.perf_counter()
            if rule:
                state = asynchronous(it, rule, remedies, warm, seed, done, curve)
            else:
                state = synchronous(it, start, seed, it.steps, curve := Curve())
            loss = held_out(it, state[0], seed)
            found.setdefault(name, []).append(loss)
            curves[f"{name}, seed {seed}"] = curve
            print(f"{name:26} seed {seed}  held out {loss:.4f}  {time.perf_counter() - began:.0f} s", flush=True)
    if given.output:
        write(given.output, curves)
    print(json.dumps({"steps": it.steps, "synchronous first": done, "held out": found}))


def write(path: Path, curves: dict[str, Curve]) -> None:
    """The learning curves as a page."""
    from jaxscale.training.charts import Series, line_chart

    series = [
        Series(name, np.array([step for step, _ in curve]), np.array([loss for _, loss in curve]))
        for name, curve in curves.items()
    ]
    chart = line_chart("Loss of training, nats per character", series, tall=True)
    path.write_text(f"<!doctype html><meta charset=utf-8><title>Asynchronous pipelines</title>{chart}")


if __name__ == "__main__":
    main()
