"""Asynchronous pipelines beside synchronous training: what stale weights cost, and what mends it.

    python experiments/async_pipeline.py [-o curves.html] [--steps 2000] [--seeds 0 1] [--rules 2bw pipedream ...]
        [--half] [--tiny]

The default recipe (`shakespeare.py`) without tied weights, its 4 layers on 4 stages, an update per batch of 12 rows;
2BW cuts a batch into 4 microbatches. `synchronous` runs on one device. With `--half` the first half of the steps is
synchronous, and the pipe fills then. Learning curves are of training batches, the table of the held-out text.
"""

import argparse
import dataclasses
import importlib
import json
import math
import time
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")
# twice the devices used: XLA:CPU has a thread for each, and those that wait in an exchange would starve the others
jax.config.update("jax_num_cpu_devices", 8)

import numpy as np  # noqa: E402 (after the number of devices)

from jaxscale import Experiment, Plan  # noqa: E402
from jaxscale.pipeline.plan import PipelinePlan  # noqa: E402
from jaxscale.step.build import TrainStep, build  # noqa: E402

STAGES = 4
POINT = 25
"""Steps of one point of a curve."""
RULES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "2bw": {"pipeline": f"2bw:{STAGES}x4"},
    "pipedream": {"pipeline": f"pipedream:{STAGES}"},
    "pipedream, rescheduled": {"pipeline": f"pipedream:{STAGES}", "anneal": 500},
    "pipemare, no remedy": {"pipeline": f"pipemare:{STAGES}", "anneal": 0, "correction": 0.0},
    "pipemare, rescheduled": {"pipeline": f"pipemare:{STAGES}", "anneal": 500, "correction": 0.0},
    "pipemare, corrected": {"pipeline": f"pipemare:{STAGES}", "anneal": 0, "correction": 0.135},
    "pipemare": {"pipeline": f"pipemare:{STAGES}", "anneal": 500, "correction": 0.135},
}

Curve = list[tuple[int, float]]
"""(step, mean loss of training since the point before)."""


def recipe(rule: str, seed: int, steps: int, tiny: bool) -> Experiment:
    """The default recipe, untied, by a rule."""
    found = importlib.import_module("shakespeare").experiment()
    model = dataclasses.replace(found.model, tied=False, **({"embed": 32, "context": 16} if tiny else {}))
    data = dataclasses.replace(found.data, context=model.context)
    asked = RULES[rule]
    plan = Plan(**{**asked, "pipeline": PipelinePlan.parse(asked["pipeline"])}) if asked else Plan()
    return dataclasses.replace(found, model=model, data=data, seed=seed, steps=steps, plan=plan)


def run(step: TrainStep, state: Any, first: int, last: int, curve: Curve) -> Any:
    """The state after the steps from `first` to before `last`."""
    data = step.experiment.data.open(step.experiment.batch, step.experiment.seed)
    losses: list[float] = []
    with data.train() as batches:
        for number in range(last):
            batch = next(batches)
            if number < first:
                continue
            state, metrics = step.run(state, step.place(batch))
            losses.append(float(metrics["loss"]))  # waits, as the CPU platform needs
            if len(losses) == POINT:
                # while the pipe fills, no microbatch reaches the last stage
                seen = [loss for loss in losses if math.isfinite(loss)]
                curve.append((number + 1, float(np.mean(seen))))
                losses.clear()
    return state


def placed(arrays: dict[str, Any], step: TrainStep) -> Any:
    """The state of a canonical form, as from a checkpoint; a pipe is filled anew."""
    places = step.canonical_abstract()
    own = {name: jax.device_put(leaf, places[name].sharding) for name, leaf in arrays.items() if name in places}
    return step.from_canonical(own)


def held_out(step: TrainStep, state: Any) -> float:
    """Mean nats per target of the held-out text, by the newest weights."""
    data = step.experiment.data.open(step.experiment.batch, step.experiment.seed)
    found = [step.evaluate(state, step.place(batch)) for batch in data.evaluation()]
    return float(sum(one.total for one in found) / sum(one.weight for one in found))


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
    done = given.steps // 2 if given.half else 0
    found: dict[str, list[float]] = {}
    curves: dict[str, Curve] = {}
    for seed in given.seeds:
        plain = build(recipe("synchronous", seed, given.steps, given.tiny), devices=jax.devices()[:1])
        begun: Curve = []
        kept = None
        if done:
            # on the host: states are given away, and every rule begins with this one
            kept = jax.device_get(plain.to_canonical(run(plain, plain.init(), 0, done, begun)))
        for rule in given.rules:
            began, curve = time.perf_counter(), list(begun)
            step = plain
            if RULES[rule]:
                step = build(recipe(rule, seed, given.steps, given.tiny), devices=jax.devices()[:STAGES])
            state = step.init() if kept is None else placed(kept, step)
            loss = held_out(step, run(step, state, done, given.steps, curve))
            found.setdefault(rule, []).append(loss)
            curves[f"{rule}, seed {seed}"] = curve
            print(f"{rule:24} seed {seed}  held out {loss:.4f}  {time.perf_counter() - began:.0f} s", flush=True)
    if given.output:
        write(given.output, curves)
    print(json.dumps({"steps": given.steps, "synchronous first": done, "held out": found}))


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
