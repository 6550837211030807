"""Asynchronous pipelines beside synchronous training: what stale weights cost, and what mends it.

    python experiments/benchmarks/async_pipeline.py [-o curves.html] [--steps 2000] [--seeds 0 1]
        [--rules 2bw pipedream ...] [--halves 2bw ...] [--tiny]
    python experiments/benchmarks/async_pipeline.py --check [--tiny]

The default recipe (`shakespeare.py`) without tied weights, its 4 layers on 4 stages, an update per batch of 12 rows.
Each of `--rules` from the first step on, and each of `--halves` after a first half of synchronous steps. Learning
curves are of training batches, the table of the held-out text, by the newest weights.

The rules run as `stale_weights.py` has them: a loop on one device with the weights of some updates ago, for 4 virtual
devices on 2 cores take many times as long. `--check` trains 16 batches by that loop and by the executor, through the
train step on 4 of 8 virtual devices, and compares the weights of each stage: with `--tiny` PipeDream and PipeMare
(with either remedy and both) equal to the bit, 2BW, which adds up microbatches, to 3e-5 of what weights without delay
differ by.

Run 2026-11-22 on 2 busy cores (AMD EPYC), JAX 0.10.2, the whole recipe of 2,000 steps, which a rule takes 5 to 6
minutes of one core for. Held-out loss in nats per character of seeds 0 and 1, and how much that is more than
synchronous training, which gives 1.891 and 1.901:

                           from the first step               after 1,000 synchronous steps
    2bw                    1.980 (+0.089)  1.979 (+0.078)    1.902 (+0.011)  1.916 (+0.014)
    pipedream              2.411 (+0.520)  2.432 (+0.531)    1.925 (+0.034)  1.939 (+0.038)
    pipemare               2.099 (+0.208)  2.125 (+0.223)    1.923 (+0.032)  1.937 (+0.036)
    pipemare, rescheduled  2.105 (+0.214)  2.303 (+0.402)    -
    pipemare, corrected    2.411 (+0.520)  2.407 (+0.506)    -
    pipemare, no remedy    2.402 (+0.510)  2.432 (+0.531)    -

After a synchronous half all are within 0.04 nats. From the first step, two versions of the weights (2BW) cost 0.08 to
0.09 nats, where up to three updates of delay (PipeDream; PipeMare without remedies) cost half a nat: AdamW at this rate
does not bear them. Of PipeMare's remedies rescheduling takes 0.30 and 0.13 nats of it back, the correction alone -0.01
and 0.02, both together 0.30 and 0.31. (The cells were computed one by one, by the functions of this file.)
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from stale_weights import Rule, StaleWeights

from jaxscale import Experiment, Plan, TrainState, TrainStep, build, load_file
from jaxscale.pipeline import PipelinePlan, Remedies
from jaxscale.typing import Params

STAGES = 4
POINT = 25
"""Steps of one point of a curve."""
ANNEAL = 4
"""Rescheduling fades over one of so many parts of a run, as the train step has it unless told otherwise."""
CORRECTION = 0.135
CHECKED = 16
"""Batches that loop and executor are compared over: more than 3p updates of every stage."""


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to train.

    Args:
        schedule: of the pipeline; empty for one device.
        rescheduled: by PipeMare's first remedy.
        corrected: by its second.
    """

    schedule: str = ""
    rescheduled: bool = False
    corrected: bool = False

    def remedies(self, steps: int) -> Remedies:
        """In a run of so many steps."""
        anneal = steps // ANNEAL if self.rescheduled else 0
        return Remedies(anneal=anneal, correction=CORRECTION if self.corrected else None)

    def plan(self, steps: int) -> Plan:
        """That runs it by the executor."""
        remedies = self.remedies(steps)
        pipeline = PipelinePlan.parse(f"{self.schedule}:{STAGES}" + ("x4" if self.schedule == "2bw" else ""))
        if self.schedule != "pipemare":
            return Plan(pipeline=pipeline)
        correction = remedies.correction or 0.0
        return Plan(pipeline=dataclasses.replace(pipeline, anneal=remedies.anneal, correction=correction))


