"""Order of plans by modeled seconds beside the order by measured ones, on one processor core.

    taskset -c 1 python experiments/benchmarks/plan_order.py            # 20 plans of each of three models, 12 minutes
    taskset -c 1 python experiments/benchmarks/plan_order.py --drawn 7  # of three models drawn by a seed
    taskset -c 1 python experiments/benchmarks/plan_order.py --fitted   # of the four models to which rates were fitted
    python experiments/benchmarks/plan_order.py --tiny                  # three plans of one small model

Plans of one device differ in memory rule, microbatches, chunks of the loss and formats of the optimizer state. Their
steps are timed in turns, by processor seconds, and the median of the rounds counts. Spearman's coefficient compares the
two orders: 1 if they are equal, about 0 if they are unrelated. The coefficient of the odd and the even rounds shows how
far the machine repeats its own order. The ratio of modeled to measured seconds has no bar: the assumed rates are those
of one processor (`jaxscale/platforms/processor.py`). `MALLOC_TRIM_THRESHOLD_=131072` before the command shows the
steps of a process that returns freed memory to the kernel (`jaxscale/platforms/cpu_memory.py`).
"""

import argparse
import random
import statistics
import time
from typing import Any

import jax
import numpy as np
from figures import Figure, show

import jaxscale as jx
from jaxscale.planning.search.step_seconds import modeled_seconds

ROUNDS = 6
PARTS = (slice(None), slice(0, None, 2), slice(1, None, 2))
"""All rounds, the odd ones and the even ones."""
BAR = 0.8
MEMORY: tuple[dict[str, Any], ...] = tuple({"memory": rule} for rule in ("none", "dots", "full", "sqrt"))
PLANS: tuple[dict[str, Any], ...] = (
    *MEMORY,
    *({"memory": f"save:{budget}MiB"} for budget in (6, 8, 12, 16)),
    *({"microbatches": count, "memory": rule} for count in (2, 4, 8) for rule in ("none", "full")),
    *({"state": jx.StatePlan(moments=moments)} for moments in ("int8", "int4")),
    {"memory": "full", "state": jx.StatePlan(moments="int8")},
    {"microbatches": 2, "memory": "dots"},
    {"microbatches": 4, "memory": "save:4MiB"},
    {"microbatches": 8, "state": jx.StatePlan(moments="int8")},
)
CHUNKS: tuple[dict[str, Any], ...] = ({"kernels": "auto,loss_chunk=32"}, {"kernels": "auto,loss_chunk=64"})


def experiments(is_tiny: bool) -> list[jx.Experiment]:
    """Return the experiments, whose data are never read."""
    text = jx.data.Text("text.txt", context=128)
    if is_tiny:
        model: Any = jx.models.Decoder(vocab=64, context=128, layers=2, embed=32, heads=2)
        return [jx.Experiment("small", model, text, batch=8)]
    llama = jx.models.Decoder(vocab=512, context=128, layers=6, embed=256, heads=4)
    gpt = jx.models.Decoder(
        vocab=4096,
        context=128,
        layers=4,
        embed=192,
        heads=6,
        mlp_kind="gelu",
        norm="layer",
        positions="learned",
        tied=True,
    )
    vit = jx.models.ViT(image=32, patch=4, classes=10, layers=6, embed=192, heads=3)
    return [
        jx.Experiment("llama", llama, text, batch=8),
        jx.Experiment("gpt", gpt, text, batch=8),
        jx.Experiment("vit", vit, images(8), batch=8),
    ]


def fitted_experiments() -> list[jx.Experiment]:
    """Return the experiments to which the assumed rates of a processor were fitted."""
    text = jx.data.Text("text.txt", context=128)
    plain = {"context": 128, "heads": 4, "mlp_kind": "gelu", "norm": "layer"}
    decoders = {
        "small_vocab": jx.models.Decoder(vocab=256, layers=8, embed=128, **plain),
        "wide_blocks": jx.models.Decoder(vocab=1024, context=128, layers=4, embed=384, heads=6),
        "large_vocab": jx.models.Decoder(vocab=8192, layers=3, embed=128, tied=True, **plain),
    }
    vit = jx.models.ViT(image=32, patch=4, classes=10, layers=4, embed=256, heads=4)
    batches = {"small_vocab": 16, "wide_blocks": 8, "large_vocab": 8}
    return [
        *(jx.Experiment(name, model, text, batch=batches[name]) for name, model in decoders.items()),
        jx.Experiment("wide_vit", vit, images(16), batch=16),
    ]


