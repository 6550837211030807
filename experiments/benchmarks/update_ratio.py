"""How large updates are beside the parameters, in the bundled recipes: the root mean square of one over the other's.

    python experiments/benchmarks/update_ratio.py [--steps 120] [--only NAME ...]
    python experiments/benchmarks/update_ratio.py --cost [--steps 120]      what the verdict on updates costs

`guard.update` (100 by default) is the bound on this ratio. The language models have two layers instead of four; the
rest of each recipe is unchanged. The ratio is taken from the weights before and after each step, not from the guard.
Most recipes warm up over 50 or 100 updates, so that the first 120 steps contain the largest rate. The ways of
`large_batch_digits.py` are run to their end.

With `--cost`, the recipe of Shakespeare and one of 21 million parameters are compiled with the verdict on updates
and without it. Then both steps of the recipe are run in turn, and the losses are compared in every bit. On an
accelerator, models and plans of `steps_on_device.py` take the place of the two recipes, and all of them are run. Each
recipe follows with AdamW as a rule of the user's own, whose updates are judged by their own size.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from figures import Figure, show

FOLDER = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(FOLDER))
sys.path.insert(0, str(FOLDER.parent))  # the package need not be installed

NAMES = {
    "shakespeare": "shakespeare",
    "digits_vit": "digits_vit",
    "digits_resnet": "digits_resnet",
    "resnet_rotor": "resnet_rotor",
    "bring_your_own_model": "bring_your_own_model",
    "four_bit_compute": "four_bit_compute",
    "int8 state": "low_bit_states:int8",
    "split int8": "low_bit_states:split-int8",
    "lion": "low_bit_states:lion-float32",
    "muon": "low_bit_states:muon-float32",
    "sgd": "compressed_gradients:sgd-exact",
}
"""File of each recipe, and its variant."""
ONE_BIT = "one_bit_adam"
DEVICE_PLANS = ("gpt2", "llama", "llama int8 state", "llama streamed")
"""Plans of `steps_on_device.py` under `--cost` on an accelerator; updates of the last two are never whole."""


def experiment_of(name: str) -> Any:
    """The recipe of a name, on one device and without a bound on the update."""
    import importlib

    import jaxscale as jx
    from jaxscale.values import override

    file, _, variant = NAMES.get(name, "diloco_shakespeare" if name == ONE_BIT else name).partition(":")
    module = importlib.import_module(file)
    if name == ONE_BIT:  # the recipe of Shakespeare under the one-bit rule, which is frozen within the steps
        recipe = importlib.import_module("shakespeare").experiment()
        rule = dataclasses.replace(module.ONE_BIT, freeze=60)
        recipe = dataclasses.replace(recipe, optimizer=rule, plan=jx.Plan(mesh="replica:2"))
    else:
        recipe = module.VARIANTS[variant]() if variant else module.experiment()
        recipe = override(recipe, {"plan.mesh": "1"})
    if isinstance(recipe.model, jx.models.Decoder):
        recipe = override(recipe, {"model.layers": "2", "plan.unroll": "1"})
    return override(recipe, {"guard.update": "0"})


def ratio(before: Any, after: Any) -> jax.Array:
    """The root mean square of the change of all weights, over that of the weights before."""
    changes = sum(jnp.sum(jnp.square(b - a)) for a, b in zip(before, after, strict=True))
    return jnp.sqrt(changes / sum(jnp.sum(jnp.square(a)) for a in before))


def ratios(name: str, steps: int) -> Iterator[float]:
    """The ratio of each step of a recipe."""
    import jaxscale as jx

    recipe = experiment_of(name)
    step = jx.build(recipe, devices=jax.devices()[: 2 if name == ONE_BIT else 1])
    batches, state = recipe.data.open(recipe.batch, recipe.seed).train(None), step.init()
    weights, measure = jax.jit(lambda state: jax.tree.map(jnp.copy, jax.tree.leaves(state.params))), jax.jit(ratio)
    for _ in range(steps):
        before = weights(state)
        state, metrics = step(state, step.place(next(batches)))
        assert int(metrics["skipped"]) == 0, f"{name}: a step was skipped"
        yield float(measure(before, jax.tree.leaves(state.params)))


def large_batch_ratios(way: Any) -> Iterator[float]:
    """The ratio of each step of a way of `large_batch_digits.py`, whose loop is its own."""
    import large_batch_digits as large
    import optax

    x, y, *_ = large.images()
    steps = large.EPOCHS * (len(x) // way.batch)
    params = large.start(0)
    rule = dataclasses.replace(way.optimizer, warmup=round(way.warmed * steps)).build(steps, large.leaves_of(params))
    state, rows = rule.init(params), np.random.default_rng(0)

    @jax.jit
    def advance(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            return optax.softmax_cross_entropy_with_integer_labels(large.logits(params, x), y).mean()

        updates, state = rule.update(jax.grad(loss)(params), state, params)
        new = optax.apply_updates(params, updates)
        return new, state, ratio(jax.tree.leaves(params), jax.tree.leaves(new))

    for _ in range(steps):
        chosen = rows.integers(0, len(x), way.batch)
        params, state, size = advance(params, state, x[chosen], y[chosen])
        yield float(size)


def compiled(recipe: Any, is_judged: bool) -> tuple[Any, Any, dict[str, float]]:
    """A compiled step, with the verdict on updates or without it, its batches, and figures of its program."""
    import jaxscale as jx
    from jaxscale.optim.update_guard import UpdateGuard

    verdict = UpdateGuard._allows_squares
    if not is_judged:
        UpdateGuard._allows_squares = lambda self, update_squares, param_squares, number_count: jnp.array(True)
    try:
        step = jx.build(recipe, devices=jax.devices()[:1])
        batches = recipe.data.open(recipe.batch, recipe.seed).train(None)
        facts = step.compile(next(batches))
        executable: Any = step._executable
        moved_bytes = executable.cost_analysis()["bytes accessed"]
    finally:
        UpdateGuard._allows_squares = verdict
    return step, batches, {"flop": facts.flop, "bytes": moved_bytes, "temporary bytes": facts.temp_bytes}


def recipes_of_cost() -> Iterator[tuple[str, Any, bool]]:
    """Name and experiment of each recipe under `--cost`, and whether its steps are run."""
    from jaxscale.optim.optimizer import OPTIONS

    for name, experiment, is_run in _named_recipes():
        yield name, experiment, is_run
        if not experiment.plan.offload.any and experiment.plan.state.moments == "float32":
            options = dict.fromkeys(OPTIONS)
            rule = dataclasses.replace(experiment.optimizer, custom=_adamw, **options)
            yield f"{name}, judged whole", dataclasses.replace(experiment, optimizer=rule), is_run


def _adamw(rate: Any) -> optax.GradientTransformation:
    """AdamW as a rule of one's own, whose updates are judged whole."""
    return optax.adamw(rate, weight_decay=0.1)