WAYS = {
    "synchronous": Way(),
    "2bw": Way("2bw"),
    "pipedream": Way("pipedream"),
    "pipemare": Way("pipemare", rescheduled=True, corrected=True),
    "pipemare, rescheduled": Way("pipemare", rescheduled=True),
    "pipemare, corrected": Way("pipemare", corrected=True),
    "pipemare, no remedy": Way("pipemare"),
}
RULES = [name for name, way in WAYS.items() if way.schedule]

Curve = list[tuple[int, float]]
"""(step, mean loss of training since the point before)."""


def recipe(seed: int, steps: int, tiny: bool, plan: Plan | None = None) -> Experiment:
    """The default recipe, untied."""
    found: Any = load_file(Path(__file__).parents[1] / "shakespeare.py")[0]
    model = dataclasses.replace(found.model, tied=False, **({"embed": 32, "context": 16} if tiny else {}))
    data = dataclasses.replace(found.data, context=model.context)
    plan = found.plan if plan is None else plan
    return dataclasses.replace(found, model=model, data=data, seed=seed, steps=steps, plan=plan)


class Trained:
    """Training on one device, in parts.

    Args:
        plain: the train step.
    """

    def __init__(self, plain: TrainStep) -> None:
        self.plain = plain
        self._data = plain.experiment.data.open(plain.experiment.batch, plain.experiment.seed)

    def synchronous(self, state: TrainState, first: int, last: int) -> tuple[TrainState, Curve]:
        """The state after the steps from `first` to before `last`."""

        def step(state: TrainState, number: int, batch: Any) -> tuple[TrainState, Any]:
            del number
            state, metrics = self.plain(state, batch)
            return state, metrics["loss"]

        return self._through(step, state, first, last)

    def stale(self, way: Way, state: TrainState, first: int, last: int) -> tuple[Params, Curve]:
        """The newest weights after the same steps by a rule."""
        rule = Rule.of(way.schedule, STAGES, way.remedies(self.plain.experiment.steps))
        loop = StaleWeights(self.plain, rule)

        def step(stages: Any, number: int, batch: Any) -> tuple[Any, Any]:
            return loop.update(stages, jnp.int32(number - first), batch)

        stages, curve = self._through(step, loop.begin(state), first, last)
        return loop.whole(stages), curve

    def _through(self, step: Any, state: Any, first: int, last: int) -> tuple[Any, Curve]:
        curve: Curve = []
        losses: list[float] = []
        with self._data.train() as batches:
            for number in range(last):
                batch = next(batches)
                if number < first:
                    continue
                state, loss = step(state, number, self.plain.place(batch))
                losses.append(float(loss))
                if len(losses) == POINT:
                    curve.append((number + 1, float(np.mean(losses))))
                    losses.clear()
        return state, curve

    def held_out(self, params: Params) -> float:
        """Mean nats per target of the held-out text."""
        state = dataclasses.replace(self.plain.init(), params=params)
        found = [self.plain.evaluate(state, self.plain.place(batch)) for batch in self._data.evaluation()]
        return float(sum(one.total for one in found) / sum(one.weight for one in found))


def train(given: argparse.Namespace) -> None:
    """Train by every rule, and show what came of it."""
    found: dict[str, list[float]] = {}
    curves: dict[str, Curve] = {}

    def note(name: str, seed: int, params: Params, curve: Curve, began: float) -> None:
        loss = run.held_out(params)
        found.setdefault(name, []).append(loss)
        curves[f"{name}, seed {seed}"] = curve
        print(f"{name:36} seed {seed}  held out {loss:.4f}  {time.perf_counter() - began:.0f} s", flush=True)

    half = given.steps // 2
    for seed in given.seeds:
        run = Trained(build(recipe(seed, given.steps, given.tiny), devices=jax.devices()[:1]))
        began = time.perf_counter()
        state, begun = run.synchronous(run.plain.init(), 0, half)
        # on the host, for a step gives its state away
        kept = jax.device_get(state)
        state, curve = run.synchronous(state, half, given.steps)
        note("synchronous", seed, state.params, begun + curve, began)
        for name in given.halves:
            began = time.perf_counter()
            params, curve = run.stale(WAYS[name], jax.device_put(kept), half, given.steps)
            note(f"{name}, after half synchronous", seed, params, begun + curve, began)
        for name in given.rules:
            began = time.perf_counter()
            params, curve = run.stale(WAYS[name], run.plain.init(), 0, given.steps)
            note(name, seed, params, curve, began)
    if given.output:
        write(given.output, curves)
    print(json.dumps({"steps": given.steps, "seeds": given.seeds, "held out": found}))