def drawn_experiments(seed: int) -> list[jx.Experiment]:
    """Return two decoders and a ViT whose sizes are drawn by a seed."""
    rng = random.Random(seed)
    text = jx.data.Text("text.txt", context=128)
    decoders: list[jx.Experiment] = []
    for number in (1, 2):
        is_gated = rng.random() < 0.5
        model = jx.models.Decoder(
            vocab=rng.choice([512, 2048, 6144]),
            context=128,
            layers=rng.choice([3, 5, 7]),
            embed=rng.choice([128, 256, 320]),
            heads=4,
            mlp_kind="swiglu" if is_gated else "gelu",
            norm="rms" if is_gated else "layer",
            tied=rng.random() < 0.5,
        )
        decoders.append(jx.Experiment(f"decoder_{number}", model, text, batch=rng.choice([8, 16])))
        print(f"decoder_{number}: {model}, batch {decoders[-1].batch}")
    vit = jx.models.ViT(
        image=32, patch=4, classes=10, layers=rng.choice([3, 5, 8]), embed=rng.choice([128, 256]), heads=4
    )
    batch = rng.choice([8, 16])
    print(f"vit: {vit}, batch {batch}")
    return [*decoders, jx.Experiment("vit", vit, images(batch), batch=batch)]


def images(count: int) -> jx.data.Arrays:
    """Return images and labels, which are never read."""
    return jx.data.Arrays({"images": np.zeros((count, 32, 32, 3), np.float32), "labels": np.zeros(count, np.int32)})


def timed(experiment: jx.Experiment, plans: list[jx.Plan]) -> list[list[float]]:
    """Return the processor seconds of a step of each plan in each round, in turns."""
    from jaxscale.state.batches import batch_shapes

    shapes = batch_shapes(experiment)
    batch = {name: np.zeros(each.shape, each.dtype) for name, each in shapes.items()}
    steps = [jx.build(experiment, plan) for plan in plans]
    states = [step.init() for step in steps]
    placed = [step.place(batch) for step in steps]
    seconds: list[list[float]] = [[] for _ in plans]
    for turn in range(ROUNDS + 1):
        for index, step in enumerate(steps):
            start = time.process_time()
            states[index], metrics = step(states[index], placed[index])
            jax.block_until_ready(metrics)
            if turn:  # the first one compiles
                seconds[index].append(time.process_time() - start)
    return seconds


def median_ratio(modeled: list[float], measured: list[float]) -> float:
    """Return the median of the ratios of modeled to measured seconds."""
    return statistics.median(model / measurement for model, measurement in zip(modeled, measured, strict=True))


def spearman(first: list[float], second: list[float]) -> float:
    """Return Spearman's rank correlation of two lists of numbers."""
    return float(np.corrcoef(ranks(first), ranks(second))[0, 1])


def ranks(values: list[float]) -> list[float]:
    """Return the rank of each number, from 0 on; equal numbers have the mean of their ranks."""
    return [sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values]


def main() -> bool:
    """Print the table, and return whether every figure reaches its bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = parser.add_mutually_exclusive_group()
    models.add_argument("--tiny", action="store_true", help="three plans of one small model")
    models.add_argument("--fitted", action="store_true", help="the models to which the assumed rates were fitted")
    models.add_argument("--drawn", type=int, metavar="SEED", help="models whose sizes are drawn by this seed")
    arguments = parser.parse_args()
    platform, figures = jx.Platform.parse("cpu"), []
    chosen = fitted_experiments() if arguments.fitted else experiments(arguments.tiny)
    for experiment in chosen if arguments.drawn is None else drawn_experiments(arguments.drawn):
        is_text = isinstance(experiment.model, jx.models.Decoder)
        fields = MEMORY[:3] if arguments.tiny else (*PLANS[: 20 - 2 * is_text], *(CHUNKS if is_text else ()))
        plans = [jx.Plan(mesh="1", **each) for each in fields]
        modeled = [modeled_seconds(experiment, platform, plan).total for plan in plans]
        rounds = timed(experiment, plans)
        measured, odd, even = ([statistics.median(each[part]) for each in rounds] for part in PARTS)
        print(f"\n{experiment.name:45}{'modeled':>10}{'measured':>10}, over the least")
        for each, model, measurement in zip(fields, modeled, measured, strict=True):
            text = ", ".join(f"{name} {value}" for name, value in each.items())
            print(f"  {text:43}{model / min(modeled):9.2f}x{measurement / min(measured):9.2f}x")
        coefficient = spearman(modeled, measured)
        figures += [
            Figure(f"{experiment.name}_plans", len(plans), "plans"),
            Figure(f"{experiment.name}_spearman", coefficient, "", None if arguments.tiny else BAR, ">="),
            Figure(f"{experiment.name}_repeated_spearman", spearman(odd, even), ""),
            Figure(f"{experiment.name}_modeled_over_measured", median_ratio(modeled, measured), "times"),
            Figure(f"{experiment.name}_step", measured[0], "processor s"),
        ]
    return show(figures, "order of plans, modeled and measured")


if __name__ == "__main__":
    raise SystemExit(0 if main() else 1)