def _named_recipes() -> Iterator[tuple[str, Any, bool]]:
    """Name and experiment of each recipe, and whether its steps are run."""
    from jaxscale.values import override

    if jax.devices()[0].platform != "cpu":
        import steps_on_device as device

        for plan in DEVICE_PLANS:
            model, changes = device.PLANS[plan]
            yield plan, device.experiment_of(model, False, {**changes, "plan.mesh": "1"}), True
        return
    import shakespeare

    recipe = override(shakespeare.experiment(), {"plan.mesh": "1"})
    wide = {
        "model.embed": "512",
        "model.heads": "8",
        "model.layers": "6",
        "model.vocab": "4096",
        "model.context": "256",
    }
    yield (
        "a larger decoder",
        override(recipe, {**wide, "data.context": "256", "batch": "16", "plan.unroll": "6"}),
        False,
    )
    yield "shakespeare", recipe, True


def cost(steps: int) -> None:
    """Print what the verdict on updates costs."""
    figures = []
    for name, experiment, is_run in recipes_of_cost():
        pair = [compiled(experiment, is_judged) for is_judged in (False, True)]
        before, after = (facts for *_, facts in pair)
        print(f"{name}, {pair[0][0].parameters:,} parameters, with the verdict and without:")
        for figure in before:
            ratio_text = f"{after[figure] / before[figure] - 1:+.2%}" if before[figure] else ""
            print(f"  {figure:16} {after[figure]:.6g} and {before[figure]:.6g}: {ratio_text}", flush=True)
        figures.append(Figure(f"{name}: bytes moved", after["bytes"] / before["bytes"], "x"))
        if is_run:
            figures.append(Figure(f"{name}: time of a step", ratio_in_turns(pair, steps), "x", 1.01))
    show(figures, "A step with the verdict on updates, over one without")


def ratio_in_turns(pair: list[Any], steps: int) -> float:
    """The median time of a step with the verdict over that of one without it, run in turn."""
    states, seconds, outputs = [step.init() for step, *_ in pair], ([], []), ([], [])
    for number in range(steps):
        for which in (0, 1) if number % 2 else (1, 0):
            step, batches, _ = pair[which]
            batch = jax.block_until_ready(step.place(next(batches)))
            start = time.perf_counter()
            states[which], metrics = step(states[which], batch)
            outputs[which].append((float(metrics["loss"]).hex(), float(metrics["grad_norm"]).hex()))
            jax.block_until_ready(states[which])
            seconds[which].append(time.perf_counter() - start)
    plain_seconds, judged_seconds = (float(np.median(times[5:])) for times in seconds)
    ratios_of_pairs = [judged / plain for plain, judged in zip(*seconds, strict=True)][5:]
    median = float(np.median(ratios_of_pairs))
    print(
        f"{len(ratios_of_pairs)} pairs of steps: median of ratios {median:.4f}, {1e3 * plain_seconds:.1f} ms and "
        f"{1e3 * judged_seconds:.1f} ms; equal in every bit: {outputs[0] == outputs[1]}",
        flush=True,
    )
    return median


def main() -> None:
    """Print the largest ratio of each recipe, and its step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a few steps of one recipe: shows that it works")
    arguments = parser.parse_args()
    if arguments.cost:
        cost(arguments.steps)
        return
    import large_batch_digits as large

    series: dict[str, Any] = {name: (lambda name=name: ratios(name, arguments.steps)) for name in (*NAMES, ONE_BIT)}
    series |= {way.name: (lambda way=way: large_batch_ratios(way)) for way in large.WAYS}
    if arguments.tiny:
        series = {"digits_vit": lambda: ratios("digits_vit", 3)}
    print(f"{'recipe':32} {'largest':>9} {'in step':>8} {'median':>9}")
    figures = []
    for name in arguments.only or series:
        ratio_by_step = list(series[name]())
        largest, step = max(ratio_by_step), int(np.argmax(ratio_by_step)) + 1
        print(f"{name:32} {largest:9.4f} {step:8} {np.median(ratio_by_step):9.5f}", flush=True)
        figures.append(Figure(f"{name}: largest update / parameters", largest, "x"))
    show(figures, "Updates beside the parameters")


if __name__ == "__main__":
    main()
