"""Training steps of a vision transformer and a ResNet-18 beside the same models in eager PyTorch.

    python experiments/benchmarks/vision_peer.py [--tiny] [--rounds 3] [--torch PYTHON]

Images of 32 x 32 pixels, 32 a step, AdamW, clipped gradients, float32. Both sides run in processes of their own, in
turns: wall seconds with all cores, and processor seconds of both sides with one core and one thread (one device).
PyTorch computes the convolutions in its channels-last layout, which is the faster one; jaxscale has the number of
threads of `jaxscale train`. A ratio is PyTorch's median step over jaxscale's; the median over the rounds is compared
with the bar, and the smallest and the largest are printed. The layers of the ViT are unrolled, as in `peer.py`. Without
an interpreter that has torch (`--torch`; this one by default), jaxscale's seconds alone are printed.
"""

import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from figures import Figure, figures_of_command, show

HERE = Path(__file__).resolve().parent
BARS = {"ViT 6 x 256": 1.0, "ResNet-18": 0.95}
"""Bars of the ratios, in wall and in processor seconds."""
CASES: dict[str, dict[str, Any]] = {
    "ViT 6 x 256": {"batch": 32, "image": 32, "layers": 6, "embed": 256, "heads": 4, "patch": 4, "pooling": "mean"},
    "ResNet-18": {"batch": 32, "image": 32, "stages": (2, 2, 2, 2), "width": 64, "stem": "small"},
    "tiny ViT": {"batch": 4, "image": 16, "layers": 2, "embed": 32, "heads": 2, "patch": 8, "pooling": "mean"},
}
WARM = 5


def train(name: str, steps: int, threads: int) -> dict[str, Any]:
    """Train on random images with jaxscale; return the seconds of each step, wall and processor."""
    if threads == 1:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    import jax
    import numpy as np
    from flax import nnx

    import jaxscale as jx
    from jaxscale.platforms.cpu_threads import limit_loop_depth
    from jaxscale.recipe.loop_depth import loop_depth_of
    from jaxscale.training.backend import start_backend

    sizes = dict(CASES[name])
    batch_size, image = sizes.pop("batch"), sizes.pop("image")
    if "patch" in sizes:
        model: Any = jx.models.ViT(classes=10, image=image, **sizes)
        plan = jx.Plan(unroll=model.layers)
    else:
        model, plan = jx.models.ResNet(classes=10, **sizes), jx.Plan()
    rng = np.random.default_rng(0)
    batch = {
        "images": rng.random((batch_size, image, image, 3), np.float32),
        "labels": rng.integers(0, 10, batch_size, dtype=np.int32),
    }
    optimizer = jx.Optimizer(learning_rate=1e-3, warmup=0)
    experiment = jx.Experiment(
        name="vision", model=model, data=batch, steps=steps, batch=batch_size, optimizer=optimizer, plan=plan
    )
    limit_loop_depth(loop_depth_of(experiment))
    start_backend()
    step = jx.build(experiment)
    state = step.init()
    seconds: dict[str, list[float]] = {"wall": [], "processor": []}
    metrics: Any = {}
    for _ in range(steps):
        start = time.perf_counter(), time.process_time()
        state, metrics = step(state, step.place(batch))
        jax.block_until_ready((state, metrics))
        seconds["wall"].append(time.perf_counter() - start[0])
        seconds["processor"].append(time.process_time() - start[1])
    parameters = jax.tree.leaves(nnx.state(step.module(state), nnx.Param))
    parameter_count = sum(leaf.size for leaf in parameters)
    device_count = len(parameters[0].sharding.device_set)
    return {**seconds, "loss": float(metrics["loss"]), "parameters": parameter_count, "devices": device_count}


def measure(name: str, peer: str | None, rounds: int, steps: int) -> list[Figure]:
    """Return the figures of a case, in wall seconds and in processor seconds."""
    figures = []
    for kind, thread_count in (("wall", len(os.sched_getaffinity(0))), ("processor", 1)):
        own_seconds, ratios = [], []
        for turn in range(rounds):
            words = [name, str(steps), str(thread_count)]
            own_result = figures_of_command([sys.executable, __file__, "--train", *words])
            own_seconds.append(statistics.median(own_result[kind][WARM:]))
            line = f"{name}, {kind}, round {turn + 1}: {1000 * own_seconds[-1]:.1f} ms"
            line += f" on {own_result['devices']} device(s)"
            if peer is not None:
                peer_result = figures_of_command([peer, str(HERE / "vision_torch.py"), *words])
                peer_seconds = statistics.median(peer_result[kind][WARM:])
                ratios.append(peer_seconds / own_seconds[-1])
                line += f", PyTorch {1000 * peer_seconds:.1f} ms, {ratios[-1]:.2f}x; parameters "
                line += f"{own_result['parameters']:,} and {peer_result['parameters']:,}"
            print(line, flush=True)
        figures.append(Figure(f"{name}: {kind} time of a step", 1000 * statistics.median(own_seconds), "ms"))
        if ratios:
            print(f"{name}, {kind}: {min(ratios):.2f}x to {max(ratios):.2f}x", flush=True)
            figures.append(
                Figure(f"{name}: {kind}, PyTorch / jaxscale", statistics.median(ratios), "x", BARS.get(name), ">=")
            )
    return figures


def main() -> None:
    """Print the table; exit with 1 if a bar does not hold at full size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model: shows that it works, not the figures")
    parser.add_argument("--rounds", type=int, default=3, help="turns of both sides (default: 3)")
    parser.add_argument("--torch", default=None, metavar="PYTHON", help="an interpreter that has torch")
    parser.add_argument("--case", action="append", choices=BARS, help="one case; may be repeated (default: all)")
    parser.add_argument("--train", nargs=3, metavar=("NAME", "STEPS", "THREADS"))
    arguments = parser.parse_args()
    if arguments.train is not None:
        print(json.dumps(train(arguments.train[0], *map(int, arguments.train[1:]))))
        return
    peer = arguments.torch or (sys.executable if importlib.util.find_spec("torch") else None)
    print(f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    cases = ["tiny ViT"] if arguments.tiny else (arguments.case or list(BARS))
    rounds, steps = (1, WARM + 3) if arguments.tiny else (arguments.rounds, WARM + 25)
    figures = [figure for case in cases for figure in measure(case, peer, rounds, steps)]
    if not show(figures, "Training steps of vision models and their peers") and not arguments.tiny:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