def write(path: Path, curves: dict[str, Curve]) -> None:
    """The learning curves as a page."""
    from jaxscale.report.charts import Series, line_chart

    series = [
        Series(name, np.array([step for step, _ in curve]), np.array([loss for _, loss in curve]))
        for name, curve in curves.items()
    ]
    chart = line_chart("Loss of training, nats per character", series, is_tall=True)
    path.write_text(f"<!doctype html><meta charset=utf-8><title>Asynchronous pipelines</title>{chart}")


def check(given: argparse.Namespace) -> None:
    """Of each rule, how far loop and executor are apart: 2e-3 at most of what weights without delay differ by."""
    plain = build(recipe(0, given.steps, given.tiny), devices=jax.devices()[:1])
    with plain.experiment.data.open(plain.experiment.batch, 0).train() as batches:
        chosen = [batch for _, batch in zip(range(CHECKED), batches, strict=False)]
    found = {}
    undelayed = _history(plain, Rule((0,) * STAGES), chosen)
    for name in given.rules:
        way = WAYS[name]
        history = _history(plain, Rule.of(way.schedule, STAGES, way.remedies(given.steps)), chosen)
        step = build(recipe(0, given.steps, given.tiny, way.plan(given.steps)), devices=jax.devices()[:STAGES])
        state = step.init()
        for batch in chosen:
            state, metrics = step(state, step.place(batch))
            jax.block_until_ready(metrics)  # or calls that wait for each other could take all threads
        # what entered last is still under way: each stage has made its own number of updates
        updates = [int(count) for count in np.asarray(state.extra["in_flight"]["watch"].good).reshape(STAGES, -1)[:, 0]]
        newest = StaleWeights(plain, Rule((0,) * STAGES)).begin(
            dataclasses.replace(plain.init(), params=jax.device_get(step.pure_model.in_layers(state.params)))
        )
        apart, beside = (
            max(_apart(newest[s].versions[0], of[count][s]) for s, count in enumerate(updates))
            for of in (history, undelayed)
        )
        found[name] = apart / beside
        print(f"{name:24} updates {updates}  apart {apart:.1e}, from weights without delay {beside:.1e}", flush=True)
    print(json.dumps(found))
    if max(found.values()) > 2e-3:
        raise SystemExit("loop and executor differ")


def _history(plain: TrainStep, rule: Rule, batches: list[Any]) -> list[list[Params]]:
    """The newest weights of each stage, after each update."""
    loop = StaleWeights(plain, rule)
    stages = loop.begin(plain.init())
    found = [[stage.versions[0] for stage in stages]]
    for number, batch in enumerate(batches):
        stages, _ = loop.update(stages, jnp.int32(number), plain.place(batch))
        found.append([stage.versions[0] for stage in stages])
    return found


def _apart(one: Params, other: Params) -> float:
    """The largest difference of a weight."""
    pairs = zip(*(jax.tree.leaves(jax.device_get(tree)) for tree in (one, other)), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def main() -> None:
    """As the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rules", nargs="*", default=RULES, choices=RULES)
    parser.add_argument("--halves", nargs="*", default=RULES[:3], choices=RULES)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    if given.check:
        # twice the devices used: XLA:CPU has a thread for each, and those that wait in an exchange would starve others
        jax.config.update("jax_num_cpu_devices", 2 * STAGES)
        check(given)
    else:
        train(given)


if __name__ == "__main__":
    main()
